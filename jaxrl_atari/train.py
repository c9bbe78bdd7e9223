"""The command `train`: trains a new trial, or resumes one.

python -m jaxrl_atari.train --config configs/qbert.py [--total-env-steps 1000000 --ppo.gae-lambda 0.9 ...]
python -m jaxrl_atari.train --resume data/qbert_20260101_120000 [--total-env-steps 20000000 ...]
python -m jaxrl_atari.train --config configs/qbert.py --run-dir data/qbert [...]
python -m jaxrl_atari.train --config configs/qbert.py --run-dir data/qbert --session 0
"""

import dataclasses
from collections.abc import Sequence

from jaxrl_atari import cli
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.job import job_name
from jaxrl_atari.cli.options import FromDirectory, parse, read_sources
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware.settings import tune_process
from jaxrl_atari.output import say
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.layout import CONFIG_FILE, RESUME_FILE


@dataclasses.dataclass(frozen=True)
class Options(FromDirectory):
    """Trains an agent: all sessions of a trial, from the start or from their last checkpoints."""

    session: int | None = None
    """Trains this session alone, as one of several commands that a cluster runs. None: all sessions."""


def parse_options(arguments: Sequence[str] | None) -> Options:
    """Reads the command line.

    Options that it leaves out have the values of the run that is resumed, else those of the config file.

    Raises:
        UserError: a value, file or directory that cannot be used.
    """
    sources = read_sources(arguments)
    config = load_config(sources.config_file)
    run_dir = sources.resumed("run")
    stored = None
    if run_dir is not None:
        stored = read_config(run_dir, RESUME_FILE if job_name() else CONFIG_FILE)
        sources.say_kept(config.to_dict(), stored.to_dict())
    return parse(Options, arguments, "train", Options(config=stored or config), stored)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a new trial, or resumes one, as the command line says; with --session, trains one session of it."""
    options = parse_options(arguments)
    tuning = tune_process()
    # Imported here, so that --help need not import Flax and orbax.
    from jaxrl_atari.trials.trial import run_training, train_alone, train_session

    if options.session is None:
        say(tuning)
        run_training(options.config, options.directory)
    elif options.directory is None:
        raise UserError("--session: expected --run-dir or --resume too, the directory in which it trains")
    elif name := job_name():
        train_session(options.config, options.directory, options.session, name=name)
    else:
        train_alone(options.config, options.directory, options.session)


if __name__ == "__main__":
    cli.run(main)
