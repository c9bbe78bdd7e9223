"""Where a session's metrics go: the terminal, CSV, TensorBoard, JSON lines, Weights & Biases.

Each is a `Writer`; a session holds a list of them and gives every log point to each. What the columns mean is in
docs/metrics.md.
"""

import csv
import io
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.run_dir.progress import ProgressWriter

Row = Mapping[str, Any]
"""A log point: column -> a number (Python, NumPy or JAX), None or NaN where there is none. Columns may be missing."""

COLUMNS = {
    "env_steps": "charts",
    "updates": "charts",
    "optimizer_steps": "charts",
    "wall_seconds": "charts",
    "sps": "charts",
    "episodes": "charts",
    "return_mean": "charts",
    "return_ma": "charts",
    "episode_length": "charts",
    "learning_rate": "charts",
    "policy_loss": "losses",
    "value_loss": "losses",
    "entropy": "losses",
    "approx_kl": "losses",
    "clip_fraction": "losses",
    "explained_variance": "losses",
    "gradient_norm": "losses",
    "gpu_busy_percent": "system",
    "gpu_memory_gib": "system",
    "gpu_power_watts": "system",
    "gpu_temperature_c": "system",
    "cpu_percent": "system",
    "rss_gib": "system",
}
"""The columns of a log point, in their fixed order, each with its group of graphs. Others in a row are not written."""


class Writer(Protocol):
    """What takes a session's log points. Each method does nothing unless a writer has a use for it."""

    def write(self, row: Row) -> None:
        """Takes a log point."""

    def progress(self, env_steps: int, row: Row) -> None:
        """Called after each update, up to 20 times a second; `row` is the newest log point, empty before the first."""

    def message(self, text: str) -> None:
        """A line for the user."""

    def close(self) -> None:
        """Writes out what is left and lets go of files; called once, also when training broke off."""


def make_writers(config: Config, session_dir: Path, *, label: str, start_env_steps: int = 0) -> list[Writer]:
    """The writers that `config.log` asks for; the files are made in `session_dir`, which is made too.

    Args:
        label: the session's name on the terminal.
        start_env_steps: where a resumed session goes on. Log points beyond it are dropped from the files: they will
            be made again.

    Raises:
        UserError: Weights & Biases is asked for and cannot be used.
    """
    if config.log.wandb:
        import_wandb()  # before any file is made
    session_dir.mkdir(parents=True, exist_ok=True)
    terminal = ProgressWriter(config.total_env_steps, label=label)
    writers: list[Writer] = [terminal, CsvWriter(session_dir / "metrics.csv", start_env_steps)]
    if config.log.tensorboard:
        writers.append(TensorBoardWriter(session_dir, start_env_steps))
    if config.log.jsonl:
        writers.append(JsonLinesWriter(session_dir / "metrics.jsonl", start_env_steps))
    if config.log.wandb:
        wandb_writer = WandbWriter(config, session_dir)
        terminal.message(f"Weights & Biases: {wandb_writer.where}")
        writers.append(wandb_writer)
    return writers


def cells(row: Row) -> dict[str, int | float | None]:
    """A log point as Python numbers, all of `COLUMNS` in order; None where it has no finite number."""

    def cell(value: Any) -> int | float | None:
        value = value.item() if hasattr(value, "item") else value  # of NumPy and JAX scalars
        return value if value is not None and math.isfinite(value) else None

    return {name: cell(row.get(name)) for name in COLUMNS}


# --- Files -----------------------------------------------------------------------------------------------------------


