"""The command `train`: trains a new trial, or resumes one.

python -m jaxrl_atari.train --config configs/qbert.py [--total-env-steps 1000000 --ppo.gae-lambda 0.9 ...]
python -m jaxrl_atari.train --resume data/qbert_20260101_120000 [--total-env-steps 20000000 ...]
python -m jaxrl_atari.train --config configs/qbert.py --run-dir data/qbert [...]
"""

import dataclasses
from collections.abc import Sequence

from jaxrl_atari import cli
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromDirectory, parse, read_sources
from jaxrl_atari.output import say
from jaxrl_atari.process_tuning import tune_process
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.layout import is_run


@dataclasses.dataclass(frozen=True)
class Options(FromDirectory):
    """Trains an agent: all sessions of a trial, from the start or from their last checkpoints."""


def parse_options(arguments: Sequence[str] | None) -> Options:
    """Reads the command line.

    Options that it leaves out have the values of the run that is resumed, else those of the config file.

    Raises:
        UserError: a value, file or directory that cannot be used.
    """
    sources = read_sources(arguments)
    config = load_config(sources.config_file)
    run_dir = sources.resumed(is_run)
    stored = None
    if run_dir is not None:
        stored = read_config(run_dir)
        sources.say_kept(config.to_dict(), stored.to_dict())
    return parse(Options, arguments, "train", Options(config=stored or config), stored)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains a new trial, or resumes one, as the command line says."""
    options = parse_options(arguments)
    for line in tune_process():
        say(line)
    from jaxrl_atari.trials.trial import run_training  # here, so that --help need not import Flax and orbax

    run_training(options.config, options.directory)


if __name__ == "__main__":
    cli.run(main)
