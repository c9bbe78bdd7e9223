"""The launcher of a Ray cluster: a worker of Ray starts the command of each job, with a share of a machine.

The machines share the directory of the suite or search, and the files that the user has named.
"""

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.pool import ThreadPool

from jaxrl_atari.cli.job import ERROR, start_job
from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import SessionsFailed, UserError, reason, require_package
from jaxrl_atari.imports import IMPORTS_VARIABLE
from jaxrl_atari.output import counted, say
from jaxrl_atari.runs.layout import OUTPUT_FILE, session_files
from jaxrl_atari.trials.launch import POLL_SECONDS, STOPPING, Job, OnEnd, failure_of
from jaxrl_atari.trials.resources import MachineShare, ResourcesConfig, allot

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, workers use this environment and build no second one
}
"""Environment variables for Ray, which reads some of them at import."""

SECONDS_BETWEEN_NEWS = 30
"""How often the newest line of each running job is printed."""


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
    """Runs jobs on a Ray cluster, as many at a time as there is room for. Their output goes to their folders.

    Args:
        jobs: in the order in which they are started.
        on_end: called for each job that has finished or failed.
        address: of the cluster.
        devices: devices of the config.
        resources: resources of each job.

    Raises:
        UserError: the cluster cannot be used, or a job needs more than any machine has.
        KeyboardInterrupt: a stop was requested and passed on, and every running job has ended.
    """
    os.environ.update(RAY_VARIABLES)
    import ray
    from ray.exceptions import RayError, TaskCancelledError

    imports = {IMPORTS_VARIABLE: os.environ[IMPORTS_VARIABLE]} if IMPORTS_VARIABLE in os.environ else {}
    with (
        _connected(address),
        StopRequest(quick=False, answer=STOPPING) as request,  # last: Ray handles SIGTERM too
    ):
        share = allot(resources, [node["Resources"] for node in ray.nodes() if node["Alive"]], devices)
        each = f"{counted(share.gpu, 'GPU')} and {counted(share.cpu, 'core')}"
        say(f"on Ray, each with {each}; its output is in {OUTPUT_FILE} in its directory")
        remote = ray.remote(num_gpus=share.gpu, num_cpus=share.cpu, max_retries=0)(run_in_worker)
        running = {remote.options(name=job.name).remote(job, share, devices, imports): job for job in jobs}
        is_stopping = False
        next_news = time.monotonic() + SECONDS_BETWEEN_NEWS
        while running:
            if request.requested and not is_stopping:
                is_stopping = True
                for reference in running:
                    ray.cancel(reference)
            ended, _ = ray.wait([*running], num_returns=len(running), timeout=POLL_SECONDS)
            for reference in ended:
                job = running.pop(reference)
                try:
                    failure = failure_of(*ray.get(reference))
                except TaskCancelledError:
                    continue
                except RayError as error:
                    failure = SessionsFailed(f"its worker of Ray has failed: {reason(error)}")
                if failure is None or not is_stopping:
                    on_end(job, failure)
            if time.monotonic() > next_news:
                next_news = time.monotonic() + SECONDS_BETWEEN_NEWS
                for line in filter(None, map(_last_line, running.values())):
                    say(line)
    if is_stopping:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connects this process to a Ray cluster until the block ends. Raises `UserError` if that fails."""
    import ray

    options = {"log_to_driver": False, "logging_level": logging.CRITICAL}
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
    job: Job, share: MachineShare, devices: DevicesConfig, variables: Mapping[str, str]
) -> tuple[int, str]:
    """Runs a job in a worker of Ray, with a share of its machine. `ray.cancel` makes it save and end.

    A new folder is removed again if the job is refused: the command prints why.

    Args:
        variables: further environment variables of the job.

    Returns:
        The exit status of the job and its last line `error: ...`, for `failure_of`.
    """
    is_new = not job.folder.exists()
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        output_file = (job.folder / OUTPUT_FILE).open("a")
    except OSError as error:
        return UserError.exit_status, f"{ERROR}{job.folder}: cannot be used as a folder ({error.strerror})"
    with output_file as output:
        process = start_job(
            job.words,
            job.name,
            {**share.variables(devices), **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                time.sleep(0.5)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    end = process.returncode, _last_line(job, ERROR)
    has_trained = any(session_files(path) for path in (job.folder, *job.folder.glob("session_*")))
    if process.returncode == UserError.exit_status and is_new and not has_trained:
        shutil.rmtree(job.folder, ignore_errors=True)
    return end


def _last_line(job: Job, start: str = "") -> str:
    """The last line with this start that a job has printed; empty if there is none."""
    try:
        lines = (job.folder / OUTPUT_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.startswith(start)), "")
