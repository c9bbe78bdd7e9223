"""Run directories: making one, and its config.json, which holds what is needed to run it again."""

import contextlib
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from jaxrl_atari.config import Config, changed_fields
from jaxrl_atari.errors import UserError, parse_path, require
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.cpu import read_cpu
from jaxrl_atari.runs.config_file import CONFIG_FILE, read_config, same_budget, with_budget
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.meta import is_sound
from jaxrl_atari.runs.reading import checkpoint_steps, session_dirs
from jaxrl_atari.runs.writers import import_wandb

PACKAGES = ("jaxrl_atari", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ale-py", "envpool", "numpy")


def is_run(directory: Path) -> bool:
    """Whether the directory holds a run, even one that has not begun to train."""
    return (directory / CONFIG_FILE).is_file() or any(directory.glob(f"session_*/{CONFIG_FILE}"))


def make_run_dir(config: Config, wanted: Path | None = None) -> Path:
    """Makes the directory of a new run: `OUTPUT_DIR/NAME_TIMESTAMP`, never one that exists already.

    Args:
        wanted: the directory to make instead. It may exist if it is empty.

    Raises:
        UserError: the folder cannot be written to, or the config asks for a package that is missing.
    """
    if config.log.wandb:
        import_wandb()
    if wanted is not None:
        try:
            wanted.mkdir(parents=True, exist_ok=True)
            if other := next((path.name for path in wanted.iterdir() if not path.name.startswith(".")), None):
                raise UserError(f"--run-dir {wanted}: holds {other}, and no run; choose another folder or an empty one")
            (wanted / ".writable").touch()
            (wanted / ".writable").unlink()
        except OSError as error:
            raise UserError(
                f"--run-dir {wanted}: {error.strerror or error}; choose a folder that can be written to"
            ) from error
        return wanted
    stamp = time.strftime("%Y%m%d_%H%M%S")
    for suffix in ("", *(f"_{i}" for i in range(2, 100))):
        run_dir = parse_path(config.output_dir, "output_dir") / f"{config.name}_{stamp}{suffix}"
        try:
            run_dir.mkdir(parents=True)
            return run_dir
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"output_dir = {config.output_dir!r}: {error.strerror or error}; choose a folder that can be written to"
            ) from error
    raise UserError(f"output_dir = {config.output_dir!r}: too many runs named {run_dir.name}; choose another name")


def session_dir(run_dir: Path, session: int) -> Path:
    """The directory of session `session` of a trial."""
    return run_dir / f"session_{session}"


def is_finished(config: Config, directory: Path) -> bool:
    """True if the session in `directory` has spent its budget and its last checkpoint is sound.

    Starts no back end of JAX, which would take the GPU memory that the sessions' processes need.
    """
    try:
        steps = checkpoint_steps(directory)
    except OSError:  # the session will say why it cannot read them
        return False
    return bool(steps) and config.is_spent(steps[-1]) and is_sound(directory / "checkpoints" / str(steps[-1]))


def all_finished(config: Config, run_dir: Path) -> bool:
    """True if every session of the config has finished; see `is_finished`."""
    return all(is_finished(config, session_dir(run_dir, session)) for session in range(config.sessions))


def require_budget(config: Config, before: Config, run_dir: Path) -> None:
    """Refuses a lowered budget that a session has passed: its score is not that of the budget.

    Raises:
        ConfigError: the budget would have been spent a rollout before the newest checkpoint of a session.
    """
    if config.total_env_steps >= before.total_env_steps:
        return
    for directory in session_dirs(run_dir):
        with contextlib.suppress(OSError):  # the session will say why its checkpoints cannot be read
            reached = max(checkpoint_steps(directory), default=0)
            require(
                not config.is_spent(reached - config.rollout_size), "total_env_steps", config.total_env_steps,
                f"at least {reached}, the env steps of {directory}", "start a new run for a smaller budget",
            )  # fmt: skip


def latest_text(directory: Path, name: str) -> str:
    """A text in the meta of a session's latest checkpoint, such as `device`; empty if it is unknown."""
    try:
        step = checkpoint_steps(directory)[-1]
        found = read_json(directory / "checkpoints" / str(step) / "meta" / "metadata")[name]
    except (OSError, ValueError, LookupError):  # no checkpoint yet, damaged, or of an older version
        return ""
    return found if isinstance(found, str) else ""


def describe(config: Config) -> dict[str, Any]:
    """The content of a new config.json: config, seed, protocol, versions, git revision, machine."""
    return {
        "config": config.to_dict(),
        "seed": config.seed,
        "game": config.env.game_name,
        "protocol": config.env.resolved_protocol,
        "gae_lambda": config.resolved_gae_lambda,
        **surroundings(config),
    }


def describe_resumed(config: Config, directory: Path, file: str = CONFIG_FILE) -> dict[str, Any]:
    """As `describe`, but a run that has begun keeps its first `surroundings`; today's are added to `resumed`.

    So are the fields that have changed, with their values before and after.

    Args:
        file: name of the file in `directory` that has the history.
    """
    path, described = directory / file, describe(config)
    has_trained = any(directory.rglob("checkpoints/*")) or any(directory.rglob("metrics.csv"))
    if not path.is_file() or not has_trained:
        return described
    try:
        before = read_json(path)
    except ValueError:  # damaged
        before = {}
    today, earlier = surroundings(config), before.get("resumed")
    entry: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), **today}
    if isinstance(before.get("config"), dict) and (changed := changed_fields(before["config"], described["config"])):
        entry["changed"] = changed
    resumed = [*(earlier if isinstance(earlier, list) else ()), entry]
    return described | {name: before.get(name) for name in today} | {"resumed": resumed}


def change_budget(config: Config, run_dir: Path) -> None:
    """Writes the number of sessions and the budget of a config to a run whose sessions have all spent that budget.

    The other fields stay as the run was trained.
    """
    before = read_config(run_dir) if is_run(run_dir) else None  # None: somebody has deleted config.json
    if before is None or not same_budget(config, before):
        write_description(run_dir, describe_resumed(with_budget(before or config, config), run_dir))


def write_description(directory: Path, description: dict[str, Any]) -> None:
    """Writes config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / CONFIG_FILE, description)


def surroundings(config: Config) -> dict[str, Any]:
    """The version of Python, of the packages that matter, the git revision, and the machine.

    With `devices.gpu = false` nothing calls the CUDA driver, so the machine's GPUs are not among them.
    """
    return {
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "git_revision": _git_revision(),
        "hardware": _machine(asks_driver=config.devices.gpu is not False),
    }


def _machine(asks_driver: bool) -> dict[str, Any]:
    """CPU, memory and GPUs; None: the machine does not report that, or the driver is not asked."""
    cpu = read_cpu()
    return {
        "cpu": cpu.model,
        "instruction_sets": list(cpu.instruction_sets),
        "cores": cpu.cores,
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "gpus": [gpu.model for gpu in gpus.visible().gpus] if asks_driver else None,
        "driver": gpus.driver_version() if asks_driver else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The commit of this package's own checkout, with `+` where files differ from it; None if it is not in a checkout.

    A package that is installed inside some other repository, as in a virtual environment there, has none.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        revision = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=root, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return revision.stdout.strip() or None
