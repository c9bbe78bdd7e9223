"""The results that `evaluate` has written into the directories of runs and sessions; see `runs/layout.py`.

session_<i>/evaluation_STEP.json has the games that were played with one checkpoint:

| value | content |
|---|---|
| date, game, protocol, backend, greedy, num_envs, device, compute_dtype | when and how they were played |
| checkpoint, env_steps | `best`, `latest` or an env step; the env steps of training at that checkpoint |
| episodes, seed | number of games, and their seed |
| mean, std | of the returns; the sample standard deviation is null for a single game |
| returns, lengths, truncated | of each game: return, env steps, whether it reached its time limit |
| cut_off | number of games that reached their time limit |

evaluation.json has the games of all sessions of a run: the same values, where `seed` is that of the first session,
`sessions`, `env_steps` and `returns` have an entry for each session, and `mean` and `interval` are those of the
`session_means`.
"""

from pathlib import Path
from typing import Any

from jaxrl_atari.runs.files import read_result


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """The results that `evaluate` has written into the directory of a run or a session, oldest first.

    Each result also has the path of its `file`.

    Raises:
        UserError: as `read_result`.
    """
    results = [
        read_result(path, mean=float, episodes=int) | {"file": path} for path in directory.glob("evaluation*.json")
    ]
    return sorted(results, key=lambda each: (played_at(each["file"]), each["file"].name))


def played_at(file: Path) -> str:
    """The date of a result of `evaluate`, or of the result to which a video belongs; empty if it has none.

    The date stands in the JSON file, so that a copy keeps it.
    """
    described = file.with_name(f"{file.stem.replace('video', 'evaluation')}.json")
    return str(read_result(described).get("date", "")) if described.is_file() else ""
