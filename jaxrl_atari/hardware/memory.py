"""How much memory of its device a training needs, and what to lower when there is too little.

The estimate counts what lies on the device while an update runs. On CPU it agrees with XLA's `memory_analysis()` of
the compiled update within 5%; for plain convolutions in bfloat16, which a CPU computes in float32, it is 26% too low.
Compiled for an H100, the update takes 3 to 13% less than estimated (benchmarks/compile_for_gpu.py). Left out are the
workspaces of cuDNN, which it chooses by what is free, and about 0.5 GiB that the CUDA context takes outside of what JAX
manages.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.networks import STACK
from jaxrl_atari.trainer import make_network

FRAME = 84 * 84  # bytes, uint8
ACTIVATIONS = 20 * 20 * 32 + 9 * 9 * 64 + 7 * 7 * 64 + 512  # outputs of the torso's layers, a sample
PER_STEP = 100  # bytes of a step beside its frame: actions, values, advantages, permutations, ...
MAX_ACTIONS = 18


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes on each of the learner's devices."""

    weights: int
    optimizer: int  # Adam's two moments
    gradients: int
    rollout: int
    minibatch: int
    overhead: int  # the rollout that the actors fill, and the copy of the weights by which they act during an update

    @property
    def update(self) -> int:
        """What the compiled update needs: its arguments and its temporaries."""
        return self.weights + self.optimizer + self.gradients + self.rollout + self.minibatch

    @property
    def total(self) -> int:
        """All of it."""
        return self.update + self.overhead


def estimate(config: Config, platform: str, num_actions: int = MAX_ACTIONS) -> Estimate:
    """The memory that a config needs on each learner device ("cpu", "gpu"). Computes nothing on any device.

    `devices.data_parallel = all` is counted as one device.
    """
    devices = 1 if config.devices.data_parallel == "all" else config.devices.data_parallel
    num_envs, samples = config.env.num_envs // devices, config.ppo.minibatch_size // devices
    network = make_network(config, num_actions, platform)
    shapes = jax.eval_shape(lambda: network.init(jax.random.key(0), jnp.zeros((1, 84, 84, STACK), jnp.uint8)))
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    itemsize = jnp.dtype(network.compute_dtype).itemsize

    frames = (config.ppo.rollout_length + STACK) * num_envs * FRAME
    steps = config.ppo.rollout_length * num_envs * PER_STEP
    stacks = STACK * FRAME
    if network.conv == "plain":
        # The stacks as gathered and as numbers; outputs, half as much for their gradients.
        sample = stacks * (1 + itemsize) + round(1.5 * ACTIVATIONS * itemsize)
    else:
        sample = 2 * stacks + round(0.8 * ACTIVATIONS * itemsize)  # gradients lie there for a chunk at a time; measured
    return Estimate(
        weights=weights,
        optimizer=2 * weights,
        gradients=round(2.5 * weights),  # as they come, clipped and scaled; measured
        rollout=frames + steps,
        minibatch=samples * sample,
        overhead=frames + (weights if config.overlap == "update" else 0),
    )


def format_bytes(count: float) -> str:
    """1073741824 -> 1.00 GiB"""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def report(needed: Estimate, limit: int | None = None) -> str:
    """An estimate as text, with the two fields that reduce it most; `limit` is what JAX may take, in bytes."""
    names = {
        "weights": needed.weights,
        "gradients and optimiser": needed.gradients + needed.optimizer,
        "rollout": needed.rollout,
        "minibatch activations": needed.minibatch,
        "overhead (acting)": needed.overhead,
        "total": needed.total,
    }
    lines = ["memory of a learner device, estimated:", *(f"  {n:25}{format_bytes(b):>12}" for n, b in names.items())]
    fields = ["ppo.minibatch_size", "env.num_envs"]
    if needed.rollout + needed.overhead > needed.minibatch:
        fields.reverse()
    lines.append(f"  what reduces it: {fields[0]}, then {fields[1]}")
    if limit is not None:
        verdict = "fits into" if needed.total <= limit else "does not fit into"
        lines.append(f"  {verdict} the {format_bytes(limit)} that JAX may take (devices.memory_fraction)")
    return "\n".join(lines)


@contextlib.contextmanager
def out_of_memory_advice(config: Config) -> Iterator[None]:
    """Turns JAX's error for too little device memory into a `UserError` that says what to lower."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        advice = (
            f"lower ppo.minibatch_size (now {config.ppo.minibatch_size}) or env.num_envs (now {config.env.num_envs})"
        )
        if jax.default_backend() != "cpu":
            fraction = config.devices.memory_fraction or "0.75, as JAX has it"
            advice += f", or raise devices.memory_fraction (now {fraction}) if no other process uses this GPU"
        text = " ".join(str(error).split()).rstrip(".")[:160]
        raise UserError(f"out of device memory ({text}); {advice}, and go on with --resume") from error
