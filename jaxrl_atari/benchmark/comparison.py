"""Benchmarks in separate processes: start-up, comparisons in turns, and one field over a range of values."""

import contextlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from matplotlib.ticker import NullLocator

from jaxrl_atari.benchmark.measure import RATES
from jaxrl_atari.config import Config, flat
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.cpu import multiplies_bfloat16, usable_cores
from jaxrl_atari.report.drawing import new_figure, open_axes, plain_numbers, save_figure

YARDSTICK = Path(__file__).parents[2] / "benchmarks" / "torch_ppo.py"
YARDSTICK_SPEC = {
    "env.num_envs": 16, "env.backend": "ale", "env.resolved_protocol": "v5", "ppo.rollout_length": 128, "ppo.epochs": 4,
    "ppo.minibatch_size": 256, "ppo.target_kl": None, "network.name": "nature", "overlap": "none",
}  # fmt: skip
"""The config that the yardstick trains; it has no other."""
YARDSTICK_FIGURES = ("peak_rss_gib", "framework", "arithmetic", "compiled", "tried_seconds")
"""Fields of the yardstick's JSON that a comparison keeps beside the rate."""

NAMED_COMPARISONS = ("torch", "cpu,gpu", "gpu,cpu")
COMPARED = {"end_to_end": "end-to-end SPS", "update": "update samples/s"}
"""Parts that can be compared: the heading of their rate in a table."""


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, minimum and maximum of repeats, and all of them."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}


