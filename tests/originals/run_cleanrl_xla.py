"""Runs CleanRL's ppo_atari_envpool_xla_jax on a tape: python -m originals.run_cleanrl_xla INPUT.npz OUTPUT.npz
UPDATES

The script unrolls its gradient steps, and XLA compiles each of them: 2 steps here. JAX computes in float64. flax's
TrainState, which flax 0.12 no longer makes for the script's parameters, is replaced by one that does the same.
"""

import runpy
import sys
import types

import jax

jax.config.update("jax_enable_x64", True)

import flax.struct  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from originals.recording import Notes, input_arrays  # noqa: E402
from originals.rollouts import from_torch  # noqa: E402
from originals.run_cleanrl import Space, script_arguments, script_path, stub_modules  # noqa: E402

EPOCHS = 1
MINIBATCHES = 2
LAYERS = {"conv1": "Conv_0", "conv2": "Conv_1", "conv3": "Conv_2", "dense": "Dense_0"}


class TapeEnvs:
    """EnvPool's environments in XLA: what is on the tape, whatever the actions. The handle counts steps."""

    def __init__(self, arrays, actions):
        self.tape = {name: jnp.asarray(x) for name, x in arrays.items()}
        self.steps, self.num_envs = arrays["rewards"].shape
        self.action_space = Space(n=actions)
        self.observation_space = Space((4, 84, 84))

    def reset(self):
        return self.tape["observations"][0]

    def xla(self):
        def step(handle, action):
            t = handle % self.steps
            reward = self.tape["rewards"][t]
            nothing = jnp.zeros(self.num_envs)
            info = {"reward": reward, "terminated": nothing, "TimeLimit.truncated": nothing}
            return handle + 1, (self.tape["observations"][t + 1], reward, self.tape["dones"][t], info)

        return jnp.zeros((), int), None, None, step

    def close(self):
        pass


def make_train_state(notes, layers):
    """flax's TrainState for any pytree of parameters: it starts from `layers` and notes the first gradients."""

    def ours(params):
        """The script's AgentParams -> the order of `recording.install`."""
        torso = params.network_params["params"]
        heads = [each["params"]["Dense_0"] for each in (params.actor_params, params.critic_params)]
        all_layers = [*(torso[name] for name in LAYERS.values()), *heads]
        return {name: dict(layer) for name, layer in zip((*LAYERS, "policy", "value"), all_layers, strict=True)}

    def note(name, tree):
        if f"{name}_conv1_kernel" not in notes.arrays:
            for layer, arrays in tree.items():
                notes.arrays |= {f"{name}_{layer}_{key}": np.array(x) for key, x in arrays.items()}

    @flax.struct.dataclass
    class TrainState:
        params: object
        opt_state: object
        step: object
        tx: object = flax.struct.field(pytree_node=False)

        @classmethod
        def create(cls, apply_fn, params, tx):
            loaded = jax.tree.map(jnp.asarray, layers)
            params = params.replace(
                network_params={"params": {theirs: loaded[mine] for mine, theirs in LAYERS.items()}},
                actor_params={"params": {"Dense_0": loaded["policy"]}},
                critic_params={"params": {"Dense_0": loaded["value"]}},
            )
            return cls(params, tx.init(params), jnp.zeros((), int), tx)

        def apply_gradients(self, grads):
            jax.debug.callback(lambda tree: note("gradient", tree), ours(grads), ordered=True)
            jax.debug.callback(
                lambda norm: notes.append("gradient_norm", norm), optax.tree.norm(grads), ordered=True
            )
            updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
            params = optax.apply_updates(self.params, updates)
            return self.replace(params=params, opt_state=opt_state, step=self.step + 1)

    return TrainState, lambda state: note("parameter", ours(state.params))


def main(source, target, updates):
    arrays, parameters = input_arrays(source)
    notes = Notes()
    steps, num_envs = arrays["rewards"].shape
    stub_modules(TapeEnvs(arrays, int(arrays["actions"])))
    TrainState, note_parameters = make_train_state(notes, from_torch(parameters))
    sys.modules["flax.training.train_state"] = types.SimpleNamespace(TrainState=TrainState)
    order = np.random.default_rng(1).permutation(steps * num_envs)
    notes.arrays["order"] = order[None]
    permutation = jax.random.permutation

    def fixed_permutation(key, x, **options):
        """The order of every epoch: the script draws it inside its compiled update."""
        return jnp.asarray(order) if isinstance(x, int) else permutation(key, x, **options)

    jax.random.permutation = fixed_permutation
    writer = sys.modules["torch.utils.tensorboard"].SummaryWriter.return_value

    def add_scalar(name, value, step):
        """Called after each update, with the last gradient step's losses."""
        state = sys._getframe(1).f_globals["agent_state"]
        storage = sys._getframe(1).f_globals["storage"]
        if "action" not in notes.arrays:
            note_parameters(state)
            names = {"actions": "action", "logprobs": "log_prob", "values": "value", "advantages": "advantage"}
            notes.arrays |= {ours: np.array(getattr(storage, theirs)) for theirs, ours in names.items()}
        notes.append(name.split("/")[-1], np.float64(value))

    writer.add_scalar = add_scalar
    sys.argv = ["ppo_atari_envpool_xla_jax", *script_arguments(arrays, updates, EPOCHS, MINIBATCHES)]
    runpy.run_path(str(script_path("ppo_atari_envpool_xla_jax")), run_name="__main__")
    jax.effects_barrier()
    notes.save(target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
