"""The games of ALE: tuned lambdas, reference scores, and the parsing of names.

`atari_games.csv` has a row for each single-player game of ALE. An empty cell is an unknown value:

- `gae_lambda`, `slm_lab_ppo_10m`: the lambda that SLM Lab tuned for the game, and the score published with it:
  PPO on ALE v5 (sticky actions) after 1e7 env steps, `return_ma` averaged over sessions.
- `slm_lab_tutorial_10m`: the score of the same experiment in SLM Lab's tutorial, one month earlier
  (docs/parity.md).
- `random_v5_mean`: mean return of uniformly random play under the v5 protocol.
- `dqn_random`, `dqn_human`: the random agent and the human tester that define human-normalised scores, as in DQN
  Zoo (github.com/google-deepmind/dqn_zoo).
- `waits_for_fire`: `yes` if a game or a life starts only with FIRE. Random play that never presses FIRE does not
  end such a game within 4,500 env steps.

`classic_scores.csv` has scores under `classic` after 1e7 env steps, of the 63 games that have any:

- `cleanrl_10m`, `cleanrl_10m_std`: CleanRL's `ppo_atari_envpool_xla_jax`, lambda 0.95, mean and std over 3 seeds.
- `baselines_ppo2_10m`, `baselines_ppo2_10m_std`: the same of OpenAI Baselines' ppo2.
- `slm_lab_v4_10m`: SLM Lab v4's PPO, lambda 0.70, 4 sessions of each of 62 games: BENCHMARK.md at 790b2653, the
  table of pull request 427. Its spec (`slm_lab/spec/benchmark/ppo/ppo_atari.json` at c4720807) has lambda 0.70 for
  all games.
- `random_classic_mean`: uniformly random play, 30 full games each (benchmarks/random_play.py).

Scores are raw returns of full games. As in the literature, human-normalised scores use DQN Zoo's scores under both
protocols.
"""

import csv
import difflib
import re
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple

from jaxrl_atari.envs.protocols import ReferenceProtocol
from jaxrl_atari.errors import ConfigError

DEFAULT_GAE_LAMBDA = 0.95
"""Lambda for games without a tuned value: the most frequent tuned value, and PPO's usual one.

Under `classic`, it is the lambda of every game, because CleanRL's and Baselines' scores were made with it.
"""


class Reference(NamedTuple):
    """A published score that scores are compared with."""

    source: str  # names its protocol and lambda too
    score: float
    std: float | None = None  # over seeds


class Game(NamedTuple):
    """A game and its reference scores under one protocol. None is an unknown score."""

    name: str  # ALE's CamelCase name
    gae_lambda: float  # default of a run: DEFAULT_GAE_LAMBDA under classic, else as tuned for the game under v5
    references: tuple[Reference, ...] = ()  # PPO after 1e7 env steps; the first one normalises scores
    random: Reference | None = None  # uniformly random play
    human: Reference | None = None  # DQN Zoo's human tester
    dqn_random: Reference | None = None  # DQN Zoo's random play
    waits_for_fire: bool = False  # whether a game or a life starts only with FIRE


class _Source(NamedTuple):
    """A column of reference scores in the tables."""

    column: str
    name: str
    gae_lambda: float | None  # None means the value tuned for the game


