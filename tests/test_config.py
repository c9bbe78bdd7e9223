"""Configs: validation, derived values, and config files."""

import dataclasses
import json

import pytest

from jaxrl_atari.cli import load_config_file
from jaxrl_atari.config import (
    Config,
    DevicesConfig,
    EnvConfig,
    EvaluationConfig,
    LogConfig,
    NetworkConfig,
    PPOConfig,
    TrialConfig,
)
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.run_dir.config_file import config_from_dict


def test_the_defaults_are_the_published_spec():
    config = Config()
    ppo, env = config.ppo, config.env
    assert (env.game_name, env.num_envs, env.resolved_protocol, env.max_frames) == ("Qbert", 16, "v5", 108_000)
    assert (ppo.rollout_length, ppo.epochs, ppo.minibatch_size, ppo.gamma) == (128, 4, 256, 0.99)
    assert (ppo.clip_epsilon, ppo.entropy_coef, ppo.value_coef, ppo.max_grad_norm) == (0.1, 0.01, 0.5, 0.5)
    assert (ppo.learning_rate, ppo.adam_epsilon, ppo.anneal_learning_rate) == (2.5e-4, 1e-5, True)
    assert ppo.weight_decay == 0.01
    assert (config.total_env_steps, config.gae_lambda, config.overlap) == (10_000_000, 0.95, "none")
    assert (config.rollout_size, config.num_minibatches) == (2048, 8)


@pytest.mark.parametrize(
    ("game", "gae_lambda"), [("Breakout", 0.7), ("ms_pacman", 0.85), ("Qbert", 0.95), ("Tetris", 0.95)]
)
def test_lambda_is_the_tuned_one_unless_set(game, gae_lambda):
    config = Config(env=EnvConfig(game=game))
    assert config.gae_lambda == gae_lambda
    assert dataclasses.replace(config, ppo=PPOConfig(gae_lambda=0.5)).gae_lambda == 0.5


