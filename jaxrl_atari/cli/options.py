"""Command lines: options, errors of one line that name what was meant, and Python config files."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import io
import re
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jaxrl_atari.config import Config, changed_fields
from jaxrl_atari.errors import UserError, check_fields
from jaxrl_atari.imports import WithImports, hand_on, import_first, import_module_of, registered
from jaxrl_atari.output import SafeStream, say, write

PACKAGE = Path(__file__).parents[1]

AllOptions = Annotated[Config, tyro.conf.arg(name="")]
"""A field of this type gives every field of the config as an option: `--ppo.gae-lambda 0.9`."""

Options = TypeVar("Options")
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class FromConfig(WithImports):
    """Options of a command that starts from a config file; it adds its own."""

    config: Path | None = None
    """Config file, such as configs/qbert.py, or its name: qbert. None: the published PPO-Atari spec."""
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


# --- Where a command starts --------------------------------------------------------------------------------------


class Start(NamedTuple):
    """What a command line says about where to start. It gives all other options their defaults."""

    config: Path | None  # --config
    resume: Path | None  # --resume
    run_dir: Path | None  # --run-dir

    def continued(self, holds: Callable[[Path], bool]) -> Path | None:
        """The directory that goes on: that of --resume, or that of --run-dir if it holds something to go on with.

        Args:
            holds: whether a directory holds a run, a suite or a search, as `is_run` tells.
        """
        if self.resume or (self.run_dir and holds(self.run_dir)):
            return self.resume or self.run_dir
        return None

    def say_kept(self, wanted: Config, kept: Config) -> None:
        """Prints where a config file differs from the directory that goes on, which keeps its own values.

        Args:
            wanted: the config of the file.
            kept: the config of the directory.
        """
        if self.config:
            say_changes(f"{self.config} differs from {self.run_dir}, which keeps its own values", wanted, kept)


def read_start(arguments: Sequence[str] | None) -> Start:
    """Reads from a command line where a command starts, and imports what `--import` names.

    Args:
        arguments: None for those of this process.

    Raises:
        UserError: `--resume` beside `--config` or `--run-dir`; an option without a value; see `import_first`.
    """
    import_first(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for spellings in (["--config"], ["--resume"], ["--run-dir", "--run_dir"]):
        parser.add_argument(*spellings, type=lambda text: Path(text).expanduser())
    try:
        found, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(str(error).removeprefix("argument ")) from error
    start = Start(found.config, found.resume, found.run_dir)
    if start.resume and (start.config or start.run_dir):
        raise UserError("--resume: the directory has its config already; leave --config and --run-dir out")
    return start


# --- Options -----------------------------------------------------------------------------------------------------


def parse(
    options: type[Options],
    arguments: Sequence[str] | None,
    command: str,
    default: Any = tyro.MISSING_NONPROP,
    stored: Config | None = None,
) -> Options:
    """Reads the options of a command.

    Whole numbers may be written as 1e6 or 1_000_000, and `true` or `false` may follow a switch.

    Args:
        options: a dataclass; its docstring is the description in `--help`.
        arguments: None for those of this process.
        command: such as `train`.
        default: an instance of `options` with the defaults. Without it, those of the class.
        stored: the config of the directory that goes on, which never chooses what is imported. The module of
            another environment (`pkg:Env-v0`) is imported.

    Raises:
        UserError: no such option, with the option that was probably meant; a value that an option cannot have.
        SystemExit: after `--help`.
    """
    words = sys.argv[1:] if arguments is None else arguments
    with one_line_errors():
        parsed, unknown = tyro.cli(
            options,
            args=_without_values_of_switches(words, options),
            default=default,
            prog=f"python -m jaxrl_atari.{command}",
            registry=NUMBERS,
            return_unknown_args=True,
        )
    if unknown:
        raise UserError(_unknown(unknown, options, command))
    check_fields(parsed, "--")
    if isinstance(parsed, FromConfig):
        env = parsed.full_config.env
        if env.backend == "gymnasium" and (stored is None or env.game != stored.env.game):
            import_module_of(env.game)
    return parsed


def parse_command(
    commands: Mapping[str, Callable[..., object]], arguments: Sequence[str] | None, command: str
) -> Callable[[], object]:
    """Reads a command line that begins with the name of one of several commands, such as `hub push`.

    Args:
        commands: name -> function, whose arguments become options.
        arguments: None for those of this process.
        command: what stands before the name, such as `hub`.

    Returns:
        The function of the command that was named, with its arguments.

    Raises:
        UserError: no such command, option or value.
        SystemExit: after `--help`.
    """

    def deferred(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def bind(*args: Any, **options: Any) -> Callable[[], object]:
            return functools.partial(function, *args, **options)

        return bind

    words = sys.argv[1:] if arguments is None else arguments
    if words and not words[0].startswith("-") and words[0] not in commands:
        close = difflib.get_close_matches(words[0], commands, 1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise UserError(f"{words[0]}: {command} has no such command; {meant}expected one of {', '.join(commands)}")
    later = {name: deferred(function) for name, function in commands.items()}
    with one_line_errors():
        chosen: Any = tyro.extras.subcommand_cli_from_dict(
            later, prog=f"python -m jaxrl_atari.{command}", args=words, registry=NUMBERS
        )
    return chosen


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns the error that tyro prints in a box, before it exits, into a `UserError`."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(SafeStream(sys.stdout)):
            yield
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise UserError(_text_of_box(printed.getvalue())) from None
    write(printed.getvalue(), sys.stderr)  # such as a warning


def _text_of_box(box: str) -> str:
    """The message in a box of tyro, without the title above it and the hints below it.

    Where standard output is not UTF-8, the box is made of spaces and hyphens, and a line lies below its title.
    """
    lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    boxed = bool(lines) and lines[0].startswith("╭")
    parts: list[list[str]] = [[]]
    for line in lines:
        if re.fullmatch("[─-]{8,}", line):
            parts.append([])
        elif not line.startswith(("╭", "╰")):
            parts[-1].append(line)
    message = parts[0] if boxed or len(parts) == 1 else parts[1]
    text = " ".join(" ".join(message).split())
    return re.sub(r"^Error parsing [A-Z]\w*: ", "", text)  # the name of a class, which says nothing to the user


NUMBERS = ConstructorRegistry()
"""How tyro reads the options that are numbers."""


@NUMBERS.primitive_rule
def _number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Reads int, float, and a choice between them and words or None. `check_fields` refuses what is no such
    value."""
    kinds = get_args(info.type) if get_origin(info.type) in (Union, types.UnionType) else (info.type,)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    plain = {kind for kind in kinds if get_origin(kind) is not Literal}
    if not plain & {int, float} or not plain <= {int, float, type(None)}:
        return None
    names = {int: "INT", float: "FLOAT", type(None): "{None}"}
    metavars = [names[kind] if kind in names else f"{{{','.join(get_args(kind))}}}" for kind in kinds]

    def read(text: str) -> Any:
        if text in words:
            return text
        if type(None) in plain and text.lower() == "none":
            return None
        return parse_number(text, whole=float not in plain)

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join(sorted(metavars, key=lambda name: not name.startswith("{"))),
        instance_from_str=lambda texts: read(texts[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def parse_number(text: str, whole: bool) -> Any:
    """The number that a text stands for, such as 1e6, 1_000_000 or 2.5e-4; the text itself if it stands for none.

    Args:
        whole: an int is wanted, so that 2.5 stands for none.
    """
    try:
        number = float(text)
    except ValueError:
        return text
    if not whole:
        return number
    if re.fullmatch(r"[+-]?[\d_]+", text):
        return int(text)
    return int(number) if number.is_integer() else text


def option_types(options: Any, prefix: str = "") -> dict[str, Any]:
    """The options of a dataclass and of those in it: name, such as `ppo.gae-lambda`, -> type.

    Args:
        prefix: stands before the names, such as `ppo.`.
    """
    found: dict[str, Any] = {}
    hints = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        renamed = [each.name for each in metadata if getattr(each, "name", None) is not None]
        name = prefix + (renamed[0] if renamed else field.name.replace("_", "-"))
        if dataclasses.is_dataclass(kind):
            found |= option_types(kind, f"{name}." if name else "")
        else:
            found[name] = kind
    return found


def _without_values_of_switches(words: Sequence[str], options: Any) -> list[str]:
    """The words of a command line, with `--log.graphs false` written as `--log.no-graphs`, as tyro wants it."""
    switches = {f"--{name}" for name, kind in option_types(options).items() if kind is bool}
    result = list(words)
    for at in reversed(range(len(result))):
        name, equals, value = result[at].partition("=")
        name = name.replace("_", "-")
        positive = re.sub(r"^(--(?:.*\.)?)no-", r"\1", name)
        if positive not in switches:
            continue
        if not equals:
            value = result[at + 1] if at + 1 < len(result) else ""
        if value.lower() not in ("true", "false"):
            continue
        on = (value.lower() == "true") == (name == positive)
        group, dot, leaf = positive.removeprefix("--").rpartition(".")
        result[at : at + (1 if equals else 2)] = [f"--{group}{dot}{'' if on else 'no-'}{leaf}"]
    return result


FAMILIAR = {
    "lr": "ppo.learning-rate",
    "lambda": "ppo.gae-lambda",
    "discount": "ppo.gamma",
    "batch-size": "ppo.minibatch-size",
    "num-steps": "ppo.rollout-length",
    "n-steps": "ppo.rollout-length",
    "update-epochs": "ppo.epochs",
    "n-epochs": "ppo.epochs",
    "ent-coef": "ppo.entropy-coef",
    "vf-coef": "ppo.value-coef",
    "clip-coef": "ppo.clip-epsilon",
    "clip-range": "ppo.clip-epsilon",
    "anneal-lr": "ppo.anneal-learning-rate",
    "norm-adv": "ppo.normalize-advantages",
    "clip-vloss": "ppo.clip-value-loss",
    "env-id": "env.game",
    "env": "env.game",
    "n-envs": "env.num-envs",
    "timesteps": "total-env-steps",
    "total-timesteps": "total-env-steps",
    "total-steps": "total-env-steps",
    "num-timesteps": "total-env-steps",
    "steps": "total-env-steps",
    "frames": "total-env-steps",
    "device": "devices.gpu",
    "cuda": "devices.gpu",
    "gpus": "devices.data-parallel",
    "cpu": "devices.gpu",
    "num-seeds": "sessions",
    "n-seeds": "sessions",
    "seeds": "sessions",
    "track": "log.wandb",
    "wandb-project-name": "log.wandb-project",
    "num-trials": "search.trials",
    "n-trials": "search.trials",
    "games": "env.game",
    "record": "video",
    "capture-video": "video",
    "num-episodes": "episodes",
    "n-episodes": "episodes",
    "n-eval-episodes": "episodes",
    "out": "output",
    "log-dir": "output-dir",
    "logdir": "output-dir",
}
"""Names of options in other programs, and below other groups -> ours."""


def _unknown(words: Sequence[str], options: Any, command: str) -> str:
    """What is wrong with the words of a command line that belong to no option."""
    word = next((word for word in words if word.startswith("--")), words[0])
    names = list(option_types(options))
    if word.startswith("--"):
        option = word.partition("=")[0]
        meant = " or ".join(f"--{name}" for name in similar_options(option, names))
        problem = f"{option}: {command} has no such option"
    else:
        path = Path(word).expanduser()
        meant = ""
        if "resume" in names and path.is_dir():
            meant = f"--resume {word}"
        elif "config" in names and (path.suffix == ".py" or path.name in config_names()):
            meant = f"--config {word}"
        problem = f"{word}: belongs to no option of {command}"
    question = f"; did you mean {meant}?" if meant else ""
    return f"{problem}{question} (--help lists all options)"


def similar_options(option: str, names: Sequence[str]) -> list[str]:
    """The options that were probably meant by one that does not exist: at most three.

    Args:
        option: such as `--lr`.
        names: of the options that there are, such as `ppo.learning-rate`.
    """
    wanted = option.lstrip("-").replace("_", "-").lower()
    leaf = wanted.rpartition(".")[2]
    for familiar in (wanted, leaf):
        if FAMILIAR.get(familiar) in names:
            return [FAMILIAR[familiar]]
    same = [name for name in names if name.rpartition(".")[2] == leaf.removeprefix("no-")]
    if same:
        return same[:3]
    spelt_alike = difflib.get_close_matches(wanted, names, 1, 0.9)
    if spelt_alike:
        return spelt_alike
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(names)}
    close = difflib.get_close_matches(wanted, names, 3, 0.75)
    close += [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, 3, 0.75)]
    return list(dict.fromkeys(close))[:3]


