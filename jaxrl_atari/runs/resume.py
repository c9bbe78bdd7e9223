"""What a session resumes from: its newest sound checkpoint or, where it has none, the start."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware.distributed import agree
from jaxrl_atari.runs.checkpoint_writer import CheckpointWriter
from jaxrl_atari.runs.checkpoints import Checkpoints, Restored
from jaxrl_atari.runs.config_file import read_config
from jaxrl_atari.runs.files import unused
from jaxrl_atari.runs.reading import EVALUATIONS_FILE, read_metrics


def restore_session(
    config: Config, session_dir: Path, writer: CheckpointWriter | None, target: Callable[[dict[str, Any]], Any]
) -> tuple[Restored | None, list[str]]:
    """Reads the newest sound checkpoint of a session; of several processes, each reads the same one.

    Args:
        writer: of the session, in the leader. It chooses the checkpoint, and sets the newer, damaged ones aside.
        target: meta of a checkpoint -> the shapes, types and placement of its arrays.

    Returns:
        The checkpoint, None for a session that starts at 0, and a line for the user for each damaged one.

    Raises:
        UserError: no checkpoint is sound, or there is none although the log shows that one was written.
    """
    if writer is None:
        choice = agree("")
        if choice.startswith("error "):
            raise UserError(choice.removeprefix("error "))
        if not choice:
            return None, []
        step, checkpoints = int(choice), Checkpoints(session_dir)
        meta = checkpoints.read_meta(step)
        return Restored(step, checkpoints.restore(step, target(meta)), meta, {}), []
    try:
        found = writer.restore_newest(target) if writer.steps() else None
        if found is None:
            _require_young(config, session_dir)
    except UserError as error:
        agree(f"error {error}"[:1_000])
        raise
    agree(str(found.step) if found else "")
    if found is None:
        return None, []
    notes = [
        f"the checkpoint at {step:,} env steps is damaged ({error.reason}) and is now "
        f"{writer.set_aside(step)}; {step - found.step:,} env steps are lost; it resumes at {found.step:,}"
        for step, error in found.damaged.items()
    ]
    return found, notes


def _require_young(config: Config, session_dir: Path) -> None:
    """Raises `UserError` if a session has no checkpoint and came so far that there must have been one."""
    try:
        reached = read_metrics(session_dir)["env_steps"][-1]
    except UserError:  # no log point yet
        return
    with contextlib.suppress(UserError):
        config = read_config(session_dir, restore=False)  # with which it came so far
    interval = max(config.log.checkpoint_every_env_steps, config.rollout_size)
    if config.is_spent(reached) or reached > 2 * interval + config.rollout_size:
        raise UserError(
            f"{session_dir}: has log points up to {reached:,.0f} env steps, but no checkpoint; put its checkpoints"
            " back, or move metrics.csv away to train again from 0"
        )


def set_aside_logs(session_dir: Path) -> list[str]:
    """Renames what a session without a checkpoint has logged, so that it starts anew; returns a note for the user."""
    files = [session_dir / name for name in ("metrics.csv", EVALUATIONS_FILE, "wandb_id")]
    used = [path for path in files if path.is_file() and len(path.read_bytes().splitlines()) > (path.suffix == ".csv")]
    kept = [path.rename(unused(path)).name for path in used]
    note = "there is no checkpoint to resume from: the session starts at 0 env steps; what was logged before is in"
    return [f"{note} {', '.join(kept)}"] if kept else []
