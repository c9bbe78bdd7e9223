"""The update: all minibatches of a rollout, with the functions of an `Algorithm`.

`update` calls `prepare`, `loss` and `optimizer`; `init_train_state` calls `init` before the first update. The rest
of the file: the minibatches, the input of the network for their samples, the options that change while a session
trains, and the mistakes of an algorithm that are refused.

Axes are [T, B]: T steps of B environments. A sample is one step of one environment, numbered `t * B + b`. If there
are several devices, each one holds some of the environments (`algorithm.Shard`).
"""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxrl_atari.algorithm import (
    ONE_DEVICE,
    Algorithm,
    Mean,
    Metrics,
    Minibatch,
    Rollout,
    Shard,
    TrainState,
    as_numbers,
    resolved_options,
)
from jaxrl_atari.config import Config, PPOConfig
from jaxrl_atari.errors import require_interface
from jaxrl_atari.frames import gather_stacks
from jaxrl_atari.networks import Apply, Observation, Outputs, is_recurrent, strongly_typed


def init_train_state(params: Any, options: PPOConfig, algorithm: Algorithm, key: jax.Array) -> TrainState:
    """The state before the first update.

    Args:
        params: parameters of the network.
        key: for `algorithm.init`.

    Raises:
        InterfaceError: the optimiser keeps the learning rate of the first update.
    """
    params, extra = algorithm.init(params, key)
    opt_state = algorithm.optimizer(options).init(params)
    # As that of `inject_hyperparams` does. `optimizer(options)` is called in every update, but its state is kept.
    kept = optax.tree.get_all_with_path(opt_state, "learning_rate")
    expected = "no learning rate, because options.learning_rate is that of each update"
    hint = "leave out inject_hyperparams"
    require_interface(not kept, "state of the optimiser", "learning_rate", expected, hint)
    return strongly_typed(TrainState(params, opt_state, jnp.zeros((), jnp.int32), extra))


def update(
    state: TrainState,
    rollout: Rollout,
    options: PPOConfig,
    key: jax.Array,
    *,
    apply: Apply,
    algorithm: Algorithm,
    shard: Shard = ONE_DEVICE,
) -> tuple[TrainState, Metrics]:
    """All epochs and minibatches over one rollout: the function that is compiled and run once per rollout.

    Each device holds a part of the environments and of each minibatch. Every `Mean` is over the whole rollout or
    minibatch, on all devices. A loss is therefore written as for one device. The number of devices changes only
    the rounding of the result, and the numbers that an algorithm draws.

    Args:
        options: as `current_options` returns it: scheduled options have their values of this update.
        key: for the minibatches and for the algorithm; the same on all devices.
        apply: the network.
        shard: this device's part of the rollout.

    Returns:
        The new state and the metrics. The metrics of the loss, `loss` itself, and `gradient_norm` (the global norm
        before the optimiser clips it) are means over the gradient steps taken. The metrics of `prepare` are added.
        With `options.target_kl`, so is `skipped_steps`, the number of gradient steps that were left out.

    Raises:
        InterfaceError: a function of the algorithm makes a mistake that would train without an error; the section
            "Mistakes" lists them.
        AssertionError: `prepare` returned a state of another form, or samples that are not [T, B, ...].
    """
    # Numbers folded into `key`: 0 to epochs - 1 for the minibatches of each epoch (`draw_minibatches`), `epochs`
    # for the loss, and `epochs + 1` for `prepare`.
    indices = draw_minibatches(key, rollout, options, shard)
    loss_key = jax.random.fold_in(jax.random.fold_in(key, options.epochs), shard.index)
    prepare_key = jax.random.fold_in(key, options.epochs + 1)
    optimizer = algorithm.optimizer(options)
    rollout = with_options_applied(rollout, options)
    mean = Mean.over(rollout.weight, shard)
    prepared, samples, rollout_metrics = algorithm.prepare(state, apply, rollout, mean, options, prepare_key)
    prepared = strongly_typed(prepared)
    # JAX would take both: a checkpoint of another state could not be restored, and samples [B, T] are others.
    chex.assert_trees_all_equal_shapes_and_dtypes(prepared, state)
    chex.assert_tree_shape_prefix(samples, rollout.action.shape)
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
        (loss, metrics), gradients = value_and_gradient(before.params, apply, batch, options)
        metrics = checked_metrics(metrics, "loss", OWN_METRICS) | {"loss": as_float(loss)}
        gradients, metrics = mean_over_devices((gradients, metrics), shard)
        updates, opt_state = optimizer.update(gradients, before.opt_state, before.params)
        params = optax.apply_updates(before.params, updates)
        after = TrainState(params, strongly_typed(opt_state), before.optimizer_steps + 1, before.extra)
        return after, metrics | {"gradient_norm": optax.tree.norm(gradients)}

    def scan_steps(state: TrainState, indices: jax.Array) -> tuple[TrainState, Metrics]:
        """Gradient steps on int32 [steps, N], and the means of their metrics."""
        trained, metrics = lax.scan(step, state, indices)
        return trained, jax.tree.map(jnp.mean, metrics)

    if options.target_kl is None:
        trained, metrics = scan_steps(prepared, indices)
    else:
        by_epoch = indices.reshape(options.epochs, -1, indices.shape[-1])
        trained, metrics = run_epochs(scan_steps, prepared, by_epoch, options.target_kl)
    rollout_metrics = checked_metrics(rollout_metrics, "prepare", metrics)
    return trained, metrics | mean_over_devices(rollout_metrics, shard)


