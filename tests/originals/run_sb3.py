"""Runs stable-baselines3's PPO on a tape: python -m originals.run_sb3 INPUT.npz OUTPUT.npz UPDATES

The settings are the RL Zoo's for Atari. In float64: torch's default type, the type of the rollout buffer
(`np.float32` as `stable_baselines3.common.buffers` sees it) and that of observations (`Tensor.float`).
"""

import sys

import gymnasium
import numpy as np
import torch

from originals.recording import SB3_NAMES, Notes, input_arrays, install

EPOCHS = 2
MINIBATCHES = 4


class NumPyInFloat64:
    """NumPy, whose float32 is float64."""

    float32 = np.float64

    def __getattr__(self, name):
        return getattr(np, name)


def make_env(arrays):
    from stable_baselines3.common.vec_env import VecEnv

    class TapeEnv(VecEnv):
        """A vector environment that gives what is on the tape, whatever the actions, and starts over after it."""

        def __init__(self):
            self.steps, num_envs = arrays["rewards"].shape
            self.taken = 0
            observations = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
            super().__init__(num_envs, observations, gymnasium.spaces.Discrete(int(arrays["actions"])))

        def reset(self):
            return arrays["observations"][0]

        def step_async(self, actions):
            pass

        def step_wait(self):
            t = self.taken % self.steps
            self.taken += 1
            infos = [
                {"terminal_observation": last, "TimeLimit.truncated": bool(cut)} if done else {}
                for last, cut, done in zip(
                    arrays["last_observations"][t], arrays["cut_off"][t], arrays["dones"][t], strict=True
                )
            ]
            return arrays["observations"][t + 1], arrays["rewards"][t].copy(), arrays["dones"][t], infos

        def close(self):
            pass

        def get_attr(self, name, indices=None):
            return [None] * self.num_envs

        def set_attr(self, name, value, indices=None):
            raise NotImplementedError

        def env_method(self, name, *arguments, indices=None, **options):
            raise NotImplementedError

        def env_is_wrapped(self, wrapper, indices=None):
            return [False] * self.num_envs

    return TapeEnv()


def main(source, target, updates):
    arrays, parameters = input_arrays(source)
    notes = Notes()
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    steps, num_envs = arrays["rewards"].shape

    def first_step(variables):
        buffer = variables["self"].rollout_buffer
        for name in ("actions", "log_probs", "values", "advantages"):
            flat = getattr(buffer, name).reshape(num_envs, steps).T  # the buffer is ordered by environment by now
            notes.arrays[name.removesuffix("s")] = flat.copy()

    install(notes, parameters, EPOCHS * MINIBATCHES, SB3_NAMES, first_step)
    from stable_baselines3 import PPO  # its default optimiser is the Adam of now
    from stable_baselines3.common import buffers

    buffers.np = NumPyInFloat64()
    permutation = np.random.permutation

    def noted_permutation(size):
        order = permutation(size)
        b, t = np.divmod(order, steps)
        notes.append("order", t * num_envs + b)
        return order

    np.random.permutation = noted_permutation
    model = PPO(
        "CnnPolicy", make_env(arrays), n_steps=steps, batch_size=steps * num_envs // MINIBATCHES, n_epochs=EPOCHS,
        learning_rate=lambda remaining: remaining * 2.5e-4, clip_range=lambda remaining: remaining * 0.1,
        vf_coef=0.5,
        ent_coef=0.01, seed=1, device="cpu",
    )  # fmt: skip
    train = model.train

    def noted_train():
        notes.append("clip_range", model.clip_range(model._current_progress_remaining))
        train()

    model.train = noted_train
    model.learn(total_timesteps=updates * steps * num_envs)
    notes.save(target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
