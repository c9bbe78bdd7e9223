"""The results that `evaluate` has written into the directories of runs and sessions; see `runs/layout.py`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.files import read_json, read_result

GAME_TEMPLATE = Path(__file__).with_name("templates") / "game.html"
"""Template of the page of a game. A report embeds only pages that have the script of this template."""


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """The results that `evaluate` has written into the directory of a run or a session, oldest first.

    Each result has `file`, `env_steps`, `checkpoint`, `episodes`, `greedy` and `mean`. A result of all sessions
    also has `session_means`.

    Raises:
        UserError: as `read_result`, or the returns of a result are not numbers.
    """
    found = []
    for path in directory.glob("evaluation*.json"):
        result = read_result(path, mean=float, episodes=int)
        for name in ("session_means", "returns", "truncated"):
            values = result.get(name, [])
            if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
                raise UserError(f"{path}: {name} is not a list of numbers; restore it from a copy")
        found.append(result | {"file": path})
    return sorted(found, key=lambda each: (written_at(each["file"]), each["file"].name))


def written_at(file: Path) -> float:
    """The time at which a result or a video was made, in seconds since 1970 (UTC).

    It is the `date` in the JSON file of a result, because a copy of the file keeps that date. A video's date is in
    `video_STEP.json` or, if there is no such file, in the `evaluation_STEP.json` of its evaluation. If there is no
    date, the time is that of the file's last change.
    """
    described = [file.with_suffix(".json"), file.with_name(f"{file.stem.replace('video', 'evaluation')}.json")]
    for path in filter(Path.is_file, described):
        try:
            date = str(read_json(path)["date"]).removesuffix(" UTC")
            return datetime.strptime(date, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        except (ValueError, LookupError):  # a file of an earlier version, or of another program
            continue
    return file.stat().st_mtime
