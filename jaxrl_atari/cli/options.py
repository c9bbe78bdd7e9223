"""Command lines: where the defaults of a command come from, its options, and its errors in one line each."""

import argparse
import collections
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import tyro

from jaxrl_atari.checks import check_fields
from jaxrl_atari.cli.option_names import option_types, unknown_option
from jaxrl_atari.cli.tyro_errors import one_line_errors
from jaxrl_atari.config import Config
from jaxrl_atari.config_dicts import changed_fields
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.imports.named import WithImports, import_module_of, import_named
from jaxrl_atari.option_forms import FORMS, parse_path
from jaxrl_atari.output import say_changes

AllOptions = Annotated[Config, tyro.conf.arg(name="")]
"""A field of this type gives every field of the config as an option: `--ppo.gae-lambda 0.9`."""

OptionsT = TypeVar("OptionsT")


@dataclasses.dataclass(frozen=True)
class FromConfig(WithImports):
    """Options of a command whose defaults come from a config file. A command adds options of its own."""

    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """Config file, such as configs/qbert.py, or its name: qbert. None: the published PPO-Atari spec."""
    config: AllOptions = dataclasses.field(default_factory=Config)


@dataclasses.dataclass(frozen=True)
class FromDirectory(FromConfig):
    """Options of a command that can also continue what a directory holds. A command adds options of its own."""

    resume: Path | None = None
    """Directory of a run, suite or search to resume."""
    run_dir: Path | None = None
    """Directory to train in. If it holds a run, suite or search, that is resumed."""

    @property
    def directory(self) -> Path | None:
        """The directory to train in; None: a new one."""
        return self.resume or self.run_dir


# --- Where the defaults come from --------------------------------------------------------------------------------


class Sources(NamedTuple):
    """Where the defaults of all other options come from: a config file, or a directory that is resumed."""

    config_file: Path | None  # --config
    resume: Path | None  # --resume
    run_dir: Path | None  # --run-dir

    def resumed(self, holds: Callable[[Path], bool]) -> Path | None:
        """The directory that is resumed: that of --resume, or that of --run-dir if it holds something to continue.

        Args:
            holds: whether a directory holds something to continue, such as `is_run`.
        """
        if self.resume or (self.run_dir and holds(self.run_dir)):
            return self.resume or self.run_dir
        return None

    def say_kept(self, wanted: dict[str, Any], kept: dict[str, Any]) -> None:
        """Says in which fields a config file differs from the directory that is resumed, whose values are used.

        Args:
            wanted: the options of the file, as JSON values.
            kept: those of the directory.
        """
        if self.config_file:
            text = f"{self.config_file} differs from {self.run_dir}, which keeps its own values"
            say_changes(text, changed_fields(wanted, kept))


