"""Runs and searches of early versions, whose checkpoints have format 3: adds what their files lack.

Each function names the last commit that wrote the old form. `config_dicts.GONE`, `digests._to_dict`,
`actions.NOT_LOGGED`, `reading.is_finished` and `summary.Run.return_ma_definition` do so for what they read.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxrl_atari.runs.progress import POINT_ENV_STEPS


def items_of(meta: dict[str, Any]) -> dict[str, Any]:
    """The items of a checkpoint besides its arrays, by their names. Checkpoints up to 9cb0119 have none."""
    return meta.get("items", {})


def complete_meta(meta: dict[str, Any]) -> dict[str, Any]:
    """The meta of a session's checkpoint with the values that early checkpoints lack.

    Checkpoints up to 9cb0119 have no games and no evaluations, and have the points of `return_mean` at log points,
    without their env steps. Checkpoints up to b321c10 count updates instead of steps.
    """
    statistics = meta["statistics"]
    env_steps = meta["env_steps"]
    points = statistics["points"]
    if points and isinstance(points[0], float):
        back = range(len(points) - 1, -1, -1)
        points = [(env_steps - POINT_ENV_STEPS * i, mean) for i, mean in zip(back, points, strict=True)]
    lacking = {
        "items": {},
        "steps": meta["updates"] * meta["config"]["ppo"]["rollout_length"],
        "logged_env_steps": env_steps,
        "evaluated_env_steps": env_steps,
        "unlogged_metrics": [],
    }
    return lacking | meta | {"statistics": statistics | {"points": points}}


def add_times(rows: Sequence[dict[str, float]], now: float) -> list[dict[str, float]]:
    """The rows of metrics.csv, each with a `unix_time`. Rows up to a93e607 have none.

    `wall_seconds` says how much earlier than the last row a row was written. The last row is dated `now`.
    """
    dated = []
    for row in rows:
        ago = rows[-1].get("wall_seconds", math.nan) - row.get("wall_seconds", math.nan)
        is_dated = math.isfinite(row.get("unix_time", math.nan))
        dated.append(row if is_dated else row | {"unix_time": now - ago})
    return dated


def present_search_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a search in search.json, by the names that they have today.

    Up to a3cbf1b, the sampler was named `method`, and TPE `optuna`.
    """
    if "method" not in options:
        return options
    present = {name: value for name, value in options.items() if name != "method"}
    sampler = options["method"]
    return present | {"sampler": "tpe" if sampler == "optuna" else sampler}
