"""A suite, as a command: one game fails, a stop is obeyed, and a resume trains what is missing."""

import dataclasses
import re
import signal
import subprocess
import sys
from collections import Counter

from sample_runs import read_csv
from small_training import TINY, change
from user_commands import ROOT

from jaxrl_atari.runs.description import read_config
from jaxrl_atari.suite.sweep import plan_sweep, write_plan

SMALL = dataclasses.replace(TINY, name="suite", total_env_steps=128, sessions=1)


def suite(environment, *words):
    """A process of the command."""
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrl_atari.suite", *map(str, words)], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_sweep_of_which_a_game_fails_is_resumed(tmp_path, environment):
    """A file takes the place of a session; a resume without it trains what is missing."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    write_plan(folder, plan_sweep(SMALL, ["Pong"], {"ppo.learning_rate": [1e-4, 1e-3]}))
    game = folder / "ppo.learning_rate=0.0001/Pong"
    game.mkdir(parents=True)
    (game / "session_0").write_text("in the way")
    process = suite(environment, "--resume", folder, "--trial.parallel", 2)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 1, output + errors
    assert re.search(r"error: 1 of 2 sessions failed \(game Pong .*session 0: .*", errors)
    assert f"python -m jaxrl_atari.suite --resume {folder} runs what is missing" in errors
    rows = {row["suite"]: row["status"] for row in read_csv(folder / "results.csv")}
    assert rows["ppo.learning_rate=0.0001"].startswith("not complete; session 0 failed: ")
    assert rows["ppo.learning_rate=0.001"] == "complete"
    (game / "session_0").unlink()
    process = suite(environment, "--resume", folder, "--log.graphs")
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, output + errors
    assert output.count("finished already") == 1
    assert [row["status"] for row in read_csv(folder / "results.csv")] == ["complete"] * 2
    for value in ("0.0001", "0.001"):
        run_dir = folder / f"ppo.learning_rate={value}" / "Pong"
        assert read_config(run_dir).ppo.learning_rate == float(value)
        assert float(read_csv(run_dir / "session_0/metrics.csv")[0]["learning_rate"]) < float(value)
        assert (run_dir.parent / "report.html").is_file()
    assert (folder / "graphs/comparison.png").is_file()


def test_a_suite_is_stopped_and_says_how_far_it_came(tmp_path, environment):
    config = change(SMALL, total_env_steps=1_000_000)
    (tmp_path / "tiny.py").write_text(f"from jaxrl_atari.config import *\nget_config = lambda: {config!r}\n")
    folder = tmp_path / "suite"
    with suite(
        environment, "--config", tmp_path / "tiny.py", "--run-dir", folder, "--games", "Pong", "--sessions", 2,
        "--trial.parallel", 2,
    ) as process:  # fmt: skip
        seen = Counter()  # a signal during the first update ends a session at once
        for line in process.stdout:
            seen.update(re.findall(r"^game Pong  session \d(?=.* env_steps)", line))
            if len(seen) == 2 and min(seen.values()) > 1:
                break
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, output + errors
    assert errors.splitlines()[-1] == f"stopped; go on with python -m jaxrl_atari.suite --resume {folder}"
    last = [int(read_csv(folder / f"Pong/session_{i}/metrics.csv")[-1]["env_steps"]) for i in range(2)]
    for number, env_steps in enumerate(last):
        assert (folder / f"Pong/session_{number}/checkpoints/{env_steps}").is_dir()
    (row,) = read_csv(folder / "results.csv")
    assert row["status"].startswith("not complete")
    assert (folder / "Pong/trial.json").is_file()
