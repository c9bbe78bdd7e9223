"""Compiled programs: of several jobs with the same ones, the first compiles them, and the others read them."""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxrl_atari.config import TRACED_OPTIONS, Config
from jaxrl_atari.hardware.jax_settings import jax_config
from jaxrl_atari.output import say
from jaxrl_atari.runs.description import software_and_machine


@contextlib.contextmanager
def compiled_once(config: Config, name: str) -> Iterator[Callable[[], None]]:
    """Context of a session that compiles its programs, unless another one on this machine compiles the same ones.

    The others wait for it, and then read them from JAX's cache of compiled programs. A file in the cache, which is
    locked meanwhile, says whether a session has compiled the programs before: then none waits. None waits with
    `devices.distributed` either, because its processes need each other for their first update.

    Args:
        name: of the session.

    Yields:
        The function to call after the first update.
    """
    folder = jax_config.jax_compilation_cache_dir
    is_kept = folder and Path(folder).is_dir() and jax_config.jax_enable_compilation_cache
    key = f"{compile_key(config)} {software_and_machine(config.devices)}"
    path = Path(folder or "", f"compiled_{hashlib.sha256(key.encode()).hexdigest()[:16]}")
    if not is_kept or config.devices.distributed or path.exists():
        yield lambda: None
        return
    with path.with_suffix(".lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"{name}  waits for the session that compiles the same programs")
                fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            lock.close()

        def compiled() -> None:
            path.touch()
            lock.close()

        yield compiled


def compile_key(config: Config) -> str:
    """A text that two configs share only if they run the same compiled programs.

    The configs may differ in what the programs take as arguments (`TRACED_OPTIONS`), such as the learning rate.
    """
    values = config.to_dict()
    for name in ("name", "seed", "sessions", "total_env_steps", "output_dir", "trial", "evaluation", "log"):
        del values[name]
    for name in TRACED_OPTIONS:
        del values["ppo"][name]
    return json.dumps(values)
