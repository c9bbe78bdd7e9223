"""The CPU as Linux reports it, read from a folder that stands in for / ."""

import os

import pytest

from jaxrl_atari.hardware import cpu
from jaxrl_atari.hardware.cpu import Cpu, multiplies_bfloat16, read_cpu

FLAGS = {
    "Xeon": "fpu ht avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8",
    "EPYC": "fpu ht avx2 avx512f avx512_bf16",
    "Core": "fpu ht avx2 avx_vnni",
    "old": "fpu sse2",
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes proc and sys of a machine with these flags, whose CPU i has the siblings `siblings[i]`."""

    def write(flags, siblings=(), usable=None):
        (tmp_path / "proc").mkdir()
        fields = f"processor\t: 0\nmodel name\t: A CPU @ 2 GHz: fast\nflags\t\t: {flags}\n"
        (tmp_path / "proc/cpuinfo").write_text(f"{fields}\n{fields.replace('A CPU', 'Another')}\n")
        for number, text in enumerate(siblings):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(text + "\n")
        numbers = set(range(len(siblings))) if usable is None else usable
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: numbers)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Xeon", ("AVX2", "AVX-512", "BF16", "AMX")), ("EPYC", ("AVX2", "AVX-512", "BF16")), ("Core", ("AVX2",)),
     ("old", ())],
)  # fmt: skip
def test_instruction_sets(machine, name, expected):
    root = machine(FLAGS[name], ["0", "1"])
    assert read_cpu(root) == Cpu("A CPU @ 2 GHz: fast", expected, 2, 1, False)
    assert multiplies_bfloat16(root) == ("BF16" in expected)


@pytest.mark.parametrize(
    ("siblings", "usable", "expected"),
    [
        (["0-1", "0-1"], None, 2),
        (["0,2", "1,3", "0,2", "1,3"], None, 2),
        (["0,2", "1,3", "0,2", "1,3"], {0, 1}, 1),  # this process may use one thread of each core
        (["0-3", "0-3", "0-3", "0-3"], None, 4),
        (["0", "1"], None, 1),
        (["0", ""], None, None),
        (["0"], {0, 1}, None),
    ],
)
def test_hyperthreads(machine, siblings, usable, expected):
    assert read_cpu(machine("ht", siblings, usable)).threads_per_core == expected


def test_a_virtual_machine_that_shows_no_hyperthreads_may_hide_them(machine):
    root = machine("ht hypervisor", ["0", "1"])
    assert read_cpu(root).threads_per_core is None
    assert str(read_cpu(root)).endswith("hyperthreads: not reported (virtual machine)")


def test_a_virtual_machine_that_shows_hyperthreads_is_believed(machine):
    assert read_cpu(machine("ht hypervisor", ["0-1", "0-1"])).threads_per_core == 2


def test_the_line_for_the_user():
    sets = ("AVX2", "AMX")
    assert str(Cpu("A CPU", sets, 2, 2, False)) == (
        "2 cores A CPU; instruction sets: AVX2, AMX; hyperthreads: yes, 2 to a physical core"
    )
    assert str(Cpu("A CPU", (), 4, 1, False)) == "4 cores A CPU; instruction sets: none of these; hyperthreads: no"


def test_a_machine_that_reports_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu.platform, "processor", lambda: "")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "")
    found = read_cpu(tmp_path)
    assert found[:2] == ("not reported", None)
    assert str(found).endswith("not reported; instruction sets: not reported; hyperthreads: not reported")
    assert not multiplies_bfloat16(tmp_path)
