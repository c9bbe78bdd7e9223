"""Items of work on a Ray cluster, each in a process of its own; Ray Tune is the scheduler.

Import it within `ray_cluster.cluster`, which sets Ray's environment first.
"""

import contextlib
import logging
import os
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback

from jaxrl_atari.cli import counted, say
from jaxrl_atari.cli.stopping import StopRequest
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.hardware import runtime
from jaxrl_atari.suite.ray_cluster import ResourcesConfig, Share, allot

POLL_SECONDS = 0.2
STATUS_SECONDS = 30.0
STOPPING = "stopping: what runs writes a last checkpoint (Ctrl-C again: stop at once)"
OUTPUT_FILE = "output.txt"
FAILED = "failed: "

Function = Callable[[Path, Share, Callable[[], bool]], object]
"""Runs an item to its end, or until a stop is requested: its folder, its share, whether a stop is requested."""


@dataclass(eq=False)
class _Progress(TrialProgressCallback, tune.Stopper):
    """Shows what runs, in place of Tune's own display, reports what has ended, and ends Tune after a stop request."""

    directory: Path
    status: Callable[[str], str]
    on_end: Callable[[str, str | None], object]
    stop_requested: Callable[[], bool]
    failures: dict[str, str] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    shown_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        super().__init__()

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        self.running = [trial.config["item"] for trial in trials if trial.status == "RUNNING"]
        if time.monotonic() - self.shown_at >= STATUS_SECONDS:
            self.shown_at = time.monotonic()
            say("running: " + ("; ".join(map(self.status, self.running)) or "none"))

    def __call__(self, trial_id: str, result: dict) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.stop_requested() and not self.running

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        say(f"{trial.config['item']}  starts")

    def on_trial_recover(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        say(f"{trial.config['item']}  is tried again: {self._failure(trial)}")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        failure = None
        if not self.stop_requested():  # whoever requested the stop may have sent a signal to every process
            failure = self.failures[trial.config["item"]] = self._failure(trial)
        self.on_end(trial.config["item"], failure)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self.on_end(trial.config["item"], None)

    def _failure(self, trial: Any) -> str:
        """Why an item failed, without the advice: the last line of its output, if its process could still write it."""
        output = self.directory / trial.config["item"] / OUTPUT_FILE
        if not output.exists():
            return "its process did not start"
        last = output.read_text(encoding="utf-8").splitlines()[-1]
        killed = "its process was killed, by hand or for lack of memory"
        return last.removeprefix(FAILED).partition("; ")[0] if last.startswith(FAILED) else killed


def _run_item(config: dict[str, Any], directory: Path, function: Function, share: Share) -> None:
    """Runs an item in its process: in a thread, which receives no signals."""
    folder = directory / config["item"]
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / OUTPUT_FILE).open("a", buffering=1, encoding="utf-8") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        print(share)
        if share.gpu == 0:
            os.environ.setdefault("NPROC", str(share.cpu))  # number of XLA's threads, read when JAX starts
        runtime.configure()
        try:
            if not _stop_file(directory).exists():
                function(folder, share, _stop_file(directory).exists)
        except Exception as error:
            traceback.print_exc()
            print(f"{FAILED}{reason(error)}")
            raise


def _stop_file(directory: Path) -> Path:
    """Exists once a stop is requested: the processes of items may be on other machines."""
    return directory / "stop"


def run_items(
    address: str,
    directory: Path,
    items: Sequence[str],
    function: Function,
    *,
    devices: DevicesConfig,
    resources: ResourcesConfig,
    retries: int = 0,
    status: Callable[[str], str] = str,
    on_end: Callable[[str, str | None], object] = lambda item, failure: None,
) -> dict[str, str]:
    """Runs items, each in a process of its own, with as many at a time as there is room for.

    Args:
        address: of the cluster, whose machines share `directory`.
        items: folders of the items below `directory`, such as `trial_3` or `Pong/session_0`. Their output goes to
            output.txt there.
        function: can be imported, or is a `functools.partial` of what can.
        devices: of the config.
        retries: how often an item that fails is started again.
        status: the progress of an item, in a few words.
        on_end: called with an item that has ended or stopped and why it failed, if it did; in another thread.

    Returns:
        The failed items and the reasons.

    Raises:
        UserError: the cluster cannot be used, or an item needs more than a machine has.
        KeyboardInterrupt: a stop was requested and passed on, and what ran has ended. A second Ctrl-C kills it.
    """
    directory = directory.absolute()
    stop_file = _stop_file(directory)
    progress = _Progress(directory, status, on_end, stop_file.exists)
    stop_file.unlink(missing_ok=True)  # left by a process that was killed

    try:
        # In the main thread, Ray and Tune would handle the signals. `StopRequest` comes after Ray, which takes SIGTERM.
        with ThreadPool(1) as thread:
            try:
                thread.apply(ray.init, (address,), {"log_to_driver": False, "logging_level": logging.CRITICAL})
            except Exception as error:  # Ray has no narrower class
                raise UserError(f"Ray at {address}: {reason(error.__cause__ or error)}") from error
            share = allot(resources, [node["Resources"] for node in ray.nodes() if node["Alive"]], devices)
            say(f"each has {counted(share.gpu, 'GPU')} and {counted(share.cpu, 'core')}")
            trainable = tune.with_parameters(_run_item, directory=directory, function=function, share=share)
            tuner = tune.Tuner(
                tune.with_resources(trainable, share._asdict()),
                param_space={"item": tune.grid_search(list(items))},
                tune_config=tune.TuneConfig(trial_dirname_creator=lambda trial: trial.config["item"].replace("/", "_")),
                run_config=tune.RunConfig(
                    name="ray", storage_path=str(directory), verbose=0, callbacks=[progress], stop=progress,
                    failure_config=tune.FailureConfig(max_failures=retries),
                ),
            )  # fmt: skip
            with StopRequest(quick=False, answer=STOPPING) as stop:
                fitting = thread.apply_async(tuner.fit)
                while not fitting.ready():
                    fitting.wait(POLL_SECONDS)
                    if stop.requested():
                        stop_file.touch()
                fitting.get()
    finally:
        ray.shutdown()
        stop_file.unlink(missing_ok=True)
        shutil.rmtree(directory / "ray", ignore_errors=True)
    if stop.requested():
        raise KeyboardInterrupt
    return progress.failures
