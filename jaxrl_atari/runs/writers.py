"""Writers of log points: CSV, JSON lines, TensorBoard and Weights & Biases. `terminal.py` has the terminal's.

A session holds a list of writers and passes every log point to each of them.
"""

import contextlib
import csv
import io
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.columns import COLUMNS
from jaxrl_atari.runs.config_file import SEARCH_FILE, SUITE_FILE
from jaxrl_atari.runs.files import unused, write_file
from jaxrl_atari.runs.reading import damaged_lines, parse_metrics
from jaxrl_atari.runs.terminal import ProgressWriter

Row = Mapping[str, Any]
"""A log point: column -> number (Python, NumPy or JAX). An unknown value is NaN, None, or left out."""


class Writer(Protocol):
    """Receives the log points of a session. A method that a writer does not override does nothing."""

    def write(self, row: Row) -> None:
        """Writes a log point."""

    def evaluation(self, env_steps: int, mean: float, std: float) -> None:
        """Writes an evaluation during training: mean and standard deviation of its returns."""

    def progress(self, env_steps: int, row: Row) -> None:
        """Called after each update; `row` is the newest log point, empty before the first."""

    def message(self, text: str) -> None:
        """Shows a line to the user."""

    def close(self) -> None:
        """Flushes and closes files. Called once, also after an error."""


def make_writers(
    config: Config, session_dir: Path, *, label: str, start_env_steps: int = 0, quiet: bool = False
) -> list[Writer]:
    """Creates the writers that `config.log` selects, their files, and `session_dir`.

    Args:
        label: the session's name on the terminal.
        start_env_steps: env steps at which a resumed session continues. Later log points are dropped from the files,
            because the session will log them again.
        quiet: without the writer to the terminal.

    Raises:
        UserError: Weights & Biases is selected and not usable.
    """
    if config.log.wandb:
        import_wandb()  # before any file is created
    session_dir.mkdir(parents=True, exist_ok=True)
    terminal = ProgressWriter(config.total_env_steps, label=label)
    table = CsvWriter(session_dir / "metrics.csv", start_env_steps)
    writers: list[Writer] = [table] if quiet else [terminal, table]
    notes = [table.note]
    if config.log.tensorboard:
        writers.append(TensorBoardWriter(session_dir, start_env_steps))
    for note in filter(None, () if quiet else notes):
        terminal.message(note)
    if config.log.wandb:
        writers.append(wandb_writer := WandbWriter(config, session_dir))
        if not quiet:
            terminal.message(f"Weights & Biases: {wandb_writer.where}")
    return writers


def cells(row: Row) -> dict[str, int | float | None]:
    """A log point as Python numbers: every column, in order; None for a value that is missing or not finite."""

    def cell(value: Any) -> int | float | None:
        value = value.item() if hasattr(value, "item") else value  # NumPy and JAX scalars
        return value if value is not None and math.isfinite(value) else None

    return {name: cell(row.get(name)) for name in COLUMNS}


def _tag(name: str) -> str:
    """The name of a column in TensorBoard and Weights & Biases: "charts/return_ma"."""
    return f"{COLUMNS[name].group}/{name}"


def _evaluation_tags(mean: float, std: float) -> dict[str, float]:
    return {"evaluation/return_mean": mean, "evaluation/return_std": std}


# --- Files -----------------------------------------------------------------------------------------------------------


def _csv_line(values: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(
        # 9 digits identify every float32 number.
        ["" if value is None else f"{value:.9g}" if isinstance(value, float) else value for value in values]
    )
    return text.getvalue()


class _FileWriter(Writer):
    """A writer whose `write` flushes its file."""

    _file: Any

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `write` has raised what a full disk says
            self._file.close()


def _keep_whole(path: Path, damaged: Sequence[int], unknown: Sequence[str] = ()) -> str:
    """Copies a file to NAME_damaged before its damaged lines and unknown columns are dropped; a line about it."""
    if not damaged and not unknown:
        return ""
    shutil.copyfile(path, whole := unused(path.with_stem(f"{path.stem}_damaged")))
    found = [damaged_lines(damaged)] if damaged else []
    if unknown:
        found.append(f"columns that this version does not know were left out: {', '.join(unknown)}")
    return f"{path.name}: {'; '.join(found)}; the file as it was is now {whole.name}"


class CsvWriter(_FileWriter):
    """metrics.csv: a header, and a row for each log point, flushed at once. An unknown value is an empty cell.

    A resumed session keeps the sound rows; a file with damaged ones is kept beside it, and `note` is a line about it.
    """

    def __init__(self, path: Path, start_env_steps: int = 0):
        kept, self.note = [], ""
        if path.exists():
            header, rows, damaged, _ = parse_metrics(path)
            named = [dict(zip(header, row, strict=True)) for row in rows]
            kept = [
                _csv_line(row.get(name) for name in COLUMNS)
                for row in named
                if float(row["env_steps"]) <= start_env_steps
            ]
            unknown = sorted(set(header) - set(COLUMNS))
            if not all(map(str.isidentifier, unknown)):  # not the name of a column: damage
                unknown, damaged = [], [1, *damaged]
            self.note = _keep_whole(path, damaged, unknown)
        write_file(path, "".join([_csv_line(COLUMNS), *kept]))
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, row: Row) -> None:
        self._file.write(_csv_line(cells(row).values()))
        self._file.flush()


