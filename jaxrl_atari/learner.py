"""Learning: the train state on the learner's devices, the compiled update, and the parameters to act with."""

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
from jaxrl_atari.networks import init_params, initial_carry, is_recurrent, make_module
from jaxrl_atari.registry import ALGORITHMS
from jaxrl_atari.runs.session_log import ReadMetrics


class Learner:
    """The train state, on one device or on several in parallel, and its update.

    Args:
        arrays: arrays of a checkpoint, or `first_arrays`. The first update consumes `train_state`.
    """

    acting: Any = None
    """The parameters that the next rollout acts with; None: the newest."""

    def __init__(self, config: Config, placement: Placement, networks: Networks, arrays: dict[str, Any]):
        self._acting_network = networks.acting
        self.compute_dtype = networks.learning.dtype
        self._actors = placement.actors
        self._check = config.devices.check
        self._parallel = DataParallel(placement.learner)
        self._update = compiled_update(placement.learner, networks.learning, ALGORITHMS.get(config.algorithm))
        self._state = self._parallel.replicate(arrays["train_state"])

    @property
    def state(self) -> ppo.TrainState:
        """The train state after the newest update, on the learner's first local device. The next update consumes
        it."""
        self.wait()
        return self._parallel.shard(self._state, 0)

    def update(self, rollouts: Sequence[ppo.Rollout], config: PPOConfig, key: jax.Array) -> ReadMetrics:
        """Starts the update on a rollout, one part per local device.

        Args:
            config: with the learning rate of this update.

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
        """The parameters for each actor, on its device."""
        own = (jax.device_put(self._params(i), device) for i, device in enumerate(self._actors))
        return [self._acting_network.acting_params(params) for params in own]

    def _params(self, i: int) -> Any:
        """What actor i acts with."""
        return self._parallel.shard(self._state.params, i)

    def wait(self) -> None:
        """Waits until an update in the background has ended, if there is one."""

    def close(self) -> None:
        """Frees what the learner holds besides arrays."""


_copy = jax.jit(partial(jax.tree.map, jnp.copy))
_norm = jax.jit(optax.tree.norm)


@lru_cache(maxsize=8)
def compiled_update(devices: tuple[jax.Device, ...], network: Network, algorithm: ppo.Algorithm) -> Callable:
    """`ppo.update` on these devices. The sessions of a process share it, so that it is compiled once."""
    function = partial(ppo.update, apply=network.apply, algorithm=algorithm)
    return DataParallel(devices).compile(function, donate_argnums=[0])


class OverlappedLearner(Learner):
    """A learner whose update runs in a thread while the next rollout is collected (`overlap = "update"`).

    That rollout acts with the parameters that the update began with: one update of lag, never more. `acting` in
    the arrays of a checkpoint are those before the newest update.
    """

    def __init__(self, config: Config, placement: Placement, networks: Networks, arrays: dict[str, Any]):
        self._thread = ThreadPoolExecutor(1, "learner")
        self._running: Future[dict[str, float]] | None = None
        self._has_compiled = False
        super().__init__(config, placement, networks, arrays)
        self.acting = arrays.get("acting") or _copy(self.state.params)

    def update(self, rollouts: Sequence[ppo.Rollout], config: PPOConfig, key: jax.Array) -> ReadMetrics:
        """Starts the update on a rollout, once the one before has ended."""
        self.acting = _copy(self.state.params)  # the update consumes the originals
        self._running = self._thread.submit(self._update_in_thread, rollouts, config, key)
        return self._running.result

    def _update_in_thread(self, *arguments: Any) -> dict[str, float]:
        # A thread has its own.
        with jax.transfer_guard("disallow" if self._check and self._has_compiled else "allow"):
            metrics = super().update(*arguments)()
        self._has_compiled = True
        return metrics

    def _params(self, i: int) -> Any:
        return self.acting

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
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        arrays = _first_arrays(*_what_learns(config, num_actions), config.ppo, jax.random.key(seed, impl=ppo.KEYS))
    return jax.device_put(arrays, device)


def abstract_arrays(config: Config, num_actions: int, device: jax.Device) -> dict[str, Any]:
    """Shapes, types and placement of `first_arrays`: the target of a restore."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=ppo.KEYS))
    shapes = jax.eval_shape(partial(_first_arrays, *_what_learns(config, num_actions), config.ppo), key)
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def _what_learns(config: Config, num_actions: int) -> tuple[nn.Module, ppo.Algorithm]:
    return make_module(config.network, num_actions, jnp.float32), ALGORITHMS.get(config.algorithm)


@partial(jax.jit, static_argnums=(0, 1))
def _first_arrays(
    module: nn.Module, algorithm: ppo.Algorithm, config: PPOConfig, key: jax.Array
) -> dict[str, Any]:
    params = init_params(module, jax.random.fold_in(key, 2**31))
    algorithm_key = jax.random.fold_in(key, 2**31 + 2)  # an evaluation uses 2**31 + 1
    return {"train_state": ppo.init_train_state(params, config, algorithm, algorithm_key), "key": key}
