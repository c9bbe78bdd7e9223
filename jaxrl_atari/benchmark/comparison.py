"""Comparisons: the sides run in turns, each in its own process."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_atari.benchmark.measure import spread
from jaxrl_atari.cli.options import parse
from jaxrl_atari.config import Config
from jaxrl_atari.config_dicts import config_source
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.hardware.choice import choose_devices
from jaxrl_atari.output import say

Sides = dict[str, Callable[[], dict[str, Any]]]
"""Name -> a function that runs this side and returns JSON values, with its `rate` and `peak_rss_gib`."""


def run_json(command: Sequence[str | Path]) -> dict[str, Any]:
    """Runs Python with some arguments and returns the JSON object in its last line of output.

    Raises:
        UserError: the process failed; the message has the last line of its stderr.
    """
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        raise UserError(f"{command[0]} {command[1]} failed (exit status {done.returncode}): {last}")
    return json.loads(done.stdout.splitlines()[-1])


def run_side(config: Config, part: str, seconds: float) -> dict[str, Any]:
    """Measures a part of training in its own process: one side of a comparison."""
    with tempfile.TemporaryDirectory(prefix="jaxrl_atari_benchmark_") as folder:
        file = Path(folder, "config.py")
        file.write_text(config_source(config, "A side of a comparison."))
        options = ["--config", file, "--parts", part, "--repeats", "1", "--seconds", str(seconds)]
        found = run_json(["-m", "jaxrl_atari.benchmark", *options])
    rate = next(iter(found["figures"].values()))["median"]
    return {"rate": rate, "peak_rss_gib": found["peak_rss_gib"], "devices": found["devices"]}


def make_sides(text: str, config: Config, part: str, seconds: float) -> Sides:
    """The sides of `--compare TEXT`: FIELD=V1,V2,... or cpu,gpu.

    Raises:
        UserError: the text has another form, or the config has no such field or value.
    """
    if text == "cpu,gpu":
        choose_devices(replace(config.devices, gpu=True))  # a missing GPU is an error before anything is measured
        text = "devices.gpu=false,true"
    field, _, values = text.partition("=")
    chosen = values.split(",")
    differ = len({*chosen}) == len(chosen) > 1
    require(differ, "--compare", text, "cpu,gpu or FIELD=VALUE,VALUE,... (different values)")

    def side(value: str) -> Callable[[], dict[str, Any]]:
        changed = parse(Config, [f"--{field}", value], "benchmark --compare", config)
        return partial(run_side, changed, part, seconds)

    return {f"{field}={value}": side(value) for value in chosen}


def compare(sides: Sides, pairs: Sequence[tuple[str, str]], repeats: int) -> dict[str, Any]:
    """Runs the sides of a comparison in turns, back and forth, and prints the rate of each run.

    Args:
        pairs: pairs (a, b) of sides, whose ratio a / b is reported.
        repeats: number of rounds.

    Returns:
        JSON values: `sides`, name -> the `spread` of its rate, and its runs; and `ratios`, "a / b" -> the
        `spread` of the ratio over the rounds.
    """
    runs = {name: [] for name in sides}
    for turn in range(repeats):
        for name in sides if turn % 2 == 0 else reversed(sides):
            found = sides[name]()
            runs[name].append(found)
            say(f"round {turn + 1} of {repeats}: {name} {found['rate']:,.0f}")
    rates = {name: spread([run["rate"] for run in side_runs]) for name, side_runs in runs.items()}
    ratios = {}
    for a, b in pairs:
        values = [x / y for x, y in zip(rates[a]["values"], rates[b]["values"], strict=True)]
        ratios[f"{a} / {b}"] = spread(values)
    return {"sides": {name: {"rate": rates[name], "runs": runs[name]} for name in runs}, "ratios": ratios}


def print_comparison(result: dict[str, Any]) -> None:
    """Prints the result of `compare`: a table of the sides, and a line for each ratio."""
    say(f"\n{'per second':<36}{'median':>10}{'min':>10}{'max':>10}{'RSS GiB':>10}")
    for name, side in result["sides"].items():
        rate = side["rate"]
        rss = statistics.median(run["peak_rss_gib"] for run in side["runs"])  # the first run may have compiled
        say(f"{name:<36}{rate['median']:>10,.0f}{rate['min']:>10,.0f}{rate['max']:>10,.0f}{rss:>10.2f}")
    say("")
    for pair, ratio in result["ratios"].items():
        pairs = f"{ratio['min']:.2f} to {ratio['max']:.2f}, {len(ratio['values'])} pairs"
        say(f"{pair}: {ratio['median']:.2f} ({pairs})")
