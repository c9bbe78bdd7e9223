"""One of several processes that learn together: trains for some updates and saves its parameters.

python tests/distributed_child.py OUTPUT.npz PROCESSES INDEX COORDINATOR
"""

import sys
from pathlib import Path

import jax
import numpy as np

from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.hardware.distributed import join_processes
from jaxrl_atari.session import prepare, train

output, processes, index, coordinator = sys.argv[1:]
devices = DevicesConfig(
    gpu=False,
    data_parallel="all",
    check=True,
    distributed=int(processes) > 1,
    coordinator=coordinator,
    num_processes=int(processes),
    process_index=int(index),
)
if devices.distributed:
    join_processes(devices)
config = Config(
    env=EnvConfig(game="Qbert", num_envs=8),
    ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=2),
    network=NetworkConfig(compute_dtype="float32"),
    devices=devices,
    total_env_steps=640,
)
with prepare(config, Path(output).with_suffix("") / "session_0", quiet=True) as run:
    iterations = train(run)
    for _ in range(3):
        jax.block_until_ready(next(iterations))
    params = jax.tree_util.tree_leaves_with_path(jax.device_get(run.learner.state.params))
    env_steps = run.progress.env_steps
    np.savez(output, env_steps=env_steps, **{jax.tree_util.keystr(path): x for path, x in params})
