"""The record of scores: its script, and that the pages show what scores.csv holds."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from sample_runs import learning_table, table, write_run

from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.errors import UserError

ROOT = Path(__file__).parents[1]
BUDGET = 10_000_000


def load():
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "benchmarks" / "make_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_results = load()


@pytest.fixture
def root(tmp_path):
    """A copy of what the script reads and writes, without the rows."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "docs" / "images").mkdir(parents=True)
    for page in ("README.md", "docs/reproduce.md"):
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_the_pages_show_what_the_table_holds(root):
    rows = make_results.read_rows(ROOT / "benchmarks")
    for name, shown in (
        ("README.md", make_results.game_table(rows)),
        ("docs/reproduce.md", make_results.session_table(rows)),
    ):
        make_results.replace_table(root / name, shown)
        assert (root / name).read_text() == (ROOT / name).read_text(), "run benchmarks/make_results.py"
        make_results.replace_table(root / name, "no table")
        assert shown not in (root / name).read_text()


def test_every_row_has_both_references_and_its_curve_has_its_scores():
    rows = make_results.read_rows(ROOT / "benchmarks")
    assert rows
    curves = {path.name for path in (ROOT / "benchmarks" / "curves").iterdir()}
    for row in rows:
        assert tuple(row) == make_results.COLUMNS
        game = GAMES[row["game"]]
        assert float(row["reference_tutorial"]) == game.tutorial_score
        assert float(row["reference_table"]) == game.reference_score
        path = make_results.curve_file(ROOT / "benchmarks", row)
        if path.name in curves:
            curve = make_results.read_curve(path)
            assert len(curve["env_steps"]) <= 200
            assert curve["env_steps"][-1] == float(row["env_steps"])
            assert curve["return_ma"][-1] == pytest.approx(float(row["return_ma"]), rel=1e-4)
            curves.remove(path.name)
    assert not curves  # each belongs to a row


def test_rows_curves_tables_and_picture_from_runs(root):
    folder = root / "benchmarks"
    finished = [learning_table(GAMES["Qbert"], seed, count=500) for seed in range(2)]
    qbert = write_run(root / "qbert", finished, total_env_steps=BUDGET)
    running = [{name: column[:120] for name, column in learning_table(GAMES["Kaboom"], 0, count=500).items()}]
    kaboom = write_run(root / "kaboom", running, game="Kaboom", total_env_steps=BUDGET)
    for run in (kaboom, qbert, kaboom):  # a run added again replaces its rows
        make_results.add_run(folder, run, "a machine")
    make_results.make(root)
    rows = make_results.read_rows(folder)
    assert [(row["game"], row["seed"]) for row in rows] == [("Kaboom", "0"), ("Qbert", "0"), ("Qbert", "1")]
    assert [row["env_steps"] for row in rows] == ["2400000", "10000000", "10000000"]
    assert (rows[0]["reference_table"], rows[1]["reference_tutorial"]) == ("", "15094")
    assert float(rows[1]["return_ma"]) == pytest.approx(finished[0]["return_ma"][-1], rel=1e-5)
    assert (rows[1]["hardware"], rows[1]["protocol"], rows[1]["weight_decay"]) == ("a machine", "v5", "0")
    assert rows[1]["compute_dtype"] == "bfloat16"  # auto, on a GPU
    curve = make_results.read_curve(make_results.curve_file(folder, rows[2]))
    assert len(curve["env_steps"]) == 200
    assert (curve["env_steps"][0], curve["env_steps"][-1]) == (20_000, BUDGET)
    assert len((root / "docs/images/results.png").read_bytes()) > 10_000
    readme = (root / "README.md").read_text()
    low, high = sorted(float(row["return_ma"]) for row in rows[1:])
    figures = f"{(low + high) / 2:,.0f} | {low:,.0f} to {high:,.0f} | 15,094 | 15,460"
    assert f"| Qbert | v5, weight decay 0 | 2 | 10M | {figures} |" in readme
    assert "| Kaboom | v5, weight decay 0 | 1 | 2.4M of 10M, not finished |" in readme
    assert "| Kaboom | 0 | 2.4M of 10M |" in (root / "docs/reproduce.md").read_text()
    assert "13,154" not in make_results.game_table(rows)


def test_the_arithmetic_that_auto_chose_is_that_of_the_checkpoint(root):
    tables = [learning_table(GAMES["Qbert"], seed, count=500, gpu=False) for seed in range(2)]
    qbert = write_run(root / "qbert", tables, total_env_steps=BUDGET)
    meta = qbert / "session_0" / "checkpoints" / str(BUDGET) / "meta" / "metadata"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"compute_dtype": "bfloat16"}))
    make_results.add_run(root / "benchmarks", qbert, "a machine")
    assert [row["compute_dtype"] for row in make_results.read_rows(root / "benchmarks")] == ["bfloat16", "float32"]


def test_sessions_of_another_protocol_or_weight_decay_have_rows_of_their_own_and_their_references(root):
    folder = root / "benchmarks"
    for seed, (protocol, decay) in enumerate([("v5", 0.01), ("v5", 0), ("machado", 0.01)]):
        tables = [learning_table(GAMES["Qbert"], seed, count=500)]
        run = write_run(root / str(seed), tables, protocol=protocol, total_env_steps=BUDGET)
        described = json.loads((run / "config.json").read_text())
        described["config"]["ppo"]["weight_decay"] = decay
        (run / "config.json").write_text(json.dumps(described | {"git_revision": "0123456789ab+"}))
        make_results.add_run(folder, run, "a machine")
    make_results.make(root)
    rows = make_results.read_rows(folder)
    assert {row["commit"] for row in rows} == {"0123456+"}  # a checkout with changes
    shown = [line.split(" | ") for line in make_results.game_table(rows).splitlines()[2:]]
    assert [(cells[1], cells[2], cells[-3:]) for cells in shown] == [
        ("machado", "1", ["-", "-", "- |"]),
        ("v5, weight decay 0", "1", ["15,094", "15,460", "164 |"]),
        ("v5", "1", ["15,094", "15,460", "164 |"]),
    ]


def test_a_short_curve_is_kept_whole():
    text = "a\n" + "".join(f"{i}\n" for i in range(5))
    assert make_results.thinned(text) == text
    assert make_results.thinned(text, 3) == "a\n0\n2\n4\n"
    assert make_results.thinned(text + "half") == text  # a row that is being written


def test_runs_that_cannot_be_added(root, tmp_path):
    short = write_run(tmp_path / "short", [table([1.0])], total_env_steps=400)
    with pytest.raises(UserError, match="total_env_steps = 400; expected 10,000,000"):
        make_results.add_run(root / "benchmarks", short, "a machine")
    new = write_run(tmp_path / "new", [table([np.nan])], total_env_steps=BUDGET)
    with pytest.raises(UserError, match="no game has ended yet"):
        make_results.add_run(root / "benchmarks", new, "a machine")
    with pytest.raises(UserError, match="--hardware: missing"):
        make_results.main([str(new)])
    (root / "README.md").write_text("no marks")
    with pytest.raises(UserError, match="once each; add them"):
        make_results.make(root)
