"""Comparisons in real processes: values of an option, and this package beside PyTorch."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_atari.hardware.cpu import read_cpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def python(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_comparison():
    command = ["-m", "jaxrl_atari.benchmark", "--seconds", 0.05, "--repeats", 1, "--parts", "acting"]
    result = python(*command, "--compare", "env.num_envs=8,16")
    assert all(side["rate"]["median"] > 0 for side in result["sides"].values())
    assert [*result["ratios"]] == ["env.num_envs=16 / env.num_envs=8"]


@pytest.mark.timeout(1200)
def test_jaxrl_atari_beside_torch():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    compared = python(BENCHMARKS / "compare_torch.py", "--repeats", 1, "--seconds", 2)
    sides = ["jaxrl_atari float32", "torch plain", "torch tuned", "torch best"]
    if "BF16" in read_cpu().instruction_sets:
        sides += ["jaxrl_atari bfloat16", "torch bfloat16"]
    assert sorted(compared["sides"]) == sorted(sides)
    for name, side in compared["sides"].items():
        assert side["rate"]["median"] > 0
        (result,) = side["runs"]
        if name == "torch best":  # the fastest of the candidates, with torch.compile among them
            seconds = {name: tried for name, tried in result["tried_seconds"].items() if isinstance(tried, float)}
            chosen = result["arithmetic"] + ", compiled" * result["compiled"]
            assert chosen == min(seconds, key=seconds.__getitem__)
            assert sum(name.endswith(", compiled") for name in result["tried_seconds"]) == 1
        elif name.startswith("torch"):
            assert (result["arithmetic"] == "bfloat16 autocast") == (name == "torch bfloat16")
