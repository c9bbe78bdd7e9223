"""Configs: defaults, validation and derived values."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxrl_atari.config import (
    Config,
    DevicesConfig,
    EnvConfig,
    LogConfig,
    PPOConfig,
    changed_fields,
    config_from_dict,
    set_fields,
)
from jaxrl_atari.envs.protocols import PROTOCOLS, Rules
from jaxrl_atari.errors import ConfigError, UserError
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


def test_the_entropy_coefficient_changes_linearly_to_its_end():
    config = Config(total_env_steps=4 * 2048, ppo=PPOConfig(entropy_coef=0.02, entropy_coef_end=0.004))
    weights = [current_options(config, update * 2048).entropy_coef for update in range(5)]
    np.testing.assert_allclose(weights, [0.02, 0.016, 0.012, 0.008, 0.004], rtol=1e-6)
    assert current_options(Config(), 5_000_000).entropy_coef == np.float32(0.01)


def test_the_named_protocols():
    v5, classic, machado = (EnvConfig(protocol=name).rules for name in ("v5", "classic", "machado"))
    assert v5 == Rules(0.25, False, True, 30, True, 108_000, True)
    assert classic == v5._replace(sticky_actions=0.0)
    assert machado == Rules(0.25, True, False, 0, False, 18_000, True)


def test_a_value_of_ones_own_replaces_that_of_the_protocol():
    assert EnvConfig(sticky_actions=0.0).rules.sticky_actions == 0.0
    assert EnvConfig(protocol="machado", full_action_space=False).rules.full_action_space is False


def ppo(**options):
    return lambda: Config(ppo=PPOConfig(**options))


def env(**options):
    return lambda: Config(env=EnvConfig(**options))


INVALID = {
    # Types, ranges and choices.
    "env.num_envs = True": env(num_envs=True),
    "ppo.epochs = 2.0": ppo(epochs=2.0),
    "ppo.gae_lambda = nan": ppo(gae_lambda=float("nan")),
    "ppo.max_grad_norm = 0": ppo(max_grad_norm=0),
    "devices.data_parallel = 0": lambda: Config(devices=DevicesConfig(data_parallel=0)),
    "devices.num_processes = 2": lambda: Config(devices=DevicesConfig(num_processes=2)),
    "name = 'a/b'": lambda: Config(name="a/b"),
    # What does not go together.
    "env.max_frames = 10": env(max_frames=10),
    "env.noop_max = 0": env(backend="envpool", protocol="machado"),
    "env.options": env(options={"mode": 12}),
    "ppo.minibatch_size = 1": lambda: Config(ppo=PPOConfig(minibatch_size=1)).check_sizes(1),
    "ppo.coefficients": ppo(coefficients=[1.0]),
    "log.stop_at_return = inf": lambda: Config(log=LogConfig(stop_at_return=float("inf"))),
    "ppo.minibatches": lambda: Config(ppo=PPOConfig(minibatches="uniform")).check_sizes(2),
    "total_env_steps = 100": lambda: Config(total_env_steps=100).check_sizes(1),
    "env.num_groups = 16": lambda: Config(env=EnvConfig(num_groups=16)).check_sizes(2),
    "devices.data_parallel = 3": lambda: Config().check_sizes(3),
    "overlap = 'update'": lambda: Config(overlap="update", devices=DevicesConfig(distributed=True)),
}
"""How the one line of error begins -> what makes it."""


def test_an_invalid_value_is_named_in_one_line():
    for begins, make in INVALID.items():
        with pytest.raises(ConfigError) as error:
            make()
        assert str(error.value).startswith(begins)
        assert ": expected " in str(error.value)
        assert "\n" not in str(error.value)


def test_fields_that_differ():
    assert changed_fields({"a": {}, "b": 0}, {"a": {"c": 1.0}, "b": 0}) == {"a.c": (None, 1.0)}
    cpu, gpu = (Config(devices=DevicesConfig(gpu=value)).to_dict() for value in (False, 0))
    assert changed_fields(cpu, gpu) == {"devices.gpu": (False, 0)}


def test_a_config_survives_json_and_gets_the_defaults_of_new_fields():
    config = Config(env=EnvConfig(game="ms_pacman", max_frames=400), ppo=PPOConfig(epochs=2))
    values = json.loads(json.dumps(config.to_dict()))
    assert config_from_dict(values) == config
    for name in {*Rules._fields} - {"max_frames"}:  # of a version before these options
        del values["env"][name]
    del values["network"], values["ppo"]["target_kl"]
    assert config_from_dict(values) == config
    with pytest.raises(UserError, match=r"ppo\.magic: this version of jaxrl_atari has no such field"):
        config_from_dict({"ppo": {"magic": 1}})


def test_a_budget_is_spent_once_a_further_rollout_overshoots():
    config = Config(total_env_steps=10_000)
    assert not config.is_spent(8_192)
    assert config.is_spent(9_500)


def test_fields_and_keys_of_dictionaries_can_be_set():
    for name in ("foo.bar", "seed.x", "ppo.foo", "ppo"):
        with pytest.raises(ConfigError, match=name):
            set_fields(Config(), {name: 1})
    config = set_fields(Config(), {"ppo.coefficients.max_c": 0.5, "ppo.gamma": 0.9})
    assert (config.ppo.coefficients, config.ppo.gamma) == ({"max_c": 0.5}, 0.9)
