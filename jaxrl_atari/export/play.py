"""Plays Atari with an exported policy.

It needs NumPy and ale-py, but not the package that trained the policy:

    pip install numpy 'ale-py[vector]'
    python play.py [--games N] [--seed N] [--greedy]

`policy.npz`, beside this file, holds the parameters, and the game and its rules as JSON. To use the policy
in a program of your own, see `Policy` and `FrameStack`. README.md describes the frames that it expects.
"""

import argparse
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict

INSTALL = "pip install numpy 'ale-py[vector]'"

if __name__ == "__main__":
    # One observation is too little work for several threads: on a busy machine they wait for each other, and a
    # game takes ten times as long. NumPy reads this when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

try:
    import numpy as np
except ModuleNotFoundError:
    raise SystemExit(f"NumPy is not installed; {INSTALL}") from None

Array = Any
"""An array of NumPy or, while the graph of policy.onnx is made, the name of one."""

Parameters = dict[str, Any]
"""Nested dicts of float32 arrays."""

STACK_SHAPE = (84, 84, 4)
"""Height and width of a frame, and the number of frames in a stack."""


class About(TypedDict):
    """The description in policy.npz: the network, the game and its rules."""

    network: str  # a name of `NETWORKS`
    memory: list[int]  # sizes of the arrays of the network's memory; empty if it is not recurrent
    game: str
    rom: str  # ALE's name of the game
    protocol: str
    actions: list[str]  # names of the game's actions
    sticky_actions: float
    full_action_space: bool
    noop_max: int
    fire_on_reset: bool
    max_frames: int
    env_steps: int  # of the checkpoint
    trained_in: str  # arithmetic, such as bfloat16
    exported_by: str  # name and version of the package


# --- Layers ------------------------------------------------------------------------------------------------------


class Layers(Protocol):
    """The layers that a network may call. An implementation chooses the order of the axes of its images."""

    def pixels(self, stacks: Array) -> Array:
        """Frame stacks, uint8 `[N, 84, 84, 4]`, as images of float32 in [0, 1]."""
        ...

    def conv(self, x: Array, layer: Parameters, stride: int = 1, pad: int = 0) -> Array:
        """A convolution. Images get `pad` zeros on each side; the kernel is `[height, width, in, out]`."""
        ...

    def max_pool(self, x: Array) -> Array:
        """The maximum of 3x3 windows that move by 2, with TensorFlow's `SAME` padding."""
        ...

    def dense(self, x: Array, layer: Parameters) -> Array:
        """`x @ kernel + bias`; a layer may lack the bias."""
        ...

    def relu(self, x: Array) -> Array: ...

    def sigmoid(self, x: Array) -> Array: ...

    def tanh(self, x: Array) -> Array: ...

    def add(self, x: Array, y: Array) -> Array: ...

    def multiply(self, x: Array, y: Array) -> Array: ...

    def flatten(self, x: Array) -> Array:
        """Images as `[N, features]`, in the order height, width, channels."""
        ...

    def forget(self, memory: Array, first: Array) -> Array:
        """A memory `[N, F]` that is zero where a game starts, bool `[N]`."""
        ...

    def scalar(self, x: Array) -> Array:
        """`[N, 1]` -> `[N]`."""
        ...


class NumPyLayers:
    """The `Layers` in NumPy. Images are `[N, height, width, channels]`."""

    def pixels(self, stacks: Array) -> Array:
        return stacks.astype(np.float32) / np.float32(255)

    def conv(self, x: Array, layer: Parameters, stride: int = 1, pad: int = 0) -> Array:
        """The convolution is computed as one product of all windows with the kernel."""
        kernel = layer["kernel"]
        height, width, _, _ = kernel.shape
        x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(x, (height, width), (1, 2))[:, ::stride, ::stride]
        # [N, H, W, in, height, width] -> the order of the kernel
        return np.tensordot(windows, kernel.transpose(2, 0, 1, 3), 3) + layer["bias"]

    def max_pool(self, x: Array) -> Array:
        pads = []
        for size in x.shape[1:3]:
            windows = math.ceil(size / 2)
            total = max(2 * (windows - 1) + 3 - size, 0)
            pads.append((total // 2, total - total // 2))
        x = np.pad(x, ((0, 0), *pads, (0, 0)), constant_values=-np.inf)
        return np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))[:, ::2, ::2].max((-2, -1))

    def dense(self, x: Array, layer: Parameters) -> Array:
        return x @ layer["kernel"] + layer.get("bias", np.float32(0))

    def relu(self, x: Array) -> Array:
        return np.maximum(x, 0)

    def sigmoid(self, x: Array) -> Array:
        return np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x))  # `exp(-x)` would overflow

    def tanh(self, x: Array) -> Array:
        return np.tanh(x)

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def multiply(self, x: Array, y: Array) -> Array:
        return x * y

    def flatten(self, x: Array) -> Array:
        return x.reshape(len(x), -1)

    def forget(self, memory: Array, first: Array) -> Array:
        return np.where(first[:, None], np.float32(0), memory)

    def scalar(self, x: Array) -> Array:
        return x[:, 0]


