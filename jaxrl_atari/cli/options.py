"""Options of a command line, and Python config files."""

import argparse
import contextlib
import importlib.util
import io
import re
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

from jaxrl_atari.cli.command import say
from jaxrl_atari.cli.values import parse_path
from jaxrl_atari.errors import UserError

Options = TypeVar("Options")


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict as one with dotted names: `{"ppo.gamma": 0.99, ...}`."""
    items: dict[str, Any] = {}
    for name, value in values.items():
        items |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return items


def changed_fields(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields in which two nested dicts differ: dotted name -> (before, after); None where one has no such field."""
    old, new = flat(before), flat(after)
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def say_changes(before: Any, config: Any) -> None:
    """Says in which fields the config of a resumed run differs from the one it had; both have `to_dict`."""
    changed = changed_fields(before.to_dict(), config.to_dict())
    if texts := [f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items()]:
        say(f"changed: {', '.join(texts)}")


def report_changes(path: Path, wanted: Any, kept: Any) -> None:
    """Reports the fields in which a config file differs from the run that continues, which keeps its own values.

    Args:
        path: of the config file.
        wanted, kept: the two configs; both have `to_dict`.
    """
    changed = changed_fields(wanted.to_dict(), kept.to_dict())
    if own := ", ".join(f"{name} = {value!r}" for name, (_, value) in changed.items()):
        say(f"{path} differs from the run, which keeps its own {own}; give an option to change a value")


class Parser(argparse.ArgumentParser):
    """argparse that raises `UserError` instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows all options")

    def add_paths(self, *options: str, help: str | None = None) -> None:
        """Adds options whose values are paths; see `parse_path`."""
        for option in options:
            self.add_argument(option, type=partial(parse_path, option=option), help=help)


def parse(options: type[Options], arguments: Sequence[str] | None, **settings: Any) -> Options:
    """`tyro.cli` that raises errors instead of drawing them.

    Args:
        settings: further arguments of `tyro.cli`, such as `default` and `prog`.

    Raises:
        UserError: an unknown option, or a value that the option cannot have.
        SystemExit: after --help.
    """
    drawn = io.StringIO()
    try:
        with contextlib.redirect_stderr(drawn):
            return tyro.cli(options, args=arguments, **settings)
    except SystemExit as stop:
        if not stop.code:
            raise
        # tyro exits in the handler of whatever the options' class raised: that error is the context of the exit.
        cause = stop.__context__
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__context__
        raise cause or UserError(f"{_one_line(drawn.getvalue())}; --help shows all options") from None


# Words of tyro and Python -> plain ones.
PLAIN_WORDS = {
    r"^Error parsing ": "",
    r"^Missing from .*?:": "missing:",
    r"\{None\}": "None",
    r"^Unrecognized options: ((?i:true|false|yes|no|on|off))$": (
        r"\1 follows an option that is on or off: the option alone turns it on, and no- after the last dot of"
        r" a config's field turns it off (--log.no-graphs)"
    ),
    r"invalid literal for int\(\) with base 10: ('.*?')": r"expected a whole number such as 1000000, got \1",
    r"could not convert string to float: ('.*?')": r"expected a number such as 0.001, got \1",
    r"no type matching (\S+) could be instantiated from \[('.*?')\].*": r"expected \1, got \2",
}


def _one_line(drawn: str) -> str:
    """The message in an error that tyro has drawn.

    tyro has no public way to catch such an error (`tyro._errors` is declared unstable), so this reads the drawing of
    tyro 1.0.17, the version in constraints.txt: a box with a title and sections between horizontal rules. The first
    section is the message; where an option is unknown, the second one begins with a similar one. Another drawing gives
    a less readable line, and test_cli.py fails.
    """
    text = re.sub("[│╭╮╰╯]", " ", drawn.partition("For full helptext")[0])
    _, message, details = (*(" ".join(part.split()) for part in re.split("[─-]{3,}", text)), "", "")[:3]
    message = (message or " ".join(text.split())).rstrip(".")
    for pattern, plain in PLAIN_WORDS.items():
        message = re.sub(pattern, plain, message)
    similar = re.match(r"Perhaps you meant: .*?(--[\w.-]+)", details)
    return f"{message}; did you mean {similar[1]}?" if similar else message


def call_config_file(path: str | Path, **functions: type) -> list[Any]:
    """Runs a Python config file and returns the results of its functions.

    Args:
        functions: names of functions without arguments, each with the type of its result.

    Raises:
        UserError: no such file, it does not run, or a function is missing or returns another type.
    """
    path = parse_path(str(path), "--config")
    if not path.is_file():
        raise UserError(f"--config {path}: no such file; for example configs/qbert.py")
    spec = importlib.util.spec_from_file_location(f"jaxrl_atari_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config {path}: not a Python file; expected one that defines {' and '.join(functions)}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for the module of a class
    results = []
    try:
        spec.loader.exec_module(module)
        for name, kind in functions.items():
            if not hasattr(module, name):
                wanted = f"{name}() -> {kind.__module__}.{kind.__name__}"
                raise UserError(f"--config {path}: has no {name}(); define {wanted}")
            results.append(result := getattr(module, name)())
            if not isinstance(result, kind):
                got = type(result).__name__
                raise UserError(f"--config {path}: {name}() returned {got}; expected a {kind.__name__}")
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).resolve() == path.resolve()
        ]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise UserError(f"--config {where}: {type(error).__name__}: {error}; fix the file") from error
    return results
