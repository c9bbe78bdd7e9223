"""Learning: parameters and optimiser state on the learner's devices, and the compiled update."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.config import PPOConfig
from jaxrl_atari.devices import DataParallel, check_placement
from jaxrl_atari.networks import NatureActorCritic
from jaxrl_atari.ppo import Hyperparameters, Metrics, Rollout, TrainState, make_update


class Learner:
    """A train state and its update, on one device or on several in parallel.

    Args:
        state: where training begins; it is copied to the devices.
        check: assert at every update that its arrays lie where they should.
        stepwise: run the update minibatch by minibatch, each a program of its own, so that a policy that shares the
            device waits for one minibatch and not for the whole update. The numbers are the same.
    """

    def __init__(
        self,
        network: NatureActorCritic,
        config: PPOConfig,
        parallel: DataParallel,
        state: TrainState,
        stepwise: bool = False,
        check: bool = False,
    ):
        self.parallel = parallel
        self.state = parallel.replicate(state)
        self._stepwise = stepwise
        self._check = check
        update, prepare, train = make_update(network, config, len(parallel), parallel.axis_name)

        def train_on(state: TrainState, samples: Any, hyper: Any, indices: Any, k: Any) -> tuple[TrainState, Metrics]:
            return train(state, samples, hyper, lax.dynamic_slice_in_dim(indices, k, 1))

        # Keys travel as their data: pmap over several processes takes no typed keys.
        def update_with(state: TrainState, rollout: Rollout, hyper: Hyperparameters, key_data: jax.Array) -> Any:
            return update(state, rollout, hyper, jax.random.wrap_key_data(key_data))

        def prepare_with(rollout: Rollout, hyper: Hyperparameters, key_data: jax.Array) -> Any:
            return prepare(rollout, hyper, jax.random.wrap_key_data(key_data))

        self._update = parallel.compile(update_with, donate_argnums=[0])
        self._prepare = parallel.compile(prepare_with)
        self._train_on = parallel.compile(train_on, donate_argnums=[0])
        self._mean = parallel.compile(partial(jax.tree.map, lambda *steps: jnp.mean(jnp.stack(steps))))

    def update(self, rollouts: Sequence[Rollout], hyper: Hyperparameters, key: jax.Array) -> Metrics:
        """All epochs and minibatches over one rollout, given as one part for each local device.

        Returns:
            The metrics of the update, still being computed.
        """
        rollout = self.parallel.assemble(rollouts)
        hyper, key_data = self.parallel.replicate((hyper, jax.random.key_data(key)))
        if self._check:
            check_placement("learning", {"train_state": self.state, "rollout": rollout}, self.parallel.local_devices)
        if self._stepwise:
            metrics = self._update_stepwise(rollout, hyper, key_data)
        else:
            self.state, metrics = self._update(self.state, rollout, hyper, key_data)
        if self._check:
            check_placement("learning", {"train_state": self.state, "metrics": metrics}, self.parallel.local_devices)
        return self.parallel.shard(metrics, 0)

    def _update_stepwise(self, rollout: Rollout, hyper: Hyperparameters, key_data: jax.Array) -> Metrics:
        samples, indices, metrics = self._prepare(rollout, hyper, key_data)
        steps = []
        for k in range(indices.shape[-2]):
            row = self.parallel.replicate(np.int32(k))
            self.state, of_step = self._train_on(self.state, samples, hyper, indices, row)
            steps.append(of_step)
            jax.block_until_ready(of_step)  # the next minibatch queues behind what was asked for meanwhile
        return metrics | self._mean(*steps)

    def params(self, index: int = 0) -> Any:
        """The parameters on local device `index`. The next update consumes them: copy what has to outlive it."""
        return self.parallel.shard(self.state.params, index)
