"""Learning: the train state on the learner's devices, the compiled update, and the parameters to act with.

The loop of a session asks a learner for the parameters to act with, and gives it the rollout that they played:

    SequentialLearner    The newest parameters act, so the first step of a rollout waits for the update before it.
    OverlappedLearner    `overlap = "update"`: the parameters from before the running update act, and on a CPU the
                         rollout does not wait for it.

`OverlappedLearner` runs the updates of a `SequentialLearner` in a thread. A call of a compiled function returns
before its result is there. But on a CPU, JAX computes the calls of one thread in order, even if they do not depend
on each other: the first step of the policy would wait for the whole update. Calls of two threads are computed at
the same time. (JAX 0.10.2, two cores: a small product, called just after a computation of 2.4 s, was ready after
2.4 s in the same thread, and after 1 ms in another. This has not been measured on a GPU.)
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxrl_atari.algorithm import Algorithm, Metrics, Rollout, TrainState
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.data_parallel import DataParallel
from jaxrl_atari.devices import Placement, check_placement
from jaxrl_atari.errors import InterfaceError
from jaxrl_atari.networks import Network
from jaxrl_atari.update import update

PendingMetrics = Callable[[], dict[str, float]]
"""Waits for an update and returns its metrics."""


class Learner(Protocol):
    """What the loop of a session asks of a learner.

    What `state` and `params` return is valid until the next `update`, which consumes it.
    """

    @property
    def state(self) -> TrainState:
        """The train state after the newest update, on the learner's first local device."""
        ...

    @property
    def params(self) -> Any:
        """The parameters of `state`. On several devices, this copies them alone, and not the whole state."""
        ...

    def parameter_norm(self) -> float:
        """Global L2 norm of the parameters; not finite if one of them is not."""
        ...

    def acting_params(self) -> list[Any]:
        """What each actor acts with in the next rollout: on its device, in the form of `Network.for_acting`.

        It is valid until the next `update`.
        """
        ...

    def update(self, rollouts: Sequence[Rollout], options: PPOConfig, key: jax.Array) -> PendingMetrics:
        """Starts the update on a rollout.

        Args:
            rollouts: the part of each local device.
            options: as `schedules.current_options` returns it: scheduled options have their values of this update.
            key: for its minibatches, and for what the algorithm draws.

        Returns:
            A function that waits for the update and returns its metrics.

        Raises:
            InterfaceError: the train state differs from device to device.
            ConfigError, InterfaceError: as `update.update`, when it is compiled.
        """
        ...

    def check_state(self) -> None:
        """Checks that all devices have the same train state. All processes must call it.

        Raises:
            InterfaceError: a leaf differs.
        """
        ...

    def checkpoint_items(self) -> dict[str, Any]:
        """The items of a checkpoint that continue this learner, besides `state`: name -> pytree."""
        ...

    def close(self) -> None:
        """Frees what the learner holds besides arrays."""
        ...


