"""Settings of the process: the cache of compiled programs, and what changes numbers."""

import json
import math

import pytest
from user_commands import one_error_line, python

from jaxrl_atari.envs import make_pool
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.hardware.cpu import cpu_quota, usable_cores, xla_threads


def test_a_cache_that_cannot_be_written_to_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    code = "from jaxrl_atari.process_tuning import tune_process; print(*tune_process())"
    kept = python("-c", code, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "new")).stdout
    assert f"compiled programs are kept in {tmp_path}/new/threads_{xla_threads()}" in kept
    refused = python("-c", code, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "file")).stdout
    assert "compiled programs are not kept" in refused


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
    code = "import json; from jaxrl_atari.hardware.jax_settings import *; print(json.dumps(numeric_settings()))"
    found = json.loads(python("-c", code, **variables).stdout)
    assert found == {"xla_threads": usable_cores()} | expected


QUOTAS = {
    "v2": ("0::/pod/app\n", {"pod/app/cpu.max": "50000 100000", "pod/cpu.max": "max 100000"}, 0.5),
    "v2, of a group above": ("0::/pod/app\n", {"pod/app/cpu.max": "max 100000",
    "pod/cpu.max": "150000 100000"}, 1.5),
    "v2, seen from inside": ("0::/\n", {"cpu.max": "100000 100000"}, 1.0),
    "v2, none": ("0::/\n", {"cpu.max": "max 100000"}, math.inf),
    "v1": (
        "5:memory:/a\n4:cpu,cpuacct:/docker/b\n",
        {"cpu,cpuacct/docker/b/cpu.cfs_quota_us": "200000", "cpu,cpuacct/docker/b/cpu.cfs_period_us": "100000"},
        2.0,
    ),
    "v1, the host's path": (
        "4:cpu,cpuacct:/docker/b\n", {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "100000"}, 0.25
    ),
    "v1, none": (
        "4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf
    ),
    "no files": ("0::/\n", {}, math.inf),
    "odd lines": ("0::/\nno group\n", {"cpu.max": "100000 100000"}, 1.0),
}  # fmt: skip


@pytest.mark.parametrize(("own", "files", "expected"), QUOTAS.values(), ids=QUOTAS)
def test_a_cpu_quota_of_a_container_is_read(tmp_path, own, files, expected):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert cpu_quota(tmp_path / "root", tmp_path / "own") == expected


QUOTA = """
from jaxrl_atari.envs import process_threads
from jaxrl_atari.hardware import cpu
from jaxrl_atari.process_tuning import tune_process
cpu.cpu_quota, cpu.usable_cores = lambda: 1.5, lambda: 8
print(*tune_process(), process_threads(), sep="\\n")
"""


def test_a_quota_limits_the_emulator_threads_unless_the_user_has_chosen(tmp_path):
    line = "a quota limits this process to 1.5 CPUs, so each pool has 2 emulator threads"
    lines = python("-c", QUOTA, JAX_COMPILATION_CACHE_DIR=str(tmp_path)).stdout.splitlines()
    assert (lines[0], lines[-1]) == (line, "2")
    lines = python(
        "-c", QUOTA, JAX_COMPILATION_CACHE_DIR=str(tmp_path), JAXRL_ATARI_THREADS="4"
    ).stdout.splitlines()
    assert (line in lines, lines[-1]) == (False, "4")


MALLOC = """
import ctypes
from jaxrl_atari.process_tuning import tune_process
set_parameters = []
class Library:
    gnu_get_libc_version = None
    def mallopt(self, number, value):
        set_parameters.append(number)
ctypes.CDLL = lambda name: Library()
tune_process()
print(sorted(set_parameters))
"""


@pytest.mark.parametrize(
    ("tunables", "numbers"),
    [
        ("glibc.malloc.hugetlb=1", "[-8, -3, -2, -1]"),
        ("glibc.malloc.arena_max=4:glibc.malloc.top_pad=1", "[-3, -1]"),
    ],
)
def test_parameters_of_malloc_that_the_user_sets_stay(tunables, numbers, tmp_path):
    lines = python("-c", MALLOC, JAX_COMPILATION_CACHE_DIR=str(tmp_path), GLIBC_TUNABLES=tunables).stdout
    assert lines.splitlines()[-1] == numbers


# --- Environment variables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("JAXRL_ATARI_THREADS", "two"), ("NPROC", "0")])
def test_a_variable_that_is_no_whole_number_is_refused_before_a_run_directory_is_made(name, value, tmp_path):
    command = ("-m", "jaxrl_atari.train", "--output-dir", tmp_path / "data")
    result = python(*command, JAXRL_ATARI_NO_TUNING="1", **{name: value})
    assert result.returncode == 2, result.stderr
    assert f"{name} = '{value}': expected a whole number from " in one_error_line(result.stderr)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("value", ["two", "-1", "1.5", "4097", "9" * 5_000])
def test_the_number_of_emulator_threads_is_checked_by_the_pool_too(value, monkeypatch):
    monkeypatch.setenv("JAXRL_ATARI_THREADS", value)
    with pytest.raises(ConfigError, match=r"JAXRL_ATARI_THREADS = '.*': expected a whole number from 0 to 4,096"):
        make_pool("ale", "Pong", 1, seed=0, rules=PROTOCOLS["v5"])


@pytest.mark.parametrize(("value", "threads"), [("3", 3), (" 3 ", 3), ("", None)])
def test_an_empty_variable_counts_as_not_set(value, threads, monkeypatch):
    monkeypatch.setenv("NPROC", value)
    assert xla_threads() == (threads or usable_cores())
