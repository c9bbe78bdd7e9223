"""Every command line of the pages, run as a user runs it, with options that make it small.

    python -m pytest -n 0 -m slow tests/test_commands.py

Each one runs in a folder of its own that has `configs` and the run directories of the line, copies of tiny ones. CI
runs a quick line of each command that needs no extra (`train` makes the run that the others read); the rest are slow.
A line with an error on its page has to end in that error.
"""

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys

import hub_server
import pytest
from test_docs import CASES
from user_commands import ROOT, TWO_GPUS, free_address, one_error_line

SPEC = ["--env.num-envs", "4", "--env.num-threads", "1", "--ppo.rollout-length", "16", "--ppo.minibatch-size", "64",
        "--ppo.epochs", "1"]  # fmt: skip
TINY = ["--env.num-envs", "2", "--ppo.rollout-length", "8", "--ppo.minibatch-size", "16"]
"""With configs/quickstart.py and `SPEC`: the programs of faults/rehearsal.py."""
LENGTH = ["--log.every-env-steps", "64", "--log.checkpoint-every-env-steps", "128", "--log.no-graphs"]
SHORT_GAMES = ["--env.max-frames", "120"]
BUDGET, WHOLE_GAMES = ["--total-env-steps", "256"], ["--total-env-steps", "2048"]
SMALL = {
    "train": [*SPEC, *LENGTH, *SHORT_GAMES, *BUDGET],
    "suite": [*SPEC, *LENGTH, *SHORT_GAMES, *BUDGET, "--log.graphs"],
    "search": [*SPEC, *LENGTH, *SHORT_GAMES, *BUDGET, "--search.trials", "2", "--search.grace-env-steps", "128"],
    "evaluate": ["--episodes", "2", "--num-envs", "2"],
    "benchmark": [*SPEC, "--repeats", "1", "--seconds", "0.2"],
}
"""Options that are added to a command: the last one wins."""

LONGER = {"train": ["--total-env-steps", "384"], "suite": ["--total-env-steps", "2304", "--log.graphs"]}
"""Options that are added to `--resume`."""

IF_PRESENT = {
    "--evaluation.every-env-steps": ["--evaluation.every-env-steps", "128", "--evaluation.episodes", "1"],
    "--report-at": ["--report-at", "128", "256"],
}
"""Options that are added to a command that has the option already."""

QUICK = {
    "evaluate RUN_DIR",
    "plots RUN_DIR",
    "report RUN_DIR",
    "devices --config configs/qbert.py",
    "suite --games Pnog",
}
"""The lines that CI runs."""

ONCE = {case: name for name, case in reversed(CASES.items())}
"""The name of each command: several pages may have it."""


def line(case):
    return " ".join([case.module, *case.words])


def obstacle(case):
    """The reason why a command cannot run on this machine, or None."""
    needed = {"search": ("ray", "optuna"), "hub": ("huggingface_hub",)}.get(case.module.partition(".")[0], ())
    needed += ("torch",) * ("torch" in case.words) + ("envpool",) * ("envpool" in case.words)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def test_the_commands_run_at_least_in_their_majority():
    cannot = [name for name, case in CASES.items() if obstacle(case)]
    assert len(cannot) < 0.2 * len(CASES), cannot
    assert {line(case) for case in CASES.values()} >= QUICK


# --- Folders of a user -----------------------------------------------------------------------------------------------


class User:
    """A user's folder with `configs`: also the home, so that nothing is read from or written to that of the machine."""

    def __init__(self, folder, environment):
        folder.mkdir()
        (folder / "configs").symlink_to(ROOT / "configs")
        (folder / "data").mkdir()
        hub = {"HF_HOME": str(folder / "hub"), "HF_HUB_DISABLE_XET": "1"}
        self.folder, self.environment = folder, environment | {"HOME": str(folder), "MPLBACKEND": "agg"} | hub

    def start(self, module, words):
        words = [word.replace("$HOME", str(self.folder)) for word in words]
        return subprocess.Popen(
            [sys.executable, "-m", f"jaxrl_atari.{module}", *words], cwd=self.folder, env=self.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, module, words):
        """Runs a command, and the other processes of a session that several processes share; returns the first."""
        commands = [words]
        if "--devices.num-processes" in words:
            number = int(words[words.index("--devices.num-processes") + 1])
            commands = [[*words, "--devices.process-index", str(index)] for index in range(number)]
        processes = [self.start(module, each) for each in commands]
        try:
            outputs = [process.communicate(timeout=900) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *output)
            for process, output in zip(processes, outputs, strict=True)
        ]

    def succeeds(self, module, words):
        """Runs a command that has to succeed; returns its output."""
        done = self.run(module, words)
        for each in done:
            assert each.returncode == 0, each.stdout + each.stderr
            assert "Traceback" not in each.stdout + each.stderr
            assert not re.search(r"^error:", each.stdout + each.stderr, re.M), each.stdout + each.stderr
        return done[0].stdout