# --- Networks ----------------------------------------------------------------------------------------------------

Memory = tuple[Array, ...]
"""The memory of a network for N games, each array float32 `[N, F]`; empty if the network is not recurrent."""

Network = Callable[[Layers, Parameters, Array, Array, Memory], tuple[Array, Array, Memory]]
"""(layers, parameters, stacks, first, memory) -> (logits, value, memory).

The stacks are uint8 `[N, 84, 84, 4]`. `first` is bool `[N]`, true where a game starts. Logits are `[N, actions]`,
and the value is `[N]`.
"""


def nature_torso(layers: Layers, params: Parameters, stacks: Array) -> Array:
    """The convolutions of Mnih et al. 2015, and a dense layer."""
    x = layers.pixels(stacks)
    x = layers.relu(layers.conv(x, params["conv1"], stride=4))
    x = layers.relu(layers.conv(x, params["conv2"], stride=2))
    x = layers.relu(layers.conv(x, params["conv3"]))
    return layers.relu(layers.dense(layers.flatten(x), params["dense"]))


def heads(layers: Layers, params: Parameters, x: Array) -> tuple[Array, Array]:
    """Logits and value."""
    return layers.dense(x, params["policy"]), layers.scalar(layers.dense(x, params["value"]))


def nature(
    layers: Layers, params: Parameters, stacks: Array, first: Array, memory: Memory
) -> tuple[Array, Array, Memory]:
    """The network of Mnih et al. 2015 with two heads."""
    return *heads(layers, params, nature_torso(layers, params, stacks)), ()


def impala(
    layers: Layers, params: Parameters, stacks: Array, first: Array, memory: Memory
) -> tuple[Array, Array, Memory]:
    """The residual network of Espeholt et al. 2018: three sections of five convolutions."""
    x = layers.pixels(stacks)
    number = 0
    for _ in range(3):
        x = layers.max_pool(layers.conv(x, params[f"Conv_{number}"], pad=1))
        for _ in range(2):
            residual = layers.conv(layers.relu(x), params[f"Conv_{number + 1}"], pad=1)
            x = layers.add(x, layers.conv(layers.relu(residual), params[f"Conv_{number + 2}"], pad=1))
            number += 2
        number += 1
    x = layers.relu(layers.dense(layers.flatten(layers.relu(x)), params["dense"]))
    return *heads(layers, params, x), ()


def nature_lstm(
    layers: Layers, params: Parameters, stacks: Array, first: Array, memory: Memory
) -> tuple[Array, Array, Memory]:
    """`nature` with an LSTM between its features and its heads. The memory is (cell, output)."""
    x = nature_torso(layers, params, stacks)
    gates = params["lstm"]["cell"]
    cell, hidden = (layers.forget(each, first) for each in memory)

    def gate(name: str) -> Array:
        return layers.add(layers.dense(x, gates[f"i{name}"]), layers.dense(hidden, gates[f"h{name}"]))

    kept = layers.multiply(layers.sigmoid(gate("f")), cell)
    new = layers.multiply(layers.sigmoid(gate("i")), layers.tanh(gate("g")))
    cell = layers.add(kept, new)
    hidden = layers.multiply(layers.sigmoid(gate("o")), layers.tanh(cell))
    return *heads(layers, params, hidden), (cell, hidden)


NETWORKS: dict[str, Network] = {"nature": nature, "impala": impala, "nature_lstm": nature_lstm}


# --- The policy --------------------------------------------------------------------------------------------------


def load(path: str | Path) -> tuple[Parameters, About]:
    """Reads policy.npz: the parameters, as nested dicts of float32 arrays, and its description."""
    params: Parameters = {}
    with np.load(path) as arrays:
        about = json.loads(bytes(arrays["about"]))
        for name in arrays.files:
            *folders, last = name.split("/")
            if folders:
                inner = params
                for folder in folders:
                    inner = inner.setdefault(folder, {})
                inner[last] = arrays[name]
    return params, about


class Policy:
    """A network, its parameters, and its memory of `num_envs` games."""

    def __init__(self, path: str | Path, num_envs: int):
        self.params, self.about = load(path)
        self.network = NETWORKS[self.about["network"]]
        self.memory = tuple(np.zeros((num_envs, size), np.float32) for size in self.about["memory"])

    def outputs(self, stacks: Array, first: Array) -> tuple[Array, Array]:
        """Logits `[N, actions]` and value `[N]` of one step. The memory is kept for the next step."""
        logits, value, self.memory = self.network(NumPyLayers(), self.params, stacks, first, self.memory)
        return logits, value