def test_the_name_of_a_game_may_imply_a_protocol():
    assert EnvConfig(game="QbertNoFrameskip-v4").resolved_protocol == "classic"
    assert EnvConfig(game="Qbert", protocol="classic").resolved_protocol == "classic"
    with pytest.raises(ConfigError, match=r"env\.protocol = 'v5': expected classic"):
        EnvConfig(game="QbertNoFrameskip-v4", protocol="v5")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EnvConfig(game="Qbort"), r"env\.game = 'Qbort': .*Qbert"),
        (lambda: EnvConfig(num_envs=0), r"env\.num_envs = 0: expected a whole number from 1"),
        (lambda: EnvConfig(num_envs=True), r"env\.num_envs = True: expected a whole number"),
        (lambda: EnvConfig(backend="gym"), r"env\.backend = 'gym': expected one of ale, envpool"),
        (lambda: EnvConfig(protocol="v4"), r"env\.protocol = 'v4': expected one of auto, v5, classic"),
        (lambda: EnvConfig(game=3), r"env\.game = 3: expected text"),
        (lambda: NetworkConfig(name="resnet"), r"network\.name = 'resnet': expected one of nature, impala"),
        (lambda: NetworkConfig(compute_dtype="float16"), r"network\.compute_dtype = 'float16': expected one of auto, "),
        (lambda: NetworkConfig(conv="fft"), r"network\.conv = 'fft': expected one of auto, plain, matmul"),
        (lambda: LogConfig(graphs="no"), r"log\.graphs = 'no': expected true or false"),
        (lambda: LogConfig(wandb_project=""), r"log\.wandb_project = '': expected the name of a project"),
        (lambda: TrialConfig(parallel=-1), r"trial\.parallel = -1: expected a whole number from 0 to 1,024"),
        (lambda: EvaluationConfig(episodes=0), r"evaluation\.episodes = 0: expected a whole number from 1 to"),
        (lambda: Config(env=None), r"env = None: expected a value of type EnvConfig"),
        (lambda: Config(output_dir=None), r"output_dir = None: expected text"),
        (
            lambda: PPOConfig(gae_lambda="x"),
            r"ppo\.gae_lambda = 'x': expected a number from 0 to 1 or None",
        ),
        (lambda: PPOConfig(max_grad_norm=0), r"ppo\.max_grad_norm = 0: expected a number from 1e-06 to 1e\+06"),
        (lambda: PPOConfig(epochs=2.0), r"ppo\.epochs = 2\.0: expected a whole number from 1 to 1,000"),
        (lambda: PPOConfig(gamma=1.5), r"ppo\.gamma = 1\.5: expected a number from 0 to 1"),
        (lambda: PPOConfig(gae_lambda=float("nan")), r"ppo\.gae_lambda = nan: expected a number"),
        (lambda: PPOConfig(learning_rate=-1), r"ppo\.learning_rate = -1"),
        (lambda: LogConfig(every_env_steps=0), r"log\.every_env_steps = 0"),
        (
            lambda: Config(ppo=PPOConfig(minibatch_size=300)),
            r"ppo\.minibatch_size = 300: expected a divisor of .* 2048",
        ),
        (lambda: Config(total_env_steps=100), r"total_env_steps = 100: expected at least one rollout of 2048"),
        (lambda: Config(env=EnvConfig(num_groups=3)), r"env\.num_groups = 3: expected a divisor of env\.num_envs = 16"),
        (lambda: Config(name="a/b"), r"name = 'a/b': expected a plain file name"),
        (lambda: Config(seed=-1), r"seed = -1"),
        (lambda: Config(overlap="acting"), r"overlap = 'acting': expected one of none, update"),
        (
            lambda: Config(overlap="update", devices=DevicesConfig(distributed=True)),
            r"overlap = 'update': expected none with devices\.distributed; leave one of the two out",
        ),
        (lambda: DevicesConfig(gpu="cuda"), r"devices\.gpu = 'cuda': expected auto, true, false or a device index"),
        (lambda: DevicesConfig(gpu=-1), r"devices\.gpu = -1: expected auto, true, false or a device index"),
        (lambda: DevicesConfig(actor=1.5), r"devices\.actor = 1\.5: expected learner, auto, true, false or a device"),
        (lambda: DevicesConfig(evaluator="cuda"), r"devices\.evaluator = 'cuda': expected learner, auto, true, false"),
        (lambda: EnvConfig(max_frames=10), r"env\.max_frames = 10: expected a multiple of 4"),
        (lambda: Config(seed=2**31 - 1, sessions=2), r"seed = 2147483647: expected at most .* - sessions"),
        (
            lambda: DevicesConfig(data_parallel=0),
            r"devices\.data_parallel = 0: expected a whole number from 1 to 4,096 or all",
        ),
        (lambda: DevicesConfig(data_parallel="some"), r"devices\.data_parallel = 'some': expected a whole number"),
        (lambda: DevicesConfig(memory_fraction=0), r"devices\.memory_fraction = 0: expected a number from 0\.01 to 1"),
        (lambda: DevicesConfig(num_processes=0), r"devices\.num_processes = 0: expected a whole number from 1"),
    ],
)
def test_invalid_values_are_rejected_in_one_line(make, message):
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("written", "gpu"),
    [("true", True), ("False", False), ("0", 0), ("1", 1), ("AUTO", "auto"), (0, 0), (True, True)],
)
def test_spellings_of_the_gpu_option(written, gpu):
    parsed = DevicesConfig(gpu=written).gpu
    assert parsed == gpu
    assert type(parsed) is type(gpu)


def test_a_config_survives_json():
    config = Config(env=EnvConfig(game="ms_pacman"), ppo=PPOConfig(gae_lambda=0.9), devices=DevicesConfig(gpu="0"))
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_config_of_an_older_version_gets_the_defaults_of_new_fields():
    values = Config().to_dict()
    del values["network"]["name"]
    assert config_from_dict(values) == Config()


def test_a_field_of_another_version_is_named():
    with pytest.raises(UserError, match=r"ppo\.magic: this version of jaxrl_atari has no such field"):
        config_from_dict({"ppo": {"magic": 1}})


def test_a_budget_is_spent_once_a_further_rollout_overshoots():
    config = Config(total_env_steps=10_000)
    assert not config.is_spent(8_192)
    assert config.is_spent(9_500)


@pytest.mark.parametrize("name", ["qbert", "ms_pacman", "breakout", "pong", "atari", "quickstart"])
def test_the_shipped_configs(name, request):
    config = load_config_file(request.config.rootpath / "configs" / f"{name}.py")
    assert config.name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("x = 1", r"has no get_config\(\)"),
        ("def get_config(:", "SyntaxError"),
        ("def get_config(): return 1", "returned int; expected a Config"),
        ("from jaxrl_atari.config import *\ndef get_config(): return Config(seed=-1)", "seed = -1"),
        ("import nothing_like_this", "ModuleNotFoundError"),
    ],
)
def test_an_unusable_config_file(tmp_path, text, message):
    path = tmp_path / "config.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load_config_file(path)
    assert "\n" not in str(error.value)
