"""The arrays that a new session starts from: the train state before its first update, and its key."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import scipy.linalg  # noqa: F401  (loads the LAPACK that JAX calls on a CPU, for `threadpool_limits` to find it)
from threadpoolctl import threadpool_limits

from jaxrl_atari.algorithm import ALGORITHM_STREAM, NETWORK_STREAM, Algorithm, new_key
from jaxrl_atari.config import Config, PPOConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.policy import load_parameters
from jaxrl_atari.networks import Network
from jaxrl_atari.runs.arrays import array_shapes, digest_of, name_of
from jaxrl_atari.update import init_train_state


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


def abstract_arrays(
    network: Network, algorithm: Algorithm, options: PPOConfig, *, device: jax.Device
) -> dict[str, Any]:
    """Shapes, types and placement of what `first_arrays` returns."""
    key = jax.eval_shape(lambda: new_key(0))
    shapes = jax.eval_shape(partial(_first_arrays, network, algorithm, options), key, {})
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


@partial(jax.jit, static_argnums=(0, 1))
def _first_arrays(
    network: Network, algorithm: Algorithm, options: PPOConfig, key: jax.Array, initial: dict[str, jax.Array]
) -> dict[str, Any]:
    params = network.init(jax.random.fold_in(key, NETWORK_STREAM))
    params = jax.tree_util.tree_map_with_path(lambda path, x: initial.get(name_of(path), x), params)
    train_state = init_train_state(params, options, algorithm, jax.random.fold_in(key, ALGORITHM_STREAM))
    return {"train_state": train_state, "key": key}


def initial_parameters(config: Config, network: Network, say: Callable[[str], object]) -> dict[str, np.ndarray]:
    """The parameters of `init_from` that a network can start from: path -> array.

    Args:
        say: receives a line for the user that names the parameters that stay random.

    Raises:
        UserError: the source cannot be read, holds other parameters than when the run began, or none that fits.
    """
    assert config.init_from is not None
    found = load_parameters(config.init_from, config.init_checkpoint)
    if config.init_digest not in (None, digest_of(found)):
        raise UserError(f"{config.init_from}: holds other parameters than when the run began; restore them")
    own = array_shapes(jax.eval_shape(lambda: network.init(new_key(0))))
    shapes = array_shapes(found)
    taken = {path: found[path] for path in own if own[path] == shapes.get(path)}
    if not taken:
        raise UserError(
            f"{config.init_from}: none of its parameters fits {config.network.name}: {own} -> {shapes}"
        )
    new = ", ".join(f"{path} {own[path]}" for path in own if path not in taken) or "none"
    say(f"starts from {config.init_from}: {len(taken)} of {len(own)} arrays; random: {new}")
    return taken
