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
from typing import Any, NamedTuple

from jaxrl_atari.benchmark.measure import PARTS, Spread, spread
from jaxrl_atari.cli.config_files import config_source
from jaxrl_atari.config import Config, parse_value, set_fields
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.hardware.choice import choose_devices
from jaxrl_atari.output import say, write


class SideRun(NamedTuple):
    """One run of a side, in a process of its own."""

    rate: float  # per second
    rss_gib: float  # peak memory of the process; where this package trains, only until its first repeat
    values: dict[str, Any]  # the run in the JSON object


class Side(NamedTuple):
    """A side of a comparison: one of the things that are compared."""

    rate: Spread  # over its runs
    runs: list[SideRun]  # one for each round


class Comparison(NamedTuple):
    """The result of `compare`."""

    sides: dict[str, Side]
    ratios: dict[str, Spread]  # "a / b" -> the ratio of their rates over the rounds

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        sides = {
            name: {"rate": side.rate._asdict(), "runs": [run.values for run in side.runs]}
            for name, side in self.sides.items()
        }
        return {"sides": sides, "ratios": {name: ratio._asdict() for name, ratio in self.ratios.items()}}


SideFunctions = dict[str, Callable[[], SideRun]]
"""Name of a side -> a function that runs it."""


def run_json(command: Sequence[str | Path]) -> dict[str, Any]:
    """Runs Python with some arguments and returns the JSON object in its last line of output.

    What it writes to stderr is shown, such as a warning or the traceback of a bug.

    Raises:
        UserError: the process failed. The message has the last line of its stderr. If the user can correct the
            error, the rest of stderr is not shown.
    """
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode != UserError.exit_status:
        write(done.stderr, sys.stderr)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        raise UserError(f"{command[0]} {command[1]} failed (exit status {done.returncode}): {last}")
    return json.loads(done.stdout.splitlines()[-1])


def run_side(config: Config, part: str, seconds: float) -> SideRun:
    """Measures a part of training in its own process: one side of a comparison."""
    with tempfile.TemporaryDirectory(prefix="jaxrl_atari_benchmark_") as folder:
        file = Path(folder, "config.py")
        file.write_text(config_source(config, "A side of a comparison."))
        options = ["--config", file, "--parts", part, "--repeats", "1", "--seconds", str(seconds)]
        result = run_json(["-m", "jaxrl_atari.benchmark", *options])
    rate = result["figures"][PARTS[part].rate]["median"]
    memory = result["start_peak_rss_gib"]
    return SideRun(rate, memory, {"rate": rate, "start_peak_rss_gib": memory, "devices": result["devices"]})


def make_sides(text: str, config: Config, part: str, seconds: float) -> SideFunctions:
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
    return {f"{field}={value}": partial(run_side, configs[value], part, seconds) for value in chosen}


def compare(sides: SideFunctions, pairs: Sequence[tuple[str, str]], repeats: int) -> Comparison:
    """Runs the sides of a comparison in turns, back and forth, and prints the rate of each run.

    Args:
        pairs: pairs (a, b) of sides, whose ratio a / b is reported.
        repeats: number of rounds.
    """
    runs: dict[str, list[SideRun]] = {name: [] for name in sides}
    for turn in range(repeats):
        for name in sides if turn % 2 == 0 else reversed(sides):
            write(f"round {turn + 1} of {repeats}: {name} ")  # it may compile for minutes
            run = sides[name]()
            runs[name].append(run)
            say(f"{run.rate:,.0f}")
    measured = {name: Side(spread([run.rate for run in side_runs]), side_runs) for name, side_runs in runs.items()}
    ratios = {}
    for a, b in pairs:
        rounds = zip(measured[a].rate.values, measured[b].rate.values, strict=True)
        ratios[f"{a} / {b}"] = spread([x / y for x, y in rounds])
    return Comparison(measured, ratios)


def print_comparison(result: Comparison) -> None:
    """Prints the result of `compare`: a table of the sides, and a line for each ratio."""
    say(f"\n{'per second':<36}{'median':>10}{'min':>10}{'max':>10}{'RSS GiB':>10}")
    for name, side in result.sides.items():
        rate = side.rate
        rss = statistics.median(run.rss_gib for run in side.runs)  # the first run may have compiled
        say(f"{name:<36}{rate.median:>10,.0f}{rate.min:>10,.0f}{rate.max:>10,.0f}{rss:>10.2f}")
    say("")
    for pair, ratio in result.ratios.items():
        pairs = f"{ratio.min:.2f} to {ratio.max:.2f}, {len(ratio.values)} pairs"
        say(f"{pair}: {ratio.median:.2f} ({pairs})")
