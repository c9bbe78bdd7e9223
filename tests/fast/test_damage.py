"""Damaged files of runs, suites and searches: named in one line, never taken as absent, never written over.

config.json is in test_files.py, metrics.csv and evaluations.csv in test_writers.py, checkpoints in
test_checkpoint.py, the log of actions in test_verify.py.
"""

import json

import pytest
from sample_runs import read_csv, short, write_checkpoint, write_run
from small_training import contents

from jaxrl_atari.errors import UserError
from jaxrl_atari.plots import main as plots
from jaxrl_atari.report.page import write_report
from jaxrl_atari.report.suites import read_results, save_results
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.layout import SUITE_FILE
from jaxrl_atari.suite.sweep import read_plan

EVALUATION = "session_0/evaluation_400.json"
VERIFIED = "session_0/verified.json"
DAMAGED = {
    "cut in half": lambda content: content[: len(content) // 2],
    "binary": lambda content: bytes(range(128, 256)),
    "nothing in it": lambda content: b"{}",
}


def make_run(run_dir):
    write_run(run_dir, [short(1.0, 2.0, 3.0, 4.0)], game="Pong")
    result = {"checkpoint": "latest", "episodes": 2, "greedy": False, "mean": 1.5, "std": 0.5}
    write_json(run_dir / EVALUATION, result | {"returns": [1.0, 2.0], "truncated": [False] * 2})
    verified = {"date": "2026-11-26", "version": "1.0", "rows": 4, "games": 2, "env_steps": 400}
    write_json(run_dir / VERIFIED, verified)
    return run_dir


@pytest.fixture
def suite_dir(tmp_path):
    suite_dir = tmp_path / "suite"
    make_run(suite_dir / "Pong")
    described = read_json(suite_dir / "Pong" / "config.json")
    write_json(suite_dir / SUITE_FILE, described | {"games": ["Pong", "Breakout"]})
    return suite_dir


def damage_file(path, damage):
    path.write_bytes(damage(path.read_bytes()))


@pytest.mark.parametrize(
    "damage",
    DAMAGED.values(),
    ids=DAMAGED,
)
@pytest.mark.parametrize("name", [EVALUATION, VERIFIED])
def test_a_damaged_result_of_a_session_is_named_and_stays(tmp_path, name, damage):
    run_dir = make_run(tmp_path / "run")
    damage_file(run_dir / name, damage)
    before = contents(run_dir)
    with pytest.raises(UserError, match=f"{name}: "):
        write_report(run_dir)
    assert before.items() <= contents(run_dir).items()  # there may be graphs


@pytest.mark.parametrize(
    "damage",
    [*DAMAGED.values(), lambda content: json.dumps(json.loads(content) | {"games": [1]}).encode()],
    ids=[*DAMAGED, "numbers"],
)
def test_a_damaged_suite_is_named_and_stays(suite_dir, damage):
    damage_file(suite_dir / SUITE_FILE, damage)
    before = contents(suite_dir)
    for command in (write_report, read_plan, lambda directory: plots([str(directory)])):
        with pytest.raises(UserError, match=r"suite\.json: cannot be used"):
            command(suite_dir)
    assert contents(suite_dir) == before


def test_log_points_that_cannot_be_read_are_not_absent(suite_dir):
    session_dir = suite_dir / "Pong" / "session_0"
    write_checkpoint(session_dir, 400)
    content = b"1,2\n3,4\n"
    (session_dir / "metrics.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"session_0/metrics\.csv: "):
        read_results(suite_dir)
    assert (session_dir / "metrics.csv").read_bytes() == content


def test_a_session_before_its_first_log_point_is_no_damaged_one(suite_dir):
    """Its metrics.csv does not exist yet, and its first checkpoint may."""
    session_dir = suite_dir / "Pong" / "session_0"
    write_checkpoint(session_dir, 400)
    (session_dir / "metrics.csv").unlink()
    save_results(read_results(suite_dir, {}), suite_dir)
    assert [row["status"] for row in read_csv(suite_dir / "results.csv")] == ["not complete", "not complete"]
