"""Proximal policy optimisation as pure functions: no I/O, no clock, no state but what is passed in.

Reading order: `Rollout` (the data, in `minibatches.py`), `gae` and `ppo_samples` (the targets), `ppo_terms` (the
loss of one minibatch), `update` (all minibatches of a rollout). `Algorithm` is the record of the parts that an
idea replaces, and `PPO` its default. Axes are [T, B]: T steps of B environments.

Paper: Schulman et al. 2017, arXiv:1707.06347.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, get_type_hints

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxrl_atari.config import TRACED, PPOConfig
from jaxrl_atari.errors import require
from jaxrl_atari.minibatches import ONE_DEVICE, Mean, Rollout, Shard, draw_minibatches, observe
from jaxrl_atari.networks import Apply, Observation, Outputs
from jaxrl_atari.registry import ALGORITHMS

KEYS = "threefry2x32"
"""The implementation of all random keys, whatever JAX_DEFAULT_PRNG_IMPL says: a checkpoint holds one."""

Metrics = dict[str, jax.Array]
"""Name -> float32 []. A new name needs no entry anywhere to be logged."""


# A PPOConfig is a pytree: the options marked `TRACED` are its leaves, all others are static.
_HINTS = get_type_hints(PPOConfig, include_extras=True)
_LEAVES = [name for name, hint in _HINTS.items() if TRACED in getattr(hint, "__metadata__", ())]
jax.tree_util.register_dataclass(PPOConfig, _LEAVES, [name for name in _HINTS if name not in _LEAVES])


@flax.struct.dataclass
class TrainState:
    """State that an update replaces, and that a checkpoint keeps. Equal on all devices."""

    params: Any
    opt_state: optax.OptState
    optimizer_steps: jax.Array  # int32 []: gradient steps so far
    extra: Any = ()  # what an algorithm keeps besides, such as running statistics: any pytree of arrays


class Samples(NamedTuple):
    """What `ppo_loss` needs of each step besides its observation: [T, B], in a minibatch [N]."""

    action: jax.Array  # int32
    log_prob: jax.Array  # float32: log pi_old(action)
    value: jax.Array  # float32: V_old
    advantage: jax.Array  # float32
    target: jax.Array  # float32: what the value learns


class Minibatch(NamedTuple):
    """What the loss of one gradient step may use: N samples, on each device its part of them."""

    observation: Observation  # change its pictures through `fast.frames.map_images`
    samples: Any  # as `Algorithm.prepare` returned them, [N, ...]
    mean: Mean  # the mean over the minibatch
    key: jax.Array  # for what a loss draws: another one in each gradient step, and on each device
    extra: Any = ()  # `TrainState.extra`, as `prepare` returned it


# --- Acting ------------------------------------------------------------------------------------------------------


def sample_action(keys: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws an action from each row's categorical distribution, with a key for each row.

    Args:
        keys: [B].
        logits: float32 [B, A].

    Returns:
        The actions, int32 [B], and their log probabilities, float32 [B].
    """
    action = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    return action, log_prob_of(logits, action)


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    """log pi(action) of a categorical distribution: logits [N, A], action [N] -> [N]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=-1)[:, 0]


# --- Targets -----------------------------------------------------------------------------------------------------


def discounted_sum(x: jax.Array, decay: jax.Array) -> jax.Array:
    """y_t = x_t + decay_t y_{t+1}, with y_T = 0.

    Args:
        x, decay: float32 [T, B].

    Returns:
        float32 [T, B].
    """

    def backward(next_sum: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_t, decay_t = step
        total = x_t + decay_t * next_sum
        return total, total

    # Unrolled: on a GPU each iteration of a loop launches kernels of its own, however little they do.
    _, sums = lax.scan(backward, jnp.zeros_like(x[0]), (x, decay), reverse=True, unroll=16)
    return sums


def gae(
    reward: jax.Array,
    value: jax.Array,
    bootstrap_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: jax.typing.ArrayLike,
    gae_lambda: jax.typing.ArrayLike,
) -> jax.Array:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equation 16).

        delta_t = r_t + gamma * (1 - terminated_t) * V_{t+1} - V_t
        A_t     = delta_t + gamma * lambda * (1 - terminated_t) * (1 - truncated_t) * A_{t+1},    A_T = 0

    Where a game is truncated, V_{t+1} is the value of its last observation (the pool resets one step later). The
    return bootstraps from that value, and the sum of rewards stops there.

    Args:
        reward, value: float32 [T, B].
        bootstrap_value: float32 [B], V_T.
        terminated, truncated: bool [T, B].

    Returns:
        Advantages, float32 [T, B]; `advantage + value` are the targets of the value function.
    """
    chex.assert_equal_shape([reward, value, terminated, truncated])
    next_value = jnp.concatenate([value[1:], bootstrap_value[None]])
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    return discounted_sum(delta, jnp.where(terminated | truncated, 0.0, gamma * gae_lambda))


