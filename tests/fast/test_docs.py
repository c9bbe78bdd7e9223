"""The pages: what they name exists, and their commands have options and values that the commands accept."""

import ast
import importlib.util

import pytest
from page_commands import CASES, FENCE, LINK, PAGES, ROOT, text

from jaxrl_atari.config import check_fields


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


class Accepted(Exception):
    """Raised in place of running a command whose options were read."""


def read_and_stop(options, prefix):
    check_fields(options, prefix)
    raise Accepted


MAINS = {"search": "search.command", "devices": "cli.device_report", "train": "train", "plots": "plots"}
"""Command -> the module of its `main`, where that is not its folder's `__main__`."""

EXTRAS = {"search": "optuna", "hub": "huggingface_hub", "export": "onnxruntime"}
"""Command -> the package without which it does not run."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_command_of_a_page_has_options_and_values_that_it_accepts(case, monkeypatch):
    if case.module in EXTRAS:
        pytest.importorskip(EXTRAS[case.module], reason=f"pip install 'jaxrl_atari[{case.module}]'")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("jaxrl_atari.cli.options.check_fields", read_and_stop)
    words = ["0" if word.startswith("$") else word for word in case.words]  # a shell's variable
    for option in ("--resume", "--import"):  # they read what a user has
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    module = importlib.import_module(f"jaxrl_atari.{MAINS.get(case.module, case.module + '.__main__')}")
    with pytest.raises(Accepted):
        module.main(words)
