"""The games of ALE: tuned lambda, scores to compare with, and parsing of names.

`atari_games.csv` has one row for each single-player game of ALE. An empty cell means unknown:

- `gae_lambda`, `slm_lab_ppo_10m`: lambda tuned per game and the score reached with it, published by SLM Lab
  for PPO on ALE v5 (sticky actions) after 1e7 env steps, as `return_ma` averaged over sessions.
- `slm_lab_tutorial_10m`: the score of the same experiment in SLM Lab's tutorial, one month earlier
  (docs/parity.md).
- `random_v5_mean`: mean return of uniformly random play under the v5 protocol.
- `dqn_random`, `dqn_human`: the random agent and the human tester that define human-normalised scores, as in DQN
  Zoo (github.com/google-deepmind/dqn_zoo).

`classic_scores.csv` has the scores under `classic` of the 63 games that have any, after 1e7 env steps:

- `cleanrl_10m`, `cleanrl_10m_std`: CleanRL's `ppo_atari_envpool_xla_jax`, lambda 0.95, mean and std over 3 seeds.
- `baselines_ppo2_10m`, `baselines_ppo2_10m_std`: OpenAI Baselines' ppo2, likewise.
- `slm_lab_v4_10m`: SLM Lab v4's PPO, lambda 0.70, 4 sessions of each of 62 games: BENCHMARK.md at 790b2653, the
  table of pull request 427. Its spec (`slm_lab/spec/benchmark/ppo/ppo_atari.json` at c4720807) has lambda 0.70 for
  all games.
- `random_classic_mean`: uniformly random play, 30 full games each (benchmarks/random_play.py).

Scores are raw returns of full games. DQN Zoo's scores define human-normalised scores under both protocols, as in
the literature.
"""

import csv
import difflib
import re
from collections.abc import Mapping
from importlib import resources
from typing import Literal, NamedTuple

from jaxrl_atari.errors import ConfigError

DEFAULT_GAE_LAMBDA = 0.95
"""Lambda for games without a tuned value: the most frequent tuned value, and PPO's usual one. Under `classic`, the
lambda of every game: that of the references which normalise scores there."""


class Reference(NamedTuple):
    """A score to compare with."""

    source: str  # with its protocol and lambda
    score: float
    std: float | None = None  # over seeds


class Game(NamedTuple):
    """A game and its scores of one protocol. None means unknown; scores are raw returns of full games."""

    name: str  # ALE's CamelCase name
    gae_lambda: float  # of a run that chooses none: under v5 the tuned one; else DEFAULT_GAE_LAMBDA
    references: tuple[Reference, ...] = ()  # PPO, 1e7 env steps; the first one normalises scores
    random: Reference | None = None  # uniformly random play
    human: Reference | None = None  # as in DQN Zoo
    dqn_random: Reference | None = None  # as in DQN Zoo

    @property
    def comparisons(self) -> list[Reference]:
        """All scores to compare with."""
        return [*self.references, *filter(None, (self.human, self.random))]


class _Source(NamedTuple):
    """A column of scores."""

    column: str
    name: str
    gae_lambda: float | None  # None: the one tuned for the game


SOURCES = {
    "v5": (
        _Source("slm_lab_ppo_10m", "SLM Lab's PPO", None),
        _Source("slm_lab_tutorial_10m", "SLM Lab's tutorial", None),
    ),
    "classic": (
        _Source("cleanrl_10m", "CleanRL's PPO", 0.95),
        _Source("baselines_ppo2_10m", "OpenAI Baselines' ppo2", 0.95),
        _Source("slm_lab_v4_10m", "SLM Lab v4's PPO", 0.70),
    ),
}
"""Protocol -> its references, the one that normalises scores first."""


def _rows(table: str) -> dict[str, dict[str, str]]:
    lines = resources.files("jaxrl_atari.envs").joinpath(table).read_text(encoding="utf-8").splitlines()
    return {row["game"]: row for row in csv.DictReader(lines)}


def _read_games(protocol: str) -> dict[str, Game]:
    classic = _rows("classic_scores.csv")
    games = {}
    for name, row in _rows("atari_games.csv").items():
        row |= classic.get(name, {})

        def score(source: str, column: str, row: Mapping[str, str] = row) -> Reference | None:
            std = row.get(f"{column}_std")
            return Reference(source, float(row[column]), float(std) if std else None) if row.get(column) else None

        tuned = float(row["gae_lambda"] or DEFAULT_GAE_LAMBDA)
        references = (
            score(f"{name} ({protocol}, 10M env steps, λ {fixed or tuned:.2f})", column)
            for column, name, fixed in SOURCES[protocol]
        )
        games[name] = Game(
            name=name,
            gae_lambda=DEFAULT_GAE_LAMBDA if protocol == "classic" else tuned,
            references=tuple(filter(None, references)),
            random=score(f"random play ({protocol})", f"random_{protocol}_mean"),
            human=score("human tester (DQN Zoo)", "dqn_human"),
            dqn_random=score("random play (DQN Zoo)", "dqn_random"),
        )
    return games


