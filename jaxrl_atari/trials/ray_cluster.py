"""A Ray cluster, of this machine alone or of several, and what its processes have in common.

The sessions of a suite (`ray_tasks.py`) and the trials of a search (`search/ray_trials.py`) are its items of work:
each has a process of its own, and a share of a machine. `python -m jaxrl_atari.trials.ray_cluster` is the process
that starts Ray on this machine.
"""

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, NamedTuple

from jaxrl_atari.checks import Limits, check_fields
from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.errors import UserError, reason, require
from jaxrl_atari.hardware.choice import choose_devices
from jaxrl_atari.hardware.gpus import visible
from jaxrl_atari.hardware.memory import memory_fraction
from jaxrl_atari.hardware.tuning import tune_process
from jaxrl_atari.output import counted, say
from jaxrl_atari.runs.layout import OUTPUT_FILE, session_dirs, session_files
from jaxrl_atari.trials.launch import Failure, attempt

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_AIR_NEW_OUTPUT": "0",  # no tables
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, items use this environment and build no second one
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the run directories hold the metrics
}
"""Ray's environment variables; it reads some of them at import."""

OBJECT_STORE_BYTES = 100 * 2**20  # nothing large passes through it

SECONDS_BETWEEN_NEWS = 30
"""How often the command says how far the running items are."""

KILLED = "its process was killed, by hand or for lack of memory, or did not start"


@dataclass(frozen=True)
class ResourcesConfig:
    """Resources of each item."""

    gpu: Annotated[float, Limits(0.0, 4_096.0)] = 1.0
    """GPUs of each: 0.5, 0.25, 0.125 for 2, 4, 8 on each GPU. With 0, or without a GPU, they run on the CPU."""
    cpu: Annotated[int, Limits(0, 4_096)] = 0
    """CPU cores of each. 0: an equal share where there are GPUs, 1 on a CPU."""

    def __post_init__(self) -> None:
        check_fields(self, "resources.")
        whole = self.gpu <= 1 or self.gpu == int(self.gpu)
        require(whole, "resources.gpu", self.gpu, "a share from 0 to 1, or a whole number of GPUs")


class MachineShare(NamedTuple):
    """The share of a machine that a session or a trial gets."""

    gpu: float  # 0: it runs on the CPU
    cpu: int  # cores

    def configure(self, config: Config) -> Config:
        """Returns a config that keeps within this share.

        It has the share's device, its part of a GPU's memory and, unless env.num_threads is chosen, as many
        emulator threads in each group as the share has cores.

        Raises:
            ConfigError: the share of the memory is too small, or devices.memory_fraction exceeds it.
        """
        devices = replace(config.devices, gpu=False)
        if self.gpu:
            memory = min((gpu.memory for gpu in visible().gpus), default=0)
            fraction = memory_fraction(config.devices, int(1 / min(self.gpu, 1)), memory)
            devices = replace(config.devices, memory_fraction=fraction)
        threads = 0 if config.env.backend == "gymnasium" else config.env.num_threads or self.cpu
        env = replace(config.env, num_threads=threads)
        return replace(config, devices=devices, env=env)


def allot(
    resources: ResourcesConfig, machines: Sequence[Mapping[str, float]], devices: DevicesConfig
) -> MachineShare:
    """Works out the share of a machine that each item gets.

    Args:
        resources: what the user asks for.
        machines: the resources of each machine of the cluster: numbers of "GPU" and "CPU".
        devices: devices of the config.

    Raises:
        UserError: an item needs more than any machine has.
    """
    owned = [(machine.get("GPU", 0.0), machine.get("CPU", 0.0)) for machine in machines]
    gpu = resources.gpu if devices.gpu and any(gpus for gpus, _ in owned) else 0.0
    cpu = max(resources.cpu, 1)
    expected = "a GPU on a machine of the Ray cluster, and resources.gpu above 0"
    require(devices.gpu is not True or gpu > 0, "devices.gpu", True, expected)
    fitting = [(gpus, cores) for gpus, cores in owned if gpus >= gpu and cores >= cpu]
    if not fitting:
        there = "; ".join(f"{counted(gpus, 'GPU')} and {counted(cores, 'core')}" for gpus, cores in owned)
        raise UserError(
            f"resources: expected a machine with {counted(gpu, 'GPU')} and {counted(cpu, 'core')}; found {there}"
        )
    equal = min(int(cores * gpu / gpus) for gpus, cores in fitting) if gpu else 1
    return MachineShare(gpu, resources.cpu or max(equal, 1))


