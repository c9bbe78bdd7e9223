"""The update, open to other algorithms: pure functions from a train state and a rollout to the next train state.

`update` runs all minibatches of a rollout. It calls `prepare`, `loss` and `optimizer` of an `Algorithm`;
`init_train_state` calls `init` before the first update. An idea replaces these four functions: those of PPO are in
`ppo.py`, others in `algorithms/`. `register_algorithm` gives an algorithm a name, which a config may choose. Axes
are [T, B]: T steps of B environments.
"""

from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import fields, replace
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax.core import FrozenDict
from jax import lax

from jaxrl_atari import traced_options  # noqa: F401  makes PPOConfig a pytree, which `jit` takes
from jaxrl_atari.config import Config, PPOConfig, check_coefficients
from jaxrl_atari.errors import require
from jaxrl_atari.minibatches import ONE_DEVICE, Mean, Minibatch, Rollout, Shard, draw_minibatches, observe
from jaxrl_atari.networks import Apply
from jaxrl_atari.registry import ALGORITHMS

Metrics = dict[str, jax.Array]
"""Name -> a number, []. A new name needs no entry anywhere to be logged."""

OWN_METRICS = frozenset({"loss", "gradient_norm", "skipped_steps"})
"""Metrics of `update` itself, which no algorithm may return under these names."""


@flax.struct.dataclass
class TrainState:
    """State that an update replaces, and that a checkpoint keeps. Equal on all devices."""

    params: Any
    opt_state: optax.OptState
    optimizer_steps: jax.Array  # int32 []: gradient steps so far
    extra: Any = ()  # what an algorithm keeps besides, such as running statistics: any pytree of arrays


class Algorithm(NamedTuple):
    """The parts of an update that an idea replaces, as in `PPO._replace(loss=my_loss)`.

    They are pure functions, and JAX traces them all: no Python `if` on an array, no `float(x)`, no NumPy
    function. `prepare`, `loss` and `optimizer` become part of the compiled update. `init` and the optimiser's own
    `init` are compiled too, and run once, for the first state; a resume traces them for their shapes alone.

        init(params, key) -> params, extra
            Once, before the first update. `params` are those of the network. Returns all parameters that the loss
            trains, those of the network among them under their own names, and `TrainState.extra`.

        prepare(state, apply, rollout, mean, config, key) -> state, samples, metrics
            Once per rollout, before its gradient steps. `mean` is the mean over the rollout, of x [T, B]. Returns
            the state, in which it may replace `extra` alone; the samples, any pytree of arrays [T, B, ...];
            metrics. `extra` must be equal on all devices: compute it from `state`, `config`, `key`, `mean(x)` and
            `mean.moments(x)`. `key` is the same on all devices, so numbers drawn with the shape [T, B] repeat on
            each of them: draw here what is shared, and noise of single samples in `loss`, whose `batch.key`
            differs. `minibatches.apply_to_rollout` gives the outputs of the network for steps 0 to T.

        loss(params, apply, batch, config) -> loss, metrics
            Called in every gradient step; JAX differentiates it with respect to `params`. `batch` is a
            `Minibatch`, whose samples are those of `prepare`, [N, ...]. The loss is float32 [].

        optimizer(config) -> optax.GradientTransformation
            In every update, and for the first state. `config.learning_rate` is the rate of this update, a traced
            number. An optimiser of optax works if its `update` needs no more than gradients, state and
            parameters, if it keeps no rate in its state (which would not follow `config.learning_rate`), and if
            the parameters that it trains are also those to act with. docs/idea.md, "Another optimiser", names
            some that do not work.

    `apply` is the network (`networks.Apply`). `config` is a `PPOConfig` as `resolved_options` returns it, `key` a
    random key, the same on all devices. Metrics are `Metrics`, and are logged.

    `coefficients` are further numbers of the algorithm, by their names, with their defaults. A run chooses others
    with the option `ppo.coefficients`; the functions find the values in force in `config.coefficients`. As traced
    numbers, they are data of the compiled update: another value compiles nothing.
    """

    init: Callable[[Any, jax.Array], tuple[Any, Any]]
    prepare: Callable[[TrainState, Apply, Rollout, Mean, PPOConfig, jax.Array], tuple[TrainState, Any, Metrics]]
    loss: Callable[[Any, Apply, Minibatch, PPOConfig], tuple[jax.Array, Metrics]]
    optimizer: Callable[[PPOConfig], optax.GradientTransformation]
    coefficients: Mapping[str, float] = FrozenDict()


