"""Configs as dictionaries: read from JSON, flattened, compared, changed, and written as a config file."""

import dataclasses
import pprint
from collections.abc import Mapping
from typing import Any

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError, require

DICTIONARIES = {"env.options", "ppo.coefficients"}
"""Fields that are dictionaries, whose keys are not fixed."""

REMOVED_FIELDS = {"log.jsonl"}
"""Fields that this version no longer has, and that a run with checkpoint format 3 may have.

The last commit that wrote `log.jsonl` is 641b767.
"""


def config_from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `Config.to_dict`. Raises `UserError` for a field that this version does not have."""

    def build(cls: Any, values: Any, prefix: str) -> Any:
        if not isinstance(values, dict) or not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
            return values
        fields = {f.name: f.type for f in dataclasses.fields(cls)}
        known = {name: value for name, value in values.items() if f"{prefix}{name}" not in REMOVED_FIELDS}
        for name in known.keys() - fields:
            raise UserError(
                f"{prefix}{name}: this version of jaxrl_atari has no such field; use the version that saved it"
            )
        return cls(**{name: build(fields[name], value, f"{prefix}{name}.") for name, value in known.items()})

    require(isinstance(values, dict), "config", values, "an object with the fields of a config")
    return build(Config, values, "")


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict as one with dotted names: `{"ppo.gamma": 0.99, ...}`."""
    items: dict[str, Any] = {}
    for name, value in values.items():
        if value and isinstance(value, dict):
            items |= flat(value, f"{prefix}{name}.")
        else:
            items[f"{prefix}{name}"] = value
    return items


def changed_fields(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields in which two nested dicts differ: dotted name -> (before, after).

    A field that one of them lacks is None there. An empty dict counts as absent. `devices.gpu = false` differs
    from `devices.gpu = 0`, although Python's `False` equals 0.
    """
    old = flat(before)
    new = flat(after)
    names = [*old, *(name for name in new if name not in old)]
    pairs = {name: (old.get(name), new.get(name)) for name in names}
    return {
        name: (was, now)
        for name, (was, now) in pairs.items()
        if (was != now or isinstance(was, bool) != isinstance(now, bool))
        and (was, now) not in (({}, None), (None, {}))
    }


def set_fields(config: Config, fields: Mapping[str, Any]) -> Config:
    """Returns a config in which fields have other values.

    Args:
        config: the config.
        fields: dotted name -> value, with `ppo.coefficients.NAME` for a coefficient. All are replaced at once.

    Raises:
        ConfigError: a name that is no field; a value, or a combination of values, that the config does not accept.
    """
    values = config.to_dict()
    known = {*flat(values), *DICTIONARIES}
    for name, value in fields.items():
        is_field = name in known or name.rpartition(".")[0] in DICTIONARIES
        require(is_field, name, value, "a field of the config")
        *parents, leaf = name.split(".")
        parent = values
        for each in parents:
            parent = parent[each]
        parent[leaf] = value
    return config_from_dict(values)


def config_source(config: Config, docstring: str) -> str:
    """The text of a config file that defines a config, for `--config`.

    Args:
        docstring: the docstring of the file.
    """
    text = docstring.replace("\\", "\\\\").replace('"""', r"\"\"\"")
    return f'''"""{text}"""

from jaxrl_atari.config import *


def get_config() -> Config:
    return {pprint.pformat(config, width=110)}
'''
