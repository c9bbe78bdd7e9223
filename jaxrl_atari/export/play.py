"""Plays Atari with an exported policy, without the package that trained it.

    pip install numpy onnxruntime 'ale-py[vector]'
    python play.py [--games N] [--seed N] [--greedy]

`policy.onnx`, beside this file, holds the network and, in its metadata, the game and its rules as JSON. To use the
policy in a program of your own, see `Policy` and `play`. README.md describes the frames that it expects.
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

STACK = 4
"""Frames that the policy sees at a time."""

FRAME_SIZE = 84
"""Height and width of a frame."""


class Policy:
    """The network of policy.onnx, and its memory of one game.

    `about` describes the network, the game and its rules.
    """

    def __init__(self, path: str | Path):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # one observation is too little work for several threads
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.about: dict[str, Any] = json.loads(self._session.get_modelmeta().custom_metadata_map["about"])
        self._memory = [np.zeros((1, size), np.float32) for size in self.about["memory"]]

    def outputs(self, stack: np.ndarray, first: bool) -> tuple[np.ndarray, float]:
        """The outputs of one step, whose memory is kept for the next one.

        Args:
            stack: uint8 `[84, 84, 4]`.
            first: a game starts here.

        Returns:
            Logits `[actions]` and value.
        """
        inputs = {"stacks": stack[None]}
        if self._memory:
            inputs |= {"first": np.array([first])} | {f"memory_{i}": x for i, x in enumerate(self._memory)}
        logits, value, *self._memory = self._session.run(None, inputs)
        return np.asarray(logits)[0], float(np.asarray(value)[0])


def make_env(about: dict[str, Any]) -> AtariVectorEnv:
    """The game under the rules that the policy was trained with."""
    return AtariVectorEnv(
        about["rom"],
        num_envs=1,
        max_num_frames_per_episode=about["max_frames"],
        repeat_action_probability=about["sticky_actions"],
        full_action_space=about["full_action_space"],
        noop_max=about["noop_max"],
        use_fire_reset=about["fire_on_reset"],
        img_height=FRAME_SIZE,
        img_width=FRAME_SIZE,
        grayscale=True,
        stack_num=1,
        frameskip=4,
        maxpool=True,
        episodic_life=False,  # all lives are one game
        reward_clipping=False,
    )


class Step(NamedTuple):
    """A step of a game."""

    action: int  # the action taken
    reward: float  # raw
    first: bool  # this step started a new game and ignored its action
    ended: bool  # the game ended


def play(policy: Policy, *, seed: int, greedy: bool) -> Iterator[Step]:
    """Plays game after game."""
    env = make_env(policy.about)
    random = np.random.default_rng(seed)
    env_seed = np.random.SeedSequence(seed).generate_state(1) >> 1  # of environment 0 in training
    frame, _ = env.reset(seed=env_seed)
    stack = np.zeros((FRAME_SIZE, FRAME_SIZE, STACK), np.uint8)
    first = True
    ended = False
    while True:
        newest = frame[0, 0, :, :, None]
        stack = np.concatenate([stack[..., 1:], newest], axis=-1)
        if first:  # a game's first frame fills the stack
            stack[:] = newest
        logits, _ = policy.outputs(stack, first)
        # The largest of logits with Gumbel noise is a sample of their distribution.
        noise = np.zeros_like(logits) if greedy else random.gumbel(size=logits.shape)
        action = int(np.argmax(logits + noise))
        frame, reward, terminated, truncated, _ = env.step(np.array([action], np.int32))
        first = ended
        ended = bool(terminated[0] or truncated[0]) and not first
        yield Step(action, float(reward[0]), first, ended)


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
    policy = Policy(Path(__file__).with_name("policy.onnx"))
    actions = "greedy" if options.greedy else "sampled"
    print(f"{policy.about['game']}, protocol {policy.about['protocol']}, {actions} actions")
    returns: list[float] = []
    total = 0.0
    length = 0
    for step in play(policy, seed=options.seed, greedy=options.greedy):
        if step.first:
            total = 0.0
            length = 0
            continue
        total += step.reward
        length += 1
        if step.ended:
            returns.append(total)
            print(f"game {len(returns)}: return {total:,.1f} after {length:,} steps", flush=True)
        if len(returns) == options.games:
            break
    print(f"mean return of {len(returns)}: {sum(returns) / len(returns):,.1f}")


if __name__ == "__main__":
    main()
