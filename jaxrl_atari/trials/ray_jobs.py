"""The launcher of a Ray cluster: a worker of Ray starts the command of each job, with a share of a machine.

The machines share the directory of the suite or search, and the files that the user has named.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.pool import ThreadPool

from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import SessionsFailed, UserError, reason, require_package
from jaxrl_atari.imports import IMPORTS_VARIABLE
from jaxrl_atari.output import counted, say
from jaxrl_atari.runs.layout import OUTPUT_FILE
from jaxrl_atari.trials.launch import POLL_SECONDS, STOPPING, Job, JobProcess, OnEnd
from jaxrl_atari.trials.slots import ResourcesConfig, allot, share_variables

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, workers use this environment and build no second one
}
"""Environment variables for Ray, which reads some of them at import."""


def check_cluster(address: str) -> None:
    """Checks that there is a Ray cluster at an address, without importing Ray.

    Raises:
        UserError: Ray is not installed, or nothing answers. Ray itself looks up the address `auto`.
    """
    require_package("ray", "cluster")
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:  # Ray would wait minutes for a dead address
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        expected = "expected auto, or HOST:PORT of a `ray start`"
        raise UserError(f"address {address}: {reason(error)}; {expected}") from error


def run_jobs_on_ray(
    jobs: Sequence[Job], on_end: OnEnd, *, address: str, devices: DevicesConfig, resources: ResourcesConfig
) -> None:
    """Runs jobs on a Ray cluster, as many at a time as there is room for. Ray prints their lines.

    Args:
        jobs, on_end: as for `run_jobs`.
        resources: those of each job.

    Raises:
        UserError: the cluster cannot be used, or a job needs more than any machine has.
        KeyboardInterrupt: a stop was requested and passed on, and every running job has ended.
    """
    os.environ.update(RAY_VARIABLES)
    import ray
    from ray.exceptions import RayError

    imports = {IMPORTS_VARIABLE: os.environ[IMPORTS_VARIABLE]} if IMPORTS_VARIABLE in os.environ else {}
    with (
        _connected(address),
        StopRequest(saves=True, answer=STOPPING) as request,  # last: Ray handles SIGTERM too
    ):
        share = allot(resources, [node["Resources"] for node in ray.nodes() if node["Alive"]], devices)
        each = f"{counted(share.gpu, 'GPU')} and {counted(share.cpu, 'core')}"
        say(f"on Ray, each with {each}; its output is in {OUTPUT_FILE} in its directory")
        remote = ray.remote(num_gpus=share.gpu, num_cpus=share.cpu, max_retries=0)(run_in_worker)
        running = {remote.options(name=job.name).remote(job, share, devices, imports): job for job in jobs}
        is_stopping = False
        while running:
            if request.requested and not is_stopping:
                is_stopping = True
                for reference in running:
                    ray.cancel(reference)
            ended, _ = ray.wait([*running], num_returns=len(running), timeout=POLL_SECONDS)
            for reference in ended:
                job = running.pop(reference)
                try:
                    failure = ray.get(reference)
                except RayError as error:
                    failure = SessionsFailed(f"its worker of Ray has failed: {reason(error)}")
                if failure is None or not is_stopping:
                    on_end(job, failure)
    if is_stopping:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connects this process to a Ray cluster until the block ends. Raises `UserError` if that fails."""
    import ray

    options = {"logging_level": logging.CRITICAL}
    with ThreadPool(1) as thread:  # in the main thread, Ray would handle the signals
        try:
            try:
                thread.apply(ray.init, (address,), options)
            except Exception as error:  # Ray has no narrower class
                raise UserError(f"Ray at {address}: {reason(error.__cause__ or error)}") from error
            yield
        finally:
            ray.shutdown()


def run_in_worker(
    job: Job, share: ResourcesConfig, devices: DevicesConfig, variables: Mapping[str, str]
) -> UserError | None:
    """Runs a job in a worker of Ray, with a share of its machine. `ray.cancel` makes it save and end.

    Args:
        variables: further environment variables of the job.

    Returns:
        The error of the job; None if it has finished.
    """
    process = JobProcess(job, {**share_variables(share, devices), **variables}, keeps_output=True)
    try:
        while not process.has_ended():
            time.sleep(0.5)
    except KeyboardInterrupt:
        process.popen.terminate()
        process.popen.wait()
        raise
    return process.failure()
