"""Run directories with made-up metrics, for tests of code that reads run directories."""

import csv
import json

import numpy as np
import pytest

from jaxrl_atari.config import Config
from jaxrl_atari.runs.columns import SECTIONS
from jaxrl_atari.runs.files import write_json


def table(return_mean, env_steps=None, **columns):
    """A session's table with the given returns: a log point every 100 env steps and 4 optimiser steps."""
    count = len(return_mean)
    steps = 100.0 * np.arange(1, count + 1) if env_steps is None else np.asarray(env_steps, float)
    filled = {name: np.zeros(count) for name in (*SECTIONS["charts"], *SECTIONS["losses"])}
    filled |= {
        "env_steps": steps,
        "optimizer_steps": steps / 25,
        "wall_seconds": steps * 0.36,
        "sps": np.full(count, 500.0),
        "episodes": np.arange(count) * 1.0,
        "return_mean": np.asarray(return_mean, float),
        "return_ma": [
            np.nan if np.isnan(return_mean[i]) else np.nanmean(return_mean[: i + 1][-100:]) for i in range(count)
        ],
    }
    return {name: np.asarray(column, float) for name, column in (filled | columns).items()}


def short(*returns, **columns):
    """A table without the columns of the small panels, which take long to draw: enough for a score."""
    few = ("env_steps", "optimizer_steps", "wall_seconds", "episodes", "return_mean", "return_ma")
    return {name: column for name, column in table(returns).items() if name in few} | columns


def write_metrics(session_dir, columns):
    session_dir.mkdir(parents=True, exist_ok=True)
    rows = np.stack(list(columns.values()), axis=1).tolist()
    lines = [",".join("" if np.isnan(cell) else repr(cell) for cell in row) for row in rows]
    (session_dir / "metrics.csv").write_text("\n".join([",".join(columns), *lines]) + "\n")


def write_checkpoint(session_dir, env_steps):
    """A sound checkpoint without arrays: enough for code that asks only how far a session has come."""
    from jaxrl_atari.runs.checkpoints import meta_digest  # imports JAX

    folder = session_dir / "checkpoints" / str(env_steps)
    for name in ("meta", "arrays"):
        (folder / name).mkdir(parents=True)
    write_json(folder / "arrays" / "_METADATA", {})
    meta = {
        "format_version": 3,
        "env_steps": env_steps,
        "shapes": {},
        "checksums": {},
        "config": Config().to_dict(),
        "evaluated_env_steps": 0,
    }
    write_json(folder / "meta" / "metadata", meta | {"checksum": meta_digest(meta)})


def write_run(run_dir, tables, game="Qbert", protocol="auto", total_env_steps=400, name="trial", **described):
    for index, columns in enumerate(tables):
        write_metrics(run_dir / f"session_{index}", columns)
    config = {
        "name": name,
        "seed": 0,
        "sessions": len(tables),
        "total_env_steps": total_env_steps,
        "env": {"game": game, "protocol": protocol, "num_envs": 2},
        "ppo": {"rollout_length": 8, "minibatch_size": 16},
    }
    write_json(run_dir / "config.json", {"config": config, "versions": {}} | described)
    return run_dir


def read_csv(path):
    """The rows of a table: column -> text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


TRIALS = ((1e-4, 3.0, "COMPLETE"), (3e-4, 9.0, "COMPLETE"), (1e-3, 6.0, "PRUNED"))


def write_search(search_dir, trials=TRIALS, **values):
    """A search over the learning rate, whose trials have a log point at 100 env steps with a third of their score.

    Args:
        trials: learning rate, score and state of each; a score of None is that of a trial without a log point.
    """
    optuna = pytest.importorskip("optuna")
    search_dir.mkdir(parents=True, exist_ok=True)
    space = {"ppo.learning_rate": optuna.distributions.FloatDistribution(1e-5, 1e-2, log=True)}
    saved = {name: json.loads(optuna.distributions.distribution_to_json(each)) for name, each in space.items()}
    write_json(search_dir / "search.json", {"config": Config().to_dict(), "search": {"trials": 4, "space": saved}})
    backend = optuna.storages.journal.JournalFileBackend(str(search_dir / "journal.log"))
    study = optuna.create_study(
        study_name="search", storage=optuna.storages.JournalStorage(backend), direction="maximize"
    )
    for rate, score, state in trials:
        made = optuna.trial.create_trial(
            params={"ppo.learning_rate": rate},
            distributions=space,
            value=None if state == "RUNNING" else score,
            state=optuna.trial.TrialState[state],
            intermediate_values={100: score / 3, 200: score} if score else {},
            **values,
        )
        study.add_trial(made)
    return study
