"""The former place of `jaxrl_atari.trials.trial`, for scripts that import from here."""

from jaxrl_atari.trials.trial import TrainingResult, run_training

__all__ = ["TrainingResult", "run_training"]
