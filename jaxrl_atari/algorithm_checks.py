"""Checks of what an update is given, and of what the functions of its algorithm return, while JAX traces it.

The mistakes that are checked here are one-line errors. Others, such as a loss that returns no pair, are errors of
JAX or optax.
"""

from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxrl_atari.algorithm import Algorithm, Metrics, Rollout, TrainState
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.errors import ConfigError, require
from jaxrl_atari.network_interface import form_of

OWN_METRICS = frozenset({"loss", "gradient_norm", "skipped_steps"})
"""Metrics of `update` itself, which no algorithm may return under these names."""


def check_options(options: PPOConfig, algorithm: Algorithm) -> None:
    """Raises `ConfigError` if the options are those of a config, and not the ones in force for this algorithm."""
    hint = "give an update resolved_options(config) in place of config.ppo"
    require(options.gae_lambda is not None, "ppo.gae_lambda", None, "a number in an update", hint)
    given, declared = sorted(options.coefficients), sorted(algorithm.coefficients)
    expected = f"the coefficients of the algorithm, {declared}"
    require(given == declared, "ppo.coefficients", given, expected, hint)


def check_first_state(network_params: Any, returned: Any) -> tuple[Any, Any]:
    """What `init` returned: the parameters and `extra`.

    Raises:
        ConfigError: it is no pair; a parameter of the network is missing, or has another form; or `extra` holds a
            random key, which `pmap` cannot pass on.
    """
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    require(is_pair, "init", type(returned).__name__, "a pair: parameters, and extra")
    params, extra = returned
    got = forms(params)
    for path, expected in forms(network_params).items():
        hint = "init returns the parameters of the network under their own names"
        require(got.get(path) == expected, f"params{path} of init", got.get(path, "nothing"), expected, hint)
    for leaf in jax.tree.leaves(extra):
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        expected = "other arrays: prepare and loss get keys of their own"
        require(not is_key, "extra of init", "a random key", expected)
    return params, extra


def check_prepared(before: TrainState, returned: Any, rollout: Rollout) -> tuple[TrainState, Any, Metrics]:
    """What `prepare` returned: the state, the samples, and the metrics as floats.

    Args:
        before: the state that it was given.

    Raises:
        ConfigError: it is no triple; an array of the state has another shape, type or place, so that no checkpoint
            could be restored; a leaf of the samples is no array [T, B, ...]; or a metric is one that `as_floats`
            refuses.
    """
    is_triple = isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[0], TrainState)
    require(is_triple, "prepare", type(returned).__name__, "a triple: the state, samples and metrics")
    after, samples, metrics = returned
    old, new = forms(before), forms(after)
    for path in old | new:
        got, expected = new.get(path, "nothing"), old.get(path, "nothing")
        field = f"{path.removeprefix('.')} of prepare"
        require(got == expected, field, got, f"{expected}, as in the state before")
    structures = jax.tree.structure(after), jax.tree.structure(before)
    require(structures[0] == structures[1], "state of prepare", structures[0], f"the structure {structures[1]}")
    steps = rollout.action.shape
    expected = f"arrays of shape [{steps[0]}, {steps[1]}, ...]"
    for leaf in jax.tree.leaves(samples):
        shape = jnp.shape(leaf)
        require(shape[:2] == steps, "samples of prepare", list(shape), expected)
    return strongly_typed(after), samples, as_floats(metrics)


def strongly_typed(tree: Any) -> Any:
    """The arrays of a tree, of which none is weakly typed (`jax.numpy`, type promotion).

    Python numbers are, and arrays that were computed of them alone. A state with such an array would compile the
    update again once it has a fixed type, as after a restore.
    """
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def forms(tree: Any) -> dict[str, str]:
    """The arrays of a tree: path -> form, such as `['mean']` -> `float32[64]`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): form_of(x) for path, x in leaves}


def as_floats(metrics: Metrics) -> Metrics:
    """The metrics of one function as float32, in which their means over gradient steps are taken. float64 stays.

    Raises:
        ConfigError: they are no dict, or one of them is not a single number, or has a name of `OWN_METRICS`.
    """
    require(isinstance(metrics, dict), "metrics", type(metrics).__name__, "a dict: name -> a single number")
    for name, value in metrics.items():
        expected = "a single number, such as batch.mean(x)"
        is_one = jax.tree.structure(value) == jax.tree.structure(0)
        require(is_one, "metric", name, expected, f"it is {value!r}")
        shape = jnp.shape(value)
        require(shape == (), "metric", name, expected, f"its shape is {shape}")
    check_names(metrics.keys(), OWN_METRICS)
    types = {name: jnp.promote_types(jnp.result_type(value), jnp.float32) for name, value in metrics.items()}
    return {name: jnp.asarray(value, types[name]) for name, value in metrics.items()}


def check_names(names: Set[str], taken: Set[str]) -> None:
    """Raises `ConfigError` if a metric has a name that another metric of the update has already."""
    for name in sorted(names & taken):
        raise ConfigError("metric", name, "another name: the update already has a metric of this name")


UNFIT = {
    (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState): (
        "an optimiser without inject_hyperparams, which keeps the rate of the first update:"
        " optimizer(options) is called in every update, and options.learning_rate is the rate of that update"
    ),
    (optax.contrib.ScheduleFreeState, optax.contrib.SAMState): (
        "an optimiser that trains the parameters with which the policy acts; schedule_free and sam train others"
    ),
}
"""Optimisers of optax that would train wrongly without an error: types of their states -> what is expected."""


def check_optimizer_state(opt_state: optax.OptState) -> None:
    """Raises `ConfigError` if the state, or a part of it, is that of an optimiser in `UNFIT`."""
    for types, expected in UNFIT.items():
        parts = jax.tree.leaves(opt_state, is_leaf=lambda part, types=types: isinstance(part, types))
        for part in parts:
            require(not isinstance(part, types), "optimizer", type(part).__name__, expected)
