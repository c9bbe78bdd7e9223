"""A Ray cluster, of this machine alone or of several: how a command starts it or connects to it.

`python -m jaxrl_atari.trials.ray_cluster` is the process that starts Ray on this machine.
"""

import contextlib
import importlib.util
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from typing import IO

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError, reason, require
from jaxrl_atari.hardware.choice import choose_devices, gpu_index
from jaxrl_atari.hardware.jax_settings import user_environment
from jaxrl_atari.output import counted, say
from jaxrl_atari.trials.resources import MachineShare, ResourcesConfig, allot, check_gpus

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, tasks use this environment and build no second one
}
"""Environment variables for Ray, which reads some of them at import."""

OBJECT_STORE_BYTES = 100 * 2**20  # small, because nothing large passes through Ray's object store


def check_cluster(address: str, devices: DevicesConfig, resources: ResourcesConfig) -> None:
    """Checks that tasks can be run on a Ray cluster, without importing Ray.

    Args:
        address: address of a cluster that runs already; empty: this machine alone.
        devices: devices of the config.
        resources: the resources that the user asks for.

    Raises:
        UserError: Ray is not installed, or nothing answers at `address`. `connected` looks up `auto`.
        ConfigError: `address` has another form, or `devices` asks for devices that are not there, or that a task
            cannot have with `resources`.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed: pip install 'jaxrl_atari[search]'")
    require(not devices.distributed, "devices.distributed", True, "false on a Ray cluster")
    require(
        gpu_index(devices.gpu) is None,
        "devices.gpu",
        devices.gpu,
        expected="auto, true or false where Ray assigns the GPUs",
        hint="choose among the GPUs with CUDA_VISIBLE_DEVICES",
    )
    if not address:
        if choose_devices(devices).learner and resources.gpu:
            check_gpus(resources, devices)
    elif address != "auto":
        host, _, port = address.rpartition(":")
        is_port = port.isdecimal() and int(port) < 2**16
        require(host and is_port, "address", address, "auto, or HOST:PORT of a `ray start`")
        try:  # Ray would wait minutes for a dead address
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise UserError(f"address {address}: {reason(error)}; expected HOST:PORT of a `ray start`") from error


def set_ray_variables(address: str) -> None:
    """Sets the environment variables that Ray reads, some of them when it is imported.

    Args:
        address: address of a cluster that runs already; empty: this machine alone.
    """
    os.environ.update(RAY_VARIABLES)
    if not address:
        # Ray runs any code that it is sent. So it listens on the loopback interface only, and asks for a token.
        os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextlib.contextmanager
def started_cluster(address: str, devices: DevicesConfig) -> Iterator[str]:
    """Provides a Ray cluster, and yields its address.

    With an empty `address`, the cluster is this machine alone. It ends with the block, and when this process dies.
    A child in a POSIX session of its own (setsid) starts Ray. Signals to the process group of this process, as
    from a terminal or `timeout`, therefore do not reach Ray.

    Args:
        address: address of a cluster that runs already, or empty.
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
    with tempfile.TemporaryFile() as errors:
        head = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            start_new_session=True,
            env=user_environment(),  # Ray's processes inherit it: the tasks choose their own settings of JAX
        )
        try:
            assert head.stdout is not None
            first_line = head.stdout.readline().decode().strip()
            if not first_line[:1].isdecimal():  # `main` has printed why there is no address
                why = first_line or _last_line(errors) or "its process printed nothing"
                raise UserError(f"Ray did not start: {why}")
            yield first_line
        finally:
            head.communicate()  # closes its input, and waits for its end


def _last_line(file: IO[bytes]) -> str:
    """The last line of a file that is not blank; empty if there is none."""
    file.seek(0)
    return file.read().decode(errors="replace").rstrip().rpartition("\n")[2].strip()


@contextlib.contextmanager
def connected(
    address: str, devices: DevicesConfig, resources: ResourcesConfig, kind: str
) -> Iterator[MachineShare]:
    """Connects this process to a Ray cluster until the block ends. Prints and yields the share of each task.

    Args:
        address: address of a cluster that runs already; empty: one on this machine, which ends with the block.
        devices: devices of the config.
        resources: the resources that the user asks for.
        kind: the word for a task in the printed line: `session` or `trial`.

    Raises:
        UserError: the cluster cannot be used, or a task needs more than any machine has.
    """
    import ray  # after `set_ray_variables`

    # Ray starts in a thread, because in the main thread it would handle the signals.
    with started_cluster(address, devices) as cluster_address, ThreadPool(1) as thread:
        try:
            try:
                thread.apply(
                    ray.init, (cluster_address,), {"log_to_driver": False, "logging_level": logging.CRITICAL}
                )
            except Exception as error:  # Ray has no narrower class
                raise UserError(f"Ray at {cluster_address}: {reason(error.__cause__ or error)}") from error
            share = allot(resources, [node["Resources"] for node in ray.nodes() if node["Alive"]], devices)
            say(f"each {kind} has {counted(share.gpu, 'GPU')} and {counted(share.cpu, 'core')}")
            yield share
        finally:
            ray.shutdown()


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
