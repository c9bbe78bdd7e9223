"""The interface of algorithms: four pure functions (`Algorithm`), and their data.

The algorithms themselves are in `ppo.py` and `algorithms/`; `update.py` runs them. `register_algorithm` gives an
algorithm a name, which a config may choose. The word `config` stands for a `Config` or a part of one, as a run was
given it. The word `options` stands for its part `ppo` in force (`resolved_options`): a value that the config
leaves to the game or to the algorithm is set.

Axes are [T, B]: T steps of B environments. A sample is one step of one environment.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import FrozenDict

from jaxrl_atari.config import TRACED_OPTIONS, Config, PPOConfig
from jaxrl_atari.errors import UNREGISTERED, InterfaceError, require, require_interface
from jaxrl_atari.networks import Apply, Observation, make_network

# --- Data --------------------------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """T steps of B environments.

    Each frame is stored once: step t saw the stack that ends at `frames[t + 3]` (`frames.py`). A step of
    weight 0 is an auto-reset step: the emulator ignored its action, because the game before it had just ended.
    """

    frames: jax.Array
    """uint8 [T + 4, B, *frame]. The last row is the newest frame of step T, for the bootstrap value."""
    age: jax.Array
    """int32 [T + 1, B]: number of earlier frames of the same game, at most 3. The last row is for step T."""
    action: jax.Array
    """int32 [T, B]."""
    log_prob: jax.Array
    """float32 [T, B]: log pi_old(action)."""
    value: jax.Array
    """float32 [T, B]: V_old."""
    reward: jax.Array
    """float32 [T, B]: clipped to [-1, 1], unless `env.clip_rewards` is false."""
    terminated: jax.Array
    """bool [T, B]: there is no value beyond this step, because the game was lost; or because a life was lost, with
    `env.life_loss_terminal`; or because the game was cut off, with `ppo.truncation_is_terminal`."""
    truncated: jax.Array
    """bool [T, B]: the game was cut off. The value beyond this step counts, but the rewards beyond it do not."""
    weight: jax.Array
    """float32 [T, B]: 1, or 0 for an auto-reset step (1 with `ppo.learn_from_auto_resets`)."""
    bootstrap_value: jax.Array
    """float32 [B]: V_old of the observation of step T, the first step after the rollout."""
    carry: Any = ()
    """[B, ...]: the memory of a recurrent network before step 0."""


@dataclass(frozen=True)
class Shard:
    """One device's part of the data if several devices share them; by default, all data."""

    index: jax.typing.ArrayLike = 0
    """Number of this device."""
    count: int = 1
    """Number of devices."""
    sum_over_devices: Callable[[Any], Any] = lambda tree: tree
    """Tree of arrays -> its sum over all devices."""


ONE_DEVICE = Shard()


