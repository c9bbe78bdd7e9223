"""Opening the logs of a session, which are cut back to its checkpoint, or renamed if it has none."""

import secrets
from collections.abc import Callable
from pathlib import Path

from jaxrl_atari.config import Config
from jaxrl_atari.runs.actions import remove_segments_after
from jaxrl_atari.runs.files import unused, write_file
from jaxrl_atari.runs.layout import (
    ACTIONS_FOLDER,
    EVALUATIONS_FILE,
    METRICS_FILE,
    VERIFIED_FILE,
    WANDB_FILE,
)
from jaxrl_atari.runs.progress import Progress
from jaxrl_atari.runs.tables import CsvWriter
from jaxrl_atari.runs.tracking import TensorBoardWriter, WandbWriter
from jaxrl_atari.runs.writers import WriterGroup


def open_logs(
    config: Config,
    session_dir: Path,
    progress: Progress,
    outputs: WriterGroup,
    *,
    starts_anew: bool,
    was_evaluating: bool,
) -> None:
    """Opens the writers that `config.log` selects, and brings the files of a session to where it starts.

    Args:
        progress: how far the session had come at the checkpoint from which it resumes. Logs are cut back to there,
            because the session will write again what came later.
        outputs: gets the writers, and closes them, also after an error here. It shows lines to the user.
        starts_anew: whether the session starts at 0, without a checkpoint. What was logged before is renamed.
        was_evaluating: whether an evaluation was running at the checkpoint. It is played again and writes its row.

    Raises:
        UserError: Weights & Biases is selected and refuses the session, or a log is damaged. No log has been
            changed.
    """
    run_id = ""
    if config.log.wandb:
        id_file = session_dir / WANDB_FILE
        run_id = id_file.read_text() if id_file.is_file() and not starts_anew else secrets.token_hex(4)
        outputs.add(WandbWriter(config, session_dir, run_id))
    if starts_anew:
        _set_aside_logs(session_dir, outputs.message)
    evaluations_until = progress.evaluated_env_steps
    if was_evaluating:
        evaluations_until -= 1  # the row of that evaluation may have been written after the checkpoint
    outputs.add(
        CsvWriter(session_dir, metrics_until=progress.logged_env_steps, evaluations_until=evaluations_until)
    )
    # Nothing can be refused any more.
    if config.log.tensorboard:
        outputs.add(TensorBoardWriter(config, session_dir))  # it reads the tables, which have been cut
    if run_id:
        write_file(session_dir / WANDB_FILE, run_id)
    remove_segments_after(session_dir, progress.steps_per_env)
    (session_dir / VERIFIED_FILE).unlink(missing_ok=True)  # it is about the files as they were


def _set_aside_logs(session_dir: Path, say: Callable[[str], object]) -> None:
    """Renames the logs of a session that has no checkpoint."""
    kept = []
    for name in (METRICS_FILE, EVALUATIONS_FILE, WANDB_FILE, ACTIONS_FOLDER):
        path = session_dir / name
        if path.exists():
            kept.append(path.rename(unused(path)).name)
    if kept:
        say(f"there is no checkpoint: the session starts at 0; what was logged before is in {', '.join(kept)}")
