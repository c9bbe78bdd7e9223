"""Learning: the train state on the learner's devices, the compiled update, and the parameters to act with.

The loop of a session asks a `Learner` for the parameters to act with, and gives it the rollout that they played:

    Learner                     act with the newest parameters; the update runs on the devices, and JAX returns at
                                once, so only the next rollout's first step waits for it
    OverlappedLearner           `overlap = "update"`: act with those from before the running update
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jaxrl_atari import ppo
from jaxrl_atari.config import Config, PPOConfig
from jaxrl_atari.devices import DataParallel, Networks, Placement, check_placement
from jaxrl_atari.errors import require
from jaxrl_atari.fast.forms import Network
from jaxrl_atari.imports import import_inherited
from jaxrl_atari.minibatches import Rollout
from jaxrl_atari.networks import init_params, initial_carry, is_recurrent, make_module
from jaxrl_atari.registry import ALGORITHMS
from jaxrl_atari.runs.session_log import ReadMetrics


class Learner:
    """The train state, on one device or on several in parallel, and its update.

    Args:
        arrays: `train_state`, and what else a checkpoint holds; see `first_arrays`. They are copied.
    """

    def __init__(self, config: Config, placement: Placement, networks: Networks, arrays: dict[str, Any]):
        self._acting_network = networks.acting
        self.compute_dtype = networks.learning.dtype
        self._actors = placement.actors
        self._check = config.devices.check
        self._parallel = DataParallel(placement.learner)
        self._update = compiled_update(placement.learner, networks.learning, ALGORITHMS.get(config.algorithm))
        self._state = self._parallel.replicate(_copy(arrays["train_state"]))  # an update consumes what it is given
        self.acting: Any = None
        """Parameters that the next rollout acts with, if these are not `state.params`: a checkpoint needs both."""

    @property
    def state(self) -> ppo.TrainState:
        """The train state after the newest update, on the learner's first local device.

        It is valid until the next `update`, which consumes it.
        """
        self.wait()
        return self._parallel.shard(self._state, 0)

    def update(self, rollouts: Sequence[Rollout], config: PPOConfig, key: jax.Array) -> ReadMetrics:
        """Starts the update on a rollout.

        Args:
            rollouts: the part of each local device.
            config: with the learning rate of this update.
            key: for its minibatches, and for what the algorithm draws.

        Returns:
            A function that waits for the update and returns its metrics.
        """
        rollout = self._parallel.assemble(rollouts)
        config, key = self._parallel.replicate((config, key))
        if self._check:
            arrays = {"train_state": self._state, "rollout": rollout}
            check_placement("learning", arrays, self._parallel.local_devices)
        self._state, metrics = self._update(self._state, rollout, config, key)
        own = self._parallel.shard(metrics, 0)
        return lambda: {name: float(value) for name, value in jax.device_get(own).items()}

    def parameter_norm(self) -> float:
        """Global L2 norm of the parameters; inf or NaN if one of them is."""
        return float(jax.device_get(_norm(self.state.params)))

    def acting_params(self) -> list[Any]:
        """What each actor acts with in the next rollout: on its device, in the form of `Network.acting_params`."""
        moved = map(jax.device_put, self._params_of_actors(), self._actors)
        return [self._acting_network.acting_params(params) for params in moved]

    def _params_of_actors(self) -> list[Any]:
        """The parameters that each actor acts with, on any device."""
        return [self._parallel.shard(self._state.params, i) for i in range(len(self._actors))]

    def wait(self) -> None:
        """Waits until an update in the background has ended, if there is one."""

    def close(self) -> None:
        """Frees what the learner holds besides arrays."""


_copy = jax.jit(partial(jax.tree.map, jnp.copy))
_norm = jax.jit(optax.tree.norm)


@lru_cache(maxsize=8)
def compiled_update(devices: tuple[jax.Device, ...], network: Network, algorithm: ppo.Algorithm) -> Callable:
    """`ppo.update` on these devices: state, rollout, config, key -> state, metrics. The state is consumed.

    The sessions of a process share it, so that it is compiled once.
    """
    function = partial(ppo.update, apply=network.apply, algorithm=algorithm)
    return DataParallel(devices).compile(function, donate_argnums=[0])


class OverlappedLearner(Learner):
    """A learner whose update runs in a thread while the next rollout is collected (`overlap = "update"`).

    That rollout acts with `acting`, the parameters that the update began with: one update of lag, never more.

    Args:
        arrays: also `acting`, where they are those of a checkpoint.
    """

    def __init__(self, config: Config, placement: Placement, networks: Networks, arrays: dict[str, Any]):
        self._thread = ThreadPoolExecutor(1, "learner")
        self._running: Future[dict[str, float]] | None = None
        self._has_compiled = False
        super().__init__(config, placement, networks, arrays)
        self.acting = arrays.get("acting")
        if self.acting is None:  # before the first update both are the same
            self.acting = _copy(self.state.params)

    def update(self, rollouts: Sequence[Rollout], config: PPOConfig, key: jax.Array) -> ReadMetrics:
        """Starts the update on a rollout, once the one before has ended."""
        self.acting = _copy(self.state.params)  # the update consumes the originals
        self._running = self._thread.submit(self._update_in_thread, rollouts, config, key)
        return self._running.result

    def _update_in_thread(self, *arguments: Any) -> dict[str, float]:
        # A transfer guard holds for one thread, so this one has its own.
        with jax.transfer_guard("disallow" if self._check and self._has_compiled else "allow"):
            metrics = super().update(*arguments)()
        self._has_compiled = True
        return metrics

    def _params_of_actors(self) -> list[Any]:
        return [self.acting] * len(self._actors)

    def wait(self) -> None:
        """Waits until the running update has ended."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def close(self) -> None:
        self._thread.shutdown()


