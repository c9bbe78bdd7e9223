"""Writers of log points: the terminal, CSV, TensorBoard, and Weights & Biases."""

import contextlib
import itertools
import math
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import rich.progress

from jaxrl_atari.config import Config, flat
from jaxrl_atari.errors import UserError
from jaxrl_atari.output import console, is_terminal, say
from jaxrl_atari.runs.actions import cut_segments
from jaxrl_atari.runs.columns import AXES, COLUMNS, EVALUATION_COLUMNS, group_of
from jaxrl_atari.runs.digests import cut_digests
from jaxrl_atari.runs.files import unused, write_file
from jaxrl_atari.runs.progress import Progress
from jaxrl_atari.runs.reading import EVALUATIONS_FILE, METRICS_FILE, number, read_rows
from jaxrl_atari.runs.tables import read_table, table_text

Row = Mapping[str, Any]
"""A log point: column -> number. An unknown value is NaN, None, or left out."""


class Writer:
    """Receives the log points of a session. A method that a writer does not override does nothing."""

    def write(self, row: Row) -> None:
        """Writes a log point."""

    def evaluation(self, row: Row) -> None:
        """Writes an evaluation during training: a number for each of `EVALUATION_COLUMNS`."""

    def progress(self, env_steps: int, row: Row) -> None:
        """Called after each update.

        Args:
            row: what is known now: the newest log point with the newest figures of games and losses and, before
                the first finished game, `games_in_progress` with the means `return_in_progress` and
                `length_in_progress`.
        """

    def message(self, text: str) -> None:
        """Shows a line to the user."""

    def close(self) -> None:
        """Flushes and closes files. Called once, also after an error."""


def cut_and_open_logs(
    config: Config,
    session_dir: Path,
    progress: Progress,
    evaluates: bool,
    say: Callable[[str], object],
) -> list[Writer]:
    """Cuts a session's files back to the checkpoint that it resumes from, then makes their writers.

    Args:
        progress: how far the session has come at that checkpoint.
        evaluates: whether an evaluation was running then. It is played again, and its row is written anew.
        say: receives lines for the user.

    Raises:
        UserError: as `make_writers`.
    """
    cut_segments(session_dir, progress.steps)
    cut_digests(session_dir, progress.env_steps)
    (session_dir / "verified.json").unlink(missing_ok=True)  # it describes what was there before
    if config.evaluation.every_env_steps:
        _name_missing_evaluations(session_dir / EVALUATIONS_FILE, progress.evaluated, evaluates, say)
    evaluated = progress.evaluated - 1 if evaluates else progress.evaluated
    return make_writers(config, session_dir, progress.logged, evaluated, say)


