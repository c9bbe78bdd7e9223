"""Runs a PyTorch script of CleanRL on a tape: python -m originals.run_cleanrl SCRIPT INPUT.npz OUTPUT.npz UPDATES

SCRIPT is `ppo_atari` or `ppo_atari_envpool`. Its modules `gym` and `envpool` and its writer of TensorBoard files
are replaced by stubs; all else is the script's own. torch's default type is float64.
"""

import importlib.util
import runpy
import sys
import types
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from originals.recording import STEP_NAMES, Notes, input_arrays, install, numpy_of

EPOCHS = 2
MINIBATCHES = 4


class Space:
    def __init__(self, shape=(), n=None):
        self.shape = shape
        self.n = n

    def sample(self):
        return np.zeros(self.shape, np.uint8)


class TapeEnvs:
    """A vector environment that gives what is on the tape, whatever the actions, and starts over after it."""

    def __init__(self, arrays, actions):
        self.tape = arrays
        self.steps, self.num_envs = arrays["rewards"].shape
        self.single_action_space = self.action_space = Space(n=actions)
        self.single_observation_space = self.observation_space = Space((4, 84, 84))
        self.taken = 0

    def reset(self):
        return self.tape["observations"][0]

    def step(self, actions):
        t = self.taken % self.steps
        self.taken += 1
        lives = np.ones(self.num_envs, np.int32)
        info = {"lives": lives, "reward": self.tape["rewards"][t], "terminated": np.zeros_like(lives)}
        infos = info if self.is_envpool else ()
        return self.tape["observations"][t + 1], self.tape["rewards"][t], self.tape["dones"][t], infos

    def close(self):
        pass


class Wrapper:
    """gym.Wrapper as the scripts use it."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, **options):
        return self.env.reset(**options)

    def step(self, action):
        return self.env.step(action)


def stub_modules(envs):
    """Modules that the scripts import and a test does not need or cannot install."""
    stub = types.SimpleNamespace
    vector = stub(SyncVectorEnv=lambda makers: envs)
    sys.modules["gym"] = stub(Wrapper=Wrapper, spaces=stub(Discrete=Space), vector=vector)
    sys.modules["envpool"] = stub(make=lambda *_, **__: envs)
    sys.modules["torch.utils.tensorboard"] = stub(SummaryWriter=mock.MagicMock())
    if importlib.util.find_spec("distutils") is None:  # gone from Python 3.12 on
        sys.modules["distutils.util"] = stub(strtobool=lambda text: int(text.lower() in ("1", "true", "yes")))


def script_path(name):
    """The installed file; the package itself is not imported."""
    (folder,) = importlib.util.find_spec("cleanrl").submodule_search_locations
    return Path(folder) / f"{name}.py"


def script_arguments(arrays, updates, epochs=EPOCHS, minibatches=MINIBATCHES):
    steps, num_envs = arrays["rewards"].shape
    options = {
        "num-envs": num_envs, "num-steps": steps, "total-timesteps": updates * steps * num_envs,
        "update-epochs": epochs, "num-minibatches": minibatches,
    }  # fmt: skip
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def main(script, source, target, updates):
    arrays, parameters = input_arrays(source)
    notes = Notes()
    torch.set_default_dtype(torch.float64)
    envs = TapeEnvs(arrays, int(arrays["actions"]))
    envs.is_envpool = "envpool" in script
    stub_modules(envs)

    def first_step(variables):
        names = {"actions": "action", "logprobs": "log_prob", "values": "value", "advantages": "advantage"}
        notes.arrays |= {ours: numpy_of(variables[theirs]) for theirs, ours in names.items()}

    install(notes, parameters, EPOCHS * MINIBATCHES, STEP_NAMES, first_step)
    shuffle = np.random.shuffle

    def noted_shuffle(order):
        shuffle(order)
        notes.append("order", order)

    np.random.shuffle = noted_shuffle
    sys.argv = [script, *script_arguments(arrays, updates)]
    runpy.run_path(str(script_path(script)), run_name="__main__")
    notes.save(target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
