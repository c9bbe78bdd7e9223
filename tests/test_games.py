import hashlib
from collections import Counter
from pathlib import Path

import pytest

from jaxrl_atari.envs import games
from jaxrl_atari.envs.ale import rom_ids
from jaxrl_atari.envs.games import DEFAULT_GAE_LAMBDA, GAMES, comparable, parse_game
from jaxrl_atari.errors import ConfigError


def test_the_table_of_games_is_the_one_that_was_checked():
    """A digit changed by mistake would distort every aggregate. After a deliberate change, write the new sum here."""
    table = Path(games.__file__).with_name("atari_games.csv").read_bytes()
    assert hashlib.sha256(table).hexdigest() == "e769b6f909d4c4d9dcc39d630e5a92d887564d49bdaccf9e886d8a7a40d17c22"


def test_every_game_of_the_emulator_has_a_row():
    assert set(rom_ids()) == set(GAMES)


def test_rows_hold_the_published_numbers():
    qbert, pong, kaboom = GAMES["Qbert"], GAMES["Pong"], GAMES["Kaboom"]
    assert (qbert.gae_lambda, qbert.reference_score, qbert.human) == (0.95, 15460.48, 13455.0)
    assert {name: game.tutorial_score for name, game in GAMES.items() if game.tutorial_score is not None} == {
        "Qbert": 15094,
        "MsPacman": 2372,
        "Breakout": 327,
        "Pong": 16.91,
    }
    assert (qbert.random_mean, qbert.dqn_random) == (164.0, 163.9)
    assert (pong.gae_lambda, pong.reference_score, pong.random_mean) == (0.85, 16.69, -20.25)
    assert (kaboom.reference_score, kaboom.random_mean, kaboom.human) == (None, None, None)


def test_the_default_lambda_is_the_most_frequent_tuned_one():
    tuned = Counter(game.gae_lambda for game in GAMES.values() if game.reference_score is not None)
    assert tuned.most_common(1)[0][0] == DEFAULT_GAE_LAMBDA
    assert set(tuned) == {0.95, 0.85, 0.7}
    assert GAMES["Kaboom"].gae_lambda == DEFAULT_GAE_LAMBDA
    assert GAMES["Breakout"].gae_lambda == 0.7


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qbert", ("Qbert", None)),
        ("qbert", ("Qbert", None)),
        ("ms_pacman", ("MsPacman", None)),
        ("MsPacman", ("MsPacman", None)),
        ("Ms. Pac-Man", ("MsPacman", None)),
        ("tic_tac_toe_3d", ("TicTacToe3D", None)),
        ("ALE/Qbert-v5", ("Qbert", "v5")),
        ("QbertNoFrameskip-v4", ("Qbert", "classic")),
        ("ALE/MsPacman-v5", ("MsPacman", "v5")),
    ],
)
def test_spellings_of_a_name(name, expected):
    assert parse_game(name) == expected


@pytest.mark.parametrize("name", GAMES)
def test_every_canonical_name_is_parsed_as_itself(name):
    assert parse_game(name) == (name, None)
    assert parse_game(f"ALE/{name}-v5") == (name, "v5")
    assert parse_game(f"{name}NoFrameskip-v4") == (name, "classic")


@pytest.mark.parametrize(
    "name",
    ["Qbert-v4", "Qbert-v5", "Qbert-v0", "QbertDeterministic-v4", "QbertNoFrameskip-v0", "ALE/Qbert-ram-v5"],
)
def test_a_version_of_neither_protocol_is_rejected_with_both_alternatives(name):
    with pytest.raises(ConfigError, match=r"ALE/Qbert-v5 .* QbertNoFrameskip-v4"):
        parse_game(name)


@pytest.mark.parametrize(("typo", "game"), [("Qbret", "Qbert"), ("breakut", "Breakout"), ("ALE/Pnog-v5", "Pong")])
def test_the_error_for_an_unknown_game_names_the_closest_ones(typo, game):
    with pytest.raises(ConfigError, match=rf"env.game = '{typo}': expected .*did you mean .*{game}"):
        parse_game(typo)


@pytest.mark.parametrize("name", ["", "xyzzyxyzzy"])
def test_the_error_for_no_game_gives_an_example(name):
    with pytest.raises(ConfigError, match="for example Qbert"):
        parse_game(name)


def test_scores_are_known_under_their_protocol_alone():
    assert comparable("Qbert", "v5") is GAMES["Qbert"]
    other = comparable("Qbert", "v5, clip_rewards=false")
    assert (other.name, other.gae_lambda) == ("Qbert", GAMES["Qbert"].gae_lambda)
    assert (other.reference_score, other.random_mean, other.dqn_random, other.human) == (None,) * 4
