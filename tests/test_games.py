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
        ("ale/ms_pacman-v5", ("MsPacman", "v5")),
        ("breakoutnoframeskip-v4", ("Breakout", "classic")),
    ],
)
def test_spellings_of_a_name(name, expected):
    assert parse_game(name) == expected


@pytest.mark.parametrize("name", GAMES)
def test_every_canonical_name_is_parsed_as_itself(name):
    assert parse_game(name) == (name, None)
    assert parse_game(f"ALE/{name}-v5") == (name, "v5")
    assert parse_game(f"{name}NoFrameskip-v4") == (name, "classic")


QBERT = "ALE/Qbert-v5 .* QbertNoFrameskip-v4"


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "Qbert-v4": QBERT,
        "Qbert-v5": QBERT,
        "QbertDeterministic-v4": QBERT,
        "QbertNoFrameskip-v0": QBERT,
        "ALE/Qbert-ram-v5": QBERT,
        "ALE/Qbert": QBERT,
        "Breakuot-v4": "ALE/Breakout-v5 .* BreakoutNoFrameskip-v4",
        "Qbret": "did you mean .*Qbert",
        "ALE/Pnog-v5": "did you mean .*Pong",
        "Combat-v4": "a game for one player; combat is a two-player game",
        "ALE/MazeCraze-v5": "a game for one player; mazecraze is a two-player game",
        "": "for example Qbert",
        "xyzzyxyzzy-v4": "for example Qbert",
    }.items(),
)
def test_the_error_for_another_name_says_what_to_write(name, message):
    with pytest.raises(ConfigError, match=rf"env.game = '{name}': expected .*{message}"):
        parse_game(name)


def test_scores_are_known_under_their_protocol_alone():
    assert comparable("Qbert", "v5") is GAMES["Qbert"]
    other = comparable("Qbert", "v5, clip_rewards=false")
    assert (other.name, other.gae_lambda) == ("Qbert", GAMES["Qbert"].gae_lambda)
    assert (other.reference_score, other.random_mean, other.dqn_random, other.human) == (None,) * 4
