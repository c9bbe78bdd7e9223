"""What an algorithm is: four pure functions (`Algorithm`), and the data that they are given.

The algorithms themselves are in `ppo.py` and `algorithms/`; `update.py` runs them. `register_algorithm` gives an
algorithm a name, which a config may choose. A `config` is what a run was given: a `Config`, or a part of one.
`options` are its part `ppo` with the values in force (`resolved_options`): numbers stand where the config leaves a
value to the game or to the algorithm.

Axes are [T, B]: T steps of B environments. A sample is one step of one environment.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import FrozenDict

from jaxrl_atari.config import Config, PPOConfig, check_coefficients
from jaxrl_atari.errors import require
from jaxrl_atari.network_interface import Apply, Observation
from jaxrl_atari.registry import ALGORITHMS
from jaxrl_atari.traced_options import STATIC_OPTIONS, TRACED_OPTIONS

# --- Data --------------------------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """T steps of B environments.

    Each frame is stored once: step t saw the stack that ends at `frames[t + 3]` (`frames.py`). A step of
    weight 0 is an auto-reset step: the emulator ignored its action, because the game before it had just ended.
    """

    frames: jax.Array
    """uint8 [T + 4, B, *frame]. The last is the newest frame of step T, for the bootstrap value."""
    age: jax.Array
    """int32 [T + 1, B]: earlier frames of the same game, at most 3. The last is that of step T."""
    action: jax.Array
    """int32 [T, B]."""
    log_prob: jax.Array
    """float32 [T, B]: log pi_old(action)."""
    value: jax.Array
    """float32 [T, B]: V_old."""
    reward: jax.Array
    """float32 [T, B]: clipped to [-1, 1], unless `env.clip_rewards` is false."""
    terminated: jax.Array
    """bool [T, B]: there is no value beyond this step. The game was lost, or a life if `env.life_loss_terminal` is
    on, or it was cut off and `ppo.truncation_is_terminal` is on."""
    truncated: jax.Array
    """bool [T, B]: the game was cut off. The value beyond this step counts, and the rewards beyond it do not."""
    weight: jax.Array
    """float32 [T, B]: 1, or 0 for an auto-reset step (1 with `ppo.learn_from_auto_resets`)."""
    bootstrap_value: jax.Array
    """float32 [B]: V_old of what step T would see."""
    carry: Any = ()
    """[B, ...]: what a recurrent network remembered before step 0."""


@dataclass(frozen=True)
class Shard:
    """One device's part of data that is spread over several devices; by default, all of the data."""

    index: jax.typing.ArrayLike = 0  # number of this device
    count: int = 1  # of devices
    sum_over_devices: Callable[[Any], Any] = lambda tree: tree  # tree of arrays -> its sum over all devices


ONE_DEVICE = Shard()


@flax.struct.dataclass
class Mean:
    """The mean over the samples that count, on all devices: `mean(x)`, for x of the shape of `weight`.

    That shape is [T, B] for a rollout and [N] for a minibatch: sum other axes of x first. Auto-reset steps do not
    count, unless `ppo.learn_from_auto_resets`; there, x may have any value, even infinity or NaN. If no sample
    counts, the mean is 0.

    Gradients need more care. JAX multiplies the derivative of a sample that does not count by 0, so an infinite
    derivative makes the gradient NaN. Where y may be 0 in such a sample, `mean(jnp.log(y))` is one; its value is
    right, and `mean(jnp.log(jnp.where(mean.weight > 0, y, 1.0)))` also has the right gradient.
    """

    weight: jax.Array
    """1, or 0 where a sample does not count."""
    total: jax.Array
    """Sum of the weights on all devices, at least 1."""
    sum_over_devices: Callable[[Any], Any] = flax.struct.field(
        pytree_node=False, default=ONE_DEVICE.sum_over_devices
    )
    devices: int = flax.struct.field(pytree_node=False, default=ONE_DEVICE.count)
    """Number of devices that share the samples. `minibatches.apply_to_rollout` reads it; no mean depends on it."""

    @classmethod
    def over(cls, weight: jax.Array, shard: Shard = ONE_DEVICE) -> "Mean":
        """The mean with these weights, float32 of any shape, each 0 or 1."""
        total = jnp.maximum(shard.sum_over_devices(jnp.sum(weight)), 1.0)
        return cls(weight, total, shard.sum_over_devices, shard.count)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The mean of x, of the shape of `weight` -> []."""
        # Here each weight is divided by the total; in `moments`, the sum is. The two round differently, so to make
        # them alike would change the last bits of every run.
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
            x: of the shape of `weight`. Samples that do not count are normalised as well, by the same numbers.
            unbiased: std = sqrt(sum((x - mean)^2) / (N - 1)) instead of / N, as `torch.Tensor.std` has it.
        """
        mean, variance = self.moments(x)
        if unbiased:
            variance = variance * (self.total / jnp.maximum(self.total - 1.0, 1.0))
        return (x - mean) / (jnp.sqrt(variance) + 1e-8)

    def _counting(self, x: jax.Array) -> jax.Array:
        """x, with 0 for samples that do not count: their weight 0 times infinity would be NaN."""
        chex.assert_equal_shape([x, self.weight])
        return jnp.where(self.weight > 0, x, 0.0)


