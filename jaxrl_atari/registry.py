"""Registries of networks and algorithms: a config names one, and the name decides nothing but which entry is used.

A name is either shipped, or was registered by code that the user named, in a config file or with `--import`. A
config that was stored with a run therefore never chooses what is imported.
"""

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Generic, TypeVar

from jaxrl_atari.errors import ConfigError, require

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Name -> entry, for one option of the config.

    Users enter what is theirs with `ppo.register` and `networks.register`, which check it.

    Args:
        field: the dotted name of the option, such as `network.name`.
        shipped: name -> `module:attribute` of what the package ships. It is imported when it is first asked for.
    """

    def __init__(self, field: str, shipped: Mapping[str, str]):
        self.field = field
        self._shipped = dict(shipped)
        self._registered: dict[str, Entry] = {}

    def names(self) -> list[str]:
        """All names, the shipped ones first."""
        return [*self._shipped, *self._registered]

    def register(self, name: str, entry: Entry) -> None:
        """Enters something of the user's own. A later entry of the same name replaces the earlier one.

        Raises:
            ConfigError: the name has other characters than letters, digits and `._-`, or is that of a shipped
                entry, which a run of that name would then not have used.
        """
        is_word = isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)
        require(is_word, self.field, name, "a name of letters, digits and ._-, such as my_idea")
        require(name not in self._shipped, self.field, name, "a new name", "the package ships one of this name")
        self._registered[name] = entry

    def get(self, name: str) -> Entry:
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
        module, attribute = self._shipped[name].split(":")
        return getattr(import_module(module), attribute)


NETWORKS = Registry(
    "network.name",
    {
        "nature": "jaxrl_atari.networks:NatureActorCritic",
        "impala": "jaxrl_atari.networks:ImpalaActorCritic",
        "nature_lstm": "jaxrl_atari.networks:NatureLSTM",
    },
)
"""`network.name` -> a `flax.linen.Module` class, called with `num_actions` and `dtype`; see `networks.py`."""

ALGORITHMS = Registry(
    "algorithm",
    {
        "ppo": "jaxrl_atari.ppo:PPO",
        "rnd": "jaxrl_atari.algorithms.rnd:RND",
        "vtrace": "jaxrl_atari.algorithms.vtrace:VTRACE",
    },
)
"""`algorithm` -> an `Algorithm`; see `ppo.py`."""
