"""Writers: what they leave is read back by independent readers, after kills and resumes, too."""

import contextlib
import csv
import json
import math
import os
import pty
import re
import resource
import subprocess
import sys
import time
import urllib.request
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import rich
from small_training import FakeWandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from user_commands import ROOT, user_environment

from jaxrl_atari.config import Config, EvaluationConfig, LogConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.columns import COLUMNS
from jaxrl_atari.runs.csv_writer import CsvWriter
from jaxrl_atari.runs.logs import open_logs
from jaxrl_atari.runs.progress import Progress
from jaxrl_atari.runs.reading import read_evaluations, read_metrics
from jaxrl_atari.runs.tables import read_table
from jaxrl_atari.runs.tracking import TensorBoardWriter
from jaxrl_atari.runs.writers import TerminalWriter, Writer, WriterGroup


def row(env_steps, **values):
    return {"env_steps": env_steps, "updates": env_steps // 2048, "return_ma": math.nan, "entropy": None, **values}


class Messages(Writer):
    """A writer that adds the lines for the user to a list."""

    def __init__(self, said):
        self.message = said.append


def open_at(session_dir, logged=0, evaluated=0, starts_anew=False, was_evaluating=False, said=None, **options):
    """The writers of a session whose newest log point and evaluation are at `logged` and `evaluated`.

    Args:
        said: a list that gets the lines for the user.
        options: of the config.
    """
    progress = Progress({})
    progress.logged_env_steps, progress.evaluated_env_steps = logged, evaluated
    outputs = WriterGroup([Messages([] if said is None else said)])
    try:
        open_logs(
            Config(**options),
            session_dir,
            progress,
            outputs,
            starts_anew=starts_anew,
            was_evaluating=was_evaluating,
        )
    except UserError:
        outputs.close()
        raise
    return outputs


def write(session_dir, steps, logged=0, evaluated=0, starts_anew=False, close=True, **log):
    writer = open_at(session_dir, logged, evaluated, starts_anew, log=LogConfig(**log))
    for env_steps in steps:
        writer.write(row(env_steps, return_mean=env_steps / 2 + logged))
        writer.evaluation(
            {"env_steps": env_steps - 5, "episodes": 3, "mean": 7.25 + logged, "std": 0.5, "cut_off": 0}
        )
    if close:
        writer.close()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_a_process(code, session_dir, **environment):
    """Runs code in which `path` is the session directory; returns the exit status."""
    code = (
        "import os, sys; sys.modules.update(tensorflow=None, torch=None); "  # importing either would raise
        f"from test_writers import *; path = Path(sys.argv[1]); {code}"
    )
    environment = user_environment(**environment)
    return subprocess.call([sys.executable, "-c", code, session_dir], cwd=Path(__file__).parent, env=environment)


def test_the_documentation_defines_every_column():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for section, table in re.findall(r"^## [^\n]*\(`(\w+)`\)$(.*?)(?=^## |\Z)", page, re.M | re.S):
        described = re.findall(r"^\| `(\w+)` \| *(.*?) *\|", table, re.M)
        assert described == [(name, column.unit) for name, column in COLUMNS.items() if column.section == section]


def test_csv_has_all_columns_and_leaves_unknown_cells_empty(tmp_path):
    CsvWriter(tmp_path, print, metrics_until=0, evaluations_until=0).write(
        row(10240, value_loss=float(np.float32(0.1)), sps=math.inf)
    )
    header, line = (tmp_path / "metrics.csv").read_text().splitlines()
    assert header == ",".join(COLUMNS)
    cells = dict(zip(COLUMNS, line.split(","), strict=True))
    expected = {"env_steps": "10240", "updates": "5", "value_loss": "0.100000001"}
    assert {name: cell for name, cell in cells.items() if cell} == expected


def test_evaluations_leave_unknown_cells_empty(tmp_path):
    writer = CsvWriter(tmp_path, print, metrics_until=0, evaluations_until=0)
    writer.evaluation({"env_steps": 10, "episodes": 1, "mean": math.nan, "std": None})
    assert (tmp_path / "evaluations.csv").read_text().splitlines()[1] == "10,1,,,,"


def test_what_has_no_column_yet_becomes_one(tmp_path):
    """As an algorithm's own metrics, which may come later than the first log point, and after a resume."""
    writer = open_at(tmp_path)
    for values in (row(100), row(200, novelty=0.5), row(300, novelty=0.25, spread=2.0), row(400)):
        writer.write(values)
        assert max(read_metrics(tmp_path)["env_steps"]) == values["env_steps"], "at no moment is a row lost"
    writer.close()
    open_at(tmp_path, 300, 300).close()
    CsvWriter(tmp_path, print, metrics_until=300, evaluations_until=300).write(row(500, spread=3.0))
    with (tmp_path / "metrics.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == [*COLUMNS, "novelty", "spread"]
    assert [(cells[0], *cells[-2:]) for cells in lines] == [
        ("100", "", ""), ("200", "0.5", ""), ("300", "0.25", "2"), ("500", "", "3"),
    ]  # fmt: skip
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("losses/novelty")] == [(200, 0.5), (300, 0.25)]


def test_a_resumed_csv_drops_later_rows_and_damaged_ones_after_them(tmp_path):
    write(tmp_path, (100, 200, 300), tensorboard=False)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("\0\0\n150x,20\n200,20,1234")  # the crash came in the middle of a line
    write(tmp_path, (300, 400), logged=200, evaluated=100, tensorboard=False)
    metrics, evaluations = read_metrics(tmp_path), read_evaluations(tmp_path)
    assert metrics["env_steps"].tolist() == [100, 200, 300, 400]
    assert metrics["return_mean"].tolist() == [50, 100, 350, 400]
    assert evaluations["env_steps"].tolist() == [95, 295, 395]
    assert evaluations["mean"].tolist() == [7.25, 207.25, 207.25]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluations.csv", "metrics.csv"]


# --- Tables that another program has saved -----------------------------------------------------------------------


def cells_of(session_dir):
    return {name: read_table(session_dir / name).rows for name in ("metrics.csv", "evaluations.csv")}


def saved_by(path, reverse=False, encoding="utf-8", **dialect):
    """Saves a table as other programs do, with Python's csv."""
    with path.open(newline="") as file:
        table = list(csv.reader(file))
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file, **dialect).writerows([cells[::-1] for cells in table] if reverse else table)


