"""Dialects: config files, the name beside a score, and what each differs in from the defaults."""

from dataclasses import replace

import pytest
from user_commands import ROOT

from jaxrl_atari.algorithms.dialects import DIALECTS, dialect_text
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.config import Config, NetworkConfig, PPOConfig, flat

FOLDER = ROOT / "configs" / "dialects"


def differences(name):
    """Fields of `ppo` in which a dialect's file differs from the defaults, and its number of environments."""
    config, default = load_config(FOLDER / f"{name}.py"), flat(Config().to_dict())
    found = {name: value for name, value in flat(config.to_dict()).items() if value != default[name]}
    return {name.removeprefix("ppo."): value for name, value in found.items() if name.startswith("ppo.")} | {
        "num_envs": config.env.num_envs
    }


def test_every_dialect_has_a_config_file_that_has_its_name():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(DIALECTS)
    for name in DIALECTS:
        config = load_config(FOLDER / f"{name}.py")
        assert (config.name, dialect_text(config)) == (name, name)
        assert config.env.resolved_protocol == ("v5" if name == "slm_lab" else "classic")


def test_the_settings_of_the_dialects():
    """As the sources in docs/dialects.md have them."""
    uniform = {"minibatches": "uniform"}
    slm_lab = uniform | {"unbiased_std": True, "learn_from_auto_resets": True, "num_envs": 16}
    torch = uniform | {"unbiased_std": True, "weight_decay": 0.0, "gae_lambda": 0.95, "num_envs": 8}
    cleanrl = torch | {"truncation_is_terminal": True}
    in_time = {"anneal_clip_epsilon": True, "clip_value_loss": False}
    assert differences("slm_lab") == slm_lab
    assert differences("cleanrl") == cleanrl
    assert differences("cleanrl_envpool") == cleanrl | {"learn_from_auto_resets": True}
    xla = cleanrl | {"learn_from_auto_resets": True, "clip_value_loss": False}
    del xla["unbiased_std"]
    assert differences("cleanrl_xla") == xla
    assert differences("sb3") == torch | in_time | {"value_coef": 1.0}
    paper = torch | in_time | {"value_coef": 2.0, "epochs": 3}
    del paper["unbiased_std"]
    assert differences("paper") == paper


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "published spec"),
        ({"ppo": PPOConfig(gae_lambda=0.5)}, "published spec"),
        ({"ppo": PPOConfig(unbiased_std=True)}, "published spec, unbiased_std=true"),
        ({"ppo": replace(DIALECTS["sb3"].ppo, gamma=0.9)}, "sb3, gamma=0.9, num_envs=16"),
        (
            {"algorithm": "rnd", "network": NetworkConfig(name="impala")},
            "published spec, algorithm=rnd, network=impala",
        ),
        ({"ppo": PPOConfig(gamma=0.9, epochs=1, learning_rate=0.1, clip_epsilon=0.2)}, "own settings"),
    ],
)
def test_the_name_beside_a_score_lists_what_differs(changes, text):
    assert dialect_text(Config(**changes)) == text
