"""Errors that a user can correct, the checks that raise them, and the end of a session that was stopped."""

import difflib
import errno
import os
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

OUTSIDE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPIPE, errno.ENAMETOOLONG}
"""Operating system errors that the user can correct. EPIPE comes of `--help | head`."""


UNREGISTERED = "name the file that registers it: --import FILE; a run keeps a copy of that file in its code/"
"""The hint of an error about the name of a network or an algorithm that is not there."""


class UserError(Exception):
    """An error that the user can correct. The message is one line: what is wrong, and what to do.

    A command prints it to stderr and exits with `exit_status`. Any other exception is a bug in this package and
    keeps its traceback.
    """

    exit_status = 2

    def __str__(self) -> str:
        return " ".join(str(self.args[0]).split())


class _Unusable(UserError):
    """A value that cannot be used: `NAME = VALUE: expected EXPECTED; HINT`.

    Args:
        name: the name of the value as the user writes it, such as `ppo.gae_lambda`, `--games` or `CUDA_OFFSET`.
        value: the value.
        expected: the values that it may have, completing "expected ...".
        hint: what to do, where `expected` alone does not say it.
    """

    def __init__(self, name: str, value: object, expected: str, hint: str = ""):
        super().__init__(name, value, expected, hint)

    def __str__(self) -> str:
        name, value, expected, hint = self.args
        return " ".join(f"{name} = {value!r}: expected {expected}{f'; {hint}' if hint else ''}".split())


class ConfigError(_Unusable):
    """A field of the config, an option or an environment variable has an unusable value."""

    # No `ValueError`: tyro would print it in a box.


class InterfaceError(_Unusable, ValueError):
    """A network or an algorithm gave the package a value that its interface does not allow.

    `networks.py` and `algorithm.Algorithm` describe these interfaces. The code of the network or of the
    algorithm is at fault, and not the config. The name is that of a value, such as `loss`.
    """


class MetricsError(UserError):
    """A run has no log point that can be used, for example because its metrics.csv is damaged."""


class NoLogPoint(MetricsError):
    """A run has no log point yet."""


class VerificationFailed(UserError):
    """A figure or a checkpoint of a run is not what its seeds and actions give."""

    exit_status = 1


class SessionsFailed(UserError):
    """Sessions or trials failed; what they wrote is kept."""

    exit_status = 1


class Stopped(KeyboardInterrupt):
    """A session was stopped on request, and has written its last checkpoint, if it has trained.

    A session that is interrupted otherwise, as by a second Ctrl-C, raises a plain `KeyboardInterrupt`.
    """


def reason(error: BaseException) -> str:
    """An error in one line: a `UserError` in its own words, a bug with the name of its class."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def os_reason(error: OSError) -> str:
    """An error of the operating system in one line: the file, if it has one, and what is wrong."""
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The part `did you mean NAME? ` of an error, with the name that resembles a word; empty if none does."""
    close = difflib.get_close_matches(word, list(names), 1)
    return f"did you mean {close[0]}? " if close else ""


def correctable(error: BaseException) -> UserError | None:
    """The error as a `UserError`, if the user can correct it; None for a bug."""
    if isinstance(error, OSError) and error.errno in OUTSIDE_ERRORS:
        return UserError(os_reason(error))
    return error if isinstance(error, UserError) else None


def require_package(package: str, extra: str, needed_by: str = "") -> None:
    """Raises `UserError` if an optional package is not installed. It is not imported, which may take seconds.

    Args:
        package: name of the module.
        extra: the extra of this package that installs it.
        needed_by: the option that needs it, such as `log.wandb = true`, where the command does not say it.
    """
    if find_spec(package) is None:
        text = f"{package} is not installed; pip install 'jaxrl_atari[{extra}]'"
        raise UserError(f"{needed_by}: {text}" if needed_by else text)


def require(holds: object, field: str, value: Any, expected: str, hint: str = "") -> None:
    """Raises `ConfigError` with the other arguments unless `holds`."""
    if not holds:
        raise ConfigError(field, value, expected, hint)


def require_interface(holds: object, name: str, value: Any, expected: str, hint: str = "") -> None:
    """Raises `InterfaceError` with the other arguments unless `holds`."""
    if not holds:
        raise InterfaceError(name, value, expected, hint)


def whole_number_variable(name: str) -> int | None:
    """The whole number in an environment variable; None if the variable is not set, or empty.

    Raises:
        ConfigError: the variable holds something else.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    require(text.isdecimal(), name, text, "a whole number from 0 on", "or unset it")
    return int(text)
