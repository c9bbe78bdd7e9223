"""The CPU, read from a file that stands in for /proc/cpuinfo."""

from jaxrl_atari.hardware.cpu import read_cpu, usable_cores


def test_the_first_entry_describes_the_cpu(tmp_path):
    path = tmp_path / "cpuinfo"
    for flags, expected in {
        "fpu ht avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8": ("AVX2", "AVX-512", "BF16", "AMX"),
        "fpu ht avx2 avx512f avx512_bf16": ("AVX2", "AVX-512", "BF16"),
        "fpu ht avx2 avx_vnni": ("AVX2",),
        "fpu sse2": (),
    }.items():
        entry = f"processor\t: 0\nmodel name\t: A CPU @ 2 GHz: fast\nflags\t\t: {flags}\n"
        path.write_text(f"{entry}\n{entry.replace('A CPU', 'Another')}\n")
        assert read_cpu(path) == ("A CPU @ 2 GHz: fast", expected, usable_cores())
    missing = read_cpu(tmp_path / "missing")
    assert missing.model
    assert missing.instruction_sets == ()
