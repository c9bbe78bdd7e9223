"""JAX's settings, in its config and in environment variables: which of them change numbers, which ones sessions
change and put back, and whether JAX has started."""

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
    """The values of a setting that `ChangedSettings.set` has changed; None for a variable that is not set."""

    before: Any
    ours: Any


class ChangedSettings:
    """What sessions of this process have changed in one kind of settings, so that the next session puts it back.

    A setting that somebody else has changed since then is left alone.

    Args:
        read: returns the value of a setting.
        write: gives a setting a value.
    """

    def __init__(self, read: Callable[[str], Any], write: Callable[[str, Any], object]):
        self._read = read
        self._write = write
        self._changed: dict[str, ChangedSetting] = {}  # those that are changed now, by name

    def set(self, name: str, value: Any) -> None:
        """Gives a setting a value for a session."""
        current = self._read(name)
        changed = self._changed.get(name)
        before = changed.before if changed and changed.ours == current else current
        self._changed[name] = ChangedSetting(before, value)
        self._write(name, value)

    def before(self) -> dict[str, Any]:
        """The values that settings had before `set` changed them."""
        return {
            name: changed.before for name, changed in self._changed.items() if self._read(name) == changed.ours
        }

    def put_back(self) -> None:
        """Gives settings the values of `before`."""
        for name, value in self.before().items():
            self._write(name, value)
        self._changed.clear()


def write_variable(name: str, value: str | None) -> None:
    """Sets an environment variable; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


changed_variables = ChangedSettings(os.environ.get, write_variable)
"""Environment variables. Other processes get those of the user: `user_environment`."""

changed_options = ChangedSettings(lambda name: jax_config.values[name], jax_config.update)
"""Options of `jax.config`. Other processes start with those of the user by themselves."""


def put_back_settings() -> None:
    """Puts back what sessions have changed. Not once JAX has started on a GPU: they then say how."""
    changed_variables.put_back()
    changed_options.put_back()


def user_environment() -> dict[str, str]:
    """The environment variables without what sessions of this process have changed: those for other processes."""
    environment = {**os.environ, **changed_variables.before()}
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
    """Whether JAX has started on a GPU in this process. It then keeps its GPUs and their settings."""
    return has_started() and set(jax.extend.backend.backends()) != {"cpu"}


def require_not_started(field: str, value: Any) -> None:
    """Raises `ConfigError` if JAX has started on a GPU, which is too late for the option `field`."""
    hint = "train in a fresh process, or leave it out"
    require(not has_started_on_gpu(), field, value, "to be set before JAX starts", hint)


def check_deterministic_kernels() -> None:
    """Raises `ConfigError` if JAX has started on a GPU without `DETERMINISTIC`."""
    if DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        require_not_started("devices.deterministic", True)


def use_deterministic_kernels() -> None:
    """Adds `DETERMINISTIC` to XLA_FLAGS. Call `check_deterministic_kernels` first."""
    # XLA reads its autotuning cache before it obeys the flag, and the keys of that cache do not include the flag.
    changed_options.set("jax_persistent_cache_enable_xla_caches", "none")
    flags = os.environ.get("XLA_FLAGS", "")
    if DETERMINISTIC not in flags:
        changed_variables.set(
            "XLA_FLAGS", f"{flags} {DETERMINISTIC}"
        )  # if a flag appears twice, the last one wins


def numeric_settings() -> dict[str, Any]:
    """The settings that change numbers and differ from their defaults, and the number of XLA's threads."""
    settings = {name: getattr(jax_config, name) for name in NUMERIC}
    settings |= {name: os.environ.get(name) for name in ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")}
    changed = {name: value for name, value in settings.items() if value != NUMERIC.get(name)}
    return {"xla_threads": cpu.xla_threads(), **changed}
