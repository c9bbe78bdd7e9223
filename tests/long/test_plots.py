"""The command `plots` in a user's own matplotlib."""

import subprocess
import sys

from sample_runs import table, write_run
from user_commands import ROOT, user_environment

from jaxrl_atari import plots


def test_the_command_in_a_notebook_and_under_a_users_settings(tmp_path):
    """A notebook exports its backend, and a matplotlibrc may hold anything: the files are the same."""
    (tmp_path / "matplotlibrc").write_text("font.size: 30\ntext.usetex: True\nlines.linewidth: 9\n")
    environment = user_environment(
        MATPLOTLIBRC=str(tmp_path), MPLBACKEND="module://matplotlib_inline.backend_inline"
    )
    run_dir = write_run(tmp_path / "run", [table([1, 2, 3])])
    command = [sys.executable, "-m", "jaxrl_atari.plots", run_dir]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    drawn = (run_dir / "graphs" / "trial.svg").read_bytes()
    plots.main([str(run_dir)])
    assert drawn == (run_dir / "graphs" / "trial.svg").read_bytes()
