"""Commands of the pages, run as a user runs them, with options that make them small.

Each one runs in a folder of its own that has `configs` and the run directories of the line, copies of tiny ones.
"""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hub_server
from page_commands import ROOT
from simulated_gpus import simulated
from user_commands import free_address, one_error_line, skip_without_extra

SPEC = ["--env.num-envs", "4", "--env.num-threads", "1", "--ppo.rollout-length", "16",
    "--ppo.minibatch-size", "64",
        "--ppo.epochs", "1"]  # fmt: skip
TINY = ["--env.num-envs", "2", "--ppo.rollout-length", "8", "--ppo.minibatch-size", "16"]
"""With configs/quickstart.py and `SPEC`: the programs of faults/rehearsal.py."""
SHORT = [*SPEC, "--log.every-env-steps", "64", "--log.checkpoint-every-env-steps", "128", "--env.max-frames",
    "120",
         "--total-env-steps", "256"]  # fmt: skip
WHOLE_GAMES = ["--env.max-frames", "108000", "--total-env-steps", "2048"]
SMALL = {
    "train": [*SHORT, "--log.no-graphs"],
    "suite": SHORT,
    "search": [*SHORT, "--log.no-graphs", "--search.trials", "2", "--search.grace-env-steps", "128"],
    "evaluate": ["--episodes", "2", "--num-envs", "2"],
    "benchmark": [*SPEC, "--repeats", "1", "--seconds", "0.2"],
}
"""Options that are added to a command: the last one wins."""
LONGER = {"train": ["--total-env-steps", "384"], "suite": ["--total-env-steps", "2304"]}
"""Options that are added to `--resume`."""
IF_PRESENT = {
    "--evaluation.every-env-steps": ["--evaluation.every-env-steps", "128", "--evaluation.episodes", "1"],
}
"""Options that are added to a command that has the option already."""


class User:
    """A user's folder with `configs`: also the home, so that nothing is read from or written to that of the
    machine."""

    def __init__(self, folder, environment):
        folder.mkdir()
        (folder / "configs").symlink_to(ROOT / "configs")
        (folder / "data").mkdir()
        self.folder, self.environment = folder, environment | {"HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}

    def run(self, module, words):
        """Runs a command, and the other processes of a session that several processes share."""
        words, more = [word.replace("$HOME", str(self.folder)) for word in words], [[]]
        if "--devices.num-processes" in words:
            count = int(words[words.index("--devices.num-processes") + 1])
            more = [["--devices.process-index", str(index)] for index in range(count)]
        command = [sys.executable, "-m", f"jaxrl_atari.{module}", *words]
        where = {"cwd": self.folder, "env": self.environment, "stdin": subprocess.DEVNULL}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen([*command, *each], **where, **pipes) for each in more]
        try:
            outputs = [process.communicate(timeout=900) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]

    def succeeds(self, module, words):
        """Runs a command that has to succeed; returns its output."""
        done = self.run(module, words)
        for status, output, errors in done:
            assert status == 0, output + errors
            assert "Traceback" not in output + errors
            assert not re.search(r"^error:", output + errors, re.M), output + errors
        return done[0][1]


TEMPLATES = {
    "run": ("train", ["--config", "configs/quickstart.py", "--sessions", "2", *SMALL["train"], *TINY]),
    "suite": ("suite", ["--games", "Breakout", "Qbert", "--sessions", "2", *SHORT, *WHOLE_GAMES]),
    "search": ("search", ["--config", "configs/search_qbert.py", *SMALL["search"]]),
}  # fmt: skip
"""Name -> the command that makes it."""


class Templates:
    """Finished runs, suites and searches, each made once."""

    def __init__(self, folder, environment):
        self.user, self.made = User(folder / "user", environment), {}

    def path(self, name) -> Path:
        if name not in self.made:
            module, words = TEMPLATES[name]
            check(module, self.user, words, self.user.succeeds(module, [*words, "--output-dir", name]))
            (self.made[name],) = (self.user.folder / name).iterdir()
        return self.made[name]


