"""Writers: what they leave is read back by independent readers, also after a kill and a resume."""

import csv
import math
import resource
import sys

import numpy as np
import pytest
from small_training import FakeWandb, Lines, contents
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxrl_atari.config import Config, LogConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.columns import COLUMNS
from jaxrl_atari.runs.logs import TensorBoardWriter, open_logs
from jaxrl_atari.runs.progress import Progress
from jaxrl_atari.runs.reading import read_evaluations, read_metrics
from jaxrl_atari.runs.tables import CsvWriter
from jaxrl_atari.runs.writers import TerminalWriter, WriterGroup


def row(env_steps, **values):
    counted = {"env_steps": env_steps, "updates": env_steps // 2048, "unix_time": 1_000}
    return {**counted, "return_ma": math.nan, "entropy": None, **values}


def open_at(session_dir, logged=0, evaluated=0, starts_anew=False, **options):
    """The writers of a session whose newest log point and evaluation are at `logged` and `evaluated`, and the
    lines for the user."""
    progress = Progress({})
    progress.logged_env_steps, progress.evaluated_env_steps = logged, evaluated
    lines = Lines()
    outputs = WriterGroup([lines])
    try:
        open_logs(
            Config(**options),
            session_dir,
            progress,
            outputs,
            starts_anew=starts_anew,
            was_evaluating=False,
        )
    except UserError:
        outputs.close()
        raise
    return outputs, lines.messages


def write(session_dir, steps, logged=0, evaluated=0, starts_anew=False, close=True, **log):
    """Writes log points and evaluations. `close=False`: as a session that is killed; returns the writer."""
    writer, _ = open_at(session_dir, logged, evaluated, starts_anew, log=LogConfig(**log))
    for env_steps in steps:
        writer.write(row(env_steps, return_mean=env_steps / 2 + logged))
        writer.evaluation(
            {"env_steps": env_steps - 5, "episodes": 3, "mean": 7.25 + logged, "std": 0.5, "unix_time": 1_000}
        )
    if close:
        writer.close()
    return writer


# --- Tables ------------------------------------------------------------------------------------------------------


def test_csv_has_all_columns_and_leaves_unknown_cells_empty(tmp_path):
    writer = CsvWriter(tmp_path, metrics_until=0, evaluations_until=0)
    writer.write(row(10240, value_loss=float(np.float32(0.1)), sps=math.inf))
    writer.evaluation({"env_steps": 10, "episodes": 1, "mean": math.nan, "std": None})
    header, line = (tmp_path / "metrics.csv").read_text().splitlines()
    assert header == ",".join(COLUMNS)
    cells = dict(zip(COLUMNS, line.split(","), strict=True))
    expected = {"env_steps": "10240", "updates": "5", "unix_time": "1000", "value_loss": "0.100000001"}
    assert {name: cell for name, cell in cells.items() if cell} == expected
    assert (tmp_path / "evaluations.csv").read_text().splitlines()[1] == "10,1,,,,,"


def test_what_has_no_column_yet_becomes_one(tmp_path):
    """As an algorithm's own metrics, which may come later than the first log point, and after a resume."""
    writer, _ = open_at(tmp_path)
    for values in (row(100), row(200, novelty=0.5), row(300, novelty=0.25, spread=2.0), row(400)):
        writer.write(values)
        assert max(read_metrics(tmp_path)["env_steps"]) == values["env_steps"], "at no moment is a row lost"
    writer.close()
    open_at(tmp_path, 300, 300)[0].close()
    CsvWriter(tmp_path, metrics_until=300, evaluations_until=300).write(row(500, spread=3.0))
    with (tmp_path / "metrics.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == [*COLUMNS, "novelty", "spread"]
    assert [(cells[0], *cells[-2:]) for cells in lines] == [
        ("100", "", ""), ("200", "0.5", ""), ("300", "0.25", "2"), ("500", "", "3"),
    ]  # fmt: skip
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("losses/novelty")] == [(200, 0.5), (300, 0.25)]


@pytest.mark.parametrize("end", ["400,20,1234", "\0" * 50 + "\n"], ids=["cut", "zeros"])
def test_a_resumed_csv_drops_later_rows_and_the_line_of_a_crash(end, tmp_path):
    write(tmp_path, (100, 200, 300), tensorboard=False)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write(end)
    write(tmp_path, (300, 400), logged=200, evaluated=100, tensorboard=False)
    metrics, evaluations = read_metrics(tmp_path), read_evaluations(tmp_path)
    assert metrics["env_steps"].tolist() == [100, 200, 300, 400]
    assert metrics["return_mean"].tolist() == [50, 100, 350, 400]
    assert evaluations["env_steps"].tolist() == [95, 295, 395]
    assert evaluations["mean"].tolist() == [7.25, 207.25, 207.25]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluations.csv", "metrics.csv"]


def test_a_row_that_is_being_written_is_not_read_yet(tmp_path):
    write(tmp_path, (100, 200), tensorboard=False)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("300,20,1234")
    assert read_metrics(tmp_path)["env_steps"].tolist() == [100, 200]


@pytest.mark.parametrize("content", ["\0" * 50 + "\n", "a,b\n1,2\n", "env_steps,mean\n100\n"])
@pytest.mark.parametrize("name", ["metrics.csv", "evaluations.csv"])
def test_a_table_that_cannot_be_read_is_named_and_kept(tmp_path, name, content):
    """A report and a resume refuse it."""
    write(tmp_path, (100, 200), tensorboard=False)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}: line "):
        (read_metrics if name == "metrics.csv" else read_evaluations)(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"{name}: line "):
        open_at(tmp_path, 200, 195, log=LogConfig(tensorboard=False))
    assert contents(tmp_path) == before


