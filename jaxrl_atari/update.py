"""The update: all minibatches of a rollout, with the functions of an `Algorithm`.

`update` calls `prepare`, `loss` and `optimizer`; `init_train_state` calls `init` before the first update.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxrl_atari.algorithm import ONE_DEVICE, Algorithm, Mean, Metrics, Minibatch, Rollout, Shard, TrainState
from jaxrl_atari.algorithm_checks import (
    check_first_state,
    check_loss,
    check_names,
    check_optimizer,
    check_optimizer_state,
    check_optimizer_step,
    check_prepared,
)
from jaxrl_atari.algorithm_options import check_options
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.errors import require
from jaxrl_atari.minibatches import draw_minibatches, observe
from jaxrl_atari.network_functions import strongly_typed
from jaxrl_atari.network_interface import Apply


def init_train_state(params: Any, options: PPOConfig, algorithm: Algorithm, key: jax.Array) -> TrainState:
    """The state before the first update.

    Args:
        params: parameters of the network.
        key: for `algorithm.init`.

    Raises:
        InterfaceError: `init` or `optimizer` returned what `algorithm_checks.py` refuses.
    """
    params, extra = check_first_state(params, algorithm.init(params, key))
    optimizer = algorithm.optimizer(options)
    check_optimizer(optimizer)
    opt_state = optimizer.init(params)
    check_optimizer_state(opt_state)
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
        options: as `schedules.current_options` returns it: scheduled options have their values of this update.
        key: for the minibatches and for the algorithm; the same on all devices.
        apply: the network.
        shard: this device's part of the rollout.

    Returns:
        The new state and the metrics. The metrics of the loss, `loss` itself, and `gradient_norm` (the global norm
        before the optimiser clips it) are means over the gradient steps taken. The metrics of `prepare` are added.
        With `options.target_kl`, so is `skipped_steps`, the number of gradient steps that were left out.

    Raises:
        ConfigError: the options are not the ones in force (`algorithm_options.resolved_options`);
            `draw_minibatches` refuses them; or `options.target_kl` is set, and the loss returns no `approx_kl`.
        InterfaceError: a function of the algorithm returned what `algorithm_checks.py` refuses.
    """
    check_options(options, algorithm)
    # Numbers folded into `key`: 0 to epochs - 1 for the minibatches of each epoch (`draw_minibatches`), `epochs`
    # for the loss, and `epochs + 1` for `prepare`.
    indices = draw_minibatches(key, rollout, options, shard)
    loss_key = jax.random.fold_in(jax.random.fold_in(key, options.epochs), shard.index)
    prepare_key = jax.random.fold_in(key, options.epochs + 1)
    optimizer = algorithm.optimizer(options)
    rollout = with_options_applied(rollout, options)
    mean = Mean.over(rollout.weight, shard)
    returned = algorithm.prepare(state, apply, rollout, mean, options, prepare_key)
    prepared, samples, rollout_metrics = check_prepared(state, returned, rollout)
    rollout_metrics = mean_over_devices(rollout_metrics, shard)
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
        value_and_gradient = jax.value_and_grad(
            lambda params: check_loss(algorithm.loss(params, apply, batch, options)), has_aux=True
        )
        (loss, metrics), gradients = value_and_gradient(before.params)
        gradients, metrics = mean_over_devices((gradients, metrics | {"loss": loss}), shard)
        returned = optimizer.update(gradients, before.opt_state, before.params)
        updates, opt_state = check_optimizer_step(before, returned)
        params = optax.apply_updates(before.params, updates)
        after = TrainState(params, opt_state, before.optimizer_steps + 1, before.extra)
        return after, metrics | {"gradient_norm": optax.tree.norm(gradients)}

    if options.target_kl is None:
        trained, metrics = lax.scan(step, prepared, indices)
        metrics = jax.tree.map(jnp.mean, metrics)
    else:
        by_epoch = indices.reshape(options.epochs, -1, indices.shape[-1])
        trained, metrics = scan_epochs(step, prepared, by_epoch, options.target_kl)
    check_names(rollout_metrics.keys(), metrics.keys())
    return trained, metrics | rollout_metrics


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
    """The carry of `scan_epochs`."""

    taken: jax.Array  # int32 []: epochs so far
    state: TrainState
    total: Metrics  # sum of the metrics of all epochs
    approx_kl: jax.Array  # float32 []: mean over the newest epoch


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