@pytest.fixture(scope="module")
def template(environment, tmp_path_factory):
    """NAME -> a finished run, suite or search, made once."""
    user, made = User(tmp_path_factory.mktemp("templates") / "user", environment), {}
    commands = {
        "run": ("train", ["--config", "configs/quickstart.py", "--sessions", "2", *SMALL["train"], *TINY]),
        "suite": ("suite", ["--games", "Breakout", "Qbert", "--sessions", "2", *SPEC, *LENGTH, *WHOLE_GAMES]),
        "search": ("search", ["--config", "configs/search_qbert.py", *SMALL["search"]]),
    }  # fmt: skip

    def make(name):
        if name not in made:
            module, words = commands[name]
            output = user.succeeds(module, words := [*words, "--output-dir", name])
            if name == "run":
                check_train(user, words, output)
            (made[name],) = (user.folder / name).iterdir()
        return made[name]

    yield make
    shutil.rmtree(user.folder)


def cut(run_dir):
    """The last row of session 0 is cut short; session 1 has no metrics."""
    metrics = run_dir / "session_0" / "metrics.csv"
    metrics.write_text(metrics.read_text()[:-20])
    (run_dir / "session_1" / "metrics.csv").unlink()


def half(text):
    """No config.json is complete."""

    def damage(run_dir):
        for path in run_dir.glob("**/config.json"):
            path.write_text(text)

    return damage


def empty(run_dir):
    """A run that was killed as it started."""
    for path in run_dir.glob("session_*"):
        shutil.rmtree(path)
    (run_dir / "session_0").mkdir()


DAMAGE = {
    ("plots", "data/cut"): cut,
    ("plots", "data/half"): half('{"config": {"name": "half'),
    ("train", "data/half"): half('{\n "config": {\n  name'),
    ("plots", "data/empty"): empty,
    ("evaluate", "data/empty"): empty,
    ("plots", "data/nowhere"): shutil.rmtree,
}
"""The state of a run directory that a page describes."""


def directories(case):
    """The run directories that a command reads."""
    if "--resume" in case.words:
        return [case.words[case.words.index("--resume") + 1]]
    positional = list(itertools.takewhile(lambda word: not word.startswith("--"), case.words))
    if case.module == "hub":
        return positional[1:2] if positional[0] == "push" else []
    return positional if case.module in ("evaluate", "plots", "report", "search.results") else []


@pytest.fixture
def prepare(environment, template, tmp_path):
    """A user whose folder has what a command needs; nothing of it remains."""
    user = User(tmp_path / "user", environment)

    def make(case):
        user.environment |= dict(variable.split("=", 1) for variable in case.variables)
        if "--devices.gpu" in case.words or "cpu,gpu" in case.words:
            user.environment |= TWO_GPUS
        for word in directories(case):
            kind = next((kind for kind in ("suite", "search") if kind in word.lower()), "run")
            path = user.folder / (word if kind != "suite" else "/".join(word.split("/")[:2]))
            shutil.copytree(template(kind), path, dirs_exist_ok=True)
            DAMAGE.get((case.module, word), lambda _: None)(path)
        return user

    yield make
    shutil.rmtree(user.folder)


@pytest.fixture
def hub(template):
    """A stand-in for the Hub that has a run as user/breakout."""
    with hub_server.serve() as server:
        path = template("run")
        server.repos["user/breakout"] = {
            str(file.relative_to(path)): file.read_bytes() for file in path.glob("**/*") if file.is_file()
        }
        yield server


def small(case):
    """The words of a command, with options that make it small."""
    words = [word.replace("localhost:1234", free_address()) for word in case.words]
    for index, word in enumerate(words):
        if words[index - 1] == "--scale":
            field = word.partition("=")[0]
            words[index] = {"num_envs": "num_envs=4,8", "rollout_length": "rollout_length=16,32"}[field]
    if case.module == "hub" or (case.error and "--resume" in words):
        return words
    if "--resume" in words:
        return words + LONGER[case.module]
    if "torch" in words:  # its sizes are fixed
        return [*words, *SMALL["benchmark"][len(SPEC) :]]
    for option, added in IF_PRESENT.items():
        words += added if option in words else []
    if case.module == "suite" and "--games" not in words:
        words += ["--games", "Qbert"]
    return words + SMALL.get(case.module, [])