# --- The update --------------------------------------------------------------------------------------------------


def init_train_state(params: Any, config: PPOConfig, algorithm: Algorithm, key: jax.Array) -> TrainState:
    """The state before the first update.

    Args:
        params: parameters of the network.
        key: for what `algorithm.init` draws.
    """
    params, extra = algorithm.init(params, key)
    return TrainState(params, algorithm.optimizer(config).init(params), jnp.zeros((), jnp.int32), extra)


def update(
    state: TrainState,
    rollout: Rollout,
    config: PPOConfig,
    key: jax.Array,
    *,
    apply: Apply,
    algorithm: Algorithm,
    shard: Shard = ONE_DEVICE,
) -> tuple[TrainState, Metrics]:
    """All epochs and minibatches over one rollout: the function that is compiled and run once per rollout.

    On several devices each one holds its environments and its part of each minibatch. Every `Mean` is that of the
    whole minibatch or rollout. So a loss is written as for one device, and the result does not depend on the
    split, beyond rounding and except for what an algorithm draws.

    Args:
        config: as `schedules.current_options` returns it: scheduled options have their values of this update.
        key: for the minibatches, and for what the algorithm draws; the same on all devices.
        apply: the network.
        shard: this device's part of the rollout.

    Returns:
        The new state, and metrics. Means over the gradient steps taken: those that the loss returned, `loss`
        itself, and `gradient_norm`, the global norm before the optimiser clips it. Then those of `prepare`. With
        `config.target_kl` also `skipped_steps`, the number of gradient steps that were left out.

    Raises:
        ConfigError: `config.gae_lambda` is None, the lambda of a game that an update does not know. Or a metric is
            not a single number, or has the name of another one; a sample is no array [T, B, ...]; `prepare`
            replaced more than `extra`, or returned one of another form; `config.target_kl` is set, and the loss
            returns no `approx_kl`.
        TypeError: the loss is not a single number; JAX's message has its shape.
    """
    hint = "give an update resolved_options(config) in place of config.ppo"
    require(config.gae_lambda is not None, "ppo.gae_lambda", None, "a number in an update", hint)
    # Streams of `key`: 0 to epochs - 1 give the minibatches of an epoch (`draw_minibatches`), `epochs` is for the
    # loss, and `epochs + 1` for `prepare`.
    indices = draw_minibatches(key, rollout, config, shard)
    loss_key = jax.random.fold_in(jax.random.fold_in(key, config.epochs), shard.index)
    prepare_key = jax.random.fold_in(key, config.epochs + 1)
    rollout = with_conventions(rollout, config)
    optimizer = algorithm.optimizer(config)
    mean = Mean.over(rollout.weight, shard)
    prepared, samples, rollout_metrics = algorithm.prepare(state, apply, rollout, mean, config, prepare_key)
    check_state(state, prepared)
    check_extra(state.extra, prepared.extra)
    check_samples(samples, rollout)
    check_metrics(rollout_metrics, OWN_METRICS)
    rollout_metrics = mean_over_devices(jax.tree.map(as_float, rollout_metrics), shard)
    # [T, B, ...] -> [T * B, ...]
    flat_samples, flat_weight = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (samples, rollout.weight))

    def step(before: TrainState, index: jax.Array) -> tuple[TrainState, Metrics]:
        """One gradient step on the samples `index`, [N]."""
        batch_samples, weight = jax.tree.map(lambda x: x[index], (flat_samples, flat_weight))
        batch = Minibatch(
            observation=observe(rollout, index),
            samples=batch_samples,
            mean=Mean.over(weight, shard),
            key=jax.random.fold_in(loss_key, before.optimizer_steps),
            extra=before.extra,
        )
        value_and_gradient = jax.value_and_grad(algorithm.loss, has_aux=True)
        (loss, metrics), gradients = value_and_gradient(before.params, apply, batch, config)
        check_metrics(metrics, OWN_METRICS)
        metrics = jax.tree.map(as_float, metrics) | {"loss": loss}
        gradients, metrics = mean_over_devices((gradients, metrics), shard)
        updates, opt_state = optimizer.update(gradients, before.opt_state, before.params)
        params = optax.apply_updates(before.params, updates)
        after = TrainState(params, opt_state, before.optimizer_steps + 1, before.extra)
        return after, metrics | {"gradient_norm": optax.tree.norm(gradients)}

    if config.target_kl is None:
        trained, metrics = lax.scan(step, prepared, indices)
        metrics = jax.tree.map(jnp.mean, metrics)
    else:
        by_epoch = indices.reshape(config.epochs, -1, indices.shape[-1])
        trained, metrics = scan_epochs(step, prepared, by_epoch, config.target_kl)
    check_metrics(rollout_metrics, metrics.keys())
    return trained, metrics | rollout_metrics


