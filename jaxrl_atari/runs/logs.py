"""Starting the logs of a session: setting them aside or cutting them back to the checkpoint, and opening them."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from jaxrl_atari.config import Config
from jaxrl_atari.runs.actions import cut_segments
from jaxrl_atari.runs.csv_writer import CsvWriter, require_headers
from jaxrl_atari.runs.digests import cut_digests
from jaxrl_atari.runs.files import unused
from jaxrl_atari.runs.layout import (
    ACTIONS_FOLDER,
    DIGESTS_FILE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    VERIFIED_FILE,
    WANDB_FILE,
)
from jaxrl_atari.runs.progress import Progress
from jaxrl_atari.runs.tables import read_table
from jaxrl_atari.runs.tracking import TensorBoardWriter, WandbWriter
from jaxrl_atari.runs.writers import Writer


def set_aside_logs(session_dir: Path, say: Callable[[str], object]) -> None:
    """Renames the logs of a session that has no checkpoint and so starts again at 0."""
    kept = []
    for name in (METRICS_FILE, EVALUATIONS_FILE, WANDB_FILE, ACTIONS_FOLDER, DIGESTS_FILE):
        path = session_dir / name
        if path.exists():
            kept.append(path.rename(unused(path)).name)
    if kept:
        say(f"there is no checkpoint: the session starts at 0; what was logged before is in {', '.join(kept)}")


def cut_and_open_logs(
    config: Config,
    session_dir: Path,
    progress: Progress,
    was_evaluating: bool,
    say: Callable[[str], object],
) -> list[Writer]:
    """Cuts a session's files back to the checkpoint from which it resumes, and makes their writers.

    Args:
        progress: how far the session has come at that checkpoint.
        was_evaluating: whether an evaluation was running then. It is played again, and writes its row.
        say: receives lines for the user.

    Raises:
        UserError: as `make_writers`; then nothing has been cut.
    """
    if config.evaluation.every_env_steps:
        _say_missing_evaluations(session_dir / EVALUATIONS_FILE, progress.evaluated, was_evaluating, say)
    evaluated = progress.evaluated - 1 if was_evaluating else progress.evaluated
    with contextlib.ExitStack() as exits:
        writers = make_writers(config, session_dir, progress.logged, evaluated, say)
        for writer in writers:
            exits.callback(writer.close)
        cut_segments(session_dir, progress.steps_per_env)
        cut_digests(session_dir, progress.env_steps)
        (session_dir / VERIFIED_FILE).unlink(missing_ok=True)  # it is about the files as they were
        exits.pop_all()  # the caller closes them
    return writers


def _say_missing_evaluations(
    path: Path, evaluated: int, was_evaluating: bool, say: Callable[[str], object]
) -> None:
    """Says so if evaluations.csv lacks rows that the session has written.

    Args:
        evaluated: env steps of the newest evaluation.
        was_evaluating: whether that one was still running, and so has no row. Then it is not known where the row
            before it was, and only an empty table is noticed.
    """
    table = read_table(path)
    if table.problems or table.unfinished:
        return  # `CsvWriter` refuses or copies such a file, and says so
    if was_evaluating:
        if path.is_file() and not table.columns:
            say(f"{path.name} is empty: the rows of earlier evaluations are not there")
        return
    last_row = max((float(row["env_steps"]) for row in table.rows), default=0)
    if last_row < evaluated:
        say(f"{path.name} ends at {last_row:,.0f} env steps: the rows up to {evaluated:,} are not there")


def make_writers(
    config: Config,
    session_dir: Path,
    logged: int,
    evaluated: int,
    say: Callable[[str], object] = lambda line: None,
) -> list[Writer]:
    """Creates the writers that `config.log` selects, and their files.

    Args:
        logged, evaluated: env steps of the newest log point and evaluation before a resume. Later rows are dropped
            from the files, because the session will write them again.
        say: receives lines for the user.

    Raises:
        UserError: Weights & Biases is selected and not usable, or a table of the session is not understood. No
            table and no event of TensorBoard has been changed.
    """
    require_headers(session_dir)
    with contextlib.ExitStack() as exits:
        # Made first, because it may be refused. The files are written before it sends a row.
        wandb = [WandbWriter(config, session_dir)] if config.log.wandb else []
        for writer in wandb:
            exits.callback(writer.close)
        writers: list[Writer] = [CsvWriter(session_dir, logged, evaluated, say)]
        if config.log.tensorboard:
            writers.append(TensorBoardWriter(config, session_dir))
        exits.pop_all()  # the caller closes it
    return [*writers, *wandb]
