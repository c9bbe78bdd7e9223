"""The walls of the house: who may import what. A room is a module at the package's root, or a folder."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxrl_atari"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = (
    "__init__",
    "train",
    "hub",
    "search",
    "suite",
    "benchmark",
    "trial",
    "session",
    "evaluate",
    "rollout",
    "learner",
    "report",
    "plots",
    "run_dir",
    "devices",
    "hardware",
    "ppo",
    "fast",
    "networks",
    "config",
    "envs",
    "cli",
)
"""From commands to capabilities to the loop to the algorithm: a room imports only from rooms below it."""

DOORS = {
    "cli": {"cli", "cli.errors", "cli.values"},
    "envs": {"envs", "envs.games", "envs.pool", "envs.ale", "envs.protocols"},
    "evaluate": {"evaluate.policy", "evaluate.play", "evaluate.video", "evaluate.during_training"},
    "fast": {"fast.frames", "fast.forms", "fast.cpu_conv"},
    "hardware": {
        "hardware.cpu",
        "hardware.distributed",
        "hardware.gpus",
        "hardware.jax_gpus",
        "hardware.memory",
        "hardware.memory_share",
        "hardware.monitor",
        "hardware.report",
        "hardware.rotation",
        "hardware.runtime",
    },
    "run_dir": {
        "run_dir.checkpoint_writer",
        "run_dir.checkpoints",
        "run_dir.columns",
        "run_dir.config_file",
        "run_dir.description",
        "run_dir.drawing",
        "run_dir.files",
        "run_dir.metrics",
        "run_dir.progress",
        "run_dir.reading",
        "run_dir.resume",
        "run_dir.search_records",
        "run_dir.session_log",
        "run_dir.statistics",
        "run_dir.suite_statistics",
        "run_dir.summary",
        "run_dir.writers",
    },
    "report": {"report.pages"},
    "trial": {"trial.trial", "trial.processes", "trial.stopping"},
    "benchmark": set(),
    "hub": set(),
    "search": set(),
    "suite": set(),
}
"""Folder -> the files that other rooms may import. The others are known only inside their folder."""


def name_of(path):
    """`run_dir.files` for jaxrl_atari/run_dir/files.py; a folder's `__init__` has the folder's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def room(path):
    return name_of(path).split(".")[0]


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


@cache
def arrows():
    """File -> the files of the package that it imports, by their names."""
    names = {name_of(path) for path in FILES}

    def targets(path):
        found = {name.removeprefix("jaxrl_atari.") for name in imports(path) if name.startswith("jaxrl_atari.")}
        exact = found & names
        # `from jaxrl_atari.envs import ale` names the file, and not the folder that it lies in.
        return {name for name in exact if not any(other.startswith(name + ".") for other in exact)} - {name_of(path)}

    return {name_of(path): targets(path) for path in FILES}


def importers(package):
    return {room(path) for path in FILES if any(n == package or n.startswith(package + ".") for n in imports(path))}


def test_the_root_is_small():
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert len(names) <= 22
    assert {name.removesuffix(".py") for name in names} == set(FLOORS)


def test_no_file_imports_itself_by_way_of_others():
    try:
        tuple(TopologicalSorter(arrows()).static_order())
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_imports_point_one_way():
    upward = [
        f"{importer} imports {target}"
        for importer, targets in arrows().items()
        for target in targets
        if target.split(".")[0] != importer.split(".")[0]
        and FLOORS.index(target.split(".")[0]) <= FLOORS.index(importer.split(".")[0])
    ]
    assert not upward


def test_a_folder_is_entered_by_its_doors():
    through_walls = [
        f"{importer} imports {target}"
        for importer, targets in arrows().items()
        for target in targets
        if (folder := target.split(".")[0]) in DOORS
        and folder != importer.split(".")[0]
        and target not in DOORS[folder]
    ]
    assert not through_walls


def test_the_doors_are_used():
    used = {
        target for importer, targets in arrows().items() for target in targets if room_of(target) != room_of(importer)
    }
    assert {door for doors in DOORS.values() for door in doors} <= used


def room_of(name):
    return name.split(".")[0]


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("ale_py", {"envs"}),
        ("envpool", {"envs"}),
        ("orbax", {"run_dir"}),
        ("pynvml", {"hardware"}),
        ("wandb", {"run_dir"}),
        ("tensorboard", {"run_dir"}),
        ("huggingface_hub", {"hub"}),
        ("ray", {"search"}),
        ("jinja2", {"report"}),
        ("optuna", {"search"}),
        ("jaxrl_atari.train", set()),
    ],
)
def test_who_imports(package, rooms):
    assert importers(package) == rooms


@pytest.mark.parametrize(("module", "reads"), [("ppo", {"config", "fast.frames"}), ("networks", {"config"})])
def test_the_algorithm_does_no_input_or_output(module, reads):
    path = PACKAGE / f"{module}.py"
    assert arrows()[module] == reads
    outer = {name.split(".")[0] for name in imports(path)} - {"jaxrl_atari"}
    assert outer <= {"collections", "functools", "math", "typing", "chex", "flax", "jax", "numpy", "optax"}
    called = {node.func.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
              and isinstance(node.func, ast.Name)}  # fmt: skip
    assert not called & {"print", "open", "input"}


def test_only_devices_spreads_work():
    """`pmap`, `shard_map`, meshes and sums over devices are in devices.py alone."""
    words = ("pmap(", "shard_map(", "sharding.Mesh(", "psum", "pmean", "axis_index(")
    found = {room(path) for path in FILES if any(word in path.read_text(encoding="utf-8") for word in words)}
    assert found == {"devices"}


def test_one_file_loads_the_cuda_driver():
    assert [name_of(path) for path in FILES if "libcuda.so" in path.read_text(encoding="utf-8")] == [
        "hardware.cuda_driver"
    ]


def test_the_package_is_imported_lazily():
    """Scripts import from `jaxrl_atari`; that loads nothing heavy, and no name hides a module of the package."""
    code = (
        "import sys, jaxrl_atari; loaded = {'jax', 'flax', 'ale_py', 'jaxrl_atari.train'} & set(sys.modules);"
        "print(sorted(loaded)); [getattr(jaxrl_atari, name) for name in jaxrl_atari.__all__];"
        "print('jaxrl_atari.train' in sys.modules, *jaxrl_atari.__all__)"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0] == "[]"
    train_was_imported, *names = lines[1].split()
    assert train_was_imported == "False"  # so `python -m jaxrl_atari.train` has nothing to warn about
    assert {"Config", "run_training", "load_policy", "run_evaluation"} <= set(names)
    assert not set(names) & set(FLOORS)
