"""Writers and progress: files are read back with independent readers, terminal lines are compared as text."""

import errno
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from sample_runs import read_csv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxrl_atari.config import Config, LogConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs import writers as writers_module
from jaxrl_atari.runs.columns import COLUMNS
from jaxrl_atari.runs.reading import read_metrics
from jaxrl_atari.runs.terminal import Pace, ProgressWriter
from jaxrl_atari.runs.writers import CsvWriter, JsonLinesWriter, TensorBoardWriter, make_writers

NAN = float("nan")


def row(env_steps, **values):
    return {"env_steps": env_steps, "updates": env_steps // 2048, "return_ma": NAN, "entropy": None, **values}


def test_the_documentation_defines_every_column():
    documented, group = {}, None
    page = Path(__file__).parents[1] / "docs" / "metrics.md"
    for line in page.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## .*\(`(\w+)`\)", line):
            group = heading[1]
        elif row := re.match(r"\| `(\w+)` \|(.*?)\|", line):
            documented[row[1]] = (group, row[2].strip())
    assert list(documented.items()) == [(name, (column.group, column.unit)) for name, column in COLUMNS.items()]


def test_csv_has_all_columns_and_leaves_unknown_cells_empty(tmp_path):
    writer = CsvWriter(tmp_path / "metrics.csv")
    writer.write(row(10240, value_loss=np.float32(0.1), approx_kl=jnp.float32(2.5e-4), sps=math.inf, loss=3.0))
    text = (tmp_path / "metrics.csv").read_text()  # before it is closed: each row is flushed at once
    writer.close()
    header, line = text.splitlines()
    assert header == ",".join(COLUMNS)
    assert line == "10240,5,,,,,,,,,,0.100000001,,0.000250000012" + "," * 12
    assert np.float32(0.100000001) == np.float32(0.1)


def test_resumed_csv_drops_later_rows(tmp_path):
    path = tmp_path / "metrics.csv"
    writer = CsvWriter(path)
    for env_steps in (10240, 20480, 30720):
        writer.write(row(env_steps, return_ma=env_steps / 100))
    writer.close()
    with path.open("a") as file:
        file.write("40960,20,1234")  # the crash came in the middle of a line
    resumed = CsvWriter(path, start_env_steps=20480)
    resumed.write(row(30720, return_ma=7.0))
    resumed.close()
    assert [(r["env_steps"], r["return_ma"]) for r in read_csv(path)] == [
        ("10240", "102.4"),
        ("20480", "204.8"),
        ("30720", "7"),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_resumed_csv_drops_damaged_rows_and_keeps_the_file(tmp_path):
    path = tmp_path / "metrics.csv"
    damaged = b"env_steps,return_ma,unknown_column\n10240,1.5,9\n\0\0\0\n20480,2.5,9\n20490,2.x,9\n30720,3."
    path.write_bytes(damaged)
    writer = CsvWriter(path, start_env_steps=50_000)
    writer.close()
    assert writer.note == (
        "metrics.csv: 2 lines are damaged and were left out; the first is line 3; columns that this version does not "
        "know were left out: unknown_column; the file as it was is now metrics_damaged.csv"
    )
    assert (tmp_path / "metrics_damaged.csv").read_bytes() == damaged
    assert [(r["env_steps"], r["return_ma"]) for r in read_csv(path)] == [("10240", "1.5"), ("20480", "2.5")]
    assert list(read_metrics(tmp_path)) == list(COLUMNS)


def test_resumed_csv_with_a_damaged_header_is_kept_beside_the_new_one(tmp_path):
    path = tmp_path / "metrics.csv"
    for header, kept, note in (
        ("env_stfps,return_ma", [], "columns that this version does not know were left out: env_stfps"),
        ("env_steps,retwrn_ma", ["10240"], "does not know were left out: retwrn_ma"),
    ):
        path.write_text(damaged := f"{header}\n10240,1.5\n90480,2.5\n")
        writer = CsvWriter(path, start_env_steps=50_000)
        writer.close()
        assert note in writer.note
        whole = tmp_path / "metrics_damaged.csv"
        assert whole.read_text() == damaged
        whole.unlink()
        assert [row["env_steps"] for row in read_csv(path)] == kept


def test_resumed_jsonl_drops_damaged_lines_and_keeps_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(damaged := '{"env_steps": 10}\n{"env_st\n{"env_steps": 20}\n')
    writer = JsonLinesWriter(path, start_env_steps=50)
    writer.close()
    assert writer.note.startswith("metrics.jsonl: line 2 is damaged and was left out; the file as it was is now")
    assert (tmp_path / "metrics_damaged.jsonl").read_text() == damaged
    assert path.read_text() == '{"env_steps": 10}\n{"env_steps": 20}\n'


def test_jsonl_is_valid_json_and_a_resumed_one_drops_later_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    for env_steps in (10240, 20480, 30720):
        writer.write(row(env_steps, entropy=jnp.float32(0.5)))
    writer.close()
    with path.open("a") as file:
        file.write('{"env_steps": 10')
    resumed = JsonLinesWriter(path, start_env_steps=20480)
    resumed.write(row(30720))
    resumed.close()

    def no_constants(name):  # Infinity and NaN are not JSON
        raise AssertionError(name)

    rows = [json.loads(line, parse_constant=no_constants) for line in path.read_text().splitlines()]
    assert [(r["env_steps"], r["return_ma"], r["entropy"]) for r in rows] == [
        (10240, None, 0.5),
        (20480, None, 0.5),
        (30720, None, None),
    ]
    assert all(list(r) == list(COLUMNS) for r in rows)


def scalars(directory, tag):
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_resumed_tensorboard_replaces_later_points(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for env_steps in (10240, 20480, 30720):
        writer.write(row(env_steps, return_mean=env_steps / 2, value_loss=np.float32(0.25), rss_gib=1.0))
    writer.close()
    resumed = TensorBoardWriter(tmp_path, start_env_steps=20480)
    resumed.write(row(30720, return_mean=-1.0))
    resumed.evaluation(25000, 7.25, 0.5)  # it was played while training went on
    resumed.write(row(40960))
    resumed.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
    assert scalars(tmp_path, "charts/return_mean") == [(10240, 5120.0), (20480, 10240.0), (30720, -1.0)]
    assert scalars(tmp_path, "losses/value_loss") == [(10240, 0.25), (20480, 0.25)]
    assert scalars(tmp_path, "system/rss_gib") == [(10240, 1.0), (20480, 1.0)]
    assert scalars(tmp_path, "evaluation/return_mean") == [(25000, 7.25)]
    assert scalars(tmp_path, "evaluation/return_std") == [(25000, 0.5)]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "charts/return_ma" not in events.Tags()["scalars"]  # NaN at each point


def test_tensorboard_resumed_without_a_checkpoint_replaces_all_points(tmp_path):
    for value in (1.0, 2.0):  # the second run has no checkpoint to resume from
        writer = TensorBoardWriter(tmp_path)
        for env_steps in (10240, 20480) if value == 1.0 else (10240,):
            writer.write(row(env_steps, return_mean=value))
        writer.close()
    assert scalars(tmp_path, "charts/return_mean") == [(10240, 2.0)]


def test_tensorboard_needs_no_tensorflow_and_no_torch(tmp_path):
    code = (
        "import sys; sys.modules.update(tensorflow=None, torch=None)\n"  # importing either would raise
        "from pathlib import Path; from jaxrl_atari.runs.writers import TensorBoardWriter\n"
        "assert 'tensorboard' not in sys.modules\n"
        f"TensorBoardWriter(Path({str(tmp_path)!r})).write({{'env_steps': 1}})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


def config(total_env_steps=100 * 2048, **log):
    return Config(total_env_steps=total_env_steps, log=LogConfig(**log))


def test_make_writers_creates_the_selected_writers(tmp_path, capsys):
    for name, log, expected in [
        ("all", {"jsonl": True}, {"metrics.csv", "metrics.jsonl", "events"}),
        ("few", {"tensorboard": False}, {"metrics.csv"}),
    ]:
        directory = tmp_path / name / "session_0"
        writers = make_writers(config(**log), directory, label="session 0")
        for writer in writers:
            writer.progress(2048, {})
            writer.write(row(2048))
            writer.message("hello")
            writer.close()
        assert {path.name.split(".out")[0] for path in directory.iterdir()} == expected
        assert "session 0  hello\n" in capsys.readouterr().out


def test_missing_wandb_names_the_install_command_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_atari\[wandb\]'"):
        make_writers(config(wandb=True), tmp_path / "session_0", label="session 0")
    assert list(tmp_path.iterdir()) == []


WANDB_SCRIPT = """
import sys
from pathlib import Path
from jaxrl_atari.config import Config, LogConfig
from jaxrl_atari.runs.writers import make_writers
log = LogConfig(wandb=True, wandb_project="a project", tensorboard=False)
writers = make_writers(Config(log=log), Path(sys.argv[1]), label="session 0")
for env_steps in (10240, 20480):
    for writer in writers:
        writer.write({"env_steps": env_steps, "return_ma": env_steps / 10, "entropy": float("nan")})
for writer in writers:
    writer.evaluation(15000, 7.25, 0.5)  # it was played while training went on
    writer.write({"env_steps": 30720})
for writer in writers:
    writer.close()
"""


@pytest.mark.timeout(120)
def test_wandb_offline_run_stays_in_the_session_directory(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    session_dir = tmp_path / "qbert_20250101" / "session_0"
    session_dir.mkdir(parents=True)
    (session_dir / "wandb_id").write_text("a1b2c3d4")
    # In a subprocess: wandb starts a service process that would outlive the test.
    result = subprocess.run(
        [sys.executable, "-c", WANDB_SCRIPT, str(session_dir)], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert "Weights & Biases: offline" in result.stdout
    (run_file,) = session_dir.glob("wandb/offline-run-*/run-a1b2c3d4.wandb")
    content = run_file.read_bytes()  # records of protobuf, numbers as JSON text
    for text in ("charts/return_ma", "1024", "2048", "evaluation/return_mean", "7.25", "15000", '"game":"Qbert"'):
        assert text.encode() in content
    assert b"losses/entropy" not in content  # NaN at each point
    assert "wandb sync" in result.stdout


@pytest.mark.parametrize(("marker", "trial"), [("suite.json", "suite_a-Breakout"), ("", "Breakout")])
def test_runs_of_equal_names_in_two_folders_are_two_wandb_runs(tmp_path, monkeypatch, marker, trial):
    asked, run = {}, SimpleNamespace(offline=False, url="", dir="x", define_metric=lambda *_, **__: None)
    wandb = SimpleNamespace(
        init=lambda **options: asked.update(options) or run,
        Settings=lambda **options: None,
        Error=Exception,
    )
    monkeypatch.setattr(writers_module, "import_wandb", lambda: wandb)
    ids = []
    for folder in ("suite_b", "suite_a", "suite_a"):  # the last one: a resumed session
        session_dir = tmp_path / folder / "Breakout" / "session_0"
        session_dir.mkdir(parents=True, exist_ok=True)
        if marker:
            (tmp_path / folder / marker).write_text("{}")
        writers_module.WandbWriter(config(wandb=True), session_dir)
        ids.append(asked["id"])
    assert (asked["group"], asked["name"]) == (trial, f"{trial}-session_0")
    assert ids[0] != ids[1] == ids[2]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def screen(self):
        """The visible lines of a terminal that is wide enough: each line as it was last drawn."""
        return [line.rpartition("\r")[2].replace("\x1b[K", "") for line in self.getvalue().split("\n")]


def test_pace_covers_the_last_minute_without_compilation():
    clock = Clock()
    pace = Pace(clock)
    assert math.isnan(pace.sps)
    clock.now += 500.0  # compiling
    pace.add(2048)
    assert math.isnan(pace.sps)
    for _ in range(100):  # slow at first, 10 steps a second
        clock.now += 1.0
        pace.add(pace._points[-1][1] + 10)
    assert pace.sps == pytest.approx(10.0)
    for _ in range(70):  # then fast
        clock.now += 1.0
        pace.add(pace._points[-1][1] + 1000)
    assert pace.sps == pytest.approx(1000.0)


def running(columns, monkeypatch, terminal=None, **values):
    """A terminal, and its writer after 101 updates of 2,000 env steps in 1 s each."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    terminal, clock = terminal or Terminal(), Clock()
    writer = ProgressWriter(1_000_000, label="session 0", stream=terminal, clock=clock)
    for i in range(1, 102):
        writer.progress(2000 * i, values)
        clock.now += 1.0
    return terminal, writer


VALUES = {"return_ma": 1234.56, "return_mean": 2345.67, "gpu_busy_percent": 87.4}


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            120,
            "session 0  20%  [###..............]  202.0k/1.00M  2000 SPS  ETA 0:06:39  return_ma 1234.6  GPU 87%"
            "  return_mean 2345.7",
        ),
        (100, "session 0  20%  202.0k/1.00M  2000 SPS  ETA 0:06:39  return_ma 1234.6  GPU 87%  return_mean 2345.7"),
        (80, "session 0  20%  202.0k/1.00M  2000 SPS  ETA 0:06:39  return_ma 1234.6  GPU 87%"),
        (78, "session 0  20%  202.0k/1.00M  2000 SPS  ETA 0:06:39  return_ma 1234.6"),
        (40, "session 0  20%  202.0k/1.00M  2000 SPS"),
        (10, "session 0"),
    ],
)
def test_live_line_fits_the_terminal(columns, line, monkeypatch):
    terminal, _ = running(columns, monkeypatch, **VALUES)
    assert terminal.screen()[-1] == line


def test_live_line_is_narrower_than_any_terminal(monkeypatch):
    for columns in range(1, 140):
        terminal, _ = running(columns, monkeypatch, **VALUES)
        assert len(terminal.screen()[-1]) < columns
        assert "\n" not in terminal.getvalue()


def test_live_line_before_the_first_game_and_without_gpu(monkeypatch):
    terminal, _ = running(79, monkeypatch, gpu_busy_percent=NAN, return_ma=NAN)
    line = terminal.screen()[-1]
    assert "return_ma -" in line
    assert "GPU" not in line


def test_messages_appear_above_the_live_line_and_closing_ends_it(monkeypatch):
    terminal, writer = running(80, monkeypatch)
    line = terminal.screen()[-1]
    writer.message("checkpoint saved")
    assert terminal.screen()[-2:] == ["session 0  checkpoint saved", line]
    writer.write(row(10240))
    assert terminal.screen()[-1] == line  # a log point prints no line on a terminal
    writer.close()
    assert terminal.screen()[-2:] == [line, ""]


def test_live_line_is_drawn_at_most_five_times_a_second(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal, clock = Terminal(), Clock()
    writer = ProgressWriter(10**9, label="session 0", stream=terminal, clock=clock)
    for i in range(200):
        clock.now += 0.01
        writer.progress(i, {})
    assert 8 <= terminal.getvalue().count("\r") <= 11


def test_plain_lines_are_aligned_without_a_terminal(monkeypatch):
    stream, writer = running(80, monkeypatch, terminal=io.StringIO())
    assert stream.getvalue() == ""
    writer.message("device: cpu:0")
    writer.write({"env_steps": 10_000, "sps": 999.4, "return_ma": NAN, "return_mean": -20.5, "episodes": 3})
    writer.write({"env_steps": 200_000, "sps": 12345.6, **VALUES, "episodes": 1234})
    writer.close()
    assert stream.getvalue().splitlines() == [
        "session 0  device: cpu:0",
        "session 0  env_steps   10000    1.0%  sps    999  eta   0:08:15  return_ma         -"
        "  return_mean     -20.5  episodes      3",
        "session 0  env_steps  200000   20.0%  sps  12346  eta   0:06:40  return_ma    1234.6"
        "  return_mean    2345.7  episodes   1234  gpu_busy_percent  87",
    ]


def test_a_closed_pipe_does_not_end_training(monkeypatch):
    class Closed(io.StringIO):
        def flush(self):
            raise BrokenPipeError(errno.EPIPE, "closed")

    dropped = []
    monkeypatch.setattr("jaxrl_atari.cli.command.drop_output", lambda: dropped.append(True))
    ProgressWriter(1000, label="session 0", stream=Closed()).message("hello")
    assert dropped


def test_live_line_reaches_the_end(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    writer = ProgressWriter(1000, label="session 0", stream=terminal, clock=Clock())
    writer.progress(990, {})
    writer.progress(1000, {})  # within the 0.2 s between two redraws
    assert terminal.screen()[-1].startswith("session 0 100%")


def test_jsonl_and_tensorboard_are_flushed_at_once(tmp_path):
    writers = [JsonLinesWriter(tmp_path / "metrics.jsonl"), TensorBoardWriter(tmp_path)]
    for writer in writers:
        writer.write(row(10240, return_mean=5.0))
    try:  # before they are closed
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["env_steps"] == 10240
        assert scalars(tmp_path, "charts/return_mean") == [(10240, 5.0)]
    finally:
        for writer in writers:
            writer.close()


def test_all_writers_of_a_resumed_session_drop_later_points(tmp_path):
    for start, steps in ((0, (2048, 4096, 6144)), (4096, (6144, 8192))):
        writers = make_writers(config(jsonl=True), tmp_path, label="session 0", start_env_steps=start)
        for writer in writers:
            for env_steps in steps:
                writer.write(row(env_steps, return_mean=float(start)))
            writer.close()
    expected = [(2048, 0.0), (4096, 0.0), (6144, 4096.0), (8192, 4096.0)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["env_steps"], line["return_mean"]) for line in lines] == expected
    assert [(int(r["env_steps"]), float(r["return_mean"])) for r in read_csv(tmp_path / "metrics.csv")] == expected
    assert scalars(tmp_path, "charts/return_mean") == expected