GAMES = _read_games("v5")
"""Every game by ALE's CamelCase name, in alphabetical order, with the scores of `v5`."""

_SCORES = {"v5": GAMES, "classic": _read_games("classic")}


def _letters(name: str) -> str:
    """A name without case, spaces and punctuation: `ms_pacman` and `MsPacman` are the same game."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_NAME_OF = {_letters(name): name for name in GAMES}
TWO_PLAYER_GAMES = ("combat", "joust", "mazecraze", "warlords")
"""Games that need two players; they are not in the table."""

_SPELLINGS: dict[str, Literal["v5", "classic"] | None] = {
    r"ale/(.*)-v5": "v5",
    r"(.*)noframeskip-v4": "classic",
    r"(.*)": None,
}
"""Form of a game's name -> the protocol that it implies."""


def parse_game(name: str) -> tuple[str, Literal["v5", "classic"] | None]:
    """Parses the name of a game: (ALE's CamelCase name, the protocol that the name implies).

    | name | protocol |
    |---|---|
    | `Qbert`, `qbert`, `ms_pacman`, `Ms. Pac-Man` | None: the name implies none |
    | `ALE/Qbert-v5` | `v5` |
    | `QbertNoFrameskip-v4` | `classic` |

    Case does not matter. Other versioned names are rejected, because they do not mean either protocol: `Qbert-v4`
    repeats an action for a random 2 to 4 frames, `Qbert-v5` has sticky actions in Gymnasium but not in EnvPool,
    and `-ram-` has no images.

    Raises:
        ConfigError: an unknown game, a two-player game, or another version than the above. The error names the
            closest game.
    """
    for pattern, protocol in _SPELLINGS.items():
        match = re.fullmatch(pattern, name.lower())
        if match and (letters := _letters(match[1])) in _NAME_OF:
            return _NAME_OF[letters], protocol
    bare = re.sub(r"^ale/|((noframeskip|deterministic)?(-ram.*)?(-v\d+)?)$", "", name.lower())
    hint = "for example Qbert, Breakout or MsPacman"
    if _letters(bare) in TWO_PLAYER_GAMES:
        hint = f"{bare} is a two-player game"
    elif close := difflib.get_close_matches(_letters(bare), _NAME_OF):  # the closest one first
        game = _NAME_OF[close[0]]
        hint = f"did you mean {game}, ALE/{game}-v5 (sticky actions) or {game}NoFrameskip-v4 (no sticky actions)?"
    raise ConfigError("env.game", name, f"one of ALE's {len(GAMES)} games for one player", hint)


def game_of_id(environment: str) -> str | None:
    """The game of an id of Gymnasium that ALE registers and that implies a protocol; None for any other id.

    `ALE/MsPacman-v5` and `MsPacmanNoFrameskip-v4` are `MsPacman`. Unlike `parse_game`, it takes ids letter by
    letter.
    """
    match = re.fullmatch(r"ALE/(\w+)-v5|(\w+)NoFrameskip-v4", environment)
    name = match and (match[1] or match[2])
    return name if name in GAMES else None


def comparable(name: str, protocol: str) -> Game:
    """A game with the scores that a score under `protocol`, a `protocol_text`, may be compared with, if any.

    Args:
        name: ALE's name of a game, or the id of a Gymnasium environment, which has no scores.
    """
    if protocol in _SCORES:
        return _SCORES[protocol][name]
    return Game(name, GAMES[name].gae_lambda if name in GAMES else DEFAULT_GAE_LAMBDA)


def default_gae_lambda(name: str, protocol: str) -> float:
    """Lambda of a run that chooses none.

    Under `classic` it is that of CleanRL's and Baselines' scores, 0.95. Else it is the one that SLM Lab tuned for
    the game under `v5`; 0.95 where there is none.

    Args:
        name: ALE's CamelCase name of the game, or the id of a Gymnasium environment.
        protocol: the name of the protocol, without rules that differ.
    """
    game = _SCORES["classic" if protocol == "classic" else "v5"].get(name)
    return DEFAULT_GAE_LAMBDA if game is None else game.gae_lambda
