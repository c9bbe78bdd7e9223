"""Proximal policy optimisation as pure functions: no I/O, no clock, no state but what is passed in.

Reading order: `Rollout` (the data), `gae` (the targets), `ppo_loss` (one minibatch), `update` (all minibatches
of a rollout). Axes are [T, B]: T steps of B environments. Paper: Schulman et al. 2017, arXiv:1707.06347.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxrl_atari.config import TRACED, PPOConfig
from jaxrl_atari.fast.frames import gather_stacks

KEYS = "threefry2x32"
"""The implementation of all random keys, whatever JAX_DEFAULT_PRNG_IMPL says: a checkpoint holds one."""

Metrics = dict[str, jax.Array]
Apply = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
"""The network: parameters, frame stacks `[N, ...]` -> logits float32 `[N, A]`, value float32 `[N]`."""


# A PPOConfig is a pytree: the options marked `TRACED` are its leaves, all others are static.
_HINTS = get_type_hints(PPOConfig, include_extras=True)
_LEAVES = [name for name, hint in _HINTS.items() if TRACED in getattr(hint, "__metadata__", ())]
jax.tree_util.register_dataclass(PPOConfig, _LEAVES, [name for name in _HINTS if name not in _LEAVES])


class Rollout(NamedTuple):
    """T steps of B environments.

    Each frame is stored once: step t saw the stack that ends at `frames[t + 3]` (`fast/frames.py`). A step of weight 0
    is an auto-reset step: the emulator ignored its action, because the game before it had just ended.
    """

    frames: jax.Array  # uint8 [T + 4, B, *frame]: the last is the newest frame of step T, for the bootstrap value
    age: jax.Array  # int32 [T, B]: earlier frames of the same game, at most 3
    action: jax.Array  # int32 [T, B]
    log_prob: jax.Array  # float32 [T, B]: log pi_old(action)
    value: jax.Array  # float32 [T, B]: V_old
    reward: jax.Array  # float32 [T, B]: clipped to [-1, 1], unless env.clip_rewards is false
    terminated: jax.Array  # bool [T, B]: the game was lost, or a life (env.life_loss_terminal): no value beyond
    truncated: jax.Array  # bool [T, B]: the game was cut off: the value beyond counts, the rewards beyond do not
    weight: jax.Array  # float32 [T, B]: 1, or 0 for an auto-reset step
    bootstrap_value: jax.Array  # float32 [B]: V_old of what step T would see


@flax.struct.dataclass
class TrainState:
    """State that an update replaces."""

    params: Any
    opt_state: optax.OptState
    optimizer_steps: jax.Array  # int32 []


class Minibatch(NamedTuple):
    """The samples of one gradient step, [N]."""

    stacks: jax.Array  # uint8 [N, H, W, 4 * C]: frame stacks, as the network takes them
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array  # normalised over the minibatch, unless config.normalize_advantages is false
    target: jax.Array
    weight: jax.Array  # the sample's share of a mean: over all devices they sum to 1, or to 0 if no sample counts


class Shard(NamedTuple):
    """This device's part of data that is spread over several devices. The default is one device that holds it all."""

    index: jax.typing.ArrayLike = 0
    count: int = 1
    sum: Callable[[Any], Any] = lambda tree: tree  # sum of a tree of arrays over all devices


ONE_DEVICE = Shard()


# --- Acting ----------------------------------------------------------------------------------------------------------


def sample_action(keys: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws an action from each row's categorical distribution, with a key for each row.

    Args:
        keys: [B]; logits: float32 [B, A].

    Returns:
        action int32 [B] and its log probability float32 [B].
    """
    action = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    return action, log_prob_of(logits, action)


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    """log pi(action) of a categorical distribution: logits [N, A], action [N] -> [N]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=-1)[:, 0]


