"""Estimate of the device memory that training needs, and advice when it runs out.

The estimate counts the arrays on the device during an update. On a CPU it agrees with XLA's `memory_analysis()` of the
compiled update within 5% in float32 and 10% in bfloat16; for plain convolutions in bfloat16, which a CPU computes in
float32, it is 26% too low. Compiled for an H100, the update takes 3 to 10% less than estimated
(benchmarks/compile_for_gpu.py). The estimate leaves out the workspaces of cuDNN, which depend on the free memory, and
what JAX does not manage: 0.6 to 0.8 GiB for the CUDA context and the handles of cuDNN and cuBLAS.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.config import Config, NetworkConfig
from jaxrl_atari.envs.pool import FRAME_SIZE
from jaxrl_atari.errors import UserError
from jaxrl_atari.fast import cpu_conv
from jaxrl_atari.fast.forms import compute_dtype, uses_cpu_conv
from jaxrl_atari.networks import STACK, make_module

FRAME = FRAME_SIZE**2  # bytes, uint8
CHUNK_SAMPLE = 140_000  # values of a sample while `cpu_conv` works on its chunk
PER_STEP = 100  # bytes of a step besides its frame: actions, values, advantages, permutations, ...
MAX_ACTIONS = 18


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes on each of the learner's devices."""

    weights: int
    optimizer: int  # Adam's two moments
    gradients: int
    rollout: int
    minibatch: int
    overhead: int  # the rollout being filled, and with overlap the copy of the weights that acts during an update

    @property
    def update(self) -> int:
        """Memory of the compiled update: its arguments and temporaries."""
        return self.weights + self.optimizer + self.gradients + self.rollout + self.minibatch

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.update + self.overhead


def estimate(config: Config, platform: str, num_actions: int = MAX_ACTIONS, actor: str | None = None) -> Estimate:
    """The memory that a config needs on each learner device. Computes nothing on any device.

    `devices.data_parallel = all` is counted as one device.

    Args:
        platform, actor: `network_platform` of the learner's and the actor's devices; None: the same.
    """
    devices = 1 if config.devices.data_parallel == "all" else config.devices.data_parallel
    num_envs, samples = config.env.num_envs // devices, config.ppo.minibatch_size // devices
    dtype = compute_dtype(config.network, platform, actor)
    parameters, activations = _network_size(config.network, num_actions)
    weights = 4 * parameters

    frames = (config.ppo.rollout_length + STACK) * num_envs * FRAME
    steps = config.ppo.rollout_length * num_envs * PER_STEP
    stacks = STACK * FRAME
    if uses_cpu_conv(config.network, platform, actor):
        # Patches and the gradients of the layers exist for one chunk at a time; without a loop, XLA frees some of them
        # late. All factors are measured.
        sample = 2 * stacks + round(0.8 * activations * dtype.itemsize)
        size = cpu_conv.chunk_size(platform, dtype)
        count = -(-samples // size)
        kept_chunks = 1 + 0.64 * (count - 1 if count <= cpu_conv.UNROLLED else 0)
        chunk = round(kept_chunks * min(samples, size) * CHUNK_SAMPLE * dtype.itemsize)
        gradient_copies = 1.1
    else:
        # The stacks as gathered and as numbers; the outputs, and what backpropagation keeps besides. Measured: half as
        # much for nature, 2.5 times as much for impala with its poolings and residual sums, the guess for any other.
        kept = 1.5 if config.network.name == "nature" else 3.5
        sample = stacks * (1 + dtype.itemsize) + round(kept * activations * dtype.itemsize)
        chunk, gradient_copies = 0, 2.5
    return Estimate(
        weights=weights,
        optimizer=2 * weights,
        gradients=round(gradient_copies * weights),  # raw, and clipped or scaled; measured
        rollout=frames + steps,
        minibatch=samples * sample + chunk,
        overhead=frames + (weights if config.overlap == "update" else 0),
    )


def _network_size(config: NetworkConfig, num_actions: int) -> tuple[int, int]:
    """Parameters of a network, and outputs of its convolutions and dense layers for one sample."""
    module = make_module(config, num_actions, jnp.float32)
    stacks = jnp.zeros((1, FRAME_SIZE, FRAME_SIZE, STACK), jnp.uint8)

    def init() -> Any:
        def is_layer(module: nn.Module, _: str) -> bool:
            return isinstance(module, nn.Conv | nn.Dense)

        return module.init_with_output(jax.random.key(0), stacks, mutable=True, capture_intermediates=is_layer)[1]

    variables = jax.eval_shape(init)
    parameters, activations = (jax.tree.leaves(variables[name]) for name in ("params", "intermediates"))
    return sum(x.size for x in parameters), sum(x.size for x in activations)


def format_bytes(count: float) -> str:
    """1073741824 -> 1.00 GiB"""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def report(needed: Estimate, limit: int | None = None) -> str:
    """An estimate as text, with the two fields that reduce it most. `limit`: the bytes that JAX may take."""
    names = {
        "weights": needed.weights,
        "gradients and optimiser": needed.gradients + needed.optimizer,
        "rollout": needed.rollout,
        "minibatch activations": needed.minibatch,
        "overhead (acting)": needed.overhead,
        "total": needed.total,
    }
    lines = ["estimated memory of a learner device:", *(f"  {n:25}{format_bytes(b):>12}" for n, b in names.items())]
    fields = ["ppo.minibatch_size", "env.num_envs"]
    if needed.rollout + needed.overhead > needed.minibatch:
        fields.reverse()
    lines.append(f"  what reduces it: {fields[0]}, then {fields[1]}")
    if limit is not None:
        verdict = "fits into" if needed.total <= limit else "does not fit into"
        lines.append(f"  {verdict} the {format_bytes(limit)} that JAX may take (devices.memory_fraction)")
    return "\n".join(lines)


# What XLA reports when the pool of JAX, another process, or a library has left no memory.
NO_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|OUT_OF_MEMORY|out of memory|(failed|could not|couldn't) \w* ?create \w+ handle"
    r"|CUDNN_STATUS_(NOT_INITIALIZED|ALLOC_FAILED|INTERNAL_ERROR)|CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)"
    r"|DNN library initialization failed",
    re.IGNORECASE,
)


def is_out_of_memory(message: str) -> bool:
    """Whether an error message of JAX means that a device had too little memory."""
    return NO_MEMORY.search(message) is not None


@contextlib.contextmanager
def out_of_memory_advice(config: Config) -> Iterator[None]:
    """Turns JAX's out-of-memory error into a `UserError` that names the fields to lower."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(str(error)):
            raise
        advice = (
            f"lower ppo.minibatch_size (now {config.ppo.minibatch_size}) or env.num_envs (now {config.env.num_envs})"
        )
        if jax.default_backend() != "cpu":
            fraction = config.devices.memory_fraction or "0.75, JAX's default"
            advice += f", or raise devices.memory_fraction (now {fraction}) if no other process uses this GPU"
            if "RESOURCE_EXHAUSTED" not in str(error):  # a handle or context, beside the memory that JAX reserves
                advice += ", or lower it or trial.parallel if others do"
        text = " ".join(str(error).split()).rstrip(".")[:160]
        raise UserError(f"out of device memory ({text}); {advice} (--resume continues a run)") from error
