"""The results of a sweep: one table of all scores, and the learning curves of all settings in one graph."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.output import counted
from jaxrl_atari.report.aggregates import missing_intervals, normalised, statistics_by_name, statistics_rows
from jaxrl_atari.report.graphs import plot_comparison
from jaxrl_atari.report.score_statistics import INTERVALS_NOTE
from jaxrl_atari.report.suites import GameRow, Suite, SuiteResults, shown_columns
from jaxrl_atari.report.tables import Table, markdown_table
from jaxrl_atari.report.text import difference_text
from jaxrl_atari.runs.files import write_file, write_json
from jaxrl_atari.runs.layout import GRAPHS_FOLDER, RESULTS_FILE
from jaxrl_atari.suite.sweep import SweepPlan
from jaxrl_atari.suite.vary import value_text

TABLE_COLUMNS = (
    "sessions", "env_steps", "score", "score_std", "score_low", "score_high", "return_mean",
    "human_normalised_score", "hours", "status",
)  # fmt: skip
"""Columns of the table of a sweep, after the game and the fields that vary: fields of `GameRow`."""

SWEEP_NOTE = (
    "score: `return_ma` at the end, mean and sample standard deviation over the sessions that count, and the 95% "
    "interval of the mean (from 3 sessions on). Where intervals overlap, the table does not rank the settings. "
    "The best of several owes a part of its score to chance: train it again with other seeds (--seed) before you "
    "quote it."
)


class SweepRow(NamedTuple):
    """A row of the table of a sweep: a game under a setting."""

    fields: dict[str, Any]  # dotted name of a field that varies -> its value
    game_row: GameRow  # the row in the table of the setting's suite


class SweepResults(NamedTuple):
    """The results of a sweep."""

    path: Path
    plan: SweepPlan
    by_label: Mapping[str, SuiteResults]  # label of a setting -> the results of its suite
    rows: list[SweepRow]  # the settings of each game beside each other

    def to_json(self) -> dict[str, Any]:
        """The content of results.json."""
        return {
            "vary": self.plan.vary,
            "games": [{"game": row.game_row.game, **row.fields, **_row_values(row.game_row)} for row in self.rows],
            "differences": self.differences(),
            "settings": {label: results.to_json() for label, results in self.by_label.items()},
        }

    def table(self, titles: Mapping[str, str] | None = None) -> Table:
        """The table of the sweep. The value None of a field is `none`.

        Args:
            titles: `GameRow` field -> title; None: each is its own title, as in results.csv.
        """
        names = ["game", *self.plan.vary, *TABLE_COLUMNS]
        titles = {name: name for name in names} if titles is None else titles
        rows = [
            {"game": row.game_row.game}
            | {name: value_text(value) for name, value in row.fields.items()}
            | _row_values(row.game_row)
            for row in self.rows
        ]
        columns = {name: titles.get(name, name) for name in names if name in titles or name in self.plan.vary}
        return Table(columns, rows)

    def differences(self) -> list[str]:
        """The difference of each setting's score from that of the first setting, game by game, in words."""
        first, *others = self.by_label
        return [
            f"{game}: {text}"
            for game in self.plan.games
            for label in others
            if (text := difference_text({each: self._scores(each, game) for each in (label, first)}))
        ]

    def _scores(self, label: str, game: str) -> list[float]:
        """The scores of the sessions of a game that count under a setting."""
        summary = self.by_label[label].suite.summaries.get(game)
        return [] if summary is None else summary["session_scores"]

    def to_markdown(self) -> str:
        """The content of results.md."""
        plan = self.plan
        settings = f"{counted(len(self.by_label), 'setting')} of {', '.join(plan.vary)}"
        count = f"{settings}, {counted(len(plan.games), 'game')}"
        sessions = f"{counted(plan.config.sessions, 'session')} of {plan.config.total_env_steps:,} env steps each"
        parts = [
            f"# {self.path.absolute().name}: {count}, {sessions}",
            # "ours" has no reference beside it here
            self.table(shown_columns(plan.config.total_env_steps) | {"score": "score"}).to_markdown(),
            *self.differences(),
            SWEEP_NOTE,
        ]
        if len(plan.games) > 1:
            parts += _aggregate_parts(self.by_label)
        return "\n\n".join(parts) + "\n"


def _row_values(row: GameRow) -> dict[str, Any]:
    """The values of a row in `TABLE_COLUMNS`."""
    return {name: getattr(row, name) for name in TABLE_COLUMNS}


def sweep_results(sweep_dir: Path, plan: SweepPlan, by_label: Mapping[str, SuiteResults]) -> SweepResults:
    """Makes the results of a sweep from the results of its suites; reads and writes nothing."""
    rows = [
        SweepRow(setting.fields, row)
        for game in plan.games
        for setting in plan.settings
        for row in by_label[setting.label].rows
        if row.game == game
    ]
    return SweepResults(sweep_dir, plan, by_label, rows)


def _aggregate_parts(by_label: Mapping[str, SuiteResults]) -> list[str]:
    """The table of human-normalised aggregates over the games that are complete in every setting.

    Empty if there is no such game with a human score, or if the settings differ in their protocols.
    """
    protocols = {results.protocol for results in by_label.values()}
    scores = {label: results.scores for label, results in by_label.items()}
    shared = sorted(set.intersection(*(set(games) for games in scores.values())))
    if len(protocols) > 1 or not shared:
        return []
    (protocol,) = protocols
    shared_scores = {
        label: normalised({game: games[game] for game in shared}, protocol)["human-normalised"]
        for label, games in scores.items()
    }
    aggregates = statistics_by_name(shared_scores)
    if not aggregates:
        return []
    table = markdown_table(statistics_rows(aggregates, "human-normalised, over the complete games"))
    return [table, *missing_intervals(aggregates), INTERVALS_NOTE]


def save_sweep_results(results: SweepResults) -> None:
    """Writes results.md, results.csv and results.json of a sweep."""
    write_json(results.path / RESULTS_FILE, results.to_json())
    results.table().write_csv(results.path / "results.csv")
    write_file(results.path / "results.md", results.to_markdown())


def draw_sweep(sweep_dir: Path, suites: Mapping[str, Suite]) -> list[Path]:
    """Draws the learning curves of all settings, with a panel for each game.

    Args:
        suites: label of a setting -> its suite, in the order of the legend.

    Returns:
        The files; none before a session has a log point.
    """
    runs = [(label, run) for label, suite in suites.items() for run in suite.runs.values()]
    return plot_comparison(runs, sweep_dir / GRAPHS_FOLDER) if runs else []
