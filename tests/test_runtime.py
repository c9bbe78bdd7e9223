"""Settings of the process: the cache of compiled programs, and what changes numbers."""

import json

import pytest
from fake_cuda import python

from jaxrl_atari.hardware.runtime import usable_cores

COMPILE = """
import warnings
warnings.simplefilter("error")
import jax
from jaxrl_atari.hardware import runtime
print(*runtime.configure(), sep="\\n")
jax.jit(lambda x: 3 * x + 1)(2.0), jax.jit(lambda x, y: x - y)(2.0, 1.0)
"""


@pytest.mark.long
def test_damaged_programs_are_removed_from_the_cache_once(tmp_path):
    def started():
        result = python("-c", COMPILE, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
        assert result.returncode == 0, result.stderr
        return [line for line in result.stdout.splitlines() if "removed from" in line]

    def programs():
        return {path.name: path.read_bytes() for path in tmp_path.glob("*-cache")}

    assert started() == []
    before = programs()
    first, *others = before
    (tmp_path / first).write_bytes(before[first][: len(before[first]) // 2])  # as a full disk leaves them
    (tmp_path / others[0]).write_bytes(b"")
    assert started() == ["damaged programs removed from the cache, to be compiled again: 2"]
    assert programs().keys() == before.keys()
    assert started() == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {}),
        ({"JAX_ENABLE_X64": "1", "NPROC": "1"}, {"jax_enable_x64": True, "xla_threads": 1}),
        ({"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, {"jax_default_matmul_precision": "highest"}),
        ({"NVIDIA_TF32_OVERRIDE": "0", "XLA_FLAGS": "--a"}, {"NVIDIA_TF32_OVERRIDE": "0", "XLA_FLAGS": "--a"}),
    ],
)
def test_settings_that_change_numbers(variables, expected):
    code = "import json; from jaxrl_atari.hardware.runtime import *; print(json.dumps(numeric_settings()))"
    found = json.loads(python("-c", code, **variables).stdout)
    assert found == {"xla_threads": usable_cores()} | expected
