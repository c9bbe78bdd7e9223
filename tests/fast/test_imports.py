"""`--import`: what a command line names is imported, before its other options are read and in every process."""

import importlib
import json
import os
import py_compile
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from sample_runs import table, write_run

from jaxrl_atari.cli.config_files import run_config_file
from jaxrl_atari.cli.options import read_sources
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.imports import named
from jaxrl_atari.imports.children import IMPORTS_VARIABLE
from jaxrl_atari.imports.named import import_inherited, import_named, pass_on_config_file
from jaxrl_atari.verify.__main__ import main as verify

MARK = "import builtins, beside_it\nbuiltins.named = getattr(builtins, 'named', 0) + beside_it.ONE\n"


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """A file that counts how often it is run, as the attribute `named` of builtins, and a module beside it."""
    monkeypatch.setenv(IMPORTS_VARIABLE, "[]")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("builtins.named", 0, raising=False)
    (tmp_path / "beside_it.py").write_text("ONE = 1\n")
    path = tmp_path / "user_file_of_the_test.py"
    path.write_text(MARK)
    yield path
    for module in ("beside_it", path.stem):
        sys.modules.pop(module, None)


def count():
    import builtins

    return builtins.named  # pyright: ignore[reportAttributeAccessIssue]


def test_a_file_is_run_once(user_file):
    import_named([str(user_file)])
    import_named([str(user_file)])
    import_inherited()
    assert count() == 1
    assert sys.modules[user_file.stem].__file__ == str(user_file)


def test_a_file_that_other_code_has_imported_is_not_run_again(user_file, monkeypatch):
    monkeypatch.syspath_prepend(user_file.parent)
    module = importlib.import_module(user_file.stem)
    import_named([str(user_file)])
    assert count() == 1
    assert sys.modules[user_file.stem] is module