def mean_over_devices(tree: Any, shard: Shard) -> Any:
    """The mean over devices: of gradients and metrics, those of the whole minibatch or rollout.

    Each device's loss is already that of all devices. JAX's transpose of a sum over devices is the same sum. So a
    device's gradient of a term with `mean(x)` is `count` times that of its samples, and a term without samples has
    its whole gradient on each device: the mean over devices is right for both. This holds under `pmap`;
    `shard_map` with `check_vma` transposes such a sum otherwise.
    """
    if shard.count == 1:
        return tree
    return jax.tree.map(lambda x: x / shard.count, shard.sum_over_devices(tree))


class Epochs(NamedTuple):
    """The carry of `scan_epochs`."""

    taken: jax.Array  # int32 []: epochs so far
    state: TrainState
    total: Metrics  # sum of the epochs' metrics
    approx_kl: jax.Array  # float32 []: mean of the newest epoch


def scan_epochs(
    step: Callable[[TrainState, jax.Array], tuple[TrainState, Metrics]],
    state: TrainState,
    indices: jax.Array,
    target_kl: float,
) -> tuple[TrainState, Metrics]:
    """Scans `step` over one epoch after another, until the mean `approx_kl` of an epoch exceeds `target_kl`.

    Args:
        step: state, int32 [N] -> state, metrics.
        indices: int32 [epochs, steps, N], the minibatches of each epoch.

    Returns:
        The new state and the metrics: means over the steps taken, and `skipped_steps`.

    Raises:
        ConfigError: the metrics have no `approx_kl`.
    """
    num_epochs, steps, _ = indices.shape
    _, shapes = jax.eval_shape(step, state, indices[0, 0])
    expected = "None: the loss of this algorithm returns no approx_kl"
    require("approx_kl" in shapes, "ppo.target_kl", target_kl, expected)

    def run_epoch(carry: Epochs) -> Epochs:
        trained, metrics = lax.scan(step, carry.state, indices[carry.taken])
        means = jax.tree.map(jnp.mean, metrics)
        total = jax.tree.map(jnp.add, carry.total, means)
        return Epochs(carry.taken + 1, trained, total, means["approx_kl"])

    def goes_on(carry: Epochs) -> jax.Array:
        exceeded = carry.approx_kl > target_kl  # false for a NaN, at which the log ends the training
        return (carry.taken < num_epochs) & ~exceeded

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    start = Epochs(jnp.zeros((), jnp.int32), state, zeros, zeros["approx_kl"])
    end = lax.while_loop(goes_on, run_epoch, start)
    skipped = (num_epochs - end.taken) * steps
    metrics = jax.tree.map(lambda x: x / end.taken, end.total)
    return end.state, metrics | {"skipped_steps": skipped.astype(jnp.float32)}