def _name_missing_evaluations(path: Path, evaluated: int, evaluates: bool, say: Callable[[str], object]) -> None:
    """Says that a table of evaluations lacks rows which the session had written.

    Args:
        evaluated: env steps of the newest evaluation.
        evaluates: whether that one was still running, so that it has no row. The one before it is not known.
    """
    table = read_table(path)
    if table.problems or table.unfinished:
        return  # the file is refused or set aside, which has a line of its own
    if evaluates:
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
        logged, evaluated: env steps of the newest log point and evaluation before a resume. Later ones are dropped
            from the files, because the session will write them again.
        say: receives lines for the user.

    Raises:
        UserError: Weights & Biases is selected and not usable, or a table of the session is not understood.
    """
    writers: list[Writer] = [CsvWriter(session_dir, logged, evaluated, say)]
    if config.log.tensorboard:
        writers.append(TensorBoardWriter(config, session_dir))
    if config.log.wandb:
        writers.append(WandbWriter(config, session_dir))
    return writers


def set_aside_logs(session_dir: Path, say: Callable[[str], object]) -> None:
    """Renames the logs of a session that has no checkpoint, because it starts again at 0."""
    files = [session_dir / name for name in (METRICS_FILE, EVALUATIONS_FILE, "wandb_id", "actions")]
    if kept := [path.rename(unused(path)).name for path in files if path.exists()]:
        say(f"there is no checkpoint: the session starts at 0; what was logged before is in {', '.join(kept)}")


def finite(row: Row) -> dict[str, int | float]:
    """The known values of a log point: those of `COLUMNS` in their order, then all others."""
    names = dict.fromkeys([*COLUMNS, *row])
    return {name: row[name] for name in names if row.get(name) is not None and math.isfinite(row[name])}


def charts(row: Row) -> dict[str, int | float]:
    """The charts that TensorBoard and Weights & Biases draw of a log point: "charts/return_ma" -> value."""
    return {f"{group_of(name)}/{name}": value for name, value in finite(row).items() if name not in AXES}


def evaluation_charts(row: Row) -> dict[str, float]:
    """The charts that TensorBoard and Weights & Biases draw of an evaluation."""
    return {f"evaluation/return_{name}": row[name] for name in ("mean", "std")}


class Outputs:
    """The writers of a session. As a context manager, it closes those that the session made."""

    def __init__(self) -> None:
        self.writers: list[Writer] = []
        self._exits = contextlib.ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *exception: Any) -> None:
        self._exits.close()

    def add(self, writers: Sequence[Writer]) -> None:
        """Adds writers that the session made."""
        for writer in writers:
            self.writers.append(writer)
            self._exits.callback(writer.close)

    def lend(self, writers: Sequence[Writer]) -> None:
        """Adds writers that the caller of the session made, and closes."""
        self.writers += writers

    def message(self, line: str) -> None:
        """Shows a line to the user in each of the writers."""
        for writer in self.writers:
            writer.message(line)


class TerminalWriter(Writer):
    """Draws a live line on a terminal; in a file, pipe or notebook, prints a plain line for each log point.

    Args:
        total_env_steps: the budget, 100%.
        label: stands before each line.
    """

    def __init__(self, total_env_steps: int, label: str):
        self._label = label
        self._live = is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"
        self._bar = rich.progress.Progress(
            "{task.description}", rich.progress.BarColumn(None), console=console(),
            refresh_per_second=2, speed_estimate_period=60.0, disable=not self._live,
        )  # fmt: skip
        self._bar.add_task(label, total=total_env_steps)
        self._task = self._bar.tasks[0]
        self._news: Row = {}

    def _line(self, row: Row) -> str:
        task = self._task
        eta = task.time_remaining
        busy = _text(row.get("gpu_busy_percent"))
        left = "-" if eta is None else timedelta(seconds=round(eta))
        line = f"{self._label}  {task.percentage:5.1f}%  env_steps {task.completed:,}  "
        rates = f"sps {_text(task.speed)}  eta {left}  "
        if "games_in_progress" in row:
            line += (
                f"{rates}{row['games_in_progress']} games in progress: mean return"
                f" {_text(row['return_in_progress'], 1)} after {_text(row['length_in_progress'])} env steps"
            )
        else:
            line += (
                f"return_ma {_text(row.get('return_ma'), 1)}  {rates}"
                f"return_mean {_text(row.get('return_mean'), 1)}  episodes {_text(row.get('episodes'))}"
            )
        if row.get("entropy") is not None and row.get("approx_kl") is not None:
            line += f"  entropy {_text(row['entropy'], 2)}  approx_kl {_text(row['approx_kl'], 4)}"
        return line if busy == "-" else f"{line}  gpu_busy_percent {busy}"

    def progress(self, env_steps: int, row: Row) -> None:
        self._news = row
        self._bar.start()
        self._bar.update(self._task.id, completed=env_steps)
        self._bar.update(self._task.id, description=self._line(row))

    def write(self, row: Row) -> None:
        self.progress(row["env_steps"], {**self._news, **finite(row)})
        if not self._live:
            say(self._line(self._news))

    def message(self, text: str) -> None:
        say(f"{self._label}  {text}")  # above the live line: rich has redirected `sys.stdout`

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone away
            self._bar.stop()


def _text(value: float | None, digits: int = 0) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


class CsvWriter(Writer):
    """metrics.csv and evaluations.csv: a header, then a row for each log point or evaluation, flushed at once.

    An unknown value is an empty cell. A value whose name has no column becomes a further column. A resumed session
    keeps the rows up to its checkpoint. A table that another program has saved, before a resume or while the
    session trains, is written anew in this package's form; one with lines that are not understood is set aside
    first.

    Args:
        logged, evaluated: see `make_writers`.
        say: receives lines for the user.

    Raises:
        UserError: a table has no header that is understood. It is left as it is.
    """

    def __init__(self, session_dir: Path, logged: int, evaluated: int, say: Callable[[str], object]):
        self._dir = session_dir
        self._say = say
        self._columns = {METRICS_FILE: list(COLUMNS), EVALUATIONS_FILE: list(EVALUATION_COLUMNS)}
        self._left: dict[str, tuple[int, int]] = {}  # size and time of each table, as this writer left it
        for name in self._columns:
            table = read_table(session_dir / name)
            if table.problems and not table.columns:
                raise UserError(
                    f"{session_dir / name}: {table.problems[0].text}; restore it from a copy, or move it away to"
                    " go on without its rows"
                )
        for name, last in ((METRICS_FILE, logged), (EVALUATIONS_FILE, evaluated)):
            self._take_over(name, last)
        last_row = max((float(row["env_steps"]) for row in read_rows(session_dir / METRICS_FILE)), default=0)
        if last_row < logged:
            say(f"{METRICS_FILE} ends at {last_row:,.0f} env steps: the rows up to {logged:,} are not there")

    def _take_over(self, name: str, last: float = math.inf) -> None:
        """Writes a table anew, with the rows up to `last` env steps; first copies one that has unknown lines."""
        path = self._dir / name
        if not path.is_file():
            return
        table = read_table(path)
        if lost := table.lost_before(last):
            copy = unused(path)
            shutil.copy2(path, copy)
            count = "1 line is" if len(lost) == 1 else f"{len(lost)} lines are"
            self._say(f"{name}: {count} not understood ({lost[0]}); the file as it was is now {copy.name}")
        self._columns[name] += [column for column in table.columns if column not in self._columns[name]]
        rows = [row for row in table.rows if float(row["env_steps"]) <= last]
        write_file(path, table_text(self._columns[name], rows))  # at no moment are the rows lost
        self._left[name] = _state(path)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        path = self._dir / name
        exists = path.is_file() and path.stat().st_size > 0
        if name in self._left and not exists:
            self._say(f"{name} was moved away or emptied while the session trains; it goes on as a new file")
        further = [column for column in row if column not in self._columns[name]]
        self._columns[name] += further
        if exists and (further or _state(path) != self._left.get(name)):  # or another program has saved it
            self._take_over(name)
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(table_text(self._columns[name], [row], header=not exists))
        self._left[name] = _state(path)

    def write(self, row: Row) -> None:
        # 9 digits identify every float32 number.
        self._append(METRICS_FILE, {n: f"{x:.9g}" if isinstance(x, float) else x for n, x in finite(row).items()})

    def evaluation(self, row: Row) -> None:
        self._append(EVALUATIONS_FILE, row)


def _state(path: Path) -> tuple[int, int]:
    """The size of a file and the time of its last change, by which a change of another program is noticed."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


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
        self._add(0, summary.text("config", f"| option | value |\n|---|---|\n{options}"))
        self._now = time.time()
        metrics = [
            {name: number(cell) for name, cell in row.items()} for row in read_rows(session_dir / METRICS_FILE)
        ]
        for row in metrics:
            # A row of an older version has no time. Its distance from the last row is known.
            ago = metrics[-1].get("wall_seconds", math.nan) - row.get("wall_seconds", math.nan)
            self._add_row(row, charts(row), self._now - ago)
        for row in read_rows(session_dir / EVALUATIONS_FILE):
            self.evaluation({name: number(cell) for name, cell in row.items()})

    def _add(self, env_steps: float, *summaries: Any, wall_time: float | None = None) -> None:
        for each in summaries:
            event = self._event(wall_time=wall_time or time.time(), step=int(env_steps), summary=each)
            self._events.write_event(event)
        self._events.flush()

    def _add_row(self, row: Row, values: Mapping[str, float], otherwise: float) -> None:
        """Adds points at the time that a row has, or otherwise at another one."""
        times = [row.get("unix_time", math.nan), otherwise, self._now]
        wall_time = next(each for each in times if math.isfinite(each))
        self._add(row["env_steps"], *itertools.starmap(self._scalar, values.items()), wall_time=wall_time)

    def write(self, row: Row) -> None:
        self._add_row(row, charts(row), time.time())

    def evaluation(self, row: Row) -> None:
        self._add_row(row, evaluation_charts(row), time.time())

    def close(self) -> None:
        self._events.close()


