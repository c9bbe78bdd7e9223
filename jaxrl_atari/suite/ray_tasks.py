"""The sessions of a suite on a Ray cluster: a task of Ray for each, in a process of its own.

While they train, SUITE_DIR/ray/ has a file for each session that has begun and, once a stop is requested, the file
`stop`: the processes may be on other machines, which share the directory.
"""

import os
import pickle
import shutil
import time
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from jaxrl_atari.cli import StopRequest
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import reason
from jaxrl_atari.imports import Code, code_to_send, import_sent
from jaxrl_atari.runs.run_dir import checkpoint_steps, session_dir
from jaxrl_atari.suite.launch import POLL_SECONDS, STOPPING, Failure, Item, OnEnd, Train
from jaxrl_atari.suite.ray_cluster import (
    KILLED,
    OUTPUT_FILE,
    SECONDS_BETWEEN_NEWS,
    Ended,
    MachineShare,
    ResourcesConfig,
    connected,
    run_in_worker,
)


def run_on_ray(
    items: Sequence[Item],
    train: Train,
    on_end: OnEnd,
    *,
    directory: Path,
    address: str,
    devices: DevicesConfig,
    resources: ResourcesConfig,
) -> None:
    """Trains sessions on a Ray cluster, as many at a time as there is room for.

    The output of a session goes to output.txt in its directory.

    Args:
        items, train, on_end: see `Launcher`. `train` can be imported, or is a `functools.partial` of what can.
        directory: directory of the suite, which the machines share.
        address: address of the cluster.
        devices: devices of the config.
        resources: resources of each session.

    Raises:
        UserError: the cluster cannot be used, or a session needs more than a machine has.
        KeyboardInterrupt: a stop was requested and passed on, and every running session has ended. A second Ctrl-C
            kills them.
    """
    code = code_to_send()
    notes = directory.absolute() / "ray"
    shutil.rmtree(notes, ignore_errors=True)  # left by a process that was killed
    notes.mkdir()
    try:
        with connected(address, devices, resources) as share, StopRequest(quick=False, answer=STOPPING) as stop:
            task = ray.remote(num_gpus=share.gpu, num_cpus=share.cpu, max_calls=1, max_retries=0)(_train_in_task)
            waiting = {task.remote(code, _packed(train, item), share, notes): item for item in items}
            running: dict[ray.ObjectRef, Item] = {}
            stopping = False
            said = time.monotonic()
            while waiting or running:
                if stop.requested and not stopping:
                    stopping = True
                    (notes / "stop").touch()
                    for reference in waiting:
                        ray.cancel(reference)
                ended, _ = ray.wait(
                    [*running, *waiting], num_returns=len(running) + len(waiting), timeout=POLL_SECONDS
                )
                begun = {path.name for path in notes.iterdir()}
                for reference, item in list(waiting.items()):
                    if str(item.number) in begun or reference in ended:
                        running[reference] = waiting.pop(reference)
                        if str(item.number) in begun:
                            output = session_dir(item.run_dir, item.session) / OUTPUT_FILE
                            item.say(f"starts; its output is in {output}")
                if time.monotonic() > said + SECONDS_BETWEEN_NEWS:
                    said = time.monotonic()
                    for item in running.values():
                        steps = checkpoint_steps(session_dir(item.run_dir, item.session))
                        item.say(f"at {max(steps, default=0):,} env steps")
                for reference in ended:
                    item = running.pop(reference)
                    result = _result(reference)
                    # After a stop request, a failure may be the signal's, which a cluster sends to every process.
                    if result.by_itself and not (stopping and result.failure):
                        on_end(item, result.failure)
    finally:
        shutil.rmtree(notes, ignore_errors=True)
    if stopping:
        raise KeyboardInterrupt


class Packed(NamedTuple):
    """A session as it is sent to its process."""

    number: int  # see `Item`
    folder: Path  # absolute: the process has another working directory
    pickled: bytes  # `train` and the item, which may be of classes that the user's own code defines


def _packed(train: Train, item: Item) -> Packed:
    absolute = item._replace(run_dir=item.run_dir.absolute())
    return Packed(item.number, session_dir(absolute.run_dir, item.session), pickle.dumps((train, absolute)))


def _result(reference: ray.ObjectRef) -> Ended:
    """How a task has ended."""
    try:
        return ray.get(reference)
    except TaskCancelledError:
        return Ended(False)
    except RayTaskError as error:  # before it trained: its folder cannot be made
        return Ended(True, Failure(reason(error.cause)))
    except RayError:
        return Ended(True, Failure(KILLED))


def _train_in_task(code: Sequence[Code], packed: Packed, share: MachineShare, notes: Path) -> Ended:
    """Trains a session in its process: in a thread, which receives no signals.

    Args:
        code: what the user has named with --import. It is imported before the session is unpacked.
    """
    (notes / str(packed.number)).write_text(str(os.getpid()))
    stop_requested = (notes / "stop").exists

    def run() -> None:
        import_sent(code)
        train, item = pickle.loads(packed.pickled)
        train(item._replace(config=share.configure(item.config)), stop_requested=stop_requested)

    with ThreadPool(1) as thread:
        return thread.apply(run_in_worker, (packed.folder, share, stop_requested, run))
