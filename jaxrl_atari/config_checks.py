"""The checks of a config that need the network and the algorithm that it names."""

import jax

from jaxrl_atari.algorithm import resolved_options
from jaxrl_atari.config import Config
from jaxrl_atari.errors import require
from jaxrl_atari.networks import Network, Outputs, is_recurrent, make_network


def check_names_and_minibatches(config: Config, devices: int = 1) -> None:
    """Checks that network, algorithm and coefficients of a config exist, and that its options suit the network.

    It does not start JAX's back end.

    Args:
        devices: number of devices that share the learning.

    Raises:
        ConfigError: naming the field.
    """
    resolved_options(config)
    network = make_network(config.network, num_actions=1)
    length = config.ppo.rollout_length
    # Abstract, as all that follows: an array would start JAX's back end, before `limit_jax`.
    has_memory = is_recurrent(jax.eval_shape(lambda: network.initial_carry(1)))
    require(
        config.ppo.minibatch_size % (length * devices) == 0 or not has_memory,
        "ppo.minibatch_size",
        config.ppo.minibatch_size,
        expected=f"a multiple of ppo.rollout_length x devices = {length} x {devices}",
        hint=f"{config.network.name} is recurrent and learns from whole environments",
    )
    if config.devices.deterministic and config.devices.may_use_gpus:
        require(
            not _has_max_pooling(network),
            "devices.deterministic",
            True,
            expected=f"false with {config.network.name}",
            hint="XLA has no deterministic gradient of max-pooling on a GPU;"
            " with devices.gpu = false none is needed",
        )


def _has_max_pooling(network: Network) -> bool:
    """Whether the program of a network takes the maximum over windows."""

    def outputs(key: jax.Array) -> Outputs:
        return network.apply(network.init(key), network.empty_observation())

    program = jax.make_jaxpr(outputs)(jax.eval_shape(lambda: jax.random.key(0)))
    return "reduce_window_max" in str(program)