def with_conventions(rollout: Rollout, config: PPOConfig) -> Rollout:
    """The rollout with the conventions of other implementations, where the config asks for them.

    truncation_is_terminal:  terminated_t := max(terminated_t, truncated_t)    (CleanRL, OpenAI Baselines)
    learn_from_auto_resets:  weight_t := 1                                     (CleanRL with EnvPool, SLM Lab)
    """
    if config.truncation_is_terminal:
        rollout = rollout._replace(terminated=rollout.terminated | rollout.truncated)
    if config.learn_from_auto_resets:
        rollout = rollout._replace(weight=jnp.ones_like(rollout.weight))
    return rollout


def as_float(metric: jax.Array) -> jax.Array:
    """A whole number or a truth value as float32; a float stays as it is."""
    return metric if jnp.issubdtype(jnp.result_type(metric), jnp.floating) else jnp.asarray(metric, jnp.float32)


# --- Checks of what an algorithm returns -------------------------------------------------------------------------


def check_metrics(metrics: Metrics, taken: Set[str]) -> None:
    """Checks the metrics of a part of an algorithm.

    Args:
        taken: names of other metrics of the same update.

    Raises:
        ConfigError: one of them is not a single number, or has a name that is taken.
    """
    for name, value in metrics.items():
        expected = "a single number, such as batch.mean(x)"
        is_one = jax.tree.structure(value) == jax.tree.structure(0)
        require(is_one, "metric", name, expected, f"it is {value!r}")
        shape = jnp.shape(value)
        require(shape == (), "metric", name, expected, f"its shape is {shape}")
        require(name not in taken, "metric", name, "another name: the update already has a metric of this name")


def check_samples(samples: Any, rollout: Rollout) -> None:
    """Raises `ConfigError` if a leaf of what `prepare` returned is no array [T, B, ...]."""
    steps = rollout.action.shape
    expected = f"arrays of shape [{steps[0]}, {steps[1]}, ...]"
    for leaf in jax.tree.leaves(samples):
        shape = jnp.shape(leaf)
        require(shape[:2] == steps, "samples of prepare", list(shape), expected)


def check_state(before: TrainState, after: TrainState) -> None:
    """Raises `ConfigError` if `prepare` replaced anything but `extra`.

    Traced arrays have no values to compare, so they must be the same objects. What has been through a `jax.jit`
    within `prepare` is refused too, even if it is unchanged.
    """
    for field in fields(TrainState):
        if field.name == "extra":
            continue
        old, new = getattr(before, field.name), getattr(after, field.name)
        same = jax.tree.structure(old) == jax.tree.structure(new)
        leaves = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=False)
        same = same and all(x is y for x, y in leaves)
        hint = "prepare may replace extra alone, as in state.replace(extra=...)"
        require(same, f"{field.name} of prepare", "another value", "what it was given", hint)


def check_extra(before: Any, after: Any) -> None:
    """Raises `ConfigError` if `extra` has another structure, shape or type: no checkpoint could be restored."""

    def form(extra: Any) -> Any:
        return jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", extra)

    same = jax.tree.structure(before) == jax.tree.structure(after)
    same = same and jax.tree.leaves(form(before)) == jax.tree.leaves(form(after))
    require(same, "extra of prepare", form(after), f"{form(before)}, as init returned it")


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
        # Compiled updates are kept by their functions, which must be hashable for that.
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


def resolved_options(config: Config) -> PPOConfig:
    """The options `ppo.*` as an algorithm gets them: with the lambda of the game, and all of its coefficients.

    Raises:
        ConfigError: no algorithm has the name, or it has no coefficient of a name that was chosen.
    """
    defaults = find_algorithm(config.algorithm).coefficients
    chosen = config.ppo.coefficients
    for name, value in chosen.items():
        expected = f"a coefficient of algorithm = {config.algorithm}, which has {', '.join(defaults) or 'none'}"
        require(name in defaults, f"ppo.coefficients.{name}", value, expected)
    coefficients = {name: float(chosen.get(name, default)) for name, default in defaults.items()}
    return replace(config.ppo, gae_lambda=config.resolved_gae_lambda, coefficients=coefficients)
