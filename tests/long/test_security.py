"""Untrusted input: damaged and hostile files of a run end in one clear line, and no code of theirs runs.

`test_hub.py` has the downloads that are refused, and `test_report.py` the pages that show hostile values.
"""

import dataclasses
import json
import shutil

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sample_runs import table, write_metrics
from user_commands import python

from jaxrl_atari.config import Config, EnvConfig, EvaluationConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.__main__ import main as report
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.description import describe, read_config
from jaxrl_atari.runs.layout import meta_file
from jaxrl_atari.runs.reading import is_finished, read_metrics
from jaxrl_atari.suite.sweep import read_plan

CONFIG = Config(name="fuzzed", env=EnvConfig(game="Qbert"))
ELSEWHERE = "../../elsewhere"
DEEP = b"[" * 100_000

fuzz = settings(
    max_examples=40,
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


@st.composite
def hostile_values(draw, sound):
    """A JSON object in which a value, at some depth, is replaced, removed or added."""
    changed = parent = json.loads(json.dumps(sound))
    key = draw(st.sampled_from(sorted(parent)))
    while isinstance(parent[key], dict) and parent[key] and draw(st.booleans()):
        parent = parent[key]
        key = draw(st.sampled_from(sorted(parent)))
    change = draw(st.sampled_from(("replace", "remove", "add")))
    if change == "remove":
        del parent[key]
    else:
        parent[key if change == "replace" else draw(st.text(max_size=5))] = draw(JSON)
    return changed


@st.composite
def damaged_bytes(draw, sound):
    """A file with a part replaced by other bytes."""
    start = draw(st.integers(0, len(sound)))
    end = draw(st.integers(start, min(len(sound), start + draw(st.sampled_from((0, 1, 30, len(sound)))))))
    return sound[:start] + draw(st.binary(max_size=20)) + sound[end:]


def hostile_files(values):
    """Contents of a JSON file that should hold `values`."""
    changed = hostile_values(values).map(lambda changed: json.dumps(changed).encode())
    return changed | damaged_bytes(json.dumps(values).encode())


def one_line_or_result(read, *arguments):
    """The result of a reader, or None where it raises the one error that it may raise, in one line."""
    try:
        return read(*arguments)
    except UserError as error:
        message = str(error)
    assert message
    assert "\n" not in message
    return None


@fuzz
@given(content=hostile_files(describe(CONFIG)))
@example(content=DEEP)
@example(content=b'{"config": {"env": 3}}')
@example(content=b'{"config": null}')
@example(content=json.dumps({"config": {"name": ELSEWHERE}}).encode())
def test_config_json(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    config = one_line_or_result(read_config, tmp_path)
    assert config is None or "/" not in config.name


@fuzz
@given(content=hostile_files({"games": ["Pong", "Qbert"], "vary": {"ppo.epochs": [2, 4]}} | describe(CONFIG)))
@example(content=DEEP)
def test_sweep_json(content, tmp_path):
    (tmp_path / "sweep.json").write_bytes(content)
    one_line_or_result(read_plan, tmp_path)


def test_a_setting_of_a_sweep_lies_in_its_directory(tmp_path):
    (tmp_path / "sweep.json").write_text(
        json.dumps({"games": ["Pong"], "vary": {"network.name": [ELSEWHERE]}} | describe(CONFIG))
    )
    with pytest.raises(UserError, match="expected values that make the name of a directory"):
        read_plan(tmp_path)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("suite.json", {"games": ["Pong", "Qbert", ELSEWHERE], "config": CONFIG.to_dict()}),
        ("search.json", {"config": CONFIG.to_dict(), "search": {"space": {"ppo.epochs": [2, 4]}}}),
    ],
)
@fuzz
@given(data=st.data())
def test_the_report(name, values, data, tmp_path):
    run_dir = tmp_path / "run"
    if not run_dir.exists():
        write_metrics(run_dir / "session_0", table([1.0, 2.0]))
        (run_dir / "config.json").write_text(json.dumps(describe(CONFIG)))
    (run_dir / name).write_bytes(data.draw(hostile_files(values) | st.just(DEEP)))
    one_line_or_result(report, [str(run_dir)])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@fuzz
@given(data=st.data())
def test_metrics_csv(data, tmp_path):
    path = tmp_path / "metrics.csv"
    write_metrics(tmp_path, table([1.0, 2.0, 3.0]))
    path.write_bytes(data.draw(damaged_bytes(path.read_bytes()) | st.binary(max_size=200)))
    found = one_line_or_result(read_metrics, tmp_path)
    assert found is None or all(len(column) == len(found["env_steps"]) for column in found.values())


@pytest.fixture(scope="module")
def run_dir(trained, tmp_path_factory):
    return shutil.copytree(trained("plain"), tmp_path_factory.mktemp("trained") / "run")


@fuzz
@given(data=st.data())
def test_meta_of_a_checkpoint(data, run_dir):
    checkpoints = Checkpoints(run_dir / "session_0")
    step = checkpoints.env_steps()[0]
    path = checkpoints.directory / str(step) / "meta" / "metadata"
    sound = path.read_bytes()
    try:
        path.write_bytes(data.draw(damaged_bytes(sound) | st.just(DEEP)))
        found = one_line_or_result(checkpoints.read_meta, step)
    finally:
        path.write_bytes(sound)
    assert found in (None, json.loads(sound))


SPENT = CONFIG.total_env_steps
META = {
    "config": dataclasses.replace(CONFIG, evaluation=EvaluationConfig(every_env_steps=1_000_000)).to_dict(),
    "env_steps": SPENT,
    "evaluated_env_steps": SPENT,
    "logged_env_steps": SPENT,
}


@fuzz
@given(content=hostile_files(META))
@example(content=DEEP)
def test_the_latest_meta_before_its_digest_is_checked(content, tmp_path):
    """Without a row of the last evaluation, no such session has finished."""
    file = meta_file(tmp_path, SPENT)
    file.parent.mkdir(parents=True, exist_ok=True)
    (file.parents[1] / "evaluation").mkdir(exist_ok=True)
    file.write_bytes(content)
    assert not is_finished(CONFIG, tmp_path)


def test_a_checkpoint_never_goes_through_pickle(run_dir):
    """Python reports every class or function that is looked up while unpickling."""
    script = """if True:
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
    ended = python("-c", script, run_dir)
    assert ended.returncode == 0, ended.stderr
