"""Plays Atari with an exported policy, without the package that trained it.

    pip install numpy onnxruntime 'ale-py[vector]'
    python play.py [--games N] [--seed N] [--greedy]

`policy.onnx`, beside this file, holds the network and, in its metadata, the game and its rules as JSON. To use the
policy in a program of your own, see `Policy` and `FrameStack`. README.md describes the frames that it expects.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

try:
    import numpy as np
    import onnxruntime
    from ale_py.vector_env import AtariVectorEnv
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; pip install numpy onnxruntime 'ale-py[vector]'") from None

STACK_SHAPE = (84, 84, 4)
"""Height and width of a frame, and the number of frames in a stack."""


class Policy:
    """The network of policy.onnx, and its memory of `num_envs` games.

    `about` describes the network, the game and its rules.
    """

    def __init__(self, path: str | Path, num_envs: int):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # one observation is too little work for several threads
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.about: dict[str, Any] = json.loads(self._session.get_modelmeta().custom_metadata_map["about"])
        self._memory = [np.zeros((num_envs, size), np.float32) for size in self.about["memory"]]

    def outputs(self, stacks: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The outputs of one step, whose memory is kept for the next one.

        Args:
            stacks: uint8 `[N, 84, 84, 4]`.
            first: bool `[N]`, true where a game starts.

        Returns:
            Logits `[N, actions]` and value `[N]`.
        """
        inputs = {"stacks": stacks}
        if self._memory:
            inputs |= {"first": first} | {f"memory_{i}": x for i, x in enumerate(self._memory)}
        logits, value, *self._memory = self._session.run(None, inputs)
        return np.asarray(logits), np.asarray(value)


class FrameStack:
    """The last four frames of each game; a game's first frame fills the stack."""

    def __init__(self, num_envs: int):
        self._stacks = np.zeros((num_envs, *STACK_SHAPE), np.uint8)

    def push(self, frame: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Adds frames uint8 `[N, 84, 84]`, which start games where `first` is true; returns the stacks."""
        self._stacks = np.concatenate([self._stacks[..., 1:], frame[..., None]], axis=-1)
        self._stacks[first] = frame[first][..., None]
        return self._stacks


def make_envs(about: dict[str, Any], num_envs: int) -> AtariVectorEnv:
    """The games under the rules that the policy was trained with."""
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

    actions: np.ndarray  # int32 [N], the actions taken
    reward: np.ndarray  # [N], raw
    first: np.ndarray  # bool [N]: this step started a new game and ignored its action
    ended: np.ndarray  # bool [N]: the game ended


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
    """The command: plays games and prints the return of each, and their mean."""
    parser = argparse.ArgumentParser(description="Plays Atari with an exported policy.")
    parser.add_argument("--games", type=int, default=1, help="full games to play")
    parser.add_argument("--seed", type=int, default=0, help="seed of the games and of sampled actions")
    parser.add_argument(
        "--greedy", action="store_true", help="take the most probable action instead of a sampled one"
    )
    options = parser.parse_args()
    if options.games < 1 or options.seed < 0:
        parser.error("expected --games from 1 on, and --seed from 0 on")
    policy = Policy(Path(__file__).with_name("policy.onnx"), 1)
    actions = "greedy" if options.greedy else "sampled"
    print(f"{policy.about['game']}, protocol {policy.about['protocol']}, {actions} actions")
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
