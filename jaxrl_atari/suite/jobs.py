"""The jobs of a suite or a sweep, and the launcher that trains them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jaxrl_atari.runs.description import read_config, require_same_run
from jaxrl_atari.runs.layout import is_run
from jaxrl_atari.suite.suite import game_configs
from jaxrl_atari.suite.sweep import SweepPlan
from jaxrl_atari.trials.launch import Job, Launcher
from jaxrl_atari.trials.processes import run_processes
from jaxrl_atari.trials.resources import ResourcesConfig
from jaxrl_atari.trials.sessions import unfinished_jobs
from jaxrl_atari.trials.slots import plan_slots


def unfinished_jobs_of_sweep(directory: Path, plan: SweepPlan) -> list[Job]:
    """Makes a job of each session that has not trained to its end: setting by setting, and game by game.

    Raises:
        UserError: a game's directory holds another run, see `require_same_run`, or its config.json is damaged.
    """
    jobs = []
    position = 0  # of the first session of the next trial; see `Job.position`
    for setting in plan.settings:
        for game, config in game_configs(setting.plan.config, plan.games).items():
            run_dir = directory / setting.label / game
            if is_run(run_dir):
                require_same_run(config, read_config(run_dir), run_dir)
            jobs += unfinished_jobs(config, run_dir, first_position=position, game=game, setting=setting.label)
            position += config.sessions
    return jobs


def launcher_on_this_machine(plan: SweepPlan, jobs: Sequence[Job]) -> Launcher:
    """The launcher that trains jobs on the devices of this machine, each job in a process of its own.

    Raises:
        ConfigError: as `plan_slots`.
    """
    slots, parallel = plan_slots(plan.config, plan.total_sessions, len(jobs))
    return partial(run_processes, slots=slots, parallel=parallel)


def launcher_on_ray(plan: SweepPlan, directory: Path, address: str, resources: ResourcesConfig) -> Launcher:
    """The launcher that trains jobs on a Ray cluster; see `run_on_ray`."""
    from jaxrl_atari.trials.ray_tasks import run_on_ray  # here, because it imports Ray

    return partial(
        run_on_ray, directory=directory, address=address, devices=plan.config.devices, resources=resources
    )
