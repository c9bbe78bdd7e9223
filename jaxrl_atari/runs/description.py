"""config.json, from which a run can be repeated: the config, versions, git revision, machine, and every resume.

The files suite.json, sweep.json and search.json describe a suite, a sweep and a search in the same way.
"""

import itertools
import platform
import subprocess
import time
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from jaxrl_atari.config import Config, DevicesConfig, PPOConfig, changed_fields, config_from_dict, flat
from jaxrl_atari.devices import Placement
from jaxrl_atari.errors import UserError, reason, require
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.cpu import read_cpu, xla_threads
from jaxrl_atari.hardware.settings import numeric_settings
from jaxrl_atari.runs.files import read_json, read_result
from jaxrl_atari.runs.layout import (
    CONFIG_FILE,
    KINDS,
    SUITE_FILE,
    held_kind,
    latest_env_steps,
    session_dirs,
)

PACKAGES = ("jaxrl_atari", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ale-py", "envpool", "numpy")
"""Packages whose versions config.json has, where they are installed."""


def read_config(directory: Path, file: str = CONFIG_FILE) -> Config:
    """Reads the config of a run from config.json, or the config of a suite, sweep or search from another file.

    Raises:
        UserError: the directory has no such file, or the file cannot be used.
    """
    path = directory / file
    if not path.is_file():
        kind = held_kind(directory)
        hint = f"it holds a {kind}" if kind else "expected data/NAME_TIMESTAMP"
        raise UserError(f"{directory}: not a {KINDS.get(file, 'run')} directory (it has no {file}); {hint}")
    stored = read_result(path, config=dict)["config"]
    try:
        return config_from_dict(stored)
    except UserError as error:  # with its own advice, such as for a field of another version
        raise UserError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be used ({reason(error)}); restore it from a copy") from error


def read_games(directory: Path, file: str = SUITE_FILE) -> list[str]:
    """The names of the games in suite.json or sweep.json, as they stand there.

    Raises:
        UserError: the file has no list of names.
    """
    path = directory / file
    games = read_result(path, games=list)["games"]
    if not all(isinstance(game, str) for game in games):
        raise UserError(f"{path}: cannot be used (games is {games!r:.60}); restore it from a copy")
    return games


def field_values(run_dir: Path, name: str) -> list[Any]:
    """The values that a field of a run's config has had, before and after each resume that changed it.

    Args:
        name: dotted name, such as `log.actions`.
    """
    described = read_json(run_dir / CONFIG_FILE)
    changes = [resume["changed"].get(name, []) for resume in resumes(described)]
    return [*itertools.chain(*changes), flat(described["config"]).get(name)]


def other_versions(run_dir: Path, package: str) -> list[str]:
    """The versions of a package with which a run was started or resumed, other than the one installed here."""
    here = _version(package)
    described = read_json(run_dir / CONFIG_FILE)
    versions = [start["versions"].get(package, here) for start in (described, *resumes(described))]
    return [each for each in dict.fromkeys(versions) if each != here]


def resumes(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entry of each resume in the content of a config.json."""
    return described.get("resumed", [])


def require_same_run(config: Config, before: Config, run_dir: Path) -> None:
    """Refuses to resume a run as another one, or with a budget that a session has passed.

    Raises:
        ConfigError: another game, protocol or seed, or a budget that a session has passed by more
            than half a rollout.
    """
    for name, was, wanted in (
        ("env.game", before.env.game_name, config.env.game_name),
        ("env.protocol", before.env.resolved_protocol, config.env.resolved_protocol),
        ("seed", before.seed, config.seed),
    ):
        require(
            wanted == was,
            name,
            wanted,
            expected=f"{was}, with which the run began",
            hint="leave it out, or start a new run",
        )
    if config.total_env_steps < before.total_env_steps:
        reached = max(map(latest_env_steps, session_dirs(run_dir)), default=0)
        require(
            not config.is_spent(reached - config.rollout_size),
            "total_env_steps",
            config.total_env_steps,
            expected=f"at least {reached}, the env steps of a session",
            hint="start a new run for a smaller budget",
        )


def describe(config: Config, directory: Path | None = None, file: str = CONFIG_FILE) -> dict[str, Any]:
    """The content of config.json: config, seed, protocol, and the software and machine of the run.

    Args:
        directory: directory of the run. If it has `file` already, the software and machine in it stay. If the
            config, the software or the machine is another than at the start before, `resumed` gets an entry with
            the present ones and the fields that differ: name -> [before, after]. None: as for a new run.
        file: name of the file with the description, such as suite.json in a suite.
    """
    today = software_and_machine(config.devices)
    described = {
        "config": config.to_dict(),
        "seed": config.seed,
        "game": config.env.game_name,
        "protocol": config.env.resolved_protocol,
        "gae_lambda": config.resolved_gae_lambda,
        **today,
    }
    if directory is None or not (directory / file).is_file():
        return described
    before = read_json(directory / file)
    first = {name: before.get(name) for name in today}
    changed = changed_fields(before["config"], described["config"])
    *_, newest = [first, *resumes(before)]
    if not changed and all(newest.get(name) == today[name] for name in today):
        return before
    date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    entry = {"date": date, **today, "changed": changed}
    return described | first | {"resumed": [*resumes(before), entry]}


def software_and_machine(devices: DevicesConfig) -> dict[str, Any]:
    """Versions of Python and of the packages that matter, git revision, JAX's numeric settings, and the machine.

    With `devices.gpu = false` nothing asks the machine for its GPUs, and they are None.
    """
    cpu = read_cpu()
    return {
        "python": platform.python_version(),
        "versions": {name: installed for name in PACKAGES if (installed := _version(name))},
        "git_revision": _git_revision(),
        "numeric_settings": numeric_settings(),
        "hardware": {
            "cpu": cpu.model,
            "instruction_sets": list(cpu.instruction_sets),
            "cores": cpu.cores,
            "memory_gib": psutil.virtual_memory().total / 2**30,
            "gpus": [gpu.model for gpu in gpus.visible_gpus().gpus] if devices.may_use_gpus else None,
            "driver": gpus.driver_version() if devices.may_use_gpus else None,
        },
    }


def find_provenance(
    devices: DevicesConfig, options: PPOConfig, placement: Placement, compute_dtype: str
) -> dict[str, Any]:
    """What the bits of a session depend on besides its config and seed, as JSON values.

    Args:
        options: as `resolved_options` returns them.
        compute_dtype: the type in which the network computes, such as `float32`.
    """
    software = software_and_machine(devices)
    hardware = software.pop("hardware")
    on_gpu = any(device.platform == "gpu" for device in (*placement.learner, *placement.actors))
    return {
        **software,
        "compute_dtype": compute_dtype,
        "coefficients": options.coefficients,  # a default may change with the algorithm's file
        "learns_on": [device.device_kind for device in placement.learner],
        "acts_on": [device.device_kind for device in placement.actors],
        "gpu_software": {"driver": hardware["driver"], **gpus.gpu_packages()} if on_gpu else {},
        "cpu": hardware["cpu"],
        "instruction_sets": hardware["instruction_sets"],
        "threads": xla_threads(),
    }


def device_text(placement: Placement, compute_dtype: str, evaluates: bool) -> str:
    """The devices that learn, act and evaluate, why they were chosen, and the arithmetic, in one line."""
    text = f"{', '.join(map(str, placement.learner))} ({placement.why_learner})"
    if not {*placement.actors} <= {*placement.learner}:
        text += f"; acts on {', '.join(map(str, dict.fromkeys(placement.actors)))}"
    if evaluates:
        text += f"; evaluates on {placement.evaluator}"
    return f"{text}; computes in {compute_dtype}"


def resume_text(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Where a session resumes, and which arithmetic settings and coefficients differ from before, in one line.

    Args:
        before: meta of the checkpoint that the session resumes from.
        now: meta of the next checkpoint.
    """
    text = f"resumed at {before['env_steps']:,} env steps (update {before['updates']:,})"
    saved = before.get("provenance", now["provenance"])
    for name, (old, new) in changed_fields(saved, now["provenance"]).items():
        if name.startswith(("compute_dtype", "numeric_settings", "coefficients")):
            text += f"; {name} {old} -> {new}, so numbers may differ from here on"
    return text


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _git_revision() -> str | None:
    """The commit of this package's own checkout, with `+` where files differ from it; None without a checkout.

    A package that is installed inside some other repository, as in a virtual environment there, has none.
    """
    root = Path(__file__).resolve().parents[2]
    command = ["git", f"--git-dir={root}/.git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        described = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # Git is not installed
        return None
    return described.stdout.strip() or None
