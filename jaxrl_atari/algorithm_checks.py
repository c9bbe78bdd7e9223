"""Checks of what the functions of an algorithm return, while JAX traces an update.

A mistake is a one-line error. An exception within one of the functions, or within an optimiser, keeps
its traceback.
"""

from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxrl_atari.algorithm import Metrics, Rollout, TrainState
from jaxrl_atari.errors import InterfaceError, require_interface
from jaxrl_atari.network_functions import described, is_array

REAL = (jnp.integer, jnp.floating, jnp.bool_)
"""The types of real numbers."""

OWN_METRICS = frozenset({"loss", "gradient_norm", "skipped_steps"})
"""Names of the metrics of `update` itself. No algorithm may return a metric with one of them."""


def check_first_state(network_params: Any, returned: Any) -> tuple[Any, Any]:
    """What `init` returned: the parameters and `extra`.

    Raises:
        InterfaceError: it is no pair; a parameter of the network is missing, or has another shape or type; a
            parameter is no array of floats; a leaf of `extra` is no array; or `extra` holds a random key, which
            `pmap` cannot pass on.
    """
    require_interface(is_tuple_of(2, returned), "init", described(returned), "a pair: parameters, and extra")
    params, extra = returned
    expected, got = shapes_and_types(network_params), shapes_and_types(params)
    not_trainable, not_kept = refused(params, is_trainable), refused(extra, can_be_kept)
    hint = "init returns the parameters of the network under their own names"
    for path, shape in expected.items():
        require_interface(got.get(path) == shape, f"params{path} of init", got.get(path, "nothing"), shape, hint)
    hint = "the loss trains every parameter, so other arrays belong in extra"
    for path, leaf in not_trainable.items():
        raise InterfaceError(f"params{path} of init", leaf, "an array of floats", hint)
    hint = "prepare and loss get random keys of their own"
    for path, leaf in not_kept.items():
        raise InterfaceError(f"extra{path} of init", leaf, "an array or a number, and no random key", hint)
    return params, extra


def check_prepared(before: TrainState, returned: Any, rollout: Rollout) -> tuple[TrainState, Any, Metrics]:
    """What `prepare` returned: the state, the samples, and the metrics as floats.

    Args:
        before: the state that it was given.

    Raises:
        InterfaceError: it is no triple; an array of the state has another shape, type or path in the tree, so no
            checkpoint could be restored; a leaf of the samples is no array [T, B, ...]; or `as_floats` refuses a
            metric.
    """
    is_triple = is_tuple_of(3, returned) and isinstance(returned[0], TrainState)
    require_interface(is_triple, "prepare", described(returned), "a triple: the state, samples and metrics")
    after, samples, metrics = returned
    old, new = shapes_and_types(before), shapes_and_types(after)
    for path in old | new:
        got, expected = new.get(path, "nothing"), old.get(path, "nothing")
        field = f"{path.removeprefix('.')} of prepare"
        hint = "init decides which arrays extra has" if path.startswith(".extra") else ""
        require_interface(got == expected, field, got, f"{expected}, as in the state before", hint)
    structure, expected = jax.tree.structure(after), jax.tree.structure(before)
    require_interface(structure == expected, "state of prepare", structure, f"the structure {expected}")
    steps = rollout.action.shape
    expected = f"an array of shape [{steps[0]}, {steps[1]}, ...]"
    for path, leaf in refused(samples, lambda x: is_array(x) and jnp.shape(x)[:2] == steps).items():
        raise InterfaceError(f"samples{path} of prepare", leaf, expected)
    return strongly_typed(after), samples, as_floats(metrics)


def check_loss(returned: Any) -> tuple[jax.Array, Metrics]:
    """What `loss` returned: the loss, and the metrics as floats.

    Raises:
        InterfaceError: it is no pair; the loss is not a single float; or `as_floats` refuses a metric.
    """
    require_interface(is_tuple_of(2, returned), "loss", described(returned), "a pair: the loss, and metrics")
    loss, metrics = returned
    is_single = is_array(loss) and jnp.shape(loss) == () and jnp.issubdtype(jnp.result_type(loss), jnp.floating)
    require_interface(is_single, "loss", described(loss), "a single float, such as batch.mean(x)")
    return loss, as_floats(metrics)


def strongly_typed(tree: Any) -> Any:
    """The leaves of a tree as arrays of fixed types.

    Python numbers, and arrays that are computed from them alone, are weakly typed in JAX. A state with such leaves
    would compile the update twice, because the leaves have fixed types after an update or a restore.
    """
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as `['mean']`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def shapes_and_types(tree: Any) -> dict[str, str]:
    """The leaves of a tree by their paths, as `described`."""
    return {path: described(leaf) for path, leaf in leaves_by_path(tree).items()}


