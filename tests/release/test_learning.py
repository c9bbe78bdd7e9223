"""Learning by the shipped configs: a game of the Arcade Learning Environment, and one of MiniGrid."""

from dataclasses import replace
from pathlib import Path

import pytest
from small_training import Lines

from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.config import Config, DevicesConfig, LogConfig
from jaxrl_atari.session import run_session

QUIET = LogConfig(graphs=False, tensorboard=False)


@pytest.mark.timeout(900)
def test_learns_a_real_game(tmp_path):
    """Qbert, default spec: after 40,000 env steps clearly better than random play, 164 ± 15.5 over 100 games."""
    config = Config(total_env_steps=40_000, devices=DevicesConfig(gpu=False), log=QUIET)
    log = Lines()
    run_session(config, tmp_path, 0, writers=[log])
    assert log.rows[-1]["return_mean"] > 164 + 3 * 15.5


@pytest.mark.timeout(1_800)
def test_learns_an_environment_of_ones_own_from_pixels(tmp_path):
    """MiniGrid's Empty-5x5, as configs/minigrid_empty.py has it. The shortest way scores 0.955, random play
    0.3."""
    pytest.importorskip("minigrid", reason="needs MiniGrid: pip install minigrid")
    pytest.importorskip("cv2", reason="needs OpenCV: pip install 'jaxrl_atari[gymnasium]'")
    config = load_config(Path(__file__).parents[2] / "configs" / "minigrid_empty.py")
    log = Lines()
    run_session(replace(config, devices=DevicesConfig(gpu=False), log=QUIET), tmp_path, 0, writers=[log])
    assert log.rows[-1]["return_mean"] > 0.9
