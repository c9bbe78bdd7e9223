"""Dialects against their originals: the same update on the same rollout, in float64.

CleanRL's scripts and stable-baselines3 run unmodified, each in a process of its own (`originals/`), on a fixed
rollout with lost and cut-off games, lives and clipped samples. `update.update` with the settings of the dialect
computes the update of that rollout with the original's minibatches. The packages that this needs, which `.ci/run`
installs:

    pip install torch==2.13.0
    pip install --no-deps stable-baselines3==2.9.2 cloudpickle
    pip install --no-deps --ignore-requires-python cleanrl==1.2.0
    pytest --dist loadgroup -rP tests/long/test_originals.py

`-rP` shows the differences that docs/dialects.md has.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from originals import rollouts
from quick import jit
from small_networks import nature_in_float64

from jaxrl_atari import ppo
from jaxrl_atari import update as update_module
from jaxrl_atari.algorithm import Mean, Minibatch, Rollout
from jaxrl_atari.algorithms.dialects import DIALECTS
from jaxrl_atari.config import Config, EnvConfig, NetworkConfig
from jaxrl_atari.frames import BLOCKED, PLAIN, as_frames
from jaxrl_atari.networks import Observation, make_network
from jaxrl_atari.ppo import log_prob_of
from jaxrl_atari.update import current_options, learning_rate, observe

MISSING = [name for name in ("torch", "stable_baselines3", "cleanrl") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(1600),
    pytest.mark.skipif(
        bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; see the first lines of the file"
    ),
]

UPDATES = 3


class Original(NamedTuple):
    """How an original is run."""

    command: tuple[str, ...]
    auto_reset_steps: bool  # whether its environments have them
    epochs: int
    minibatches: int
    adds_to_the_norm: bool  # torch clips gradients by norm + 1e-6


ORIGINALS = {
    "cleanrl": Original(("run_cleanrl", "ppo_atari"), False, 2, 4, True),
    "cleanrl_envpool": Original(("run_cleanrl", "ppo_atari_envpool"), True, 2, 4, True),
    "cleanrl_xla": Original(("run_cleanrl_xla",), True, 1, 2, False),
    "sb3": Original(("run_sb3",), False, 2, 4, True),
}


# --- The originals -----------------------------------------------------------------------------------------------


@cache
def games():
    return rollouts.games()


@cache
def tape(name):
    return rollouts.tape(games(), ORIGINALS[name].auto_reset_steps)


@cache
def record(name):
    """What the original did, as its runner noted it: name -> array."""
    with TemporaryDirectory() as folder:
        given, result = Path(folder, "given.npz"), Path(folder, "result.npz")
        weights = rollouts.to_torch(rollouts.parameters())
        arrays = {f"parameter_{i}": array for i, array in enumerate(weights)}
        np.savez(given, **tape(name)._asdict(), actions=rollouts.ACTIONS, **arrays)
        program, *arguments = ORIGINALS[name].command
        command = [sys.executable, "-m", f"originals.{program}", *arguments, str(given), str(result), str(UPDATES)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[1],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(np.load(result))


def layers_of(name, kind):
    """The original's parameters after its first update, or its first gradient, in our form."""
    found = record(name)
    if f"{kind}_0" in found:
        return rollouts.from_torch([found[f"{kind}_{i}"] for i in range(2 * len(rollouts.SHAPES))])
    return {
        layer: {key: found[f"{kind}_{layer}_{key}"] for key in ("kernel", "bias")} for layer in rollouts.SHAPES
    }


# --- Ours --------------------------------------------------------------------------------------------------------


@cache
def shared_rollout(name):
    """The rollout in float64, with the actions that the original took and the log probabilities and values of
    ours."""
    given = games()
    seen = rollouts.stacks(given)
    observation = Observation(jnp.asarray(seen.reshape(-1, *seen.shape[2:])))
    outputs = jit(nature_in_float64)(rollouts.parameters(), observation)
    value = outputs.value.reshape(seen.shape[:2])
    action = np.zeros(rollouts.STEPS * rollouts.NUM_ENVS, np.int32)
    action[tape(name).sample] = record(name)["action"]
    log_prob = log_prob_of(outputs.logits[: len(action)], jnp.asarray(action))
    shape = (rollouts.STEPS, rollouts.NUM_ENVS)
    return Rollout(
        frames=as_frames(jnp.asarray(given["frames"]), PLAIN),
        age=jnp.asarray(given["age"]),
        action=jnp.asarray(action.reshape(shape)),
        log_prob=log_prob.reshape(shape),
        value=value[:-1],
        reward=jnp.asarray(given["reward"]),
        terminated=jnp.asarray(given["terminated"]),
        truncated=jnp.asarray(given["truncated"]),
        weight=jnp.asarray(given["weight"]),
        bootstrap_value=value[-1],
    )