def set_up_ray(address: str, devices: DevicesConfig) -> None:
    """Sets Ray's environment, and checks that items can be run.

    Raises:
        UserError: Ray is not installed, or there is no cluster at `address`.
        ConfigError: `devices` asks for what is not there, or for what an item cannot have.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed: pip install 'jaxrl_atari[search]'")
    os.environ.update(RAY_VARIABLES)
    require(not devices.distributed, "devices.distributed", True, "false on a Ray cluster")
    hint = "choose among the GPUs with CUDA_VISIBLE_DEVICES"
    assigned = isinstance(devices.gpu, bool | str)
    require(assigned, "devices.gpu", devices.gpu, "auto, true or false where Ray assigns the GPUs", hint)
    if not address:
        # Ray runs what it is sent: it listens on the loopback interface only, and to those who have the token.
        os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        choose_devices(devices)
    elif address != "auto":
        host, _, port = address.rpartition(":")
        try:  # Ray would wait minutes for a dead address
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            raise UserError(f"address {address}: {reason(error)}; expected HOST:PORT of a `ray start`") from error


@contextlib.contextmanager
def cluster(address: str, devices: DevicesConfig) -> Iterator[str]:
    """Provides a Ray cluster, and yields its address.

    With an empty `address`, it is a cluster of this machine alone, which ends with the block, and when this
    process dies. A child in a POSIX session of its own (setsid) starts it, so that no signal to the group of this
    process, as from a terminal or `timeout`, reaches it.

    Args:
        address: address of a cluster that runs, or empty.
        devices: devices of the config.

    Raises:
        UserError: Ray does not start.
    """
    if address:
        yield address
        return
    gpus = choose_devices(devices).gpus
    command = [sys.executable, "-m", "jaxrl_atari.trials.ray_cluster", str(len(gpus))]
    pipe = subprocess.PIPE
    head = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert head.stdout is not None
        first_line = head.stdout.readline().decode().strip()
        if not first_line[:1].isdecimal():
            raise UserError(f"Ray did not start: {first_line}")
        yield first_line
    finally:
        head.communicate()  # closes its input, and waits for its end


@contextlib.contextmanager
def connected(address: str, devices: DevicesConfig, resources: ResourcesConfig) -> Iterator[MachineShare]:
    """Connects this process to a Ray cluster until the block ends, and yields the share of a machine of each item.

    Args:
        address, devices: see `cluster`.
        resources: what the user asks for, for each item.

    Raises:
        UserError: the cluster cannot be used, or an item needs more than a machine has.
    """
    import ray  # after `set_up_ray`: it reads its environment

    # In a thread: in the main thread, Ray would handle the signals.
    with cluster(address, devices) as found, ThreadPool(1) as thread:
        try:
            try:
                thread.apply(ray.init, (found,), {"log_to_driver": False, "logging_level": logging.CRITICAL})
            except Exception as error:  # Ray has no narrower class
                raise UserError(f"Ray at {found}: {reason(error.__cause__ or error)}") from error
            share = allot(resources, [node["Resources"] for node in ray.nodes() if node["Alive"]], devices)
            say(f"each has {counted(share.gpu, 'GPU')} and {counted(share.cpu, 'core')}")
            yield share
        finally:
            ray.shutdown()


class Ended(NamedTuple):
    """How an item ended in its process."""

    by_itself: bool  # not because a stop was requested
    failure: Failure | None = None


def run_in_worker(
    folder: Path, share: MachineShare, stop_requested: Callable[[], bool], run: Callable[[], object]
) -> Ended:
    """Runs an item in its process on the cluster. Its output goes to output.txt in its folder.

    Args:
        folder: is made if it does not exist. A new one is removed again if no session could begin, for a reason
            that the user can correct: the command prints that reason.
        stop_requested: whether a stop has been requested; then it does not begin.
        run: runs the item, and raises KeyboardInterrupt if it was stopped.
    """
    is_new = not folder.exists()
    failure = attempt(folder.mkdir, parents=True, exist_ok=True)
    if failure is not None:
        return Ended(True, failure)
    ended = Ended(False)
    with (
        (folder / OUTPUT_FILE).open("a", buffering=1, encoding="utf-8") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        contextlib.suppress(KeyboardInterrupt),  # a stop was requested, and the last checkpoint is written
    ):
        if share.gpu == 0:
            os.environ.setdefault("NPROC", str(share.cpu))  # number of XLA's threads, read when JAX starts
        tune_process()
        if not stop_requested():
            ended = Ended(True, attempt(run))
    was_refused = ended.failure is not None and ended.failure.correctable
    if is_new and was_refused and not session_files(folder) and not session_dirs(folder):
        shutil.rmtree(folder, ignore_errors=True)
    return ended


def main() -> None:
    """Starts Ray with the number of GPUs in the argument, prints its address or what prevents it, and waits."""
    import ray

    try:
        ray.init(
            "local",  # else Ray would join a cluster on this machine
            num_gpus=int(sys.argv[1]),  # Ray would count GPUs that JAX cannot use
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.CRITICAL,
        )
    except Exception as error:  # Ray has no narrower class
        say(reason(error))
        return
    say(ray.get_runtime_context().gcs_address)
    sys.stdin.read()  # until the parent closes it, or has died


if __name__ == "__main__":
    main()
