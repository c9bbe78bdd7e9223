"""The process of one session, started by `trial.py`: `python -m jaxrl_atari.suite.session_worker RUN_DIR SESSION`.

It sees only its own GPUs. The first line of its standard input is JSON: `config`, with the options of this process;
`resume`; and `descriptions`, the contents of config.json by directory, which it writes once training has begun.
"""

import json
import sys
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.suite.processes import end_with_parent


def main() -> None:
    """Runs the session."""
    task = json.loads(sys.stdin.readline())
    end_with_parent()
    from jaxrl_atari.cli.stopping import StopRequest
    from jaxrl_atari.config import config_from_dict
    from jaxrl_atari.hardware import runtime
    from jaxrl_atari.runs.run_dir import session_dir, write_description
    from jaxrl_atari.session import run_session

    session = int(sys.argv[2])
    directory = session_dir(Path(sys.argv[1]), session)
    runtime.configure()
    config = config_from_dict(task["config"])

    with StopRequest(f"session {session}") as stop:

        def began() -> None:
            stop.training = True
            for path, description in task["descriptions"].items():
                write_description(Path(path), description)

        run_session(
            config, directory, session, resume=task["resume"], stop_requested=stop.requested, on_first_update=began
        )


if __name__ == "__main__":
    cli.run(main)
