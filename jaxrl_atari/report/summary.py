"""A run as it was read from its directory, and the summary of its trial, RUN_DIR/trial.json."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from jaxrl_atari.config import Config, changed_fields
from jaxrl_atari.envs.games import Game, game_under
from jaxrl_atari.errors import require
from jaxrl_atari.report.metrics import (
    SESSION_METRICS,
    align_sessions,
    consistency,
    human_normalised,
    known_float,
    random_score,
    reference_normalised,
    session_metrics,
)
from jaxrl_atari.report.score_statistics import score_interval
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.files import read_json
from jaxrl_atari.runs.layout import CONFIG_FILE, session_number
from jaxrl_atari.runs.progress import return_ma_window
from jaxrl_atari.runs.reading import (
    EarlyEnd,
    Table,
    read_early_end,
    read_sessions,
    require_own_seed,
)

FREE_FIELDS = ("seed", "sessions", "name", "output_dir", "devices", "trial", "log", "evaluation")
"""Fields of the config in which the runs of a merged trial may differ."""


@dataclass(frozen=True)
class Run:
    """The content of a run directory at the time when it was read."""

    path: Path
    config: Config
    tables: dict[Path, Table]  # session directory -> its metrics
    description: dict[str, Any]  # the content of config.json
    early_ends: dict[Path, EarlyEnd]  # session directory -> its early end, if it has one under the run's budget
    seeds: dict[Path, int]  # session directory -> its seed

    def session_name(self, session_dir: Path) -> str:
        """The name of a session: `session_0`; in a merged run, with its own run: `qbert_b/session_0`."""
        if session_dir.parent == self.path:
            return session_dir.name
        together = os.path.commonpath([path.absolute().parent.parent for path in self.tables])
        return str(session_dir.absolute().relative_to(together))

    @property
    def protocol(self) -> str:
        """The protocol, as it is shown beside a score."""
        return self.config.env.resolved_protocol

    @property
    def game(self) -> Game:
        """The game, with the reference scores of the run's protocol."""
        return game_under(self.config.env.game_name, self.protocol)

    @property
    def return_ma_definition(self) -> str:
        """The definition of the run's `return_ma`."""
        return f"mean over the last {return_ma_window(self.config.total_env_steps):,} env steps"

    def is_finished(self, session_dir: Path) -> bool:
        """Whether a session has spent its budget, or was ended early (`EarlyEnd`).

        Args:
            session_dir: its directory, a key of `tables`.
        """
        return session_dir in self.early_ends or self.config.is_spent(self.tables[session_dir]["env_steps"][-1])

    @cached_property
    def members(self) -> "Members":
        """The sessions that count, chosen so that all of them are compared at the same env steps.

        - Once a session has finished, the finished sessions count: those that have spent their budget, and those
          ended early. The curve of the latter keeps its last value.
        - Before that, sessions that have come at least half as far as the furthest one count. Their log points are
          cut at the env steps that all of them have reached.

        One of these without a finished game has no score and is left out, unless none of them has one.
        """
        reached = {path: float(table["env_steps"][-1]) for path, table in self.tables.items()}
        finished = [path for path in self.tables if self.is_finished(path)]
        compared = finished or [path for path in self.tables if 2 * reached[path] >= max(reached.values())]
        common = None if finished else min(reached[path] for path in compared)
        tables = {path: self.tables[path] for path in compared}
        if common is not None:  # the first log points of two sessions may lie a few env steps apart
            for path, table in tables.items():
                kept = table["env_steps"] <= max(common, table["env_steps"][0])
                tables[path] = {name: column[kept] for name, column in table.items()}
        scored = [path for path in compared if np.isfinite(tables[path]["return_ma"]).any()]
        left_out = {}
        for path, env_steps in reached.items():
            if path not in compared:
                left_out[path] = f"unfinished, at {env_steps:,.0f} of {self.config.total_env_steps:,} env steps"
            elif scored and path not in scored:
                left_out[path] = f"no finished game up to {tables[path]['env_steps'][-1]:,.0f} env steps"
        return Members({path: tables[path] for path in scored or compared}, left_out, common)

    @cached_property
    def summary(self) -> "TrialSummary":
        """The metrics of the trial.

        Its `consistency` is over the log points at which every member has a finished game.
        """
        game = self.game
        members = self.members
        sessions: list[dict[str, Any]] = [
            {"session": self.session_name(path), "seed": self.seeds[path], **session_metrics(table, game)}
            for path, table in members.tables.items()
        ]
        means: dict[str, float | None] = dict.fromkeys(SESSION_METRICS)
        stds: dict[str, float | None] = dict.fromkeys(SESSION_METRICS)
        for name in SESSION_METRICS:
            values = [each[name] for each in sessions]
            if None not in values:
                means[name] = float(np.mean(values))
                stds[name] = float(np.std(values, ddof=1)) if len(values) > 1 else None
        score = means["final_return_ma"]
        scores = [each["final_return_ma"] for each in sessions if each["final_return_ma"] is not None]
        if stds["stability"] is not None:
            _, returns = align_sessions(list(members.tables.values()), "return_mean")
            shared = returns[:, np.isfinite(returns).all(axis=0)]
            means["consistency"] = known_float(consistency(shared - random_score(game)))
        return TrialSummary(
            name=self.config.name,
            game=game.name,
            protocol=self.protocol,
            complete=len(self.tables) >= self.config.sessions and all(map(self.is_finished, self.tables)),
            unfinished_games=unfinished_games(self) if score is None else None,
            stopped={
                self.session_name(path): {"env_steps": end.env_steps, "reason": end.reason}
                for path, end in self.early_ends.items()
            },
            score=score,
            session_scores=scores,
            score_std=stds["final_return_ma"],
            score_interval=score_interval(scores),
            reference_normalised_score=reference_normalised(score, game),
            human_normalised_score=human_normalised(score, game),
            mean=means,
            std=stds,
            sessions=sessions,
            left_out=[
                {"session": self.session_name(path), "reason": why} for path, why in members.left_out.items()
            ],
        )


