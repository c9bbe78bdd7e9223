"""What docs/idea.md tells a user to write and to run."""

import re
import shlex

from user_commands import ROOT, python

PAGE = (ROOT / "docs" / "idea.md").read_text()
IDEA = "import jax\nimport jax.numpy as jnp\n\nfrom jaxrl_atari import PPO"
"""The first lines of `my_idea.py`."""

TRY, TRAIN, COEFFICIENT = re.findall(r"python -m jaxrl_atari\.train --config (.*)", PAGE)
"""The words after `--config`: a try of a minute, the idea, and another coefficient."""

SWEEP, *_ = re.findall(r"python -m jaxrl_atari\.suite --config (.*)", PAGE)
"""The words after `--config`: the idea beside the baseline, in one command."""

SMALL = (
    "--env.num-envs=4", "--env.max-frames=128", "--env.num-threads=1", "--ppo.rollout-length=16",
    "--ppo.minibatch-size=32", "--ppo.epochs=1", "--total-env-steps=256", "--log.every-env-steps=64",
    "--log.checkpoint-every-env-steps=128", "--log.no-graphs", "--log.no-tensorboard", "--devices.gpu=false",
)  # fmt: skip
"""Options that make a training as small as `small_training.TINY`."""


def block(beginning):
    """The block of Python on the page that begins with these words."""
    (found,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.S) if text.startswith(beginning)]
    return found


def write_files(folder):
    """The files of the page's user: the idea, and the network."""
    (folder / "my_idea.py").write_text(block(IDEA))
    (folder / "my_network.py").write_text(block("from typing"))
    return folder


def run(folder, command, *options):
    """A command in a process."""
    return python("-m", f"jaxrl_atari.{command}", *options, cwd=folder)


def train(folder, command, *options):
    """A small training with the words of one of the page's commands."""
    ended = run(folder, "train", "--config", *shlex.split(command), *SMALL, *options)
    assert ended.returncode == 0, ended.stderr