class Minibatch(NamedTuple):
    """What the loss of one gradient step may use: N samples, on each device its part of them."""

    observation: Observation
    """What the network sees. Change its pictures through `frames.map_images`."""
    samples: Any
    """As `Algorithm.prepare` returned them, [N, ...]. Those of PPO are `ppo.Samples`."""
    mean: Mean
    """The mean over the minibatch, of x [N]."""
    key: jax.Array
    """For what a loss draws: another one in each gradient step, and on each device."""
    extra: Any = ()
    """`TrainState.extra`, as `prepare` returned it."""


# --- The state and the functions ---------------------------------------------------------------------------------

Metrics = dict[str, jax.Array]
"""Name -> a number, []. A new name needs no entry anywhere to be logged in `metrics.csv` and TensorBoard.

The name must differ from those of all other metrics (`loss`, `gradient_norm` and `skipped_steps` are taken) and of
all other columns of `metrics.csv`. A value that is not finite ends the training; the last checkpoint is kept.
"""


@flax.struct.dataclass
class TrainState:
    """State that an update replaces, and that a checkpoint keeps. Equal on all devices."""

    params: Any
    """All parameters that the loss trains."""
    opt_state: optax.OptState
    """State of the optimiser."""
    optimizer_steps: jax.Array
    """int32 []: gradient steps so far."""
    extra: Any = ()
    """What an algorithm keeps besides, such as running statistics: any pytree of arrays, but no random keys."""


class Algorithm(NamedTuple):
    """The parts of an update that an idea replaces, as in `PPO._replace(loss=my_loss)`. docs/idea.md has examples.

    The four functions are pure, and JAX traces them all: no Python `if` on an array, no `float(x)`, no NumPy
    function. A fixed array, such as pretrained weights from a file, is loaded outside them. `prepare`, `loss` and
    `optimizer` become part of the compiled update. `init` and the optimiser's own `init` are compiled too, and run
    once, for the first state; a resume traces them for their shapes alone.

    These arguments are common to several functions:

        apply      The network: `network_interface.Apply`. It returns `Outputs`.
        key        A random key, the same on all devices.
        options    `PPOConfig` as `resolved_options` returns it. Options marked `TRACED` in `config.py`, such as
                   `gamma` and `coefficients`, are traced numbers: data of the compiled update, so that another
                   value compiles nothing. `learning_rate` and `clip_epsilon` have their values of this update.
                   All other options are plain Python values.

    The arguments are fixed. Further inputs come in one of them: numbers of your own in `options.coefficients`, and
    arrays that last from one update to the next in `state.extra`, which `loss` gets as `batch.extra`. Should the
    package offer more, it becomes a field of `rollout`, `batch` or `options`.
    """

    init: Callable[[Any, jax.Array], tuple[Any, Any]]
    """`init(params, key) -> params, extra`: called once, before the first update.

    It is given the parameters of the network, and returns all parameters that the loss trains, and
    `TrainState.extra`. The parameters of the network keep their own names, by which the policy is loaded. `extra`
    holds no random keys: `prepare` and `loss` get new ones.

    Replace it for a second network, or for statistics that are kept between updates.
    """

    prepare: Callable[[TrainState, Apply, Rollout, Mean, PPOConfig, jax.Array], tuple[TrainState, Any, Metrics]]
    """`prepare(state, apply, rollout, mean, options, key) -> state, samples, metrics`: called once per rollout,
    before its gradient steps.

    `mean` is the mean over the rollout, of x [T, B]. `minibatches.apply_to_rollout` gives the outputs of the
    network for steps 0 to T. The samples are any pytree of arrays [T, B, ...].

    The gradient steps start from the state that is returned. Most algorithms return the one that they were given,
    or `state.replace(extra=...)`. Its arrays keep their shapes and types. They must be equal on all devices, so
    compute them from `state`, `options`, `key`, `mean(x)` and `mean.moments(x)`: a plain `jnp.mean` sees one
    device's part.

    As `key` is the same on all devices, numbers drawn with the shape [T, B] repeat on each of them. Draw here what
    is shared, and noise for single samples in `loss`, whose `batch.key` differs.

    Replace it for other targets or other rewards.
    """

    loss: Callable[[Any, Apply, Minibatch, PPOConfig], tuple[jax.Array, Metrics]]
    """`loss(params, apply, batch, options) -> loss, metrics`: called in each gradient step.

    JAX differentiates the loss, float32 [], with respect to `params`. `batch.samples` are those of `prepare`,
    [N, ...].
    """

    optimizer: Callable[[PPOConfig], optax.GradientTransformation]
    """`optimizer(options) -> optax.GradientTransformation`: called in each update, and for the first state.

    `options.learning_rate` is the rate of this update, a traced number. An optimiser of optax works if its
    `update` needs no more than gradients, state and parameters. docs/idea.md, "Another optimiser", names the kinds
    that are refused.
    """

    coefficients: Mapping[str, float] = FrozenDict()
    """Further numbers of the algorithm: name -> default.

    A run chooses others with the option `ppo.coefficients`. The functions find the values in force in
    `options.coefficients`.
    """