def read_sources(arguments: Sequence[str] | None, options: type[FromConfig] = FromDirectory) -> Sources:
    """Reads the sources of the defaults, and imports what `--import` names, which the other options may need.

    tyro needs the defaults before it parses, so these options are read first. tyro parses them again, for
    `--help` and for its errors.

    Args:
        arguments: the words of the command line; None for those of this process.
        options: those of the command, which has `--resume` and `--run-dir` if they are a `FromDirectory`.

    Raises:
        UserError: `--resume` with `--config` or `--run-dir`, an option without a value, or a failed import.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=parse_path)
    parser.set_defaults(resume=None, run_dir=None)
    if issubclass(options, FromDirectory):
        parser.add_argument("--resume", type=parse_path)
        parser.add_argument("--run-dir", "--run_dir", type=parse_path)
    parser.add_argument("--import", dest="imports", action="append", default=[])
    try:
        given, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(str(error).removeprefix("argument ")) from error
    sources = Sources(given.config, given.resume, given.run_dir)
    if sources.resume and (sources.config_file or sources.run_dir):
        raise UserError("--resume: the directory has its config already; leave --config and --run-dir out")
    import_named(given.imports)
    return sources


# --- Options -----------------------------------------------------------------------------------------------------


def parse(
    options: type[OptionsT],
    arguments: Sequence[str] | None,
    command: str,
    default: Any = tyro.MISSING_NONPROP,
    stored: Config | None = None,
) -> OptionsT:
    """Reads the options of a command.

    Whole numbers may be written as 1e6 or 1_000_000, unless the option also takes true or false. `true` or `false`
    may follow a switch.

    Args:
        options: a dataclass; its docstring is the description in `--help`.
        arguments: the words of the command line; None for those of this process.
        command: name of the command, such as `train`.
        default: an instance of `options` with the defaults; by default those of the class.
        stored: the config of the directory that is resumed. If the user names another environment than its own
            (`pkg:Env-v0`), the module of that environment is imported; a stored name imports nothing.

    Raises:
        UserError: an option does not exist (the message names the one probably meant), cannot have its value, or
            would have no effect.
        SystemExit: after `--help`.
    """
    words = sys.argv[1:] if arguments is None else arguments
    with one_line_errors():
        parsed, unknown = tyro.cli(
            options,
            args=_in_tyros_form(words, options),
            default=default,
            prog=f"python -m jaxrl_atari.{command}",
            registry=FORMS,
            return_unknown_args=True,
        )
    if unknown:
        raise UserError(unknown_option(unknown, options, command))
    check_fields(parsed, "--", as_options=True)
    if isinstance(parsed, FromConfig):
        env = parsed.config.env
        if env.backend == "gymnasium" and (stored is None or env.game != stored.env.game):
            import_module_of(env.game)
        _check_effect(parsed.config, stored or Config())
    return parsed


def is_given(option: str, arguments: Sequence[str] | None) -> bool:
    """Whether a command line has an option, perhaps with the value that it has by default.

    Args:
        option: its name, such as `--env.game`. A switch such as `--log.graphs` is also given as `--log.no-graphs`.
        arguments: the words of the command line; None for those of this process.
    """
    prefix, dot, leaf = option.removeprefix("--").rpartition(".")
    spellings = {option, f"--{prefix}{dot}no-{leaf}"}
    words = sys.argv[1:] if arguments is None else arguments
    return any(word.partition("=")[0].replace("_", "-") in spellings for word in words)


def _check_effect(config: Config, before: Config) -> None:
    """Refuses options that would have no effect, unless they have the values of `before`.

    Args:
        before: the config of the directory that is resumed, else the defaults. A stored run may have such options.

    Raises:
        ConfigError: `env.anchor_steps` with a back end other than ale, or options of `devices.distributed` without
            it, with which each process would train a run of its own.
    """
    require(
        config.env.backend == "ale" or config.env.anchor_steps in (0, before.env.anchor_steps),
        "env.anchor_steps",
        config.env.anchor_steps,
        expected=f"0 with env.backend = {config.env.backend}, where it does nothing",
    )
    for name in ("coordinator", "num_processes", "process_index"):
        value = getattr(config.devices, name)
        require(
            config.devices.distributed or value in (None, getattr(before.devices, name)),
            f"devices.{name}",
            value,
            expected="None without devices.distributed",
            hint="add --devices.distributed",
        )


def _in_tyros_form(words: Sequence[str], options: Any) -> list[str]:
    """The words of a command line in tyro's form, which has `--log.no-graphs` for `--log.graphs false`.

    A switch that neither `true` nor `false` follows, as the next word or after `=`, stays as it is.
    """
    opposites: dict[str, str] = {}  # `--log.graphs` -> `--log.no-graphs`, and back
    for name, kind in option_types(options).items():
        if kind is bool:
            prefix, dot, leaf = name.rpartition(".")
            on, off = f"--{name}", f"--{prefix}{dot}no-{leaf}"
            opposites |= {on: off, off: on}

    result = []
    remaining = collections.deque(words)
    while remaining:
        word = remaining.popleft()
        name, equals, value = word.partition("=")
        switch = name.replace("_", "-")
        if not equals and remaining:
            value = remaining[0]
        value = value.lower()
        if switch not in opposites or value not in ("true", "false"):
            result.append(word)
            continue
        if not equals:
            remaining.popleft()
        result.append(switch if value == "true" else opposites[switch])
    return result
