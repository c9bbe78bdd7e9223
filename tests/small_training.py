"""Small sessions on the real emulator, and what they leave behind."""

import itertools
import json
from dataclasses import replace
from importlib.machinery import ModuleSpec

from jaxrl_atari import learner
from jaxrl_atari.algorithm import find_algorithm, resolved_options
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, LogConfig, PPOConfig
from jaxrl_atari.networks import make_network
from jaxrl_atari.runs.checkpoints import Checkpoints, meta_digest
from jaxrl_atari.runs.writers import Writer

TINY = Config(
    name="tiny",
    total_env_steps=256,
    env=EnvConfig(game="Breakout", num_envs=4, num_threads=1, max_frames=128),
    ppo=PPOConfig(rollout_length=16, minibatch_size=32, epochs=1),
    devices=DevicesConfig(gpu=False, check=True),
    log=LogConfig(every_env_steps=64, checkpoint_every_env_steps=128, graphs=False, tensorboard=False),
)
"""The one small session: games of at most 32 env steps, four updates. A test that trains changes as little of it
as it can: other numbers of environments, steps or minibatches need another program, and seconds to compile it."""


def change(config, **options):
    """`change(TINY, seed=3, env={"num_envs": 4})`."""
    groups = {
        name: replace(getattr(config, name), **value) for name, value in options.items() if type(value) is dict
    }
    return replace(config, **options | groups)


KINDS = {
    "plain": change(TINY, sessions=2),
    "recurrent": change(TINY, network={"name": "nature_lstm"}),
    "two devices": change(TINY, devices={"data_parallel": 2}),
    "overlap": change(TINY, overlap="update"),
    "gymnasium": change(
        TINY,
        env={
            "game": "MiniGrid-Empty-5x5-v0",
            "backend": "gymnasium",
            "image_key": "image",
            "max_frames": None,
            "num_threads": 0,
        },
    ),
}
"""The runs of the fixture `trained`."""


def first_arrays(config, num_actions, device=None):
    """`learner.first_arrays` of a config, with seed 0."""
    algorithm, options = find_algorithm(config.algorithm), resolved_options(config)
    network = make_network(config.network, num_actions, "cpu")
    return learner.first_arrays(network, algorithm, options, seed=0, device=device)


def stop_before(rollout):
    """A stop request at the n-th rollout, counted from 1."""
    asked = itertools.count(1)
    return lambda: next(asked) >= rollout


class FakeWandb:
    """Stands for the package wandb.

    Args:
        refuses: whether `init` refuses a run, as it does where nobody is logged in.
    """

    class Error(Exception):
        pass

    Settings = dict
    __spec__ = ModuleSpec("wandb", None)

    def __init__(self, refuses):
        self.refuses = refuses
        self.ids = []  # of the runs that have begun
        self.closed = 0

    def init(self, **options):
        if self.refuses:
            raise self.Error("not logged in")
        self.ids.append(options["id"])
        return self

    def define_metric(self, *_, **__):
        pass

    def finish(self):
        self.closed += 1


class Lines(Writer):
    """A writer that keeps what it is given."""

    def __init__(self):
        self.rows, self.evaluations, self.messages = [], [], []

    def write(self, row):
        self.rows.append(row)

    def message(self, text):
        self.messages.append(text)

    def evaluation(self, row):
        self.evaluations.append(row)


def contents(folder):
    """The files of a folder: name -> content."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def latest_meta(session_dir):
    checkpoints = Checkpoints(session_dir)
    return checkpoints.read_meta(checkpoints.env_steps()[-1])


def edit_meta(session_dir, step, **changes):
    """Changes the meta of a checkpoint and signs it again."""
    path = session_dir / "checkpoints" / str(step) / "meta" / "metadata"
    meta = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(meta | {"checksum": meta_digest(meta)}))


def flip_bit(path, at=0.5):
    """Flips a bit of a file, at a fraction of its length."""
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 4
    path.write_bytes(content)


def flip_all(session_dir, step, item):
    """Flips a bit of every array of an item of a checkpoint."""
    for path in (session_dir / "checkpoints" / str(step) / item).rglob("[0-9]*"):
        if path.is_file():
            flip_bit(path)