# --- Targets ---------------------------------------------------------------------------------------------------------


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

    Where a game is truncated, V_{t+1} is the value of its last observation (the pool resets one step later). The return
    bootstraps from that value, and the sum of rewards stops there.

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
    decay = jnp.where(terminated | truncated, 0.0, gamma * gae_lambda)

    def backward(next_advantage: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta_t, decay_t = step
        advantage = delta_t + decay_t * next_advantage
        return advantage, advantage

    # Unrolled: on a GPU each iteration of a loop launches kernels of its own, however little they do.
    _, advantage = lax.scan(backward, jnp.zeros_like(bootstrap_value), (delta, decay), reverse=True, unroll=16)
    return advantage


def weighted_moments(x: jax.Array, weight: jax.Array, shard: Shard = ONE_DEVICE) -> tuple[jax.Array, jax.Array]:
    """Mean sum(w x) / sum(w) and variance of the entries of x over all devices."""
    total_weight = jnp.maximum(shard.sum(jnp.sum(weight)), 1.0)
    mean = shard.sum(jnp.sum(weight * x)) / total_weight
    return mean, shard.sum(jnp.sum(weight * jnp.square(x - mean))) / total_weight


def normalize(advantage: jax.Array, weight: jax.Array, shard: Shard = ONE_DEVICE) -> jax.Array:
    """Advantages of a minibatch with mean 0 and standard deviation 1 over the samples that carry weight."""
    mean, variance = weighted_moments(advantage, weight, shard)
    return (advantage - mean) / (jnp.sqrt(variance) + 1e-8)


# --- The loss --------------------------------------------------------------------------------------------------------


def ppo_loss(params: Any, apply: Apply, batch: Minibatch, config: PPOConfig) -> tuple[jax.Array, Metrics]:
    """The loss of one minibatch of N samples (arXiv:1707.06347, equation 9), with sample weights w that sum to 1.

        policy  = -sum(w min(ratio A, clip(ratio, 1 - eps, 1 + eps) A))                            (equation 7)
        value   = sum(w max((V - target)^2, (V_old + clip(V - V_old, -eps, eps) - target)^2)) / 2
        entropy = -sum(w sum_a pi(a) log pi(a))
        loss    = policy + c_v value - c_e entropy

    Value clipping is not in the paper; it comes from OpenAI Baselines (`ppo2`), with the same eps.

    Args:
        params: parameters of the network `apply`, which are being trained.
        batch: where devices share a minibatch, this device's samples. The loss is then this device's summand: a new
            term has the form `sum(batch.weight * x)`; one without samples, such as a penalty on parameters, is
            multiplied by `sum(batch.weight)`, which over all devices is 1.
        config: without `clip_value_loss`, the value loss is (V - target)^2 alone.

    Returns:
        The loss and its parts; `approx_kl` is Schulman's estimator mean(ratio - 1 - log ratio)
        (http://joschu.net/blog/kl-approx.html).
    """
    logits, value = apply(params, batch.stacks)
    chex.assert_rank([logits, value], [2, 1])
    chex.assert_equal_shape([value, batch.action, batch.advantage, batch.target, batch.weight])
    log_ratio = log_prob_of(logits, batch.action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - config.clip_epsilon, 1.0 + config.clip_epsilon)
    surrogate = jnp.minimum(ratio * batch.advantage, clipped_ratio * batch.advantage)
    policy_loss = -jnp.sum(batch.weight * surrogate)

    value_error = jnp.square(value - batch.target)
    if config.clip_value_loss:
        value_change = jnp.clip(value - batch.value, -config.clip_epsilon, config.clip_epsilon)
        value_error = jnp.maximum(value_error, jnp.square(batch.value + value_change - batch.target))
    value_loss = 0.5 * jnp.sum(batch.weight * value_error)

    log_probs = jax.nn.log_softmax(logits)
    entropy = jnp.sum(batch.weight * -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    outside = jnp.abs(ratio - 1.0) > config.clip_epsilon
    return loss, {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": jnp.sum(batch.weight * (ratio - 1.0 - log_ratio)),
        "clip_fraction": jnp.sum(batch.weight * outside.astype(jnp.float32)),
    }


# --- Learning --------------------------------------------------------------------------------------------------------


def make_optimizer(config: PPOConfig) -> optax.GradientTransformation:
    """AdamW's direction, without sign and step size: `update` subtracts the learning rate times it.

    Another optimiser is one of optax's `scale_by_...`; `optax.adam` and its like would step uphill.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(eps=config.adam_epsilon),
        optax.add_decayed_weights(config.weight_decay),
    )


def init_train_state(params: Any, config: PPOConfig) -> TrainState:
    """The state before the first update."""
    return TrainState(params, make_optimizer(config).init(params), jnp.zeros((), jnp.int32))


def minibatch_indices(
    key: jax.Array,
    rollout_length: int,
    num_envs: int,
    epochs: int,
    minibatch_size: int,
    shard: Shard = ONE_DEVICE,
) -> jax.Array:
    """Random minibatches, stratified by environment: each epoch is a fresh permutation of the samples.

    The environments of all devices are cut into gcd(environments, minibatch size) equal blocks (by default 16
    blocks of one environment), and each minibatch takes the same number of samples from each block. A device that
    holds some of the blocks thus draws its part of the minibatches that a single device would draw.

    Args:
        num_envs, minibatch_size: on this device.

    Returns:
        int32 [epochs * T * B / minibatch_size, minibatch_size]: samples as t * B + b.
    """
    blocks = math.gcd(num_envs, minibatch_size)  # on this device; c devices have c gcd(n, m) = gcd(c n, c m)
    width = num_envs // blocks

    def permute(epoch: jax.Array, block: jax.Array) -> jax.Array:
        block_key = jax.random.fold_in(jax.random.fold_in(key, epoch), shard.index * blocks + block)
        sample = jax.random.permutation(block_key, rollout_length * width)
        return sample // width * num_envs + block * width + sample % width

    epoch, block = jnp.divmod(jnp.arange(epochs * blocks), blocks)
    shuffled = jax.vmap(permute)(epoch, block).reshape(epochs, blocks, -1, minibatch_size // blocks)
    return shuffled.swapaxes(1, 2).reshape(-1, minibatch_size)


def update(
    state: TrainState,
    rollout: Rollout,
    config: PPOConfig,
    key: jax.Array,
    *,
    apply: Apply,
    shard: Shard = ONE_DEVICE,
) -> tuple[TrainState, Metrics]:
    """All epochs and minibatches over one rollout: the function that is compiled and run once per rollout.

    On several devices each one holds its environments and its part of each minibatch. Loss, advantage statistics and
    gradients are those of the whole minibatch, so the result does not depend on the split.

    Args:
        config: its learning rate is that of this update.

    Returns:
        The new state and metrics: means over the gradient steps taken, and `explained_variance`. With
        `config.target_kl` also `skipped_steps`, the gradient steps of the epochs that were left out.
    """
    assert config.gae_lambda is not None, "pass the value of Config.resolved_gae_lambda"
    rollout_length, num_envs = rollout.action.shape
    optimizer = make_optimizer(config)
    advantages = gae(
        rollout.reward, rollout.value, rollout.bootstrap_value, rollout.terminated, rollout.truncated,
        config.gamma, config.gae_lambda,
    )  # fmt: skip
    targets = advantages + rollout.value
    per_step = (rollout.action, rollout.log_prob, rollout.value, advantages, targets, rollout.weight)
    samples = [x.reshape(-1) for x in per_step]  # [T, B] -> [T * B]

    def step(state: TrainState, index: jax.Array) -> tuple[TrainState, Metrics]:
        """One gradient step on the samples `index`, [N]."""
        stacks = gather_stacks(rollout.frames, rollout.age, index)
        action, log_prob, value, advantage, target, weight = (x[index] for x in samples)
        if config.normalize_advantages:
            advantage = normalize(advantage, weight, shard)
        weight = weight / jnp.maximum(shard.sum(jnp.sum(weight)), 1.0)
        batch = Minibatch(stacks, action, log_prob, value, advantage, target, weight)
        gradient = jax.grad(ppo_loss, has_aux=True)
        gradients, metrics = shard.sum(gradient(state.params, apply, batch, config))
        metrics["gradient_norm"] = optax.tree.norm(gradients)
        direction, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = jax.tree.map(lambda p, d: p - config.learning_rate * d, state.params, direction)
        return TrainState(params, opt_state, state.optimizer_steps + 1), metrics

    indices = minibatch_indices(
        key, rollout_length, num_envs, config.epochs, config.minibatch_size // shard.count, shard
    )
    if config.target_kl is None:
        state, metrics = lax.scan(step, state, indices)
        metrics = jax.tree.map(jnp.mean, metrics)
    else:
        epochs = indices.reshape(config.epochs, -1, indices.shape[-1])
        state, metrics = scan_epochs(step, state, epochs, config.target_kl)
    return state, {
        **metrics,
        "explained_variance": explained_variance(targets, advantages, rollout.weight, shard),
    }


def scan_epochs(step: Callable, state: TrainState, epochs: jax.Array, target_kl: float) -> tuple[TrainState, Metrics]:
    """Scans `step` over one epoch after another, until the mean `approx_kl` of an epoch exceeds `target_kl`.

    Args:
        epochs: int32 [epochs, steps, N], the minibatches of each epoch.

    Returns:
        The new state and the metrics: means over the steps taken, and `skipped_steps`.
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
    total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    first = (jnp.zeros((), jnp.int32), state, total, jnp.zeros_like(total["approx_kl"]))
    number, state, total, _ = lax.while_loop(proceeds, epoch, first)
    skipped = (num_epochs - number) * steps
    return state, {**jax.tree.map(lambda x: x / number, total), "skipped_steps": skipped.astype(jnp.float32)}


def explained_variance(target: jax.Array, error: jax.Array, weight: jax.Array, shard: Shard = ONE_DEVICE) -> jax.Array:
    """1 - Var(error) / Var(target): 1 is a perfect value function, 0 no better than a constant.

    Args:
        error: target - V_old, which is the advantage.
    """
    _, unexplained = weighted_moments(error, weight, shard)
    _, variance = weighted_moments(target, weight, shard)
    return 1.0 - unexplained / jnp.maximum(variance, 1e-8)