def with_decimal_commas(path):
    saved_by(path, delimiter=";")
    path.write_text(path.read_text().replace(".", ","))


def with_empty_rows_and_columns(path):
    path.write_text(path.read_text().replace("\n", ",,\n") + ",,\n\n")


def sorted_the_other_way(path):
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *lines[::-1]]) + "\n")


SPREADSHEETS = {
    "CRLF": saved_by,
    "byte order mark": partial(saved_by, encoding="utf-8-sig"),
    "UTF-16 and tabs": partial(saved_by, encoding="utf-16", delimiter="\t"),
    "semicolons": partial(saved_by, delimiter=";"),
    "quotes": partial(saved_by, quoting=csv.QUOTE_ALL),
    "another order of columns": partial(saved_by, reverse=True),
    "decimal commas": with_decimal_commas,
    "empty rows and columns": with_empty_rows_and_columns,
    "sorted the other way": sorted_the_other_way,
}


@pytest.mark.parametrize("save", SPREADSHEETS.values(), ids=SPREADSHEETS)
def test_a_table_that_a_spreadsheet_has_saved_is_read_and_written_in_full(tmp_path, save):
    write(tmp_path, (100, 200, 300), tensorboard=False)
    before, said = cells_of(tmp_path), []
    as_written = {name: (tmp_path / name).read_bytes() for name in before}
    for name in before:
        save(tmp_path / name)
    assert {name: (tmp_path / name).read_bytes() for name in before} != as_written
    assert [dict(x) for rows in cells_of(tmp_path).values() for x in rows] == [
        dict(x) for rows in before.values() for x in rows
    ]
    writer = CsvWriter(tmp_path, said.append, metrics_until=300, evaluations_until=300)
    assert {name: (tmp_path / name).read_bytes() for name in before} == as_written
    save(tmp_path / "metrics.csv")  # while the session trains
    writer.write(row(400))
    assert read_metrics(tmp_path)["env_steps"].tolist() == [100, 200, 300, 400]
    assert said == []