def test_a_file_leaves_no_cache_beside_it_and_trusts_none(user_file, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    user_file.write_text("import builtins\nbuiltins.named = 5\n")
    planted = Path(py_compile.compile(str(user_file)))
    user_file.write_text("import builtins\nbuiltins.named = 7\n")  # as long as before
    stat = user_file.stat()
    os.utime(user_file, (stat.st_atime, struct.unpack("<I", planted.read_bytes()[8:12])[0]))
    import_named([str(user_file)])
    assert count() == 7
    shutil.rmtree(planted.parent)
    sys.modules.pop(user_file.stem)
    named._imported.discard(str(user_file))
    import_named([str(user_file)])
    assert not planted.parent.exists()


def test_a_module_is_imported_by_its_name(user_file, monkeypatch):
    monkeypatch.syspath_prepend(user_file.parent)
    import_named([user_file.stem])
    assert count() == 1


def test_both_are_imported_in_processes(user_file):
    import_named([str(user_file), "colorsys"])
    code = (
        "import builtins, sys; from jaxrl_atari.imports.named import import_inherited; import_inherited();"
        "print(builtins.named, 'colorsys' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "True"]


def test_what_this_process_has_run_is_for_others_alone(user_file, monkeypatch):
    pass_on_config_file(user_file)
    import_inherited()
    assert count() == 0
    monkeypatch.setattr(named, "_imported", set())  # another process
    import_inherited()
    assert count() == 1


def test_a_file_with_the_name_of_an_installed_module(user_file):
    path = user_file.with_name("colorsys.py")
    path.write_text(MARK)
    import_named([str(path)])
    assert count() == 1
    import colorsys

    assert colorsys.__file__ != str(path)


def test_files_of_one_name_are_modules_of_their_own(user_file, tmp_path):
    """So each keeps its classes, which other processes find by the names of their modules."""
    before, paths = set(sys.modules), []
    for number in range(3):
        folder = tmp_path / f"folder_{number}"
        folder.mkdir()
        paths.append(folder / "envs_of_the_test.py")
        paths[-1].write_text(f"import gymnasium\nNUMBER = {number}\nclass Env(gymnasium.Env):\n    pass\n")
    for path in paths:
        import_named([str(path)])
    made = {name: sys.modules.pop(name) for name in set(sys.modules) - before if "envs_of_the_test" in name}
    assert sorted(module.NUMBER for module in made.values()) == [0, 1, 2]
    assert all(module.Env.__module__ == name for name, module in made.items())


def test_a_module_beside_a_file_is_found_before_an_installed_one(user_file, tmp_path, monkeypatch):
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "beside_it.py").write_text("ONE = 100\n")
    monkeypatch.syspath_prepend(installed)
    user_file.write_text(f"{MARK}def later():\n    import beside_it_too\n    return beside_it_too.TWO\n")
    (tmp_path / "beside_it_too.py").write_text("TWO = 2\n")
    import_named([str(user_file)])
    assert count() == 1
    assert sys.modules[user_file.stem].later() == 2
    sys.modules.pop("beside_it_too")


@pytest.mark.parametrize("option", ["--config", "--import"])
def test_a_file_may_change_the_search_path_itself(option, user_file, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = [*sys.path]
    user_file.write_text("import sys\nsys.path.insert(0, '/opt/mine')\n")
    if option == "--import":
        import_named([str(user_file)])
        before.append(str(user_file.parent))
    else:
        run_config_file(user_file)
    assert sys.path == ["/opt/mine", *before]


def test_a_command_line_is_read_before_it_is_parsed(user_file):
    read_sources(["--env.game", "X", "--import", str(user_file), "--import=colorsys", "--seed"])
    assert count() == 1
    assert json.loads(os.environ[IMPORTS_VARIABLE]) == [str(user_file), "colorsys"]
    with pytest.raises(UserError, match=r"^--import: expected one argument$"):
        read_sources(["--import"])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "no_such_module",
            None,
            "--import no_such_module: ModuleNotFoundError: No module named 'no_such_module'; expected a module",
        ),
        ("gone.py", None, "gone.py: no such file"),
        ("raises.py", "\n1 / 0\n", "raises.py, line 2: ZeroDivisionError: division by zero; fix the file"),
        ("raises.py", "raise SystemExit(1)", "raises.py, line 1: SystemExit: 1; fix the file"),
        ("raises.py", "x = (", "SyntaxError: '(' was never closed (raises.py, line 1); fix the file"),
        ("raises.py", "import gone_too", "line 1: ModuleNotFoundError: No module named 'gone_too'; fix the file"),
        ("folder/data.txt", "x", "data.txt: expected a Python file"),
        ("~nobody/x.py", None, "x.py: no such file"),
    ],
)
def test_what_cannot_be_imported_is_one_line(user_file, name, text, expected):
    path = user_file.parent / name
    if text is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with pytest.raises(UserError) as error:
        import_named([name if name == "no_such_module" or name.startswith("~") else str(path)])
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_the_variable_for_child_processes_may_be_empty_and_must_be_a_list(monkeypatch):
    monkeypatch.setenv(IMPORTS_VARIABLE, "")
    import_inherited()
    for text in ("my_envs", '{"a": 1}', "[1]"):
        monkeypatch.setenv(IMPORTS_VARIABLE, text)
        with pytest.raises(ConfigError, match=f"{IMPORTS_VARIABLE} = .*: expected a JSON list"):
            import_inherited()


@pytest.mark.parametrize("option", ["--config", "--import"])
@pytest.mark.parametrize("raises", ["user_file", "beside_it"])
def test_an_error_in_a_library_names_the_line_of_the_user(option, raises, user_file):
    user_file.write_text("import json\nimport beside_it\njson.loads('x')\n")
    if raises == "beside_it":
        user_file.with_name("beside_it.py").write_text("import json\n\n\njson.loads('x')\n")
    with pytest.raises(UserError) as error:
        import_named([str(user_file)]) if option == "--import" else run_config_file(user_file)
    where = f"{user_file}, line 3"
    if raises == "beside_it":
        where = f"{user_file}: {user_file.with_name('beside_it.py')}, line 4"
    expected = f"{option} {where}: JSONDecodeError: Expecting value: line 1 column 1 (char 0); fix the file"
    assert str(error.value) == expected


def test_an_error_in_a_module_names_the_line_in_its_package(user_file, monkeypatch):
    package = user_file.with_name("package_of_the_test")
    package.mkdir()
    (package / "__init__.py").write_text("from package_of_the_test import envs\n")
    (package / "envs.py").write_text("import json\n\njson.loads('x')\n")
    monkeypatch.syspath_prepend(user_file.parent)
    with pytest.raises(UserError) as error:
        import_named([package.name])
    expected = f"--import {package.name}: {package / 'envs.py'}, line 3: JSONDecodeError: "
    assert str(error.value).startswith(expected)


def test_verify_takes_it(user_file, tmp_path):
    run_dir = tmp_path / "run"
    write_run(run_dir, [table([1.0, 2.0])])
    with pytest.raises(UserError, match="has no log of actions"):
        verify([str(run_dir), "--import", str(user_file)])
    assert count() == 1
