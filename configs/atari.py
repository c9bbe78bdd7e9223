"""Any game of ALE with the published PPO-Atari spec and the game's tuned lambda (57 games; 0.95 for the other 47).

    python -m jaxrl_atari.train --config configs/atari.py --env.game SpaceInvaders

Reference scores of all games: jaxrl_atari/envs/atari_games.csv.
"""

from jaxrl_atari.config import Config


def get_config() -> Config:
    return Config(name="atari")
