"""Compiles training for an H100 on a machine without one: kernels launched, and memory taken.

    pip install -e '.[cuda12]'
    python benchmarks/compile_for_gpu.py --config configs/qbert.py [--env.num-envs 128 ...]

To compile for a GPU, XLA needs only its description. Nothing runs, so nothing is timed, and the workspaces of cuDNN,
which it chooses by trying, are left out.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

# Before JAX is imported. Without a GPU there is nothing to try, and no driver for the plugin to ask.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import jax.numpy as jnp
from jax._src import xla_bridge
from jax.experimental import topologies

from jaxrl_atari import ppo, rollout
from jaxrl_atari.envs import make_pool
from jaxrl_atari.fast.forms import Network, make_network
from jaxrl_atari.hardware.memory import estimate, format_bytes
from jaxrl_atari.networks import init_params
from jaxrl_atari.train import parse

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84929347584
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

KERNELS = ("fusion", "custom-call", "copy", "dot", "convolution", "sort", "scatter", "reduce", "transpose")


def h100() -> jax.Device:
    """A device to compile for."""
    canonical = xla_bridge.canonicalize_platform
    # JAX asks its GPU back end for its name, which without a GPU has not started (jax issue 28376).
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name in ("gpu", "cuda") else canonical(name)
    return topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[0]


def compile_for(device: jax.Device, function: Callable, arguments: Any, donate: int) -> Any:
    """The function compiled for `device`, with arguments of these shapes."""
    place = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    traced = jax.jit(function, donate_argnums=donate).trace(*placed)
    return traced.lower(lowering_platforms=("cuda",)).compile()


def count_kernels(hlo: str) -> int:
    """Kernels that a compiled program launches; those of a loop's body count once per iteration."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if start := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = computations["ENTRY" if start[1] else start[2]] = []
        else:
            lines.append(line)

    def count(name: str) -> int:
        total = 0
        for line in computations[name]:
            if loop := re.search(r' while\(.* body=%?([\w.\-]+).*"known_trip_count":\{"n":"(\d+)"', line):
                total += int(loop[2]) * count(loop[1])
            total += any(f" {kind}(" in line for kind in KERNELS)
        return total

    return count("ENTRY")


def rollout_shapes(network: Network, length: int, num_envs: int) -> ppo.Rollout:
    """The shapes of a rollout's arrays."""
    state = jax.eval_shape(lambda: rollout.empty_state(length, num_envs, network.layout.shape))
    number, mark = (jax.ShapeDtypeStruct((length, num_envs), dtype) for dtype in (jnp.float32, jnp.bool_))
    outcome = rollout.Outcome(reward=number, terminated=mark, truncated=mark, weight=number)
    return jax.eval_shape(rollout.finish_rollout, [(state, outcome)])


def main() -> None:
    """Prints a line for the update and one for a step of the policy; the last line is JSON."""
    config, _ = parse(sys.argv[1:])
    pool = make_pool("ale", config.env.game_name, 1, seed=0, num_threads=1, rules=config.env.rules)
    network, device = make_network(config.network, pool.num_actions, "gpu"), h100()
    length, size = config.ppo.rollout_length, config.env.num_envs // rollout.num_groups(config.env, 1, "gpu")
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(
        lambda key: ppo.init_train_state(init_params(config.network, pool.num_actions, key), config.ppo), key
    )
    hyper = ppo.Hyperparameters(*[jax.ShapeDtypeStruct((), jnp.float32)] * len(ppo.Hyperparameters._fields))
    params = jax.eval_shape(network.acting_params, state.params)
    acting = jax.eval_shape(lambda: rollout.empty_state(length, size, network.layout.shape))
    frame, first = jax.ShapeDtypeStruct((size, 84, 84), jnp.uint8), jax.ShapeDtypeStruct((size,), jnp.bool_)
    programs = {
        "update": (partial(ppo.update, apply=network.apply, config=config.ppo),
                   (state, rollout_shapes(network, length, config.env.num_envs), hyper, key), 0),
        "step of the policy": (partial(rollout.act, network), (params, acting, frame, first), 1),
    }  # fmt: skip
    figures = {}
    for name, (function, arguments, donate) in programs.items():
        compiled = compile_for(device, function, arguments, donate)
        memory = compiled.memory_analysis()
        figures[name] = {
            "kernels": count_kernels(compiled.as_text()),
            "bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        }
        print(f"{name:20} {figures[name]['kernels']:6,} kernels  {format_bytes(figures[name]['bytes']):>10}")
    figures["estimated_bytes"] = estimate(config, "gpu", pool.num_actions).update
    print(f"{'update, estimated':20} {'':14}  {format_bytes(figures['estimated_bytes']):>10}")
    print(json.dumps({"device": device.device_kind, **figures}))


if __name__ == "__main__":
    main()