CUT = {
    "a row cut in half": (lambda text: text.replace("200,0,", "20\n", 1), "line 3: it has 1 cells, the header "),
    "a row without its end": (lambda text: text[:-9], "the last line: it does not end"),
    "no number of env steps": (lambda text: text.replace("200,0,", "#REF!,0,"), "line 3: env_steps is '#REF!'"),
    "env steps that are not finite": (lambda text: text.replace("200,0,", "nan,0,"), "line 3: env_steps is 'nan'"),
    "thousands": (lambda text: text.replace("200,0,", '"1,200",0,'), "line 3: env_steps is '1,200'"),
    "a date for a number": (lambda text: text.replace(",100,", ",05. Jan,"), "line 3: return_mean is '05. Jan'"),
    "a quote that does not end": (lambda text: text.replace("200,0,", '"200,0,'), "line 3: it has 1 cells"),
    "a note": (lambda text: text.replace("200,0,", "well done\n200,0,"), "line 3: it has 1 cells"),
}


@pytest.mark.parametrize(("edit", "problem"), CUT.values(), ids=CUT)
def test_a_table_with_lines_that_are_not_understood_is_set_aside(tmp_path, edit, problem):
    write(tmp_path, (100, 200, 300), tensorboard=False)
    path, said = tmp_path / "metrics.csv", []
    path.write_text(edit(path.read_text()))
    damaged = path.read_bytes()
    kept = read_metrics(tmp_path)["env_steps"].tolist()
    CsvWriter(tmp_path, said.append, metrics_until=300, evaluations_until=300).write(row(400))
    assert (tmp_path / "metrics_2.csv").read_bytes() == damaged
    assert re.match(rf"metrics.csv: \d lines? (is|are) not understood \({re.escape(problem)}", said[0])
    assert said[0].endswith("the file as it was is now metrics_2.csv")
    assert read_metrics(tmp_path)["env_steps"].tolist() == [*kept, 400]
    assert len(kept) >= 2


@pytest.mark.parametrize("name", ["metrics.csv", "evaluations.csv"])
def test_a_line_that_is_not_understood_gives_a_warning(tmp_path, name, caplog):
    write(tmp_path, (100, 200), tensorboard=False)
    with (tmp_path / name).open("a") as file:
        file.write("well done\n")
    read_metrics(tmp_path)
    read_evaluations(tmp_path)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{tmp_path / name}: 1 line is not understood (line 4: ")


@pytest.mark.parametrize("content", ["\0" * 50 + "\n", "a,b\n1,2\n", "env_steps,env_steps\n1,2\n"])
@pytest.mark.parametrize("name", ["metrics.csv", "evaluations.csv"])
def test_a_table_without_a_header_that_is_understood_is_refused_and_left_as_it_is(tmp_path, name, content):
    write(tmp_path, (100, 200), tensorboard=False)
    (tmp_path / name).write_text(content)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"{name}: line 1: .*; restore it from a copy"):
        write(tmp_path, (300,), 200, 200)
    assert contents(tmp_path) == before
    if name == "metrics.csv":
        with pytest.raises(UserError, match=r"metrics.csv: is not understood \(line 1: "):
            read_metrics(tmp_path)


@pytest.mark.parametrize(
    "rotate", [Path.unlink, lambda path: path.write_text(""), lambda path: path.rename(f"{path}.1")]
)
def test_a_table_that_is_rotated_while_the_session_trains_goes_on_as_a_new_file(tmp_path, rotate):
    said = []
    writer = CsvWriter(tmp_path, said.append, metrics_until=0, evaluations_until=0)
    writer.write(row(100))
    rotate(tmp_path / "metrics.csv")
    for env_steps in (200, 300):
        writer.write(row(env_steps))
    assert read_metrics(tmp_path)["env_steps"].tolist() == [200, 300]
    assert said == ["metrics.csv was moved away or emptied while the session trains; it goes on as a new file"]


