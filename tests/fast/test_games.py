import hashlib
from pathlib import Path

import pytest

from jaxrl_atari.envs import games
from jaxrl_atari.envs.ale_pool import rom_ids
from jaxrl_atari.envs.games import GAMES, game_under, parse_game
from jaxrl_atari.errors import ConfigError


@pytest.mark.parametrize(
    ("table", "checked"),
    [
        ("atari_games.csv", "a0d49f54e4169331516804c4bde3b92d73388de083960e6d290dec7498f8a6b7"),
        ("classic_scores.csv", "d91f830a935be54a0e9050dd4ca4e49f42625e23ca80e7cc8dd9e1c855a9a4a8"),
    ],
)
def test_the_tables_of_games_are_those_that_were_checked(table, checked):
    """A digit changed by mistake would distort every aggregate. After a deliberate change, write the new sum
    here."""
    assert hashlib.sha256(Path(games.__file__).with_name(table).read_bytes()).hexdigest() == checked


def test_every_game_of_the_emulator_has_a_row_unless_it_needs_two_players():
    assert set(GAMES) <= set(rom_ids())
    two_players = {rom_ids()[name] for name in rom_ids().keys() - GAMES}
    assert two_players == {"combat", "joust", "maze_craze", "warlords"}


def test_games_that_wait_for_fire():
    """Whatever the protocol, also one without reference scores."""
    for protocol in ("v5", "classic", "machado"):
        waiting = {name for name in GAMES if game_under(name, protocol).waits_for_fire}
        assert len(waiting) == 17
        assert {"Breakout", "Tennis", "VideoPinball"} < waiting
        assert not waiting & {"Pong", "Qbert", "SpaceInvaders"}


def test_classic_has_its_own_references_and_its_own_random_play():
    cleanrl, baselines, slm_lab = game_under("Qbert", "classic").references
    assert cleanrl == ("CleanRL's PPO (classic, 10M env steps, λ 0.95)", 17246.27, 605.4)
    assert baselines.source == "OpenAI Baselines' ppo2 (classic, 10M env steps, λ 0.95)"
    assert slm_lab == ("SLM Lab v4's PPO (classic, 10M env steps, λ 0.70)", 13460, None)
    assert game_under("Qbert", "classic").random != game_under("Qbert", "v5").random


def test_spellings_of_a_name():
    for name, expected in {
        "qbert": ("Qbert", None),
        "ms_pacman": ("MsPacman", None),
        "Ms. Pac-Man": ("MsPacman", None),
        "tic_tac_toe_3d": ("TicTacToe3D", None),
        "ale/ms_pacman-v5": ("MsPacman", "v5"),
        "breakoutnoframeskip-v4": ("Breakout", "classic"),
    }.items():
        assert parse_game(name) == expected
    for name in GAMES:
        assert parse_game(name) == (name, None)
        assert parse_game(f"ALE/{name}-v5") == (name, "v5")
        assert parse_game(f"{name}NoFrameskip-v4") == (name, "classic")


def test_the_error_for_another_name_says_what_to_write():
    qbert = "ALE/Qbert-v5 .* QbertNoFrameskip-v4"
    for name, hint in {
        "Qbert-v4": qbert,
        "QbertNoFrameskip-v0": qbert,
        "ALE/Qbert": qbert,
        "Breakuot-v4": "ALE/Breakout-v5 .* BreakoutNoFrameskip-v4",
        "Combat-v4": "one of ALE's 104 games for one player",
        "xyzzyxyzzy-v4": "for example Qbert",
    }.items():
        with pytest.raises(ConfigError, match=rf"env.game = '{name}': expected .*{hint}"):
            parse_game(name)


def test_scores_are_known_under_their_protocol_alone():
    assert game_under("Qbert", "v5") is GAMES["Qbert"]
    other = game_under("Qbert", "v5, clip_rewards=false")
    assert other == games.Game("Qbert", GAMES["Qbert"].gae_lambda)
