"""Settings of the process: the cache of compiled programs, and what changes numbers."""

import json

from user_commands import python

COMPILE = """
import jax
from jaxrl_atari.hardware.settings import tune_process
print(tune_process())
jax.jit(lambda x: 3 * x + 1)(2.0)
"""


def test_the_default_cache_folder_keeps_compiled_programs(tmp_path):
    """The first process fills the folder, and the second one adds nothing. XLA's threads change what is
    compiled."""
    folder, programs = tmp_path / "jaxrl_atari" / "xla" / "threads_3", []
    for _ in range(2):
        unset = {"JAX_COMPILATION_CACHE_DIR": "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": ""}
        code = f"import os; [os.environ.pop(name) for name in {[*unset]}]{COMPILE}"
        ended = python("-c", code, XDG_CACHE_HOME=str(tmp_path), NPROC="3", **unset)
        assert ended.stdout == f"compiled programs are kept in {folder}\n", ended.stderr
        programs.append(sorted(path.name for path in folder.iterdir() if not path.name.endswith("-atime")))
    assert programs[0] == programs[1]
    assert any("lambda" in name for name in programs[0])


def test_a_folder_that_cannot_be_made_ends_nothing():
    ended = python("-c", COMPILE, JAX_COMPILATION_CACHE_DIR="/dev/null/cache")
    assert ended.returncode == 0, ended.stderr
    assert "/dev/null/cache" in ended.stdout


def test_settings_that_change_numbers():
    code = "import json; from jaxrl_atari.hardware.settings import *; print(json.dumps(numeric_settings()))"
    found = python("-c", code, JAX_ENABLE_X64="1", NPROC="1", NVIDIA_TF32_OVERRIDE="0")
    expected = {"jax_enable_x64": True, "xla_threads": 1, "NVIDIA_TF32_OVERRIDE": "0"}
    assert json.loads(found.stdout) == expected
