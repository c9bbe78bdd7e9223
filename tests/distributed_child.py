"""One of two processes that learn together: trains for some updates and saves its parameters.

python tests/distributed_child.py OUTPUT.npz INDEX COORDINATOR
"""

import sys
from pathlib import Path

import jax
import numpy as np

from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.hardware.distributed import join_processes
from jaxrl_atari.session import prepare, train


def learn(session_dir, devices):
    """Parameters by their paths, and env steps, after some updates."""
    config = Config(
        env=EnvConfig(game="Qbert", num_envs=8),
        ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=2),
        network=NetworkConfig(compute_dtype="float32"),
        devices=devices,
        total_env_steps=640,
    )
    with prepare(config, session_dir, quiet=True) as run:
        iterations = train(run)
        for _ in range(3):
            jax.block_until_ready(next(iterations))
        params = jax.tree_util.tree_leaves_with_path(jax.device_get(run.learner.state.params))
        return {"env_steps": run.progress.env_steps} | {jax.tree_util.keystr(path): x for path, x in params}


if __name__ == "__main__":
    output, index, coordinator = sys.argv[1:]
    devices = DevicesConfig(
        gpu=False, data_parallel="all", check=True, distributed=True, coordinator=coordinator, num_processes=2,
        process_index=int(index),
    )  # fmt: skip
    join_processes(devices)
    np.savez(output, **learn(Path(output).with_suffix("") / "session_0", devices))