def test_a_column_of_the_users_own_is_kept(tmp_path):
    write(tmp_path, (100, 200), tensorboard=False)
    path = tmp_path / "metrics.csv"
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([f"note,{header}", *(f'"good, so far",{line}' for line in lines)]) + "\n")
    CsvWriter(tmp_path, print, metrics_until=200, evaluations_until=200).write(row(300))
    assert [cells["note"] for cells in read_table(path).rows] == ["good, so far", "good, so far", ""]


def test_missing_rows_are_named(tmp_path):
    said = []
    write(tmp_path, (100,), tensorboard=False)
    CsvWriter(tmp_path, said.append, metrics_until=200, evaluations_until=0)
    assert said == ["metrics.csv ends at 100 env steps: the rows up to 200 are not there"]


@pytest.mark.parametrize(
    ("left", "evaluates", "line"),
    [
        ("", False, "evaluations.csv ends at 0 env steps: the rows up to 395 are not there"),
        ("one row", False, "evaluations.csv ends at 195 env steps: the rows up to 395 are not there"),
        ("all rows", False, None),
        ("", True, "evaluations.csv is empty: the rows of earlier evaluations are not there"),
        ("one row", True, None),  # that of 395 is still being played
    ],
)
def test_missing_evaluations_are_named(left, evaluates, line, tmp_path):
    write(tmp_path, (200, 400), tensorboard=False)
    path = tmp_path / "evaluations.csv"
    rows = path.read_text().splitlines(keepends=True)
    assert len(rows) == 3
    path.write_text("".join({"": [], "one row": rows[:2], "all rows": rows}[left]))
    said = []
    options = {"evaluation": EvaluationConfig(every_env_steps=100), "log": LogConfig(tensorboard=False)}
    open_at(tmp_path, 400, 395, was_evaluating=evaluates, said=said, **options).close()
    assert said == ([line] if line else [])


def test_points_of_tensorboard_have_the_times_of_their_rows(tmp_path, monkeypatch):
    """Also after a resume; rows of an early version, which had no time, get the present time."""
    monkeypatch.setattr(time, "time", lambda: 5_000.0)
    times = {}
    for name, dates in (("new", [{"unix_time": 1_000}, {"unix_time": 1_060}]), ("old", [{}, {}])):
        session_dir = tmp_path / name
        session_dir.mkdir()
        tables = CsvWriter(session_dir, print, metrics_until=0, evaluations_until=0)
        tables.write(row(100, wall_seconds=10.0, **dates[0]))
        tables.write(row(200, wall_seconds=70.0, **dates[1]))
        tables.evaluation({"env_steps": 200, "mean": 1.0, "std": 0.0, "unix_time": 1_090})
        TensorBoardWriter(Config(), session_dir).close()
        events = EventAccumulator(str(session_dir)).Reload()
        times[name] = [event.wall_time for event in events.Scalars("charts/wall_seconds")]
        assert "charts/unix_time" not in events.Tags()["scalars"]
        assert [event.wall_time for event in events.Scalars("evaluation/return_mean")] == [1_090]
    assert times == {"new": [1_000, 1_060], "old": [5_000, 5_000]}


def test_an_evaluation_of_one_game_has_no_std(tmp_path):
    result = {"env_steps": 200, "episodes": 1, "mean": 1.0, "std": None, "cut_off": 0, "unix_time": 1_090}
    CsvWriter(tmp_path, print, metrics_until=0, evaluations_until=0).evaluation(result)
    assert (tmp_path / "evaluations.csv").read_text().splitlines()[1] == "200,1,1.0,,0,1090"
    writer = TensorBoardWriter(Config(), tmp_path)  # from the table
    writer.evaluation(result | {"env_steps": 300})
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("evaluation/return_mean")] == [200, 300]
    assert "evaluation/return_std" not in events.Tags()["scalars"]


