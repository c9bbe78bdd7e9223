"""One trial of a search, in the process that Ray Tune starts for it."""

import contextlib
import dataclasses
import math
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_atari.cli.stopping import StopRequest
from jaxrl_atari.config import Config
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.hardware import runtime
from jaxrl_atari.hardware.gpus import Visible, visible
from jaxrl_atari.hardware.memory_share import equal_share
from jaxrl_atari.hardware.rotation import check_devices
from jaxrl_atari.report.search_records import read_records, trial_dir, write_record
from jaxrl_atari.report.summary import write_trial_summary
from jaxrl_atari.runs.run_dir import describe_resumed, is_finished, session_dir, write_description
from jaxrl_atari.runs.writers import Row, Writer
from jaxrl_atari.search.files import StopFile, read_search
from jaxrl_atari.search.space import Fields, SearchConfig, set_fields
from jaxrl_atari.session import run_session


def usable_gpus(config: Config) -> Visible:
    """The GPUs of this machine that trials may use. Each trial checks `devices.memory_fraction` against its share.

    Raises:
        ConfigError: devices.gpu is true and there is none, or a trial needs more devices than there are.
    """
    return check_devices(dataclasses.replace(config.devices, memory_fraction=None))


def memory_share(gpu: float) -> float:
    """Share of a GPU's memory for a trial with `gpu` GPUs. Raises `ConfigError` if it is too small to train in."""
    total = min((found.memory for found in visible().gpus), default=0)
    try:
        return equal_share(1.0 / min(gpu, 1.0), total)
    except ConfigError as error:
        raise ConfigError("search.resources.gpu", gpu, f"a larger share of {total / 2**30:.0f} GiB") from error


def trial_config(config: Config, search: SearchConfig, fields: Fields, gpu: float, cpu: int) -> Config:
    """The config of one trial.

    Args:
        config: the config of the search.
        gpu: GPUs of the trial; 0 trains on the CPU.
        cpu: CPU cores of the trial.

    Raises:
        ConfigError: the fields do not fit together, or devices.memory_fraction exceeds the trial's share of a GPU.
    """
    config = set_fields(config, fields)
    fraction = config.devices.memory_fraction
    share: Fields = {"trial.parallel": 1, "env.num_threads": config.env.num_threads or cpu}
    if gpu == 0:
        share["devices.gpu"] = False
    elif fraction is None:
        share["devices.memory_fraction"] = memory_share(gpu)
    elif fraction > min(gpu, 1.0):
        raise ConfigError("devices.memory_fraction", fraction, f"at most search.resources.gpu = {gpu:g}")
    if search.early_stopping == "asha":
        share["sessions"] = 1
    return set_fields(config, {**share, "log.graphs": False})  # drawing needs a process of its own


@dataclass
class TuneWriter(Writer):
    """Reports log points to Ray Tune, which may end the calling thread (SystemExit).

    The last log point, at the budget or after a stop request, is not reported: the last checkpoint comes first.
    """

    config: Config
    stop: StopRequest

    def write(self, row: Row) -> None:
        score = float(row["return_ma"])
        last = self.config.is_spent(int(row["env_steps"])) or self.stop.requested()
        if math.isfinite(score) and not last:
            from ray import tune

            tune.report({"env_steps": int(row["env_steps"]), "return_ma": score})


def run_search_trial(task: dict[str, Any]) -> dict[str, Any] | None:
    """Trains one trial of a search. Ray Tune calls it in a new process.

    Args:
        task: `search_dir`, `number`, `fields`, and the trial's share of the machine, `gpu` and `cpu`.

    Returns:
        The last result for Ray Tune: `env_steps` and `return_ma`, the score. None if no game was finished, or the
        search is being interrupted.
    """
    search_dir, cpu = Path(task["search_dir"]), task["cpu"]
    run_dir = trial_dir(search_dir, task["number"])
    record = read_records(search_dir)[task["number"]]
    write_record(search_dir, dataclasses.replace(record, status="unfinished", reason=""))  # of an earlier end
    with output_and_failure_recorded(search_dir, task["number"]):
        config = trial_config(*read_search(search_dir), task["fields"], task["gpu"], cpu)
        if task["gpu"] == 0:
            os.environ.setdefault("NPROC", str(cpu))  # number of XLA's threads, read when JAX starts
        runtime.configure()
        write_description(run_dir, describe_resumed(config, run_dir))
        stop = StopFile(search_dir)
        for session in range(config.sessions):
            directory = session_dir(run_dir, session)
            if not is_finished(config, directory):
                writers = [TuneWriter(config, stop)]
                try:
                    run_session(config, directory, session, resume=True, writers=writers, stop_requested=stop.requested)
                except KeyboardInterrupt:
                    return None
        summary = write_trial_summary(run_dir)
    if summary["score"] is None:
        return None
    return {"env_steps": round(summary["mean"]["env_steps"]), "return_ma": summary["score"]}


@contextlib.contextmanager
def output_and_failure_recorded(search_dir: Path, number: int) -> Iterator[None]:
    """Appends what is printed to output.txt, and writes the reason of a failure to the record.

    The reason is what happened. In a `UserError`, the advice after the semicolon is left out.
    """
    with (
        (trial_dir(search_dir, number) / "output.txt").open("a", buffering=1, encoding="utf-8") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            yield
        except Exception as error:
            message = " ".join(str(error).split())
            if isinstance(error, UserError):
                reason = message.partition("; ")[0]
            else:
                traceback.print_exc()
                reason = f"{type(error).__name__}: {message}"
            print(f"failed: {message}")
            record = read_records(search_dir)[number]
            write_record(search_dir, dataclasses.replace(record, status="failed", reason=reason[:300]))
            raise
