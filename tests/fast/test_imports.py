"""`--import`: what a command line names is imported, before its other options are read and in every process."""

import builtins
import json
import os
import py_compile
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_atari.cli.config_files import run_config_file
from jaxrl_atari.cli.options import read_sources
from jaxrl_atari.errors import UserError
from jaxrl_atari.imports import IMPORTS_VARIABLE, import_inherited, import_named

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
    return builtins.named  # pyright: ignore[reportAttributeAccessIssue]


def test_a_file_is_run_once_here_and_once_in_a_process_that_is_started(user_file):
    for _ in range(2):
        import_named([str(user_file), "colorsys"])
    import_inherited()
    assert count() == 1
    assert sys.modules[user_file.stem].__file__ == str(user_file)
    code = (
        "import builtins, sys; from jaxrl_atari.imports import import_inherited; import_inherited();"
        "print(builtins.named, 'colorsys' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "True"]


def test_a_command_line_is_read_before_it_is_parsed(user_file):
    read_sources(["--env.game", "X", "--import", str(user_file), "--import=colorsys", "--seed"])
    assert count() == 1
    assert json.loads(os.environ[IMPORTS_VARIABLE]) == [str(user_file), "colorsys"]


def test_a_compiled_file_that_was_planted_beside_a_file_is_not_run(user_file, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    user_file.write_text("import builtins\nbuiltins.named = 5\n")
    planted = Path(py_compile.compile(str(user_file)))
    user_file.write_text("import builtins\nbuiltins.named = 7\n")  # as long as before
    stat = user_file.stat()
    os.utime(user_file, (stat.st_atime, struct.unpack("<I", planted.read_bytes()[8:12])[0]))
    import_named([str(user_file)])
    assert count() == 7


def test_files_of_one_name_are_modules_of_their_own(user_file, tmp_path):
    """So each keeps its classes, which other processes find by the names of their modules."""
    before = set(sys.modules)
    for number in range(3):
        folder = tmp_path / f"folder_{number}"
        folder.mkdir()
        (folder / "colorsys.py").write_text(f"NUMBER = {number}\n")  # the name of an installed module, too
        import_named([str(folder / "colorsys.py")])
    made = {name: sys.modules.pop(name) for name in set(sys.modules) - before if "colorsys" in name}
    assert sorted(module.NUMBER for module in made.values() if hasattr(module, "NUMBER")) == [0, 1, 2]


def test_a_module_beside_a_file_is_found_before_an_installed_one_and_also_later(user_file, tmp_path, monkeypatch):
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


@pytest.mark.parametrize("load", [lambda path: import_named([str(path)]), run_config_file])
def test_an_error_in_a_library_names_the_line_of_the_user(load, user_file):
    user_file.write_text("import beside_it\n")
    user_file.with_name("beside_it.py").write_text("import json\n\n\njson.loads('x')\n")
    with pytest.raises(UserError) as error:
        load(user_file)
    assert f"{user_file.with_name('beside_it.py')}, line 4: JSONDecodeError" in str(error.value)


UNUSABLE = {
    ("no_such_module", None): "--import no_such_module: ModuleNotFoundError",
    ("gone.py", None): "gone.py: expected a Python file",
    ("raises.py", "\n1 / 0\n"): "raises.py, line 2: ZeroDivisionError",
    ("raises.py", "raise SystemExit(1)"): "raises.py, line 1: SystemExit",
    ("raises.py", "x = ("): "SyntaxError",
    ("folder/data.txt", "x"): "data.txt: expected a Python file",
}
"""Name and text of what is imported -> what the one line of error names."""


def test_what_cannot_be_imported_is_one_line(user_file):
    for (name, text), named in UNUSABLE.items():
        path = user_file.parent / name
        if text is not None:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        with pytest.raises(UserError) as error:
            import_named([name if name == "no_such_module" else str(path)])
        assert named in str(error.value)
        assert "\n" not in str(error.value)