class Job(NamedTuple):
    """A benchmark, as its command line describes it."""

    config_file: Path
    overrides: tuple[str, ...]  # options of the config
    seconds: float
    compared: str = "end_to_end"  # the part whose rate a comparison compares

    def run(
        self,
        parts: str,
        repeats: int,
        overrides: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Runs `benchmark` in a separate process and returns its JSON; later overrides win.

        Raises:
            UserError: it failed; the message is that of the process.
        """
        options = ("--parts", parts, "--repeats", str(repeats), "--seconds", str(self.seconds))
        command = ("jaxrl_atari.benchmark", "--config", str(self.config_file), *options, *self.overrides, *overrides)
        return run_for_json(["-m", *command], environment)


def run_for_json(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs Python with these arguments and returns the JSON object that it prints last.

    Args:
        environment: variables beside those of this process; malloc's are not inherited.

    Raises:
        UserError: it failed.
    """
    # The caller's malloc settings would tune one side and not the other.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    with subprocess.Popen(
        [sys.executable, *arguments], env=inherited | dict(environment or {}),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate()
        except BaseException:
            process.terminate()  # it removes its temporary run
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            raise
    if process.returncode:
        last = (errors.strip() or output.strip() or "no message").splitlines()[-1]
        reason = last.removeprefix("error: ")
        raise UserError(f"{' '.join(arguments[:2])} failed (exit status {process.returncode}): {reason}")
    return json.loads(output.splitlines()[-1])


# --- Start-up --------------------------------------------------------------------------------------------------------


def measure_startup(job: Job) -> dict[str, dict[str, float]]:
    """Two starts of the same training: with an empty cache of compiled programs (`cold`) and again (`warm`).

    Returns:
        For each: seconds from the start of the command to the first env step and to the end of the first update,
        seconds that XLA compiled (or read from the cache), the number of programs, and how many came from the cache.
    """
    starts = {}
    with tempfile.TemporaryDirectory(prefix="jaxrl_atari_cache_") as folder:
        for name in ("cold", "warm"):
            started_at = time.time()
            variables = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            startup = job.run("end_to_end", 0, environment=variables)["process"]
            starts[name] = {
                "first_env_step_seconds": startup["first_env_step_at"] - started_at,
                "first_update_seconds": startup["first_update_at"] - started_at,
                **{key: startup[key] for key in ("compile_seconds", "programs", "cache_hits")},
            }
    return starts


# --- Options of the config -------------------------------------------------------------------------------------------


def option_of(field: str, value: str) -> tuple[str, ...]:
    """`num_envs` or `env.num_envs`, and a value -> `--env.num-envs VALUE`, as the words of a command line.

    An ambiguous short name means the field of env or ppo. A field that is on or off has `--log.graphs` for true and
    `--log.no-graphs` for false.

    Raises:
        UserError: the config has no such field, or several.
    """
    paths, wanted = flat(Config().to_dict()), field.replace("-", "_")
    named = [path for path in paths if wanted in (path, path.rpartition(".")[2])]
    found = [path for path in named if path == wanted or path.startswith(("env.", "ppo."))] or named
    if len(found) != 1:
        near = ", ".join(named or paths)
        raise UserError(f"{field}: expected the name of one field of the config; choose one of {near}")
    group, dot, name = found[0].rpartition(".")
    hint = get_type_hints(get_type_hints(Config)[group] if group else Config)[name]
    prefix, option = f"--{group}{dot}".replace("_", "-"), name.replace("_", "-")
    if hint is bool and value in ("true", "false"):
        return (f"{prefix}{'' if value == 'true' else 'no-'}{option}",)
    return prefix + option, value


def parse_range(text: str, usage: str) -> tuple[str, list[str]]:
    """`FIELD=V1,V2,...` -> field and values.

    Raises:
        UserError: it is of another form.
    """
    field, _, values = text.partition("=")
    chosen = [value.strip() for value in values.split(",")]
    if not field or len(chosen) < 2 or not all(chosen) or len(set(chosen)) < len(chosen):
        raise UserError(f"{usage} {text}: expected FIELD=VALUE,VALUE,... with different values, such as num_envs=8,16")
    return field, chosen


# --- Comparisons -----------------------------------------------------------------------------------------------------


Sides = dict[str, partial[dict[str, Any]]]
"""Name -> a call that runs this side of a comparison and returns its `rate` and further figures as JSON values."""


def _run_training(
    job: Job, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    result = job.run(job.compared, 1, overrides, environment)
    rate = result["figures"][RATES[job.compared]]["median"]
    return {"rate": rate, **result["memory"], "devices": result["process"]["devices"]}


def _run_torch(job: Job, config: Config, mode: str) -> dict[str, Any]:
    iterations = math.ceil(job.seconds * 500 / config.rollout_size)  # it trains at about 500 SPS on two cores
    result = run_for_json([
        str(YARDSTICK), f"--what={job.compared}", f"--mode={mode}", f"--iterations={iterations}",
        f"--game={config.env.game_name}", f"--threads={usable_cores()}",
    ])  # fmt: skip
    return {"rate": result["median"], **{name: result[name] for name in YARDSTICK_FIGURES}}


def _torch_sides(job: Job, config: Config) -> tuple[Sides, list[tuple[str, str]]]:
    """jaxrl_atari and the modes of the yardstick, paired by their arithmetic: that of the config, or both for `auto`.

    `best` is paired with bfloat16 where the CPU multiplies it; elsewhere `auto` leaves bfloat16 out.
    """
    fast = "bfloat16" if multiplies_bfloat16() else "float32"
    modes = {"float32": ["plain", "tuned"], "bfloat16": ["bfloat16"]}
    modes[fast].append("best")
    dtype = config.network.compute_dtype
    compared = dict.fromkeys(("float32", fast)) if dtype == "auto" else (dtype,)
    pairs = [(f"jaxrl_atari {each}", mode) for each in compared for mode in modes[each]]
    on_cpu = ("--devices.gpu", "false")  # as the yardstick
    sides = {
        f"jaxrl_atari {each}": partial(_run_training, job, (*on_cpu, "--network.compute-dtype", each))
        for each in compared
    }
    sides |= {f"torch {mode}": partial(_run_torch, job, config, mode) for _, mode in pairs}
    return sides, [(ours, f"torch {mode}") for ours, mode in pairs]


def _check_yardstick(config: Config) -> None:
    if not YARDSTICK.is_file():
        raise UserError("--compare torch: benchmarks/torch_ppo.py not found; run it from a checkout (pip install -e .)")
    if importlib.util.find_spec("torch") is None:
        raise UserError("--compare torch: PyTorch is not installed; pip install torch")
    for path, value in YARDSTICK_SPEC.items():
        mine = attrgetter(path)(config)
        if mine != value:
            field = path.replace("resolved_", "")
            raise UserError(f"--compare torch: {field} = {mine!r}: expected {value!r}, the yardstick's; leave it out")


def make_sides(job: Job, config: Config, text: str) -> tuple[Sides, list[tuple[str, str]]]:
    """The sides of `--compare TEXT`, and the pairs (a, b) whose ratio a / b is reported.

    Raises:
        UserError: the comparison is not possible on this machine.
    """
    if text == "torch":
        _check_yardstick(config)
        return _torch_sides(job, config)
    if text in NAMED_COMPARISONS:
        if not gpus.visible().gpus:
            raise UserError(f"--compare {text}: no GPU to compare with: {gpus.visible().problem}")
        chosen = {name: ("--devices.gpu", str(name == "gpu").lower()) for name in text.split(",")}
        sides = {name: partial(_run_training, job, options) for name, options in chosen.items()}
    else:
        field, values = parse_range(text, "--compare")
        if field.isupper():  # a variable of the environment
            sides = {f"{field}={value}": partial(_run_training, job, (), {field: value}) for value in values}
        else:
            sides = {f"{field}={value}": partial(_run_training, job, option_of(field, value)) for value in values}
    first, *others = sides
    return sides, [(other, first) for other in others]


def compare(job: Job, config: Config, text: str, repeats: int) -> dict[str, Any]:
    """Runs the sides of a comparison in turns, back and forth, and prints which is faster.

    Returns:
        JSON values: `sides` (name -> summary of its rate, and its runs) and `ratios` ("a / b" -> summary, one ratio
        for each round).
    """
    sides, pairs = make_sides(job, config, text)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(repeats):
        for name in sides if turn % 2 == 0 else reversed(sides):
            result = sides[name]()
            runs[name].append(result)
            chosen = f" ({result['arithmetic']}{', compiled' * result['compiled']})" if "arithmetic" in result else ""
            print(f"round {turn + 1} of {repeats}: {name} {result['rate']:,.0f}{chosen}", flush=True)
    rates = {name: [run["rate"] for run in side_runs] for name, side_runs in runs.items()}
    ratios = {f"{a} / {b}": [x / y for x, y in zip(rates[a], rates[b], strict=True)] for a, b in pairs}

    print(f"\n{COMPARED[job.compared]:<36}{'median':>10}{'min':>10}{'max':>10}{'RSS GiB':>10}")
    for name, values in rates.items():
        rss = statistics.median(run["peak_rss_gib"] for run in runs[name])  # the first one may have compiled
        print(f"{name:<36}{statistics.median(values):>10,.0f}{min(values):>10,.0f}{max(values):>10,.0f}{rss:>10.2f}")
    print()
    for (a, b), values in zip(pairs, ratios.values(), strict=True):
        print(verdict(a, b, values))
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


# --- Scale -----------------------------------------------------------------------------------------------------------


def scale(job: Job, text: str, repeats: int, folder: Path) -> dict[str, Any]:
    """Measures with each value of a field; prints a table and draws a graph.

    Returns:
        JSON values: `field`, `rows` (value -> figures and memory) and `plot`, the PNG file.
    """
    field, values = parse_range(text, "--scale")
    if not all(value.isdecimal() for value in values):
        raise UserError(f"--scale {text}: expected whole numbers")
    columns = ("env_sps", "acting_sps", "end_to_end_sps", "share_of_limit")
    print(f"{field:>16}{'env SPS':>12}{'acting SPS':>12}{'SPS':>10}{'of limit':>10}{'RSS GiB':>10}{'device GiB':>12}")
    rows = {}
    for value in values:
        job.run("end_to_end", 0, option_of(field, value))  # so that the peak memory is not that of the compiler
        result = job.run("end_to_end,env,acting", repeats, option_of(field, value))
        rows[int(value)] = {name: result["figures"][name] for name in columns} | result["memory"]
        env, acting, sps, share = (result["figures"][name]["median"] for name in columns)
        rss, device = (rows[int(value)][name] for name in ("peak_rss_gib", "peak_device_gib"))
        speed = f"{env:>12,.0f}{acting:>12,.0f}{sps:>10,.0f}{share:>10.0%}"
        print(f"{value:>16}{speed}{rss:>10.2f}" + ("-" if device is None else f"{device:.2f}").rjust(12), flush=True)
    path = draw_scale(field, rows, folder)
    print(f"\n{path}")
    option, _ = option_of(field, "1")
    return {"field": option[2:].replace("-", "_"), "rows": rows, "plot": str(path)}


def draw_scale(field: str, rows: Mapping[int, Mapping[str, Any]], folder: Path) -> Path:
    """Draws speed and memory against a field of the config; returns the PNG file."""
    figure = new_figure(f"speed and memory against {field}", 10, 4)
    speed, memory = figure.subplots(1, 2)
    x = sorted(rows)
    for name, label in (("env_sps", "emulator alone"), ("acting_sps", "acting"), ("end_to_end_sps", "training")):
        low, mid, high = ([rows[i][name][key] for i in x] for key in ("min", "median", "max"))
        speed.fill_between(x, low, high, alpha=0.2)
        speed.plot(x, mid, marker="o", label=label)
    for name, label in (("peak_rss_gib", "process"), ("peak_device_gib", "device")):
        if all(rows[i][name] is not None for i in x):
            memory.plot(x, [rows[i][name] for i in x], marker="o", label=label)
    for axes, title in ((speed, "env steps / s"), (memory, "peak memory, GiB")):
        scale: dict[str, Any] = {"value": "log"} if x[0] > 0 else {"value": "symlog", "linthresh": 1}
        axes.set_xscale(**scale, base=2)
        axes.set_xticks(x)
        axes.xaxis.set_minor_locator(NullLocator())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(plain_numbers())
        axes.set_ylim(0, 1.08 * axes.dataLim.ymax)
        axes.set_xlabel(field)
        axes.set_title(title)
        open_axes(axes)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False)
    return save_figure(figure, folder, f"scale_{field.rpartition('.')[2].replace('-', '_')}")[0]
