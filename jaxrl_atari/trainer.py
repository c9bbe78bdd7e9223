"""The algorithm of one session: a learner and its actors, everything that a checkpoint holds.

`Trainer.iterate()` is one rollout and one update. Files, log points and signals are `session.py`'s.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.envs import make_pool
from jaxrl_atari.networks import NatureActorCritic, conv_form
from jaxrl_atari.ppo import Hyperparameters, TrainState, init_train_state, make_update
from jaxrl_atari.rollout import Actor, EpisodeStatistics, finish_rollout, make_actor_functions


def make_network(config: Config, num_actions: int, platform: str) -> NatureActorCritic:
    """The network of a config, in the form and arithmetic that suit a platform ("cpu", "gpu")."""
    dtype = config.network.compute_dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    form = config.network.conv if config.network.conv != "auto" else conv_form(platform)
    return NatureActorCritic(num_actions=num_actions, compute_dtype=jnp.dtype(dtype), conv=form)


class Trainer:
    """A learner and its actors.

    Everything random derives from `seed`: update u takes its keys from `fold_in(key(seed), u)`, so that a resumed
    session draws what an uninterrupted one would have drawn.
    """

    def __init__(self, config: Config, seed: int, device: jax.Device, restored: tuple[dict, dict] | None = None):
        self.config = config
        self.seed = seed
        self.device = device
        self.statistics = EpisodeStatistics()
        self.env_steps = 0
        self.updates = 0
        if restored is not None:
            self._load_progress(restored[1])

        groups = config.env.num_groups or (1 if device.platform == "cpu" else 2)
        # A resumed session plays other games than those it began with.
        pool_seeds = np.random.SeedSequence([seed, self.updates]).generate_state(groups) >> 1
        pools = [
            make_pool(
                config.env.backend,
                config.env.game_name,
                config.env.num_envs // groups,
                seed=int(pool_seed),
                num_threads=config.env.num_threads,
                protocol=config.env.resolved_protocol,
                max_frames=config.env.max_frames,
            )
            for pool_seed in pool_seeds
        ]
        self.num_actions = pools[0].num_actions
        self.network = make_network(config, self.num_actions, device.platform)
        functions = make_actor_functions(self.network)
        self.actors = [Actor(pool, functions, config.ppo.rollout_length, device) for pool in pools]
        self._update = jax.jit(make_update(self.network, config.ppo), donate_argnums=0)
        self._finish = jax.jit(finish_rollout)
        self._keys = jax.jit(lambda key, u: tuple(jax.random.split(jax.random.fold_in(key, u), 1 + groups)))

        self.key = jax.device_put(jax.random.key(seed), device)
        if restored is None:
            init = partial(init_train_state, self.network, config.ppo)
            self.train_state: TrainState = jax.jit(init)(jax.random.fold_in(self.key, 2**31))
        else:
            self.train_state, self.key = restored[0]["train_state"], restored[0]["key"]

    def _load_progress(self, meta: dict[str, Any]) -> None:
        self.env_steps, self.updates = meta["env_steps"], meta["updates"]
        self.statistics.load(meta["statistics"])

    @property
    def learning_rate(self) -> float:
        """Of the next update: linear in env steps, from ppo.learning_rate to 0 at total_env_steps."""
        remaining = max(0.0, 1.0 - self.env_steps / self.config.total_env_steps)
        return self.config.ppo.learning_rate * (remaining if self.config.ppo.anneal_learning_rate else 1.0)

    def hyperparameters(self) -> Hyperparameters:
        """Those of the next update, on the device."""
        ppo = self.config.ppo
        values = Hyperparameters(
            learning_rate=self.learning_rate,
            gamma=ppo.gamma,
            gae_lambda=self.config.gae_lambda,
            clip_epsilon=ppo.clip_epsilon,
            entropy_coef=ppo.entropy_coef,
            value_coef=ppo.value_coef,
        )
        return jax.device_put(jax.tree.map(np.float32, values), self.device)

    def collect(self, keys: Any) -> None:
        """Fills a rollout of all actors, each group stepping while the policy acts for the others."""
        params = self.train_state.params
        for actor, key in zip(self.actors, keys, strict=True):
            actor.begin(key)
        length = self.config.ppo.rollout_length
        for t in range(length):
            for actor in self.actors:
                if t > 0:
                    actor.receive(t - 1, self.statistics)
                actor.choose(params)
                actor.send()
        for actor in self.actors:
            actor.receive(length - 1, self.statistics)
            actor.choose(params)  # for the bootstrap value; the action is drawn anew when the next rollout begins
        self.env_steps += sum(actor.transitions() for actor in self.actors)

    def iterate(self) -> dict[str, jax.Array]:
        """One rollout and the update on it. Returns the update's metrics, still on the device."""
        hyper = self.hyperparameters()
        update_key, *actor_keys = self._keys(self.key, jax.device_put(np.uint32(self.updates), self.device))
        self.collect(actor_keys)
        states, outcomes = zip(*(actor.finish() for actor in self.actors), strict=True)
        rollout = self._finish(states, outcomes)
        self.train_state, metrics = self._update(self.train_state, rollout, hyper, update_key)
        self.updates += 1
        return metrics

    def arrays(self) -> dict[str, Any]:
        """What a checkpoint holds of arrays; `meta` is the rest."""
        return {"train_state": self.train_state, "key": self.key}

    def meta(self) -> dict[str, Any]:
        """What a checkpoint holds beside the arrays, as JSON values."""
        return {
            "config": self.config.to_dict(),
            "game": self.config.env.game_name,
            "protocol": self.config.env.resolved_protocol,
            "num_actions": self.num_actions,
            "seed": self.seed,
            "env_steps": self.env_steps,
            "updates": self.updates,
            "statistics": self.statistics.to_dict(),
        }

    def close(self) -> None:
        """Frees the emulators."""
        for actor in self.actors:
            actor.pool.close()


def abstract_arrays(config: Config, num_actions: int, device: jax.Device) -> dict[str, Any]:
    """Shapes, dtypes and place of `Trainer.arrays`, the target of a restore."""
    network = make_network(config, num_actions, device.platform)

    def arrays() -> dict[str, Any]:
        key = jax.random.key(0)
        return {"train_state": init_train_state(network, config.ppo, key), "key": key}

    place = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(arrays))