def _stamp(path: Path) -> int:
    """The time in the name of an event file of this package in nanoseconds; 0 for another file."""
    match = re.fullmatch(r"events\.out\.tfevents\.(\d{10})\.(\d{9})\.\d+", path.name)
    return int(match[1] + match[2]) if match else 0


class TensorBoardWriter(_FileWriter):
    """A TensorBoard event file; a resumed session starts a new one.

    This uses TensorBoard's record format and messages only: its `EventFileWriter` imports TensorFlow if it is
    installed, which takes seconds and GPU memory.
    """

    def __init__(self, directory: Path, start_env_steps: int = 0):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # protobuf creates the message classes at run time, so pyright does not see them.
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        session_log = event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        # TensorBoard reads the files of a directory in the order of their names. A clock that was set back must not put
        # this one before the earlier ones.
        last = max((_stamp(path) for path in directory.glob("events.out.tfevents.*")), default=0)
        seconds, nanoseconds = divmod(max(time.time_ns(), last + 1), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{os.getpid()}"
        self._file = RecordWriter((directory / name).open("wb"))
        self._add(self._event(file_version="brain.Event:2"))
        # This event makes readers discard everything from this step on.
        start = session_log(status=session_log.START)
        self._add(self._event(step=start_env_steps + 1, session_log=start))

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._file.write(event.SerializeToString())
        self._file.flush()

    def _add_scalars(self, env_steps: Any, values: Mapping[str, Any]) -> None:
        summary = self._summary()
        for tag, value in values.items():
            if value is not None:
                summary.value.add(tag=tag, simple_value=value)
        self._add(self._event(step=env_steps, summary=summary))

    def write(self, row: Row) -> None:
        values = cells(row)
        self._add_scalars(values["env_steps"], {_tag(name): value for name, value in values.items()})

    def evaluation(self, env_steps: int, mean: float, std: float) -> None:
        self._add_scalars(env_steps, _evaluation_tags(mean, std))


# --- Weights & Biases ------------------------------------------------------------------------------------------------


def import_wandb() -> Any:
    """Imports the `wandb` module. Raises `UserError` with the install command if it is missing."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]

        wandb.init  # a folder `wandb/`, which runs leave behind, imports as an empty package  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise UserError(
            "log.wandb = true: the package wandb is not installed; pip install 'jaxrl_atari[wandb]'"
            " or leave log.wandb out"
        ) from error
    return wandb


class WandbWriter(Writer):
    """A Weights & Biases run, grouped by trial. A resumed session continues its run, whose id is in wandb_id.

    wandb reads its own environment variables, such as WANDB_MODE and WANDB_ENTITY.
    """

    def __init__(self, config: Config, session_dir: Path):
        wandb = import_wandb()
        session_dir = session_dir.resolve()
        run_dir, group_dir = session_dir.parent, session_dir.parents[1]
        # The runs of suites have the same names, those of the games, and so have the trials of searches.
        nested = any((group_dir / name).is_file() for name in (SUITE_FILE, SEARCH_FILE))
        trial = f"{group_dir.name}-{run_dir.name}" if nested else run_dir.name
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
        offline = f"offline; upload with `wandb sync {Path(self._run.dir).parent}`"
        self.where: str = offline if self._run.offline else self._run.url

    def write(self, row: Row) -> None:
        values = cells(row)
        # wandb ignores steps that the run has already: after a resume it keeps the earlier log points.
        self._run.log(
            {_tag(name): value for name, value in values.items() if value is not None},
            step=values["env_steps"],
        )

    def evaluation(self, env_steps: int, mean: float, std: float) -> None:
        self._run.log({"evaluation/env_steps": env_steps, **_evaluation_tags(mean, std)})

    def close(self) -> None:
        self._run.finish()
