"""Command lines that start from a config file or a directory, and Python config files."""

import argparse
import dataclasses
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from jaxrl_atari.cli import say
from jaxrl_atari.config import Config, changed_fields
from jaxrl_atari.errors import UserError
from jaxrl_atari.imports import WithImports, hand_on, import_first, import_module_of, registered

PACKAGE = Path(__file__).parents[1]


AllOptions = Annotated[Config, tyro.conf.arg(name="")]
"""A field of this type gives every field of the config as an option: `--ppo.gae-lambda 0.9`."""


@dataclasses.dataclass(frozen=True)
class FromConfig(WithImports):
    """Options of a command that starts from a config file; it adds its own."""

    config: Path | None = None
    """Config file, such as configs/qbert.py. None: the published PPO-Atari spec."""
    full_config: AllOptions = dataclasses.field(default_factory=Config)


@dataclasses.dataclass(frozen=True)
class FromDirectory(FromConfig):
    """Options of a command that can also go on with what a directory holds; it adds its own."""

    resume: Path | None = None
    """Directory of a run, suite or search that goes on."""
    run_dir: Path | None = None
    """Directory to start in, or to go on with what it holds."""

    @property
    def directory(self) -> Path | None:
        """Where it trains; None: in a new directory."""
        path = self.resume or self.run_dir
        return path and path.expanduser()


Options = TypeVar("Options", bound=FromConfig)


def parse(
    options: type[Options],
    arguments: Sequence[str] | None,
    load: Callable[[Path | None], Sequence[Any]] = lambda path: load_config(path, get_config=Config),
    holds: Callable[[Path], bool] = lambda directory: False,
    read: Callable[[Path], Sequence[Any]] = lambda directory: (),
    own: Sequence[str] = (),
) -> tuple[Options, Options]:
    """Parses a command line in two steps: where it starts from, which gives the defaults, then all options.

    Args:
        options: a dataclass; its docstring is the description in `--help`.
        load: config file -> the config, then the defaults of `own`, in that order.
        holds: whether a directory has something to go on with.
        read: such a directory -> the same list, from what it holds.
        own: further fields of `options` that `load` and `read` supply.

    Returns:
        All options, and their defaults.

    Raises:
        UserError: `resume` beside `config` or `run_dir`; a file or directory cannot be used.
        SystemExit: after `--help`, or after tyro or argparse has printed an error.
    """
    import_first(arguments)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for path in ("config", "resume", "run_dir"):
        spellings = f"--{path.replace('_', '-')}", f"--{path}"  # as tyro takes them
        first.add_argument(*spellings, type=lambda text: Path(text).expanduser())
    start, _ = first.parse_known_args(arguments)
    if start.resume and (start.config or start.run_dir):
        raise UserError("--resume: the directory has its config already; leave --config and --run-dir out")
    values = load(start.config)
    directory = start.resume or start.run_dir
    stored_game = ""
    if directory and (start.resume or holds(directory)):
        wanted = values[0]
        values = read(directory)
        stored_game = values[0].env.game
        if start.config:
            say_changes(f"{start.config} differs from {directory}, which keeps its own values", wanted, values[0])
    default = options(**dict(zip(("full_config", *own), values, strict=True)))
    spec = sys.modules[options.__module__].__spec__
    command = spec.name.removesuffix(".__main__") if spec else options.__module__
    parsed = tyro.cli(options, args=arguments, default=default, prog=f"python -m {command}")
    env = parsed.full_config.env
    if env.backend == "gymnasium" and env.game != stored_game:  # a stored run never chooses what is imported
        import_module_of(env.game)
    return parsed, default


def load_config(path: Path | None, **functions: type) -> list[Any]:
    """Runs a Python config file, such as configs/qbert.py, and returns the results of its functions.

    A module that lies beside the file can be imported in it, as in `python FILE`.

    Args:
        path: None gives the default of each type.
        functions: names of functions without arguments, each with the type of its result.

    Raises:
        UserError: no such file, it does not run, or a function is missing or returns another type.
    """
    if path is None:
        return [kind() for kind in functions.values()]
    found = next(filter(Path.is_file, (path, PACKAGE / path)), None)  # a wheel has configs/ inside the package
    if found is None:
        raise UserError(f"--config {path}: no such file; expected a Python file that defines {', '.join(functions)}")
    sys.path.insert(0, str(found.absolute().parent))
    before = registered()
    try:
        scope = runpy.run_path(str(found), run_name=f"config_{path.stem}")
        if registered() != before:  # the processes of sessions need it, too
            hand_on(str(found.absolute()), imported=True)
        for name in functions:
            if name not in scope:
                raise UserError(f"--config {path}: the file does not define the function {name}")
        results = [scope[name]() for name in functions]
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(found)]
        where = f"{found}, line {lines[-1]}" if lines else found
        raise UserError(f"--config {where}: {type(error).__name__}: {error}; fix the file") from error
    finally:
        sys.path.pop(0)
    for result, (name, kind) in zip(results, functions.items(), strict=True):
        if not isinstance(result, kind):
            raise UserError(f"--config {path}: {name}() returned {type(result).__name__}; expected {kind.__name__}")
    return results


def say_changes(text: str, before: Config, after: Config) -> None:
    """Prints the fields in which two configs differ, after a text, if there are any."""
    if changed := changed_fields(before.to_dict(), after.to_dict()):
        say(f"{text}: " + ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items()))
