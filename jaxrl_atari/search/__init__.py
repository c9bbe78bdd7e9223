"""Hyperparameter search: many trials with early stopping on few GPUs (Ray Tune).

A config file for a search imports what it needs from here.
"""

from jaxrl_atari.search.space import Choice, Grid, Integer, LogUniform, ResourcesConfig, SearchConfig, Uniform

__all__ = ["Choice", "Grid", "Integer", "LogUniform", "ResourcesConfig", "SearchConfig", "Uniform"]