def explained_variance(target: jax.Array, error: jax.Array, mean: Mean) -> jax.Array:
    """1 - Var(error) / Var(target): 1 is a perfect value function, 0 no better than a constant.

    Args:
        target, error: float32 [T, B]; error = target - V_old, which of GAE is the advantage.

    Returns:
        float32 [].
    """
    _, unexplained = mean.moments(error)
    _, variance = mean.moments(target)
    return 1.0 - unexplained / jnp.maximum(variance, 1e-8)


def ppo_samples(
    state: TrainState, apply: Apply, rollout: Rollout, mean: Mean, config: PPOConfig, key: jax.Array
) -> tuple[TrainState, Samples, Metrics]:
    """The samples of a rollout with the targets of GAE: `Algorithm.prepare` of PPO. It draws nothing."""
    assert config.gae_lambda is not None, "pass the value of Config.resolved_gae_lambda"
    advantage = gae(
        rollout.reward, rollout.value, rollout.bootstrap_value, rollout.terminated, rollout.truncated,
        config.gamma, config.gae_lambda,
    )  # fmt: skip
    target = advantage + rollout.value
    samples = Samples(rollout.action, rollout.log_prob, rollout.value, advantage, target)
    return state, samples, {"explained_variance": explained_variance(target, advantage, mean)}


# --- The loss ----------------------------------------------------------------------------------------------------


def ppo_loss(params: Any, apply: Apply, batch: Minibatch, config: PPOConfig) -> tuple[jax.Array, Metrics]:
    """The loss of one minibatch: `Algorithm.loss` of PPO. See `ppo_terms`."""
    return ppo_terms(apply(params, batch.observation), batch, config)


def ppo_terms(outputs: Outputs, batch: Minibatch, config: PPOConfig) -> tuple[jax.Array, Metrics]:
    """The loss of PPO for the outputs of the network (arXiv:1707.06347, equation 9).

        policy  = -mean(min(ratio A, clip(ratio, 1 - eps, 1 + eps) A))                            (equation 7)
        value   = mean(max((V - target)^2, (V_old + clip(V - V_old, -eps, eps) - target)^2)) / 2
        entropy = -mean(sum_a pi(a) log pi(a))
        loss    = policy + c_v value - c_e entropy

    Value clipping is not in the paper; it comes from OpenAI Baselines (`ppo2`), with the same eps.

    Args:
        batch: its samples are `Samples`.
        config: without `clip_value_loss`, the value loss is mean((V - target)^2) / 2. With `normalize_advantages`,
            A is the advantage with mean 0 and standard deviation 1 over the minibatch.

    Returns:
        The loss and its parts; `approx_kl` is Schulman's estimator mean(ratio - 1 - log ratio)
        (http://joschu.net/blog/kl-approx.html).
    """
    logits, value, *_ = outputs
    old = batch.samples
    mean = batch.mean
    chex.assert_rank([logits, value], [2, 1])
    chex.assert_equal_shape([value, old.action, old.advantage, old.target, mean.weight])
    advantage = old.advantage
    if config.normalize_advantages:
        advantage = mean.normalize(advantage, config.unbiased_std)
    log_ratio = log_prob_of(logits, old.action) - old.log_prob
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - config.clip_epsilon, 1.0 + config.clip_epsilon)
    policy_loss = -mean(jnp.minimum(ratio * advantage, clipped_ratio * advantage))

    value_error = jnp.square(value - old.target)
    if config.clip_value_loss:
        value_change = jnp.clip(value - old.value, -config.clip_epsilon, config.clip_epsilon)
        value_error = jnp.maximum(value_error, jnp.square(old.value + value_change - old.target))
    value_loss = 0.5 * mean(value_error)

    log_probs = jax.nn.log_softmax(logits)
    entropy = mean(-jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    outside = jnp.abs(ratio - 1.0) > config.clip_epsilon
    return loss, {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": mean(ratio - 1.0 - log_ratio),
        "clip_fraction": mean(outside.astype(jnp.float32)),
    }


# --- The optimiser -----------------------------------------------------------------------------------------------


def make_optimizer(config: PPOConfig) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm: `Algorithm.optimizer` of PPO."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        # Not `optax.adamw`, which nests these: the arrays of a checkpoint would have other names.
        optax.scale_by_adam(eps=config.adam_epsilon),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(config.learning_rate),
    )


# --- What an idea replaces ---------------------------------------------------------------------------------------


def no_extra(params: Any, key: jax.Array) -> tuple[Any, Any]:
    """The parameters of the network alone, and nothing to keep: `Algorithm.init` of PPO."""
    return params, ()


