"""PPO on Atari with JAX: `python -m jaxrl_atari.train --config configs/qbert.py`.

A script needs one import line: `from jaxrl_atari import Config, EnvConfig, run_training, load_policy,
run_evaluation`. A name is loaded when it is imported or used, so that `import jaxrl_atari` alone costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jaxrl_atari.algorithm import Algorithm, register_algorithm
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
    from jaxrl_atari.envs import register_wrapper
    from jaxrl_atari.errors import ConfigError, InterfaceError, UserError
    from jaxrl_atari.evaluate.environment import make_env
    from jaxrl_atari.evaluate.play import EvaluationResult, run_evaluation
    from jaxrl_atari.evaluate.policy import Policy, load_policy
    from jaxrl_atari.evaluate.video import record_video
    from jaxrl_atari.learner import try_update
    from jaxrl_atari.networks import register_network
    from jaxrl_atari.ppo import PPO
    from jaxrl_atari.trials.trial import TrainingResult, run_training

_HOMES = (
    "config",
    "errors",
    "envs",
    "networks",
    "algorithm",
    "ppo",
    "learner",
    "evaluate.policy",
    "evaluate.play",
    "evaluate.environment",
    "evaluate.video",
    "trials.trial",
)  # light ones first
__all__ = [
    "PPO",
    "Algorithm",
    "Config",
    "ConfigError",
    "DevicesConfig",
    "EnvConfig",
    "EvaluationConfig",
    "EvaluationResult",
    "InterfaceError",
    "LogConfig",
    "NetworkConfig",
    "PPOConfig",
    "Policy",
    "TrainingResult",
    "TrialConfig",
    "UserError",
    "load_policy",
    "make_env",
    "record_video",
    "register_algorithm",
    "register_network",
    "register_wrapper",
    "run_evaluation",
    "run_training",
    "try_update",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (import_module(f"{__name__}.{home}") for home in _HOMES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
