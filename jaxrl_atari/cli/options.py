"""Command lines: where the defaults of a command come from, and its options. tyro reads them."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jaxrl_atari.config import (
    CheckpointChoice,
    Config,
    alternatives,
    changed_fields,
    check_fields,
    parse_value,
)
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.imports import import_named
from jaxrl_atari.output import say_changes
from jaxrl_atari.runs.layout import held_kind

OptionsT = TypeVar("OptionsT")

# --- Types of options --------------------------------------------------------------------------------------------

AllOptions = Annotated[Config, tyro.conf.arg(name="")]
"""A field of this type gives every field of the config as an option: `--ppo.gae-lambda 0.9`."""

RunDir = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
"""The type of the first word of a command that reads runs."""

MoreDirs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[DIR ...]")]
"""The type of the further words of such a command."""

CheckpointOption = Annotated[
    CheckpointChoice,
    tyro.conf.arg(
        help="`best` (by the evaluations in training, else by the last 100 games), `latest`, or its env step."
    ),
]
"""The type of the option `--checkpoint` of a command that loads a policy."""


ImportNames = Annotated[
    tuple[str, ...], tyro.conf.arg(name="import", metavar="MODULE|FILE"), tyro.conf.UseAppendAction
]
"""Type of the option `--import`, which may occur several times."""


@dataclass(frozen=True, kw_only=True)
class WithImports:
    """The option `--import` of a command."""

    imports: ImportNames = ()
    """Module, or path of a Python file, that registers environments, networks or algorithms."""


# --- Where the defaults come from --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FromFile(WithImports):
    """The option `--config` of a command."""

    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """Config file, such as configs/qbert.py, or its name: qbert. None: the published PPO-Atari spec."""


@dataclass(frozen=True)
class Sources(FromFile):
    """Where the defaults of all other options come from: a config file, or a directory that is resumed."""

    resume: Path | None = None
    """Directory of a run, suite or search to resume."""
    run_dir: Path | None = None
    """Directory to train in. If it holds a run, suite or search, that is resumed."""

    @property
    def directory(self) -> Path | None:
        """The directory to train in; None: a new one."""
        return self.resume or self.run_dir

    def resumed(self, *kinds: str) -> Path | None:
        """The directory that is resumed: that of --resume, or that of --run-dir if it holds something to continue.

        Args:
            kinds: what the command can continue, such as `run`.
        """
        if self.resume or (self.run_dir and held_kind(self.run_dir) in kinds):
            return self.directory
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


@dataclass(frozen=True)
class FromConfig(FromFile):
    """Options of a command whose defaults come from a config file. A command adds options of its own."""

    config: AllOptions = field(default_factory=Config)


@dataclass(frozen=True)
class FromDirectory(Sources):
    """Options of a command that can also continue what a directory holds. A command adds options of its own."""

    config: AllOptions = field(default_factory=Config)


def read_sources(arguments: Sequence[str] | None) -> Sources:
    """Reads the sources of the defaults, and imports what `--import` names, which the other options may need.

    tyro needs the defaults before it parses, so these options are read first, and again with the others.

    Args:
        arguments: the words of the command line; None for those of this process.

    Raises:
        UserError: `--resume` with `--config` or `--run-dir`, or a failed import.
    """
    sources, _ = tyro.cli(Sources, args=arguments, return_unknown_args=True, add_help=False, registry=_FORMS)
    if sources.resume and (sources.config_file or sources.run_dir):
        raise UserError("--resume: the directory has its config already; leave --config and --run-dir out")
    import_named(sources.imports)
    return sources


# --- Options -----------------------------------------------------------------------------------------------------


def parse(
    options: type[OptionsT],
    arguments: Sequence[str] | None,
    command: str,
    default: Any = tyro.MISSING_NONPROP,
    stored: Config | None = None,
) -> OptionsT:
    """Reads the options of a command, and imports what `--import` names.

    Args:
        options: a dataclass; its docstring is the description in `--help`.
        arguments: the words of the command line; None for those of this process.
        command: name of the command, such as `train`.
        default: an instance of `options` with the defaults; by default those of the class.
        stored: the config of the directory that is resumed. The module of an environment `pkg:Env-v0` that
            the command line names is imported; a stored name alone imports nothing.

    Raises:
        UserError: an option cannot have its value, or would have no effect; or a failed import.
        SystemExit: after `--help`, or after an error that tyro has printed, with status 2.
    """
    program = f"python -m jaxrl_atari.{command}"
    parsed = tyro.cli(options, args=arguments, default=default, prog=program, registry=_FORMS)
    check_fields(parsed, "--")
    import_named(getattr(parsed, "imports", ()))
    config = getattr(parsed, "config", None)
    if isinstance(config, Config):
        module, colon, _ = config.env.game.rpartition(":")
        words = sys.argv[1:] if arguments is None else arguments
        is_named = stored is None or any(word.endswith(config.env.game) for word in words)
        if colon and config.env.backend == "gymnasium" and is_named:
            import_named([module])
        # Without the switch, each process would train a run of its own. A stored run may have the option.
        count = config.devices.num_processes
        is_used = config.devices.distributed or count is None or stored is not None
        require(is_used, "devices.num_processes", count, "None", "add --devices.distributed")
    return parsed


_FORMS = ConstructorRegistry()


@_FORMS.primitive_rule
def _form(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """How tyro reads JSON objects, and numbers or one of several types, such as `true`, `auto` or 1e6."""
    kinds = [kind for kind, _ in alternatives(info.type)]
    read: Callable[[str], Any] = parse_value
    if get_origin(info.type) is dict:
        metavar, read = "JSON", json.loads
    elif info.type is not bool and {bool, int, float} & {*kinds}:
        names = {bool: "true|false", int: "INT", float: "FLOAT", type(None): "None"}
        metavar = "|".join(names[kind] if kind in names else "|".join(get_args(kind)) for kind in kinds)
    else:
        return None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [json.dumps(value) if isinstance(value, dict | bool) else str(value)],
    )
