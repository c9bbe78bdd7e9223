"""Tests run on eight CPU devices; what one test compiles, the others and their processes need not compile again.

The processes that tests start inherit the compilation cache, and otherwise only what a user's shell would give
them. On a machine with a GPU, they and the tests stay on the CPU, except with `-m gpu`: then one worker has the
GPUs, and takes their memory only as it needs it, so that the processes of its tests find theirs.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import jax
import pytest
from small_training import KINDS
from user_commands import user_environment

from jaxrl_atari import run_training
from jaxrl_atari.hardware.cpu import xla_threads
from jaxrl_atari.imports import IMPORTS_VARIABLE

SECONDS_KEPT = 7 * 24 * 3600

jax.config.update("jax_num_cpu_devices", 8)  # not XLA_FLAGS, which the processes that tests start would inherit


@pytest.fixture(autouse=True)
def imports_end_with_their_test(monkeypatch):
    """What a test imports for a command, the processes that a later test starts do not inherit."""
    monkeypatch.setenv(IMPORTS_VARIABLE, "[]")
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A function that gives the run directory of a small run: "plain", "recurrent", "two devices", "overlap" or
    "gymnasium" (`small_training.KINDS`). Each is trained once; tests only read it, and write into a copy."""

    @cache
    def train(kind: str) -> Path:
        if kind == "gymnasium":
            import minigrid  # noqa: F401 (registers the environments)

        return run_training(KINDS[kind], tmp_path_factory.mktemp("trained") / kind.replace(" ", "_")).run_dir

    return train


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """The environment of a user's shell, with the tests' cache of compiled programs."""
    return user_environment(XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def simulate():
    """A function that gives this process so many simulated GPUs, until the end of the test."""
    from simulated_gpus import simulated_machine

    with contextlib.ExitStack() as exits:
        yield lambda count: exits.enter_context(simulated_machine(count))


def wants_gpu(config):
    expression = config.option.markexpr
    return "gpu" in expression and "not gpu" not in expression


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if wants_gpu(config):
        config.option.numprocesses = 0  # two workers would share a GPU, and its memory


def keep_compiled(config):
    """Keeps compiled programs in .pytest_cache, for the next runs too: most of a first run is compilation.

    With `-p no:cacheprovider` a temporary folder keeps them for this run alone.
    """
    if config.pluginmanager.has_plugin("cacheprovider"):
        folder = config.cache.mkdir("compiled")
    else:
        temporary = tempfile.TemporaryDirectory()
        config.add_cleanup(temporary.cleanup)
        folder = Path(temporary.name)
    for path in filter(Path.is_file, folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # another run was faster
            if path.stat().st_mtime < time.time() - SECONDS_KEPT:
                path.unlink()
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    # JAX, imported above, has read neither. The folder is that of `tune_process` in other processes.
    jax.config.update("jax_compilation_cache_dir", f"{folder}/threads_{xla_threads()}")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_configure(config):
    # A shell's `&` ignores the first, `nohup` the second; the processes of tests would inherit it.
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, default)
    keep_compiled(config)
    if wants_gpu(config):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        return
    if Path("/dev/nvidiactl").exists():
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
    jax.devices()  # starts JAX: the first test that trains would limit it to the devices of its config
