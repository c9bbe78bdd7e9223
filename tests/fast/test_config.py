"""Configs: defaults, validation and derived values."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, LogConfig, PPOConfig
from jaxrl_atari.config_dicts import changed_fields, config_from_dict, set_fields
from jaxrl_atari.envs.protocols import PROTOCOLS, Rules
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.option_forms import parse_choice, parse_number
from jaxrl_atari.registry import NETWORKS
from jaxrl_atari.update import current_options


def test_the_defaults_are_the_published_spec():
    config = Config()
    ppo, env = config.ppo, config.env
    assert (env.game_name, env.num_envs, env.resolved_protocol, env.rules) == ("Qbert", 16, "v5", PROTOCOLS["v5"])
    assert (ppo.rollout_length, ppo.epochs, ppo.minibatch_size, ppo.gamma) == (128, 4, 256, 0.99)
    assert (ppo.clip_epsilon, ppo.entropy_coef, ppo.value_coef, ppo.max_grad_norm) == (0.1, 0.01, 0.5, 0.5)
    assert (ppo.learning_rate, ppo.adam_epsilon, ppo.anneal_learning_rate) == (2.5e-4, 1e-5, True)
    assert (ppo.weight_decay, ppo.normalize_advantages, ppo.clip_value_loss, ppo.target_kl) == (
        0.01,
        True,
        True,
        None,
    )
    assert (config.total_env_steps, config.overlap) == (10_000_000, "none")
    assert (config.rollout_size, config.num_minibatches) == (2048, 8)


@pytest.mark.parametrize(
    ("game", "gae_lambda"),
    [
        ("Breakout", 0.7),
        ("ms_pacman", 0.85),
        ("Tetris", 0.95),
        ("BreakoutNoFrameskip-v4", 0.95),
        ("ALE/Pong-v5", 0.85),
    ],
)
def test_lambda_is_the_tuned_one_or_that_of_the_references_of_classic_unless_set(game, gae_lambda):
    config = Config(env=EnvConfig(game=game))
    assert config.resolved_gae_lambda == gae_lambda
    assert replace(config, ppo=PPOConfig(gae_lambda=0.5)).resolved_gae_lambda == 0.5


def test_rate_and_clip_range_fall_linearly_where_they_are_annealed():
    """Before update u of N: 1 - u / N of the first value."""
    config = Config(total_env_steps=4 * 2048, ppo=PPOConfig(anneal_clip_epsilon=True, clip_epsilon=0.2))
    options = [current_options(config, update * 2048) for update in range(4)]
    np.testing.assert_allclose([each.clip_epsilon for each in options], [0.2, 0.15, 0.1, 0.05], rtol=1e-6)
    rates = [each.learning_rate for each in options]
    np.testing.assert_allclose(rates, [2.5e-4, 1.875e-4, 1.25e-4, 6.25e-5], rtol=1e-6)
    assert current_options(config, 10**6).clip_epsilon == 0
    constant = Config(ppo=PPOConfig(anneal_learning_rate=False))
    assert current_options(constant, 5_000_000).clip_epsilon == np.float32(0.1)
    assert current_options(constant, 5_000_000).learning_rate == np.float32(2.5e-4)


def test_uniform_minibatches_are_refused_on_several_devices():
    config = Config(ppo=PPOConfig(minibatches="uniform"))
    config.check_split(1)
    with pytest.raises(
        ConfigError, match=r"ppo.minibatches = .uniform.: expected stratified on 2 devices; .*share"
    ):
        config.check_split(2)
    with pytest.raises(ConfigError, match="stratified on 2 devices"):
        replace(config, devices=DevicesConfig(data_parallel=2))


@pytest.mark.parametrize("rules", [{}, {"noop_max": 1}])
def test_the_lambda_of_classic_holds_where_a_rule_of_it_is_another(rules):
    assert Config(env=EnvConfig(game="Breakout", protocol="classic", **rules)).resolved_gae_lambda == 0.95
    assert Config(env=EnvConfig(game="Breakout", protocol="machado")).resolved_gae_lambda == 0.7


def test_the_named_protocols():
    v5, classic, machado = (EnvConfig(protocol=name).rules for name in ("v5", "classic", "machado"))
    assert v5 == Rules(0.25, False, True, 30, True, 108_000, True)
    assert classic == v5._replace(sticky_actions=0.0)
    assert machado == Rules(0.25, True, False, 0, False, 18_000, True)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (EnvConfig(game="QbertNoFrameskip-v4", clip_rewards=True), "classic"),  # the protocol's own value
        (EnvConfig(sticky_actions=0.0), "v5, sticky_actions=0.0"),
        (
            EnvConfig(protocol="machado", full_action_space=False, max_frames=108_000),  # Dopamine's
            "machado, full_action_space=false, max_frames=108000",
        ),
    ],
)
def test_what_differs_from_a_protocol_is_named(env, text):
    assert env.resolved_protocol == text
    overridden = {name: value for name in Rules._fields if (value := getattr(env, name)) is not None}
    assert env.rules._asdict().items() >= overridden.items()


def ppo(**options):
    return lambda: Config(ppo=PPOConfig(**options))


def env(**options):
    return lambda: Config(env=EnvConfig(**options))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        # Types, ranges and choices.
        (env(num_envs=True), r"env\.num_envs = True: expected a whole number"),
        (env(game=3), r"env\.game = 3: expected text"),
        (env(sticky_actions=True), r"env\.sticky_actions = True: expected a number from 0 to 1 or None"),
        (env(clip_rewards="no"), r"env\.clip_rewards = 'no': expected true or false or None"),
        (ppo(epochs=2.0), r"ppo\.epochs = 2\.0: expected a whole number from 1 to 1,000"),
        (ppo(gae_lambda=float("nan")), r"ppo\.gae_lambda = nan: expected a number from 0 to 1 or None"),
        (ppo(max_grad_norm=0), r"ppo\.max_grad_norm = 0: expected a number from 1e-06 to 1e\+06"),
        (lambda: Config(devices=DevicesConfig(actor=1.5)), r"devices\.actor = 1\.5: expected .*learner"),
        (
            lambda: Config(devices=DevicesConfig(data_parallel=0)),
            r"devices\.data_parallel = 0: expected a whole number from 1 to 4,096 or all",
        ),
        (
            lambda: NETWORKS.get("resnet"),
            r"network\.name = 'resnet': expected one of nature, impala",
        ),
        (lambda: Config(env=None), r"env = None: expected a value of type EnvConfig"),
        (lambda: Config(name="a/b"), r"name = 'a/b': expected a plain file name"),
        (lambda: Config(name="a\0b"), r"name = 'a\\x00b': expected a plain file name"),
        (ppo(coefficients={"a": 10**400}), r"ppo\.coefficients\.a = 1000+: expected a finite number"),
        # What does not go together.
        (env(game="QbertNoFrameskip-v4", protocol="v5"), r"env\.protocol = 'v5': expected classic"),
        (env(max_frames=10), r"env\.max_frames = 10: expected a multiple of 4"),
        (
            env(backend="envpool", protocol="machado"),
            r"env\.noop_max = 0: expected at least 1 with .*envpool; ale",
        ),
        (ppo(minibatch_size=1), r"ppo\.minibatch_size = 1: expected at least 2 with .*; .* is always 0"),
        (lambda: Config(total_env_steps=100), r"total_env_steps = 100: expected at least one rollout of 2048"),
        (lambda: Config(seed=2**31 - 1, sessions=2), r"seed = 2147483647: expected at most .* - sessions"),
        (
            lambda: Config(env=EnvConfig(num_groups=16), devices=DevicesConfig(data_parallel=2)),
            r"env\.num_groups = 16: expected a divisor of the 8 environments of each device",
        ),
        (
            lambda: Config(devices=DevicesConfig(data_parallel=3)),
            r"devices\.data_parallel = 3: expected a divisor of env\.num_envs = 16 and ppo\.minibatch_size = 256",
        ),
        (
            lambda: Config(overlap="update", devices=DevicesConfig(distributed=True)),
            r"overlap = 'update': expected none with devices\.distributed",
        ),
    ],
)
def test_invalid_values_are_rejected_in_one_line(make, message):
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("written", "gpu"), [("true", True), ("False", False), ("0", 0), ("AUTO", "auto")])
def test_spellings_of_the_gpu_option(written, gpu):
    parsed = parse_choice(written)
    assert (parsed, type(parsed)) == (gpu, type(gpu))


def test_a_whole_number_of_thousands_of_digits_is_no_number():
    text = "1" * 5_000
    assert parse_choice(text) == text == parse_number(text, whole=True)


def test_a_dict_that_becomes_empty_has_no_line_of_its_own():
    assert changed_fields({"a": {}, "b": 0}, {"a": {"c": 1.0}, "b": 0.0}) == {"a.c": (None, 1.0)}
    assert changed_fields({"a": 0}, {"a": None}) == {"a": (0, None)}


def test_a_change_from_the_cpu_to_the_first_gpu_is_a_change():
    cpu, gpu = (Config(devices=DevicesConfig(gpu=value)).to_dict() for value in (False, 0))
    assert changed_fields(cpu, gpu) == {"devices.gpu": (False, 0)}
    assert changed_fields(cpu, cpu) == {}


def test_numbers_of_numpy_are_numbers():
    config = Config(seed=np.int64(85), ppo=PPOConfig(gamma=np.float64(0.5)), log=LogConfig(graphs=np.bool_(False)))
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    assert (config.seed, config.ppo.gamma, config.log.graphs) == (85, 0.5, False)


def test_a_config_survives_json_and_gets_the_defaults_of_new_fields():
    config = Config(env=EnvConfig(game="ms_pacman", max_frames=400), ppo=PPOConfig(epochs=2))
    values = json.loads(json.dumps(config.to_dict()))
    assert config_from_dict(values) == config
    for name in {*Rules._fields} - {"max_frames"}:  # of a version before these options
        del values["env"][name]
    values["log"]["jsonl"] = True  # an option that is gone
    del values["network"], values["ppo"]["target_kl"]
    assert config_from_dict(values) == config
    with pytest.raises(UserError, match=r"ppo\.magic: this version of jaxrl_atari has no such field"):
        config_from_dict({"ppo": {"magic": 1}})


def test_a_budget_is_spent_once_a_further_rollout_overshoots():
    config = Config(total_env_steps=10_000)
    assert not config.is_spent(8_192)
    assert config.is_spent(9_500)


@pytest.mark.parametrize("name", ["foo.bar", "seed.x", "ppo.foo", "ppo", "ppo.coefficients.max_c.x"])
def test_a_name_that_is_no_field_cannot_be_set(name):
    with pytest.raises(ConfigError, match=rf"{name} = 1: expected a field of the config"):
        set_fields(Config(), {name: 1})


def test_keys_of_dictionaries_can_be_set():
    config = set_fields(Config(), {"ppo.coefficients.max_c": 0.5, "ppo.gamma": 0.9})
    assert (config.ppo.coefficients, config.ppo.gamma) == ({"max_c": 0.5}, 0.9)
