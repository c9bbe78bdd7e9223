"""The CPU, read from a file that stands in for /proc/cpuinfo."""

import pytest

from jaxrl_atari.hardware.cpu import read_cpu, usable_cores


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu ht avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8", ("AVX2", "AVX-512", "BF16", "AMX")),
        ("fpu ht avx2 avx512f avx512_bf16", ("AVX2", "AVX-512", "BF16")),
        ("fpu ht avx2 avx_vnni", ("AVX2",)),
        ("fpu sse2", ()),
    ],
)
def test_the_first_entry_describes_the_cpu(flags, expected, tmp_path):
    entry = f"processor\t: 0\nmodel name\t: A CPU @ 2 GHz: fast\nflags\t\t: {flags}\n"
    (tmp_path / "cpuinfo").write_text(f"{entry}\n{entry.replace('A CPU', 'Another')}\n")
    cpu = read_cpu(tmp_path / "cpuinfo")
    assert cpu == ("A CPU @ 2 GHz: fast", expected, usable_cores())


def test_a_machine_that_reports_nothing(tmp_path):
    cpu = read_cpu(tmp_path / "cpuinfo")
    assert cpu.model
    assert cpu.instruction_sets == ()
