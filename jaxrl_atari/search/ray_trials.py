"""The trials of a search on a Ray cluster, each in a process of its own; Ray Tune schedules them.

Import it after `ray_cluster.set_up_ray`, which sets Ray's environment.
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

from jaxrl_atari.cli import StopRequest, say
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.imports import Code, code_to_send, import_sent
from jaxrl_atari.suite.launch import POLL_SECONDS, STOPPING, Failure
from jaxrl_atari.suite.ray_cluster import (
    KILLED,
    OUTPUT_FILE,
    SECONDS_BETWEEN_NEWS,
    MachineShare,
    ResourcesConfig,
    connected,
    run_in_worker,
)

STOP_FILE = "stop"
"""Exists in the search directory once a stop is requested: the processes of trials may be on other machines."""

RunTrial = Callable[[Path, MachineShare, Callable[[], bool]], object]
"""Runs a trial to its end, or until a stop is requested: its directory, its share, whether a stop is requested."""

OnTrialEnd = Callable[[int, Failure | None], object]
"""Called for each trial that has ended by itself: its number, and why it failed, if it did."""


def trial_dir(search_dir: Path, number: int) -> Path:
    """The directory of a trial."""
    return search_dir / f"trial_{number}"


class _Events(TrialProgressCallback, tune.Stopper):
    """Prints which trials start, in place of Tune's own display, collects those that have ended, and stops
    Tune."""

    def __init__(self, search_dir: Path):
        super().__init__()
        self.search_dir = search_dir
        self.running = set[int]()
        self.ended: list[tuple[int, Failure | None]] = []

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Tune's question whether a trial is to be stopped: it stops by itself."""
        return False

    def stop_all(self) -> bool:
        """Tune's question whether no further trial is to start."""
        return (self.search_dir / STOP_FILE).exists() and not self.running

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        number = trial.config["trial"]
        self.running.add(number)
        directory = trial_dir(self.search_dir, number)
        say(f"{directory.name}  starts; its output is in {directory / OUTPUT_FILE}")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial.config["trial"], Failure(KILLED))

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial.config["trial"], trial.last_result["failure"])

    def _end(self, number: int, failure: Failure | None) -> None:
        self.running.discard(number)
        self.ended.append((number, failure))


def _run_trial(
    config: dict[str, int], search_dir: Path, run_trial: RunTrial, share: MachineShare, code: Sequence[Code]
) -> dict[str, Any]:
    """Runs a trial in its process: Tune does so in a thread, which receives no signals. Returns its result for
    Tune."""
    directory = trial_dir(search_dir, config["trial"])
    stop_requested = (search_dir / STOP_FILE).exists

    def run() -> None:
        import_sent(code)
        run_trial(directory, share, stop_requested)

    return run_in_worker(directory, share, stop_requested, run)._asdict()


def run_trials(
    numbers: Sequence[int],
    run_trial: RunTrial,
    on_end: OnTrialEnd,
    *,
    search_dir: Path,
    address: str,
    devices: DevicesConfig,
    resources: ResourcesConfig,
    progress: Callable[[int], str],
) -> None:
    """Runs the trials of a search, each in a process of its own, as many at a time as there is room for.

    Args:
        numbers: the trials, whose directories are SEARCH_DIR/trial_<number>. Their output goes to output.txt
            there.
        run_trial: can be imported, or is a `functools.partial` of what can.
        on_end: called in this process for each trial that has ended by itself.
        search_dir: directory of the search, which the machines of the cluster share.
        address: address of the cluster. Empty: this machine alone.
        devices: devices of the config.
        resources: resources of each trial.
        progress: number of a trial -> one line on how far it is, printed every 30 seconds.

    Raises:
        UserError: the cluster cannot be used, or a trial needs more than a machine has.
        KeyboardInterrupt: a stop was requested and passed on, and every running trial has ended. A second Ctrl-C
            kills them.
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
        share = exits.enter_context(connected(address, devices, resources))
        trainable = tune.with_parameters(
            _run_trial, search_dir=search_dir, run_trial=run_trial, share=share, code=code
        )
        tuner = tune.Tuner(
            tune.with_resources(trainable, share._asdict()),
            # Optuna chooses the fields of a trial, in its process; Tune gives each process a trial.
            param_space={"trial": tune.grid_search(list(numbers))},
            tune_config=tune.TuneConfig(trial_dirname_creator=lambda trial: f"trial_{trial.config['trial']}"),
            run_config=tune.RunConfig(
                name="ray", storage_path=str(search_dir), verbose=0, callbacks=[events], stop=events
            ),
        )
        # In a thread, because Tune in the main thread would handle the signals.
        thread = exits.enter_context(ThreadPool(1))
        stop = exits.enter_context(StopRequest(quick=False, answer=STOPPING))  # after Ray, which takes SIGTERM
        fitting = thread.apply_async(tuner.fit)
        said = time.monotonic()
        while not fitting.ready() or events.ended:
            fitting.wait(POLL_SECONDS)
            if stop.requested:
                stop_file.touch()
                events.ended.clear()  # they may have stopped or, like the command, been sent the signal
            if time.monotonic() > said + SECONDS_BETWEEN_NEWS:
                said = time.monotonic()
                for number in sorted(events.running):
                    say(progress(number))
            while events.ended:
                on_end(*events.ended.pop(0))
        fitting.get()
    if stop.requested:
        raise KeyboardInterrupt
