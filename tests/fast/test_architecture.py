"""The walls of the house: who may import what. A room is a module at the package's root, or a folder."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from jaxrl_atari import ppo, train

PACKAGE = Path(__file__).parents[2] / "jaxrl_atari"
FILES = sorted(PACKAGE.rglob("*.py"))

ORDER = [
    "__init__", "__main__", "train", "search", "plots", "suite", "trials", "hub", "export", "benchmark", "verify",
    "device_report", "update_memory", "random_rollout",
    "session", "out_of_memory", "provenance", "evaluate", "report", "session_environments", "rollout",
    "learner", "session_arrays", "runs", "devices", "data_parallel", "process_tuning",
    "config_checks", "algorithms", "update", "ppo",
    "algorithm", "network_advice", "network_forms", "fast", "networks", "network_functions",
    "network_interface", "layers", "cpu_convolution", "frames", "hardware", "cli", "dialects",
    "config_dicts", "config", "option_forms", "envs", "imports", "output", "registry", "keys", "checks", "errors",
]  # fmt: skip
"""A room imports only from rooms after it."""


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


@cache
def arrows():
    """File -> the files of the package that it imports, by their names."""
    names = {name_of(path) for path in FILES}

    def targets(path):
        found = {name.removeprefix("jaxrl_atari.") for name in imports(path) if name.startswith("jaxrl_atari.")}
        exact = found & names
        # `from jaxrl_atari.envs import ale_pool` names the file, and not the folder that it lies in.
        return {name for name in exact if not any(other.startswith(name + ".") for other in exact)} - {
            name_of(path)
        }

    return {name_of(path): targets(path) for path in FILES}


def test_every_room_has_its_place():
    names = {path.name for path in PACKAGE.iterdir() if not path.name.startswith("__")}
    assert {name.removesuffix(".py") for name in names} <= set(ORDER)


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
        if room(target) != room(importer) and ORDER.index(room(target)) <= ORDER.index(room(importer))
    ]
    assert not upward


def test_only_commands_read_command_lines():
    commands = {"train", "plots", "device_report", "search.command", "benchmark.comparison"}
    readers = {
        importer
        for importer, targets in arrows().items()
        if targets & {"cli.options", "cli.config_files", "cli.option_names"}
    }
    assert {name for name in readers if room(name) != "cli" and not name.endswith("__main__")} <= commands


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("ale_py", {"envs", "export"}),  # export/play.py is a program of its own
        ("envpool", {"envs"}),
        ("orbax", {"runs"}),
        ("tensorboard", set()),
        ("tensorboardX", {"runs"}),
        ("wandb", {"runs"}),
        ("huggingface_hub", {"hub"}),
        ("optuna", {"search", "report", "runs"}),
        ("onnx", {"export"}),
        ("onnxruntime", {"export"}),
        ("ray", {"trials", "search"}),
        ("jinja2", {"report"}),
        ("jaxrl_atari.train", set()),
    ],
)
def test_who_imports(package, rooms):
    importers = {
        room(name_of(path)) for path in FILES for name in imports(path) if f"{name}.".startswith(f"{package}.")
    }
    assert importers <= rooms


@pytest.mark.parametrize(
    "module",
    [
        "ppo",
        "algorithm",
        "update",
        "networks",
        "network_functions",
        "network_interface",
        "frames",
        "layers",
        "cpu_convolution",
        "algorithms.rnd",
        "algorithms.vtrace",
    ],
)
def test_the_algorithm_does_no_input_or_output(module):
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    rooms = {room(name) for name in arrows()[module]}
    assert rooms <= {
        "algorithm", "config", "cpu_convolution", "envs",
        "errors", "frames", "layers", "network_functions", "network_interface", "networks", "ppo",
        "registry", "update",
    }  # fmt: skip
    outer = {name.split(".")[0] for name in imports(path)} - {"jaxrl_atari"}
    standard = {
        "collections",
        "contextlib",
        "contextvars",
        "dataclasses",
        "functools",
        "inspect",
        "itertools",
        "math",
        "types",
        "typing",
    }
    assert outer <= standard | {"chex", "flax", "jax", "numpy", "optax"}
    names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    assert not names & {"print", "open", "input"}


def test_only_data_parallel_spreads_work():
    """`pmap`, `shard_map`, meshes and sums over devices are in data_parallel.py alone."""
    words = ("pmap(", "shard_map(", "sharding.Mesh(", "psum", "pmean", "axis_index(")
    spreading = {
        name_of(path) for path in FILES if any(word in path.read_text(encoding="utf-8") for word in words)
    }
    assert spreading == {"data_parallel"}


def test_only_the_provider_asks_nvidia():
    """So a test that replaces the provider replaces all GPUs."""

    def importers(name):
        return {name_of(path) for path in FILES if name in imports(path)}

    assert importers("pynvml") == {"hardware.nvidia"}
    assert importers("jaxrl_atari.hardware.nvidia") == {"hardware.gpus"}


def test_only_jax_settings_changes_settings_of_jax():
    """What it changes, and until when, is a table in its docstring."""
    words = ("config.update(", 'environ["XLA', 'environ["CUDA', 'environ["JAX')
    changing = {name_of(path) for path in FILES if any(word in path.read_text(encoding="utf-8") for word in words)}
    assert changing == {"hardware.jax_settings"}


def reached_from(module):
    """The files that a file imports, also by way of others."""
    reached = {module}
    waiting = [module]
    while waiting:
        new = arrows()[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def test_training_imports_neither_graphs_nor_pages():
    assert not {name for name in reached_from("session") if room(name) == "report" or name.endswith("page")}


@pytest.mark.parametrize("module", ["plots", "report.page", "suite.sweep", "search.options", "search.results"])
def test_reading_and_checking_imports_no_training(module):
    assert not {room(name) for name in reached_from(module)} & {"session", "learner", "rollout", "networks", "ppo"}


@pytest.mark.long
def test_at_most_eight_calls_lie_between_the_command_and_the_loss(monkeypatch, tmp_path):
    def planted(*_):
        raise ArithmeticError

    monkeypatch.setattr(ppo, "PPO", ppo.PPO._replace(loss=planted))
    with pytest.raises(ArithmeticError) as error:
        train.main(f"--output-dir {tmp_path} --env.num-envs 2 --ppo.rollout-length 128".split())
    between = [entry.name for entry in error.traceback[2:-1] if PACKAGE in Path(entry.path).parents]
    assert len([name for name in between if name.isidentifier()]) <= 8, between  # `<genexpr>` is none


def test_the_package_is_imported_lazily():
    """Scripts import from `jaxrl_atari`; that loads nothing heavy, and no name hides a module of the package."""
    code = (
        "import sys, jaxrl_atari; print({'jax', 'flax', 'ale_py', 'matplotlib'} & set(sys.modules));"
        "[getattr(jaxrl_atari, name) for name in jaxrl_atari.__all__];"
        "print('jaxrl_atari.train' in sys.modules, *jaxrl_atari.__all__)"
    )
    lines = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert lines[0] == "set()"
    train_was_imported, *names = lines[1].split()
    assert train_was_imported == "False"  # so `python -m jaxrl_atari.train` has nothing to warn about
    assert {"Config", "run_training", "load_policy", "run_evaluation"} <= set(names)
    assert not set(names) & set(ORDER)


@pytest.mark.parametrize("command", ["train", "suite"])
def test_help_of_a_command_that_trains_does_not_wait_for_flax(command):
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('flax', 'optax', 'orbax'))  # an import of them is an error\n"
        f"from runpy import run_module; run_module('jaxrl_atari.{command}', run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, check=True)
