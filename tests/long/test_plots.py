"""The command `plots` in a user's own matplotlib."""

from sample_runs import table, write_run
from user_commands import python

from jaxrl_atari import plots


def test_the_command_in_a_notebook_and_under_a_users_settings(tmp_path):
    """A notebook exports its backend, and a matplotlibrc may hold anything: the files are the same."""
    (tmp_path / "matplotlibrc").write_text("font.size: 30\ntext.usetex: True\nlines.linewidth: 9\n")
    variables = {"MATPLOTLIBRC": str(tmp_path), "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    run_dir = write_run(tmp_path / "run", [table([1, 2, 3])])
    ended = python("-m", "jaxrl_atari.plots", run_dir, **variables)
    assert ended.returncode == 0, ended.stderr
    drawn = (run_dir / "graphs" / "trial.svg").read_bytes()
    plots.main([str(run_dir)])
    assert drawn == (run_dir / "graphs" / "trial.svg").read_bytes()
