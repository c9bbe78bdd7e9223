"""Items of work on a Ray cluster, each in a process of its own; Ray Tune is the scheduler.

Import it after `ray_cluster.set_up_ray`, which sets Ray's environment.
"""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback

from jaxrl_atari.cli import StopRequest, counted, say
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.hardware import runtime
from jaxrl_atari.suite.processes import POLL_SECONDS, STOPPING, Failure, attempt
from jaxrl_atari.suite.ray_cluster import ResourcesConfig, Share, allot, cluster

KILLED = "its process was killed, by hand or for lack of memory, or did not start"

STOP_FILE = "stop"  # exists once a stop is requested: the processes of items may be on other machines
OUTPUT_FILE = "output.txt"
SECONDS_BETWEEN_NEWS = 30

RunItem = Callable[[Path, Share, Callable[[], bool]], object]
"""Runs an item to its end, or until a stop is requested: its folder, its share, whether a stop is requested."""


class _Events(TrialProgressCallback, tune.Stopper):
    """Prints which items start, in place of Tune's own display, collects those that have ended, and stops Tune."""

    def __init__(self, directory: Path):
        super().__init__()
        self.directory = directory
        self.running = set[str]()
        self.ended: list[tuple[str, Failure | None]] = []  # and why each failed, if it did

    def __call__(self, trial_id: str, result: dict) -> bool:
        return False

    def stop_all(self) -> bool:
        return (self.directory / STOP_FILE).exists() and not self.running

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self.running.add(item := trial.config["item"])
        say(f"{item}  starts; its output is in {self.directory / item / OUTPUT_FILE}")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial.config["item"], Failure(KILLED))

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial.config["item"], trial.last_result.get("failure"))

    def _end(self, item: str, failure: Failure | None) -> None:
        self.running.discard(item)
        self.ended.append((item, failure))


def _run_item(config: dict[str, str], directory: Path, function: RunItem, share: Share) -> dict[str, Any]:
    """Runs an item in its process: in a thread, which receives no signals. Returns its result for Tune."""
    path = directory / config["item"] / OUTPUT_FILE
    stop_requested = (directory / STOP_FILE).exists
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        path.open("a", buffering=1, encoding="utf-8") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        contextlib.suppress(KeyboardInterrupt),  # a stop was requested, and the last checkpoint is written
    ):
        if share.gpu == 0:
            os.environ.setdefault("NPROC", str(share.cpu))  # number of XLA's threads, read when JAX starts
        runtime.configure()
        if not stop_requested():
            return {"failure": attempt(function, path.parent, share, stop_requested)}
    return {}


def run_items(
    address: str,
    directory: Path,
    items: Sequence[str],
    function: RunItem,
    devices: DevicesConfig,
    resources: ResourcesConfig,
    progress: Callable[[str], str],
) -> Iterator[tuple[str, Failure | None]]:
    """Runs items, each in a process of its own, with as many at a time as there is room for.

    Args:
        address: address of the cluster, whose machines share `directory`. Empty: this machine alone.
        items: folders of the items below `directory`, such as `trial_3` or `Pong/session_0`. Their output goes to
            output.txt there.
        function: can be imported, or is a `functools.partial` of what can.
        devices: devices of the config.
        progress: item -> one line on how far it is, printed every 30 seconds.

    Yields:
        Each item that has ended by itself, and why it failed, if it did.

    Raises:
        UserError: the cluster cannot be used, or an item needs more than a machine has.
        KeyboardInterrupt: a stop was requested and passed on, and every running item has ended. A second
            Ctrl-C kills them.
    """
    if not items:
        return
    directory = directory.absolute()
    events = _Events(directory)
    stop_file = directory / STOP_FILE
    stop_file.unlink(missing_ok=True)  # left by a process that was killed
    # In the main thread, Ray and Tune would handle the signals. `StopRequest` comes after Ray, which takes SIGTERM.
    with cluster(address, devices) as found, ThreadPool(1) as thread:
        try:
            try:
                thread.apply(ray.init, (found,), {"log_to_driver": False, "logging_level": logging.CRITICAL})
            except Exception as error:  # Ray has no narrower class
                raise UserError(f"Ray at {found}: {reason(error.__cause__ or error)}") from error
            share = allot(resources, [node["Resources"] for node in ray.nodes() if node["Alive"]], devices)
            say(f"each has {counted(share.gpu, 'GPU')} and {counted(share.cpu, 'core')}")
            trainable = tune.with_parameters(_run_item, directory=directory, function=function, share=share)
            tuner = tune.Tuner(
                tune.with_resources(trainable, share._asdict()),
                param_space={"item": tune.grid_search(list(items))},
                tune_config=tune.TuneConfig(trial_dirname_creator=lambda trial: trial.config["item"].replace("/", "_")),
                run_config=tune.RunConfig(
                    name="ray", storage_path=str(directory), verbose=0, callbacks=[events], stop=events
                ),
            )
            with StopRequest(quick=False, answer=STOPPING) as stop:
                fitting = thread.apply_async(tuner.fit)
                said = time.monotonic()
                while not fitting.ready() or events.ended:
                    fitting.wait(POLL_SECONDS)
                    if stop.requested:
                        stop_file.touch()
                        events.ended.clear()  # they may have stopped or, like the command, been sent the signal
                    if time.monotonic() > said + SECONDS_BETWEEN_NEWS:
                        said = time.monotonic()
                        for item in sorted(events.running):
                            say(progress(item))
                    while events.ended:
                        yield events.ended.pop(0)
                fitting.get()
        finally:
            ray.shutdown()
            stop_file.unlink(missing_ok=True)
            shutil.rmtree(directory / "ray", ignore_errors=True)
    if stop.requested:
        raise KeyboardInterrupt
