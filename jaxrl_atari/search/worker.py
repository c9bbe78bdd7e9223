"""One trial of a search, in the process that Ray starts for it, and the files that trial and search share.

SEARCH_DIR/search.json        config and search
SEARCH_DIR/trial_<i>/         a run directory like any other: config.json, session_<j>/
SEARCH_DIR/trial_<i>/record.json  number, fields, and how the trial stands (`Record`)
SEARCH_DIR/trial_<i>/output.txt   what the trial printed
"""

import contextlib
import dataclasses
import json
import math
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrl_atari.config import Config
from jaxrl_atari.config_files import CONFIG_FILE
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.hardware import runtime
from jaxrl_atari.run_dir.files import write_json
from jaxrl_atari.run_dir.results import write_trial_summary
from jaxrl_atari.run_dir.writers import Row, Writer
from jaxrl_atari.search.space import Fields, SearchConfig, read_search, set_fields
from jaxrl_atari.trial.stopping import StopRequest
from jaxrl_atari.trial.trial import describe, is_finished, session_dir, train_session

Status = Literal["unfinished", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Record:
    """How a trial of a search stands. Only `unfinished` ones are run when a search is resumed."""

    number: int
    fields: Fields
    status: Status = "unfinished"
    reason: str = ""  # why it ended
    score: float | None = None  # mean over sessions of the last return_ma; None before the first finished game
    env_steps: int = 0  # reached, the mean over sessions


def trial_dir(search_dir: Path, number: int) -> Path:
    """Where trial `number` keeps its files."""
    return search_dir / f"trial_{number}"


def write_record(search_dir: Path, record: Record) -> None:
    """Writes a trial's record; makes its directory."""
    directory = trial_dir(search_dir, record.number)
    directory.mkdir(exist_ok=True)
    write_json(directory / "record.json", dataclasses.asdict(record))


def read_records(search_dir: Path) -> dict[int, Record]:
    """The records of all trials that have been begun, by number."""
    paths = search_dir.glob("trial_*/record.json")
    records = [Record(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return {record.number: record for record in sorted(records, key=lambda record: record.number)}


def ranked(records: Sequence[Record]) -> list[Record]:
    """The trials that have a score and did not fail, best first.

    Those that ASHA has stopped come last: they were worse than others at the same env steps, though perhaps not in the
    end.
    """
    scored = [record for record in records if record.score is not None and record.status in ("finished", "stopped")]
    return sorted(scored, key=lambda record: (record.status == "stopped", -(record.score or 0.0), record.number))


def short(value: Any) -> str:
    """A field's value for people: four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def memory_share(gpu: float) -> float:
    """Share of a GPU's memory for a trial that gets `gpu` GPUs: nine tenths of its part."""
    return round(0.9 * min(gpu, 1.0), 4)


def trial_config(config: Config, search: SearchConfig, fields: Fields, gpu: float, cpu: int) -> Config:
    """The config of one trial.

    Args:
        config: of the search.
        gpu: GPUs that the trial has; 0 trains on the CPU.
        cpu: CPU cores that it has.

    Raises:
        ConfigError: the fields do not fit together, or devices.memory_fraction is more than the trial's part.
    """
    devices = config.devices
    if gpu == 0:
        devices = dataclasses.replace(devices, gpu=False)
    elif devices.memory_fraction is None:
        devices = dataclasses.replace(devices, memory_fraction=memory_share(gpu))
    elif devices.memory_fraction > min(gpu, 1.0):
        raise ConfigError("devices.memory_fraction", devices.memory_fraction, f"at most search.resources.gpu = {gpu:g}")
    config = set_fields(config, fields)
    return dataclasses.replace(
        config,
        sessions=1 if search.early_stopping == "asha" else config.sessions,
        devices=devices,
        env=dataclasses.replace(config.env, num_threads=config.env.num_threads or cpu),
        trial=dataclasses.replace(config.trial, parallel=1),
        log=dataclasses.replace(config.log, graphs=False),  # drawing takes a process of its own
    )


class StopFile(StopRequest):
    """A wish to stop that reaches all processes of a search: a signal to it leaves a file, which its trials find.

    Ray calls trials in threads, which take no signals, and perhaps on other machines.
    """

    def __init__(self, search_dir: Path):
        super().__init__()
        self._path = search_dir / "stop"

    def wanted(self) -> bool:
        return self._path.exists()

    def _handle(self, number: int, frame: Any) -> None:
        super()._handle(number, frame)
        self._path.touch()

    def clear(self) -> None:
        """Takes the wish back."""
        self._path.unlink(missing_ok=True)


@dataclass
class TuneWriter(Writer):
    """Reports log points to Ray Tune, which may end the process's thread there (SystemExit).

    The last one is left out, also of a trial that is told to stop: first its last checkpoint is to be written.
    """

    config: Config
    session: int
    stop: StopRequest

    def write(self, row: Row) -> None:
        score = float(row["return_ma"])
        last = self.config.is_spent(int(row["env_steps"])) or self.stop.wanted()
        if math.isfinite(score) and not last:
            from ray import tune

            tune.report({"env_steps": int(row["env_steps"]), "return_ma": score, "session": self.session})


def run_search_trial(task: dict[str, Any]) -> dict[str, Any] | None:
    """Trains one trial of a search; Ray Tune calls it in a fresh process.

    Args:
        task: `search_dir`, `number`, `fields`, and the trial's part of the machine, `gpu` and `cpu`.

    Returns:
        What Ray Tune is told at the end: `env_steps` and `return_ma`, the score. None where no game was finished, or
        the search is being interrupted.
    """
    directory = trial_dir(Path(task["search_dir"]), task["number"])
    with recorded(directory):
        return _train(directory, task)


@contextlib.contextmanager
def recorded(directory: Path) -> Iterator[None]:
    """Keeps what is printed in output.txt, and the reason of a failure in failure.json, which the search reads.

    The reason is what happened: what a `UserError` says beyond that, behind a semicolon, is what to do about it.
    """
    with (
        (directory / "output.txt").open("a", buffering=1, encoding="utf-8") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            yield
        except Exception as error:
            if not isinstance(error, UserError):
                traceback.print_exc()
            said = " ".join(str(error).split())
            print(f"failed: {said}")
            reason = said.partition("; ")[0] if isinstance(error, UserError) else f"{type(error).__name__}: {said}"
            write_json(directory / "failure.json", {"reason": reason[:300]})
            raise


def prepare(task: dict[str, Any]) -> Config:
    """The config of this process's trial; its part of the machine is set in the environment, for JAX to find."""
    config = trial_config(*read_search(Path(task["search_dir"])), task["fields"], task["gpu"], task["cpu"])
    if task["gpu"] == 0:
        os.environ.setdefault("NPROC", str(task["cpu"]))  # threads that XLA computes with
    runtime.configure()
    return config


def _train(directory: Path, task: dict[str, Any]) -> dict[str, Any] | None:
    config = prepare(task)
    write_json(directory / CONFIG_FILE, describe(config, config.seed))
    stop = StopFile(directory.parent)
    for session in range(config.sessions):
        if not is_finished(config, session_dir(directory, session)):
            writers = [TuneWriter(config, session, stop)]
            try:
                train_session(config, directory, session, resume=True, writers=writers, stop=stop)
            except KeyboardInterrupt:
                return None
    summary = write_trial_summary(directory)
    if summary["score"] is None:
        return None
    return {"env_steps": round(summary["mean"]["env_steps"]), "return_ma": summary["score"], "session": session}
