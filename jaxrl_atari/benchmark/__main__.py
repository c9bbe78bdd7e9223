"""Speed of training on this machine, and its share of the limit that the emulator sets.

    python -m jaxrl_atari.benchmark --config configs/qbert.py [--repeats 5] [--seconds 3] [--env.num-envs 64 ...]

times training on the real emulator in its steady state, and its parts (`measure.py` defines each figure). Every figure
is a median with minimum and maximum over the repeats. The last line of the output is a JSON object with all figures,
the machine, the versions and the config. Every field of the config is an option, as in training.

--trace DIR writes a trace of training for xprof, TensorBoard or Perfetto instead (docs/watch.md).

Comparisons run the sides in turns, each in a separate process; a ratio is that of two runs of one round. Use a quiet
machine: whatever else computes is measured too.
"""

import argparse
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import tyro

from jaxrl_atari import cli
from jaxrl_atari.benchmark.comparison import (
    COMPARED,
    NAMED_COMPARISONS,
    Job,
    compare,
    measure_startup,
    option_of,
    parse_range,
    scale,
    summary,
)
from jaxrl_atari.benchmark.measure import RATES, SECTIONS, measure, open_training
from jaxrl_atari.cli.options import load_config
from jaxrl_atari.config import Config
from jaxrl_atari.errors import ConfigError, UserError, parse_path
from jaxrl_atari.hardware import gpus, runtime
from jaxrl_atari.hardware.cpu import read_cpu
from jaxrl_atari.hardware.memory import out_of_memory_advice
from jaxrl_atari.runs.run_dir import describe

PARTS = (*RATES, "startup")
ROWS = (
    ("env_sps", "raw env SPS", "{:,.0f}", "emulators alone, random actions: the limit"),
    ("acting_sps", "acting SPS", "{:,.0f}", "policy and emulators"),
    ("update_samples_per_second", "update samples/s", "{:,.0f}", "a sample counts once per epoch"),
    ("end_to_end_sps", "end-to-end SPS", "{:,.0f}", "training, with log and checkpoints"),
    ("share_of_limit", "share of the limit", "{:.1%}", "end-to-end SPS / raw env SPS"),
    ("gpu_busy_percent", "GPU busy %", "{:.0f}", "while training"),
    ("cpu_percent", "CPU %", "{:.0f}", "while training; 100 is one core"),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_atari.benchmark", description=__doc__, add_help=False, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s --config FILE [options] [config options]",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, help="config file, such as configs/qbert.py")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each part, or pairs of a comparison (5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="minimum seconds per part and repeat (3)")
    parser.add_argument("--parts", help=f"some of {','.join(PARTS)} (all)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--compare", metavar="torch|cpu,gpu|FIELD=V1,V2,...",
        help="against PPO in PyTorch; a CPU against a GPU; values of a field (or a VARIABLE) against each other;"
        " with --parts update the update alone",
    )  # fmt: skip
    instead.add_argument("--scale", metavar="FIELD=N1,N2,...", help="speed and memory against a field, with a graph")
    instead.add_argument(
        "--trace", metavar="DIR", type=partial(parse_path, option="--trace"),
        help="write a jax.profiler trace of --repeats iterations",
    )  # fmt: skip
    return parser


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, tuple[str, ...], Config]:
    """Command line -> the benchmark's own options, the config's options, and the config with them.

    Raises:
        UserError: a value that cannot be used.
        SystemExit: after --help.
    """
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    if {"-h", "--help"} & set(overrides):
        parser.print_help()
        print("\nThe options of the config:\n")
    elif options.config is None:
        raise UserError("--config: one is needed; for example --config configs/qbert.py")
    if options.parts and (options.scale or options.trace):
        raise UserError("--parts: not with --scale or --trace, which have parts of their own; leave it out")
    chosen = options.parts.split(",") if options.parts else ["end_to_end"] if options.compare else PARTS
    options.parts = list(chosen)
    if wrong := [part for part in options.parts if part not in PARTS]:
        raise ConfigError("--parts", wrong[0], f"some of {', '.join(PARTS)}, with commas between them")
    if options.compare and (len(options.parts) > 1 or options.parts[0] not in COMPARED):
        raise ConfigError("--parts", ",".join(options.parts), f"one of {', '.join(COMPARED)} for --compare")
    if options.repeats < 0:
        raise ConfigError("--repeats", options.repeats, "a whole number from 0 on (0: the first update and no more)")
    if options.repeats == 0 and (options.compare or options.scale or options.trace):
        raise ConfigError("--repeats", 0, "at least 1 for --compare, --scale and --trace")
    if not (math.isfinite(options.seconds) and options.seconds > 0):
        raise ConfigError("--seconds", options.seconds, "a number above 0")
    default = load_config(options.config, get_config=Config)[0] if options.config else Config()
    return options, tuple(overrides), _config(default, overrides)


def _config(default: Config, overrides: Sequence[str]) -> Config:
    return tyro.cli(Config, args=overrides, default=default, prog="python -m jaxrl_atari.benchmark")