def mean_over_devices(tree: Any, shard: Shard) -> Any:
    """The mean over devices, which turns gradients and metrics into those of the whole minibatch or rollout.

    For example, two devices hold one sample each, whose gradients are 1 and 3. The loss `mean(x)` is the same on
    both, and its gradient should be (1 + 3) / 2 = 2. In the backward pass, JAX turns the sum over devices into
    another sum over devices: the derivative 1 of each device's loss becomes 2 on both. The devices therefore get
    2 * 1/2 = 1 and 2 * 3/2 = 3, whose mean is 2. A term without samples, such as a penalty on the parameters, has
    its whole gradient on both devices, say 5 and 5, whose mean is 5.

    This holds under `pmap`. `shard_map` with `check_vma` differentiates such a sum in another way. `.ci/run`
    compares one device with two on the newest JAX, in order to notice a version in which this no longer holds.
    """
    if shard.count == 1:
        return tree
    return jax.tree.map(lambda x: x / shard.count, shard.sum_over_devices(tree))


class Epochs(NamedTuple):
    """The carry of `run_epochs`."""

    taken: jax.Array  # int32 []: epochs so far
    state: TrainState
    total: Metrics  # sum of the metrics of all epochs
    approx_kl: jax.Array  # float32 []: mean over the newest epoch


def run_epochs(
    epoch: Callable[[TrainState, jax.Array], tuple[TrainState, Metrics]],
    state: TrainState,
    indices: jax.Array,
    target_kl: float,
) -> tuple[TrainState, Metrics]:
    """Runs one epoch after another, until the mean `approx_kl` of an epoch exceeds `target_kl`.

    Args:
        epoch: state, int32 [steps, N] -> state, means of the metrics.
        indices: int32 [epochs, steps, N], the minibatches of each epoch.

    Returns:
        The new state and the metrics: means over the steps taken, and `skipped_steps`.
    """
    num_epochs, steps, _ = indices.shape
    _, shapes = jax.eval_shape(epoch, state, indices[0])

    def run_epoch(carry: Epochs) -> Epochs:
        trained, means = epoch(carry.state, indices[carry.taken])
        total = jax.tree.map(jnp.add, carry.total, means)
        return Epochs(carry.taken + 1, trained, total, means["approx_kl"])

    def continues(carry: Epochs) -> jax.Array:
        exceeded = carry.approx_kl > target_kl  # false for a NaN, which ends the training when it is logged
        return (carry.taken < num_epochs) & ~exceeded

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    start = Epochs(jnp.zeros((), jnp.int32), state, zeros, zeros["approx_kl"])
    end = lax.while_loop(continues, run_epoch, start)
    skipped = (num_epochs - end.taken) * steps
    metrics = jax.tree.map(lambda x: x / end.taken, end.total)
    return end.state, metrics | {"skipped_steps": skipped.astype(jnp.float32)}


