"""Process of one game of a suite: `python -m jaxrl_atari.suite.worker SUITE_DIR/GAME THREADS`."""

import sys
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.suite.processes import end_with_parent


def main() -> None:
    """Runs the game's trial, or what is missing of it, and writes its report."""
    end_with_parent()
    from jaxrl_atari.hardware import runtime
    from jaxrl_atari.report.pages import try_report
    from jaxrl_atari.suite.suite import game_configs, read_suite_file
    from jaxrl_atari.suite.trial import run_trial

    run_dir = Path(sys.argv[1])
    print(f"game {run_dir.name}", flush=True)
    runtime.configure()
    config, games, _ = read_suite_file(run_dir.parent)
    game = game_configs(config, games)[run_dir.name]
    run_trial(game, run_dir, resume=True, num_threads=int(sys.argv[2]))
    if config.log.graphs:
        try_report(run_dir)


if __name__ == "__main__":
    cli.run(main)
