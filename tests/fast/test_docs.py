"""The pages: what they name exists. `test_commands.py` runs their commands."""

import ast
import contextlib
import importlib.util
import io
import re

import pytest
from page_commands import CASES, FENCE, LINK, PAGES, text
from user_commands import run_here, skip_without_extra


def test_every_link_leads_to_a_file():
    broken = [(page.name, link) for page in PAGES for link in LINK.findall(text(page))
              if not (page.parent / link).exists()]  # fmt: skip
    assert not broken


def test_every_import_in_a_snippet_resolves():
    for page in PAGES:
        for language, code in FENCE.findall(text(page)):
            for node in ast.walk(ast.parse(code)) if language == "python" else ():
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxrl_atari"):
                    if ".search" in (node.module or "") and not importlib.util.find_spec("optuna"):
                        continue
                    module = importlib.import_module(node.module or "")
                    missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                    assert not missing, (page.name, node.module, missing)


def command(case):
    """The words of a command before its options: `hub push`, `evaluate`."""
    return (case.module, case.words[0]) if case.module == "hub" else (case.module,)


def options(words):
    return {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}


@pytest.mark.parametrize("name", sorted({command(case) for case in CASES.values()}), ids=" ".join)
def test_every_option_of_a_command_on_a_page_is_one_of_its_help(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    skip_without_extra(name[0])
    module, *words = name
    shown = io.StringIO()
    with pytest.raises(SystemExit) as end, contextlib.redirect_stdout(shown):
        run_here(module, [*words, "--help"])
    assert not end.value.code
    exist = set(re.findall(r"--[a-z][\w.-]*", shown.getvalue()))
    unknown = {page: options(case.words) - exist for page, case in CASES.items() if command(case) == name}
    assert not {page: names for page, names in unknown.items() if names}