@pytest.fixture
def killed(tmp_path):
    """Two sessions that were killed after three log points; the one was resumed, the other begun anew."""
    for name in ("resumed", "anew"):
        (tmp_path / name).mkdir()
        assert (
            in_a_process("write(path, (100, 200, 300), close=False); os.kill(os.getpid(), 9)", tmp_path / name)
            == -9
        )
        assert len(read_metrics(tmp_path / name)["env_steps"]) == 3
    write(tmp_path / "resumed", (300,), logged=200, evaluated=200)
    write(tmp_path / "anew", (100,), starts_anew=True)
    return tmp_path


def test_every_reader_of_tensorboard_sees_what_the_tables_have(killed):
    """Also its default one, in a server as a user starts it."""
    tags, runs = ["charts/return_mean", "evaluation/return_mean"], {}
    for name in ("resumed", "anew"):
        metrics, evaluations = read_metrics(killed / name), read_evaluations(killed / name)
        tables = (metrics["env_steps"], metrics["return_mean"]), (evaluations["env_steps"], evaluations["mean"])
        runs[name] = [np.transpose(table).tolist() for table in tables]
        events = EventAccumulator(str(killed / name)).Reload()
        assert [[[event.step, event.value] for event in events.Scalars(tag)] for tag in tags] == runs[name]
        (options,) = events.Tensors("config/text_summary")
        assert b"| ppo.learning_rate | 0.00025 |" in options.tensor_proto.string_val[0]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(killed), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        address = next(match[1] for line in server.stderr if (match := re.search(r"(http://\S+)", line)))

        def ask(path):
            with urllib.request.urlopen(f"{address}data/plugin/{path}") as answer:
                return json.load(answer)

        while len(found := ask("scalars/tags")) < 2:
            time.sleep(0.2)
        shown = {name: [ask(f"scalars/scalars?run={name}&tag={tag}") for tag in tags] for name in runs}
        server.terminate()
    assert set(found["resumed"]) == {*tags, "charts/updates", "evaluation/return_std"}, "no NaN, and no axis"
    assert {name: [[point[1:] for point in chart] for chart in charts] for name, charts in shown.items()} == runs


