"""Benchmarks in processes of their own: start-up, and comparisons in turns."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from jaxrl_atari.benchmark.measure import summary
from jaxrl_atari.cli import say
from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.runs.files import read_json

CONFIG_FILE = """\
from jaxrl_atari.config import config_from_dict

def get_config():
    return config_from_dict({})
"""

Sides = dict[str, Callable[[], dict[str, Any]]]
"""Name -> a call that runs this side of a comparison and returns its `rate` and `peak_rss_gib` among JSON values."""


def run_json(command: Sequence[str | Path], output: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Runs Python with some arguments, beside these variables; returns the JSON object that it writes to `output`.

    Raises:
        UserError: it failed; the message is the last line of the process.
    """
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        raise UserError(f"{command[0]} {command[1]} failed (exit status {done.returncode}): {last}")
    return read_json(output)


def run_benchmark(
    config: Config, part: str, repeats: int, seconds: float, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Measures a part of training in a process of its own; see `measure.measure`."""
    with tempfile.TemporaryDirectory(prefix="jaxrl_atari_benchmark_") as folder:
        file, output = Path(folder, "config.py"), Path(folder, "result.json")
        file.write_text(CONFIG_FILE.format(config.to_dict()))
        options = ["--parts", part, "--repeats", str(repeats), "--seconds", str(seconds), "--json", output]
        command = ["-m", "jaxrl_atari.benchmark", "--config", file, *options]
        return run_json(command, output, {"TMPDIR": folder, **variables})


def run_side(config: Config, part: str, seconds: float, variables: Mapping[str, str]) -> dict[str, Any]:
    """One side of a comparison."""
    found = run_benchmark(config, part, 1, seconds, variables)
    rate = next(iter(found["figures"].values()))["median"]
    return {"rate": rate, **found["memory"], "devices": found["process"]["devices"]}


def measure_startup(config: Config) -> dict[str, dict[str, float]]:
    """Two starts of the same training: with an empty cache of compiled programs (`cold`) and again (`warm`).

    Returns:
        For each: seconds from the start of the process to the first env step and to the end of the first update,
        seconds that XLA compiled (or read from the cache), the number of programs, and how many came from the cache.
    """
    starts = {}
    with tempfile.TemporaryDirectory(prefix="jaxrl_atari_cache_") as folder:
        variables = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        for name in ("cold", "warm"):
            started_at = time.time()
            found = run_benchmark(config, "end_to_end", 0, 1.0, variables)["process"]
            starts[name] = start = {
                "first_env_step_seconds": found["first_env_step_at"] - started_at,
                "first_update_seconds": found["first_update_at"] - started_at,
                **{key: found[key] for key in ("compile_seconds", "programs", "cache_hits")},
            }
            say(
                f"start with a {name} cache: first env step after {start['first_env_step_seconds']:.1f} s, first update"
                f" after {start['first_update_seconds']:.1f} s; compiling {start['compile_seconds']:.1f} s,"
                f" {start['cache_hits']} of {start['programs']} programs from the cache"
            )
    return starts


def make_sides(text: str, config: Config, part: str, seconds: float) -> Sides:
    """The sides of `--compare TEXT`: FIELD=V1,V2,..., VARIABLE=V1,V2,... or cpu,gpu.

    Raises:
        UserError: it is of another form, or the config cannot have such a value.
        SystemExit: after tyro has printed that the config has no such field or value.
    """

    def with_value(field: str, value: str) -> Config:
        word = {"true": "True", "false": "False"}.get(value, value)
        return tyro.cli(
            Config,
            args=[f"--{field.replace('_', '-')}", word],
            default=config,
            prog="--compare",
            config=(tyro.conf.FlagConversionOff,),
        )

    run = partial(run_side, part=part, seconds=seconds)
    if text in ("cpu,gpu", "gpu,cpu"):  # a GPU that is missing is reported at once
        devices = {"gpu": "true", "cpu": "false"}
        return {name: partial(run, with_value("devices.gpu", word), variables={}) for name, word in devices.items()}
    field, _, values = text.partition("=")
    chosen = values.split(",")
    require(len({*chosen}) == len(chosen) > 1, "--compare", text, "cpu,gpu or FIELD=VALUE,VALUE,... (different values)")
    if field.isupper():
        return {f"{field}={value}": partial(run, config, variables={field: value}) for value in chosen}
    return {f"{field}={value}": partial(run, with_value(field, value), variables={}) for value in chosen}


def compare(sides: Sides, pairs: Sequence[tuple[str, str]], repeats: int) -> dict[str, Any]:
    """Runs the sides of a comparison in turns, back and forth, and prints which is faster.

    Args:
        pairs: (a, b) whose ratio a / b is reported.

    Returns:
        JSON values: `sides` (name -> summary of its rate, and its runs) and `ratios` ("a / b" -> summary, one ratio
        for each round).
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(repeats):
        for name in sides if turn % 2 == 0 else reversed(sides):
            runs[name].append(found := sides[name]())
            say(f"round {turn + 1} of {repeats}: {name} {found['rate']:,.0f}")
    rates = {name: [run["rate"] for run in side_runs] for name, side_runs in runs.items()}
    ratios = {f"{a} / {b}": [x / y for x, y in zip(rates[a], rates[b], strict=True)] for a, b in pairs}

    say(f"\n{'a second':<36}{'median':>10}{'min':>10}{'max':>10}{'RSS GiB':>10}")
    for name, values in rates.items():
        rss = statistics.median(run["peak_rss_gib"] for run in runs[name])  # the first one may have compiled
        say(f"{name:<36}{statistics.median(values):>10,.0f}{min(values):>10,.0f}{max(values):>10,.0f}{rss:>10.2f}")
    say("")
    for (a, b), values in zip(pairs, ratios.values(), strict=True):
        say(verdict(a, b, values))
    return {
        "sides": {name: {"rate": summary(rates[name]), "runs": runs[name]} for name in runs},
        "ratios": {name: summary(values) for name, values in ratios.items()},
    }


def verdict(a: str, b: str, ratios: Sequence[float]) -> str:
    """A sentence that states which is faster; `ratios` are a's rate over b's."""
    if statistics.median(ratios) < 1:
        a, b, ratios = b, a, [1 / ratio for ratio in ratios]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} pairs"
    sure = "" if min(ratios) > 1 else ": within the noise"
    return f"{a} is {statistics.median(ratios):.2f} times as fast as {b} ({spread}){sure}"
