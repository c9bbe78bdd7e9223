"""Proximal policy optimisation as pure functions: no I/O, no clock, no state but what is passed in.

Read in this order: `Rollout` (the data), `gae` (the targets), `ppo_loss` (one minibatch), `make_update` (all of them).
Axes are [T, B]: T steps of B environments. Paper: Schulman et al. 2017, arXiv:1707.06347.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxrl_atari.config import PPOConfig
from jaxrl_atari.networks import NatureActorCritic, gather_stacks

Metrics = dict[str, jax.Array]
Scalar = jax.Array | np.float32


class Hyperparameters(NamedTuple):
    """What a search varies: float32 scalars that enter `update` as data, so that one program serves every trial."""

    learning_rate: Scalar
    gamma: Scalar
    gae_lambda: Scalar
    clip_epsilon: Scalar
    entropy_coef: Scalar
    value_coef: Scalar


class Rollout(NamedTuple):
    """T steps of B environments; the newest frame of each step is stored once.

    The step at t saw the stack that ends at `frames[t + S - 1]`, S = 4 being the stack's size. A step of weight 0
    carries no signal: the emulator ignored its action, because the game before it had just ended.
    """

    frames: jax.Array  # uint8 [T + S - 1, B, 21, 21, 16], see `networks.block_frames`
    age: jax.Array  # int32 [T, B]: frames of the same game before the newest one, at most S - 1
    action: jax.Array  # int32 [T, B]
    log_prob: jax.Array  # float32 [T, B]: log pi_old(action)
    value: jax.Array  # float32 [T, B]: V_old
    reward: jax.Array  # float32 [T, B]: clipped to [-1, 1]
    terminated: jax.Array  # bool [T, B]: a life or the game was lost: no value beyond
    truncated: jax.Array  # bool [T, B]: the game was cut off: the value beyond counts, the rewards beyond do not
    weight: jax.Array  # float32 [T, B]: 1, or 0 for a step that is no transition
    bootstrap_value: jax.Array  # float32 [B]: V_old of what step T would see


@flax.struct.dataclass
class TrainState:
    """What an update replaces."""

    params: Any
    opt_state: optax.OptState
    optimizer_steps: jax.Array  # int32 []


class Minibatch(NamedTuple):
    """The samples of one gradient step, [N]."""

    observation: jax.Array  # N frame stacks, in the form that `NatureActorCritic.from_blocks` takes
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array  # normalised over the minibatch
    target: jax.Array


def make_optimizer(config: PPOConfig) -> optax.GradientTransformation:
    """AdamW without its step size, which `Hyperparameters.learning_rate` gives at each update."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(eps=config.adam_epsilon),
        optax.add_decayed_weights(config.weight_decay) if config.weight_decay else optax.identity(),
    )


def init_train_state(network: NatureActorCritic, config: PPOConfig, key: jax.Array) -> TrainState:
    """Fresh parameters (orthogonal) and optimiser state."""
    params = network.init(key, jnp.zeros((1, 84, 84, 4), jnp.uint8))["params"]
    return TrainState(params, make_optimizer(config).init(params), jnp.zeros((), jnp.int32))


