"""Checks of what the functions of an algorithm return, while JAX traces an update.

A mistake is a one-line error. An exception within one of the functions, or within an optimiser, keeps its
traceback.
"""

from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxrl_atari.algorithm import Metrics, Rollout, TrainState
from jaxrl_atari.errors import InterfaceError, require_interface
from jaxrl_atari.network_functions import described, is_array_like, is_precise, strongly_typed

REAL = (jnp.integer, jnp.floating, jnp.bool_)
"""The types of real numbers."""

OWN_METRICS = frozenset({"loss", "gradient_norm", "skipped_steps"})
"""Names of the metrics of `update` itself. No algorithm may return a metric with one of them."""


def check_first_state(network_params: Any, returned: Any) -> tuple[Any, Any]:
    """What `init` returned: the parameters and `extra`.

    Raises:
        InterfaceError: it is no pair; a parameter of the network is missing, or has another shape or type; a
            parameter is no array of floats, float32 or wider; a leaf of `extra` is no array; or `extra` holds a
            random key. On several devices, `DataParallel` would make integers of it, so its type would not be the
            same on one device and on several.
    """
    require_interface(is_tuple_of(2, returned), "init", described(returned), "a pair: parameters, and extra")
    params, extra = returned
    expected, got = shapes_and_types(network_params), shapes_and_types(params)
    not_trainable, not_kept = leaves_failing(is_precise, params), leaves_failing(can_be_kept, extra)
    hint = "init returns the parameters of the network under their own names"
    for path, shape in expected.items():
        require_interface(got.get(path) == shape, f"params{path} of init", got.get(path, "nothing"), shape, hint)
    hint = "the loss trains every parameter, so other arrays belong in extra"
    for path, leaf in not_trainable.items():
        raise InterfaceError(f"params{path} of init", leaf, "an array of floats, float32 or wider", hint)
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
    for part in ("params", "opt_state", "optimizer_steps", "extra"):
        hint = "init decides which arrays extra has" if part == "extra" else ""
        check_same_form(getattr(after, part), getattr(before, part), f"{part}{{}} of prepare", BEFORE, hint=hint)
    steps = rollout.action.shape
    expected = f"an array of shape [{steps[0]}, {steps[1]}, ...]"
    for path, leaf in leaves_failing(lambda x: is_array_like(x) and jnp.shape(x)[:2] == steps, samples).items():
        raise InterfaceError(f"samples{path} of prepare", leaf, expected)
    return strongly_typed(after), samples, as_floats(metrics, "prepare")


def check_loss(returned: Any) -> tuple[jax.Array, Metrics]:
    """What `loss` returned: the loss and the metrics as floats, float32 or wider.

    Raises:
        InterfaceError: it is no pair; the loss is not a single float; or `as_floats` refuses a metric.
    """
    require_interface(is_tuple_of(2, returned), "loss", described(returned), "a pair: the loss, and metrics")
    loss, metrics = returned
    is_single = (
        is_array_like(loss) and jnp.shape(loss) == () and jnp.issubdtype(jnp.result_type(loss), jnp.floating)
    )
    require_interface(is_single, "loss", described(loss), "a single float, such as batch.mean(x)")
    return as_float(loss), as_floats(metrics, "loss")


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as `['mean']`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def shapes_and_types(tree: Any) -> dict[str, str]:
    """The leaves of a tree by their paths, as `described`."""
    return {path: described(leaf) for path, leaf in leaves_by_path(tree).items()}


def leaves_failing(check: Callable[[Any], bool], tree: Any) -> dict[str, str]:
    """The leaves for which a check is false, by their paths, as `described`."""
    return {path: described(leaf) for path, leaf in leaves_by_path(tree).items() if not check(leaf)}


BEFORE = "as in the state before"
"""Why a state has to have a certain form, in messages."""


def check_same_form(
    got: Any, expected: Any, name: str, why: str, *, form: Callable[[Any], str] = described, hint: str = ""
) -> None:
    """Raises `InterfaceError` unless two trees have leaves of the same form at the same paths.

    Args:
        name: of a leaf, with `{}` in place of its path, such as `state{} of optimizer.update`.
        why: why it should have that form.
        form: the form of a leaf; by default its shape and type.
    """
    forms_got, forms_expected = (
        {path: form(leaf) for path, leaf in leaves_by_path(tree).items()} for tree in (got, expected)
    )
    for path in forms_expected | forms_got:
        found, wanted = forms_got.get(path, "nothing"), forms_expected.get(path, "nothing")
        require_interface(found == wanted, name.format(path), found, f"{wanted}, {why}", hint)
    # Containers may still differ, as a list from a tuple.
    found, wanted = jax.tree.structure(got), jax.tree.structure(expected)
    require_interface(found == wanted, name.format(""), found, f"the structure {wanted}, {why}", hint)


def shape_alone(x: Any) -> str:
    """The shape of a leaf, such as `[3, 4]`; of anything but an array, its class."""
    return str(list(jnp.shape(x))) if is_array_like(x) else described(x)


def can_be_kept(x: Any) -> bool:
    return is_array_like(x) and not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def is_number(x: Any) -> bool:
    """Whether x is an array of real numbers or of bools."""
    return is_array_like(x) and any(jnp.issubdtype(jnp.result_type(x), kind) for kind in REAL)


def is_tuple_of(length: int, x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == length


def as_floats(metrics: Metrics, function: str) -> Metrics:
    """The metrics of a function, as `as_float`, the type of their means over gradient steps.

    Args:
        function: its name, `prepare` or `loss`.

    Raises:
        InterfaceError: they are no dict; or a metric is not a single number, or its name is no string or is one of
            `OWN_METRICS`.
    """
    expected = "a dict: name -> a single number"
    require_interface(isinstance(metrics, dict), f"metrics of {function}", described(metrics), expected)
    for name, value in metrics.items():
        require_interface(isinstance(name, str), f"name of a metric of {function}", name, "a string")
        is_single = is_number(value) and jnp.shape(value) == ()
        expected = (
            "a single number, such as the mean of x over the samples: mean(x) in prepare, batch.mean(x) in loss"
        )
        require_interface(is_single, f"metric {name} of {function}", described(value), expected)
    check_names(metrics.keys(), OWN_METRICS)
    return {name: as_float(value) for name, value in metrics.items()}


def as_float(x: Any) -> jax.Array:
    """A number as float32. float64 stays."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))


def check_names(names: Set[str], taken: Set[str]) -> None:
    """Raises `InterfaceError` if another metric of the update already has one of the names."""
    for name in sorted(names & taken):
        raise InterfaceError(
            "name of a metric", name, "another name: the update already has a metric of this name"
        )


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
    for path, leaf in leaves_failing(is_array_like, opt_state).items():
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
        InterfaceError: it is no pair; a change has another shape or path in the tree than its parameter; or an
            array of the state has another shape, type or path in the tree than before.
    """
    name = "optimizer.update"
    require_interface(is_tuple_of(2, returned), name, described(returned), "a pair: updates, and the state")
    updates, opt_state = returned
    check_same_form(updates, before.params, f"updates{{}} of {name}", "as in the parameters", form=shape_alone)
    check_same_form(opt_state, before.opt_state, f"state{{}} of {name}", BEFORE)
    return updates, strongly_typed(opt_state)
