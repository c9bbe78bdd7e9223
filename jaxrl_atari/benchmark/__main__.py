"""The command `benchmark`: the speed of training on this machine, and its share of the emulators' speed.

    python -m jaxrl_atari.benchmark --config configs/qbert.py [--repeats 5] [--seconds 3] [--env.num-envs 64 ...]
    python -m jaxrl_atari.benchmark --config configs/qbert.py --compare overlap=none,update
    python -m jaxrl_atari.benchmark --config configs/qbert.py --trace data/trace

The first form times training in its steady state, with the real emulators, and its parts; `measure.py` defines
each figure. The second form compares values of a config field. The sides of the comparison take turns, each in its
own process, and a ratio is that of two runs in one round. Use a quiet machine, because other programs lower the
figures. The last line of output is a JSON object with all figures, the machine, the versions and the config.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil

from jaxrl_atari import cli
from jaxrl_atari.benchmark.comparison import compare, make_sides
from jaxrl_atari.benchmark.measure import PARTS, measure, trace
from jaxrl_atari.checks import Limits
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromConfig, parse, read_start
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.hardware import runtime
from jaxrl_atari.output import say
from jaxrl_atari.runs.columns import COLUMNS
from jaxrl_atari.runs.files import not_saved
from jaxrl_atari.runs.run_dir import describe

NOTES = {
    "env_sps": "emulators alone, random actions: the limit",
    "acting_sps": "policy and emulators",
    "update_samples_per_second": "a sample counts once per epoch",
    "end_to_end_sps": "training, with log and checkpoints",
    "share_of_limit": "end_to_end_sps / env_sps",
} | {name: f"{column.unit}; {column.definition}" for name, column in COLUMNS.items()}
"""Figure -> its explanation, in the order of the table."""


@dataclasses.dataclass(frozen=True)
class Options(FromConfig):
    """Measures the speed of training and of its parts."""

    parts: str = ",".join(PARTS)
    """Parts to measure, separated by commas. A comparison measures the first one."""
    repeats: Annotated[int, Limits(1, 10_000)] = 5
    """Repeats of each part, rounds of a comparison, iterations of a trace."""
    seconds: Annotated[float, Limits(0.001, 86_400.0)] = 3.0
    """Minimum seconds per part and repeat."""
    compare: str | None = None
    """FIELD=V1,V2,... compares values of a config field. `cpu,gpu` compares a GPU with the CPU."""
    trace: Path | None = None
    """Write a jax.profiler trace to this folder instead."""
    json: Path | None = None
    """Also write the JSON object to this file."""


def print_report(result: dict[str, Any]) -> None:
    """Prints the result of `measure` as a table."""
    say(f"\non {result['devices']}")
    say(f"{'':<28}{'median':>11}{'min':>11}{'max':>11}")
    for name in filter(result["figures"].__contains__, NOTES):
        values = [result["figures"][name][key] for key in ("median", "min", "max")]
        cells = "".join(f"{f'{value:,.0f}' if value >= 100 else f'{value:.3g}':>11}" for value in values)
        say(f"{name:<28}{cells}   {NOTES[name]}")
    say(f"peak memory {result['peak_rss_gib']:.2f} GiB; start, with compilation, {result['start_seconds']:.1f} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    start = read_start(arguments)
    options = parse(Options, arguments, "benchmark", Options(full_config=load_config(start.config)))
    config = options.full_config
    parts = options.parts.split(",")
    known = f"some of {Options.parts}, with commas between them"
    require({*parts} <= PARTS.keys(), "--parts", options.parts, known)
    require(not (options.compare and options.trace), "--trace", str(options.trace), "nothing with --compare")
    is_default = options.parts == Options.parts
    if options.compare:
        require(is_default or len(parts) == 1, "--parts", options.parts, "one part with --compare")
    if options.trace:
        require(is_default, "--parts", options.parts, "nothing with --trace, which traces whole iterations")
    if options.json:
        require(not options.json.is_dir(), "--json", str(options.json), "the path of a file")
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--json {options.json}: {error.strerror}; choose another folder") from error
    for line in runtime.configure():
        say(line)
    about = {"seconds": options.seconds, "repeats": options.repeats, **describe(config)}
    load = psutil.getloadavg()[0]
    say(
        f"{config.env.game_name} ({config.env.resolved_protocol}), {config.env.num_envs} envs x"
        f" {config.ppo.rollout_length} steps, {config.ppo.epochs} epochs x {config.num_minibatches} minibatches of"
        f" {config.ppo.minibatch_size}, overlap {config.overlap}\n"
        f"{about['hardware']['cpu']}, {about['hardware']['cores']} cores; GPUs: {about['hardware']['gpus']}\n"
        f"load average {load:.1f}{': other programs compute here, figures may be low' if load > 0.5 else ''}"
    )
    if options.compare:
        sides = make_sides(options.compare, config, parts[0], options.seconds)
        first, *others = sides
        result = {
            "compare": options.compare,
            **compare(sides, [(other, first) for other in others], options.repeats),
        }
    elif options.trace:
        result = {"trace": trace(config, options.trace, options.repeats)}
    else:
        result = measure(config, parts, options.repeats, options.seconds)
        print_report(result)
    say("\n" + json.dumps(result | about, allow_nan=False))
    if options.json and (problem := not_saved(options.json, result | about)):
        raise UserError(f"shown above, and not saved: {problem}")


if __name__ == "__main__":
    cli.run(main)
