"""A trial: several sessions of one config, with seeds `seed`, `seed + 1`, ..., in one run directory."""

import dataclasses
import json
import math
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config
from jaxrl_atari.config_fields import require
from jaxrl_atari.config_files import CONFIG_FILE, read_config
from jaxrl_atari.errors import SessionsFailed, UserError
from jaxrl_atari.hardware.gpus import (
    Place,
    apply_memory_fraction,
    memory_fraction,
    place_session,
    set_memory_fraction,
    visible,
)
from jaxrl_atari.hardware.memory import out_of_memory_advice
from jaxrl_atari.run_dir.files import write_json
from jaxrl_atari.run_dir.lock import only_writer
from jaxrl_atari.run_dir.writers import Writer, import_wandb
from jaxrl_atari.session import run_session
from jaxrl_atari.trial.processes import Task, run_processes
from jaxrl_atari.trial.stopping import StopRequest

PACKAGES = ("jaxrl_atari", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ale-py", "envpool", "numpy")


def make_run_dir(config: Config) -> Path:
    """Makes `OUTPUT_DIR/NAME_TIMESTAMP`, never one that is there already.

    Raises:
        UserError: the folder cannot be written to, or the config asks for a package that is missing.
    """
    if config.log.wandb:
        import_wandb()
    stamp = time.strftime("%Y%m%d_%H%M%S")
    for suffix in ("", *(f"_{i}" for i in range(2, 100))):
        run_dir = Path(config.output_dir).expanduser() / f"{config.name}_{stamp}{suffix}"
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


def describe(config: Config, seed: int) -> dict[str, Any]:
    """What is needed to run this again: config, seed, protocol, versions, git revision."""
    return {
        "config": config.to_dict(),
        "seed": seed,
        "game": config.env.game_name,
        "protocol": config.env.resolved_protocol,
        "gae_lambda": config.gae_lambda,
        **software(),
    }


def software() -> dict[str, Any]:
    """What runs here: the version of Python, of packages, and the git revision."""
    return {
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "git_revision": _git_revision(),
    }


def _write_description(directory: Path, config: Config) -> None:
    """config.json. Of a run that goes on it keeps the software that began it, and adds today's to `resumed`."""
    path, described = directory / CONFIG_FILE, describe(config, config.seed)
    if path.is_file() and any(directory.rglob("checkpoints/*")):
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:  # damaged
            before = {}
        today = software()
        began = {name: before.get(name) for name in today}
        resumed = [*before.get("resumed", []), {"date": time.strftime("%Y-%m-%d %H:%M:%S"), **today}]
        described |= began | {"resumed": resumed}
    write_json(path, described)


def require_same_run(config: Config, run_dir: Path) -> None:
    """Raises `UserError` where `run_dir` is no run's, or holds another run than the config to go on with asks for."""
    if (run_dir / "checkpoints").is_dir():
        expected = run_dir.absolute().parent
        raise UserError(f"--resume {run_dir}: is a session's directory; expected the run's, {expected}")
    before = read_config(run_dir)
    for name, was, wanted in (
        ("env.game", before.env.game_name, config.env.game_name),
        ("env.protocol", before.env.resolved_protocol, config.env.resolved_protocol),
        ("seed", before.seed, config.seed),
    ):
        hint = "leave it out, or start a new run with --config"
        require(wanted == was, name, wanted, f"{was}, with which the run began", hint)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The commit of this package's checkout, with `+` where files differ from it; None outside a checkout."""
    here = Path(__file__).parent
    try:
        revision = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return revision.stdout.strip() or None


def session_dir(run_dir: Path, session: int) -> Path:
    """Where session `session` of a trial keeps its files."""
    return run_dir / f"session_{session}"


def is_finished(config: Config, directory: Path) -> bool:
    """True if the session in `directory` has spent its budget.

    Reads the names of its checkpoints, `checkpoints/<env_steps>`: opening them would start JAX's back end, which
    takes the GPU memory that the sessions' processes need.
    """
    steps = [int(path.name) for path in (directory / "checkpoints").glob("*") if path.name.isdecimal()]
    return bool(steps) and config.is_spent(max(steps))


def run_trial(config: Config, run_dir: Path | None = None, *, resume: bool = False, trial: int = 0) -> None:
    """Trains all sessions of a trial: here one after the other, or each in a process that sees only its own GPUs.

    Args:
        run_dir: made by `make_run_dir` if left out.
        resume: go on with what is in `run_dir`: finished sessions are left alone, others go on from their checkpoint.
        trial: number of the trial in a search, by which its sessions rotate over the GPUs.

    Raises:
        SessionsFailed: some sessions of several failed; the others have finished.
        UserError: the only session failed, nothing could be started, or another process is at work in `run_dir`.
        KeyboardInterrupt: after SIGINT or SIGTERM, once every session has written its last checkpoint.
    """
    places = [place_session(config, session, trial) for session in range(config.sessions)]
    run_dir = make_run_dir(config) if run_dir is None else Path(run_dir)
    with only_writer(run_dir):
        _run_sessions(config, run_dir, places, resume)


def _run_sessions(config: Config, run_dir: Path, places: Sequence[Place], resume: bool) -> None:
    sessions = []
    for session in range(config.sessions):
        if resume and is_finished(config, session_dir(run_dir, session)):
            print(f"session {session}  finished already", flush=True)
        else:
            sessions.append(session)
    described = {run_dir: config} if sessions else {}
    for session in sessions:
        session_dir(run_dir, session).mkdir(exist_ok=True)
        described[session_dir(run_dir, session)] = dataclasses.replace(config, seed=config.seed + session)
    before = {path: path.read_bytes() for folder in described if (path := folder / CONFIG_FILE).is_file()}
    for folder, of_folder in described.items():
        _write_description(folder, of_folder)
    made = _made(run_dir)
    try:
        _run_or_start(config, run_dir, sessions, places, resume)
    except SessionsFailed:  # --resume is to run what is missing
        raise
    except Exception:
        if resume and _made(run_dir) == made:
            for path, content in before.items():  # nothing came of it: the next resume is not to ask for it again
                path.write_bytes(content)
        raise


def _made(run_dir: Path) -> tuple[Any, Any]:
    """What training has made so far: the checkpoints' names, and the log points."""
    tables = {path: path.read_bytes() for path in run_dir.glob("session_*/metrics.csv")}
    return set(run_dir.glob("session_*/checkpoints/*")), tables


def _run_or_start(
    config: Config, run_dir: Path, sessions: Sequence[int], places: Sequence[Place], resume: bool
) -> None:
    blocks = {places[session].gpus for session in sessions}
    parallel = min(config.trial.parallel or len(blocks), len(sessions))
    here = parallel <= 1 and all(len(block) in (0, len(visible().gpus)) for block in blocks)
    if here:
        failures = _run_here(config, run_dir, sessions, resume)
    else:
        per_gpu = math.ceil(parallel / len(blocks))
        tasks = [_task(config, run_dir, session, places[session], resume, per_gpu) for session in sessions]
        failures = run_processes(tasks, parallel, per_gpu)
    if failures:
        reasons = "; ".join(f"session {session}: {reason}" for session, reason in failures.items())
        raise SessionsFailed(
            f"{len(failures)} of {config.sessions} sessions failed ({reasons}); --resume {run_dir} runs what is missing"
        )


def follow_trial(config: Config, run_dir: Path, *, resume: bool = False) -> None:
    """The part in `run_trial` of a process that is not the leader: the same sessions in the same order."""
    for session in range(config.sessions):
        if not (resume and is_finished(config, session_dir(run_dir, session))):
            train_session(config, run_dir, session, resume=resume)


def train_session(
    config: Config,
    run_dir: Path,
    session: int,
    *,
    resume: bool,
    writers: Sequence[Writer] = (),
    stop: StopRequest | None = None,
) -> None:
    """Trains one session of a trial in this process; `run_session` says what `writers` and `stop` are.

    Raises:
        UserError: it failed for a reason that the user can do something about, such as too little memory.
        KeyboardInterrupt: told to stop, once its last checkpoint is written.
    """
    apply_memory_fraction(config.devices)
    with out_of_memory_advice(config):
        run_session(config, session_dir(run_dir, session), session, resume=resume, writers=writers, stop=stop)


def _run_here(config: Config, run_dir: Path, sessions: Sequence[int], resume: bool) -> dict[int, str]:
    """One session after the other; returns why sessions failed. A trial's only session passes its error on."""
    failures = {}
    for session in sessions:
        try:
            train_session(config, run_dir, session, resume=resume)
        except Exception as error:
            if config.sessions == 1:
                raise
            if not isinstance(error, UserError):
                traceback.print_exc()
            failures[session] = " ".join(f"{type(error).__name__}: {error}".split()).removeprefix("UserError: ")
            print(f"session {session}  failed: {failures[session]}", flush=True)
    return failures


def _task(config: Config, run_dir: Path, session: int, place: Place, resume: bool, sharing: int) -> Task:
    """How a session's process is started."""
    environment = dict(os.environ)
    where = "CPU"
    if place.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible().gpus[index].name for index in place.gpus)
        where = "GPU " + ",".join(map(str, place.gpus))
        fraction = memory_fraction(config.devices, sharing)
        if fraction is not None:
            set_memory_fraction(environment, fraction)
            where += f", {fraction:.0%} of its memory"
    print(f"session {session}  on {where} ({place.reason})", flush=True)
    arguments = ("jaxrl_atari.trial.worker", str(run_dir), str(session), str(place.gpu), str(resume))
    return Task(session, arguments, environment, place.gpus)
