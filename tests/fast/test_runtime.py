"""The CPUs that a process may use: its cores, a container's quota, and the user's variables."""

import math

import pytest

from jaxrl_atari.config import EnvConfig
from jaxrl_atari.envs import make_pool
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.hardware.cpu import cpu_quota, usable_cores, xla_threads

QUOTAS = {
    "a quota": ("0::/pod/app\n", {"pod/app/cpu.max": "50000 100000", "pod/cpu.max": "max 100000"}, 0.5),
    "of a group above": (
        "0::/pod/app\n",
        {"pod/app/cpu.max": "max 100000", "pod/cpu.max": "150000 100000"},
        1.5,
    ),
    "none": ("0::/\n", {"cpu.max": "max 100000"}, math.inf),
    "no files": ("0::/\n", {}, math.inf),
}


@pytest.mark.parametrize(("own", "files", "expected"), QUOTAS.values(), ids=QUOTAS)
def test_a_cpu_quota_of_a_container_is_read(tmp_path, own, files, expected):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert cpu_quota(tmp_path / "root", tmp_path / "own") == expected


def test_the_number_of_emulator_threads_is_checked_by_the_pool_too(monkeypatch):
    for value in ("two", "-1", "1.5"):
        monkeypatch.setenv("JAXRL_ATARI_THREADS", value)
        with pytest.raises(ConfigError, match=r"JAXRL_ATARI_THREADS = '.*': expected a whole number"):
            make_pool(EnvConfig(game="Pong"), 1, seed=0)


def test_an_empty_variable_counts_as_not_set(monkeypatch):
    for value, threads in (("3", 3), ("", usable_cores())):
        monkeypatch.setenv("NPROC", value)
        assert xla_threads() == threads
