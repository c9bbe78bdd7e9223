"""The walls of the house: who may import what."""

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxrl_atari"
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(path):
    """The module at the root, or the folder, that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path):
    """Modules that a file imports, also inside functions, as dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return names


def importers(package):
    return {room(path) for path in MODULES if any(n == package or n.startswith(package + ".") for n in imports(path))}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("ale_py", {"envs"}),
        ("envpool", {"envs"}),
        ("orbax", {"run_dir"}),
        ("pynvml", {"hardware"}),
        ("wandb", {"run_dir"}),
        ("tensorboard", {"run_dir"}),
        ("huggingface_hub", {"hub"}),
        ("jaxrl_atari.train", set()),
    ],
)
def test_who_imports(package, allowed):
    assert importers(package) <= allowed


def test_the_imports_are_seen():
    assert importers("ale_py") == {"envs"}
    assert importers("orbax") == {"run_dir"}


@pytest.mark.parametrize("module", ["ppo", "networks"])
def test_the_algorithm_does_no_input_or_output(module):
    path = PACKAGE / f"{module}.py"
    inner = {name for name in imports(path) if name.startswith("jaxrl_atari.")}
    assert {name.split(".")[1] for name in inner} <= {"config", "networks"}
    outer = {name.split(".")[0] for name in imports(path)} - {"jaxrl_atari"}
    assert outer <= {"collections", "functools", "math", "typing", "chex", "flax", "jax", "numpy", "optax"}
    called = {node.func.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
              and isinstance(node.func, ast.Name)}  # fmt: skip
    assert not called & {"print", "open", "input"}


def test_only_devices_spreads_work():
    """`pmap`, `shard_map` and meshes are in devices.py alone."""
    words = ("pmap(", "shard_map(", "sharding.Mesh(")
    found = {room(path) for path in MODULES if any(f".{word}" in path.read_text(encoding="utf-8") for word in words)}
    assert found == {"devices"}
