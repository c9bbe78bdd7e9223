"""Schedules: the options of an update that change while a session trains.

A new schedule is a function like `clip_epsilon`, a line in `current_options`, and a switch in `PPOConfig`. The
option that it changes must be marked `TRACED` there; otherwise each of its values compiles an update.
"""

from dataclasses import replace

from jaxrl_atari.algorithm_options import as_numbers, resolved_options
from jaxrl_atari.config import Config, PPOConfig


def annealed(value: float, config: Config, env_steps: int) -> float:
    """A value that falls linearly in env steps, to 0 at total_env_steps."""
    return value * max(0.0, 1.0 - env_steps / config.total_env_steps)


def learning_rate(config: Config, env_steps: int) -> float:
    """The learning rate of the update whose rollout begins at `env_steps`."""
    rate = config.ppo.learning_rate
    return annealed(rate, config, env_steps) if config.ppo.anneal_learning_rate else rate


def clip_epsilon(config: Config, env_steps: int) -> float:
    """The clip range of the update whose rollout begins at `env_steps`."""
    epsilon = config.ppo.clip_epsilon
    return annealed(epsilon, config, env_steps) if config.ppo.anneal_clip_epsilon else epsilon


def current_options(config: Config, env_steps: int) -> PPOConfig:
    """The options (`resolved_options`) of the update whose rollout begins at `env_steps`.

    The scheduled ones have their values at that time. Those that are marked `TRACED` are float32 scalars: the
    compiled update takes them as data, so that a new value compiles nothing.
    """
    options = replace(
        resolved_options(config),
        learning_rate=learning_rate(config, env_steps),
        clip_epsilon=clip_epsilon(config, env_steps),
    )
    return as_numbers(options)
