"""JAX's settings, in its config and in environment variables: which of them change numbers, which ones this
package changes, and whether JAX has started.

Until the next session of this process (`set_for_session`):

| setting | is changed for |
|---|---|
| `XLA_CLIENT_MEM_FRACTION`, `XLA_PYTHON_CLIENT_MEM_FRACTION` | `devices.memory_fraction` |
| `XLA_FLAGS`, `jax_persistent_cache_enable_xla_caches` | `devices.deterministic` |
| `jax_cuda_visible_devices` | a start on the GPUs of the session alone |

Until this process ends (`set_for_process`):

| setting | is changed for |
|---|---|
| `jax_platforms` | a process without GPUs; the CPU beside them, where the first parameters are computed |
| `CUDA_DEVICE_ORDER` | CUDA, which shall number the GPUs as NVML does |
| `XLA_PYTHON_CLIENT_PREALLOCATE` | `devices` and `evaluate`, which take memory only as they need it |
| `jax_enable_preemption_service` | one process of several, which handles SIGTERM itself |
| `jax_compilation_cache_dir` and others of the cache | `process_tuning`, which keeps compiled programs |

No other module writes these settings. A child process inherits the variables; `user_environment` has them without
those of sessions.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend

from jaxrl_atari.errors import require
from jaxrl_atari.hardware import cpu

jax_config: Any = jax.config  # the type checker does not know its attributes

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
"""XLA's flag for the same bits in every run on a GPU: no atomic additions, no kernel chosen by timing."""

NUMERIC = {
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_numpy_dtype_promotion": "standard",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_disable_jit": False,
}
"""Settings of JAX that change numbers -> JAX's defaults."""


class ChangedSetting(NamedTuple):
    """The values of a setting that `set_for_session` has changed; None for a variable that is not set."""

    before: Any
    ours: Any


class Settings:
    """One kind of settings: environment variables, or options of JAX.

    Args:
        read: returns the value of a setting.
        write: gives a setting a value.
    """

    def __init__(self, read: Callable[[str], Any], write: Callable[[str, Any], object]):
        self._read = read
        self._write = write
        self._changed: dict[str, ChangedSetting] = {}  # those that are changed for a session now, by name

    def set_for_process(self, name: str, value: Any) -> None:
        """Gives a setting a value until this process ends."""
        self._write(name, value)

    def set_for_session(self, name: str, value: Any) -> None:
        """Gives a setting a value until `put_back`."""
        current = self._read(name)
        changed = self._changed.get(name)
        before = changed.before if changed and changed.ours == current else current
        self._changed[name] = ChangedSetting(before, value)
        self._write(name, value)

    def before_sessions(self) -> dict[str, Any]:
        """The values that settings had before sessions changed them.

        A setting that somebody else has changed since then is left out.
        """
        return {
            name: changed.before for name, changed in self._changed.items() if self._read(name) == changed.ours
        }

    def put_back(self) -> None:
        """Gives settings the values of `before_sessions`."""
        for name, value in self.before_sessions().items():
            self._write(name, value)
        self._changed.clear()


def write_variable(name: str, value: str | None) -> None:
    """Sets an environment variable; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


environment_variables = Settings(os.environ.get, write_variable)
"""Environment variables. Other processes get those of the user: `user_environment`."""

jax_options = Settings(lambda name: jax_config.values[name], jax_config.update)
"""Options of `jax.config`. Other processes start with those of the user by themselves."""


def put_back_settings() -> None:
    """Puts back what sessions have changed.

    Do not call it once JAX has started on a GPU: the settings then record how it started.
    """
    environment_variables.put_back()
    jax_options.put_back()


def user_environment() -> dict[str, str]:
    """The environment variables without what sessions of this process have changed: those for other processes."""
    environment = {**os.environ, **environment_variables.before_sessions()}
    return {name: value for name, value in environment.items() if value is not None}


def has_started() -> bool:
    """Whether JAX has started its back end in this process.

    JAX has no public way to ask, but once it has started, it refuses to change the number of CPU devices.
    """
    count = jax_config.jax_num_cpu_devices
    try:
        jax_config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError:
        return True
    jax_config.update("jax_num_cpu_devices", count)
    return False


def has_started_on_gpu() -> bool:
    """Whether JAX has started on more than the CPU in this process. It then keeps its GPUs and their settings."""
    return has_started() and set(jax.extend.backend.backends()) != {"cpu"}


def require_not_started(field: str, value: Any) -> None:
    """Raises `ConfigError` if JAX has started on a GPU, which is too late for the option `field`."""
    hint = "train in a fresh process, or leave it out"
    require(not has_started_on_gpu(), field, value, "to be set before JAX starts", hint)


def check_deterministic_kernels() -> None:
    """Raises `ConfigError` if JAX has started on a GPU without `DETERMINISTIC`."""
    if not _are_kernels_deterministic():
        require_not_started("devices.deterministic", True)


def use_deterministic_kernels() -> None:
    """Adds `DETERMINISTIC` to XLA_FLAGS. Call `check_deterministic_kernels` first."""
    # XLA reads its autotuning cache before it obeys the flag, and the keys of that cache do not include the flag.
    jax_options.set_for_session("jax_persistent_cache_enable_xla_caches", "none")
    if not _are_kernels_deterministic():
        flags = os.environ.get("XLA_FLAGS", "")
        environment_variables.set_for_session("XLA_FLAGS", f"{flags} {DETERMINISTIC}")


def _are_kernels_deterministic() -> bool:
    """Whether XLA_FLAGS says so. If a flag appears twice, the last one wins."""
    flag = DETERMINISTIC.partition("=")[0]
    own = [word for word in os.environ.get("XLA_FLAGS", "").split() if word.partition("=")[0] == flag]
    return own[-1:] in ([DETERMINISTIC], [flag])  # a flag without a value is true


def numeric_settings() -> dict[str, Any]:
    """The settings that change numbers and differ from their defaults, and the number of XLA's threads."""
    settings = {name: getattr(jax_config, name) for name in NUMERIC}
    settings |= {name: os.environ.get(name) for name in ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")}
    changed = {name: value for name, value in settings.items() if value != NUMERIC.get(name)}
    return {"xla_threads": cpu.xla_threads(), **changed}
