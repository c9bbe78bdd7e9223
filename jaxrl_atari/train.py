"""Trains PPO on an Atari game.

    python -m jaxrl_atari.train --config configs/qbert.py [--total-env-steps 1000000 --ppo.gae-lambda 0.9 ...]
    python -m jaxrl_atari.train --resume data/qbert_20260101_120000 [--total-env-steps 20000000 ...]

Every field of the config is an option; --help after --config shows them with the config's values.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware import runtime
from jaxrl_atari.run_dir.config_file import read_config


def parse(arguments: Sequence[str]) -> tuple[Config, Path | None]:
    """Command line -> config, and the run directory if one is to be resumed.

    Raises:
        UserError: a value that cannot be used.
        SystemExit: --help, or an option that is not there (status 2).
    """
    first = cli.Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--resume")
    known, rest = first.parse_known_args(arguments)
    if known.config and known.resume:
        raise UserError("--config and --resume: a resumed run has its config already; give one of the two")
    if known.resume:
        run_dir = Path(known.resume).expanduser()
        default = read_config(run_dir)
    elif known.config:
        default, run_dir = cli.load_config_file(known.config), None
    elif {"-h", "--help"} & set(rest):
        default, run_dir = Config(), None
    else:
        given = f"; given were {' '.join(rest)}" if rest else ""
        raise UserError(f"--config or --resume: one is needed; for example --config configs/qbert.py{given}")
    config = cli.parse(Config, rest, default=default, prog="python -m jaxrl_atari.train", description=__doc__)
    return config, run_dir


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config, run_dir = parse(sys.argv[1:] if arguments is None else arguments)
    for line in runtime.configure():
        print(line, flush=True)
    from jaxrl_atari.trial.trial import run_training  # after the settings, which must come before JAX starts

    run_training(config, run_dir)


if __name__ == "__main__":
    cli.run(main)