class Init(Protocol):
    """`Algorithm.init`."""

    def __call__(self, params: Any, key: jax.Array, /) -> tuple[Any, Any]:
        """Called once, before the first update.

        Args:
            params: parameters of the network.
            key: for what is drawn.

        Returns:
            All parameters that the loss trains, and `TrainState.extra`.
        """
        ...


class Prepare(Protocol):
    """`Algorithm.prepare`."""

    def __call__(
        self, state: TrainState, apply: Apply, rollout: Rollout, mean: Mean, config: PPOConfig, key: jax.Array, /
    ) -> tuple[TrainState, Any, Metrics]:
        """Called once per rollout, before its gradient steps.

        Args:
            apply: the network; `minibatches.apply_to_rollout` gives its outputs for all steps.
            mean: the mean over the rollout, of x [T, B].
            key: for what is drawn. It is the same on all devices, because `extra` must be equal on all of them.

        Returns:
            The state, with another `extra` where one is kept; the samples, any pytree of arrays [T, B, ...];
            metrics.
        """
        ...


class Loss(Protocol):
    """`Algorithm.loss`."""

    def __call__(
        self, params: Any, apply: Apply, batch: Minibatch, config: PPOConfig, /
    ) -> tuple[jax.Array, Metrics]:
        """Called in every gradient step.

        Args:
            params: what the gradient is taken for.
            batch: its samples are those of `prepare`, [N, ...].

        Returns:
            The loss of the minibatch, float32 [], and metrics. All of them are logged.
        """
        ...


class MakeOptimizer(Protocol):
    """`Algorithm.optimizer`."""

    def __call__(self, config: PPOConfig, /) -> optax.GradientTransformation:
        """Any optimiser of optax. `config.learning_rate` is the rate of this update."""
        ...


class Algorithm(NamedTuple):
    """The parts of an update that an idea replaces, as in `PPO._replace(loss=my_loss)`.

    They are pure functions, which become part of the compiled update. Options of an algorithm are arguments of a
    function that makes it, as in `algorithms/rnd.py`.
    """

    init: Init = no_extra
    prepare: Prepare = ppo_samples
    loss: Loss = ppo_loss
    optimizer: MakeOptimizer = make_optimizer


PPO = Algorithm()


def register(name: str, algorithm: Algorithm) -> None:
    """Lets a config choose an algorithm of your own, as in `--algorithm my_idea`.

    Args:
        name: a new name. A later algorithm of the same name replaces the earlier one.

    Raises:
        ConfigError: the name is taken by the package, or `algorithm` is not an `Algorithm` of functions.
    """
    expected = "an Algorithm, such as PPO._replace(loss=my_loss)"
    require(isinstance(algorithm, Algorithm), ALGORITHMS.field, name, expected, f"got {algorithm!r}")
    for part, function in algorithm._asdict().items():
        # Compiled updates are kept by their functions, which must be hashable for that.
        usable = callable(function) and isinstance(function, Hashable)
        require(usable, f"{ALGORITHMS.field} {name}: {part}", function, "a function (hashable)")
    ALGORITHMS.register(name, algorithm)


# --- The update --------------------------------------------------------------------------------------------------


def init_train_state(
    params: Any, config: PPOConfig, algorithm: Algorithm = PPO, key: jax.Array | None = None
) -> TrainState:
    """The state before the first update.

    Args:
        params: parameters of the network.
        key: for what `algorithm.init` draws; PPO draws nothing.
    """
    params, extra = algorithm.init(params, jax.random.key(0, impl=KEYS) if key is None else key)
    return TrainState(params, algorithm.optimizer(config).init(params), jnp.zeros((), jnp.int32), extra)


def as_learned(rollout: Rollout, config: PPOConfig) -> Rollout:
    """The rollout with the conventions of other implementations, where the config asks for them.

    truncation_is_terminal:  terminated_t := max(terminated_t, truncated_t)    (CleanRL, OpenAI Baselines)
    learn_from_auto_resets:  weight_t := 1                                     (CleanRL with EnvPool, SLM Lab)
    """
    if config.truncation_is_terminal:
        rollout = rollout._replace(terminated=rollout.terminated | rollout.truncated)
    if config.learn_from_auto_resets:
        rollout = rollout._replace(weight=jnp.ones_like(rollout.weight))
    return rollout


