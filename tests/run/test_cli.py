"""Commands as processes: their exit status, whatever becomes of their output."""

import os
import subprocess
import sys

import pytest
from user_commands import ROOT


def shell(script, *arguments, **variables):
    """Runs a line of a shell, in which "$0" is Python, in a user's environment."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", script, sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("body", "redirect", "status", "printed"),
    [
        ('raise UserError("no such file")', "2>/dev/full", 2, ""),
        ("os.kill(os.getpid(), 15)", "2>/dev/full", 130, ""),
        ('say("a line"); say("another")', ">/dev/full", 0, ""),
        ('say("±")', "", 0, "?\n"),
        ('[say("a line") for _ in range(10_000)]', "| true", 0, ""),
    ],
)
def test_the_exit_status_does_not_depend_on_the_output(body, redirect, status, printed):
    code = (
        f"import os; from jaxrl_atari import cli; from jaxrl_atari.errors import UserError\n"
        f"from jaxrl_atari.output import say\n"
        f"def main():\n    {body}\ncli.run(main)"
    )
    ended = shell(f'"$0" -c "$1" {redirect}', code, PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, printed, "")