# --- Config files ------------------------------------------------------------------------------------------------


class ConfigFile(NamedTuple):
    """A Python config file that was run."""

    named: Path  # as the user wrote it
    file: Path
    scope: dict[str, Any]  # what the file defines

    def call(self, function: str, kind: type[Result]) -> Result:
        """The result of a function of the file, which takes no arguments.

        Args:
            kind: the type of the result.

        Raises:
            UserError: there is no such function, it fails, or it returns another type.
        """
        if function not in self.scope:
            raise UserError(f"--config {self.named}: the file does not define the function {function}")
        with _running(self.file):
            result = self.scope[function]()
        if not isinstance(result, kind):
            returned = type(result).__name__
            raise UserError(f"--config {self.named}: {function}() returned {returned}; expected {kind.__name__}")
        return result


def run_config_file(path: Path) -> ConfigFile:
    """Runs a Python config file, such as configs/qbert.py.

    A module that lies beside the file can be imported in it, as in `python FILE`.

    Args:
        path: a file, or the name of one in configs/: `qbert`.

    Raises:
        UserError: no such file, or it does not run.
    """
    folders = config_folders()
    places = [path, *(folder.parent / path for folder in folders)]  # configs/qbert.py, wherever configs/ is
    if path.name == str(path):
        places += [folder / f"{path.stem}.py" for folder in folders]
    found = next(filter(Path.is_file, places), None)
    if found is None:
        names = config_names()
        close = difflib.get_close_matches(path.stem, names, 1)
        meant = f"did you mean {close[0]}? " if close else ""
        expected = f"expected a Python file that defines get_config, or one of {', '.join(names)}"
        raise UserError(f"--config {path}: no such file; {meant}{expected}")
    before = registered()
    with _running(found):
        scope = runpy.run_path(str(found), run_name=f"config_{path.stem}")
    if registered() != before:  # the processes of sessions need it, too
        hand_on(str(found.absolute()), imported=True)
    return ConfigFile(path, found, scope)


