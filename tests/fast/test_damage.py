"""Damaged files of runs, suites and searches: nothing is lost or taken as absent, and the error is one line.

metrics.csv and evaluations.csv are in test_writers.py, checkpoints in test_checkpoint.py and test_session.py, the
log of actions in test_verify.py.
"""

import json
import re
import shutil

import pytest
from sample_runs import FEW_COLUMNS, read_csv, table, write_checkpoint, write_run

from jaxrl_atari.errors import DamagedMetrics, UserError
from jaxrl_atari.plots import main as plots
from jaxrl_atari.report.page import write_report
from jaxrl_atari.report.suites import read_suite, save_results, suite_results
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.journal import check_journal, repair_journal
from jaxrl_atari.runs.layout import SUITE_FILE
from jaxrl_atari.runs.reading import read_metrics
from jaxrl_atari.suite.sweep import read_plan

pytestmark = pytest.mark.long


def replaced(**values):
    return lambda content: json.dumps(json.loads(content) | values).encode()


UNDERSTOOD = {
    "byte order mark": lambda content: b"\xef\xbb\xbf" + content,
    "CRLF": lambda content: content.replace(b"\n", b"\r\n"),
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "an unknown value": replaced(mine=[1, {"a": None}]),
}
DAMAGED = {
    "cut in half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "binary": lambda content: bytes(range(128, 256)),
    "a list": lambda content: b"[1, 2]",
    "nothing in it": lambda content: b"{}",
}


