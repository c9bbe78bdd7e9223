"""The data-parallel update under `pmap` and under `jit(shard_map)`, in turns, on simulated devices or on real GPUs.

XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/pmap_or_shard_map.py --devices 2
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_atari import devices, learner
from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.devices import DataParallel
from jaxrl_atari.hardware import runtime
from jaxrl_atari.ppo import Shard
from jaxrl_atari.rollout import collect
from jaxrl_atari.session import hyperparameters, prepare


class ShardMap(DataParallel):
    """The same interface on `jit(shard_map)`."""

    def compile(self, function, donate_argnums=()):
        """The function on all devices; each sees its row without the leading axis."""

        def on_rows(*args):
            shard = Shard(lax.axis_index("devices"), len(self), partial(lax.psum, axis_name="devices"))
            out = function(*devices._with_keys(jax.tree.map(lambda x: x[0], args)), shard=shard)
            return jax.tree.map(lambda x: x[None], out)

        spread = PartitionSpec("devices")
        mesh = Mesh(list(self.devices), ("devices",))
        mapped = jax.shard_map(on_rows, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
        return jax.jit(mapped, donate_argnums=tuple(donate_argnums))


def main() -> None:
    """Prints the seconds of an update in each form, and their ratio in each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    runtime.configure()
    config = Config(devices=DevicesConfig(data_parallel=options.devices))
    sides, seconds = {}, {"pmap": [], "shard_map": []}
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        for name, kind in {"pmap": DataParallel, "shard_map": ShardMap}.items():
            learner.DataParallel = kind
            run = exits.enter_context(prepare(config, folder / name, quiet=True))
            sides[name] = run, collect(run.groups, run.learner.acting_params(), jax.random.key(0)).rollouts
        for number in range(options.rounds + 1):
            for name, (run, rollouts) in sides.items():
                start = time.perf_counter()
                metrics = run.learner.update(rollouts, hyperparameters(config, 0), jax.random.key(number))
                jax.block_until_ready(metrics)
                if number:  # the first one compiles
                    seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["pmap"], seconds["shard_map"], strict=True)]
    for name, values in seconds.items():
        print(f"{name:10} {statistics.median(values):.3f} s an update ({min(values):.3f} to {max(values):.3f})")
    print(f"pmap / shard_map {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(json.dumps({"devices": options.devices, "seconds": seconds, "ratios": ratios}))


if __name__ == "__main__":
    main()
