"""Configs: defaults, validation and derived values."""

import json

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


def test_rate_clip_range_and_entropy_coefficient_change_linearly_where_they_are_annealed():
    """Before update u of N: 1 - u / N of the first value, and u / N of the last."""
    ppo = PPOConfig(anneal_clip_epsilon=True, clip_epsilon=0.2, entropy_coef=0.02, entropy_coef_end=0.004)
    config = Config(total_env_steps=4 * 2048, ppo=ppo)
    options = [current_options(config, update * 2048) for update in range(4)]
    np.testing.assert_allclose([each.clip_epsilon for each in options], [0.2, 0.15, 0.1, 0.05], rtol=1e-6)
    rates = [each.learning_rate for each in options]
    np.testing.assert_allclose(rates, [2.5e-4, 1.875e-4, 1.25e-4, 6.25e-5], rtol=1e-6)
    np.testing.assert_allclose([each.entropy_coef for each in options], [0.02, 0.016, 0.012, 0.008], rtol=1e-6)
    spent = current_options(config, 10**6)
    assert (spent.clip_epsilon, spent.entropy_coef) == (0, np.float32(0.004))
    constant = Config(ppo=PPOConfig(anneal_learning_rate=False))
    later = current_options(constant, 5_000_000)
    assert (later.learning_rate, later.clip_epsilon, later.entropy_coef) == tuple(
        map(np.float32, (2.5e-4, 0.1, 0.01))
    )


def test_the_named_protocols():
    v5, classic, machado = (EnvConfig(protocol=name).rules for name in ("v5", "classic", "machado"))
    assert v5 == Rules(0.25, False, True, 30, True, 108_000, True)
    assert classic == v5._replace(sticky_actions=0.0)
    assert machado == Rules(0.25, True, False, 0, False, 18_000, True)


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