def update(
    state: TrainState,
    rollout: Rollout,
    config: PPOConfig,
    key: jax.Array,
    *,
    apply: Apply,
    algorithm: Algorithm = PPO,
    shard: Shard = ONE_DEVICE,
) -> tuple[TrainState, Metrics]:
    """All epochs and minibatches over one rollout: the function that is compiled and run once per rollout.

    On several devices each one holds its environments and its part of each minibatch. Every `Mean` is that of the
    whole minibatch or rollout, so the result does not depend on the split, and a loss is written as for one
    device.

    Args:
        config: its learning rate is that of this update.
        key: for the minibatches, and for what the algorithm draws; the same on all devices.
        apply: the network.
        shard: this device's part of the rollout.

    Returns:
        The new state and metrics: means over the gradient steps taken, and those of the rollout. With
        `config.target_kl` also `skipped_steps`, the gradient steps of the epochs that were left out.
    """
    rollout = as_learned(rollout, config)
    optimizer = algorithm.optimizer(config)
    # Epoch e draws its minibatches from `fold_in(key, e)`.
    prepare_key = jax.random.fold_in(key, config.epochs + 1)
    loss_key = jax.random.fold_in(jax.random.fold_in(key, config.epochs), shard.index)
    mean = Mean.over(rollout.weight, shard)
    state, samples, rollout_metrics = algorithm.prepare(state, apply, rollout, mean, config, prepare_key)
    # [T, B, ...] -> [T * B, ...]
    flat_samples, flat_weight = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (samples, rollout.weight))

    def step(state: TrainState, index: jax.Array) -> tuple[TrainState, Metrics]:
        """One gradient step on the samples `index`, [N]."""
        samples, weight = jax.tree.map(lambda x: x[index], (flat_samples, flat_weight))
        batch = Minibatch(
            observe(rollout, index),
            samples,
            Mean.over(weight, shard),
            jax.random.fold_in(loss_key, state.optimizer_steps),
            state.extra,
        )
        value_and_gradient = jax.value_and_grad(algorithm.loss, has_aux=True)
        (loss, metrics), gradients = value_and_gradient(state.params, apply, batch, config)
        metrics = checked(metrics) | {"loss": loss}
        if shard.count > 1:
            # Each device's loss is already that of all devices. The gradient of a sum over devices is again a sum,
            # so what each device has is `count` times its own summand, and the gradient is the mean over devices.
            gradients, metrics = jax.tree.map(lambda x: x / shard.count, shard.sum((gradients, metrics)))
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = TrainState(params, opt_state, state.optimizer_steps + 1, state.extra)
        return state, metrics | {"gradient_norm": optax.tree.norm(gradients)}

    indices = draw_minibatches(key, rollout, config, shard)
    if config.target_kl is None:
        state, metrics = lax.scan(step, state, indices)
        metrics = jax.tree.map(jnp.mean, metrics)
    else:
        epochs = indices.reshape(config.epochs, -1, indices.shape[-1])
        state, metrics = scan_epochs(step, state, epochs, config.target_kl)
    return state, metrics | checked(rollout_metrics)


def checked(metrics: Metrics) -> Metrics:
    """The metrics of an algorithm.

    Raises:
        ConfigError: one of them is not a single number.
    """
    for name, value in metrics.items():
        shape = jnp.shape(value)
        require(shape == (), "metric", name, "a single number, such as batch.mean(x)", f"its shape is {shape}")
    return metrics


def scan_epochs(
    step: Callable, state: TrainState, epochs: jax.Array, target_kl: float
) -> tuple[TrainState, Metrics]:
    """Scans `step` over one epoch after another, until the mean `approx_kl` of an epoch exceeds `target_kl`.

    Args:
        step: state, int32 [N] -> state, metrics.
        epochs: int32 [epochs, steps, N], the minibatches of each epoch.

    Returns:
        The new state and the metrics: means over the steps taken, and `skipped_steps`.

    Raises:
        ConfigError: the metrics have no `approx_kl`.
    """
    num_epochs, steps, _ = epochs.shape

    def epoch(carry: tuple) -> tuple:
        number, state, total, _ = carry
        state, metrics = lax.scan(step, state, epochs[number])
        means = jax.tree.map(jnp.mean, metrics)
        return number + 1, state, jax.tree.map(jnp.add, total, means), means["approx_kl"]

    def proceeds(carry: tuple) -> jax.Array:
        number, _, _, approx_kl = carry
        return (number < num_epochs) & ~(approx_kl > target_kl)

    _, shapes = jax.eval_shape(step, state, epochs[0, 0])
    require(
        "approx_kl" in shapes, "ppo.target_kl", target_kl, "None: the loss of this algorithm returns no approx_kl"
    )
    total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    first = (jnp.zeros((), jnp.int32), state, total, jnp.zeros_like(total["approx_kl"]))
    number, state, total, _ = lax.while_loop(proceeds, epoch, first)
    skipped = (num_epochs - number) * steps
    return state, {**jax.tree.map(lambda x: x / number, total), "skipped_steps": skipped.astype(jnp.float32)}
