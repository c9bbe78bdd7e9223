"""The environments of a session: dealt to the learner's devices in blocks, and each block to groups.

Environments are numbered 0 .. B-1 in the session. A pool of emulators runs each group (`envs/`).
"""

from collections.abc import Callable
from contextlib import ExitStack

import jax

from jaxrl_atari.config import Config
from jaxrl_atari.devices import Placement
from jaxrl_atari.envs import make_pool
from jaxrl_atari.envs.record import default_anchor_steps
from jaxrl_atari.network_interface import Networks
from jaxrl_atari.rollout import EnvGroup


def make_groups(
    config: Config, placement: Placement, networks_for: Callable[[int], Networks], seed: int, first_step: int = 0
) -> list[list[EnvGroup]]:
    """All environments of a session, as `rollout.collect` takes them.

    Whoever calls it closes their pools. If one cannot be made, those before it are closed here.

    Args:
        networks_for: number of actions -> the networks of the session.
        seed: seed of the games.
        first_step: steps that each environment made before a resume that starts new games.

    Returns:
        For each of this process's learner devices, its groups.
    """
    env = config.env
    devices = len(placement.learner)
    per_device = env.num_groups or 1
    size = env.num_envs // (devices * per_device)
    anchor_steps = env.anchor_steps or default_anchor_steps(env.num_envs)

    def make(learner: jax.Device, actor: jax.Device, number: int, pools: ExitStack) -> EnvGroup:
        first_env = (placement.learner.index(learner) * per_device + number) * size
        pool = make_pool(
            env.backend, env.game_name, size,
            seed=seed,
            first_env=first_env,
            num_threads=env.num_threads,
            rules=env.rules,
            anchor_steps=0 if config.unrecorded_reason else anchor_steps,
            first_step=first_step,
            gymnasium=env.gymnasium,
        )  # fmt: skip
        pools.callback(pool.close)
        return EnvGroup(
            pool,
            networks_for(pool.num_actions).acting,
            rollout_length=config.ppo.rollout_length,
            device=actor,
            rules=env.rules,
            first_env=first_env,
            check=config.devices.check,
        )

    with ExitStack() as pools:
        groups = [
            [make(learner, actor, number, pools) for number in range(per_device)]
            for learner, actor in zip(placement.local_learner, placement.actors, strict=True)
        ]
        pools.pop_all()  # none is closed
    return groups
