"""Pools of games for policies that play outside of training."""

from jaxrl_atari.config import EnvConfig
from jaxrl_atari.envs import EnvPool, make_pool


def make_evaluation_pool(env: EnvConfig, num_envs: int, *, seed: int, screens: bool = False) -> EnvPool:
    """Makes a pool that plays as in training, on other seeds.

    Args:
        env: the config of the environment in training.
        num_envs: number of games played at once.
        seed: seed of the games; see `make_pool`.
        screens: `EnvPool.screen` will be called. `envpool` has no colour screens: `ale` plays in its place.

    Raises:
        UserError: as `make_pool`.
    """
    backend = "ale" if screens and env.backend == "envpool" else env.backend
    return make_pool(
        backend, env.game_name, num_envs, seed=seed,
        num_threads=env.num_threads, rules=env.rules, gymnasium=env.gymnasium, screens=screens,
    )  # fmt: skip
