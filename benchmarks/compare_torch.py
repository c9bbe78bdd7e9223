"""jaxrl_atari beside PyTorch on this CPU, in turns.

    python benchmarks/compare_torch.py [--part update] [--repeats 3] [--seconds 9]

Each mode of the yardstick (torch_ppo.py, which needs torch) is paired with the same arithmetic here: `plain` and
`tuned` with float32, `bfloat16` with bfloat16, and `best` with bfloat16 where the CPU multiplies it, else with
float32. The last line of the output is JSON.
"""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from jaxrl_atari import cli
from jaxrl_atari.benchmark.comparison import SideRun, compare, run_json, run_side
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig
from jaxrl_atari.hardware.cpu import read_cpu, usable_cores

Dtype = Literal["float32", "bfloat16"]
YARDSTICK = Path(__file__).with_name("torch_ppo.py")


def run_torch(mode: str, part: str, seconds: float, game: str) -> SideRun:
    """One run of the yardstick."""
    iterations = math.ceil(seconds * 500 / 2048)  # it trains at about 500 SPS on two cores
    options = {"mode": mode, "what": part, "iterations": iterations, "game": game, "threads": usable_cores()}
    found = run_json([YARDSTICK, *(f"--{name}={value}" for name, value in options.items())])
    return {"rate": found["median"], "rss_gib": found["peak_rss_gib"], **found}


def main(
    part: Literal["end_to_end", "update"] = "end_to_end",
    repeats: int = 3,
    seconds: float = 9.0,
    game: str = "Qbert",
    dtype: Dtype | None = None,
) -> None:
    """Compares jaxrl_atari with PPO in PyTorch on this CPU."""
    fast: Dtype = "bfloat16" if "BF16" in read_cpu().instruction_sets else "float32"
    modes: dict[Dtype, list[str]] = {"float32": ["plain", "tuned"], "bfloat16": ["bfloat16"]}
    modes[fast].append("best")
    config = Config(env=EnvConfig(game=game), devices=DevicesConfig(gpu=False))
    sides, pairs = {}, []
    chosen: list[Dtype] = ["float32", "bfloat16"] if fast == "bfloat16" else ["float32"]
    if dtype is not None:
        chosen = [dtype]
    for each in chosen:
        ours = f"jaxrl_atari {each}"
        own = replace(config, network=NetworkConfig(compute_dtype=each))
        sides[ours] = partial(run_side, own, part, seconds)
        for mode in modes[each]:
            sides[f"torch {mode}"] = partial(run_torch, mode, part, seconds, game)
            pairs.append((ours, f"torch {mode}"))
    print(json.dumps(compare(sides, pairs, repeats)))


if __name__ == "__main__":
    cli.run(lambda: tyro.cli(main))