@flax.struct.dataclass
class Mean:
    """The mean over the samples that count, on all devices: `mean(x)`, for x of the shape of `weight`.

    That shape is [T, B] for a rollout and [N] for a minibatch, so sum other axes of x first. Auto-reset steps do
    not count, unless `ppo.learn_from_auto_resets` is on. In samples that do not count, x may have any value, even
    infinity or NaN. If no sample counts, the mean is 0.

    Gradients need more care, because JAX multiplies the derivative of a sample that does not count by 0: an
    infinite derivative makes the gradient NaN. For example, y may be 0 in such a sample:

        mean(jnp.log(y))                                     right value, but its gradient is NaN
        mean(jnp.log(jnp.where(mean.weight > 0, y, 1.0)))    right value and right gradient
    """

    weight: jax.Array
    """1, or 0 where a sample does not count."""
    total: jax.Array
    """Sum of the weights on all devices, at least 1."""
    sum_over_devices: Callable[[Any], Any] = flax.struct.field(pytree_node=False)
    devices: int = flax.struct.field(pytree_node=False)
    """Number of devices that share the samples, for `update.apply_to_rollout`. It does not change the mean."""

    @classmethod
    def over(cls, weight: jax.Array, shard: Shard = ONE_DEVICE) -> "Mean":
        """The mean with these weights, float32 of any shape, each 0 or 1."""
        total = jnp.maximum(shard.sum_over_devices(jnp.sum(weight)), 1.0)
        return cls(weight, total, shard.sum_over_devices, shard.count)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The mean of x, of the shape of `weight` -> [].

        Raises:
            InterfaceError: x has another shape. `moments` and `normalize` raise it too.
        """
        # This divides each weight by the total, whereas `moments` divides the sum. The two round differently, so
        # unifying them would change the last bits of every run.
        x = self._counting(x)
        return self.sum_over_devices(jnp.sum(self.weight / self.total * x))

    def moments(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of x, of the shape of `weight` -> [] and []."""
        x = self._counting(x)
        mean = self.sum_over_devices(jnp.sum(self.weight * x)) / self.total
        return mean, self.sum_over_devices(jnp.sum(self.weight * jnp.square(x - mean))) / self.total

    def normalize(self, x: jax.Array, unbiased: bool = False) -> jax.Array:
        """x with mean 0 and standard deviation 1: (x - mean) / (std + 1e-8).

        Args:
            x: of the shape of `weight`. Samples that do not count are normalised with the same mean and deviation.
            unbiased: std = sqrt(sum((x - mean)^2) / (N - 1)) instead of / N, as in `torch.Tensor.std`.
        """
        mean, variance = self.moments(x)
        if unbiased:
            variance = variance * (self.total / jnp.maximum(self.total - 1.0, 1.0))
        return (x - mean) / (jnp.sqrt(variance) + 1e-8)

    def _counting(self, x: jax.Array) -> jax.Array:
        """x, with 0 for samples that do not count, because their weight 0 times infinity would be NaN."""
        shape, expected = jnp.shape(x), list(self.weight.shape)
        hint = "sum the other axes of x first"
        require_interface(
            shape == self.weight.shape,
            "shape of x in mean(x)",
            list(shape),
            f"{expected}, one number per sample",
            hint,
        )
        return jnp.where(self.weight > 0, x, 0.0)


class Minibatch(NamedTuple):
    """The data of the loss in one gradient step: N samples. Each device has its part of them."""

    observation: Observation
    """The input of the network."""
    samples: Any
    """The samples that `Algorithm.prepare` returned, [N, ...]. PPO's are `ppo.Samples`."""
    mean: Mean
    """The mean over the minibatch, of x [N]."""
    key: jax.Array
    """A random key for the loss. It differs from gradient step to gradient step, and from device to device."""
    extra: Any = ()
    """`TrainState.extra`, as `prepare` returned it."""


# --- The state and the functions ---------------------------------------------------------------------------------

Metrics = dict[str, jax.Array]
"""Name -> a number, []. A new name is logged in `metrics.csv` and TensorBoard without an entry anywhere.

The name must not be the name of another metric (`loss`, `gradient_norm` and `skipped_steps` are taken) or of
another column of `metrics.csv`. A value that is not finite ends the training; the last checkpoint is kept.
"""


class TrainState(flax.struct.PyTreeNode):
    """State that an update replaces and a checkpoint keeps. It is equal on all devices."""

    params: Any
    """All parameters that the loss trains."""
    opt_state: optax.OptState
    """State of the optimiser."""
    optimizer_steps: jax.Array
    """int32 []: gradient steps so far."""
    extra: Any = ()
    """Further state of an algorithm, such as running statistics: any pytree of arrays, but no random keys."""


