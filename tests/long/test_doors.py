"""An environment of the user's own, from the first command to the video; and what a stored run may not do."""

import json
import shutil
import sys

import pytest
from small_training import contents
from user_commands import one_error_line, python, run_here

from jaxrl_atari.runs.files import write_json

MY_ENVS = '''
import gymnasium
import numpy as np
from gymnasium import spaces


class Lamp(gymnasium.Env):
    """Three steps; the action that the lamp shows gives 1. The picture is a part of a dictionary."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, brightness=255, render_mode=None):
        self.render_mode, self.brightness = render_mode, brightness
        self.observation_space = spaces.Dict(
            {"picture": spaces.Box(0, 255, (32, 32, 3), np.uint8), "number": spaces.Discrete(3)}
        )
        self.action_space = spaces.Discrete(2)

    def picture(self):
        picture = np.zeros((32, 32, 3), np.uint8)
        picture[:, 16 * self.side : 16 * self.side + 16] = self.brightness
        return picture

    def observe(self):
        self.side = int(self.np_random.integers(2))
        return {"picture": self.picture(), "number": self.time}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        reward = float(action == self.side)
        self.time += 1
        return self.observe(), reward, self.time == 3, False, {}

    def render(self):
        return self.picture()


gymnasium.register("LampOfTheTest-v0", Lamp, kwargs={"brightness": 200})
'''
MY_CONFIG = """
import lamp_of_the_test

from jaxrl_atari import Config, DevicesConfig, EnvConfig, LogConfig, PPOConfig


def get_config():
    return Config(
        name="lamp",
        sessions=2,
        total_env_steps=256,
        env=EnvConfig(
            game="LampOfTheTest-v0", backend="gymnasium", options={"brightness": 99}, image_key="picture",
            num_envs=4
        ),
        ppo=PPOConfig(rollout_length=16, minibatch_size=32, epochs=1),
        devices=DevicesConfig(gpu=False),
        log=LogConfig(every_env_steps=64, checkpoint_every_env_steps=128, tensorboard=False),
    )
"""


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch):
    """A user's folder with their own environment and config; nothing of it is imported yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lamp_of_the_test.py").write_text(MY_ENVS)
    (tmp_path / "my_config.py").write_text(MY_CONFIG)
    forget()
    yield
    forget()


def forget():
    """As in a new process: the module is not imported, and the environment is not registered."""
    sys.modules.pop("lamp_of_the_test", None)
    if gymnasium := sys.modules.get("gymnasium"):
        gymnasium.registry.pop("LampOfTheTest-v0", None)


def command(capsys, module, *words, status=0):
    """Runs a command in this process, as the first one of a new process; returns what it says."""
    with pytest.raises(SystemExit) as ended:
        run_here(module, words)
    said = capsys.readouterr()
    assert ended.value.code == status, said.err
    return said.out if status == 0 else one_error_line(said.err)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two sessions, each in a process of its own."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "lamp_of_the_test.py").write_text(MY_ENVS)
    (folder / "my_config.py").write_text(MY_CONFIG)
    words = ["--config", "my_config.py", "--run-dir", "run", "--trial.parallel", "2"]
    ended = python("-m", "jaxrl_atari.train", *words, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


@pytest.fixture
def run_dir(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_a_run_of_ones_own_environment(run_dir):
    described = json.loads((run_dir / "config.json").read_text())
    assert described["game"] == "LampOfTheTest-v0"
    assert described["protocol"] == 'gymnasium, image_key=picture, options={"brightness": 99}'
    assert not list(run_dir.glob("session_*/actions/*"))
    trial = json.loads((run_dir / "trial.json").read_text())
    assert 0 <= trial["score"] <= 3
    assert "LampOfTheTest-v0" in (run_dir / "report.html").read_text()


def test_it_is_evaluated_and_filmed(run_dir, capsys):
    words = ["run", "--gpu", "false", "--episodes", "4", "--num-envs", "2", "--video", "--import"]
    command(capsys, "evaluate", *words, "lamp_of_the_test.py")
    (path,) = run_dir.glob("session_*/evaluation_*.json")
    figures = json.loads(path.read_text())
    assert figures["lengths"] == [3] * 4
    assert figures["backend"] == "gymnasium"
    (video,) = run_dir.glob("session_*/video_*.mp4")
    assert video.stat().st_size > 0


def test_it_is_resumed(run_dir, capsys):
    said = command(capsys, "train", "--resume", "run", "--total-env-steps", "384", "--import",
        "lamp_of_the_test.py",
                   "--trial.parallel", "1", "--log.no-graphs")  # fmt: skip
    assert said.count("new games are started") == 2
    assert json.loads((run_dir / "trial.json").read_text())["complete"]


def test_a_stored_run_is_not_played_without_it(run_dir, capsys):
    before = contents(run_dir)
    error = command(capsys, "evaluate", "run", "--gpu", "false", status=2)
    assert "env.game = 'LampOfTheTest-v0': no such environment is registered" in error
    assert contents(run_dir) == before


@pytest.mark.parametrize("module", ["evaluate", "report", "train"])
def test_a_stored_run_never_chooses_what_is_imported(run_dir, tmp_path, capsys, module):
    """Its id names a module that lies on the path."""
    (tmp_path / "evil_module_of_the_test.py").write_text("open('it_ran', 'w').close()\n")
    sys.path.insert(0, str(tmp_path))
    described = json.loads((run_dir / "config.json").read_text())
    described["config"]["env"]["game"] = "evil_module_of_the_test:LampOfTheTest-v0"
    write_json(run_dir / "config.json", described)
    words = ["--resume", "run", "--total-env-steps", "384"] if module == "train" else ["run"]
    with pytest.raises(SystemExit) as ended:
        run_here(module, words)
    assert ended.value.code == (0 if module == "report" else 2)
    assert "Traceback" not in capsys.readouterr().err
    assert "evil_module_of_the_test" not in sys.modules
    assert not (tmp_path / "it_ran").exists()


def test_on_the_command_line_an_id_may_name_its_module(tmp_path, capsys):
    words = ["--env.backend", "gymnasium", "--devices.gpu", "false", "--output-dir", "data"]
    sys.path.insert(0, str(tmp_path))
    error = command(capsys, "train", "--env.game", "lamp_of_the_test:LampOfTheTest-v0", *words, status=2)
    assert "env.image_key = None" in error  # only the imported environment can say so
    error = command(capsys, "train", "--env.game", "nowhere_of_the_test:Lamp-v0", *words, status=2)
    assert "nowhere_of_the_test: ModuleNotFoundError" in error
    assert not (tmp_path / "data").exists()