def report(job: Job, config: Config, parts: Sequence[str], repeats: int) -> dict[str, Any]:
    """Measures the parts, prints them as a table and returns them as JSON values."""
    result: dict[str, Any] = {"figures": {}, "iteration_seconds": {}}
    if "startup" in parts:  # first: afterwards this process may hold the GPU's memory
        result["startup"] = measure_startup(job)
    timed = [part for part in parts if part in RATES]
    if timed:
        with out_of_memory_advice(config):
            result |= measure(config, timed, repeats, job.seconds)
        figures = result["figures"]
        if {"env", "end_to_end"} <= set(timed):
            figures["share_of_limit"] = [
                sps / limit for sps, limit in zip(figures["end_to_end_sps"], figures["env_sps"], strict=True)
            ]
        known = {name: [v for v in values if math.isfinite(v)] for name, values in figures.items()}
        result["figures"] = {name: summary(values) for name, values in known.items() if values}
        result["iteration_seconds"] = {n: summary(values) for n, values in result["iteration_seconds"].items()}
    _print_report(result)
    return result


def trace(config: Config, folder: Path, iterations: int) -> dict[str, Any]:
    """Writes a trace of training, prints its files, and returns them as JSON values."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--trace {folder}: {error.strerror}; choose a folder that can be written to") from error
    with out_of_memory_advice(config), open_training(config) as training:
        training.warm_up()
        result = training.trace(folder, iterations)
    print(f"{iterations} iterations in the steady state, {result['compiled']} programs compiled meanwhile:")
    print("\n".join(result["trace"]))
    return result


def _print_report(result: dict[str, Any]) -> None:
    def line(label: str, numbers: Sequence[str], note: str = "") -> None:
        print(f"{label:<34}" + "".join(f"{number:>11}" for number in numbers) + f"   {note}".rstrip())

    if "process" in result:
        process = result["process"]
        print(f"on {', '.join(process['devices'])} ({process['reason']}); computes in {process['compute_dtype']}\n")
    if result["figures"]:
        line("", ("median", "min", "max"))
    for name, label, form, note in ROWS:
        if name in result["figures"]:
            line(label, [form.format(result["figures"][name][key]) for key in ("median", "min", "max")], note)
    sections = result["iteration_seconds"]
    if sections:
        total = sum(section["median"] for section in sections.values())
        print(f"\n{'one iteration takes':<34}{total * 1000:>8,.0f} ms")
        for name, note in SECTIONS.items():
            milliseconds = [f"{sections[name][key] * 1000:,.1f}" for key in ("median", "min", "max")]
            line(f"  {name:<22}{sections[name]['median'] / total:>7.1%}", milliseconds, note)
    print()
    for name, start in result.get("startup", {}).items():
        hits = f"{start['cache_hits']:.0f} of {start['programs']:.0f} programs from the cache"
        print(
            f"start with a {name} cache: first env step after {start['first_env_step_seconds']:.1f} s, first update"
            f" after {start['first_update_seconds']:.1f} s; compiling {start['compile_seconds']:.1f} s, {hits}"
        )
    if "memory" in result:
        device = result["memory"]["peak_device_gib"]
        on_device = "" if device is None else f"; device {device:.2f} GiB"
        compiled = result["process"]["cache_hits"] < result["process"]["programs"]
        note = " (it compiled programs, which takes memory; less from now on)" if compiled else ""
        print(f"peak memory of training: process {result['memory']['peak_rss_gib']:.2f} GiB{on_device}{note}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options, overrides, config = parse(arguments)
    for usage, text in (("--scale", options.scale), ("--compare", options.compare)):
        if text and text not in NAMED_COMPARISONS:
            field, values = parse_range(text, usage)
            for value in values if not field.isupper() else ():  # all must be possible before the first is measured
                _config(config, option_of(field, value))
    for line in runtime.configure():
        print(line)
    about = {"seconds": options.seconds, "repeats": options.repeats, **describe(config)}
    machine = about["hardware"]
    machine |= {"libraries": gpus.library_versions(), "load_average": psutil.getloadavg()[0]}
    shown_gpus = "not asked for" if machine["gpus"] is None else ", ".join(machine["gpus"]) or "none"
    env, ppo = config.env, config.ppo
    print(
        f"{env.game_name} ({env.resolved_protocol}), {env.num_envs} envs x {ppo.rollout_length} steps, {ppo.epochs}"
        f" epochs x {config.num_minibatches} minibatches of {ppo.minibatch_size}, overlap {config.overlap}\n"
        f"{read_cpu()}\nGPUs: {shown_gpus}; load average {machine['load_average']:.1f}",
        flush=True,
    )
    if machine["load_average"] > 0.5:
        print("warning: other programs are computing on this machine, or were a minute ago: figures may be low")
    print()
    job = Job(options.config, overrides, options.seconds, options.parts[0])
    if options.compare:
        result = {"compare": options.compare, **compare(job, config, options.compare, options.repeats)}
    elif options.scale:
        folder = parse_path(config.output_dir, "output_dir")
        result = {"scale": options.scale, **scale(job, options.scale, options.repeats, folder)}
    elif options.trace:
        result = trace(config, options.trace, options.repeats)
    else:
        result = report(job, config, options.parts, options.repeats)
    print("\n" + json.dumps(result | about, allow_nan=False))


if __name__ == "__main__":
    cli.run(main)