# --- What a command promises -----------------------------------------------------------------------------------------


def newest(folder, pattern):
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    assert found, f"no {pattern} in {folder}"
    return found[-1]


def check_train(user, words, output):
    trial = newest(user.folder, "**/trial.json")
    assert json.loads(trial.read_text())["complete"]
    budget = int(words[-words[::-1].index("--total-env-steps")])
    for session in trial.parent.glob("session_*"):
        last = int((session / "metrics.csv").read_text().splitlines()[-1].split(",")[0])
        assert (session / "checkpoints" / str(last)).is_dir()
        assert last > budget - 64  # a rollout


def check_evaluate(user, words, output):
    assert "to compare:" in output or "not compared" in output
    newest(user.folder, "**/evaluation*.json")
    if "--video" in words:
        newest(user.folder, "**/video_*.mp4")


def check_plots(user, words, output):
    folder = user.folder / words[words.index("--output") + 1 if "--output" in words else 0]
    newest(folder, "**/*.png")
    newest(folder, "**/*.svg")


def check_report(user, words, output):
    assert "</html>" in (user.folder / words[0] / "report.html").read_text()


def check_devices(user, words, output):
    assert "estimated memory of a learner device" in output


def check_benchmark(user, words, output):
    result = json.loads(output.splitlines()[-1])
    if "--compare" in words:
        assert len(result["sides"]) >= 2
        assert all(side["rate"]["median"] > 0 for side in result["sides"].values())
        assert result["ratios"]
    elif "--scale" in words:
        assert all(row["end_to_end_sps"]["median"] > 0 for row in result["rows"].values())
        newest(user.folder, "data/scale_*.png")
    elif "--trace" in words:
        assert all((user.folder / path).is_file() for path in result["trace"])
    elif "startup" in words:
        assert set(result["startup"]) == {"cold", "warm"}
    else:
        assert result["figures"]["end_to_end_sps"]["median"] > 0


def check_suite(user, words, output):
    results = newest(user.folder, "**/results.json")
    assert all(game["status"] == "complete" for game in json.loads(results.read_text())["games"])
    assert (results.parent / "results.md").read_text().strip() in output
    assert (results.parent / "report.html").is_file()


def check_search(user, words, output):
    folder = newest(user.folder, "**/trials.md").parent
    assert "finished" in (folder / "trials.md").read_text()
    newest(folder, "*_best.py")


def check_hub(user, words, output):
    if words[0] == "push":
        assert f"pushed: {user.environment['HF_ENDPOINT']}/{words[2]}" in output
    else:
        assert (user.folder / words[2] / "config.json").is_file()
        assert "pulled:" in output


CHECKS = {
    "train": check_train, "evaluate": check_evaluate, "plots": check_plots, "report": check_report,
    "devices": check_devices, "benchmark": check_benchmark, "suite": check_suite, "search": check_search,
    "search.results": check_search, "hub": check_hub,
}  # fmt: skip


def pattern(message):
    """An error without its numbers, addresses and causes, which differ from machine to machine."""
    for what, instead in ((r"https?://[\w.:]+", "URL"), (r"\[Errno.*?\][^)]*", "CAUSE"), (r"\d+(, \d+)*", "N")):
        message = re.sub(what, instead, message)
    return message


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if line(case) in QUICK else pytest.mark.slow) for case, name in ONCE.items()],
)  # fmt: skip
def test_the_command_runs(case, prepare, request):
    if reason := obstacle(case):
        pytest.skip(reason)
    user = prepare(case)
    if case.module == "hub":
        server = request.getfixturevalue("hub")
        user.environment |= {"HF_ENDPOINT": server.url, "HF_TOKEN": hub_server.TOKEN}
    words = small(case)
    if not case.error:
        output = user.succeeds(case.module, words)
        CHECKS[case.module](user, words, output)
        return
    if "no Hugging Face token" in case.error:
        del user.environment["HF_TOKEN"]
    if "cannot be reached" in case.error:
        user.environment["HF_ENDPOINT"] = f"http://{free_address()}"
    if "exists already" in case.error:
        (user.folder / words[-1] / "session_0").mkdir(parents=True)
    (done,) = user.run(case.module, words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert pattern(one_error_line(done.stdout + done.stderr)) == pattern(case.error)
