"""What a session resumes from: its newest sound checkpoint or, where it has none, the start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config, changed_fields
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware.distributed import agree, is_leader
from jaxrl_atari.runs.checkpoints import Checkpoints, Restored
from jaxrl_atari.runs.files import unused
from jaxrl_atari.runs.reading import EVALUATIONS_FILE, METRICS_FILE

Say = Callable[[str], object]


def restore_session(checkpoints: Checkpoints, target: Callable[[dict[str, Any]], Any], say: Say) -> Restored | None:
    """The newest sound checkpoint; None for a session that has none. Damaged ones are set aside.

    Of several processes, each reads the one that the leader has chosen.

    Args:
        target: meta of a checkpoint -> the shapes, types and placement of its arrays.
        say: receives lines for the user.

    Raises:
        UserError: no checkpoint is sound.
    """
    found, problem = None, ""
    if is_leader() and checkpoints.steps():
        try:
            found = checkpoints.restore_newest(target, ("acting", "evaluation"))
        except UserError as error:
            problem = str(error)[:1_000]
    if problem := agree(problem):
        raise UserError(problem)
    step = int(agree(str(found.step if found else -1)))
    if not is_leader() and step >= 0:
        meta = checkpoints.read_meta(step)
        found = Restored(step, checkpoints.restore(step, target(meta)), meta, {})
    for damaged, error in found.damaged.items() if found else ():
        say(f"{error}; it is now {checkpoints.set_aside(damaged)}")
    return found


def games_problem(config: Config, meta: dict[str, Any]) -> str:
    """Why the games of a checkpoint cannot go on; empty if they can."""
    if "games" not in meta.get("items", {}):
        return "the checkpoint has none: the back end ale records them, in a single process"
    changed = changed_fields(meta["config"], config.to_dict())
    found = {name: changed[name] for name in ("env.num_envs", "env.backend") if name in changed}
    return ", ".join(f"{name} {before} -> {now}" for name, (before, now) in found.items())


def resume_text(before: dict[str, Any], now: dict[str, Any]) -> str:
    """A line on where a session resumes, and on what has changed of its arithmetic.

    Args:
        before: meta of the checkpoint that it resumes from.
        now: what the next checkpoint will have.
    """
    text = f"resumed at {before['env_steps']:,} env steps (update {before['updates']:,})"
    names = [name for name in ("compute_dtype", "numeric_settings") if name in before]  # of an older version: not
    changed = changed_fields({name: before[name] for name in names}, {name: now[name] for name in names})
    for name, (old, new) in changed.items():
        text += f"; {name} {old} -> {new}, so numbers may differ from here on"
    return text


def set_aside_logs(session_dir: Path, say: Say) -> None:
    """Renames what a session without a checkpoint has logged, because it starts anew."""
    files = [session_dir / name for name in (METRICS_FILE, EVALUATIONS_FILE, "wandb_id")]
    if kept := [path.rename(unused(path)).name for path in files if path.is_file()]:
        say(f"there is no checkpoint: the session starts at 0; what was logged before is in {', '.join(kept)}")
