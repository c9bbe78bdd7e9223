"""Did a change of the code change the numbers? `python tests/bits.py` answers in less than a minute.

It trains three updates of each shipped network on a CPU in float32, and compares a digest of the parameters with
the one in bits.json for this kind of CPU and this JAX. `--pin` records today's digests: do it before the change.
The digest does not depend on the names or the order of the arrays.
"""

import contextlib
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from small_training import TINY, change

from jaxrl_atari import load_policy, run_training

PINNED = Path(__file__).with_name("bits.json")
NETWORKS = ("nature", "impala", "nature_lstm")


def machine() -> str:
    """What the bits of a program depend on: the instructions of the CPU, its number of cores, and the compiler."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    vendor = next(line.split()[-1] for line in lines if line.startswith("vendor_id"))
    flags = next(line for line in lines if line.startswith("flags")).split()
    vector = sorted(flag for flag in flags if flag.startswith(("avx", "fma", "amx")))
    cores = sum(line.startswith("processor") for line in lines)
    return f"{vendor}, {cores} cores, jax {jax.__version__}, {' '.join(vector)}"


def digest(network: str) -> str:
    """SHA-256 of all parameters of a network after three updates."""
    config = change(
        TINY,
        total_env_steps=3 * 8 * 32,
        env={"num_envs": 8, "max_frames": None},
        ppo={"rollout_length": 32, "minibatch_size": 64, "epochs": 2},
        network={"name": network, "compute_dtype": "float32"},
    )
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/output.txt", "w") as output, contextlib.redirect_stdout(output):
            run_training(config, f"{folder}/{network}")
        params = load_policy(f"{folder}/{network}", "latest", device=jax.devices("cpu")[0]).params
    arrays = sorted(hashlib.sha256(np.asarray(leaf).tobytes()).digest() for leaf in jax.tree.leaves(params))
    return hashlib.sha256(b"".join(arrays)).hexdigest()[:16]


def main() -> None:
    pinned = json.loads(PINNED.read_text()) if PINNED.exists() else {}
    digests = {network: digest(network) for network in NETWORKS}
    if "--pin" in sys.argv:
        PINNED.write_text(json.dumps(pinned | {machine(): digests}, indent=1, sort_keys=True) + "\n")
    elif machine() not in pinned:
        sys.exit(
            f"nothing is pinned for this machine ({machine()}): run `--pin` before the change. Now: {digests}"
        )
    elif digests != pinned[machine()]:
        sys.exit(f"error: the numbers have changed.\npinned: {pinned[machine()]}\nnow:    {digests}")
    print(f"the same bits: {digests}")


if __name__ == "__main__":
    main()