def short(*returns):
    return {name: column for name, column in table(returns).items() if name in FEW_COLUMNS}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with results and graphs, which take seconds to draw."""
    run_dir = write_run(tmp_path_factory.mktemp("made") / "run", [short(1.0, 2.0, 3.0, 4.0)], game="Pong")
    result = {"checkpoint": "latest", "episodes": 2, "greedy": False, "mean": 1.5, "std": 0.5}
    write_json(
        run_dir / "session_0" / "evaluation_400.json", result | {"returns": [1.0, 2.0], "truncated": [False] * 2}
    )
    verified = {"date": "2026-11-26", "version": "1.0", "rows": 4, "games": 2, "env_steps": 400}
    write_json(run_dir / "session_0" / "verified.json", verified)
    write_report(run_dir)
    return run_dir


@pytest.fixture
def run_dir(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run", copy_function=shutil.copy2)


@pytest.fixture
def suite_dir(run_dir, tmp_path):
    suite_dir = tmp_path / "suite"
    suite_dir.mkdir()
    shutil.copytree(run_dir, suite_dir / "Pong", copy_function=shutil.copy2)
    write_json(suite_dir / SUITE_FILE, read_json(run_dir / "config.json") | {"games": ["Pong", "Breakout"]})
    save_results(suite_results(read_suite(suite_dir), {}))
    return suite_dir


def files(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


FILES = ("config.json", "session_0/evaluation_400.json", "session_0/verified.json")


@pytest.mark.parametrize("damage", UNDERSTOOD.values(), ids=UNDERSTOOD)
@pytest.mark.parametrize("name", FILES)
def test_what_an_editor_saves_is_read(run_dir, name, damage):
    before = write_report(run_dir).read_text()
    (run_dir / name).write_bytes(damage((run_dir / name).read_bytes()))
    after = write_report(run_dir).read_text()
    written = r"on \d{4}-\d\d-\d\d \d\d:\d\d UTC"
    assert re.sub(written, "", after) == re.sub(written, "", before)


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("name", FILES[:2])
def test_a_damaged_file_is_named_and_stays(run_dir, name, damage):
    (run_dir / name).write_bytes(damage((run_dir / name).read_bytes()))
    before = files(run_dir)
    with pytest.raises(UserError, match=rf"{name}: cannot be used \(.*; restore it from a copy"):
        write_report(run_dir)
    assert files(run_dir) == before


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_verified_json_verifies_nothing(run_dir, suite_dir, damage):
    """It is secondary: the reports are written, and that of the run says what is wrong."""
    for session_dir in (run_dir / "session_0", suite_dir / "Pong" / "session_0"):
        path = session_dir / "verified.json"
        path.write_bytes(damage(path.read_bytes()))
    damaged = path.read_bytes()
    page = write_report(run_dir).read_text()
    assert re.search(r"session_0 verified</dt><dd>unknown: .*verified\.json: cannot be used \(.*; restore", page)
    assert path.read_bytes() == damaged
    assert ", verified" not in write_report(suite_dir).read_text()


def test_a_damaged_evaluation_of_a_game_does_not_end_the_report_of_its_suite(suite_dir, capsys):
    path = suite_dir / "Pong" / FILES[1]
    path.write_bytes(b"{}")
    write_report(suite_dir)
    assert f"no report: {path}: cannot be used" in capsys.readouterr().out


def test_unknown_values_of_an_evaluation_are_shown_as_such(run_dir):
    path = run_dir / FILES[1]
    path.write_bytes(replaced(std=None, cut_off=None, returns=None, truncated=None)(path.read_bytes()))
    assert "<td>2</td><td>1.50</td>" in re.sub(r"\s*\n\s*", "", write_report(run_dir).read_text()).replace(" ", "")


@pytest.mark.parametrize(
    "values", [{"returns": "x"}, {"truncated": [None]}, {"session_means": {}}, {"cut_off": [["x"]]}]
)
def test_returns_that_are_no_numbers_are_named(run_dir, values):
    path = run_dir / FILES[1]
    path.write_bytes(replaced(**values)(path.read_bytes()))
    ((name, value),) = values.items()
    with pytest.raises(UserError, match=re.escape(f"{FILES[1]}: {name} is {value!r}; restore the file")):
        write_report(run_dir)


@pytest.mark.parametrize(
    "damage", [*DAMAGED.values(), replaced(games="Pong"), replaced(games=[1])], ids=[*DAMAGED, "a text", "numbers"]
)
def test_a_damaged_suite_is_named_and_stays(suite_dir, damage):
    path = suite_dir / SUITE_FILE
    path.write_bytes(damage(path.read_bytes()))
    before = files(suite_dir)
    for command in (write_report, read_plan, lambda directory: plots([str(directory)])):
        with pytest.raises(UserError, match=r"suite\.json: cannot be used \(.*; restore it from a copy"):
            command(suite_dir)
    assert files(suite_dir) == before


GONE = {
    "empty": b"",
    "binary": bytes(range(128, 256)),
    "zeros": bytes(300),
    "no header": b"1,2\n3,4\n",
    "no score": b"env_steps,optimizer_steps,wall_seconds,return_mean\n400,16,144,1\n",
}


@pytest.mark.parametrize("content", GONE.values(), ids=GONE)
def test_log_points_that_cannot_be_read_are_not_absent(suite_dir, content, capsys):
    session_dir = suite_dir / "Pong" / "session_0"
    write_checkpoint(session_dir, 400)
    meta = session_dir / "checkpoints" / "400" / "meta" / "metadata"
    write_json(meta, read_json(meta) | {"logged_env_steps": 400})
    (session_dir / "metrics.csv").write_bytes(content)
    with pytest.raises(DamagedMetrics, match=r"metrics\.csv: .*; restore it from a copy"):
        read_metrics(session_dir)
    save_results(suite_results(read_suite(suite_dir), {}))
    pong, breakout = read_csv(suite_dir / "results.csv")
    assert re.match(r"damaged: .*session_0/metrics\.csv: .*; restore it from a copy", pong["status"])
    assert breakout["status"] == "waiting"
    assert (session_dir / "metrics.csv").read_bytes() == content
    with pytest.raises(UserError, match="no game that is complete in every suite has a score"):
        plots([str(suite_dir)])
    assert "not drawn: " in capsys.readouterr().err


def test_a_session_before_its_first_log_point_is_no_damaged_one(suite_dir):
    """Its metrics.csv does not exist yet, and its first checkpoint may."""
    session_dir = suite_dir / "Pong" / "session_0"
    write_checkpoint(session_dir, 400)
    (session_dir / "metrics.csv").unlink()
    save_results(suite_results(read_suite(suite_dir), {}))
    assert [row["status"] for row in read_csv(suite_dir / "results.csv")] == ["waiting", "waiting"]


# --- Searches ----------------------------------------------------------------------------------------------------

LINE = b'{"op_code": 0, "worker_id": "a"}\n'


def search_with(tmp_path, content):
    (tmp_path / "trial_0" / "session_0").mkdir(parents=True)
    (tmp_path / "journal.log").write_bytes(content)
    return tmp_path / "journal.log"


@pytest.mark.parametrize("content", [LINE + b"\xff\xfe\n" + LINE, LINE + LINE[:9] + LINE, b"\0" * 50 + b"\n"])
def test_a_journal_with_a_line_that_is_not_understood_is_refused(tmp_path, content):
    journal = search_with(tmp_path, content)
    for read in (check_journal, repair_journal):
        with pytest.raises(UserError, match=r"journal\.log: line \d is not understood .*; restore it from a copy"):
            read(tmp_path)
    assert journal.read_bytes() == content


def test_a_journal_whose_last_line_was_cut_goes_on_without_it(tmp_path):
    """Optuna would append to it: all later starts would end at that line."""
    journal = search_with(tmp_path, LINE + LINE[:9])
    check_journal(tmp_path)
    assert journal.read_bytes() == LINE + LINE[:9], "whoever reads alone leaves it: it may be being written"
    done = repair_journal(tmp_path)
    assert journal.read_bytes() == LINE
    assert (tmp_path / "journal_2.log").read_bytes() == LINE + LINE[:9]
    assert "the file as it was is now journal_2.log" in done


def test_a_search_whose_journal_is_gone_does_not_begin_anew(tmp_path):
    journal = search_with(tmp_path, b"")
    for content in (b"", None):
        if content is None:
            journal.unlink()
        with pytest.raises(
            UserError, match=r"journal\.log: holds no trial, although trial_0 has trained; restore it"
        ):
            repair_journal(tmp_path)
    shutil.rmtree(tmp_path / "trial_0")
    repair_journal(tmp_path)  # it had not begun


def test_a_trial_whose_metrics_are_damaged_is_named(run_dir, search_dir, capsys):
    shutil.copytree(run_dir, search_dir / "trial_0")
    session_dir = search_dir / "trial_0" / "session_0"
    write_checkpoint(session_dir, 400)
    meta = session_dir / "checkpoints" / "400" / "meta" / "metadata"
    write_json(meta, read_json(meta) | {"logged_env_steps": 400})
    (session_dir / "metrics.csv").write_bytes(GONE["empty"])
    assert "trial_0/report.html" not in write_report(search_dir).read_text()
    assert "no report: " in capsys.readouterr().out


TRIALS = "trial,ppo.gamma,score,env_steps,status\n0,0.9,12.5,400,finished\n"


@pytest.fixture
def search_dir(run_dir, tmp_path):
    search_dir = tmp_path / "search"
    search_dir.mkdir()
    described = read_json(run_dir / "config.json") | {"search": {"space": {}, "trials": 1}}
    write_json(search_dir / "search.json", described)
    (search_dir / "trials.csv").write_text(TRIALS)
    return search_dir


@pytest.mark.parametrize(
    "content",
    [
        TRIALS,
        TRIALS + ",,,,\n\n",
        "\ufeff" + TRIALS,
        TRIALS.replace("\n", "\r\n"),
        TRIALS.replace(",", ";"),
        TRIALS.replace(",", "\t"),
    ],
)
def test_trials_that_a_spreadsheet_has_saved_are_read(search_dir, content):
    (search_dir / "trials.csv").write_text(content, newline="")
    page = write_report(search_dir).read_text()
    assert "<td>0</td><td>0.9</td><td>12.50</td><td>400</td><td>finished</td>" in page
    assert "<li>1 trial</li>" in page


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x81", b"a,b\n1,2\n", bytes(90)])
def test_damaged_trials_are_named_with_what_makes_them_again(search_dir, content):
    (search_dir / "trials.csv").write_bytes(content)
    with pytest.raises(
        UserError, match=r"trials\.csv: cannot be used \(.*search --resume SEARCH_DIR` makes it again"
    ):
        write_report(search_dir)
    assert (search_dir / "trials.csv").read_bytes() == content
