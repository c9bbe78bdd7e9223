"""The process of one session, as `trial.py` starts it: `python -m jaxrl_atari.trial.worker RUN_DIR SESSION GPU RESUME`.

It sees only its own GPUs, and GPU is the `gpu` option among these.
"""

import dataclasses
import sys
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.trial.processes import end_with_parent


def main() -> None:
    """Runs the session."""
    end_with_parent()
    from jaxrl_atari.config import parse_gpu
    from jaxrl_atari.config_files import read_config
    from jaxrl_atari.hardware import runtime
    from jaxrl_atari.trial.trial import train_session

    run_dir, session, gpu, resume = Path(sys.argv[1]), int(sys.argv[2]), parse_gpu(sys.argv[3]), sys.argv[4] == "True"
    runtime.configure()
    config = read_config(run_dir)
    config = dataclasses.replace(config, devices=dataclasses.replace(config.devices, gpu=gpu))
    train_session(config, run_dir, session, resume=resume)


if __name__ == "__main__":
    cli.run(main)
