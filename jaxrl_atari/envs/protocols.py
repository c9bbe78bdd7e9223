"""Protocols: named sets of rules by which games are played and learned.

- `v5`: ALE v5 with the life-loss signal of the published PPO-Atari runs.
- `classic`: the NoFrameskip-v4 convention: `v5` without sticky actions.
- `machado`: the recommendation of Machado et al. 2018 (arXiv:1709.06009, section 5): sticky actions, all 18
  actions, the end of a game as the only terminal, no no-ops, no FIRE, 18,000 frames (5 minutes) a game. Dopamine
  (arXiv:1812.06110) differs from it in two rules: `max_frames=108_000` and the minimal action set.
- `gymnasium`: a Gymnasium environment as it is registered. Every environment that is not an ALE game has this
  protocol. It cannot be chosen.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args


class Rules(NamedTuple):
    """The rules of a protocol; each is an option of the same name in `EnvConfig`."""

    sticky_actions: float = 0.25  # probability that a frame repeats the action of the frame before
    full_action_space: bool = False  # all 18 actions instead of the game's minimal set
    life_loss_terminal: bool = True  # a lost life is a terminal for learning, while the game continues
    noop_max: int = 30  # limit of the random number of no-ops that start a game
    fire_on_reset: bool = True  # press FIRE at the start of a game, if it is in the action set
    max_frames: int = 108_000  # emulator frames after which a game is truncated; 0, with `gymnasium`: no limit
    clip_rewards: bool = True  # rewards for learning are clipped to [-1, 1]


PROTOCOLS = {
    "v5": Rules(),
    "classic": Rules(sticky_actions=0.0),
    "machado": Rules(
        full_action_space=True, life_loss_terminal=False, noop_max=0, fire_on_reset=False, max_frames=18_000
    ),
    "gymnasium": Rules(  # only `clip_rewards` can be chosen
        sticky_actions=0.0,
        life_loss_terminal=False,
        noop_max=0,
        fire_on_reset=False,
        max_frames=0,
        clip_rewards=False,
    ),
}
"""Name -> rules."""

ReferenceProtocol = Literal["v5", "classic"]
"""A protocol of the published scores (`games.py`), with its own rules. `protocol_text` writes it as its name."""


def protocol_text(name: str, rules: Rules, settings: Mapping[str, Any]) -> str:
    """The protocol as it is shown beside a score: `v5`, or `v5, life_loss_terminal=false` if rules differ.

    Args:
        name: a name in `PROTOCOLS`.
        rules: the rules in force.
        settings: other settings that change the game, such as `{"backend": "gymnasium", "options": {"mode": 12}}`.
    """
    differences = {
        rule: value
        for rule, value, usual in zip(Rules._fields, rules, PROTOCOLS[name], strict=True)
        if value != usual
    }
    texts = []
    for field, value in {**differences, **settings}.items():
        texts.append(f"{field}={value if isinstance(value, str) else json.dumps(value, sort_keys=True)}")
    return ", ".join([name, *texts])


def comparison_note(protocol: str) -> str | None:
    """Why scores under a protocol, a `protocol_text`, are compared with no reference; None if they are."""
    if protocol in get_args(ReferenceProtocol):
        return None
    return f"not compared: no reference, random or human score is of this protocol ({protocol})"
