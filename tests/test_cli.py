"""The top of every command: one line for what a user can put right, and what is said of values of the wrong type."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_atari import cli, train
from jaxrl_atari.config_files import load_config_file
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware import runtime


def ends(main):
    with pytest.raises(SystemExit) as end:
        cli.run(main)
    return end.value.code


def raises(error):
    def main():
        raise error

    return main


def test_what_a_user_can_put_right_is_one_line_and_a_bug_keeps_its_traceback(capsys):
    assert ends(lambda: None) == 0
    assert ends(raises(UserError("no such file"))) == 2
    assert ends(raises(OSError(errno.ENOSPC, "No space left on device", "data/x/metrics.csv"))) == 2
    assert ends(raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err.splitlines() == [
        "error: no such file",
        "error: data/x/metrics.csv: No space left on device; free some space; a training then goes on with --resume",
        "interrupted",
    ]
    with pytest.raises(FileNotFoundError):
        cli.run(raises(FileNotFoundError(errno.ENOENT, "no such file")))


def test_a_reader_that_goes_away_ends_a_command_in_silence(monkeypatch, capsys):
    dropped = []
    monkeypatch.setattr(cli, "drop_output", lambda: dropped.append(True))
    assert ends(raises(BrokenPipeError())) == 1
    assert dropped
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "configs/qbert.py", "--seed", "1e6"], "--seed: expected a whole number such as 1000000, got"),
        (["--config", "configs/qbert.py", "--ppo.gamma", "x"], "--ppo.gamma: expected a number such as 0.001, got 'x'"),
        (["--confg", "configs/qbert.py"], "one is needed; for example --config configs/qbert.py; given were --confg"),
        (["--config"], "argument --config: expected one argument"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type(arguments, message, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    with pytest.raises(UserError) as error:
        train.parse(arguments)
    assert message in str(error.value)


def test_config_files_that_end_the_program_or_fail(tmp_path, monkeypatch):
    path = tmp_path / "c.py"
    path.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=r"c.py, line 2: SystemExit: 0; mend the file"):
        load_config_file(path)
    path.write_text("def get_config():\n    return nothing\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"c.py, line 2: NameError: name 'nothing' is not defined; mend the file"):
        load_config_file("~/c.py")


def test_a_cache_that_cannot_be_written_to_is_told(tmp_path):
    (tmp_path / "file").touch()
    code = "from jaxrl_atari.hardware import runtime; print(*runtime.configure(), sep='\\n')"
    variables = {"XDG_CACHE_HOME": str(tmp_path / "file"), "PYTHONPATH": str(Path(runtime.__file__).parents[1])}
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=True
    ).stdout
    assert f"compiled programs are not kept: {tmp_path}/file/jaxrl_atari/xla cannot be written to" in out
