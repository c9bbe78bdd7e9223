"""PPO with the targets of V-trace (Espeholt et al. 2018, arXiv:1802.01561), for a policy that acts an update late.

With `overlap = "update"`, the parameters that acted are one update older than the parameters that learn. V-trace
corrects the targets for this lag. Without overlap, its ratios are 1 up to rounding. If `max_rho` and `max_c` are
at least 1, its targets are then the targets of GAE, and its advantages differ only in how they use lambda.

The file replaces one part of PPO, `prepare`. Optimiser and loss are PPO's. The ratio in the loss still compares
with the policy that acted. V_old, around which the loss clips the value, comes from the parameters that learn.

The file is an example of the interface. It is not tuned, and was not compared with PPO on a game.
"""

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from jaxrl_atari.algorithm import Mean, Metrics, Rollout, TrainState
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.networks import Apply
from jaxrl_atari.ppo import PPO, Samples, discounted_sum, explained_variance, log_prob_of
from jaxrl_atari.update import apply_to_rollout


def vtrace(
    rollout: Rollout, value: jax.Array, rho: jax.Array, c: jax.Array, gamma: jax.typing.ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Targets and advantages (equation 1 and section 4.2).

        delta_t = rho_t (r_t + gamma V_{t+1} - V_t)
        v_t     = V_t + delta_t + gamma c_t (v_{t+1} - V_{t+1}),    v_T = V_T
        A_t     = r_t + gamma v_{t+1} - V_t

    Beyond a terminal step there is no value. Beyond a truncated step the value counts, and v_{t+1} is V_{t+1}.

    The paper weights A_t with rho_t. Here A_t has no weight, because PPO's loss weights it with its own ratio.

    Args:
        value: float32 [T + 1, B], V of the parameters that learn.
        rho, c: float32 [T, B], truncated ratios pi / pi_old of the actions taken. c is multiplied by lambda, as in
            the paper's remark 2.

    Returns:
        v and A, float32 [T, B].
    """
    value, next_value = value[:-1], value[1:]
    discount = jnp.where(rollout.terminated, 0.0, gamma)
    delta = rho * (rollout.reward + discount * next_value - value)
    decay = jnp.where(rollout.terminated | rollout.truncated, 0.0, gamma * c)
    target = value + discounted_sum(delta, decay)
    next_target = jnp.concatenate([target[1:], next_value[-1:]])
    next_target = jnp.where(rollout.truncated, next_value, next_target)
    return target, rollout.reward + discount * next_target - value


def prepare(
    state: TrainState, apply: Apply, rollout: Rollout, mean: Mean, options: PPOConfig, key: jax.Array
) -> tuple[TrainState, Samples, Metrics]:
    """`Algorithm.prepare`: the samples with the targets of V-trace.

    Without overlap, and with `max_rho` of at least 1, the metric `mean_rho` is 1 up to rounding.
    """
    outputs = apply_to_rollout(state.params, apply, rollout, mean, options)
    ratio = jnp.exp(log_prob_of(outputs.logits[:-1], rollout.action) - rollout.log_prob)
    rho = jnp.minimum(ratio, options.coefficients["max_rho"])
    assert options.gae_lambda is not None  # as `resolved_options` returns it
    c = options.gae_lambda * jnp.minimum(ratio, options.coefficients["max_c"])
    target, advantage = vtrace(rollout, outputs.value, rho, c, options.gamma)
    value = outputs.value[:-1]
    samples = Samples(rollout.action, rollout.log_prob, value, advantage, target)
    explained = explained_variance(target, target - value, mean)
    return state, samples, {"explained_variance": explained, "mean_rho": mean(rho)}


COEFFICIENTS = FrozenDict(max_rho=1.0, max_c=1.0)  # truncation of the ratios: the paper's rho-bar and c-bar

VTRACE = PPO._replace(prepare=prepare, coefficients=COEFFICIENTS)
