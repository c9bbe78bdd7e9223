"""The page of a game: one HTML file with its video and, in step with it, the outputs of the network."""

import base64
import html
import json
import math
import string
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxrl_atari.envs import EnvStep
from jaxrl_atari.evaluate.policy import Decision, Policy
from jaxrl_atari.report.evaluations import GAME_TEMPLATE
from jaxrl_atari.runs.files import write_file


class WatchedGame:
    """The outputs of a network and the rewards at each step of a game.

    A game has one more frame than decisions, because nothing is decided at its end.

    Args:
        action_names: names of the actions; empty if they are unknown.
        fps: frames per second of the video, which has one frame for each env step.
    """

    def __init__(self, action_names: Sequence[str], fps: float):
        self.action_names = action_names
        self.fps = fps
        self.rewards: list[float] = []  # for each frame, the raw reward that came with it
        self.values: list[float] = []  # for each decision
        self.probabilities: list[np.ndarray] = []  # for each decision, float32 [A]
        self.chosen: list[int] = []  # for each decision, the index of the action

    def add(self, step: EnvStep, decision: Decision | None) -> None:
        """Adds a step of environment 0, and the decision that led to it; None at the start of the game."""
        self.rewards.append(float(step.reward[0]))
        if decision is None:
            return
        logits, value = jax.device_get((decision.outputs.logits[0], decision.outputs.value[0]))
        weights = np.exp(logits - logits.max())
        self.probabilities.append(weights / weights.sum())
        self.values.append(float(value))
        self.chosen.append(int(decision.actions[0]))


def _rounded(value: float, digits: int) -> float | None:
    """A number for JSON, which has no NaN and no infinities: they are None."""
    return round(value, digits) if math.isfinite(value) else None


def write_game_page(
    path: Path, video: Path, watched: WatchedGame, policy: Policy, *, seed: int, greedy: bool
) -> None:
    """Writes the page of a game.

    Args:
        path: the HTML file.
        video: mp4 file of the game, which the page embeds.
        watched: the outputs and rewards of the game.
        policy, seed, greedy: the policy that played, and how.
    """
    env = policy.config.env
    rewards = np.array(watched.rewards)
    facts = [
        f"return {rewards.sum():,.1f} in {len(rewards) - 1:,} env steps",
        f"protocol {env.resolved_protocol}",
        f"trained for {policy.env_steps:,} env steps",
        "greedy actions" if greedy else "sampled actions",
        f"seed {seed}",
    ]
    data = {
        "fps": watched.fps,
        "actions": list(watched.action_names) or [f"action {i}" for i in range(len(watched.probabilities[0]))],
        "reward": rewards.tolist(),
        "return": np.cumsum(rewards).tolist(),
        "value": [_rounded(value, 3) for value in watched.values],
        "probabilities": [[_rounded(p, 4) for p in each.tolist()] for each in watched.probabilities],
        "action": watched.chosen,
    }
    page = string.Template(GAME_TEMPLATE.read_text(encoding="utf-8")).safe_substitute(
        title=html.escape(env.game_name),
        about=html.escape(", ".join(facts)),
        clipped=" of clipped rewards" if env.rules.clip_rewards else "",
        video=base64.b64encode(video.read_bytes()).decode(),
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )
    write_file(path, page)
