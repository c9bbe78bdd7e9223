"""Trains PPO on an Atari game.

python -m jaxrl_atari.train --config configs/qbert.py [--total-env-steps 1000000 --ppo.gae-lambda 0.9 ...]
python -m jaxrl_atari.train --resume data/qbert_20260101_120000 [--total-env-steps 20000000 ...]
python -m jaxrl_atari.train --config configs/qbert.py --run-dir data/qbert [...]
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.cli.options import AllOptions, FromDirectory, load_config, parse, say_changes
from jaxrl_atari.config import Config
from jaxrl_atari.hardware import runtime
from jaxrl_atari.runs.run_dir import is_run, read_config


@dataclasses.dataclass(frozen=True)
class Options(FromDirectory):
    """Trains PPO on an Atari game: all sessions of a trial, from the start or from their last checkpoints."""

    options: AllOptions = dataclasses.field(default_factory=Config)


def parse_options(arguments: Sequence[str] | None) -> tuple[Config, Path | None]:
    """Command line -> config, and the run directory; None for a new one."""

    def default(start: argparse.Namespace) -> Options:
        (config,) = load_config(start.config, get_config=Config)
        run_dir = start.resume or start.run_dir
        if run_dir is not None and (start.resume or is_run(run_dir)):
            wanted, config = config, read_config(run_dir)
            if start.config is not None:
                say_changes(f"{start.config} differs from the run, which keeps its own values", wanted, config)
        return Options(**vars(start), options=config)

    options = parse(Options, arguments, default)
    return options.options, options.resume or options.run_dir


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config, run_dir = parse_options(arguments)
    for line in runtime.configure():
        cli.say(line)
    from jaxrl_atari.suite.trial import run_training  # after the settings, which must come before JAX starts

    run_training(config, run_dir)


if __name__ == "__main__":
    cli.run(main)
