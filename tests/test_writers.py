"""Writers: what they leave is read back by independent readers, after kills and resumes, too."""

import contextlib
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
from pathlib import Path

import numpy as np
import pytest
import rich
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from user_commands import ROOT, user_environment

from jaxrl_atari.config import Config, LogConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.columns import COLUMNS
from jaxrl_atari.runs.reading import read_evaluations, read_metrics
from jaxrl_atari.runs.writers import CsvWriter, TensorBoardWriter, TerminalWriter, make_writers, set_aside_logs


def row(env_steps, **values):
    return {"env_steps": env_steps, "updates": env_steps // 2048, "return_ma": math.nan, "entropy": None, **values}


def write(session_dir, steps, logged=0, evaluated=0, close=True, **log):
    writers = make_writers(Config(log=LogConfig(**log)), session_dir, logged, evaluated)
    for writer in writers:
        for env_steps in steps:
            writer.write(row(env_steps, return_mean=env_steps / 2 + logged))
            writer.evaluation(
                {"env_steps": env_steps - 5, "episodes": 3, "mean": 7.25 + logged, "std": 0.5, "cut_off": 0}
            )
        if close:
            writer.close()


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
    for group, table in re.findall(r"^## [^\n]*\(`(\w+)`\)$(.*?)(?=^## |\Z)", page, re.M | re.S):
        described = re.findall(r"^\| `(\w+)` \| *(.*?) *\|", table, re.M)
        assert described == [(name, column.unit) for name, column in COLUMNS.items() if column.group == group]


def test_csv_has_all_columns_and_leaves_unknown_cells_empty(tmp_path):
    CsvWriter(tmp_path, 0, 0).write(row(10240, value_loss=float(np.float32(0.1)), sps=math.inf, loss=3.0))
    header, line = (tmp_path / "metrics.csv").read_text().splitlines()
    assert header == ",".join(COLUMNS)
    cells = dict(zip(COLUMNS, line.split(","), strict=True))
    expected = {"env_steps": "10240", "updates": "5", "value_loss": "0.100000001"}
    assert {name: cell for name, cell in cells.items() if cell} == expected


def test_a_resumed_csv_drops_later_and_damaged_rows(tmp_path):
    write(tmp_path, (100, 200, 300), tensorboard=False)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("\0\0\n150x,20\n200,20,1234")  # the crash came in the middle of a line
    write(tmp_path, (300, 400), logged=200, evaluated=100, tensorboard=False)
    metrics, evaluations = read_metrics(tmp_path), read_evaluations(tmp_path)
    assert metrics["env_steps"].tolist() == [100, 200, 300, 400]
    assert metrics["return_mean"].tolist() == [50, 100, 350, 400]
    assert evaluations["env_steps"].tolist() == [95, 295, 395]
    assert evaluations["mean"].tolist() == [7.25, 207.25, 207.25]


@pytest.fixture
def killed(tmp_path):
    """Two sessions that were killed after three log points; the one was resumed, the other begun anew."""
    for name in ("resumed", "anew"):
        (tmp_path / name).mkdir()
        assert in_a_process("write(path, (100, 200, 300), close=False); os.kill(os.getpid(), 9)", tmp_path / name) == -9
        assert len(read_metrics(tmp_path / name)["env_steps"]) == 3
    write(tmp_path / "resumed", (300,), logged=200, evaluated=200)
    set_aside_logs(tmp_path / "anew", print)
    write(tmp_path / "anew", (100,))
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
    for writer in (CsvWriter(tmp_path, 0, 0), TensorBoardWriter(Config(), tmp_path)):
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
    for text in ("charts/return_mean", "1024", "evaluation/return_mean", "7.25", '"game":"Qbert"', "suite_a-Breakout"):
        assert text in content
    assert not re.search("losses/entropy|charts/env_steps", content), "no NaN, and no axis"


# --- Terminal --------------------------------------------------------------------------------------------------------


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
