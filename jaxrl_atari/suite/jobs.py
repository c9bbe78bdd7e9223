"""The jobs of a suite or a sweep: whether they can be trained, which are left, and their training."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from jaxrl_atari.algorithm import check_config
from jaxrl_atari.runs.description import read_config, require_same_run
from jaxrl_atari.runs.layout import is_run
from jaxrl_atari.suite.sweep import SweepPlan
from jaxrl_atari.trials.launch import Job, OnEnd, run_jobs
from jaxrl_atari.trials.ray_jobs import check_cluster, run_jobs_on_ray
from jaxrl_atari.trials.sessions import described_for_jobs, session_jobs
from jaxrl_atari.trials.slots import ResourcesConfig, plan_slots


def check_trainable(plan: SweepPlan, address: str) -> None:
    """Checks what can be checked without starting JAX or Ray, before the directory of a suite or sweep is made.

    If every session is refused later, `claim_run_dir` removes the directory again.

    Args:
        address: address of the Ray cluster that is to train; empty: this machine, without Ray.

    Raises:
        ConfigError: a name, a coefficient or a minibatch size that cannot be used, or devices that are not there.
        UserError: Ray is needed and not installed, or there is no cluster at `address`.
    """
    for config in plan.settings.values():
        check_config(config)
    if address:
        check_cluster(address)
    else:
        plan_slots(plan.config, plan.total_sessions)  # raises `ConfigError`


def unfinished_jobs(directory: Path, plan: SweepPlan) -> list[Job]:
    """Makes a job of each session that has not trained to its end: setting by setting, and game by game.

    Raises:
        UserError: a game's directory holds a run of another game, protocol or seed, or a damaged config.json.
    """
    jobs = []
    position = 0  # of the first session of the next trial
    for label, run_dir, config in plan.trials(directory):
        if is_run(run_dir):
            require_same_run(config, read_config(run_dir), run_dir)
        jobs += session_jobs(config, run_dir, label, position)
        position += config.sessions
    return jobs


def train_jobs(
    jobs: Sequence[Job], plan: SweepPlan, directory: Path, address: str, resources: ResourcesConfig, on_end: OnEnd
) -> None:
    """Writes the config.json of the runs that have jobs, and trains the jobs on this machine or on a Ray cluster.

    Args:
        plan: the plan that the jobs come from.
        directory: directory of the suite or sweep.
        address: address of the Ray cluster that trains; empty: this machine, without Ray.
        resources: what each session gets on the cluster.
        on_end: called for each job that has finished or failed.

    Raises:
        ConfigError: the machine does not have the devices, or too little memory for sessions that share a GPU.
        UserError: the cluster cannot be used.
        KeyboardInterrupt: a stop was requested, and every session that was training has ended.
    """
    due = {job.folder.parent for job in jobs}
    with contextlib.ExitStack() as exits:
        for _, run_dir, config in plan.trials(directory):
            if run_dir.absolute() in due:
                exits.enter_context(described_for_jobs(config, run_dir))
        if address:
            run_jobs_on_ray(jobs, on_end, address=address, devices=plan.config.devices, resources=resources)
        else:
            slots, parallel = plan_slots(plan.config, plan.total_sessions, len(jobs))
            run_jobs(jobs, on_end, slots=slots, parallel=parallel)
