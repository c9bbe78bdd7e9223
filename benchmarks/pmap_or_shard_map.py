"""The data parallel update under `pmap` and under `jit(shard_map)`, by turns, on simulated devices or on real GPUs.

XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/pmap_or_shard_map.py --devices 2
"""

import argparse
import json
import statistics
import time

import jax
from jax.sharding import Mesh, PartitionSpec

import jaxrl_atari.trainer as trainer_module
from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.devices import DataParallel, place
from jaxrl_atari.hardware import runtime


class ShardMap(DataParallel):
    """The same interface on `jit(shard_map)`."""

    def compile(self, function, donate_argnums=()):
        """The function on all devices; each sees its row without the leading axis."""

        def on_rows(*args):
            out = function(*jax.tree.map(lambda x: x[0], args))
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
    sides = {}
    for name, kind in {"pmap": DataParallel, "shard_map": ShardMap}.items():
        trainer_module.DataParallel = kind
        trainer = trainer_module.Trainer(config, 0, place(config.devices))
        rollouts = trainer.collect(jax.random.key(0))
        sides[name] = (trainer, rollouts)
    seconds = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        for name, (trainer, rollouts) in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(trainer.learner.update(rollouts, trainer.hyperparameters(), jax.random.key(number)))
            if number:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
    for trainer, _ in sides.values():
        trainer.close()
    ratios = [a / b for a, b in zip(seconds["pmap"], seconds["shard_map"], strict=True)]
    for name, values in seconds.items():
        print(f"{name:10} {statistics.median(values):.3f} s an update ({min(values):.3f} to {max(values):.3f})")
    print(f"pmap / shard_map {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(json.dumps({"devices": options.devices, "seconds": seconds, "ratios": ratios}))


if __name__ == "__main__":
    main()
