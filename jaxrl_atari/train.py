"""Trains PPO on an Atari game.

    python -m jaxrl_atari.train --config configs/qbert.py [--total-env-steps 1000000 --ppo.gae-lambda 0.9 ...]
    python -m jaxrl_atari.train --resume data/qbert_20260101_120000 [--total-env-steps 20000000 ...]
    python -m jaxrl_atari.train --config configs/qbert.py --run-dir data/qbert [...]

--run-dir names the run directory: the command starts a run there, or continues the one that it holds.
Every field of the config is an option; --help after --config shows them with the config's values.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.config import Config, load_config_file
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware import runtime
from jaxrl_atari.runs.config_file import read_config
from jaxrl_atari.runs.description import is_run


def parse(arguments: Sequence[str] | None) -> tuple[Config, Path | None]:
    """Command line -> config, and the run directory; None for a new one.

    Raises:
        UserError: an unknown option, or a value that cannot be used.
        SystemExit: after --help.
    """
    first = cli.Parser(add_help=False, allow_abbrev=False)
    first.add_paths("--config", "--resume", "--run-dir")
    known, rest = first.parse_known_args(arguments)
    if known.config and known.resume:
        raise UserError("--config and --resume: a resumed run has its config already; give one of the two")
    if known.run_dir and known.resume:
        raise UserError("--resume and --run-dir: both name the run directory; give one of the two")
    run_dir = known.resume or known.run_dir
    if run_dir is not None and (known.resume or is_run(run_dir)):
        default = read_config(run_dir)
    elif known.config:
        default = load_config_file(known.config)
    elif {"-h", "--help"} & set(rest):
        default = Config()
    elif run_dir is not None:
        raise UserError(f"--run-dir {run_dir}: holds no run; give --config FILE to start one there")
    else:
        given = f"; given were {' '.join(rest)}" if rest else ""
        raise UserError(f"--config or --resume: one is needed; for example --config configs/qbert.py{given}")
    config = cli.parse(Config, rest, default=default, prog="python -m jaxrl_atari.train", description=__doc__)
    if run_dir is not None and known.config and is_run(run_dir):
        cli.report_changes(known.config, cli.parse(Config, rest, default=load_config_file(known.config)), config)
    return config, run_dir


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config, run_dir = parse(arguments)
    for line in runtime.configure():
        cli.say(line)
    from jaxrl_atari.suite.trial import run_training  # after the settings, which must come before JAX starts

    run_training(config, run_dir)


if __name__ == "__main__":
    cli.run(main)
