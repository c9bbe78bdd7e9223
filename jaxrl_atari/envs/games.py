"""The games of ALE: tuned lambda, reference, random and human scores, and parsing of names.

`atari_games.csv` has one row for each single-player game of ALE. An empty cell means unknown:

- `gae_lambda`, `slm_lab_ppo_10m`: lambda tuned per game and the score reached with it, published by SLM Lab
  for PPO on ALE v5 (sticky actions) after 1e7 env steps, as `return_ma` averaged over sessions.
- `slm_lab_tutorial_10m`: the score of the same experiment in SLM Lab's tutorial, one month earlier (docs/parity.md).
- `random_v5_mean`, `random_v5_std`: mean and standard deviation of the return of uniformly random play under
  the v5 protocol.
- `dqn_random`, `dqn_human`: the random agent and the human tester that define human-normalised scores, as in DQN Zoo
  (github.com/google-deepmind/dqn_zoo).

Scores are raw returns of full games.
"""

import csv
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from types import MappingProxyType
from typing import Literal

from jaxrl_atari.envs.protocols import REFERENCE_PROTOCOL
from jaxrl_atari.errors import ConfigError

DEFAULT_GAE_LAMBDA = 0.95
"""Lambda for games without a tuned value: the most frequent tuned value, and PPO's usual one."""


@dataclass(frozen=True)
class Game:
    """A row of the table. None means unknown; scores are raw returns of full games."""

    name: str  # ALE's CamelCase name
    gae_lambda: float  # tuned, else DEFAULT_GAE_LAMBDA
    reference_score: float | None  # SLM Lab's PPO, v5, 1e7 env steps
    random_mean: float | None  # uniformly random play, v5
    dqn_random: float | None  # as in DQN Zoo
    human: float | None  # as in DQN Zoo
    tutorial_score: float | None = None  # as reference_score, in SLM Lab's tutorial


def _read_games() -> dict[str, Game]:
    def number(cell: str) -> float | None:
        return float(cell) if cell else None

    table = resources.files("jaxrl_atari.envs").joinpath("atari_games.csv").read_text(encoding="utf-8")
    return {
        row["game"]: Game(
            name=row["game"],
            gae_lambda=float(row["gae_lambda"] or DEFAULT_GAE_LAMBDA),
            reference_score=number(row["slm_lab_ppo_10m"]),
            random_mean=number(row["random_v5_mean"]),
            dqn_random=number(row["dqn_random"]),
            human=number(row["dqn_human"]),
            tutorial_score=number(row["slm_lab_tutorial_10m"]),
        )
        for row in csv.DictReader(table.splitlines())
    }


GAMES: Mapping[str, Game] = MappingProxyType(_read_games())
"""Every game by ALE's CamelCase name, in alphabetical order."""


def _letters(name: str) -> str:
    """A name without case, spaces and punctuation: `ms_pacman` and `MsPacman` are the same game."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_NAME_OF = {_letters(name): name for name in GAMES}


TWO_PLAYER_GAMES = ("combat", "joust", "maze_craze", "warlords")
"""ALE's ids of the games that nobody can play alone; they are not in the table."""

_PROTOCOLS: dict[tuple[str, str], Literal["v5", "classic"] | None] = {
    ("", ""): None,
    ("ale/", "-v5"): "v5",
    ("", "noframeskip-v4"): "classic",
}
"""What stands before and after a game's name -> the protocol that it implies."""


def parse_game(name: str) -> tuple[str, Literal["v5", "classic"] | None]:
    """Parses the name of a game: (ALE's CamelCase name, the protocol that the name implies).

    | name | protocol |
    |---|---|
    | `Qbert`, `qbert`, `ms_pacman`, `Ms. Pac-Man` | None: the name implies none |
    | `ALE/Qbert-v5` | `v5` |
    | `QbertNoFrameskip-v4` | `classic` |

    Case does not matter. Other versioned names are rejected, because they do not mean either protocol: `Qbert-v4`
    repeats an action for a random 2 to 4 frames, `Qbert-v5` has sticky actions in Gymnasium but not in EnvPool, and
    `-ram-` has no images.

    Raises:
        ConfigError: an unknown game (the error names the closest ones), a two-player game, or another version than the
            above.
    """
    pattern = r"(?s)(ale/)?(.*?)((?:noframeskip|deterministic)?(?:-ram.*)?(?:-v\d+)?)"
    match = re.fullmatch(pattern, name.lower())
    assert match is not None  # its parts may be empty
    prefix, bare, suffix = match.groups(default="")
    letters, known = _letters(bare), (prefix, suffix) in _PROTOCOLS
    if known and letters in _NAME_OF:
        return _NAME_OF[letters], _PROTOCOLS[prefix, suffix]
    if letters in map(_letters, TWO_PLAYER_GAMES):
        raise ConfigError("env.game", name, "a game for one player", f"{bare} is a two-player game")
    names = [_NAME_OF[close] for close in difflib.get_close_matches(letters, _NAME_OF)]  # the closest one first
    if names and not known:
        expected = "a name with one known protocol"
        hint = f"write ALE/{names[0]}-v5 (sticky actions) or {names[0]}NoFrameskip-v4 (classic, none)"
        raise ConfigError("env.game", name, expected, hint)
    hint = f"did you mean {' or '.join(names)}?" if names else "for example Qbert, Breakout or MsPacman"
    raise ConfigError("env.game", name, f"one of ALE's {len(GAMES)} games", hint)


def comparable(name: str, protocol: str) -> Game:
    """A game with the scores that a score under `protocol`, a `protocol_text`, may be compared with.

    All of them are None under another protocol than that of the reference scores.
    """
    game = GAMES[name]
    if protocol == REFERENCE_PROTOCOL:
        return game
    return replace(game, reference_score=None, tutorial_score=None, random_mean=None, dqn_random=None, human=None)
