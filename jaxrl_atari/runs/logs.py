"""The logs of a session: opening them all, and the writers for TensorBoard and for Weights & Biases."""

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config, flat
from jaxrl_atari.errors import UserError, require_package
from jaxrl_atari.runs.actions import remove_segments_after
from jaxrl_atari.runs.columns import AXES, section_of
from jaxrl_atari.runs.files import unused, write_file
from jaxrl_atari.runs.layout import (
    ACTIONS_FOLDER,
    EVALUATIONS_FILE,
    METRICS_FILE,
    VERIFIED_FILE,
    WANDB_FILE,
)
from jaxrl_atari.runs.progress import Progress
from jaxrl_atari.runs.tables import CsvWriter, cell_number, read_table
from jaxrl_atari.runs.writers import Row, Writer, WriterGroup, known_values


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


# --- TensorBoard and Weights & Biases ----------------------------------------------------------------------------


def charts(row: Row) -> dict[str, int | float]:
    """The charts that TensorBoard and Weights & Biases draw of a log point: "charts/return_ma" -> value."""
    return {f"{section_of(name)}/{name}": value for name, value in known_values(row).items() if name not in AXES}


def evaluation_charts(row: Row) -> dict[str, float]:
    """The charts that TensorBoard and Weights & Biases draw of an evaluation."""
    known = known_values(row)
    return {f"evaluation/return_{name}": known[name] for name in ("mean", "std") if name in known}


class TensorBoardWriter(Writer):
    """TensorBoard events. A resumed session writes them anew from its tables: all readers see the same points.

    tensorboardX needs neither TensorFlow nor PyTorch. Its `SummaryWriter` writes in a thread, which dies on a full
    disk with a traceback of its own; `EventsWriter` raises the error here.
    """

    def __init__(self, config: Config, session_dir: Path):
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        for path in session_dir.glob("events.out.tfevents.*"):
            path.unlink()
        self._scalar = summary.scalar
        self._event = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        self._events = EventsWriter(str(session_dir / "events"))
        options = "\n".join(f"| {name} | {value} |" for name, value in flat(config.to_dict()).items())
        text = summary.text("config", f"| option | value |\n|---|---|\n{options}")
        self._add(text, env_steps=0, time=time.time())
        for row in read_table(session_dir / METRICS_FILE):
            self.write(_numbers(row))
        for row in read_table(session_dir / EVALUATIONS_FILE):
            self.evaluation(_numbers(row))

    def _add(self, summary: Any, env_steps: float, time: float) -> None:
        self._events.write_event(self._event(wall_time=time, step=int(env_steps), summary=summary))

    def _add_charts(self, values: Mapping[str, float], row: Row) -> None:
        """Adds points at the time of a row."""
        for name, value in values.items():
            self._add(self._scalar(name, value), row["env_steps"], row["unix_time"])
        self._events.flush()

    def write(self, row: Row) -> None:
        self._add_charts(charts(row), row)

    def evaluation(self, row: Row) -> None:
        self._add_charts(evaluation_charts(row), row)

    def close(self) -> None:
        self._events.close()


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    return {name: cell_number(cell) for name, cell in row.items()}


class WandbWriter(Writer):
    """A Weights & Biases run, grouped by trial.

    wandb reads its own environment variables, such as WANDB_MODE and WANDB_ENTITY.

    Args:
        run_id: id of the run. If there is a run with this id, it continues.

    Raises:
        UserError: wandb is not installed, or it refuses the run, for example because nobody is logged in.
    """

    def __init__(self, config: Config, session_dir: Path, run_id: str):
        require_package("wandb", "wandb", needed_by="log.wandb = true")
        import wandb  # pyright: ignore[reportMissingImports]

        session_dir = session_dir.resolve()
        # The folder above the run tells runs of suites apart, which are named after games, and numbered trials.
        trial = "-".join(session_dir.parts[-3:-1])
        try:
            self._run = wandb.init(
                project=config.log.wandb_project,
                group=trial,
                name=f"{trial}-{session_dir.name}",
                id=run_id,
                resume="allow",
                dir=session_dir,
                config=config.to_dict(),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise UserError(
                f"log.wandb = true: {error}; run `wandb login`, set WANDB_MODE=offline, or leave log.wandb out"
            ) from error
        # A log point with more env steps may have been logged by the time that an evaluation ends.
        self._run.define_metric("evaluation/*", step_metric="evaluation/env_steps")

    def write(self, row: Row) -> None:
        # wandb ignores steps that the run has already: after a resume it keeps the earlier log points.
        self._run.log(charts(row), step=row["env_steps"])

    def evaluation(self, row: Row) -> None:
        self._run.log(evaluation_charts(row) | {"evaluation/env_steps": row["env_steps"]})

    def close(self) -> None:
        self._run.finish()
