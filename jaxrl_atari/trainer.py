"""The algorithm of one session: a learner and its actors, everything that a checkpoint holds.

`Trainer.iterate()` is one rollout and one update. Files, log points and signals are `session.py`'s.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.config import Config, EnvConfig
from jaxrl_atari.devices import DataParallel, Placement, gather_rows, sum_over_processes
from jaxrl_atari.envs.ale import make_pool
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.learner import Learner
from jaxrl_atari.networks import NatureActorCritic, conv_form
from jaxrl_atari.ppo import Hyperparameters, Metrics, Rollout, TrainState, init_train_state
from jaxrl_atari.rollout import Actor, ActorFunctions, EpisodeStatistics, finish_rollout, make_actor_functions


def make_network(config: Config, num_actions: int, platform: str) -> NatureActorCritic:
    """The network of a config, in the form and arithmetic that suit a platform ("cpu", "gpu")."""
    dtype = config.network.compute_dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    form = config.network.conv if config.network.conv != "auto" else conv_form(platform)
    return NatureActorCritic(num_actions=num_actions, compute_dtype=jnp.dtype(dtype), conv=form)


def num_groups(env: EnvConfig, devices: int, platform: str) -> int:
    """Groups on each device: as chosen, else 2 on a GPU whose environments can be halved, else 1."""
    return env.num_groups or (2 if platform != "cpu" and env.num_envs % (2 * devices) == 0 else 1)


def abstract_arrays(config: Config, num_actions: int, device: jax.Device) -> dict[str, Any]:
    """Shapes, dtypes and place of `Trainer.arrays`, the target of a restore."""
    network = make_network(config, num_actions, device.platform)

    def arrays() -> dict[str, Any]:
        key = jax.random.key(0)
        return {"train_state": init_train_state(network, config.ppo, key), "key": key}

    place = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(arrays))


class Trainer:
    """A learner and its actors.

    Everything random derives from `seed`: update u takes its keys from `fold_in(key(seed), u)`, so that a resumed
    session draws what an uninterrupted one would have drawn; the games it plays after a resume are others.

    The environments are numbered 0 .. B-1 and dealt to the learner's devices in blocks, and each block to groups that
    take turns. Seeds, actions and minibatches go by those numbers: how many devices and groups there are does not
    change what is computed, beyond the rounding of sums.

    Args:
        restored: arrays and meta data of a checkpoint to go on from.
    """

    def __init__(self, config: Config, seed: int, placement: Placement, restored: tuple[dict, dict] | None = None):
        self.config = config
        self.seed = seed
        self.placement = placement
        self.statistics = EpisodeStatistics()
        self.env_steps = 0
        self.updates = 0
        self.first_step_at: float | None = None  # time.time() of the first env step here
        if restored is not None:
            self.env_steps, self.updates = restored[1]["env_steps"], restored[1]["updates"]
            self.statistics.load(restored[1]["statistics"])

        parallel = DataParallel(placement.learner)
        self.device = placement.home
        self._functions: dict[str, ActorFunctions] = {}  # by platform
        self.actors = self._make_actors(parallel)
        self.num_actions = self.actors[0][0].pool.num_actions

        network = make_network(config, self.num_actions, self.device.platform)
        if restored is None:
            self.key = jax.device_put(jax.random.key(seed), self.device)
            init = jax.jit(partial(init_train_state, network, config.ppo))
            state: TrainState = init(jax.random.fold_in(self.key, 2**31))
        else:
            state, self.key = restored[0]["train_state"], restored[0]["key"]
        self.optimizer_steps = int(state.optimizer_steps)
        overlap = config.overlap == "update"
        self.learner = Learner(
            network, config.ppo, parallel, state, stepwise=overlap and self.device.platform != "cpu",
            check=config.devices.check,
        )  # fmt: skip
        self._thread = ThreadPoolExecutor(1, "learner") if overlap else None
        self._learning: Future[Metrics] | None = None
        self._finish = jax.jit(finish_rollout)
        self._split = jax.jit(lambda key, number: tuple(jax.random.split(jax.random.fold_in(key, number))))
        self._copy = jax.jit(partial(jax.tree.map, jnp.copy))
        self._acting_params = self._params_of_actors()

    def _make_actors(self, parallel: DataParallel) -> list[list[Actor]]:
        """For each local device of the learner, its groups of environments."""
        env = self.config.env
        groups = num_groups(env, len(parallel), self.device.platform)
        if env.num_envs % (len(parallel) * groups):
            raise ConfigError(
                "env.num_envs", env.num_envs, f"a multiple of {len(parallel)} devices x {groups} groups",
                "change env.num_envs, devices.data_parallel or env.num_groups",
            )  # fmt: skip
        size = env.num_envs // (len(parallel) * groups)
        # A resumed session plays other games than those it began with.
        pool_seed = int(np.random.SeedSequence([self.seed, self.updates]).generate_state(1)[0] >> 1)

        def make(home: jax.Device, device: jax.Device, group: int) -> Actor:
            first_env = (parallel.devices.index(home) * groups + group) * size
            pool = make_pool(
                env.backend, env.game_name, size,
                seed=pool_seed,
                first_env=first_env,
                num_threads=env.num_threads,
                protocol=env.resolved_protocol,
                max_frames=env.max_frames,
            )  # fmt: skip
            if device.platform not in self._functions:
                network = make_network(self.config, pool.num_actions, device.platform)
                self._functions[device.platform] = make_actor_functions(network)
            length, check = self.config.ppo.rollout_length, self.config.devices.check
            return Actor(pool, self._functions[device.platform], length, device, first_env, check)

        homes = zip(parallel.local_devices, self.placement.actors, strict=True)
        return [[make(home, device, group) for group in range(groups)] for home, device in homes]

    @property
    def learning_rate(self) -> float:
        """Of the next update: linear in env steps, from ppo.learning_rate to 0 at total_env_steps."""
        remaining = max(0.0, 1.0 - self.env_steps / self.config.total_env_steps)
        return self.config.ppo.learning_rate * (remaining if self.config.ppo.anneal_learning_rate else 1.0)

    def hyperparameters(self) -> Hyperparameters:
        """Those of the next update, as NumPy scalars."""
        ppo = self.config.ppo
        return Hyperparameters(
            learning_rate=np.float32(self.learning_rate),
            gamma=np.float32(ppo.gamma),
            gae_lambda=np.float32(self.config.gae_lambda),
            clip_epsilon=np.float32(ppo.clip_epsilon),
            entropy_coef=np.float32(ppo.entropy_coef),
            value_coef=np.float32(ppo.value_coef),
        )

    def _params_of_actors(self) -> list[Any]:
        """The learner's parameters, as each actor's device takes them.

        Copies, where the learner goes on while they are in use: its next update consumes its own.
        """
        params = []
        for i, device in enumerate(self.placement.actors):
            of_learner = self.learner.params(i)
            if self._thread is not None:
                of_learner = self._copy(of_learner)
            params.append(self._functions[device.platform].params(jax.device_put(of_learner, device)))
        return params

    def collect(self, key: jax.Array) -> list[Rollout]:
        """One rollout, as a part for each local device; each group steps while the policy acts for the others."""
        length = self.config.ppo.rollout_length
        turns = [
            (actor, params) for shard, params in zip(self.actors, self._acting_params, strict=True) for actor in shard
        ]
        games = []  # step, return, length
        for actor, _ in turns:
            actor.begin(key)
        for t in range(length):
            for actor, params in turns:
                if t > 0:
                    games += [(t - 1, *game) for game in actor.receive(t - 1)]
                actor.choose(params)
                actor.send()
            self.first_step_at = self.first_step_at or time.time()
        for actor, params in turns:
            games += [(length - 1, *game) for game in actor.receive(length - 1)]
            actor.choose(params)  # for the bootstrap value; the action is drawn anew when the next rollout begins
        self.env_steps += sum_over_processes(sum(actor.transitions() for actor, _ in turns))
        games_everywhere = gather_rows(np.reshape(games, (-1, 3)))
        for _, episode_return, episode_length in sorted(games_everywhere.tolist(), key=itemgetter(0)):
            self.statistics.game_over(episode_return, int(episode_length))
        return [self._finish(*zip(*(actor.finish() for actor in shard), strict=True)) for shard in self.actors]

    def iterate(self) -> Metrics | None:
        """One rollout and one update.

        With `overlap = "none"` the update uses a rollout of the very parameters it changes, and its metrics are
        returned, still being computed. With `"update"` it is started and goes on during the next `iterate`, whose
        rollout is of the parameters that this update began with: one update of lag, never more. Its metrics are
        returned by that next `iterate`; the first one returns None.
        """
        hyper = self.hyperparameters()
        number = jax.device_put(np.uint32(self.updates), self.device)
        actor_key, update_key = self._split(self.key, number)
        rollouts = self.collect(actor_key)
        self.updates += 1
        self.optimizer_steps += self.config.ppo.epochs * self.config.num_minibatches
        if self._thread is None:
            metrics = self.learner.update(rollouts, hyper, update_key)
            self._acting_params = self._params_of_actors()
            return metrics
        metrics = self.settle()
        self._acting_params = self._params_of_actors()
        self._learning = self._thread.submit(self.learner.update, rollouts, hyper, update_key)
        return metrics

    def settle(self) -> Metrics | None:
        """Waits for the update that is under way, if one is, and returns its metrics."""
        learning, self._learning = self._learning, None
        return None if learning is None else learning.result()

    def arrays(self) -> dict[str, Any]:
        """What a checkpoint holds of arrays, on one device; `meta` is the rest."""
        return {"train_state": self.learner.parallel.shard(self.learner.state, 0), "key": self.key}

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
        """Waits for the learner and frees the emulators."""
        if self._thread is not None:
            self._thread.shutdown()
        for shard in self.actors:
            for actor in shard:
                actor.pool.close()