def read_run(run_dir: Path, suite: Config | None = None) -> Run:
    """Reads a run.

    Args:
        suite: the config of its suite, whose number of sessions and budget count; None: those of the run's config.

    Raises:
        UserError: the directory has no readable config, or no session with metrics; or a session was trained with
            another seed than its number says.
    """
    config = read_config(run_dir)
    if suite is not None:
        config = replace(config, sessions=suite.sessions, total_env_steps=suite.total_env_steps)
    tables = read_sessions(run_dir, config.sessions)
    early_ends = {}
    for path in tables:
        require_own_seed(config, path)
        end = read_early_end(path, config.total_env_steps)
        if end is not None:
            early_ends[path] = end
    return Run(
        path=run_dir,
        config=config,
        tables=tables,
        description=read_json(run_dir / CONFIG_FILE),
        early_ends=early_ends,
        seeds={path: config.seed + session_number(path) for path in tables},
    )


def merge_runs(runs: Sequence[Run], path: Path) -> Run:
    """Runs of one config with different seeds as one trial.

    Args:
        path: folder of the graphs and the report of the trial.

    Raises:
        ConfigError: the configs differ in more than `FREE_FIELDS`; two sessions have one seed.
    """
    first = runs[0]
    merged = replace(first, path=path, tables={}, early_ends={}, seeds={})
    for run in runs:
        for name, (expected, value) in changed_fields(first.config.to_dict(), run.config.to_dict()).items():
            is_free = name.split(".")[0] in FREE_FIELDS
            require(is_free, f"{run.path}: {name}", value, f"{expected}, as in {first.path}")
        for session_dir, seed in run.seeds.items():
            expected = "a seed that no other session of the trial has"
            require(seed not in merged.seeds.values(), f"{session_dir}: seed", seed, expected)
            merged.seeds[session_dir] = seed
        merged.tables.update(run.tables)
        merged.early_ends.update(run.early_ends)
    sessions = sum(run.config.sessions for run in runs)
    return replace(merged, config=replace(first.config, name=path.absolute().name, sessions=sessions))


class Members(NamedTuple):
    """The sessions of a trial that count. Its score, curve and table use these sessions only."""

    tables: dict[Path, Table]  # session directory -> its log points that count
    left_out: dict[Path, str]  # session directory -> why the session does not count
    common_env_steps: float | None  # where the log points of all members are cut; None once a session has finished


class TrialSummary(TypedDict):
    """The metrics of a trial over its `Run.members`: the content of trial.json. An unknown value is None."""

    name: str
    game: str
    protocol: str
    complete: bool  # whether every session has finished
    unfinished_games: str | None  # what is known of the games in progress, if no game has finished
    stopped: dict[str, dict[str, Any]]  # session that was ended early -> `env_steps`, `reason`
    score: float | None  # mean of `session_scores`
    session_scores: list[float]  # the final `return_ma` of each member that has finished a game
    score_std: float | None  # None for a single score
    score_interval: tuple[float, float] | None
    reference_normalised_score: float | None
    human_normalised_score: float | None
    mean: dict[str, float | None]  # metric -> mean over the members; None if a member lacks the metric
    std: dict[str, float | None]  # metric -> sample standard deviation over the members
    sessions: list[dict[str, Any]]  # of each member: `session`, `seed` and its metrics
    left_out: list[dict[str, str]]  # each other `session`, and the `reason` why it does not count


def unfinished_games(run: Run) -> str:
    """The games in progress of a run in which no game has finished, and how long a game may last."""
    text = "no game has finished"
    newest = [
        (table["return_in_progress"][-1], table["length_in_progress"][-1])
        for table in run.tables.values()
        if "return_in_progress" in table
    ]
    if newest:
        mean_return, length = np.mean(newest, axis=0)
        text += f": the games in progress have a mean return of {mean_return:,.1f} after {length:,.0f} env steps"
    env = run.config.env
    if env.atari_game is not None:
        text += (
            f"; a game lasts up to {env.rules.max_frames // 4:,} env steps, and the budget gives each environment"
            f" {run.config.total_env_steps // env.num_envs:,}"
        )
    return text
