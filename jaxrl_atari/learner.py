"""Learning: the train state on the learner's devices, the compiled update, and the parameters to act with.

The loop of a session asks a `Learner` for the parameters to act with, and gives it the rollout that they played.
`DataParallel` runs the update on one device or on several, each with its part of the environments. `first_arrays`
makes the train state of a new session, and `try_update` an update without playing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg  # noqa: F401  (loads the LAPACK that JAX calls on a CPU, for `threadpool_limits` to find it)
from jax import lax
from threadpoolctl import threadpool_limits

from jaxrl_atari.algorithm import (
    ALGORITHM_STREAM,
    NETWORK_STREAM,
    Algorithm,
    Metrics,
    Rollout,
    Shard,
    TrainState,
    as_numbers,
    check_config,
    find_algorithm,
    key_of_data,
    new_key,
    resolved_options,
)
from jaxrl_atari.config import Config, PPOConfig
from jaxrl_atari.devices import Placement, check_placement, device_class, of_this_process
from jaxrl_atari.errors import InterfaceError
from jaxrl_atari.frames import STACK
from jaxrl_atari.hardware.distributed import gather
from jaxrl_atari.networks import Network, make_network
from jaxrl_atari.runs.arrays import name_of
from jaxrl_atari.update import init_train_state, update

PendingMetrics = Callable[[], dict[str, float]]
"""Waits for an update and returns its metrics."""


class Learner:
    """The train state, on one device or on several in parallel, and its updates.

    What `state` and `params` return is valid until the next `update`, which consumes it.

    Without overlap, the newest parameters act: the first step of a rollout waits for the update before it.

    With overlap (`overlap = "update"`), each update runs in a thread while the next rollout is collected. That
    rollout acts with the parameters that the update began with: one update of lag, never more. `update` and
    whatever reads the train state first wait for the update before. An error in an update is raised by whatever
    waits for it, and again by each later call, as the state may have been consumed.

    The thread is needed because of JAX on a CPU. A call of a compiled function returns before its result is there,
    but JAX computes the calls of one thread in order, even if they do not depend on each other: the first step of
    the policy would wait for the whole update. Calls of two threads are computed at the same time. (JAX 0.10.2,
    two cores: a small product, called just after a computation of 2.4 s, was ready after 2.4 s in the same thread,
    and after 1 ms in another. This has not been measured on a GPU.)

    Args:
        train_state: of a checkpoint, or the first one. It is copied, because an update consumes what it is given.
        overlap: run updates in a thread.
        lagged_params: with overlap, the parameters that act, from the item `acting` of a checkpoint
            (`checkpoint_items`). None: those of the train state, as before the first update.
        check: check in each update that the train state and the rollout are on the intended devices, and that the
            new state is equal on all of them (`devices.check`).
    """

    def __init__(
        self,
        placement: Placement,
        network: Network,
        algorithm: Algorithm,
        train_state: TrainState,
        *,
        overlap: bool = False,
        lagged_params: Any = None,
        check: bool = False,
    ):
        self._network = network
        self._actor_devices = placement.actors
        self._check = check
        self._parallel = DataParallel(placement.learner)
        self._update = compiled_update(placement.learner, network, algorithm)
        self._state = self._parallel.replicate(_copy(train_state))  # in the form of `DataParallel`
        self._has_updated = False
        self._thread = ThreadPoolExecutor(1, "learner") if overlap else None
        self._newest_update: Future[dict[str, float]] | None = None  # with overlap; its result is its metrics
        # With overlap, the parameters from before the newest update, on the learner's first local device: a copy,
        # because the update consumes the originals.
        self._lagged_params = _copy(self.params) if overlap and lagged_params is None else lagged_params

    def _wait(self) -> None:
        """Waits for the newest update. Raises the error of an update that failed."""
        if self._newest_update is not None:
            self._newest_update.result()

    @property
    def state(self) -> TrainState:
        """The train state after the newest update, on the learner's first local device."""
        self._wait()
        return self._parallel.local_part(self._state, 0)

    @property
    def params(self) -> Any:
        """The parameters of `state`. On several devices, this copies them alone, and not the whole state."""
        self._wait()
        return self._parallel.local_part(self._state.params, 0)

    def parameter_norm(self) -> float:
        """Global L2 norm of the parameters; not finite if one of them is not."""
        return float(jax.device_get(_norm(self.params)))

    def acting_params(self) -> list[Any]:
        """What each actor acts with in the next rollout: on its device, in the form of `Network.for_acting`.

        It is valid until the next `update`; with overlap always. With overlap, it waits for nothing.
        """
        count = len(self._actor_devices)
        if self._thread is None:
            params = [self._parallel.local_part(self._state.params, index) for index in range(count)]
        else:
            params = [self._lagged_params] * count
        moved = [jax.device_put(*each) for each in zip(params, self._actor_devices, strict=True)]
        return [self._network.for_acting(each) for each in moved]

    def update(self, rollouts: Sequence[Rollout], options: PPOConfig, key: jax.Array) -> PendingMetrics:
        """Starts the update on a rollout.

        Args:
            rollouts: the part of each local device.
            options: as `update.current_options` returns it: scheduled options have their values of this update.
            key: for its minibatches, and for what the algorithm draws.

        Returns:
            A function that waits for the update and returns its metrics.

        Raises:
            InterfaceError: the train state differs from device to device; or as `update.update`, when it is
                compiled.
        """
        if self._thread is None:
            return self._learn(rollouts, options, key)
        self._wait()
        self._lagged_params = _copy(self.params)
        # A transfer guard holds for one thread, so the caller's is passed on.
        guard = jax.config.jax_transfer_guard  # pyright: ignore[reportAttributeAccessIssue]

        def run() -> dict[str, float]:
            with jax.transfer_guard(guard):
                return self._learn(rollouts, options, key)()

        self._newest_update = self._thread.submit(run)
        return self._newest_update.result

    def _learn(self, rollouts: Sequence[Rollout], options: PPOConfig, key: jax.Array) -> PendingMetrics:
        """`update`, in the thread that calls it."""
        rollout = self._parallel.assemble(rollouts)
        options, key = self._parallel.replicate((options, key))
        if self._check:
            arrays = {"train_state": self._state, "rollout": rollout}
            check_placement("learning", arrays, self._parallel.local_devices)
        self._state, metrics = self._update(self._state, rollout, options, key=key)
        if self._check or not self._has_updated:
            self.check_state()
        self._has_updated = True
        own = self._parallel.local_part(metrics, 0)
        return lambda: {name: float(value) for name, value in jax.device_get(own).items()}

    def check_state(self) -> None:
        """Checks that all devices have the same train state. All processes must call it, while no update runs.

        `update` calls it after the first update and, with `check`, after each one. `Session.save` does it too,
        because a checkpoint keeps the state of one device alone. On several devices, it waits for the arrays.

        All devices start from the same state, and gradients are means over all of them, so only `prepare` can make
        the state differ. A difference in second moments, which are often too small for `np.allclose`, is found
        once the parameters have followed it.

        Raises:
            InterfaceError: a leaf differs.
        """
        leaf = self._parallel.differing_leaf(self._state)
        if leaf is not None:
            found, expected = "another value on each device", "the same on all devices"
            hint = "compute means over the rollout with mean(x) and mean.moments(x)"
            raise InterfaceError(f"{leaf.removeprefix('.')} of prepare", found, expected, hint)

    def checkpoint_items(self) -> dict[str, Any]:
        """The items of a checkpoint that continue this learner, besides `state`: name -> pytree."""
        return {} if self._thread is None else {"acting": self._lagged_params}

    def close(self) -> None:
        """Waits for a running update, and ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()


# --- Compiled functions ------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def compiled_update(
    devices: tuple[jax.Device, ...], network: Network, algorithm: Algorithm
) -> Callable[..., tuple[TrainState, Metrics]]:
    """`update.update` on these devices: it consumes the state, and all trees have the form of `DataParallel`.

    The sessions of a process share it, so that it is compiled once.
    """
    function = partial(update, apply=network.apply, algorithm=algorithm)
    return DataParallel(devices).compile(function)


_copy = jax.jit(partial(jax.tree.map, jnp.copy))
_norm = jax.jit(optax.tree.norm)


# --- Several devices ---------------------------------------------------------------------------------------------


AXIS = "devices"


class DataParallel:
    """Runs one program on one or several devices, each with its part of the data.

    On one device it uses `jit`, and arrays stay as they are. On several it uses `pmap`, which JAX builds on
    `jit(shard_map)`: every array then has a leading axis, with one row per device. `assemble` and `replicate` put
    data on the devices in this form, and `local_part` takes out what lies on one of them.

    JAX only maintains `pmap`, and recommends `jit(shard_map)`. A change to that would touch the leading axis (in
    this class alone), how a key gets to the devices (`compile`), `differing_leaf`, and the mean of gradients
    (`update.mean_over_devices`).
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self.devices = tuple(devices)
        self.local_devices = of_this_process(self.devices)
        self._is_single = len(self.devices) == 1
        mesh = jax.sharding.Mesh(np.asarray(self.devices), (AXIS,))
        # One row of the leading axis for each device.
        self._rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))

    def compile(self, function: Callable) -> Callable:
        """Compiles a function that takes arrays, of which it consumes the first, and the keyword `key`, a random
        key.

        On several devices, the function also gets the keyword `shard`: a `Shard`, its part of the data.
        """
        if self._is_single:
            return jax.jit(function, donate_argnums=0)

        def on_each(*args: Any, key: jax.Array) -> Any:
            shard = Shard(lax.axis_index(AXIS), len(self.devices), partial(lax.psum, axis_name=AXIS))
            return function(*args, key=key_of_data(key), shard=shard)  # `assemble` has made integers of the key

        return jax.pmap(on_each, axis_name=AXIS, devices=self.devices, donate_argnums=0)

    def assemble(self, parts: Sequence[Any]) -> Any:
        """Joins trees of arrays, one for each local device, into a single tree, and moves each to its device.

        On several devices, random keys become arrays of integers: across processes, `pmap` accepts no typed keys.
        """
        moved = [jax.device_put(part, device) for part, device in zip(parts, self.local_devices, strict=True)]
        if self._is_single:
            return moved[0]

        def join(*arrays: jax.Array) -> jax.Array:
            if jnp.issubdtype(arrays[0].dtype, jax.dtypes.prng_key):
                arrays = tuple(map(jax.random.key_data, arrays))
            shape = (len(self.devices), *arrays[0].shape)
            return jax.make_array_from_single_device_arrays(shape, self._rows, [array[None] for array in arrays])

        return jax.tree.map(join, *moved)

    def replicate(self, tree: Any) -> Any:
        """A tree with the same values on all devices."""
        return self.assemble([tree] * len(self.local_devices))

    def local_part(self, tree: Any, index: int) -> Any:
        """The part of a tree that lies on `local_devices[index]`, without the leading axis."""
        if self._is_single:
            return tree
        device = self.local_devices[index]

        def row(x: jax.Array) -> jax.Array:
            return next(shard.data for shard in x.addressable_shards if shard.device == device).squeeze(0)

        return jax.tree.map(row, tree)

    def differing_leaf(self, tree: Any) -> str | None:
        """The path of the first leaf that differs from device to device; None if all are equal.

        Devices may round differently, so floats are compared with `np.allclose`. All processes must call it, and
        each gets the same answer.
        """
        if self._is_single:
            return None
        for path, x in jax.tree.leaves_with_path(tree):
            own = np.concatenate(jax.device_get([shard.data for shard in x.addressable_shards]))
            first, *others = gather(own).reshape(-1, *own.shape[1:])  # one for each device of all processes
            same = np.allclose if np.issubdtype(own.dtype, np.floating) else np.array_equal
            if not all(same(first, other, equal_nan=True) for other in others):
                return jax.tree_util.keystr(path)
        return None


