"""Every command line of the pages, run as a user runs it, with options that make it small."""

import re

import pytest
from page_commands import CASES
from run_pages import Templates, run_case

LIKE_ANOTHER = re.compile(r"--compare (?!cpu,gpu|network\.conv)")
"""Comparisons that differ from another line in the field alone."""
ONCE = {case: name for name, case in reversed(CASES.items()) if not LIKE_ANOTHER.search(" ".join(case.words))}
"""The name of each command: several pages may have it."""


@pytest.fixture(scope="module")
def templates(environment, tmp_path_factory):
    return Templates(tmp_path_factory.mktemp("templates"), environment)


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("case", ONCE, ids=ONCE.values())
def test_the_command_runs(case, tmp_path, environment, templates):
    run_case(case, tmp_path, environment, templates)