class FrameStack:
    """The last four frames of each game; a game's first frame fills the stack."""

    def __init__(self, num_envs: int):
        self.stacks = np.zeros((num_envs, *STACK_SHAPE), np.uint8)

    def push(self, frame: Array, first: Array) -> Array:
        """Adds frames uint8 `[N, 84, 84]`, which start games where `first` is true; returns the stacks."""
        self.stacks = np.concatenate([self.stacks[..., 1:], frame[..., None]], axis=-1)
        self.stacks[first] = frame[first][..., None]
        return self.stacks


# --- Games -------------------------------------------------------------------------------------------------------


def make_envs(about: About, num_envs: int) -> Any:
    """The games under the rules that the policy was trained with.

    Raises:
        ModuleNotFoundError: ale-py, or what its extra `vector` needs, is not installed. The message says what to
            do.
    """
    try:
        from ale_py.vector_env import AtariVectorEnv
    except ModuleNotFoundError as error:
        text = f"ale-py[vector] is not installed: the module {error.name} is missing; {INSTALL}"
        raise ModuleNotFoundError(text, name=error.name) from error

    return AtariVectorEnv(
        about["rom"],
        num_envs,
        max_num_frames_per_episode=about["max_frames"],
        repeat_action_probability=about["sticky_actions"],
        full_action_space=about["full_action_space"],
        noop_max=about["noop_max"],
        use_fire_reset=about["fire_on_reset"],
        img_height=STACK_SHAPE[0],
        img_width=STACK_SHAPE[1],
        grayscale=True,
        stack_num=1,
        frameskip=4,
        maxpool=True,
        episodic_life=False,  # all lives are one game
        reward_clipping=False,
    )


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """Different seeds, one for each game, derived from one seed as in training."""
    words = np.random.SeedSequence(seed).generate_state(2 * num_envs) >> 1
    return list(dict.fromkeys(words.tolist()))[:num_envs]


class Step(NamedTuple):
    """A step of N games."""

    actions: Array  # int32 [N], the actions taken
    reward: Array  # [N], raw
    first: Array  # bool [N]: this step started a new game and ignored its action
    ended: Array  # bool [N]: the game ended


def play(policy: Policy, *, seed: int, greedy: bool, num_envs: int = 1) -> Iterator[Step]:
    """Plays game after game."""
    envs = make_envs(policy.about, num_envs)
    random = np.random.default_rng(seed)
    stack = FrameStack(num_envs)
    frame, _ = envs.reset(seed=np.array(env_seeds(seed, num_envs)))
    first = np.ones(num_envs, bool)
    ended = np.zeros(num_envs, bool)
    while True:
        logits, _ = policy.outputs(stack.push(frame[:, 0], first), first)
        # The largest of logits with Gumbel noise is a sample of their distribution.
        noise = np.zeros_like(logits) if greedy else random.gumbel(size=logits.shape)
        actions = np.argmax(logits + noise, axis=-1).astype(np.int32)
        frame, reward, terminated, truncated, _ = envs.step(actions)
        first = ended
        ended = (terminated | truncated) & ~first
        yield Step(actions, reward, first, ended)


def main() -> None:
    """The command: plays games and prints their returns."""
    parser = argparse.ArgumentParser(description="Plays Atari with an exported policy.")
    parser.add_argument("--policy", default=Path(__file__).with_name("policy.npz"), help="the exported parameters")
    parser.add_argument("--games", type=int, default=1, help="full games to play")
    parser.add_argument("--seed", type=int, default=0, help="seed of the games and of sampled actions")
    parser.add_argument(
        "--greedy", action="store_true", help="take the most probable action instead of a sampled one"
    )
    options = parser.parse_args()
    if options.games < 1:
        parser.error(f"--games {options.games}: expected at least 1")
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: expected at least 0")
    if not Path(options.policy).is_file():
        parser.error(f"--policy {options.policy}: there is no such file")
    try:
        policy = Policy(options.policy, 1)
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        parser.error(f"--policy {options.policy}: not an exported policy, or damaged ({error})")
    try:
        play_games(policy, options)
    except ModuleNotFoundError as error:
        parser.exit(2, f"{error}\n")


def play_games(policy: Policy, options: argparse.Namespace) -> None:
    """Plays `options.games` games and prints the return of each, and their mean."""
    about = policy.about
    print(f"{about['game']}, protocol {about['protocol']}, {'greedy' if options.greedy else 'sampled'} actions")
    returns: list[float] = []
    total = 0.0
    length = 0
    for step in play(policy, seed=options.seed, greedy=options.greedy):
        if step.first[0]:
            total = 0.0
            length = 0
            continue
        total += float(step.reward[0])
        length += 1
        if step.ended[0]:
            returns.append(total)
            print(f"game {len(returns)}: return {total:,.1f} after {length:,} steps", flush=True)
        if len(returns) == options.games:
            break
    print(f"mean return of {len(returns)}: {sum(returns) / len(returns):,.1f}")


if __name__ == "__main__":
    main()