def with_options_applied(rollout: Rollout, options: PPOConfig) -> Rollout:
    """The rollout with two options applied. By default they are off; other implementations have them on.

    truncation_is_terminal:  terminated_t := max(terminated_t, truncated_t)    (CleanRL, OpenAI Baselines)
    learn_from_auto_resets:  weight_t := 1                                     (CleanRL with EnvPool, SLM Lab)
    """
    if options.truncation_is_terminal:
        rollout = rollout._replace(terminated=rollout.terminated | rollout.truncated)
    if options.learn_from_auto_resets:
        rollout = rollout._replace(weight=jnp.ones_like(rollout.weight))
    return rollout


# --- Minibatches -------------------------------------------------------------------------------------------------


def draw_minibatches(key: jax.Array, rollout: Rollout, options: PPOConfig, shard: Shard = ONE_DEVICE) -> jax.Array:
    """The samples of each gradient step of an update: each epoch is a fresh permutation of the samples.

    They are stratified by environment, unless `options.minibatches` is `uniform`, which makes one stratum. The
    environments of all devices are divided into gcd(environments, minibatch size) equal strata (by default 16
    strata of one environment), and each minibatch takes the same number of samples from each stratum. Therefore a
    device that holds some of the strata draws its part of the minibatches that a single device would draw.

    For example, 4 environments and minibatches of 8 samples give 4 strata of one environment: each minibatch has 2
    random steps of each environment. 6 environments and minibatches of 8 give 2 strata of 3 environments: each
    minibatch has 4 samples of environments 0 to 2, and 4 of environments 3 to 5.

    A recurrent network learns from whole environments: a minibatch has all T steps of some of them, equally many
    of each stratum.

    Returns:
        int32 [gradient steps, N]: samples as t * B + b; with a carry, ordered by step, then by environment.
    """
    length, num_envs = rollout.action.shape
    steps, size = length, options.minibatch_size // shard.count
    if is_recurrent(rollout.carry):  # draws environments, the samples of a rollout of one step
        steps, size = 1, size // length
    # Strata of this device. All c devices together have gcd(c * num_envs, c * size) = c * strata.
    strata = 1 if options.minibatches == "uniform" else math.gcd(num_envs, size)
    width = num_envs // strata

    def permute(epoch: jax.Array, stratum: jax.Array) -> jax.Array:
        stratum_key = jax.random.fold_in(jax.random.fold_in(key, epoch), shard.index * strata + stratum)
        sample = jax.random.permutation(stratum_key, steps * width)
        t, offset = jnp.divmod(sample, width)
        return t * num_envs + stratum * width + offset

    epoch, stratum = jnp.divmod(jnp.arange(options.epochs * strata), strata)
    shuffled = jax.vmap(permute)(epoch, stratum).reshape(options.epochs, strata, -1, size // strata)
    drawn = shuffled.swapaxes(1, 2).reshape(-1, size)
    return drawn if steps == length else whole_environments(drawn, rollout_length=length, num_envs=num_envs)


def whole_environments(envs: jax.Array, *, rollout_length: int, num_envs: int) -> jax.Array:
    """The samples of all steps of some environments, ordered by step, then by environment.

    Args:
        envs: int32 [K, n]: K selections of n environments.

    Returns:
        int32 [K, T * n]: samples as t * B + b.
    """
    return (jnp.arange(rollout_length)[:, None] * num_envs + envs[:, None]).reshape(len(envs), -1)


# --- Observations and outputs ------------------------------------------------------------------------------------


def observe(rollout: Rollout, index: jax.Array, length: int | None = None) -> Observation:
    """The input of the network for some samples.

    Args:
        index: int32 [N], samples as t * B + b; with a carry, in the order of `whole_environments`.
        length: with a carry, the number of steps of each environment in `index`; T by default.
    """
    stacks = gather_stacks(rollout.frames, rollout.age, index)
    first = rollout.age.reshape(-1)[index] == 0
    if not is_recurrent(rollout.carry):
        return Observation(stacks, first)
    envs = index[: len(index) // (length or len(rollout.action))]  # step 0 of the environments comes first
    return Observation(stacks, first, jax.tree.map(lambda x: x[envs], rollout.carry))


def apply_to_rollout(params: Any, apply: Apply, rollout: Rollout, mean: Mean, options: PPOConfig) -> Outputs:
    """The outputs of the network for every step of a rollout and for step T, the first one of the next rollout.

    The parameters may differ from the ones that acted. To bound the memory, a device computes no more samples at a
    time than it has in a minibatch, but at least the T + 1 samples of one environment. This changes only the
    rounding of the result.

    Args:
        mean: the mean over the rollout, as `prepare` gets it. Only `mean.devices` is used, because it gives the
            size of a device's part of a minibatch.

    Returns:
        Outputs [T + 1, B, ...] without a carry.
    """
    steps, num_envs = rollout.age.shape  # T + 1
    most = max(1, options.minibatch_size // mean.devices // steps)
    width = max(n for n in range(1, min(most, num_envs) + 1) if num_envs % n == 0)  # environments at a time
    envs = jnp.arange(num_envs).reshape(-1, width)

    def outputs_of(index: jax.Array) -> Outputs:
        return apply(params, observe(rollout, index, steps))._replace(carry=())

    def in_order(x: jax.Array) -> jax.Array:
        """[B / width, (T + 1) * width, ...] -> [T + 1, B, ...]"""
        x = x.reshape(-1, steps, width, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(steps, num_envs, *x.shape[3:])

    return jax.tree.map(
        in_order, lax.map(outputs_of, whole_environments(envs, rollout_length=steps, num_envs=num_envs))
    )


# --- Schedules ---------------------------------------------------------------------------------------------------


def annealed(start: float, config: Config, env_steps: int, end: float = 0.0) -> float:
    """A value that changes linearly in env steps, from `start` to `end` at total_env_steps."""
    return end + (start - end) * max(0.0, 1.0 - env_steps / config.total_env_steps)


def learning_rate(config: Config, env_steps: int) -> float:
    """The learning rate of the update whose rollout begins at `env_steps`."""
    rate = config.ppo.learning_rate
    return annealed(rate, config, env_steps) if config.ppo.anneal_learning_rate else rate


def current_options(config: Config, env_steps: int) -> PPOConfig:
    """The options (`resolved_options`) of the update whose rollout begins at `env_steps`.

    The scheduled ones have their values at that time. Those that are marked `TRACED` are float32 scalars: the
    compiled update takes them as data, so that a new value compiles nothing.
    """
    ppo = config.ppo
    rate = learning_rate(config, env_steps)
    options = replace(resolved_options(config), learning_rate=rate, entropy_coef_end=None)
    if ppo.anneal_clip_epsilon:
        options = replace(options, clip_epsilon=annealed(ppo.clip_epsilon, config, env_steps))
    if ppo.entropy_coef_end is not None:
        weight = annealed(ppo.entropy_coef, config, env_steps, end=ppo.entropy_coef_end)
        options = replace(options, entropy_coef=weight)
    return as_numbers(options)


# --- Mistakes that would train without an error ------------------------------------------------------------------

OWN_METRICS = ("loss", "gradient_norm", "skipped_steps")
"""Names of the metrics of `update` itself."""


def checked_metrics(metrics: Metrics, function: str, taken: Collection[str]) -> Metrics:
    """The metrics of a function as floats, the type of their means over gradient steps.

    Args:
        function: its name, `prepare` or `loss`.
        taken: names that the update has given to other metrics.

    Raises:
        InterfaceError: a metric is not a single number, or its name is taken.
    """
    for name, value in metrics.items():
        shape, expected = jnp.shape(value), "(): a single number, such as the mean of x over the samples"
        require_interface(shape == (), f"shape of metric {name} of {function}", shape, expected)
        require_interface(name not in taken, f"name of a metric of {function}", name, "a name that is not taken")
    return {name: as_float(value) for name, value in metrics.items()}


def as_float(x: Any) -> jax.Array:
    """A number as float32. float64 stays."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))
