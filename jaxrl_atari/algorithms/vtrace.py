"""PPO with the targets of V-trace (Espeholt et al. 2018, arXiv:1802.01561), for a policy that acts an update late.

With `overlap = "update"` the parameters that acted are one update older than those that learn. V-trace corrects
the targets for that. Without overlap its ratios are 1: its targets are those of GAE, and its advantages differ
only in how they use lambda.

It replaces one part of PPO, `prepare`. Optimiser and loss are PPO's: the ratio that the loss clips stays that to
the policy that acted, while V_old, around which it clips the value, is of the parameters that learn.

An example of the interface: not tuned, and not compared with PPO on a game.
"""

import jax
import jax.numpy as jnp

from jaxrl_atari.algorithm import Metrics, TrainState
from jaxrl_atari.categorical import log_prob_of
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.minibatches import Mean, Rollout, apply_to_rollout
from jaxrl_atari.networks import Apply
from jaxrl_atari.ppo import PPO, Samples, discounted_sum, explained_variance


def vtrace(
    rollout: Rollout,
    value: jax.Array,
    rho: jax.Array,
    gamma: jax.typing.ArrayLike,
    gae_lambda: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Targets and advantages (equation 1, remark 2 and section 4.2, with rho and c cut at 1).

        delta_t = rho_t (r_t + gamma V_{t+1} - V_t)
        v_t     = V_t + delta_t + gamma c_t (v_{t+1} - V_{t+1}),              c_t = lambda rho_t
        A_t     = r_t + gamma v_{t+1} - V_t

    Beyond a terminal step there is no value. Beyond a truncated step the value counts, and v_{t+1} is V_{t+1}.

    The paper weights A_t with rho_t. PPO's loss does so with its ratio, so A_t itself has no weight here.

    Args:
        value: float32 [T, B], V of the parameters that learn. V_T is the rollout's bootstrap value, and so of the
            parameters that acted: an approximation, as step T is no sample.
        rho: float32 [T, B], min(pi / pi_old, 1) of the actions taken.

    Returns:
        v and A, float32 [T, B].
    """
    next_value = jnp.concatenate([value[1:], rollout.bootstrap_value[None]])
    discount = jnp.where(rollout.terminated, 0.0, gamma)
    delta = rho * (rollout.reward + discount * next_value - value)
    decay = jnp.where(rollout.terminated | rollout.truncated, 0.0, gamma * gae_lambda * rho)
    target = value + discounted_sum(delta, decay)
    next_target = jnp.concatenate([target[1:], rollout.bootstrap_value[None]])
    next_target = jnp.where(rollout.truncated, next_value, next_target)
    return target, rollout.reward + discount * next_target - value


def prepare(
    state: TrainState, apply: Apply, rollout: Rollout, mean: Mean, config: PPOConfig, key: jax.Array
) -> tuple[TrainState, Samples, Metrics]:
    """`Algorithm.prepare`: the samples with the targets of V-trace. The metric `mean_rho` is 1 without overlap."""
    assert config.gae_lambda is not None, "pass the value of Config.resolved_gae_lambda"
    outputs = apply_to_rollout(state.params, apply, rollout, config.minibatch_size)
    log_prob = log_prob_of(outputs.logits, rollout.action)
    rho = jnp.minimum(jnp.exp(log_prob - rollout.log_prob), 1.0)
    target, advantage = vtrace(rollout, outputs.value, rho, config.gamma, config.gae_lambda)
    samples = Samples(rollout.action, rollout.log_prob, outputs.value, advantage, target)
    explained = explained_variance(target, target - outputs.value, mean)
    return state, samples, {"explained_variance": explained, "mean_rho": mean(rho)}


VTRACE = PPO._replace(prepare=prepare)