def refused(tree: Any, accepts: Callable[[Any], bool]) -> dict[str, str]:
    """The leaves that a function does not accept, by their paths, as `described`."""
    return {path: described(leaf) for path, leaf in leaves_by_path(tree).items() if not accepts(leaf)}


def is_trainable(x: Any) -> bool:
    return is_array(x) and bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def can_be_kept(x: Any) -> bool:
    return is_array(x) and not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def is_number(x: Any) -> bool:
    """Whether x is an array of real numbers or of bools."""
    return is_array(x) and any(jnp.issubdtype(jnp.result_type(x), kind) for kind in REAL)


def is_tuple_of(length: int, x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == length


def as_floats(metrics: Metrics) -> Metrics:
    """The metrics of one function as float32, the type of their means over gradient steps. float64 stays.

    Raises:
        InterfaceError: they are no dict; or a metric is not a single number, or its name is no string or is one of
            `OWN_METRICS`.
    """
    expected = "a dict: name -> a single number"
    require_interface(isinstance(metrics, dict), "metrics", type(metrics).__name__, expected)
    for name, value in metrics.items():
        require_interface(isinstance(name, str), "metric", name, "a string as its name")
        expected = "a single number, such as batch.mean(x)"
        require_interface(is_number(value), "metric", name, expected, f"it is {value!r}")
        shape = jnp.shape(value)
        require_interface(shape == (), "metric", name, expected, f"its shape is {shape}")
    check_names(metrics.keys(), OWN_METRICS)
    types = {name: jnp.promote_types(jnp.result_type(value), jnp.float32) for name, value in metrics.items()}
    return {name: jnp.asarray(value, types[name]) for name, value in metrics.items()}


def check_names(names: Set[str], taken: Set[str]) -> None:
    """Raises `InterfaceError` if another metric of the update already has one of the names."""
    for name in sorted(names & taken):
        raise InterfaceError("metric", name, "another name: the update already has a metric of this name")


REFUSED_OPTIMIZER_STATES = {
    (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState): (
        "an optimiser without inject_hyperparams, which keeps the rate of the first update:"
        " optimizer(options) is called in every update, and options.learning_rate is the rate of that update"
    ),
    (optax.contrib.ScheduleFreeState, optax.contrib.SAMState): (
        "an optimiser that trains the parameters with which the policy acts; schedule_free and sam train others"
    ),
}
"""Optimisers of optax that would train wrongly without an error: types of their states -> expected optimiser."""


def check_optimizer(optimizer: Any) -> None:
    """Raises `InterfaceError` if `optimizer` returned something that has no functions `init` and `update`."""
    is_usable = all(callable(getattr(optimizer, name, None)) for name in ("init", "update"))
    expected = "an optax.GradientTransformation, such as optax.adam(options.learning_rate)"
    require_interface(is_usable, "optimizer", described(optimizer), expected)


def check_optimizer_state(opt_state: optax.OptState) -> None:
    """Raises `InterfaceError` if a leaf of the state is no array, or a part is in `REFUSED_OPTIMIZER_STATES`."""
    for path, leaf in refused(opt_state, is_array).items():
        raise InterfaceError(f"state{path} of optimizer", leaf, "an array or a number")
    for types, expected in REFUSED_OPTIMIZER_STATES.items():
        parts = jax.tree.leaves(opt_state, is_leaf=lambda part, types=types: isinstance(part, types))
        for part in parts:
            require_interface(not isinstance(part, types), "optimizer", type(part).__name__, expected)


def check_optimizer_step(before: TrainState, returned: Any) -> tuple[Any, optax.OptState]:
    """What `update` of the optimiser returned: the changes of the parameters, and its state.

    Args:
        before: the state before this gradient step.

    Raises:
        InterfaceError: it is no pair; the changes are no tree like the parameters; or an array of the state has
            another shape, type or path in the tree than before.
    """
    name = "optimizer.update"
    require_interface(is_tuple_of(2, returned), name, described(returned), "a pair: updates, and the state")
    updates, opt_state = returned
    structure, expected = jax.tree.structure(updates), jax.tree.structure(before.params)
    require_interface(structure == expected, f"updates of {name}", structure, f"the structure {expected}")
    old, new = shapes_and_types(before.opt_state), shapes_and_types(opt_state)
    for path in old | new:
        got, expected = new.get(path, "nothing"), old.get(path, "nothing")
        require_interface(got == expected, f"state{path} of {name}", got, f"{expected}, as in the state before")
    return updates, opt_state