def load_config(path: Path | None) -> Config:
    """The config of a Python config file: the result of its `get_config()`. None: the default config.

    Raises:
        UserError: see `run_config_file` and `ConfigFile.call`.
    """
    return Config() if path is None else run_config_file(path).call("get_config", Config)


def config_folders() -> list[Path]:
    """Where config files lie: in the working directory, and those of this package."""
    own = [PACKAGE / "configs"]  # of a wheel
    if (PACKAGE.parent / "pyproject.toml").is_file():  # of a checkout
        own.append(PACKAGE.parent / "configs")
    return [folder for folder in (Path("configs"), *own) if folder.is_dir()]


def config_names() -> list[str]:
    """The names of the config files in `config_folders`."""
    return sorted({path.stem for folder in config_folders() for path in folder.glob("*.py")})


@contextlib.contextmanager
def _running(file: Path) -> Iterator[None]:
    """Runs code of a config file: its neighbours can be imported, and its errors name the line of the file."""
    sys.path.insert(0, str(file.absolute().parent))
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)
        ]
        where = f"{file}, line {lines[-1]}" if lines else file
        raise UserError(f"--config {where}: {type(error).__name__}: {error}; fix the file") from error
    finally:
        sys.path.pop(0)


def say_changes(text: str, before: Config, after: Config) -> None:
    """Prints the fields in which two configs differ, after a text, if there are any."""
    changed = changed_fields(before.to_dict(), after.to_dict())
    if changed:
        fields = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())
        say(f"{text}: {fields}")
