"""Proximal policy optimisation: its equations as pure functions, and `PPO`, the `Algorithm` that they make.

Read `algorithm.py` first, which describes the data. This file has the targets (`gae`, `ppo_prepare`), the loss of
one minibatch (`ppo_loss_of_outputs`), and the optimiser. `update.py` runs them over all minibatches of a rollout.

Axes are [T, B]: T steps of B environments.

Paper: Schulman et al. 2017, arXiv:1707.06347.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxrl_atari.algorithm import Algorithm, Mean, Metrics, Minibatch, Rollout, TrainState
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.networks import Apply, Outputs


class Samples(NamedTuple):
    """The data that `ppo_loss` needs of each step besides its observation: [T, B], or [N] in a minibatch."""

    action: jax.Array
    """int32."""
    log_prob: jax.Array
    """float32: log pi_old(action)."""
    value: jax.Array
    """float32: V_old."""
    advantage: jax.Array
    """float32."""
    target: jax.Array
    """float32: the target of the value."""


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

    # Unrolled, because on a GPU each iteration of a loop launches kernels of its own, however little they do.
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

    Where a game is cut off at step t, step t + 1 is its auto-reset step, which still saw the game's last
    observation. V_{t+1} is therefore the value of that observation. The return bootstraps from it, and the sum of
    rewards stops there. The advantage of an auto-reset step itself is meaningless, but it has weight 0 in every
    mean, except with `learn_from_auto_resets`.

    Args:
        reward, value: float32 [T, B].
        bootstrap_value: float32 [B], V_T.
        terminated, truncated: bool [T, B].

    Returns:
        Advantages, float32 [T, B]. `advantage + value` is the target of the value.
    """
    chex.assert_equal_shape([reward, value, terminated, truncated])
    next_value = jnp.concatenate([value[1:], bootstrap_value[None]])
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    return discounted_sum(delta, jnp.where(terminated | truncated, 0.0, gamma * gae_lambda))


def explained_variance(target: jax.Array, error: jax.Array, mean: Mean) -> jax.Array:
    """1 - Var(error) / Var(target): 1 for a perfect value function, 0 for one that is no better than a constant.

    If Var(target) is below 1e-8, it is taken as 1e-8, and the result is meaningless.

    Args:
        target: float32 [T, B], the target of the value.
        error: float32 [T, B], target - V_old; with GAE this is the advantage.

    Returns:
        float32 [].
    """
    _, unexplained = mean.moments(error)
    _, variance = mean.moments(target)
    return 1.0 - unexplained / jnp.maximum(variance, 1e-8)


def ppo_prepare(
    state: TrainState, apply: Apply, rollout: Rollout, mean: Mean, options: PPOConfig, key: jax.Array
) -> tuple[TrainState, Samples, Metrics]:
    """`Algorithm.prepare`: the samples of a rollout, with the targets of GAE. The state does not change."""
    assert options.gae_lambda is not None  # as `resolved_options` returns it
    advantage = gae(
        reward=rollout.reward,
        value=rollout.value,
        bootstrap_value=rollout.bootstrap_value,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        gamma=options.gamma,
        gae_lambda=options.gae_lambda,
    )
    target = advantage + rollout.value
    samples = Samples(rollout.action, rollout.log_prob, rollout.value, advantage, target)
    return state, samples, {"explained_variance": explained_variance(target, advantage, mean)}


# --- The loss ----------------------------------------------------------------------------------------------------


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    """log pi(action) of the categorical distribution that logits describe: [..., A] and [...] -> [...]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]


def ppo_loss(params: Any, apply: Apply, batch: Minibatch, options: PPOConfig) -> tuple[jax.Array, Metrics]:
    """`Algorithm.loss`: `ppo_loss_of_outputs`, for the outputs of the network."""
    return ppo_loss_of_outputs(apply(params, batch.observation), batch, options)


def ppo_loss_of_outputs(outputs: Outputs, batch: Minibatch, options: PPOConfig) -> tuple[jax.Array, Metrics]:
    """The loss of one minibatch: the negative of the objective of PPO (arXiv:1707.06347, equation 9).

        policy  = -mean(min(ratio A, clip(ratio, 1 - eps, 1 + eps) A))                            (equation 7)
        value   = mean(max((V - target)^2, (V_old + clip(V - V_old, -eps, eps) - target)^2)) / 2
        entropy = -mean(sum_a pi(a) log pi(a))
        loss    = policy + c_v value - c_e entropy

    The value loss is half of the paper's, so c_v is twice the paper's c_1. Value clipping is not in the paper; it
    comes from OpenAI Baselines (`ppo2`), with the same eps.

    Args:
        outputs: of the network for the N samples. Logits are finite. A logit of -1e9 rules an action out, whereas
            -inf would make the entropy NaN.
        batch: its samples are `Samples`.
        options: without `clip_value_loss`, the value loss is mean((V - target)^2) / 2. With
            `normalize_advantages`, A is the advantage with mean 0 and standard deviation 1 over the minibatch.

    Returns:
        The loss, and its parts as metrics; `approx_kl` is Schulman's estimator mean(ratio - 1 - log ratio)
        (http://joschu.net/blog/kl-approx.html).

    Raises:
        InterfaceError: a mean is taken over another shape than [N]: a value [N, 1] minus a target [N] is [N, N].
    """
    logits, value = outputs.logits, outputs.value
    samples = batch.samples
    mean = batch.mean
    advantage = samples.advantage
    if options.normalize_advantages:
        advantage = mean.normalize(advantage, options.unbiased_std)
    log_ratio = log_prob_of(logits, samples.action) - samples.log_prob
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - options.clip_epsilon, 1.0 + options.clip_epsilon)
    policy_loss = -mean(jnp.minimum(ratio * advantage, clipped_ratio * advantage))

    value_error = jnp.square(value - samples.target)
    if options.clip_value_loss:
        value_change = jnp.clip(value - samples.value, -options.clip_epsilon, options.clip_epsilon)
        value_error = jnp.maximum(value_error, jnp.square(samples.value + value_change - samples.target))
    value_loss = 0.5 * mean(value_error)

    log_probs = jax.nn.log_softmax(logits)
    entropy = mean(-jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    loss = policy_loss + options.value_coef * value_loss - options.entropy_coef * entropy
    outside = jnp.abs(ratio - 1.0) > options.clip_epsilon
    return loss, {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": mean(ratio - 1.0 - log_ratio),
        "clip_fraction": mean(outside.astype(jnp.float32)),
    }


# --- The optimiser, and `PPO` ------------------------------------------------------------------------------------


def ppo_optimizer(options: PPOConfig) -> optax.GradientTransformation:
    """`Algorithm.optimizer`: AdamW after clipping by the global norm.

    The weights decay by 0.01 times the learning rate by default, biases included. The paper uses Adam, which is
    AdamW with `weight_decay = 0`.
    """
    return optax.chain(
        optax.clip_by_global_norm(options.max_grad_norm),
        # The three parts of `optax.adamw`. With `adamw` itself, the arrays of a checkpoint would have other names.
        optax.scale_by_adam(eps=options.adam_epsilon),
        optax.add_decayed_weights(options.weight_decay),
        optax.scale_by_learning_rate(options.learning_rate),
    )


PPO = Algorithm(
    init=lambda params, key: (params, ()),  # only the parameters of the network, and no `extra`
    prepare=ppo_prepare,
    loss=ppo_loss,
    optimizer=ppo_optimizer,
)