def sample_action(keys: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws an action of each row's categorical distribution, with a key for each row.

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

    Where a game is truncated, V_{t+1} is the value of its last observation (the pool resets one step later), so it
    is bootstrapped through; the sum of rewards stops there all the same.

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

    # Unrolled: on a GPU each turn of a loop starts kernels of its own, however little they do.
    _, advantage = lax.scan(backward, jnp.zeros_like(bootstrap_value), (delta, decay), reverse=True, unroll=16)
    return advantage


def _sum(x: jax.Array, axis_name: str | None) -> jax.Array:
    """Sum of all entries, over all devices of the axis."""
    return jnp.sum(x) if axis_name is None else lax.psum(jnp.sum(x), axis_name)


def weighted_moments(x: jax.Array, weight: jax.Array, axis_name: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Mean sum(w x) / sum(w) and variance of the entries of x, over all devices of the axis."""
    total_weight = jnp.maximum(_sum(weight, axis_name), 1.0)
    mean = _sum(weight * x, axis_name) / total_weight
    return mean, _sum(weight * jnp.square(x - mean), axis_name) / total_weight


def normalize(advantage: jax.Array, weight: jax.Array, axis_name: str | None = None) -> jax.Array:
    """Advantages of a minibatch with mean 0 and standard deviation 1 over the samples that carry weight."""
    mean, variance = weighted_moments(advantage, weight, axis_name)
    return (advantage - mean) / (jnp.sqrt(variance) + 1e-8)


def ppo_loss(
    logits: jax.Array,
    value: jax.Array,
    batch: Minibatch,
    hyper: Hyperparameters,
    mean: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, Metrics]:
    """The loss of one minibatch of N samples (arXiv:1707.06347, equation 9).

        policy  = -mean(min(ratio A, clip(ratio, 1 - eps, 1 + eps) A))                        (equation 7)
        value   = mean(max((V - target)^2, (V_old + clip(V - V_old, -eps, eps) - target)^2)) / 2
        loss    = policy + c_v value - c_e entropy

    Args:
        logits: float32 [N, A]; value: float32 [N], of the parameters that are being trained.
        mean: the weighted mean over the samples of the minibatch, on whatever devices they lie.

    Returns:
        The loss and its parts; `approx_kl` is Schulman's estimator mean(ratio - 1 - log ratio).
    """
    log_ratio = log_prob_of(logits, batch.action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - hyper.clip_epsilon, 1.0 + hyper.clip_epsilon)
    policy_loss = -mean(jnp.minimum(ratio * batch.advantage, clipped_ratio * batch.advantage))

    value_change = jnp.clip(value - batch.value, -hyper.clip_epsilon, hyper.clip_epsilon)
    value_error = jnp.square(value - batch.target)
    clipped_value_error = jnp.square(batch.value + value_change - batch.target)
    value_loss = 0.5 * mean(jnp.maximum(value_error, clipped_value_error))

    log_probs = jax.nn.log_softmax(logits)
    entropy = mean(-jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    loss = policy_loss + hyper.value_coef * value_loss - hyper.entropy_coef * entropy
    return loss, {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": mean(ratio - 1.0 - log_ratio),
        "clip_fraction": mean((jnp.abs(ratio - 1.0) > hyper.clip_epsilon).astype(jnp.float32)),
    }


def minibatch_indices(
    key: jax.Array,
    rollout_length: int,
    num_envs: int,
    epochs: int,
    minibatch_size: int,
    strata: int,
    first_stratum: jax.typing.ArrayLike = 0,
) -> jax.Array:
    """Random minibatches: each epoch is a fresh permutation of the samples, stratified by environment.

    The B environments are cut into `strata` blocks, and each minibatch takes as many samples of each block. A device
    that holds some of the blocks thus draws its part of the very minibatches that one device would draw.

    Args:
        first_stratum: the number, among all devices' blocks, of the first of these.

    Returns:
        int32 [epochs * T * B / minibatch_size, minibatch_size]: samples as t * B + b.
    """
    width = num_envs // strata  # environments of a block

    def permute(epoch: jax.Array, stratum: jax.Array) -> jax.Array:
        stratum_key = jax.random.fold_in(jax.random.fold_in(key, epoch), first_stratum + stratum)
        sample = jax.random.permutation(stratum_key, rollout_length * width)
        return sample // width * num_envs + stratum * width + sample % width

    each_stratum = jax.vmap(permute, in_axes=(None, 0))
    shuffled = jax.vmap(each_stratum, in_axes=(0, None))(jnp.arange(epochs), jnp.arange(strata))
    minibatches = shuffled.reshape(epochs, strata, -1, minibatch_size // strata).swapaxes(1, 2)
    return minibatches.reshape(-1, minibatch_size)


class Samples(NamedTuple):
    """A rollout made ready for its epochs; everything but frames and ages is [T * B]."""

    frames: jax.Array  # uint8 [T + S - 1, B, 21, 21, 16]
    age: jax.Array  # int32 [T, B]
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array
    weight: jax.Array


def prepare(rollout: Rollout, hyper: Hyperparameters) -> Samples:
    """What all minibatches of a rollout share: advantages, targets of the value."""
    advantage = gae(
        rollout.reward, rollout.value, rollout.bootstrap_value, rollout.terminated, rollout.truncated,
        hyper.gamma, hyper.gae_lambda,
    )  # fmt: skip
    return Samples(
        frames=rollout.frames,
        age=rollout.age,
        action=rollout.action.reshape(-1),
        log_prob=rollout.log_prob.reshape(-1),
        value=rollout.value.reshape(-1),
        advantage=advantage.reshape(-1),
        target=(advantage + rollout.value).reshape(-1),
        weight=rollout.weight.reshape(-1),
    )


def train_on_minibatches(
    state: TrainState,
    samples: Samples,
    hyper: Hyperparameters,
    indices: jax.Array,
    network: NatureActorCritic,
    optimizer: optax.GradientTransformation,
    axis_name: str | None = None,
) -> tuple[TrainState, Metrics]:
    """One gradient step for each row of `indices`.

    On several devices (`axis_name`) each device holds its environments and its part of each minibatch; loss, advantage
    statistics and gradients are those of the whole minibatch, so the result does not depend on the split.

    Args:
        indices: int32 [K, N]; row k holds the samples t * B + b of minibatch k.

    Returns:
        The new state, and the metrics of each step, [K].
    """
    devices = 1 if axis_name is None else lax.axis_size(axis_name)

    def gradient_step(state: TrainState, index: jax.Array) -> tuple[TrainState, Metrics]:
        weight = samples.weight[index]
        batch = Minibatch(
            observation=gather_stacks(samples.frames, samples.age, index),
            action=samples.action[index],
            log_prob=samples.log_prob[index],
            value=samples.value[index],
            advantage=normalize(samples.advantage[index], weight, axis_name),
            target=samples.target[index],
        )
        # The mean over devices of this device's share, scaled by their number, is the mean over the whole minibatch.
        scale = devices * weight / jnp.maximum(_sum(weight, axis_name), 1.0)

        def loss_fn(params: Any) -> tuple[jax.Array, Metrics]:
            outputs: Any = network.apply({"params": params}, batch.observation, method="from_blocks")
            logits, value = outputs
            return ppo_loss(logits, value, batch, hyper, mean=lambda x: jnp.sum(scale * x))

        gradients, metrics = jax.grad(loss_fn, has_aux=True)(state.params)
        if axis_name is not None:
            gradients, metrics = lax.pmean((gradients, metrics), axis_name)
        metrics["gradient_norm"] = optax.tree.norm(gradients)
        direction, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = jax.tree.map(lambda p, d: p - hyper.learning_rate * d, state.params, direction)
        return TrainState(params, opt_state, state.optimizer_steps + 1), metrics

    return lax.scan(gradient_step, state, indices)


def explained_variance(samples: Samples, axis_name: str | None = None) -> jax.Array:
    """1 - Var(target - V_old) / Var(target) over a rollout: 1 is a perfect value function, 0 one that knows nothing."""
    _, unexplained = weighted_moments(samples.advantage, samples.weight, axis_name)
    _, variance = weighted_moments(samples.target, samples.weight, axis_name)
    return 1.0 - unexplained / jnp.maximum(variance, 1e-8)


class Update(NamedTuple):
    """The update as one function, and as its parts for those who run it minibatch by minibatch."""

    update: Callable[[TrainState, Rollout, Hyperparameters, jax.Array], tuple[TrainState, Metrics]]
    prepare: Callable[[Rollout, Hyperparameters, jax.Array], tuple[Samples, jax.Array, Metrics]]
    train: Callable[[TrainState, Samples, Hyperparameters, jax.Array], tuple[TrainState, Metrics]]


def make_update(
    network: NatureActorCritic, config: PPOConfig, num_devices: int = 1, axis_name: str | None = None
) -> Update:
    """Builds `update(train_state, rollout, hyper, key)`, all epochs and minibatches over one rollout, ready for `jit`.

    Args:
        num_devices, axis_name: where the update is mapped over devices, their number and the name of that axis; each
            device then has its share of the environments and of each minibatch.

    Returns:
        `update` returns the new state and metrics: means over minibatches, and `explained_variance`.
    """
    optimizer = make_optimizer(config)

    def prepare_all(rollout: Rollout, hyper: Hyperparameters, key: jax.Array) -> tuple[Samples, jax.Array, Metrics]:
        length, num_envs = rollout.action.shape
        strata = math.gcd(num_envs * num_devices, config.minibatch_size) // num_devices
        indices = minibatch_indices(
            key, length, num_envs, config.epochs, config.minibatch_size // num_devices, strata,
            first_stratum=0 if axis_name is None else lax.axis_index(axis_name) * strata,
        )  # fmt: skip
        samples = prepare(rollout, hyper)
        return samples, indices, {"explained_variance": explained_variance(samples, axis_name)}

    def train(
        state: TrainState, samples: Samples, hyper: Hyperparameters, indices: jax.Array
    ) -> tuple[TrainState, Metrics]:
        return train_on_minibatches(state, samples, hyper, indices, network, optimizer, axis_name)

    def update(
        state: TrainState, rollout: Rollout, hyper: Hyperparameters, key: jax.Array
    ) -> tuple[TrainState, Metrics]:
        samples, indices, metrics = prepare_all(rollout, hyper, key)
        state, of_steps = train(state, samples, hyper, indices)
        return state, metrics | jax.tree.map(jnp.mean, of_steps)

    return Update(update, prepare_all, train)
