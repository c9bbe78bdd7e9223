"""The trials of a search on a Ray cluster: Ray Tune starts them, each in a process of its own.

Import this module after `ray_cluster.set_up_ray`, which sets Ray's environment variables.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback

from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.imports import Code, code_to_send, import_sent
from jaxrl_atari.output import say
from jaxrl_atari.runs.layout import OUTPUT_FILE, session_dirs, trial_dir
from jaxrl_atari.trials.launch import POLL_SECONDS, STOPPING, Failure
from jaxrl_atari.trials.ray_cluster import (
    KILLED,
    SECONDS_BETWEEN_NEWS,
    connected,
    run_in_worker,
)
from jaxrl_atari.trials.resources import MachineShare, ResourcesConfig

STOP_FILE = "stop"
"""File in the search directory that requests a stop. Trials may run on other machines, which no signal reaches."""

TrainTrial = Callable[[Path, MachineShare, Callable[[], bool]], object]
"""Trains a trial to its end, or raises `Stopped`; see `trial.train_trial`. Its arguments are the directory of the
trial, the trial's share of a machine, and a function that returns whether a stop is requested."""

OnTrialEnd = Callable[[int, Failure | None], object]
"""Called for each trial that has ended, except after a stop request: its number, and its failure, if any."""


class _Events(TrialProgressCallback, tune.Stopper):
    """Tune's callbacks. They print which trials start, collect those that have ended, and stop Tune.

    They replace Tune's own display.
    """

    def __init__(self, search_dir: Path):
        super().__init__()
        self.search_dir = search_dir
        self.running = set[int]()
        self.ended: list[tuple[int, Failure | None]] = []

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether Tune is to stop a trial: never, because trials stop by themselves."""
        return False

    def stop_all(self) -> bool:
        """Whether Tune is to stop: after a stop request, once no trial is running."""
        return (self.search_dir / STOP_FILE).exists() and not self.running

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        self.running.add(number)
        directory = trial_dir(self.search_dir, number)
        say(f"{directory.name}  starts; its output is in {directory / OUTPUT_FILE}")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial.config["number"], Failure(KILLED))

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial.config["number"], trial.last_result["failure"])

    def _end(self, number: int, failure: Failure | None) -> None:
        self.running.discard(number)
        self.ended.append((number, failure))


def _train_in_task(
    values: dict[str, int], search_dir: Path, train: TrainTrial, share: MachineShare, code: Sequence[Code]
) -> dict[str, Any]:
    """Trains a trial in its process, and returns the fields of its `TaskEnd`, the result for Tune.

    Tune calls this in a thread, which receives no signals.

    Args:
        values: what Tune gives each of its trials: the `number` of the trial.
        code: the modules and files that the user has named with --import. They are imported first.
    """
    directory = trial_dir(search_dir, values["number"])
    stop_requested = (search_dir / STOP_FILE).exists

    def run() -> None:
        import_sent(code)
        train(directory, share, stop_requested)

    def has_begun() -> bool:
        return bool(session_dirs(directory))  # a session that is refused removes its new directory

    return run_in_worker(directory, share, stop_requested, run, has_begun)._asdict()


def _dirname(trial: Any) -> str:
    """The name of the directory of one of Tune's trials."""
    return f"trial_{trial.config['number']}"


def run_trials_on_ray(
    numbers: Sequence[int],
    train: TrainTrial,
    on_end: OnTrialEnd,
    *,
    search_dir: Path,
    address: str,
    devices: DevicesConfig,
    resources: ResourcesConfig,
    progress: Callable[[int], str],
) -> None:
    """Trains the trials of a search, as many at a time as the cluster has room for.

    Args:
        numbers: numbers of the trials. Trial i has the directory SEARCH_DIR/trial_<i>, with its output in
            output.txt.
        train: trains one of them. It is a function that can be imported, or a `functools.partial` of one.
        on_end: called in this process for each trial that has ended; see `OnTrialEnd`.
        search_dir: directory of the search, which all machines of the cluster share.
        address: address of the cluster; empty: this machine alone.
        devices: devices of the config.
        resources: resources of each trial.
        progress: returns the progress of a trial in one line, which is printed every 30 seconds.

    Raises:
        UserError: the cluster cannot be used, or a trial needs more than any machine has.
        KeyboardInterrupt: after a stop request, once every running trial has ended. A second Ctrl-C kills the
            trials.
    """
    if not numbers:
        return
    code = code_to_send()
    search_dir = search_dir.absolute()
    events = _Events(search_dir)
    stop_file = search_dir / STOP_FILE
    stop_file.unlink(missing_ok=True)  # left by a process that was killed
    with contextlib.ExitStack() as exits:
        exits.callback(shutil.rmtree, search_dir / "ray", ignore_errors=True)
        exits.callback(stop_file.unlink, missing_ok=True)
        share = exits.enter_context(connected(address, devices, resources, "trial"))
        trainable = tune.with_parameters(
            _train_in_task, search_dir=search_dir, train=train, share=share, code=code
        )
        tuner = tune.Tuner(
            tune.with_resources(trainable, share._asdict()),
            # Optuna chooses the fields of a trial, in the trial's process; Tune gives each process a number.
            param_space={"number": tune.grid_search(list(numbers))},
            tune_config=tune.TuneConfig(trial_dirname_creator=_dirname),
            run_config=tune.RunConfig(
                name="ray", storage_path=str(search_dir), verbose=0, callbacks=[events], stop=events
            ),
        )
        # Tune runs in a thread, because in the main thread it would handle the signals.
        thread = exits.enter_context(ThreadPool(1))
        stop = exits.enter_context(StopRequest(quick=False, answer=STOPPING))  # last: Ray handles SIGTERM too
        fit = thread.apply_async(tuner.fit)
        said = time.monotonic()
        try:
            while not fit.ready() or events.ended:
                fit.wait(POLL_SECONDS)
                if stop.requested:
                    stop_file.touch()
                    events.ended.clear()  # these trials may have ended because of the stop request
                if time.monotonic() > said + SECONDS_BETWEEN_NEWS:
                    said = time.monotonic()
                    for number in sorted(events.running):
                        say(progress(number))
                while events.ended:
                    on_end(*events.ended.pop(0))
        except Exception:  # for example from `on_end`; first, the trials write their last checkpoints
            stop_file.touch()
            fit.wait()
            raise
        fit.get()
    if stop.requested:
        raise KeyboardInterrupt
