"""The walls of the house: who may import what."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import jaxrl_atari

PACKAGE = Path(jaxrl_atari.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
CORE = ["algorithm", "ppo", "update", "networks", "frames", "algorithms", "cpu"]
"""What reads like the papers: it knows no files, no devices and no commands."""
PURE = {
    "collections", "contextlib", "contextvars", "dataclasses", "functools", "importlib", "inspect", "itertools",
    "math", "types", "typing", "chex", "flax", "jax", "numpy", "optax",
}  # fmt: skip
"""The libraries that the core may import."""
OUTER = {
    "cli", "devices", "evaluate", "export", "hardware", "hub", "imports", "output", "plots", "report", "runs",
    "search", "session", "suite", "train", "trials", "verify",
}  # fmt: skip
"""What the core may not import."""


def name_of(path):
    """`runs.files` for jaxrl_atari/runs/files.py; a folder's `__init__` has the folder's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def room(name):
    return name.split(".")[0]


def is_command(statement):
    """Whether a statement is `if __name__ == "__main__"`, which runs in a command and in no import."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"


@cache
def imports(path):
    """Modules that a file imports, also inside functions, as dotted names."""
    names = set()
    module = ast.parse(path.read_text(encoding="utf-8"))
    module.body = [statement for statement in module.body if not is_command(statement)]
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return names


def own_imports(path):
    """The files of the package that a file imports, by their names."""
    names = {name_of(each) for each in FILES}
    found = {name.removeprefix("jaxrl_atari.") for name in imports(path) if name.startswith("jaxrl_atari.")}
    exact = found & names
    # `from jaxrl_atari.envs import ale_pool` names the file, and not the folder that it lies in.
    return {name for name in exact if not any(other.startswith(name + ".") for other in exact)} - {name_of(path)}


def test_no_file_imports_itself_by_way_of_others():
    try:
        tuple(TopologicalSorter({name_of(path): own_imports(path) for path in FILES}).static_order())
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("ale_py", {"envs", "export"}),  # export/play.py is a program of its own
        ("envpool", {"envs"}),
        ("orbax", {"runs"}),
        ("jaxrl_atari.train", set()),
    ],
)
def test_who_imports(package, rooms):
    importers = {
        room(name_of(path)) for path in FILES for name in imports(path) if f"{name}.".startswith(f"{package}.")
    }
    assert importers <= rooms


def test_the_core_does_no_input_or_output():
    for path in FILES:
        if room(name_of(path)) in CORE:
            outer = {name.split(".")[0] for name in imports(path)} - {"jaxrl_atari"}
            assert outer <= PURE, path
            assert not {room(name) for name in own_imports(path)} & OUTER, path
            names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
            assert not names & {"print", "open", "input"}, path