SOURCES: dict[ReferenceProtocol, tuple[_Source, ...]] = {
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
"""Protocol -> sources of its references. The first source normalises scores."""


def _rows(table: str) -> dict[str, dict[str, str]]:
    """Reads a table of this folder: game -> column -> cell."""
    lines = resources.files("jaxrl_atari.envs").joinpath(table).read_text(encoding="utf-8").splitlines()
    return {row["game"]: row for row in csv.DictReader(lines)}


def _reference(row: Mapping[str, str], column: str, source: str) -> Reference | None:
    """The score in a column of a game's row; None if the cell is empty."""
    if not row.get(column):
        return None
    std = row.get(f"{column}_std")
    return Reference(source, float(row[column]), float(std) if std else None)


def _read_games(protocol: ReferenceProtocol) -> dict[str, Game]:
    """Reads the tables: CamelCase name -> game, with the scores of a protocol."""
    classic = _rows("classic_scores.csv")
    games = {}
    for name, row in _rows("atari_games.csv").items():
        row |= classic.get(name, {})
        tuned = float(row["gae_lambda"] or DEFAULT_GAE_LAMBDA)
        references = []
        for source in SOURCES[protocol]:
            text = f"{source.name} ({protocol}, 10M env steps, λ {source.gae_lambda or tuned:.2f})"
            references.append(_reference(row, source.column, text))
        games[name] = Game(
            name=name,
            gae_lambda=DEFAULT_GAE_LAMBDA if protocol == "classic" else tuned,
            references=tuple(filter(None, references)),
            random=_reference(row, f"random_{protocol}_mean", f"random play ({protocol})"),
            human=_reference(row, "dqn_human", "human tester (DQN Zoo)"),
            dqn_random=_reference(row, "dqn_random", "random play (DQN Zoo)"),
            waits_for_fire=row["waits_for_fire"] == "yes",
        )
    return games


GAMES = _read_games("v5")
"""ALE's CamelCase name -> game with its scores under `v5`, in alphabetical order."""

_GAMES_UNDER: dict[str, dict[str, Game]] = {"v5": GAMES, "classic": _read_games("classic")}
"""Reference protocol -> name -> game."""


def _letters(name: str) -> str:
    """The lower-case letters and digits of a name, which are the same for `Ms. Pac-Man` and `MsPacman`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_NAME_OF = {_letters(name): name for name in GAMES}

_SPELLINGS: tuple[tuple[str, ReferenceProtocol | None], ...] = (
    (r"ale/(.*)-v5", "v5"),
    (r"(.*)noframeskip-v4", "classic"),
    (r"(.*)", None),
)
"""Patterns of a game's name, and the protocol that each implies.

The first pattern that matches a known game decides.
"""


def parse_game(name: str) -> tuple[str, ReferenceProtocol | None]:
    """Parses the name of a game.

    | name | protocol |
    |---|---|
    | `Qbert`, `qbert`, `ms_pacman`, `Ms. Pac-Man` | None: the name implies none |
    | `ALE/Qbert-v5` | `v5` |
    | `QbertNoFrameskip-v4` | `classic` |

    Case does not matter. Other versions are refused, because they mean neither protocol: `Qbert-v4` repeats an
    action for a random 2 to 4 frames, `Qbert-v5` has sticky actions in Gymnasium but not in EnvPool, and `-ram-`
    has no images.

    Returns:
        ALE's CamelCase name, and the protocol that the name implies.

    Raises:
        ConfigError: an unknown game, a two-player game, or another version. The error names the closest game.
    """
    for pattern, protocol in _SPELLINGS:
        match = re.fullmatch(pattern, name.lower())
        game = _NAME_OF.get(_letters(match[1])) if match else None
        if game is not None:
            return game, protocol
    bare = re.sub(r"^ale/|((noframeskip|deterministic)?(-ram.*)?(-v\d+)?)$", "", name.lower())
    closest = difflib.get_close_matches(_letters(bare), _NAME_OF, 1)
    hint = "for example Qbert; any other Gymnasium environment needs --env.backend gymnasium"
    if closest:
        game = _NAME_OF[closest[0]]
        hint = f"did you mean {game}, ALE/{game}-v5 (sticky actions) or {game}NoFrameskip-v4 (no sticky actions)?"
    raise ConfigError("env.game", name, f"one of ALE's {len(GAMES)} games for one player", hint)


def game_of_id(environment: str) -> str | None:
    """The game that a Gymnasium id names; None for an id that is played as it is registered.

    Ids of games are `ALE/MsPacman-v5`, `MsPacmanNoFrameskip-v4` and `MsPacman`, which Gymnasium alone would take
    for `MsPacman-v4`. Unlike `parse_game`, it accepts no other spelling.
    """
    match = re.fullmatch(r"ALE/(\w+)-v5|(\w+?)(?:NoFrameskip-v4)?", environment)
    name = match and (match[1] or match[2])
    return name if name in GAMES else None


def game_under(name: str, protocol: str) -> Game:
    """A game with its reference scores under a protocol, of which there may be none.

    Args:
        name: ALE's name of a game, or the id of a Gymnasium environment, which has no reference scores.
        protocol: the protocol as `protocols.protocol_text` writes it.
    """
    if name not in GAMES:
        return Game(name, DEFAULT_GAE_LAMBDA)
    if protocol not in _GAMES_UNDER:
        return Game(name, GAMES[name].gae_lambda, waits_for_fire=GAMES[name].waits_for_fire)
    return _GAMES_UNDER[protocol][name]
