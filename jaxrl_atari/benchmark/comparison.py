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

from jaxrl_atari.algorithm import check_config
from jaxrl_atari.benchmark.measure import PARTS, spread
from jaxrl_atari.cli.config_files import config_source
from jaxrl_atari.config import Config, parse_value, set_fields
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.hardware.choice import choose_devices
from jaxrl_atari.output import say, write

SideRun = dict[str, Any]
"""One run of a side, in a process of its own, as JSON values.

`rate` is per second, and `rss_gib` the peak memory of the process; where this package trains, only until its first
repeat.
"""

Sides = dict[str, Callable[[], SideRun]]
"""Name of a side, one of the things that are compared -> a function that runs it."""


def run_json(command: Sequence[str | Path]) -> dict[str, Any]:
    """Runs Python with some arguments and returns the JSON object in its last line of output.

    Raises:
        UserError: the process failed. Its stderr, which is shown, says why.
    """
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"{command[0]} {command[1]} failed (exit status {done.returncode}); the reason is above")
    return json.loads(done.stdout.splitlines()[-1])


def run_side(config: Config, part: str, seconds: float) -> SideRun:
    """Measures a part of training in its own process: one side of a comparison."""
    with tempfile.TemporaryDirectory(prefix="jaxrl_atari_benchmark_") as folder:
        file = Path(folder, "config.py")
        file.write_text(config_source(config, "A side of a comparison."))
        options = ["--config", file, "--parts", part, "--repeats", "1", "--seconds", str(seconds)]
        result = run_json(["-m", "jaxrl_atari.benchmark", *options])
    return {
        "rate": result["figures"][PARTS[part].rate]["median"],
        "rss_gib": result["start_peak_rss_gib"],
        "devices": result["devices"],
    }


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
    name = field.replace("-", "_")
    configs = {value: set_fields(config, {name: parse_value(value)}) for value in chosen}
    for each in configs.values():
        check_config(each)  # before anything is measured
    return {f"{field}={value}": partial(run_side, configs[value], part, seconds) for value in chosen}


def compare(sides: Sides, pairs: Sequence[tuple[str, str]], repeats: int) -> dict[str, Any]:
    """Runs the sides of a comparison in turns, back and forth, and prints each rate, a table and the ratios.

    Args:
        pairs: pairs (a, b) of sides, whose ratio a / b is reported.
        repeats: number of rounds.

    Returns:
        JSON values: `sides`, name -> `rate` over the rounds (a `spread`) and `runs`; and `ratios`, "a / b" -> the
        `spread` of the ratio of their rates over the rounds.
    """
    runs: dict[str, list[SideRun]] = {name: [] for name in sides}
    for turn in range(repeats):
        for name in sides if turn % 2 == 0 else reversed(sides):
            write(f"round {turn + 1} of {repeats}: {name} ")  # it may compile for minutes
            run = sides[name]()
            runs[name].append(run)
            say(f"{run['rate']:,.0f}")
    say(f"\n{'per second':<36}{'median':>10}{'min':>10}{'max':>10}{'RSS GiB':>10}")
    rates = {name: spread([run["rate"] for run in side_runs]) for name, side_runs in runs.items()}
    for name, rate in rates.items():
        rss = statistics.median(run["rss_gib"] for run in runs[name])  # the first run may have compiled
        say(f"{name:<36}{rate['median']:>10,.0f}{rate['min']:>10,.0f}{rate['max']:>10,.0f}{rss:>10.2f}")
    say("")
    ratios = {}
    for a, b in pairs:
        rounds = zip(rates[a]["values"], rates[b]["values"], strict=True)
        ratio = spread([x / y for x, y in rounds])
        ratios[f"{a} / {b}"] = ratio
        say(f"{a} / {b}: {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}, {repeats} pairs)")
    return {"sides": {name: {"rate": rates[name], "runs": runs[name]} for name in sides}, "ratios": ratios}
