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

from jaxrl_atari.cli.options import read_sources
from jaxrl_atari.errors import UserError
from jaxrl_atari.imports import IMPORTS_VARIABLE, import_inherited, import_named

MARK = "import builtins, beside_it\nbuiltins.named = getattr(builtins, 'named', 0) + beside_it.ONE\n"


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """A file that counts how often it is run, as the attribute `named` of builtins, and a module beside it."""
    monkeypatch.setattr("builtins.named", 0, raising=False)
    (tmp_path / "beside_it.py").write_text("ONE = 1\n")
    path = tmp_path / "user_file_of_the_test.py"
    path.write_text(MARK)
    yield path
    for module in ("beside_it", str(path)):
        sys.modules.pop(module, None)


def test_a_file_is_run_once_here_and_once_in_a_process_that_is_started(user_file):
    for _ in range(2):
        import_named([str(user_file), "colorsys"])
    import_inherited()
    assert builtins.named == 1
    code = (
        "import builtins, sys; from jaxrl_atari.imports import import_inherited; import_inherited();"
        "print(builtins.named, 'colorsys' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "True"]


def test_a_command_line_is_read_before_it_is_parsed(user_file):
    read_sources(["--env.game", "X", "--import", str(user_file), "--import=colorsys", "--seed"])
    assert builtins.named == 1
    assert json.loads(os.environ[IMPORTS_VARIABLE]) == [str(user_file), "colorsys"]


def test_a_compiled_file_that_was_planted_beside_a_file_is_not_run(user_file, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    user_file.write_text("import builtins\nbuiltins.named = 5\n")
    planted = Path(py_compile.compile(str(user_file)))
    user_file.write_text("import builtins\nbuiltins.named = 7\n")  # as long as before
    stat = user_file.stat()
    os.utime(user_file, (stat.st_atime, struct.unpack("<I", planted.read_bytes()[8:12])[0]))
    import_named([str(user_file)])
    assert builtins.named == 7


def test_a_module_beside_a_file_is_found_before_an_installed_one_and_also_later(user_file, tmp_path, monkeypatch):
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "beside_it.py").write_text("ONE = 100\n")
    monkeypatch.syspath_prepend(installed)
    user_file.write_text(f"{MARK}def later():\n    import beside_it_too\n    return beside_it_too.TWO\n")
    (tmp_path / "beside_it_too.py").write_text("TWO = 2\n")
    import_named([str(user_file)])
    assert builtins.named == 1
    assert sys.modules[str(user_file)].later() == 2
    sys.modules.pop("beside_it_too")


def test_what_cannot_be_imported(user_file):
    user_file.with_name("raises.py").write_text("\n1 / 0\n")
    for name, error, named in (
        ("no_such_module", UserError, "^--import no_such_module: "),
        (str(user_file.with_name("gone.py")), UserError, "gone.py: expected a Python file"),
        (str(user_file.with_name("raises.py")), ZeroDivisionError, "division"),
    ):
        with pytest.raises(error, match=named):
            import_named([name])
        assert json.loads(os.environ[IMPORTS_VARIABLE]) == [], "no other process tries what has failed here"