def check_update(config: Config, devices: int = 1) -> None:
    """Checks that the network and the algorithm of a config exist, and that minibatches suit a recurrent network.

    Args:
        devices: number of devices that share the learning.

    Raises:
        ConfigError: naming the field.
    """
    import_inherited()
    ALGORITHMS.get(config.algorithm)
    module = make_module(config.network, 1, jnp.float32)
    length = config.ppo.rollout_length
    fits = config.ppo.minibatch_size % (length * devices) == 0
    require(
        fits or not is_recurrent(initial_carry(module, 1)),
        "ppo.minibatch_size", config.ppo.minibatch_size,
        f"a multiple of ppo.rollout_length x devices = {length} x {devices}",
        f"{config.network.name} is recurrent and learns from whole environments",
    )  # fmt: skip


def first_arrays(config: Config, num_actions: int, seed: int, device: jax.Device) -> dict[str, Any]:
    """The arrays of a session before its first update: `train_state`, and `key` for its actions and minibatches.

    They are computed on the CPU, so that a seed gives the same parameters on every device.

    Args:
        num_actions: of the game.
        seed: of the session.
        device: where the arrays are put.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        key = jax.random.key(seed, impl=ppo.KEYS)
        arrays = _first_arrays(*_module_and_algorithm(config, num_actions), config.ppo, key)
    return jax.device_put(arrays, device)


def abstract_arrays(config: Config, num_actions: int, device: jax.Device) -> dict[str, Any]:
    """Shapes, types and placement of `first_arrays`: the target of a restore."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=ppo.KEYS))
    shapes = jax.eval_shape(partial(_first_arrays, *_module_and_algorithm(config, num_actions), config.ppo), key)
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def _module_and_algorithm(config: Config, num_actions: int) -> tuple[nn.Module, ppo.Algorithm]:
    return make_module(config.network, num_actions, jnp.float32), ALGORITHMS.get(config.algorithm)


@partial(jax.jit, static_argnums=(0, 1))
def _first_arrays(
    module: nn.Module, algorithm: ppo.Algorithm, config: PPOConfig, key: jax.Array
) -> dict[str, Any]:
    params = init_params(module, jax.random.fold_in(key, 2**31))
    algorithm_key = jax.random.fold_in(key, 2**31 + 2)  # an evaluation uses 2**31 + 1
    return {"train_state": ppo.init_train_state(params, config, algorithm, algorithm_key), "key": key}
