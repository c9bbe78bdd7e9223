"""Registries: the networks and algorithms that a config may choose, by their names.

A name is shipped, or registered by the user's code: a config file, a file that `--import` names, or a script. A
config that was stored with a run therefore never chooses what is imported.
"""

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from jaxrl_atari.errors import ConfigError, require


class Registry:
    """Name -> entry, for one option of the config.

    `register_algorithm` and `register_network` check the entries of users, and then add them here.

    Args:
        field: the dotted name of the option, such as `network.name`.
        shipped: name -> `module:attribute` of what the package ships. It is imported when it is first asked for:
            its module imports this one; and `cli/config_files.py`, which lists the names, imports no JAX.
    """

    def __init__(self, field: str, shipped: Mapping[str, str]):
        self.field = field
        self._shipped = dict(shipped)
        self._registered: dict[str, Any] = {}

    def names(self) -> list[str]:
        """All names, the shipped ones first."""
        return [*self._shipped, *self._registered]

    def register(self, name: str, entry: Any) -> None:
        """Adds a user's entry. A later entry of the same name replaces the earlier one.

        Raises:
            ConfigError: the name has other characters than letters, digits and `._-`, or is taken by the package.
        """
        is_word = isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)
        require(is_word, self.field, name, "a name of letters, digits and ._-, such as my_idea")
        require(name not in self._shipped, self.field, name, "a new name", "the package ships one of this name")
        self._registered[name] = entry

    def get(self, name: str) -> Any:
        """The entry of a name.

        Raises:
            ConfigError: there is none.
        """
        if name in self._registered:
            return self._registered[name]
        if name not in self._shipped:
            known = ", ".join(self.names())
            hint = "name the file that registers it: --import FILE; a run keeps a copy of that file in its code/"
            raise ConfigError(self.field, name, f"one of {known}", hint)
        module, _, attribute = self._shipped[name].partition(":")
        return getattr(import_module(module), attribute)


NETWORKS = Registry(
    "network.name",
    {
        "nature": "jaxrl_atari.networks:NatureActorCritic",
        "impala": "jaxrl_atari.networks:ImpalaActorCritic",
        "nature_lstm": "jaxrl_atari.networks:NatureLSTM",
    },
)
"""`network.name` -> a `flax.linen.Module` class with the fields that `networks.py` lists."""

ALGORITHMS = Registry(
    "algorithm",
    {
        "ppo": "jaxrl_atari.ppo:PPO",
        "rnd": "jaxrl_atari.algorithms.rnd:RND",
        "vtrace": "jaxrl_atari.algorithms.vtrace:VTRACE",
    },
)
"""`algorithm` -> an `Algorithm`; see `algorithm.py`."""
