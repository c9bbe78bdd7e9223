"""Configs: validation, derived values, and config files."""

import dataclasses
import json

import pytest

from jaxrl_atari.cli import parse
from jaxrl_atari.config import (
    Config,
    DevicesConfig,
    EnvConfig,
    EvaluationConfig,
    LogConfig,
    NetworkConfig,
    PPOConfig,
    TrialConfig,
    load_config_file,
)
from jaxrl_atari.envs.protocols import PROTOCOLS, Rules
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.runs.config_file import config_from_dict


def test_the_defaults_are_the_published_spec():
    config = Config()
    ppo, env = config.ppo, config.env
    assert (env.game_name, env.num_envs, env.resolved_protocol, env.rules) == ("Qbert", 16, "v5", PROTOCOLS["v5"])
    assert (ppo.rollout_length, ppo.epochs, ppo.minibatch_size, ppo.gamma) == (128, 4, 256, 0.99)
    assert (ppo.clip_epsilon, ppo.entropy_coef, ppo.value_coef, ppo.max_grad_norm) == (0.1, 0.01, 0.5, 0.5)
    assert (ppo.learning_rate, ppo.adam_epsilon, ppo.anneal_learning_rate) == (2.5e-4, 1e-5, True)
    assert ppo.weight_decay == 0.01
    assert (config.total_env_steps, config.resolved_gae_lambda, config.overlap) == (10_000_000, 0.95, "none")
    assert (config.rollout_size, config.num_minibatches) == (2048, 8)


@pytest.mark.parametrize(
    ("game", "gae_lambda"), [("Breakout", 0.7), ("ms_pacman", 0.85), ("Qbert", 0.95), ("Tetris", 0.95)]
)
def test_lambda_is_the_tuned_one_unless_set(game, gae_lambda):
    config = Config(env=EnvConfig(game=game))
    assert config.resolved_gae_lambda == gae_lambda
    assert dataclasses.replace(config, ppo=PPOConfig(gae_lambda=0.5)).resolved_gae_lambda == 0.5


def test_the_name_of_a_game_may_imply_a_protocol():
    assert EnvConfig(game="QbertNoFrameskip-v4").resolved_protocol == "classic"
    assert EnvConfig(game="Qbert", protocol="classic").resolved_protocol == "classic"
    with pytest.raises(ConfigError, match=r"env\.protocol = 'v5': expected classic"):
        EnvConfig(game="QbertNoFrameskip-v4", protocol="v5")


def test_the_named_protocols():
    v5, classic, machado = (EnvConfig(protocol=name).rules for name in ("v5", "classic", "machado"))
    assert v5 == Rules(0.25, False, True, 30, True, 108_000, True)
    assert classic == v5._replace(sticky_actions=0.0)
    assert machado == Rules(0.25, True, False, 0, False, 18_000, True)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (EnvConfig(), "v5"),
        (EnvConfig(game="QbertNoFrameskip-v4", clip_rewards=True), "classic"),  # the protocol's own value
        (EnvConfig(life_loss_terminal=False), "v5, life_loss_terminal=false"),
        (EnvConfig(sticky_actions=0.0), "v5, sticky_actions=0.0"),
        (EnvConfig(protocol="machado"), "machado"),
        (
            EnvConfig(protocol="machado", full_action_space=False, max_frames=108_000),  # Dopamine's
            "machado, full_action_space=false, max_frames=108000",
        ),
        (
            EnvConfig(protocol="classic", noop_max=5, fire_on_reset=False, clip_rewards=False),
            "classic, noop_max=5, fire_on_reset=false, clip_rewards=false",
        ),
    ],
)
def test_what_differs_from_a_protocol_is_named(env, text):
    assert env.resolved_protocol == text
    overridden = {name: value for name in Rules._fields if (value := getattr(env, name)) is not None}
    assert env.rules._asdict().items() >= overridden.items()