class Algorithm(NamedTuple):
    """The parts of an update that an idea replaces, as in `PPO._replace(loss=my_loss)`. docs/idea.md has examples.

    The four functions are pure. JAX traces all of them, so they use no Python `if` on an array, no `float(x)` and
    no NumPy function. Load a fixed array, such as pretrained weights from a file, outside them. `prepare`, `loss`
    and `optimizer` become part of the compiled update. `init` and the optimiser's own `init` are compiled too, and
    run once, for the first state. A resume only traces them, to know the shapes.

    These arguments are common to several functions:

        apply      The network: `networks.Apply`. It returns `Outputs`.
        key        A random key, the same on all devices.
        options    `PPOConfig` as `resolved_options` returns it. Options marked `TRACED` in
                   `config.py`, such as `gamma` and `coefficients`, are traced numbers. They are data of the
                   compiled update, so another value compiles nothing. `learning_rate` and `clip_epsilon` have
                   their values of this update. All other options are plain Python values.

    The arguments are fixed. Numbers of your own come in `options.coefficients`. Arrays that last from one update
    to the next are kept in `state.extra`, which `loss` gets as `batch.extra`. New inputs, if the package adds any,
    will be fields of `rollout`, `batch` or `options`.
    """

    init: Callable[[Any, jax.Array], tuple[Any, Any]]
    """`init(params, key) -> params, extra`: called once, before the first update.

    It gets the parameters of the network. It returns all parameters that the loss trains, which are arrays of
    floats, float32 or wider, and `TrainState.extra`. The parameters of the network keep their names, because the
    policy is loaded by these names. `extra` holds no random keys, because `prepare` and `loss` get new ones.

    Replace it for a second network, or for statistics that are kept between updates.
    """

    prepare: Callable[[TrainState, Apply, Rollout, Mean, PPOConfig, jax.Array], tuple[TrainState, Any, Metrics]]
    """`prepare(state, apply, rollout, mean, options, key) -> state, samples, metrics`: called once per rollout,
    before its gradient steps.

    `mean` is the mean over the rollout, of x [T, B]. `update.apply_to_rollout` computes the outputs of the
    network for steps 0 to T. The samples are any pytree of arrays [T, B, ...].

    The gradient steps start from the returned state. Most algorithms return the state that they were given, or
    `state.replace(extra=...)`. Its arrays keep their shapes and types. They must be equal on all devices, so
    compute them from `state`, `options`, `key`, `mean(x)` and `mean.moments(x)`: a plain `jnp.mean` sees one
    device's part.

    Because `key` is the same on all devices, numbers drawn with the shape [T, B] repeat on each device. Draw
    shared numbers here, and noise for single samples in `loss`, because `batch.key` differs between devices.

    Replace it for other targets or other rewards.
    """

    loss: Callable[[Any, Apply, Minibatch, PPOConfig], tuple[jax.Array, Metrics]]
    """`loss(params, apply, batch, options) -> loss, metrics`: called in each gradient step.

    JAX differentiates the loss, float32 [], with respect to `params`. `batch.samples` are the samples of
    `prepare`, [N, ...].
    """

    optimizer: Callable[[PPOConfig], optax.GradientTransformation]
    """`optimizer(options) -> optax.GradientTransformation`: called in each update, and for the first state.

    `options.learning_rate` is the rate of this update, a traced number. An optimiser of optax works if its
    `update` needs no more than gradients, state and parameters. docs/idea.md, "Another optimiser", names the kinds
    that are refused.
    """

    coefficients: Mapping[str, float] = FrozenDict()
    """Further numbers of the algorithm: name -> default.

    A run chooses other values with the option `ppo.coefficients`. The functions find the values in force in
    `options.coefficients`.
    """


# --- Names -------------------------------------------------------------------------------------------------------

SHIPPED = {
    "ppo": ("jaxrl_atari.ppo", "PPO"),
    "rnd": ("jaxrl_atari.algorithms.rnd", "RND"),
    "vtrace": ("jaxrl_atari.algorithms.vtrace", "VTRACE"),
}
"""Name of an algorithm of the package -> its module, which imports this one, and its name there."""

_registered: dict[str, Algorithm] = {}


def register_algorithm(name: str, algorithm: Algorithm) -> None:
    """Registers an algorithm of your own, so that a config can choose it, as in `--algorithm my_idea`.

    Args:
        name: a new name. A later algorithm of the same name replaces the earlier one.

    Raises:
        ConfigError: the name is taken by the package.
    """
    require(name not in SHIPPED, "algorithm", name, "a new name", "the package ships one of this name")
    _registered[name] = algorithm._replace(coefficients=FrozenDict(algorithm.coefficients))


def find_algorithm(name: str) -> Algorithm:
    """The algorithm with a name, shipped or registered.

    Raises:
        ConfigError: there is none.
    """
    if name in SHIPPED:
        module, attribute = SHIPPED[name]
        return getattr(import_module(module), attribute)
    require(name in _registered, "algorithm", name, f"one of {', '.join([*SHIPPED, *_registered])}", UNREGISTERED)
    return _registered[name]


# --- Random keys -------------------------------------------------------------------------------------------------

