"""The record of scores: its script, and that the pages show what scores.csv holds."""

import importlib.util
import re
import shutil

import numpy as np
import pytest
from sample_runs import table, write_run
from user_commands import ROOT

from jaxrl_atari.errors import UserError

BUDGET = 10_000_000
ROW = r"\| (?:Kaboom|Qbert) \|.*"


spec = importlib.util.spec_from_file_location("make_results", ROOT / "benchmarks" / "make_results.py")
make_results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_results)


@pytest.fixture
def root(tmp_path):
    """A copy of what the script reads and writes, without the rows."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "docs" / "images").mkdir(parents=True)
    for page in ("README.md", "docs/reproduce.md"):
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_the_pages_show_what_the_table_holds_and_each_curve_ends_with_its_score(root):
    rows = make_results.read_rows(ROOT / "benchmarks")
    for name, shown in (
        ("README.md", make_results.game_table(rows)),
        ("docs/reproduce.md", make_results.session_table(rows)),
    ):
        make_results.replace_table(root / name, shown)
        assert (root / name).read_text() == (ROOT / name).read_text(), "run benchmarks/make_results.py"
    curves = {path.name for path in (ROOT / "benchmarks" / "curves").iterdir()}
    for row in rows:
        assert tuple(row) == make_results.COLUMNS
        path = make_results.curve_file(ROOT / "benchmarks", row)
        if path.name in curves:
            curve = np.genfromtxt(path, delimiter=",", names=True)
            assert len(curve) <= 200
            assert curve["env_steps"][-1] == float(row["env_steps"])
            assert curve["return_ma"][-1] == pytest.approx(float(row["return_ma"]), rel=1e-4)
            curves.remove(path.name)
    assert not curves  # each belongs to a row


def learned(score, budget=BUDGET):
    """A session's table whose returns climb to a score."""
    points = np.arange(1, 501)
    return table(score * points / 500, env_steps=points * (budget // 500))


def test_rows_curves_tables_and_picture_from_runs(root):
    folder = root / "benchmarks"
    finished = [learned(score) for score in (14_000, 15_000)]
    qbert = write_run(root / "qbert", finished, total_env_steps=BUDGET)
    running = [{name: column[:120] for name, column in learned(100).items()}]
    kaboom = write_run(root / "kaboom", running, game="Kaboom", total_env_steps=BUDGET)
    classic = write_run(root / "classic", finished[:1], protocol="classic", total_env_steps=BUDGET)
    several = [learned(score, budget=500_000) for score in (300, 400, 500)]
    short = write_run(root / "short", several, total_env_steps=500_000)
    for run in (kaboom, qbert, classic, short, kaboom):  # a run added again replaces its rows
        make_results.add_run(folder, run, "a machine")
    make_results.make(root)
    rows = make_results.read_rows(folder)
    found = [(row["game"], row["protocol"], row["seed"], row["env_steps"]) for row in rows]
    assert found == [
        ("Kaboom", "v5", "0", "2400000"), ("Qbert", "classic", "0", "10000000"),
        ("Qbert", "v5", "0", "10000000"), ("Qbert", "v5", "1", "10000000"),
        *[("Qbert", "v5", str(seed), "500000") for seed in range(3)],
    ]  # fmt: skip
    assert float(rows[2]["return_ma"]) == pytest.approx(finished[0]["return_ma"][-1], rel=1e-5)
    curve = np.genfromtxt(make_results.curve_file(folder, rows[3]), delimiter=",", names=True)
    assert (len(curve), curve["env_steps"][0], curve["env_steps"][-1]) == (200, 20_000, BUDGET)
    assert len((root / "docs/images/results.png").read_bytes()) > 10_000
    readme, reproduce = (
        re.sub(" +", " ", (root / page).read_text()) for page in ("README.md", "docs/reproduce.md")
    )
    first, second = (f"{float(row['return_ma']):,.0f}" for row in rows[2:4])
    # CleanRL, Baselines and SLM Lab v4 have references under `classic`; Kaboom has none under `v5`.
    header = re.search(r"\| game \| protocol .*", readme)[0].strip("| ").split(" | ")
    table = [dict(zip(header, line.strip("| ").split(" | "), strict=True)) for line in re.findall(ROW, readme)]
    assert table[0]["interval"].startswith("95% interval ")
    assert [line["interval"] for line in table[1:]] == [f"2 sessions: {first} and {second}", "-", "-"]
    assert [line["sessions"] for line in table] == ["3", "2", "1", "1"]
    assert [line["CleanRL's PPO"] != "-" for line in table] == [False, False, True, False]
    assert [line["SLM Lab's PPO"] != "-" for line in table] == [False, True, False, False], "of 10M env steps"
    assert "| Kaboom | 10,000,000 | 0 | 2,400,000 |" in reproduce


def test_a_run_without_a_finished_game_is_refused(root):
    new = write_run(root / "new", [table([np.nan])], total_env_steps=BUDGET)
    with pytest.raises(UserError, match="no game has ended yet"):
        make_results.add_run(root / "benchmarks", new, "a machine")