def test_the_rules_are_options_of_the_command_line():
    arguments = "--env.life-loss-terminal false --env.clip-rewards True --env.sticky-actions 0.1 --env.noop-max None"
    default = Config(env=EnvConfig(noop_max=3, full_action_space=True))
    env = parse(Config, [*arguments.split(), "--env.full-action-space", "none"], default=default).env
    assert (env.life_loss_terminal, env.clip_rewards, env.sticky_actions) == (False, True, 0.1)
    assert (env.noop_max, env.full_action_space) == (None, None)
    with pytest.raises(ConfigError, match=r"env\.fire_on_reset = 'maybe': expected true or false or None"):
        parse(Config, ["--env.fire-on-reset", "maybe"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EnvConfig(game="Qbort"), r"env\.game = 'Qbort': .*Qbert"),
        (lambda: EnvConfig(num_envs=0), r"env\.num_envs = 0: expected a whole number from 1"),
        (lambda: EnvConfig(num_envs=True), r"env\.num_envs = True: expected a whole number"),
        (lambda: EnvConfig(backend="gym"), r"env\.backend = 'gym': expected one of ale, envpool"),
        (lambda: EnvConfig(protocol="v4"), r"env\.protocol = 'v4': expected one of auto, v5, classic, machado"),
        (lambda: EnvConfig(game=3), r"env\.game = 3: expected text"),
        (
            lambda: NetworkConfig(name="impala", conv="matmul"),
            r"network\.conv = 'matmul': expected auto or plain for impala",
        ),
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
        (
            lambda: Config(env=EnvConfig(num_groups=3)),
            r"env\.num_groups = 3: expected a divisor of the 16 environments",
        ),
        (
            lambda: Config(env=EnvConfig(num_groups=16), devices=DevicesConfig(data_parallel=2)),
            r"env\.num_groups = 16: expected a divisor of the 8 environments of each device",
        ),
        (lambda: Config(name="a/b"), r"name = 'a/b': expected a plain file name"),
        (lambda: Config(seed=-1), r"seed = -1"),
        (lambda: Config(overlap="acting"), r"overlap = 'acting': expected one of none, update"),
        (
            lambda: Config(sessions=2, trial=TrialConfig(parallel=2), devices=DevicesConfig(distributed=True)),
            r"trial\.parallel = 2: expected 0 or 1 with devices\.distributed; its processes share one session",
        ),
        (
            lambda: Config(overlap="update", devices=DevicesConfig(distributed=True)),
            r"overlap = 'update': expected none with devices\.distributed; leave one of the two out",
        ),
        (lambda: DevicesConfig(gpu="cuda"), r"devices\.gpu = 'cuda': expected auto, true, false or a device index"),
        (lambda: DevicesConfig(gpu=-1), r"devices\.gpu = -1: expected auto, true, false or a device index"),
        (lambda: DevicesConfig(actor=1.5), r"devices\.actor = 1\.5: expected learner, auto, true, false or a device"),
        (lambda: DevicesConfig(evaluator="cuda"), r"devices\.evaluator = 'cuda': expected learner, auto, true, false"),
        (lambda: EnvConfig(sticky_actions=2), r"env\.sticky_actions = 2: expected a number from 0 to 1 or None"),
        (lambda: EnvConfig(sticky_actions=True), r"env\.sticky_actions = True: expected a number from 0 to 1 or None"),
        (lambda: EnvConfig(clip_rewards="no"), r"env\.clip_rewards = 'no': expected true or false or None"),
        (
            lambda: EnvConfig(backend="envpool", protocol="machado"),
            r"env\.noop_max = 0: expected at least 1 with env\.backend = envpool, .*; env\.backend ale ",
        ),
        (lambda: PPOConfig(target_kl=-1), r"ppo\.target_kl = -1: expected a number from 0 to 100 or None"),
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


def test_a_config_without_the_options_of_the_protocol_means_the_same():
    """Of the version before them, in which `max_frames` was a number."""
    values = Config(ppo=PPOConfig(epochs=2)).to_dict()
    for name in Rules._fields:
        del values["env"][name]
    for name in ("normalize_advantages", "clip_value_loss", "target_kl"):
        del values["ppo"][name]
    values["env"]["max_frames"] = 108_000
    config = config_from_dict(values)
    assert (config.env.rules, config.env.resolved_protocol) == (PROTOCOLS["v5"], "v5")
    assert config.ppo == PPOConfig(epochs=2)


def test_a_field_of_another_version_is_named():
    with pytest.raises(UserError, match=r"ppo\.magic: this version of jaxrl_atari has no such field"):
        config_from_dict({"ppo": {"magic": 1}})


def test_a_budget_is_spent_once_a_further_rollout_overshoots():
    config = Config(total_env_steps=10_000)
    assert not config.is_spent(8_192)
    assert config.is_spent(9_500)


@pytest.mark.parametrize(
    "name", ["qbert", "ms_pacman", "breakout", "pong", "atari", "quickstart", "a2c_qbert", "reinforce_qbert"]
)
def test_the_shipped_configs(name, request):
    config = load_config_file(request.config.rootpath / "configs" / f"{name}.py")
    assert config.name == name


def test_reinforce_and_the_quickstart_are_what_their_pages_say(request):
    load = lambda name: load_config_file(request.config.rootpath / "configs" / f"{name}.py")  # noqa: E731
    ppo = load("reinforce_qbert").ppo
    assert (ppo.epochs, ppo.gae_lambda, ppo.entropy_coef) == (1, 1.0, 0.0)
    assert (ppo.normalize_advantages, ppo.clip_value_loss) == (False, False)
    assert load("reinforce_qbert").num_minibatches == 1
    quickstart = load("quickstart")
    assert (quickstart.env.game, quickstart.total_env_steps, quickstart.ppo) == ("CrazyClimber", 500_000, PPOConfig())


def test_a_config_file_with_a_dataclass_and_postponed_annotations(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom jaxrl_atari.config import Config\n"
        "@dataclass\nclass Mine:\n    seed: int = 7\ndef get_config(): return Config(seed=Mine().seed)\n"
    )
    assert load_config_file(path).seed == 7


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
