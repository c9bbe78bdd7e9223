"""The record of results: scores.csv, curves/, and what the documentation shows of them.

    python benchmarks/make_results.py [RUN_DIR... --hardware "AMD EPYC, 2 cores"]

writes a row of scores.csv for each session of the runs, finished or not, and its metrics.csv, thinned to 200 rows,
into curves/. Then, also without a run, it makes from scores.csv the results tables of README.md and
docs/reproduce.md and the picture docs/images/results.png. The row of a session that is known already (same game,
protocol, budget, seed, arithmetic, weight decay and commit) is replaced.
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro
from matplotlib.axes import Axes
from scipy import stats

from jaxrl_atari import cli
from jaxrl_atari.envs.games import game_under
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.graphs import COLOURS, default_style, finish_returns, new_figure
from jaxrl_atari.report.metrics import session_metrics
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.report.tables import markdown_table, number_text
from jaxrl_atari.report.text import interval_text
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import session_number

ROOT = Path(__file__).resolve().parents[1]
COLUMNS: tuple[str, ...] = (
    "game", "budget", "seed", "env_steps", "return_ma", "return_mean", "hours", "sps", "compute_dtype", "hardware",
    "commit", "protocol", "weight_decay",
)  # fmt: skip
CURVE_ROWS = 200
PUBLISHED_BUDGET = 10_000_000
"""The budget of the references, in env steps."""
ROLLOUT = 2048
"""Env steps of a rollout. A session has finished if less than a rollout is missing."""
START, END = "<!-- results: made by benchmarks/make_results.py -->", "<!-- end of results -->"

Row = dict[str, str]


def key(row: Row) -> tuple[str, ...]:
    """What identifies a session."""
    names = ("game", "protocol", "budget", "seed", "compute_dtype", "weight_decay", "commit")
    return tuple(row[name] for name in names)


def curve_file(folder: Path, row: Row) -> Path:
    """The learning curve of a session."""
    return folder / "curves" / f"{'_'.join(key(row))}.csv"


def read_rows(folder: Path) -> list[Row]:
    """The rows of scores.csv."""
    path = folder / "scores.csv"
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []


def add_run(folder: Path, run_dir: Path, hardware: str) -> None:
    """Adds the sessions of a run to scores.csv and curves/, or replaces what is there of them.

    Raises:
        UserError: not a run directory, no finished game yet, or metrics that cannot be read.
    """
    run = read_run(run_dir)
    revision = run.description.get("git_revision") or "unknown"  # of the start
    commit = revision[:7]
    if revision.endswith("+"):  # a checkout with changes
        commit += "+"
    rows = {key(row): row for row in read_rows(folder)}
    (folder / "curves").mkdir(exist_ok=True)
    for session_dir, table in run.tables.items():
        figures = session_metrics(table, run.game)
        if figures["final_return_ma"] is None:
            raise UserError(f"{session_dir}: no game has ended yet; wait for the first one")
        row = {
            "game": run.game.name,
            "budget": str(run.config.total_env_steps),
            "seed": str(run.config.seed + session_number(session_dir)),
            "env_steps": f"{figures['env_steps']:.0f}",
            "return_ma": f"{figures['final_return_ma']:.6g}",
            "return_mean": f"{figures['final_return_mean']:.6g}",
            "hours": f"{figures['wall_hours']:.2f}",
            "sps": f"{figures['sps']:.0f}",
            "compute_dtype": run.config.network.compute_dtype,
            "hardware": hardware,
            "commit": commit,
            "protocol": run.protocol,
            "weight_decay": f"{run.config.ppo.weight_decay:g}",
        }
        rows[key(row)] = row
        write_file(curve_file(folder, row), thinned((session_dir / "metrics.csv").read_text(encoding="utf-8")))
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[found] for found in sorted(rows))
    write_file(folder / "scores.csv", text.getvalue())


def thinned(metrics: str) -> str:
    """A metrics.csv with at most `CURVE_ROWS` of its rows, evenly spaced, the first and the last included."""
    header, *rows = [line for line in metrics.splitlines(keepends=True) if line.endswith("\n")]
    kept = np.unique(np.linspace(0, len(rows) - 1, CURVE_ROWS).round().astype(int))
    return header + "".join(rows[i] for i in kept)


def session_table(rows: Sequence[Row]) -> str:
    """Markdown: a row for each session, under the names of the columns of scores.csv."""

    def cells(row: Row) -> list[str]:
        scores = {name: number_text(float(row[name])) for name in ("return_ma", "return_mean")}
        steps = {name: f"{int(row[name]):,}" for name in ("budget", "env_steps")}
        return list((row | scores | steps).values())

    return markdown_table([[f"`{name}`" for name in COLUMNS], *map(cells, rows)])


def groups(rows: Sequence[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """The rows that have equal values in some columns."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def finished(rows: Sequence[Row]) -> list[Row]:
    """The rows of the sessions that have spent their budgets."""
    return [row for row in rows if int(row["env_steps"]) > int(row["budget"]) - ROLLOUT]


