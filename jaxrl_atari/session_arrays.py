"""The arrays of a session: their first values, those of a checkpoint, and their shapes, for a restore."""

from functools import partial
from typing import Any, NamedTuple

import jax
import scipy.linalg  # noqa: F401  (loads the LAPACK that JAX calls on a CPU, for `threadpool_limits` to find it)
from threadpoolctl import threadpool_limits

from jaxrl_atari.algorithm import Algorithm, TrainState
from jaxrl_atari.config import NetworkConfig, PPOConfig
from jaxrl_atari.keys import ALGORITHM_STREAM, NETWORK_STREAM, new_key
from jaxrl_atari.networks import Network, make_network
from jaxrl_atari.runs.checkpoints import ResumedCheckpoint
from jaxrl_atari.update import init_train_state


class SessionArrays(NamedTuple):
    """The arrays that a session starts from."""

    train_state: TrainState
    key: jax.Array  # all other keys derive from it
    lagged_params: Any = None  # the item `acting`; None before the first update, and without overlap
    evaluated_params: Any = None  # those of the evaluation that ran at the checkpoint; None if none did


def first_arrays(
    network: Network, algorithm: Algorithm, options: PPOConfig, *, seed: int, device: jax.Device
) -> SessionArrays:
    """The arrays of a session before its first update.

    They are computed on the CPU, so that a seed gives the same parameters on every device. The orthogonal
    initialiser calls LAPACK's QR, which rounds differently with another number of threads. That number depends on
    the machine, on `OMP_NUM_THREADS` (which Ray sets) and on `OPENBLAS_NUM_THREADS`. Here it is always one.

    Args:
        options: as `resolved_options` returns them.
        seed: seed of the session.
        device: where the arrays are put.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]), threadpool_limits(1, user_api="blas"):
        arrays = _first_arrays(network, algorithm, options, new_key(seed))
        jax.block_until_ready(arrays)  # before the limit ends
    return SessionArrays(**jax.device_put(arrays, device))


def resume_arrays(
    resumed: ResumedCheckpoint, network: Network, algorithm: Algorithm, options: PPOConfig, *, device: jax.Device
) -> SessionArrays:
    """The arrays of the checkpoint that a session resumes from.

    Args:
        options: as `resolved_options` returns them.
        device: where the arrays are put.

    Raises:
        UserError: the checkpoint holds another network or optimiser.
    """
    target = abstract_arrays(network, algorithm, options, device=device)
    arrays = SessionArrays(**resumed.to_devices("arrays", target))
    # The other items in memory, `acting` and `evaluation`, have the form of the parameters.
    params = {
        item: resumed.to_devices(item, arrays.train_state.params) for item in resumed.items if item != "arrays"
    }
    return arrays._replace(lagged_params=params.get("acting"), evaluated_params=params.get("evaluation"))


def abstract_arrays(
    network: Network, algorithm: Algorithm, options: PPOConfig, *, device: jax.Device
) -> dict[str, Any]:
    """Shapes, types and placement of the item `arrays` of a checkpoint: `train_state` and `key`."""
    key = jax.eval_shape(lambda: new_key(0))
    shapes = jax.eval_shape(partial(_first_arrays, network, algorithm, options), key)
    return _on_device(shapes, device)


def abstract_params(network: NetworkConfig, num_actions: int, device: jax.Device) -> dict[str, Any]:
    """The parameters of the network in `abstract_arrays`, without those that an algorithm adds: what plays.

    It needs no algorithm, so a run can be played by someone who lacks the code of its training.

    Raises:
        ConfigError: the network is not registered.
    """
    params = jax.eval_shape(lambda: make_network(network, num_actions).init(new_key(0)))
    return _on_device({"train_state": {"params": params}}, device)


def _on_device(shapes: Any, device: jax.Device) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


@partial(jax.jit, static_argnums=(0, 1))
def _first_arrays(network: Network, algorithm: Algorithm, options: PPOConfig, key: jax.Array) -> dict[str, Any]:
    params = network.init(jax.random.fold_in(key, NETWORK_STREAM))
    train_state = init_train_state(params, options, algorithm, jax.random.fold_in(key, ALGORITHM_STREAM))
    return {"train_state": train_state, "key": key}