def test_a_full_disk_is_an_error_at_once(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for writer in (
        CsvWriter(tmp_path, print, metrics_until=0, evaluations_until=0),
        TensorBoardWriter(Config(), tmp_path),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            [writer.write(row(env_steps)) for env_steps in range(1_000)]
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.close()


def test_missing_wandb_names_the_install_command_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_atari\[wandb\]'"):
        write(tmp_path, [], wandb=True, tensorboard=False)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def session_with_logs(tmp_path):
    write(tmp_path, (100, 200))
    for name in ("verified.json", "actions/0000000000_0000000100.npz", "wandb_id"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("as it was")
    assert len(contents(tmp_path)) == 6
    return tmp_path


@pytest.mark.parametrize("starts_anew", [False, True])
@pytest.mark.parametrize(
    ("wandb", "message"),
    [(None, "wandb is not installed"), (FakeWandb(refuses=True), "not logged in; run `wandb login`")],
)
def test_logs_that_wandb_refuses_stay_as_they_were(session_with_logs, wandb, message, starts_anew, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    before = contents(session_with_logs)
    with pytest.raises(UserError, match=message):
        open_at(session_with_logs, 100, starts_anew=starts_anew, log=LogConfig(wandb=True))
    assert contents(session_with_logs) == before


def test_damaged_digests_are_refused_before_a_log_is_cut_and_the_run_of_wandb_begins(
    session_with_logs, monkeypatch
):
    wandb = FakeWandb(refuses=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (session_with_logs / "digests.jsonl").write_text("{")
    before = contents(session_with_logs)
    with pytest.raises(UserError, match=r"digests\.jsonl: damaged"):
        open_at(session_with_logs, 100, log=LogConfig(wandb=True))
    assert contents(session_with_logs) == before
    assert wandb.ids == []


def test_a_session_continues_its_run_of_wandb_and_one_that_starts_anew_begins_another(
    session_with_logs, monkeypatch
):
    wandb = FakeWandb(refuses=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    said = []
    log = LogConfig(wandb=True, tensorboard=False)
    open_at(session_with_logs, log=log).close()
    open_at(session_with_logs, starts_anew=True, said=said, log=log).close()
    open_at(session_with_logs, log=log).close()
    old, new, again = wandb.ids
    assert old == "as it was"
    assert old != new == again
    assert (session_with_logs / "wandb_id_2").read_text() == old
    assert "what was logged before is in metrics_2.csv, evaluations_2.csv, wandb_id_2" in said[0]
    assert wandb.closed == 3


def test_an_offline_run_of_wandb_stays_in_the_session_directory(tmp_path):
    """In a process: wandb starts a service that would outlive the test."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    session_dir = tmp_path / "suite_a" / "Breakout" / "session_0"
    session_dir.mkdir(parents=True)
    (session_dir / "wandb_id").write_text("a1b2c3d4")
    (tmp_path / "suite_a" / "suite.json").touch()
    code = "write(path, (1024, 2048), wandb=True, tensorboard=False)"
    assert in_a_process(code, session_dir, WANDB_MODE="offline", HOME=str(tmp_path)) == 0
    (run_file,) = session_dir.glob("wandb/offline-run-*/run-a1b2c3d4.wandb")
    content = run_file.read_bytes().decode(errors="replace")  # records of protobuf, numbers as JSON text
    for text in (
        "charts/return_mean",
        "1024",
        "evaluation/return_mean",
        "7.25",
        '"game":"Qbert"',
        "suite_a-Breakout",
    ):
        assert text in content
    assert not re.search("losses/entropy|charts/env_steps", content), "no NaN, and no axis"


# --- Terminal ----------------------------------------------------------------------------------------------------


def drive(writer):
    for env_steps in range(2, 1_001, 2):
        writer.progress(env_steps, row(env_steps))
        if env_steps == 500:
            writer.message("a message")
            time.sleep(0.25)
    writer.write(row(1_000, return_ma=99.5, episodes=3))
    writer.close()


@pytest.mark.parametrize(("columns", "rest"), [("130", "  return_mean -  episodes 3 ━+"), ("80", "  re… ")])
def test_a_terminal_shows_a_live_line_from_the_start_to_the_end(monkeypatch, columns, rest):
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", columns)
    rich.reconfigure()  # it reads COLUMNS once
    with os.fdopen(slave, "w") as terminal, redirect_stdout(terminal):
        drive(TerminalWriter(1_000, "session 0"))
    shown = b""
    with contextlib.suppress(OSError):  # the end of what was written
        while True:
            shown += os.read(master, 4_096)
    os.close(master)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", shown.decode()))
    assert "session 0  a message" in lines
    figures = rf"return_ma 99.5  sps [\d,]+  eta 0:00:00{rest}"
    assert re.fullmatch(rf"session 0  100.0%  env_steps 1,000  {figures}", lines[-2])
    assert len(lines) < 20, "it is drawn twice a second"


def test_a_file_or_pipe_gets_plain_lines(capsys):
    drive(TerminalWriter(1_000, "session 0"))
    message, point = capsys.readouterr().out.splitlines()
    assert message == "session 0  a message"
    figures = r"env_steps 1,000  return_ma 99.5  sps [\d,]+  eta 0:00:00  return_mean -  episodes 3"
    assert re.fullmatch(rf"session 0  100.0%  {figures}", point)


def test_before_a_game_has_ended_the_line_shows_the_games_in_progress(capsys):
    writer = TerminalWriter(1_000, "session 0")
    games = {"games_in_progress": 16, "return_in_progress": 3.25, "length_in_progress": 640.0}
    writer.progress(100, {**games, "entropy": 1.79, "approx_kl": 0.00312})
    writer.write(row(100, updates=1))
    writer.progress(200, {"return_ma": 4.0, "return_mean": 5.0, "episodes": 1, "entropy": 1.5, "approx_kl": 0.01})
    writer.write(row(200, return_ma=4.0, return_mean=5.0, episodes=1))
    first, second = capsys.readouterr().out.splitlines()
    life = "16 games in progress: mean return 3.2 after 640 env steps  entropy 1.79  approx_kl 0.0031"
    assert first.endswith(life)
    assert second.endswith("return_mean 5.0  episodes 1  entropy 1.50  approx_kl 0.0100")