def directories(case):
    """The run directories that a command reads."""
    if "--resume" in case.words:
        return [case.words[case.words.index("--resume") + 1]]
    positional = list(itertools.takewhile(lambda word: not word.startswith("--"), case.words))
    if case.module == "hub":
        return positional[1:2] if positional[0] in ("push", "pack") else []
    return positional if case.module in ("evaluate", "plots", "report", "verify") else []


def small(case):
    """The words of a command, with options that make it small."""
    words = [word.replace("localhost:1234", free_address()) for word in case.words]
    if case.module == "hub":
        return words
    if "--resume" in words:
        return words + LONGER[case.module]
    for option, added in IF_PRESENT.items():
        words += added if option in words else []
    if case.module == "suite" and "--games" not in words:
        words += ["--games", "Qbert"]
    return words + SMALL.get(case.module, [])


PROMISED = {
    "evaluate": ("**/evaluation*.json", "cut off"),
    "plots": ("**/*.svg", r"\.png"),
    "report": ("**/report.html", r"report\.html"),
    "devices": ("configs", "memory"),
    "search": ("**/*_best.py", "finished"),
    "hub": ("**/config.json", "pushed: |pulled: |packed: "),
    "verify": ("**/config.json", "(verified|retrained): .* are equal"),
}
"""Command -> files that it leaves, and what it prints."""


def check(module, user, words, output):
    """What a command promises."""

    def newest(pattern):
        return max(user.folder.glob(pattern), key=lambda path: path.stat().st_mtime)

    if module == "train":
        trial = newest("**/trial.json")
        assert json.loads(trial.read_text())["complete"]
        budget = int(words[-words[::-1].index("--total-env-steps")])
        for session in trial.parent.glob("session_*"):
            steps = [int(path.name) for path in (session / "checkpoints").iterdir()]
            assert max(steps) > budget - 64  # a rollout
    elif module == "suite":
        results = newest("**/results.json")
        rows = json.loads(results.read_text())["games"]
        assert all(row["status"].startswith("complete") for row in rows)
        assert all(re.search(rf"^\| .*{row['game']} .* {row['status']} \|$", output, re.M) for row in rows)
        report = "*/report.html" if "--vary" in words else "report.html"
        assert list(results.parent.glob(report))
    elif module == "benchmark":
        assert json.loads(output.splitlines()[-1])
    else:
        pattern, printed = PROMISED[module]
        assert newest(pattern)
        assert re.search(printed, output), output
    if "--video" in words:
        assert newest("**/video_*.mp4")


def run_case(case, folder, environment, templates):
    """Runs a command of a page. A command with an error on its page has to end in that error."""
    skip_without_extra(case.module)
    user = User(folder / "user", environment | dict(variable.split("=", 1) for variable in case.variables))
    if "--devices.gpu" in case.words or "cpu,gpu" in case.words:
        user.environment |= simulated(2)
    for word in directories(case):
        kind = next((kind for kind in ("suite", "search") if kind in word.lower()), "run")
        path = user.folder / (word if kind != "suite" else "/".join(word.split("/")[:2]))
        shutil.copytree(templates.path(kind), path, dirs_exist_ok=True)
    words = small(case)
    if "--retrain" in words:
        first = min(int(path.name) for path in user.folder.glob("**/session_0/checkpoints/*"))
        words[words.index("--retrain") + 1] = str(first)
    with hub_server.serve() as server:
        if case.module == "hub":
            run = templates.path("run")
            files = [file for file in run.glob("**/*") if file.is_file()]
            server.repos["user/breakout"] = {str(file.relative_to(run)): file.read_bytes() for file in files}
            user.environment |= {"HF_ENDPOINT": server.url, "HF_TOKEN": hub_server.TOKEN}
        if not case.error:
            check(case.module, user, words, user.succeeds(case.module, words))
            return
        ((status, output, errors),) = user.run(case.module, words)
    assert status == 2, output + errors
    found, expected = (re.sub(r"\d+(, \d+)*", "N", each) for each in (one_error_line(output + errors), case.error))
    assert found == expected