def test_a_full_disk_is_an_error_at_once(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for writer in (
        CsvWriter(tmp_path, metrics_until=0, evaluations_until=0),
        TensorBoardWriter(Config(), tmp_path),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            [writer.write(row(env_steps)) for env_steps in range(1_000)]
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.close()


# --- TensorBoard and Weights & Biases ----------------------------------------------------------------------------


@pytest.mark.parametrize("starts_anew", [False, True])
def test_tensorboard_shows_what_the_tables_have(starts_anew, tmp_path):
    """After a kill: what the killed session has written beyond its checkpoint is gone."""
    killed = write(tmp_path, (100, 200, 300), close=False)
    if starts_anew:
        write(tmp_path, (100,), starts_anew=True)
    else:
        write(tmp_path, (300,), logged=200, evaluated=200)
    killed.close()
    metrics, evaluations = read_metrics(tmp_path), read_evaluations(tmp_path)
    assert metrics["env_steps"].tolist() == ([100] if starts_anew else [100, 200, 300])
    events = EventAccumulator(str(tmp_path)).Reload()
    for tag, table, column in (
        ("charts/return_mean", metrics, "return_mean"),
        ("evaluation/return_mean", evaluations, "mean"),
    ):
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        assert points == [*zip(table["env_steps"], table[column], strict=True)]
    tags = {"charts/return_mean", "charts/updates", "evaluation/return_mean", "evaluation/return_std"}
    assert set(events.Tags()["scalars"]) == tags, "no NaN, and no axis"
    (options,) = events.Tensors("config/text_summary")
    assert b"| ppo.learning_rate | 0.00025 |" in options.tensor_proto.string_val[0]


def test_points_of_tensorboard_have_the_times_of_their_rows(tmp_path):
    """Also after a resume. An evaluation of one game has no standard deviation."""
    tables = CsvWriter(tmp_path, metrics_until=0, evaluations_until=0)
    tables.write(row(100, wall_seconds=10.0, unix_time=1_000))
    tables.write(row(200, wall_seconds=70.0, unix_time=1_060))
    tables.evaluation({"env_steps": 200, "episodes": 1, "mean": 1.0, "std": None, "unix_time": 1_090})
    TensorBoardWriter(Config(), tmp_path).close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.wall_time for event in events.Scalars("charts/wall_seconds")] == [1_000, 1_060]
    assert [event.wall_time for event in events.Scalars("evaluation/return_mean")] == [1_090]
    assert not {"charts/unix_time", "evaluation/return_std"} & set(events.Tags()["scalars"])


@pytest.fixture
def session_with_logs(tmp_path):
    write(tmp_path, (100, 200))
    for name in ("verified.json", "actions/0000000000_0000000100.npz", "wandb_id"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("as it was")
    assert len(contents(tmp_path)) == 6
    return tmp_path


@pytest.mark.parametrize("starts_anew", [False, True])
def test_a_session_that_is_refused_leaves_its_logs_as_they_were(session_with_logs, starts_anew, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(refuses=True))
    before = contents(session_with_logs)
    with pytest.raises(UserError, match="not logged in; run `wandb login`"):
        open_at(session_with_logs, 100, starts_anew=starts_anew, log=LogConfig(wandb=True))
    assert contents(session_with_logs) == before


def test_a_session_continues_its_run_of_wandb_and_one_that_starts_anew_begins_another(
    session_with_logs, monkeypatch
):
    wandb = FakeWandb(refuses=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = LogConfig(wandb=True, tensorboard=False)
    for starts_anew in (False, True, False):
        open_at(session_with_logs, starts_anew=starts_anew, log=log)[0].close()
    old, new, again = wandb.ids
    assert old == "as it was"
    assert old != new == again
    assert (session_with_logs / "wandb_id_2").read_text() == old
    assert wandb.closed == 3


# --- Terminal ----------------------------------------------------------------------------------------------------


POINT = r"session 0  100.0%  env_steps 1,000  return_ma 99.5  sps 250  episodes 3"


def drive(writer):
    for env_steps in range(2, 1_001, 2):
        writer.progress(env_steps, row(env_steps))
        if env_steps == 500:
            writer.message("a message")
    writer.write(row(1_000, return_ma=99.5, sps=250.0, episodes=3))
    writer.close()


def test_a_file_or_pipe_gets_plain_lines(capsys):
    drive(TerminalWriter(1_000, "session 0"))
    assert capsys.readouterr().out.splitlines() == ["session 0  a message", POINT]
    writer = TerminalWriter(1_000, "session 0")  # before a game has ended
    writer.write(row(100, games_in_progress=16, return_in_progress=3.25, length_in_progress=640.0))
    line = "games_in_progress 16  return_in_progress 3.2  length_in_progress 640"
    assert line in capsys.readouterr().out
