"""The page of a game: one HTML file with its video and, moving with it, what the network computed at each step."""

import base64
import html
import json
import string
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.networks import Outputs
from jaxrl_atari.runs.files import write_file

TEMPLATE = Path(__file__).with_name("game.html")


class WatchedGame:
    """What a network computed at each step of a game, and what came of it.

    The game has one more frame than decisions: nothing is decided at its end.

    Args:
        action_names: empty where they are not known.
        fps: frames of the video per second, one for each env step.
    """

    def __init__(self, action_names: Sequence[str], fps: float):
        self.action_names = action_names
        self.fps = fps
        self.rewards: list[float] = []  # raw reward with which each frame came
        self.values: list[float] = []  # at each decision
        self.probabilities: list[np.ndarray] = []  # float32 [A] at each decision
        self.chosen: list[int] = []  # index of the action taken at each decision

    def decided(self, actions: np.ndarray, outputs: Outputs) -> None:
        """Adds the decision of environment 0."""
        logits, value = jax.device_get((outputs.logits[0], outputs.value[0]))
        odds = np.exp(logits - logits.max())
        self.probabilities.append(odds / odds.sum())
        self.values.append(float(value))
        self.chosen.append(int(actions[0]))


def write_game_page(path: Path, video: Path, record: WatchedGame, policy: Policy, seed: int, greedy: bool) -> None:
    """Writes the page of a game.

    Args:
        video: its mp4 file, which the page contains.
        policy: that played; `seed` and `greedy`: how.
    """
    env = policy.config.env
    rewards = np.array(record.rewards)
    facts = [
        f"return {rewards.sum():,.1f} in {len(rewards) - 1:,} env steps",
        f"protocol {env.resolved_protocol}",
        f"trained for {policy.env_steps:,} env steps",
        "greedy actions" if greedy else "sampled actions",
        f"seed {seed}",
    ]
    data = {
        "fps": record.fps,
        "actions": list(record.action_names) or [f"action {i}" for i in range(len(record.probabilities[0]))],
        "reward": rewards.tolist(),
        "return": np.cumsum(rewards).tolist(),
        "value": [round(value, 3) for value in record.values],
        "probabilities": [[round(odds, 4) for odds in each.tolist()] for each in record.probabilities],
        "action": record.chosen,
    }
    page = string.Template(TEMPLATE.read_text(encoding="utf-8")).safe_substitute(
        title=html.escape(env.game_name),
        about=html.escape(", ".join(facts)),
        clipped=" of clipped rewards" if env.rules.clip_rewards else "",
        video=base64.b64encode(video.read_bytes()).decode(),
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )
    write_file(path, page)