def _replace_file(path: Path, lines: Iterable[str]) -> None:
    """Replaces a file by these lines as a whole: a crash leaves the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that end as lines do: one without its line feed was cut short by a crash."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        return [line for line in file if line.endswith("\n")]


def _csv_line(values: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(
        # 9 digits tell all float32 numbers apart.
        ["" if value is None else f"{value:.9g}" if isinstance(value, float) else value for value in values]
    )
    return text.getvalue()


class CsvWriter(Writer):
    """metrics.csv: a header and a row for each log point, on disk as soon as it is written; NaN is an empty cell."""

    def __init__(self, path: Path, start_env_steps: int = 0):
        kept = []
        if path.exists():
            for row in csv.DictReader(_whole_lines(path)):
                try:
                    if int(row["env_steps"]) <= start_env_steps:
                        kept.append(_csv_line(row.get(name) for name in COLUMNS))
                except (KeyError, TypeError, ValueError):  # a damaged line
                    continue
        _replace_file(path, [_csv_line(COLUMNS), *kept])
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, row: Row) -> None:
        self._file.write(_csv_line(cells(row).values()))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class JsonLinesWriter(Writer):
    """metrics.jsonl: one JSON object for each log point; NaN is null."""

    def __init__(self, path: Path, start_env_steps: int = 0):
        kept = []
        for line in _whole_lines(path) if path.exists() else ():
            try:
                if json.loads(line)["env_steps"] <= start_env_steps:
                    kept.append(line)
            except (KeyError, TypeError, ValueError):  # a damaged line
                continue
        _replace_file(path, kept)
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(cells(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter(Writer):
    """TensorBoard event files, a new one each time that a session goes on.

    Only TensorBoard's record format and messages are used: its own `EventFileWriter` imports TensorFlow, where there
    is one, which takes seconds and GPU memory.
    """

    def __init__(self, directory: Path, start_env_steps: int = 0):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # pyright cannot see the messages: protobuf makes them at run time.
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        session_log = event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        # TensorBoard reads the files of a directory in the order of their names.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{os.getpid()}"
        self._file = RecordWriter((directory / name).open("wb"))
        self._add(self._event(file_version="brain.Event:2"))
        # The readers' sign to forget what they have from this step on.
        start = session_log(status=session_log.START)
        self._add(self._event(step=start_env_steps + 1, session_log=start))

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._file.write(event.SerializeToString())
        self._file.flush()

    def write(self, row: Row) -> None:
        values = cells(row)
        summary = self._summary()
        for name, value in values.items():
            if value is not None:
                summary.value.add(tag=f"{COLUMNS[name]}/{name}", simple_value=value)
        self._add(self._event(step=values["env_steps"], summary=summary))

    def close(self) -> None:
        self._file.close()


# --- Weights & Biases ------------------------------------------------------------------------------------------------


def import_wandb() -> Any:
    """The `wandb` module. Raises `UserError`, saying how to install it, where it is missing."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]

        wandb.init  # a folder `wandb/`, which its runs leave behind, imports as an empty package  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise UserError(
            "log.wandb = true: the package wandb is not installed; pip install 'jaxrl_atari[wandb]'"
            " or leave log.wandb out"
        ) from error
    return wandb


class WandbWriter(Writer):
    """A Weights & Biases run, grouped by trial. A resumed session goes on with its run.

    WANDB_MODE, WANDB_ENTITY and the rest of its environment variables hold as ever.
    """

    def __init__(self, config: Config, session_dir: Path):
        wandb = import_wandb()
        session_dir = session_dir.resolve()
        trial = session_dir.parent.name
        name = f"{trial}-{session_dir.name}"
        try:
            self._run = wandb.init(
                project=config.log.wandb_project,
                group=trial,
                name=name,
                id="".join(c if c.isalnum() or c in "-_" else "-" for c in name),  # what an id may hold
                resume="allow",
                dir=session_dir,
                config=config.to_dict(),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise UserError(
                f"log.wandb = true: {error}; run `wandb login`, set WANDB_MODE=offline, or leave log.wandb out"
            ) from error
        offline = f"offline; upload with `wandb sync {Path(self._run.dir).parent}`"
        self.where: str = offline if self._run.offline else self._run.url

    def write(self, row: Row) -> None:
        values = cells(row)
        # Steps that the run has already are ignored by wandb: after a resume it keeps the log points it was given.
        self._run.log(
            {f"{COLUMNS[name]}/{name}": value for name, value in values.items() if value is not None},
            step=values["env_steps"],
        )

    def close(self) -> None:
        self._run.finish()
