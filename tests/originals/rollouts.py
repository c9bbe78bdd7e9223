"""A fixed rollout with everything that a game can do, in our form and as the originals' environments give it.

Four environments; each loses two lives, and its game ends once: two games are lost, two are cut off. In our form
the step after an end is an auto-reset step. The vector environments of CleanRL and stable-baselines3 reset at
once, so they have no such step: their rollout is one step shorter. EnvPool's has it.
"""

from typing import NamedTuple

import numpy as np
import reference

STEPS = 17
NUM_ENVS = 4
ACTIONS = 4
ENDS = (4, 7, 9, 12)
"""The step of each environment at which its game ends."""

SHAPES = {
    "conv1": (8, 8, 4, 32), "conv2": (4, 4, 32, 64), "conv3": (3, 3, 64, 64),
    "dense": (3136, 512), "policy": (512, ACTIONS), "value": (512, 1),
}  # fmt: skip


class Tape(NamedTuple):
    """What the environment of an original gives: S steps of B environments."""

    observations: np.ndarray  # uint8 [S + 1, B, 4, 84, 84]: before each step, and after the last
    rewards: np.ndarray  # float64 [S, B]
    dones: np.ndarray  # bool [S, B]: a game or a life ended
    cut_off: np.ndarray  # bool [S, B]: the game was cut off
    last_observations: np.ndarray  # uint8 [S, B, 4, 84, 84]: after each step, before any reset
    sample: np.ndarray  # int [S, B]: the sample's index in our form, t * B + b


def games():
    """What the pool of environments gives, in our form: a dict of `Rollout`'s fields, without those of the
    policy."""
    from jaxrl_atari.config import EnvConfig
    from jaxrl_atari.envs import make_pool

    rng = np.random.default_rng(0)
    pool = make_pool(EnvConfig(game="Breakout", protocol="classic"), NUM_ENVS, seed=0)
    pool.reset()
    frames = []
    for _ in range(60 + STEPS + 4):
        step = pool.step(rng.integers(pool.num_actions, size=NUM_ENVS).astype(np.int32))
        frames.append(step.frame)
    pool.close()
    shape = (STEPS, NUM_ENVS)
    terminated, truncated, weight = np.zeros(shape, bool), np.zeros(shape, bool), np.ones(shape)
    age = np.minimum(np.arange(3, STEPS + 4)[:, None], np.full(NUM_ENVS, 3))  # [T + 1, B]
    for b, end in enumerate(ENDS):
        (terminated if b % 2 == 0 else truncated)[end, b] = True
        weight[end + 1, b] = 0.0
        terminated[[end - 3, end + 3], b] = True  # lives
        age[end + 2 :, b] = np.minimum(np.arange(STEPS - 1 - end), 3)
    return {
        "frames": np.stack(frames[60:]),
        "age": age,
        "reward": rng.choice([-1.0, 0.0, 1.0], shape) * weight,
        "terminated": terminated,
        "truncated": truncated,
        "weight": weight,
    }


def stacks(rollout):
    """What each environment saw before each step and after the last: uint8 [T + 1, B, 84, 84, 4]."""
    where = list(np.ndindex(STEPS + 1, NUM_ENVS))
    return reference.stacks_of(rollout, where).reshape(STEPS + 1, NUM_ENVS, 84, 84, 4)


def tape(rollout, auto_reset_steps):
    """The rollout as an original's environment gives it, with the auto-reset steps or without them."""
    seen = np.moveaxis(stacks(rollout), -1, 2)
    ends = rollout["terminated"] | rollout["truncated"]
    columns = []
    for b, end in enumerate(ENDS):
        steps = np.arange(STEPS) if auto_reset_steps else np.delete(np.arange(STEPS), end + 1)
        columns.append(
            (
                seen[[*steps, STEPS], b], rollout["reward"][steps, b], ends[steps, b],
                rollout["truncated"][steps, b],
                seen[steps + 1, b], steps * NUM_ENVS + b,
            )
        )  # fmt: skip
    return Tape(*(np.stack(arrays, axis=1) for arrays in zip(*columns, strict=True)))


def parameters():
    """Parameters of the network as training leaves them, in float64: biases that are not 0, and a policy that
    prefers something."""
    rng = np.random.default_rng(0)
    layers = {}
    for name, shape in SHAPES.items():
        scale = np.sqrt((1 if name in ("policy", "value") else 2) / np.prod(shape[:-1]))
        layers[name] = {
            "kernel": scale * rng.standard_normal(shape),
            "bias": 0.05 * rng.standard_normal(shape[-1]),
        }
    return layers


def to_torch(layers):
    """Our parameters in the order and layout of the originals' `parameters()`: convolutions, dense, actor,
    critic."""
    arrays = []
    for name, layer in layers.items():
        kernel = np.asarray(layer["kernel"])
        if name == "dense":  # we flatten [7, 7, 64], they [64, 7, 7]
            kernel = kernel.reshape(7, 7, 64, -1).transpose(2, 0, 1, 3).reshape(kernel.shape)
        kernel = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        arrays += [np.ascontiguousarray(kernel), np.asarray(layer["bias"])]
    return arrays


def from_torch(arrays):
    """The inverse of `to_torch`."""
    layers = {}
    for name, kernel, bias in zip(SHAPES, arrays[::2], arrays[1::2], strict=True):
        kernel = kernel.transpose(2, 3, 1, 0) if kernel.ndim == 4 else kernel.T
        if name == "dense":
            kernel = kernel.reshape(64, 7, 7, -1).transpose(1, 2, 0, 3).reshape(kernel.shape)
        layers[name] = {"kernel": kernel, "bias": bias}
    return layers