def options(name, **flipped):
    """The dialect's settings, with those numbers that the original had in its first update."""
    found = record(name)
    original = ORIGINALS[name]
    epsilon = found["clip_range"][0] if "clip_range" in found else DIALECTS[name].ppo.clip_epsilon
    of_the_original = replace(
        DIALECTS[name].ppo,
        rollout_length=rollouts.STEPS,
        epochs=original.epochs,
        minibatch_size=tape(name).sample.size // original.minibatches,
        learning_rate=np.float64(found["learning_rate"][0]),
        clip_epsilon=np.float64(epsilon),
    )
    return replace(of_the_original, **flipped)


def minibatches(name):
    """The samples of each gradient step of the original's first update, as indices of our form."""
    original = ORIGINALS[name]
    order = record(name)["order"][: original.epochs]
    return tape(name).sample.reshape(-1)[order].reshape(original.epochs * original.minibatches, -1)


def clip_as_torch(max_norm):
    """torch.nn.utils.clip_grad_norm_: gradients times min(1, max_norm / (norm + 1e-6))."""

    def update(updates, state, params=None):
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * scale, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@cache
def compiled_update(name, as_torch, **flipped):
    """Our update, which takes the minibatches as an argument, so that other ones need no other program."""

    def run(order, params, rollout):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(update_module, "draw_minibatches", lambda *_: order)
            if as_torch and ORIGINALS[name].adds_to_the_norm:
                patch.setattr(optax, "clip_by_global_norm", clip_as_torch)
            config, key = options(name, **flipped), jax.random.key(0)
            state = update_module.init_train_state(params, config, ppo.PPO, key)
            return update_module.update(state, rollout, config, key, apply=nature_in_float64, algorithm=ppo.PPO)

    return jit(run)


@cache
def ours(name, as_torch=True, steps=None, **flipped):
    """Our update of the rollout: parameters, and metrics as means over the gradient steps.

    Args:
        as_torch: gradients are clipped as torch does it.
        steps: the first ones alone.
        flipped: settings that differ from the dialect's.
    """
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, rollouts.parameters())
        update = compiled_update(name, as_torch, **flipped)
        state, metrics = update(jnp.asarray(minibatches(name)[:steps]), params, shared_rollout(name))
        return jax.device_get((state.params, metrics))


def first_minibatch(name, rollout):
    """Options and `Minibatch` of the first gradient step."""
    config = options(name)
    rollout = update_module.with_options_applied(rollout, config)
    state = update_module.init_train_state(
        jax.tree.map(jnp.asarray, rollouts.parameters()), config, ppo.PPO, jax.random.key(0)
    )
    _, samples, _ = ppo.ppo_prepare(state, None, rollout, Mean.over(rollout.weight), config, jax.random.key(0))
    index = jnp.asarray(minibatches(name)[0])
    flat, weight = jax.tree.map(lambda x: x.reshape(-1)[index], (samples, rollout.weight))
    batch = Minibatch(observe(rollout, index), flat, Mean.over(weight), jax.random.key(0))
    return config, samples, batch


def difference(ours, theirs, start=None):
    """||ours - theirs|| / ||theirs||; with `start`, ||theirs - start|| in the denominator: relative to the
    change."""
    start = jax.tree.map(np.zeros_like, theirs) if start is None else start
    apart, size = (
        np.sqrt(sum(np.sum(np.square(a - b)) for a, b in zip(*map(jax.tree.leaves, pair), strict=True)))
        for pair in ((ours, theirs), (theirs, start))
    )
    return apart / size


def update_difference(name, **how):
    return difference(ours(name, **how)[0], layers_of(name, "parameter"), rollouts.parameters())


def of(name, *values):
    """Parameters of a test. With `--dist loadgroup` one process has all tests of an original, which runs once."""
    return pytest.param(name, *values, marks=pytest.mark.xdist_group(name))


every_original = pytest.mark.parametrize("name", [of(name) for name in ORIGINALS])


# --- The proofs --------------------------------------------------------------------------------------------------


@every_original
def test_advantages_losses_and_the_first_gradient_are_the_originals(name):
    found = record(name)
    sample = tape(name).sample
    with jax.enable_x64(True):
        rollout = shared_rollout(name)
        config, samples, batch = first_minibatch(name, rollout)
        acted = {"value": rollout.value, "log_prob": rollout.log_prob, "advantage": samples.advantage}
        for key, values in acted.items():
            np.testing.assert_allclose(values.reshape(-1)[sample], found[key], rtol=0, atol=1e-12, err_msg=key)
        loss = partial(ppo.ppo_loss, apply=nature_in_float64, batch=batch, options=config)
        gradient, _ = jit(jax.grad(loss, has_aux=True))(rollouts.parameters())
    apart = difference(jax.device_get(gradient), layers_of(name, "gradient"))
    print(f"{name}: first gradient in float64: {apart:.1e}")
    assert apart < 1e-12


