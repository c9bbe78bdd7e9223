"""Untrusted input: damaged and hostile files of a run end in one clear line, and no code of theirs runs."""

import json
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sample_runs import table, write_metrics, write_run
from test_evaluate import write_session

from jaxrl_atari.config import Config, EnvConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.pages import write_report
from jaxrl_atari.report.search_records import Record, read_records, write_record
from jaxrl_atari.report.summary import write_trial_summary
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.config_file import CONFIG_FILE, read_config
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.meta import SESSION_FIELDS, meta_checksum
from jaxrl_atari.runs.progress import Progress
from jaxrl_atari.runs.reading import read_metrics
from jaxrl_atari.runs.writers import CsvWriter
from jaxrl_atari.search.files import read_search, write_search
from jaxrl_atari.search.space import Choice, LogUniform, SearchConfig
from jaxrl_atari.suite.suite import read_suite_file, write_suite_file

CONFIG = Config(name="fuzzed", env=EnvConfig(game="Qbert"))

fuzz = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,  # CI tries the same files every time
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=20),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=5,
)


def paths_in(value, path=()):
    """The paths of all values inside a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_in(inner, (*path, key))


@st.composite
def hostile_values(draw, sound):
    """A JSON value in which up to three values are replaced, removed or added."""
    changed = json.loads(json.dumps(sound))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(paths_in(changed))))
        if not path:
            return draw(JSON)
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        change = draw(st.sampled_from(("replace", "remove", "add")))
        if change == "replace":
            parent[path[-1]] = draw(JSON)
        elif change == "remove":
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=5))] = draw(JSON)
        if changed == {}:
            break
    return changed


@st.composite
def damaged_bytes(draw, sound):
    """A file with a part replaced by other bytes."""
    start = draw(st.integers(0, len(sound)))
    end = draw(st.integers(start, min(len(sound), start + draw(st.sampled_from((0, 1, 30, len(sound)))))))
    return sound[:start] + draw(st.binary(max_size=20)) + sound[end:]


def hostile_files(values):
    """Contents of a JSON file that should hold `values`."""
    sound = json.dumps(values).encode()
    return hostile_values(values).map(lambda changed: json.dumps(changed).encode()) | damaged_bytes(sound)


def one_line_or_result(read, *arguments):
    """The result of a reader, or None where it raises the one error that it may raise, in one line."""
    try:
        return read(*arguments)
    except UserError as error:
        message = str(error)
    assert message
    assert "\n" not in message
    return None


DEEP = b"[" * 100_000


@fuzz
@given(content=hostile_files(describe(CONFIG)))
@example(content=DEEP)
@example(content=b'{"config": {"env": 3}}')
@example(content=b'{"config": {"name": "../../elsewhere"}}')
def test_config_json(content, tmp_path):
    (tmp_path / CONFIG_FILE).write_bytes(content)
    config = one_line_or_result(read_config, tmp_path)
    assert config is None or (isinstance(config, Config) and "/" not in config.name)


SUITE_GAMES = ["Pong", "Qbert"]


@fuzz
@given(content=hostile_files({"games": SUITE_GAMES, "config": CONFIG.to_dict()}))
@example(content=DEEP)
@example(content=json.dumps({"games": ["../../elsewhere"], "config": CONFIG.to_dict()}).encode())
def test_suite_json(content, tmp_path):
    (tmp_path / "suite.json").write_bytes(content)
    found = one_line_or_result(read_suite_file, tmp_path)
    assert found is None or not any("/" in game and not game.startswith("ALE/") for game in found[1])


def test_a_sound_suite_json_is_read(tmp_path):
    write_suite_file(tmp_path, CONFIG, SUITE_GAMES)
    assert read_suite_file(tmp_path) == (CONFIG, SUITE_GAMES, [])


SEARCH = SearchConfig(space={"ppo.learning_rate": LogUniform(1e-5, 1e-3), "ppo.epochs": Choice((2, 4))})


@fuzz
@given(content=hostile_files({"config": CONFIG.to_dict(), "search": SEARCH.to_dict()}))
@example(content=DEEP)
def test_search_json(content, tmp_path):
    (tmp_path / "search.json").write_bytes(content)
    found = one_line_or_result(read_search, tmp_path)
    assert found is None or isinstance(found[1], SearchConfig)


def test_a_sound_search_json_is_read(tmp_path):
    write_search(tmp_path, CONFIG, SEARCH)
    assert read_search(tmp_path) == (CONFIG, SEARCH)


@fuzz
@given(content=hostile_files({"number": 0, "fields": {"ppo.epochs": 2}, "status": "finished", "reason": "",
                              "score": 1.5, "env_steps": 100}))  # fmt: skip
@example(content=DEEP)
def test_record_json(content, tmp_path):
    record = Record(0, {"ppo.epochs": 2}, "finished", score=1.5)
    write_record(tmp_path, record)
    assert read_records(tmp_path) == {0: record}
    (tmp_path / "trial_0" / "record.json").write_bytes(content)
    found = one_line_or_result(read_records, tmp_path)
    assert found is None or set(found) == {0}


few = settings(fuzz, max_examples=25)


@few
@given(content=hostile_files(describe(CONFIG) | {"resumed": [{"date": "2026-11-22"}]}))
@example(content=DEEP)
def test_the_report_of_a_run(content, tmp_path):
    if not (tmp_path / "session_0").exists():
        write_metrics(tmp_path / "session_0", table([1.0, 2.0]))
    (tmp_path / CONFIG_FILE).write_bytes(content)
    assert one_line_or_result(write_report, tmp_path) in (None, tmp_path / "report.html")


@few
@given(content=hostile_files({"games": SUITE_GAMES, "config": CONFIG.to_dict()}))
@example(content=json.dumps({"games": ["../elsewhere", "a\0b"], "config": CONFIG.to_dict()}).encode())
def test_the_report_of_a_suite(content, tmp_path):
    (tmp_path / "suite.json").write_bytes(content)
    assert one_line_or_result(write_report, tmp_path) in (None, tmp_path / "report.html")


SESSION_META = {
    "config": CONFIG.to_dict(),
    "num_actions": 6,
    "env_steps": 10,
    "updates": 1,
    "wall_seconds": 1.5,
    "best_score": 2.5,
    "score": 2.5,
    "statistics": {"episodes": 2, "returns": [1.0, 4.0], "lengths": [5.0, 6.0], "points": [2.5]},
    "format_version": 3,
    "package_version": "0.1.0",
    "shapes": {"x": "float32[1]"},
    "checksums": {"x": "0123456789abcdef"},
}


def signed(values):
    """A meta as an attacker would write it: hostile, with the right checksum."""
    if isinstance(values, dict):
        values = values | {"checksum": meta_checksum(values)}
    return json.dumps(values).encode()


@fuzz
@given(content=hostile_values(SESSION_META).map(signed) | damaged_bytes(signed(SESSION_META)))
@example(content=DEEP)
def test_meta_of_a_checkpoint(content, tmp_path):
    step_dir = tmp_path / "checkpoints" / "10"
    (step_dir / "meta").mkdir(parents=True, exist_ok=True)
    (step_dir / "meta" / "metadata").write_bytes(content)
    checkpoints = Checkpoints(tmp_path)
    one_line_or_result(checkpoints.best_step)
    target = {"x": np.zeros(1, np.float32)}
    assert one_line_or_result(checkpoints.restore, 10, target) is None  # it has no arrays
    meta = one_line_or_result(checkpoints.read_meta, 10, SESSION_FIELDS)
    if meta is not None:
        progress = Progress(meta, 0)
        progress.count(100, [(1.0, 5)], 1)
        assert np.isfinite(progress.record_score())


def test_a_sound_meta_is_read(tmp_path):
    test_meta_of_a_checkpoint.hypothesis.inner_test(signed(SESSION_META), tmp_path)
    assert Checkpoints(tmp_path).read_meta(10, SESSION_FIELDS)["updates"] == 1


@pytest.fixture(scope="module")
def sound_csv(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound")
    write_metrics(path / "session_0", table([1.0, 2.0, 3.0]))
    return (path / "session_0" / "metrics.csv").read_bytes()


@fuzz
@given(data=st.data())
def test_metrics_csv(data, sound_csv, tmp_path):
    if not (tmp_path / CONFIG_FILE).exists():
        write_run(tmp_path, [table([1.0, 2.0, 3.0])])
    path = tmp_path / "session_0" / "metrics.csv"
    content = data.draw(damaged_bytes(sound_csv) | st.binary(max_size=200))
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = one_line_or_result(read_metrics, path.parent)
        one_line_or_result(write_trial_summary, tmp_path)
    assert found is None or all(len(column) == len(found["env_steps"]) for column in found.values())
    writer = CsvWriter(path, 10**9)
    writer.close()
    assert (path.with_name("metrics_damaged.csv").exists()) == bool(writer.note)
    if writer.note:
        assert path.with_name("metrics_damaged.csv").read_bytes() == content
        path.with_name("metrics_damaged.csv").unlink()
    again = CsvWriter(path, 10**9)
    again.close()
    assert again.note == "", "what is left is sound"


def test_a_checkpoint_never_goes_through_pickle(tmp_path):
    """Python reports every class or function that is looked up while unpickling."""
    write_session(tmp_path / "session_0")
    script = """
        import pickle, sys
        seen = []
        sys.addaudithook(lambda event, arguments: seen.append(arguments) if event.startswith("pickle.") else None)
        pickle.loads(pickle.dumps(OSError))
        assert seen, "the hook sees nothing"
        import jax
        from jaxrl_atari import load_policy
        seen.clear()
        load_policy(sys.argv[1])
        assert not seen, seen
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
