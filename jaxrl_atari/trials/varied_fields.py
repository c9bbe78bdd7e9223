"""The fields of the config that may differ between the settings of a sweep, or between the trials of a search."""

from jaxrl_atari.config import Config, flat

FIXED_FIELDS = {
    "name", "seed", "sessions", "total_env_steps", "output_dir", "env.game", "env.protocol", "env.options",
    "env.image_key",
}  # fmt: skip
"""Fields that neither a sweep nor a search can vary."""

FIXED_PREFIXES = ("devices.", "trial.", "evaluation.", "log.", "env.options.")
"""The beginnings of the dotted names of further fields that neither a sweep nor a search can vary."""

COEFFICIENTS = "ppo.coefficients"
"""The field with the coefficients of the algorithm, of which `ppo.coefficients.NAME` is one.

The algorithm, and not the config, knows their names.
"""


def fields_that_can_vary(config: Config) -> list[str]:
    """The dotted names of the fields that a sweep or a search can vary.

    A coefficient is among them only if the config has a value for it; see `is_coefficient` for the others.
    """
    fixed = FIXED_FIELDS | {COEFFICIENTS}
    return [name for name in flat(config.to_dict()) if name not in fixed and not name.startswith(FIXED_PREFIXES)]


def is_coefficient(name: str) -> bool:
    """Whether a dotted name has the form of a coefficient's. Only the algorithm knows whether it has this one."""
    field, _, coefficient = name.rpartition(".")
    return field == COEFFICIENTS and coefficient.isidentifier()


def can_vary(name: str, config: Config) -> bool:
    """Whether a sweep or a search can vary the field or the coefficient with this dotted name."""
    return is_coefficient(name) or name in fields_that_can_vary(config)