def add_to_tensorboard(video: Path, env_steps: int) -> None:
    """Shows a video in TensorBoard as a small animated GIF, as a run beside that of its session."""
    import imageio_ffmpeg
    from tensorboardX import SummaryWriter
    from tensorboardX.summary import Summary  # pyright: ignore[reportAttributeAccessIssue]

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", video, "-vf", "scale=160:-1", "-f", "gif", "-"]
    gif = subprocess.run(command, capture_output=True, check=True).stdout
    image = Summary.Image(encoded_image_string=gif)
    with SummaryWriter(str(video.parent / "video")) as writer:
        summary = Summary(value=[Summary.Value(tag="game", image=image)])
        writer.file_writer.add_summary(summary, env_steps)  # pyright: ignore[reportOptionalMemberAccess]


class WandbWriter(Writer):
    """A Weights & Biases run, grouped by trial. A resumed session continues its run, whose id is in wandb_id.

    wandb reads its own environment variables, such as WANDB_MODE and WANDB_ENTITY.
    """

    def __init__(self, config: Config, session_dir: Path):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(
                "log.wandb = true: the package wandb is not installed; pip install 'jaxrl_atari[wandb]'"
                " or leave log.wandb out"
            ) from error
        session_dir = session_dir.resolve()
        # With the folder above it: the runs of suites have the names of games, and those of searches are numbered.
        trial = "-".join(session_dir.parts[-3:-1])
        id_file = session_dir / "wandb_id"
        if not id_file.is_file():
            write_file(id_file, secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=config.log.wandb_project,
                group=trial,
                name=f"{trial}-{session_dir.name}",
                id=id_file.read_text(),
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
