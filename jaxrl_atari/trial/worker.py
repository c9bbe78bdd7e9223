"""The process of one session, started by `trial.py`.

    python -m jaxrl_atari.trial.worker RUN_DIR SESSION GPU RESUME THREADS

It sees only its own GPUs, and GPU is the `gpu` option among these. THREADS are emulator threads (0: one per core). The
first line of its standard input is JSON: the contents of config.json for the run and for the session, which it writes
once training has begun.
"""

import dataclasses
import json
import sys
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.trial.processes import end_with_parent


def main() -> None:
    """Runs the session."""
    run_description, description = json.loads(sys.stdin.readline())
    end_with_parent()
    from jaxrl_atari.cli.values import parse_gpu
    from jaxrl_atari.hardware import runtime
    from jaxrl_atari.run_dir.config_file import config_from_dict
    from jaxrl_atari.run_dir.description import session_dir, write_description
    from jaxrl_atari.session import run_session
    from jaxrl_atari.trial.stopping import SessionStop

    run_dir, session, gpu, resume = Path(sys.argv[1]), int(sys.argv[2]), parse_gpu(sys.argv[3]), sys.argv[4] == "True"
    directory = session_dir(run_dir, session)
    runtime.configure()
    config = config_from_dict(run_description["config"])
    config = dataclasses.replace(
        config,
        devices=dataclasses.replace(config.devices, gpu=gpu),
        env=dataclasses.replace(config.env, num_threads=int(sys.argv[5])),
    )

    with SessionStop(f"session {session}", quick=not config.devices.distributed) as stop:

        def began() -> None:
            stop.training = True
            write_description(run_dir, run_description)
            write_description(directory, description)

        run_session(config, directory, session, resume=resume, stop_requested=stop.requested, on_first_update=began)


if __name__ == "__main__":
    cli.run(main)