@every_original
def test_losses_are_the_originals(name):
    found = record(name)
    _, metrics = ours(name)
    steps = ORIGINALS[name].epochs * ORIGINALS[name].minibatches
    if name == "cleanrl_xla":  # tells those of its last step alone
        _, first = ours(name, steps=1)
        metrics = {key: 2 * value - first[key] for key, value in metrics.items() if key in first} | {
            "gradient_norm": metrics["gradient_norm"]
        }
    theirs = {key: found[key][:steps].mean() for key in ("policy_loss", "entropy", "approx_kl", "value_loss")}
    if name == "cleanrl_xla":
        theirs = {key: found[key][0] for key in theirs}
    if name == "sb3":  # its entropy loss is negative, its value loss has no factor of 1/2
        theirs |= {"entropy": -theirs["entropy"], "value_loss": theirs["value_loss"] / 2}
    theirs["gradient_norm"] = found["gradient_norm"][:steps].mean()
    for key, value in theirs.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-11, atol=1e-12, err_msg=key)


@every_original
def test_a_whole_update_ends_at_the_originals_parameters(name):
    exact, as_shipped = update_difference(name), update_difference(name, as_torch=False)
    print(f"{name}: parameters after an update: {exact:.1e}; with our norm of gradients: {as_shipped:.1e}")
    assert exact < 1e-12
    assert as_shipped < 1e-6


FLIPPED = {
    "cleanrl": {
        "unbiased_std": False, "truncation_is_terminal": False, "clip_value_loss": False, "value_coef": 1.0,
        "clip_epsilon": 0.05, "max_grad_norm": 1.0, "adam_epsilon": 1e-8, "normalize_advantages": False,
    },
    "cleanrl_envpool": {"learn_from_auto_resets": False},
    "cleanrl_xla": {
        "unbiased_std": True, "truncation_is_terminal": False, "learn_from_auto_resets": False,
        "clip_value_loss": True,
    },
    "sb3": {
        "unbiased_std": False, "truncation_is_terminal": True, "clip_value_loss": True, "value_coef": 0.5,
        "weight_decay": 0.01,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "field", "value"), [of(name, *item) for name, flips in FLIPPED.items() for item in flips.items()]
)
def test_the_proof_fails_with_any_option_flipped(name, field, value):
    assert getattr(DIALECTS[name].ppo, field) != value
    apart = update_difference(name, **{field: value})
    print(f"{name} with {field}={value}: {apart:.1e}")
    assert apart > 1e-5


@every_original
def test_the_shipped_network_has_the_originals_first_gradient(name):
    """In float32, as a run computes it."""
    with jax.enable_x64(True):
        rollout = jax.device_get(shared_rollout(name))
    rollout = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32) if x.dtype == np.float64 else jnp.asarray(x), rollout
    )
    rollout = rollout._replace(frames=as_frames(jnp.asarray(games()["frames"]), BLOCKED))
    config, _, batch = first_minibatch(name, rollout)
    config = jax.tree.map(np.float32, config)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), rollouts.parameters())
    network = make_network(NetworkConfig(), rollouts.ACTIONS, "cpu")
    loss = partial(ppo.ppo_loss, apply=network.apply, batch=batch, options=config)
    gradient, _ = jit(jax.grad(loss, has_aux=True))(params)
    apart = difference(jax.device_get(gradient), layers_of(name, "gradient"))
    print(f"{name}: first gradient in float32: {apart:.1e}")
    assert apart < 1e-5


# --- Schedules and minibatches -----------------------------------------------------------------------------------


def scheduled(name, schedule, update):
    """A number of update 0, 1, ... of `UPDATES`."""
    size = tape(name).sample.size
    config = Config(
        total_env_steps=UPDATES * size,
        env=EnvConfig(num_envs=rollouts.NUM_ENVS),
        ppo=replace(DIALECTS[name].ppo, rollout_length=size // rollouts.NUM_ENVS, minibatch_size=size // 4),
    )
    return schedule(config, update * size)


@every_original
def test_the_learning_rate_is_the_originals(name):
    """SB3 computes the rate after it has counted the rollout: it is one update ahead, and 0 in the last."""
    rates = record(name)["learning_rate"]
    rates = rates if len(rates) == UPDATES else rates.reshape(UPDATES, -1)[:, 0]
    ahead = 1 if name == "sb3" else 0
    expected = [scheduled(name, learning_rate, update + ahead) for update in range(UPDATES)]
    np.testing.assert_allclose(rates, expected, rtol=1e-7, atol=1e-18)


@pytest.mark.xdist_group("sb3")
def test_the_clip_range_is_that_of_sb3():
    found = record("sb3")["clip_range"]
    expected = [scheduled("sb3", current_options, update + 1).clip_epsilon for update in range(UPDATES)]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [of(name) for name in ("cleanrl", "cleanrl_envpool", "sb3")])
def test_minibatches_are_drawn_from_all_samples(name):
    """The original's have not as many samples of each environment; ours: `test_ppo.py`."""
    assert DIALECTS[name].ppo.minibatches == "uniform"
    num_envs = rollouts.NUM_ENVS
    assert len({tuple(np.bincount(row % num_envs, minlength=num_envs)) for row in minibatches(name)}) > 1
