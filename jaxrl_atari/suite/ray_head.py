"""The process that starts Ray on this machine: `python -m jaxrl_atari.suite.ray_head GPUS`.

It prints Ray's address, or why Ray did not start, and ends Ray when its standard input is closed.
"""

import logging
import sys

import ray

from jaxrl_atari.errors import reason

OBJECT_STORE_BYTES = 100 * 2**20  # nothing large passes through it


def main() -> None:
    """Starts Ray, and waits."""
    try:
        ray.init(
            "local",  # else Ray would join a cluster on this machine
            num_gpus=int(sys.argv[1]),  # Ray would count GPUs that JAX cannot use
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.CRITICAL,
        )
    except Exception as error:  # Ray has no narrower class
        print(reason(error), flush=True)
        return
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
