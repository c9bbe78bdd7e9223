"""The categorical distribution over actions that the logits of a network describe."""

import jax
import jax.numpy as jnp


def sample_action(keys: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws an action from each row's distribution, with a key for each row.

    Args:
        keys: [B].
        logits: float32 [B, A].

    Returns:
        The actions, int32 [B], and their log probabilities, float32 [B].
    """
    action = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    return action, log_prob_of(logits, action)


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    """log pi(action): logits [..., A], action [...] -> [...]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]
