"""Runs of early versions: a checkpoint of format 3 may lack values that later ones have.

`complete_meta` adds what a resume needs. Other readers meet these files too, each in one line that names the last
commit that wrote the old form: `Checkpoints.read_meta`, `config_dicts.REMOVED_FIELDS`, `digests._to_dict`,
`actions.NOT_LOGGED`, `reading.is_finished`, and `summary.Run.return_ma_definition`.
"""

from typing import Any


def complete_meta(meta: dict[str, Any]) -> dict[str, Any]:
    """The meta of a session's checkpoint with the values that early checkpoints lack.

    Checkpoints up to 9cb0119 have no evaluations, and have the points of `return_mean` at log points, without
    their env steps. Checkpoints up to b321c10 count updates instead of steps.
    """
    statistics = meta["statistics"]
    env_steps = meta["env_steps"]
    points = statistics["points"]
    if points and isinstance(points[0], float):
        back = range(len(points) - 1, -1, -1)
        points = [(env_steps - 10_000 * i, mean) for i, mean in zip(back, points, strict=True)]
    lacking = {
        "steps": meta["updates"] * meta["config"]["ppo"]["rollout_length"],
        "logged_env_steps": env_steps,
        "evaluated_env_steps": env_steps,
        "unlogged_metrics": [],
    }
    return lacking | meta | {"statistics": statistics | {"points": points}}
