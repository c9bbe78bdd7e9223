"""The command `benchmark`: the speed of training on this machine, and its share of the emulators' speed.

    python -m jaxrl_atari.benchmark --config configs/qbert.py [--repeats 5] [--seconds 3] [--env.num-envs 64 ...]
    python -m jaxrl_atari.benchmark --config configs/qbert.py --compare overlap=none,update
    python -m jaxrl_atari.benchmark --config configs/qbert.py --trace data/trace

The first form times training in its steady state, with the real emulators, and its parts; `measure.py` defines
each figure. The second form compares values of a config field. The sides of the comparison take turns, each in its
own process, and each ratio is that of two runs in one round. Use a quiet machine, because other programs lower the
figures. The last line of output is a JSON object with all figures, the machine, the versions and the config.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import tyro

from jaxrl_atari import cli
from jaxrl_atari.benchmark.comparison import compare, make_sides
from jaxrl_atari.benchmark.measure import PARTS, measure, trace
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromConfig, parse, read_sources
from jaxrl_atari.config import Config, PositiveFloat, PositiveInt
from jaxrl_atari.errors import require
from jaxrl_atari.hardware.settings import tune_process
from jaxrl_atari.output import say
from jaxrl_atari.runs.columns import MACHINE_COLUMNS, unit_of
from jaxrl_atari.runs.description import describe

FIGURE_NOTES = {
    "env_sps": "emulators alone, random actions: the limit",
    "acting_sps": "policy and emulators",
    "update_samples_per_second": "of gradient steps; a sample counts once per epoch",
    "end_to_end_sps": "training, with log and checkpoints",
    "share_of_limit": "end_to_end_sps / env_sps",
}
"""Figure -> its explanation, in the order of the table. The `MACHINE_COLUMNS` follow."""

ALL_PARTS = ",".join(PARTS)


@dataclasses.dataclass(frozen=True)
class Options(FromConfig):
    """Measures the speed of training and of its parts."""

    parts: str = ALL_PARTS
    """Parts to measure, separated by commas. With --compare, one part (default: end_to_end)."""
    repeats: PositiveInt = 5
    """Repeats of each part, rounds of a comparison, iterations of a trace."""
    seconds: PositiveFloat = 3.0
    """Minimum seconds per part and repeat."""
    comparison: Annotated[str | None, tyro.conf.arg(name="compare")] = None
    """FIELD=V1,V2,... compares values of a config field. `cpu,gpu` compares a GPU with the CPU."""
    trace_dir: Annotated[Path | None, tyro.conf.arg(name="trace")] = None
    """Write a jax.profiler trace to this folder instead."""


def _print_what_is_measured(config: Config, hardware: Mapping[str, Any]) -> None:
    """Prints the sizes of a rollout and an update, the machine, and whether other programs compute there.

    Args:
        hardware: as `description.describe` returns it.
    """
    load = psutil.getloadavg()[0]
    say(
        f"{config.env.game_name} ({config.env.resolved_protocol}), {config.env.num_envs} envs x"
        f" {config.ppo.rollout_length} steps, {config.ppo.epochs} epochs x {config.num_minibatches} minibatches of"
        f" {config.ppo.minibatch_size}, overlap {config.overlap}\n"
        f"{hardware['cpu']}, {hardware['cores']} cores; GPUs: {hardware['gpus']}\n"
        f"load average {load:.1f}{': other programs compute here, figures may be low' if load > 0.5 else ''}"
    )


def _print_report(result: Mapping[str, Any]) -> None:
    """Prints the result of `measure` as a table."""
    say(f"\non {result['devices']}")
    say(f"{'':<28}{'median':>11}{'min':>11}{'max':>11}")
    notes = FIGURE_NOTES | {name: unit_of(name) for name in MACHINE_COLUMNS}
    for name, note in notes.items():
        if name in result["figures"]:
            figure = result["figures"][name]
            cells = "".join(f"{_figure_text(figure[key]):>11}" for key in ("median", "min", "max"))
            say(f"{name:<28}{cells}   {note}")
    memory = f"peak memory until the first repeat {result['start_peak_rss_gib']:.2f} GiB"
    say(f"{memory}; start, with compilation, {result['start_seconds']:.1f} s")


def _figure_text(value: float) -> str:
    """A figure with three digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, compares or traces training, and prints the result, at last as JSON."""
    sources = read_sources(arguments)
    options = parse(Options, arguments, "benchmark", Options(config=load_config(sources.config_file)))
    config = options.config
    parts = options.parts.split(",")
    require(not config.devices.distributed, "devices.distributed", True, "false: one process is measured")
    expected = f"some of {ALL_PARTS}, with commas between them"
    require({*parts} <= PARTS.keys(), "--parts", options.parts, expected)
    if options.comparison and options.parts != ALL_PARTS:
        require(len(parts) == 1, "--parts", options.parts, "one part with --compare")
    say(tune_process())
    description = {"seconds": options.seconds, "repeats": options.repeats, **describe(config)}
    _print_what_is_measured(config, description["hardware"])
    if options.comparison:
        sides = make_sides(options.comparison, config, parts[0], options.seconds)
        first, *others = sides
        compared = compare(sides, [(other, first) for other in others], options.repeats)
        result = {"compare": options.comparison, **compared}
    elif options.trace_dir:
        result = {"trace": trace(config, options.trace_dir, options.repeats)}
    else:
        result = measure(config, parts, repeats=options.repeats, seconds=options.seconds)
        _print_report(result)
    say("\n" + json.dumps(result | description, allow_nan=False))


if __name__ == "__main__":
    cli.run(main)