# --- The first arrays of a session -------------------------------------------------------------------------------


def first_arrays(
    network: Network,
    algorithm: Algorithm,
    options: PPOConfig,
    *,
    seed: int,
    device: jax.Device,
    initial: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """The item `arrays` of a checkpoint before the first update: `train_state`, and `key`, the source of all keys.

    They are computed on the CPU, so that a seed gives the same parameters on every device. The orthogonal
    initialiser calls LAPACK's QR, which rounds differently with another number of threads. That number depends on
    the machine, on `OMP_NUM_THREADS` (which Ray sets) and on `OPENBLAS_NUM_THREADS`. Here it is always one.

    Args:
        options: as `resolved_options` returns them.
        seed: seed of the session.
        device: where the arrays are put.
        initial: parameters that replace random ones, by their paths.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]), threadpool_limits(1, user_api="blas"):
        arrays = _first_arrays(network, algorithm, options, new_key(seed), dict(initial or {}))
        jax.block_until_ready(arrays)  # before the limit ends
    return jax.device_put(arrays, device)


def abstract_arrays(network: Network, algorithm: Algorithm, options: PPOConfig) -> dict[str, Any]:
    """Shapes and types of what `first_arrays` returns."""
    key = jax.eval_shape(lambda: new_key(0))
    return jax.eval_shape(partial(_first_arrays, network, algorithm, options), key, {})


@partial(jax.jit, static_argnums=(0, 1))
def _first_arrays(
    network: Network, algorithm: Algorithm, options: PPOConfig, key: jax.Array, initial: dict[str, jax.Array]
) -> dict[str, Any]:
    params = network.init(jax.random.fold_in(key, NETWORK_STREAM))
    params = jax.tree_util.tree_map_with_path(lambda path, x: initial.get(name_of(path), x), params)
    train_state = init_train_state(params, options, algorithm, jax.random.fold_in(key, ALGORITHM_STREAM))
    return {"train_state": train_state, "key": key}


# --- An update on random numbers ---------------------------------------------------------------------------------


def try_update(config: Config, num_actions: int = 6) -> tuple[TrainState, Metrics]:
    """One update of a config's algorithm on a random rollout, to look at before a training.

    It is compiled and runs on JAX's default device. The same config gives the same numbers.

    Args:
        num_actions: of the network. Nothing is played, so it need not be that of the game.

    Returns:
        The state after the update, and the metrics, as `update.update` returns them.

    Raises:
        ConfigError: there is no such algorithm or network, or the minibatches do not suit the rollout.
        InterfaceError: one of them breaks a rule of its interface.
    """
    check_config(config, devices=1)
    key = new_key(config.seed)
    algorithm = find_algorithm(config.algorithm)
    (device,) = key.devices()  # JAX's default device
    network = make_network(config.network, num_actions, device_class(device))
    state, rollout, options, update_key = update_arguments(
        key, network, algorithm, resolved_options(config), num_envs=config.env.num_envs
    )
    return compiled_update((device,), network, algorithm)(state, rollout, options, key=update_key)


def update_arguments(
    key: jax.Array, network: Network, algorithm: Algorithm, options: PPOConfig, *, num_envs: int
) -> tuple[TrainState, Rollout, PPOConfig, jax.Array]:
    """The arguments of an update: a first state, a random rollout, the options, and a key."""
    params_key, init_key, rollout_key, update_key = jax.random.split(key, 4)
    state = init_train_state(network.init(params_key), options, algorithm, init_key)
    rollout = random_rollout(rollout_key, network, length=options.rollout_length, num_envs=num_envs)
    return state, rollout, as_numbers(options), update_key


def random_rollout(key: jax.Array, network: Network, *, length: int, num_envs: int) -> Rollout:
    """A rollout of random frames, actions, values and rewards.

    Games are lost at random; the step after a lost game is an auto-reset step.

    Args:
        network: the network that learns from it.
        length: T, steps of each environment.
    """
    frame_key, end_key, value_key, reward_key, action_key = jax.random.split(key, 5)
    steps = (length, num_envs)
    num_actions = network.module.num_actions
    ends = jax.random.bernoulli(end_key, 0.05, steps)
    terminated = ends & ~_one_later(ends)
    auto_reset = _one_later(terminated)
    first = jnp.concatenate([jnp.ones((1, num_envs), bool), auto_reset])  # steps 0 .. T that start a game
    t = jnp.arange(length + 1)[:, None]
    age = jnp.minimum(t - lax.cummax(jnp.where(first, t, 0)), STACK - 1)
    value = jax.random.normal(value_key, (length + 1, num_envs))
    return Rollout(
        frames=jax.random.bits(frame_key, (length + STACK, num_envs, *network.frame_shape), jnp.uint8),
        age=age,
        action=jax.random.randint(action_key, steps, 0, num_actions),
        log_prob=jnp.full(steps, -math.log(num_actions), jnp.float32),
        value=value[:-1],
        reward=jax.random.normal(reward_key, steps),
        terminated=terminated,
        truncated=jnp.zeros(steps, bool),
        weight=(~auto_reset).astype(jnp.float32),
        bootstrap_value=value[-1],
        carry=network.initial_carry(num_envs),
    )


def _one_later(mark: jax.Array) -> jax.Array:
    """Marks [T, B] moved to the step after; step 0 has none."""
    return jnp.pad(mark[:-1], ((1, 0), (0, 0)))