# --- Names -------------------------------------------------------------------------------------------------------


def register_algorithm(name: str, algorithm: Algorithm) -> None:
    """Lets a config choose an algorithm of your own, as in `--algorithm my_idea`.

    Args:
        name: a new name. A later algorithm of the same name replaces the earlier one.

    Raises:
        ConfigError: the name has other characters than letters, digits and `._-`, or is taken by the package; or
            `algorithm` is not an `Algorithm` of functions, with numbers as coefficients.
    """
    expected = "an Algorithm, such as PPO._replace(loss=my_loss)"
    require(isinstance(algorithm, Algorithm), ALGORITHMS.field, name, expected, f"got {algorithm!r}")
    for part in ("init", "prepare", "loss", "optimizer"):
        function = getattr(algorithm, part)
        # The functions are keys of the cache of compiled updates, so they must be hashable.
        usable = callable(function) and isinstance(function, Hashable)
        require(usable, f"{ALGORITHMS.field} {name}: {part}", function, "a function (hashable)")
    check_coefficients(algorithm.coefficients, f"{ALGORITHMS.field} {name}: coefficients")
    ALGORITHMS.register(name, algorithm._replace(coefficients=FrozenDict(algorithm.coefficients)))


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of a name, shipped or registered.

    Raises:
        ConfigError: there is none.
    """
    return ALGORITHMS.get(name)


# --- Options -----------------------------------------------------------------------------------------------------

# From here on, `PPOConfig` is a pytree: `jit` takes it as an argument, and its leaves are the traced options.
jax.tree_util.register_dataclass(PPOConfig, TRACED_OPTIONS, STATIC_OPTIONS)


def resolved_options(config: Config) -> PPOConfig:
    """The options `ppo.*` as an algorithm gets them: with a number for lambda and for each coefficient.

    Raises:
        ConfigError: no algorithm has the name, or it has no coefficient of a name in `ppo.coefficients`.
    """
    defaults = find_algorithm(config.algorithm).coefficients
    chosen = config.ppo.coefficients
    for name, value in chosen.items():
        expected = f"a coefficient of algorithm = {config.algorithm}, which has {', '.join(defaults) or 'none'}"
        require(name in defaults, f"ppo.coefficients.{name}", value, expected)
    coefficients = {name: float(chosen.get(name, default)) for name, default in defaults.items()}
    return replace(config.ppo, gae_lambda=config.resolved_gae_lambda, coefficients=coefficients)


def as_numbers(options: PPOConfig) -> PPOConfig:
    """The same options with NumPy float32 scalars as traced ones; None stays None."""
    return jax.tree.map(np.float32, options)
