"""Some command lines of the pages, run as a user runs them; tests/release/test_commands.py runs all."""

import pytest
from page_commands import CASES
from run_pages import Templates, run_case

LINES = {" ".join([case.module, *case.words]): case for case in CASES.values()}
QUICK = ["evaluate RUN_DIR", "plots RUN_DIR", "report RUN_DIR", "devices --config configs/qbert.py",
         "suite --games Pnog"]  # fmt: skip
"""The first three read a run that the command `train` makes."""


@pytest.fixture(scope="module")
def templates(environment, tmp_path_factory):
    return Templates(tmp_path_factory.mktemp("templates"), environment)


@pytest.mark.parametrize("line", QUICK)
def test_the_command_runs(line, tmp_path, environment, templates):
    run_case(LINES[line], tmp_path, environment, templates)