class SequentialLearner(Learner):
    """A `Learner` in whose updates nothing acts: the train state, on one device or on several in parallel.

    Args:
        train_state: of a checkpoint, or the first one (`session_arrays.py`). It is copied, because an
            update consumes what it is given.
        check: check in each update that the train state and the rollout are on the intended devices, and that the
            new state is equal on all of them (`devices.check`).
    """

    def __init__(
        self,
        placement: Placement,
        network: Network,
        algorithm: Algorithm,
        train_state: TrainState,
        *,
        check: bool = False,
    ):
        self._network = network
        self.actor_devices = placement.actors
        self._check = check
        self._parallel = DataParallel(placement.learner)
        self._update = compiled_update(placement.learner, network, algorithm)
        self._state = self._parallel.replicate(_copy(train_state))  # in the form of `DataParallel`
        self._has_updated = False

    @property
    def state(self) -> TrainState:
        return self._parallel.local_part(self._state, 0)

    @property
    def params(self) -> Any:
        return self._parallel.local_part(self._state.params, 0)

    def parameter_norm(self) -> float:
        return float(jax.device_get(_norm(self.params)))

    def acting_params(self) -> list[Any]:
        params = self._state.params
        return self.for_acting(
            [self._parallel.local_part(params, index) for index in range(len(self.actor_devices))]
        )

    def for_acting(self, params: Sequence[Any]) -> list[Any]:
        """Puts the parameters of each actor, which may lie on any device, on its own, in the form for acting."""
        moved = [jax.device_put(*each) for each in zip(params, self.actor_devices, strict=True)]
        return [self._network.for_acting(each) for each in moved]

    def update(self, rollouts: Sequence[Rollout], options: PPOConfig, key: jax.Array) -> PendingMetrics:
        rollout = self._parallel.assemble(rollouts)
        options, key = self._parallel.replicate((options, key))
        if self._check:
            arrays = {"train_state": self._state, "rollout": rollout}
            check_placement("learning", arrays, self._parallel.local_devices)
        self._state, metrics = self._update(self._state, rollout, options, key=key)
        if self._check or not self._has_updated:
            self.check_state()
        self._has_updated = True
        own = self._parallel.local_part(metrics, 0)
        return lambda: {name: float(value) for name, value in jax.device_get(own).items()}

    def check_state(self) -> None:
        """As `Learner.check_state`. `update` calls it after the first update and, with `check`, after each one.

        `Session.save` calls it, too, because a checkpoint keeps the state of one device alone. All devices start
        from the same state, and gradients are means over all of them, so only `prepare` can make the state differ.

        Devices may round the optimiser's steps differently, so parameters and the optimiser's state are compared
        with `jnp.allclose`, and the rest exactly. A difference in second moments, which are often too small for
        `jnp.allclose`, is found once the parameters have followed it.

        On several devices, the comparison waits for the update.
        """
        rounded = replace(self._state, extra=())
        exact = replace(self._state, params=(), opt_state=())
        leaf = self._parallel.differing_leaf(rounded, rounded=True) or self._parallel.differing_leaf(exact)
        if leaf is not None:
            found, expected = "another value on each device", "the same on all devices"
            hint = "compute means over the rollout with mean(x) and mean.moments(x)"
            raise InterfaceError(f"{leaf.removeprefix('.')} of prepare", found, expected, hint)

    def checkpoint_items(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass  # it holds arrays alone


class OverlappedLearner(Learner):
    """A `Learner` that runs each update in a thread, while the next rollout is collected (`overlap = "update"`).

    That rollout acts with the parameters that the update began with: one update of lag, never more. `update` and
    whatever reads the train state first wait for the update before. What `acting_params` returns is always valid.

    An error in an update is raised by whatever waits for it: the function that returns its metrics, the next
    `update`, or a reader of the train state. Each later call of these raises it again, as the state may have been
    consumed.

    Args:
        learner: runs the updates. Nobody else may use it.
        lagged_params: the parameters that act, from the item `acting` of a checkpoint (`checkpoint_items`). None:
            those of the train state, as before the first update.
    """

    def __init__(self, learner: SequentialLearner, lagged_params: Any = None):
        self._learner = learner
        self._thread = ThreadPoolExecutor(1, "learner")
        self._newest_update: Future[dict[str, float]] | None = None  # its result is its metrics
        # The parameters from before the newest update, on the learner's first local device: a copy, because the
        # update consumes the originals.
        self._lagged_params = _copy(learner.params) if lagged_params is None else lagged_params

    def _settled(self) -> SequentialLearner:
        """Waits for the newest update, and returns the learner. Raises the error of an update that failed."""
        if self._newest_update is not None:
            self._newest_update.result()
        return self._learner

    @property
    def state(self) -> TrainState:
        return self._settled().state

    @property
    def params(self) -> Any:
        return self._settled().params

    def parameter_norm(self) -> float:
        return self._settled().parameter_norm()

    def acting_params(self) -> list[Any]:
        num_actors = len(self._learner.actor_devices)
        return self._learner.for_acting([self._lagged_params] * num_actors)  # waits for nothing

    def update(self, rollouts: Sequence[Rollout], options: PPOConfig, key: jax.Array) -> PendingMetrics:
        learner = self._settled()
        self._lagged_params = _copy(learner.params)
        # A transfer guard holds for one thread, so the caller's is passed on.
        guard = jax.config.jax_transfer_guard  # pyright: ignore[reportAttributeAccessIssue]

        def run() -> dict[str, float]:
            with jax.transfer_guard(guard):
                return learner.update(rollouts, options, key)()

        self._newest_update = self._thread.submit(run)
        return self._newest_update.result

    def check_state(self) -> None:
        self._settled().check_state()

    def checkpoint_items(self) -> dict[str, Any]:
        return {"acting": self._lagged_params}

    def close(self) -> None:
        self._thread.shutdown()  # waits for a running update


# --- Compiled functions ------------------------------------------------------------------------------------------


class CompiledUpdate(Protocol):
    """`update.update`, compiled. It consumes the state; all trees have the form of `DataParallel`."""

    def __call__(
        self, state: TrainState, rollout: Rollout, options: PPOConfig, *, key: jax.Array
    ) -> tuple[TrainState, Metrics]: ...


@lru_cache(maxsize=8)
def compiled_update(devices: tuple[jax.Device, ...], network: Network, algorithm: Algorithm) -> CompiledUpdate:
    """The update on these devices. The sessions of a process share it, so that it is compiled once."""
    function = partial(update, apply=network.apply, algorithm=algorithm)
    return DataParallel(devices).compile(function, donate_argnums=[0])


_copy = jax.jit(partial(jax.tree.map, jnp.copy))
_norm = jax.jit(optax.tree.norm)