# The streams that derive from the seed of a session, or of an evaluation:
#
#     key = new_key(seed)
#     fold_in(key, u)    u < 2**31            update u, split into one key to act and one to learn
#     fold_in(key, NETWORK_STREAM)            first parameters of the network
#     fold_in(key, ALGORITHM_STREAM)          what `Algorithm.init` draws
#     fold_in(key, EVALUATION_STREAM)         of an evaluation, its actions
#
# The key to act is folded with the step and the environment (`rollout.py`); `update.update` lists the streams of
# the key to learn. Seeds of games come from NumPy (`envs/__init__.py`).
NETWORK_STREAM = 2**31
EVALUATION_STREAM = 2**31 + 1
ALGORITHM_STREAM = 2**31 + 2

_KEYS = "threefry2x32"  # whatever JAX_DEFAULT_PRNG_IMPL says: a checkpoint holds a key


def new_key(seed: int) -> jax.Array:
    """The typed key of a seed, []."""
    return jax.random.key(seed, impl=_KEYS)


def key_of_data(data: jax.Array) -> jax.Array:
    """The typed keys of their integers, as `jax.random.key_data` returns them: uint32 [..., 2] -> [...]."""
    return jax.random.wrap_key_data(data, impl=_KEYS)


# --- Options -----------------------------------------------------------------------------------------------------

# `jit` takes options as an argument. Another value of a traced option compiles nothing, that of a static one does.
_STATIC_OPTIONS = [option.name for option in fields(PPOConfig) if option.name not in TRACED_OPTIONS]
jax.tree_util.register_dataclass(PPOConfig, TRACED_OPTIONS, _STATIC_OPTIONS)


class Coefficients(dict[str, Any]):
    """The coefficients in force: name -> number."""

    def __missing__(self, name: str) -> Any:
        declared = f"a coefficient that the algorithm declares, which are: {', '.join(self) or 'none'}"
        raise InterfaceError("options.coefficients", name, declared, "add it to `coefficients` of the `Algorithm`")


jax.tree_util.register_pytree_node(
    Coefficients,
    lambda coefficients: (tuple(coefficients.values()), tuple(coefficients)),
    lambda names, values: Coefficients(zip(names, values, strict=True)),
)


def resolved_options(config: Config) -> PPOConfig:
    """The options `ppo.*` in force: lambda and each coefficient of the algorithm are numbers.

    Raises:
        ConfigError: no algorithm has the name, or it has no coefficient of a name in `ppo.coefficients`.
    """
    defaults = find_algorithm(config.algorithm).coefficients
    chosen = config.ppo.coefficients
    for name, value in chosen.items():
        expected = f"a coefficient of algorithm = {config.algorithm}, which has {', '.join(defaults) or 'none'}"
        hint = "--ppo.coefficients '{}' chooses none"
        require(name in defaults, f"ppo.coefficients.{name}", value, expected, hint)
    coefficients = Coefficients({name: float(chosen.get(name, default)) for name, default in defaults.items()})
    return replace(config.ppo, gae_lambda=config.resolved_gae_lambda, coefficients=coefficients)


def check_config(config: Config, devices: int | None = None) -> None:
    """Checks that the algorithm, its coefficients and the network of a config exist, and that its sizes fit.

    It does not start JAX's back end.

    Args:
        devices: number of devices that share the learning. None: as the config says, or 1 if it says `all`.

    Raises:
        ConfigError: naming the field.
    """
    number = config.devices.data_parallel
    is_possible = number == "all" or not config.devices.distributed
    require(is_possible, "devices.data_parallel", number, "all with devices.distributed")
    if devices is None:
        devices = 1 if number == "all" else number
    config.check_sizes(devices)
    resolved_options(config)
    network = make_network(config.network, num_actions=1)
    length = config.ppo.rollout_length
    require(
        config.ppo.minibatch_size % (length * devices) == 0 or not network.is_recurrent,
        "ppo.minibatch_size",
        config.ppo.minibatch_size,
        expected=f"a multiple of ppo.rollout_length x devices = {length} x {devices}",
        hint=f"{config.network.name} is recurrent and learns from whole environments",
    )


def as_numbers(options: PPOConfig) -> PPOConfig:
    """The same options, in which the traced ones are NumPy float32 scalars. None stays None."""
    return jax.tree.map(np.float32, options)