def game_table(rows: Sequence[Row]) -> str:
    """Markdown: a row for each game, protocol, weight decay and budget, those with the most sessions first.

    It is over the finished sessions or, if there are none, over the one with the most env steps. Each source of a
    reference has a column, in which only rows of the published budget have an entry. A column without content is
    left out.
    """
    found: list[dict[str, str]] = []
    together = groups(rows, "game", "protocol", "weight_decay", "budget")
    for (game, protocol, weight_decay, budget), sessions in sorted(
        together.items(), key=lambda group: -len(finished(group[1]))
    ):
        shown = finished(sessions) or [max(sessions, key=lambda row: float(row["env_steps"]))]
        scores = [float(row["return_ma"]) for row in shown]
        known = game_under(game, protocol)
        cells = {
            "game": game,
            "protocol": protocol,
            "weight decay": weight_decay,
            "sessions": str(len(shown)),
            "env steps": f"{float(shown[0]['env_steps']) / 1e6:.3g}M of {float(budget) / 1e6:.3g}M",
            "`return_ma`": number_text(float(np.mean(scores))),
            "interval": interval_text(scores),
            "random play": number_text(known.random.score) if known.random else "",
        }
        if int(budget) == PUBLISHED_BUDGET:
            cells |= {each.source.partition(" (")[0]: number_text(each.score) for each in known.references}
        found.append(cells)
    header = dict.fromkeys(["game", *(name for cells in found for name, text in cells.items() if text)])
    return markdown_table([[*header], *([cells.get(name) or "-" for name in header] for cells in found)])


def replace_table(page: Path, table: str) -> None:
    """Replaces what stands between the two marks of a page.

    Raises:
        UserError: the page lacks the marks.
    """
    text = page.read_text(encoding="utf-8")
    between = f"{re.escape(START)}.*?{re.escape(END)}"
    found, count = re.subn(between, lambda _: f"{START}\n\n{table}\n\n{END}", text, flags=re.S)
    if count != 1:
        raise UserError(f"{page}: expected the line {START} and, after it, {END}, once each; add them")
    write_file(page, found)


@default_style()
def draw(folder: Path, rows: Sequence[Row], path: Path) -> None:
    """Draws the learning curves, a panel for each row of `game_table` that has one, with the reference lines."""
    rows = [row for row in rows if curve_file(folder, row).is_file()]
    panels = groups(rows, "game", "protocol", "budget", "weight_decay")
    columns = min(len(panels), 2)
    height = -(-len(panels) // columns)
    title = "return_ma (thin: mean return of the last 100 games; band: 95% interval of the mean over sessions)"
    figure = new_figure(title, 6 * columns, 4.6 * height)
    for index, ((game, protocol, budget, weight_decay), sessions) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(height, columns, index)
        if len(finished(sessions)) >= 3:
            draw_band(axes, folder, finished(sessions))
        else:
            draw_sessions(axes, folder, sessions)
        known = game_under(game, protocol)
        finish_returns(axes, known if int(budget) == PUBLISHED_BUDGET else known._replace(references=()))
        axes.set_xlim(0, int(budget))
        axes.set_title(f"{game}, protocol {protocol}, weight decay {weight_decay}")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    write_file(path, image.getvalue())


def draw_sessions(axes: Axes, folder: Path, sessions: Sequence[Row]) -> None:
    """Draws each session by itself."""
    for row, colour in zip(sessions, COLOURS, strict=False):
        label = f"seed {row['seed']}, {row['compute_dtype']}"
        curve = np.genfromtxt(curve_file(folder, row), delimiter=",", names=True)
        axes.plot(curve["env_steps"], curve["return_mean"], color=colour, alpha=0.4, linewidth=0.8)
        axes.plot(curve["env_steps"], curve["return_ma"], color=colour, linewidth=2)
        end = float(row["env_steps"]), float(row["return_ma"])
        axes.plot(*end, "o", color=colour, clip_on=False, zorder=3, label=label)


def draw_band(axes: Axes, folder: Path, sessions: Sequence[Row]) -> None:
    """Draws the mean over sessions and its t interval, at the env steps that all sessions have reached."""
    curves = [np.genfromtxt(curve_file(folder, row), delimiter=",", names=True) for row in sessions]
    first = max(curve["env_steps"][np.isfinite(curve["return_ma"])][0] for curve in curves)
    steps = np.linspace(first, min(curve["env_steps"][-1] for curve in curves), CURVE_ROWS)
    returns = np.array([np.interp(steps, curve["env_steps"], curve["return_ma"]) for curve in curves])
    mean = returns.mean(axis=0)
    error = stats.t.ppf(0.975, len(curves) - 1) * stats.sem(returns, axis=0)
    for row, curve in zip(sessions, curves, strict=True):
        label = f"seeds {', '.join(row['seed'] for row in sessions)}" if row is sessions[0] else None
        axes.plot(
            curve["env_steps"], curve["return_mean"], color=COLOURS[0], alpha=0.4, linewidth=0.8, label=label
        )
    label = f"mean of {len(curves)} sessions, {sessions[0]['compute_dtype']}"
    axes.plot(steps, mean, color=COLOURS[0], linewidth=2, label=label)
    axes.fill_between(steps, mean - error, mean + error, color=COLOURS[0], alpha=0.2)


def make(root: Path = ROOT) -> None:
    """Makes the tables and the picture from scores.csv."""
    rows = read_rows(root / "benchmarks")
    replace_table(root / "README.md", game_table(rows))
    replace_table(root / "docs" / "reproduce.md", session_table(rows))
    draw(root / "benchmarks", rows, root / "docs" / "images" / "results.png")


def main(run_dirs: tyro.conf.Positional[tuple[Path, ...]] = (), hardware: str = "") -> None:
    """Adds runs to the record of results, and makes the tables and the picture of the documentation from it.

    Args:
        run_dirs: directories of runs to add
        hardware: what they were trained on, for example 'AMD EPYC, 2 cores'
    """
    if run_dirs and not hardware:
        raise UserError("--hardware: missing; name what the runs were trained on, for example 'AMD EPYC, 2 cores'")
    for run_dir in run_dirs:
        add_run(ROOT / "benchmarks", run_dir, hardware)
    make()


if __name__ == "__main__":
    cli.run(lambda: tyro.cli(main))
