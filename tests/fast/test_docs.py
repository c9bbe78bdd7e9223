"""The pages: every command line parses, every import and every link resolves."""

import argparse
import ast
import configparser
import importlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import tyro
from page_commands import CASES, FENCE, LINK, PAGES, ROOT, text
from user_commands import run_here, skip_without_extra

from jaxrl_atari import cli
from jaxrl_atari.benchmark.comparison import make_sides
from jaxrl_atari.config import Config, EnvConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.imports.children import IMPORTS_VARIABLE


class Parsed(BaseException):
    """Raised when a command has read its options, so that nothing runs."""


def run(module, words, monkeypatch):
    """Runs `python -m jaxrl_atari.MODULE WORDS` until its options are read; returns its error, or None."""

    def stop_after(function):
        def wrapper(*args, **kwargs):
            result = function(*args, **kwargs)
            if kwargs.get("return_unknown_args") and result[1]:
                return result  # the command names what it does not know
            raise Parsed

        return wrapper

    monkeypatch.setattr(tyro, "cli", stop_after(tyro.cli))
    subcommands = tyro.extras.subcommand_cli_from_dict
    monkeypatch.setattr(tyro.extras, "subcommand_cli_from_dict", stop_after(subcommands))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop_after(argparse.ArgumentParser.parse_args))
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(IMPORTS_VARIABLE, "[]")
    error = io.StringIO()
    try:
        with redirect_stderr(error):
            run_here(module, words)
    except Parsed:
        return None
    except SystemExit:
        return error.getvalue()
    pytest.fail(f"{module} {words} ran without reading options")


def test_the_commands_are_found():
    assert len(CASES) > 40
    assert {case.module for case in CASES.values()} >= {
        "train", "evaluate", "plots", "report", "benchmark", "suite", "search", "hub",
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_command_line_parses(case, monkeypatch, tmp_path):
    module, words = case.module, list(case.words)
    skip_without_extra(module)
    if "--resume" in words and not case.error:
        at = words.index("--resume")
        error = run(module, ["--resume", "data/none"], monkeypatch)
        assert error is not None
        assert "data/none" in error  # --resume is an option, and it names a directory
        new = {
            "train": ["--config", "configs/qbert.py"],
            "suite": [],
            "search": ["--config", "configs/search_qbert.py"],
        }
        words = [*words[:at], *new[module], *words[at + 2 :]]
    names = [option for option in ("--algorithm", "--network.name") if option in words]
    if "--import" in words and names:  # a file of the user's, which the page shows
        name = words[words.index(names[0]) + 1]
        (code,) = [code for _, code in FENCE.findall(text(ROOT / "docs" / "idea.md")) if f'("{name}",' in code]
        at = words.index("--import") + 1
        words[at] = str(tmp_path / words[at])
        Path(words[at]).write_text(code)
    monkeypatch.undo()
    error = run(module, words, monkeypatch)
    if case.error:
        assert error is None or "no such option" not in error
    else:
        assert error is None, error


@pytest.mark.parametrize(
    "option",
    sorted({word for page in PAGES for word in re.findall(r"--compare ([a-z_.]+=[\w,.]+)", text(page))}),
)
def test_every_compared_value_is_possible(option):
    config = Config(env=EnvConfig(num_envs=96)) if "num_groups" in option else Config()
    assert len(make_sides(option, config, "end_to_end", 1.0)) > 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_import_in_a_snippet_resolves(page):
    for language, code in FENCE.findall(text(page)):
        for node in ast.walk(ast.parse(code)) if language == "python" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxrl_atari"):
                skip_without_extra(node.module or "")
                module = importlib.import_module(node.module or "")
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{node.module} has no {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_has_a_rule_that_renders(page):
    rules = [line for line in page.read_text().splitlines() if "-" in line and re.fullmatch(r"\|[|:\- ]+", line)]
    assert not [rule for rule in rules if not re.fullmatch(r"\|( ?:?-+:? ?\|)+", rule)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page):
    broken = [link for link in LINK.findall(text(page)) if not (page.parent / link).exists()]
    assert not broken


def test_the_page_of_options_has_a_row_for_each_field():
    """The hook runs under MkDocs, which this environment need not have."""
    hook = runpy.run_path(str(ROOT / "docs" / "hooks" / "options.py"))
    page = hook["on_page_markdown"](text(ROOT / "docs" / "api" / "config.md"))
    assert hook["MARK"] not in page
    for option in ("--total-env-steps", "--ppo.gae-lambda", "--env.num-envs", "--devices.gpu"):
        row = next(line for line in page.splitlines() if line.startswith(f"| `{option}` |"))
        assert len(row.split("|")[3].strip()) > 10, row  # what it means


WAITS_FOR_SIGNALS = """
import os, signal, sys

def count(*_):
    received.append("signal")
    os.write(1, b"signal\\n")  # `print` may still be writing the arguments
    if len(received) == {count}:
        sys.exit({status})

received = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, count)
print(sys.argv[1:], flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("status", "requeued"), [(130, True), (0, False), (2, False)])
@pytest.mark.parametrize("numbers", [[signal.SIGUSR1], [signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM]])
def test_the_slurm_script_passes_signals_on_and_requeues_an_interrupted_run(status, requeued, numbers, tmp_path):
    """With stand-ins for `python`, which waits for signals and then ends with `status`, and for `scontrol`."""
    (script,) = (
        code for kind, code in FENCE.findall(text(ROOT / "docs" / "resume.md")) if "#SBATCH --requeue" in code
    )
    stand_ins = {
        "python": WAITS_FOR_SIGNALS.format(count=len(numbers), status=status),
        "scontrol": "import sys\nprint('scontrol', *sys.argv[1:], flush=True)\n",
    }
    for name, code in stand_ins.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{code}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(script)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "HOME": str(tmp_path),
    }
    with subprocess.Popen(
        ["bash", tmp_path / "job.sh"], env=environment, stdout=subprocess.PIPE, text=True
    ) as job:
        line = job.stdout.readline()
        assert "'-m', 'jaxrl_atari.train', '--config', 'configs/qbert.py', '--run-dir'" in line
        for number in numbers:
            job.send_signal(number)
            assert job.stdout.readline() == "signal\n"
        output, _ = job.communicate(timeout=30)
    assert (job.returncode, output) == (status, "scontrol requeue 7\n" if requeued else "")


def test_the_systemd_unit_agrees_with_the_exit_statuses():
    (unit,) = (code for _, code in FENCE.findall(text(ROOT / "docs" / "resume.md")) if "[Service]" in code)
    parser = configparser.ConfigParser()
    parser.optionxform = str
    parser.read_string(unit)
    service = parser["Service"]
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(UserError.exit_status)
    assert service["SuccessExitStatus"] == str(cli.INTERRUPTED)
    assert service["KillMode"] == "mixed"
    assert "--run-dir" in service["ExecStart"]
