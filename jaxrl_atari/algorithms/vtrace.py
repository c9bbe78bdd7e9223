"""PPO with the targets of V-trace (Espeholt et al. 2018, arXiv:1802.01561), for rollouts that are an update old.

With `overlap = "update"` the parameters that acted are one update older than those that learn. V-trace corrects
the targets for that; without overlap its ratios are 1, and its advantages differ from GAE's only in how they use
lambda.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_atari.config import PPOConfig
from jaxrl_atari.networks import Apply
from jaxrl_atari.ppo import (
    PPO,
    Mean,
    Metrics,
    Rollout,
    Samples,
    TrainState,
    apply_to_rollout,
    explained_variance,
    log_prob_of,
)


def prepare(
    state: TrainState, apply: Apply, rollout: Rollout, mean: Mean, config: PPOConfig
) -> tuple[TrainState, Samples, Metrics]:
    """`Algorithm.prepare` (equation 1 and section 4.2, with rho and c cut at 1; `gae_lambda` is the paper's
    lambda).

        delta_t = rho_t (r_t + gamma V_{t+1} - V_t)
        v_t     = V_t + delta_t + gamma c_t (v_{t+1} - V_{t+1}),              c_t = lambda rho_t
        A_t     = r_t + gamma v_{t+1} - V_t

    The paper weights A_t with rho_t. PPO's loss does so with its ratio, so A_t itself has no weight here.

    V is that of the parameters that learn, except V_T, the rollout's bootstrap value. Beyond the end of a game
    there is no value; where a game is cut off, v_{t+1} is V_{t+1}.
    """
    assert config.gae_lambda is not None, "pass the value of Config.resolved_gae_lambda"
    outputs = apply_to_rollout(state.params, apply, rollout)
    value = outputs.value
    log_prob = jax.vmap(log_prob_of)(outputs.logits, rollout.action)
    rho = jnp.minimum(jnp.exp(log_prob - rollout.log_prob), 1.0)

    next_value = jnp.concatenate([value[1:], rollout.bootstrap_value[None]])
    discount = jnp.where(rollout.terminated, 0.0, config.gamma)
    delta = rho * (rollout.reward + discount * next_value - value)
    decay = jnp.where(rollout.terminated | rollout.truncated, 0.0, config.gamma * config.gae_lambda * rho)

    def backward(next_correction: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta_t, decay_t = step
        correction = delta_t + decay_t * next_correction
        return correction, correction

    _, correction = lax.scan(
        backward, jnp.zeros_like(rollout.bootstrap_value), (delta, decay), reverse=True, unroll=16
    )
    target = value + correction
    next_target = jnp.concatenate([target[1:], rollout.bootstrap_value[None]])
    next_target = jnp.where(rollout.truncated, next_value, next_target)
    advantage = rollout.reward + discount * next_target - value
    samples = Samples(rollout.action, rollout.log_prob, value, advantage, target)
    metrics = {"explained_variance": explained_variance(target, correction, mean), "mean_rho": mean(rho)}
    return state, samples, metrics


VTRACE = PPO._replace(prepare=prepare)
