"""`verify --retrain`: what it refuses, and whom it does not accuse. tests/run/test_verify.py has what it finds."""

import contextlib
import shutil

import pytest
from small_training import TINY, change, edit_meta, stop_before
from tampering import change_a_weight, edit_metas

from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.session import run_session
from jaxrl_atari.verify.__main__ import main as verify

CONFIG = change(TINY, devices={"check": False})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A session that was stopped between two checkpoints."""
    run_dir = tmp_path_factory.mktemp("run") / "tiny"
    for rollout in (4, 100):
        with contextlib.suppress(KeyboardInterrupt):
            run_session(CONFIG, run_dir / "session_0", stop_requested=stop_before(rollout))
    write_json(run_dir / "config.json", {"config": CONFIG.to_dict()})
    return run_dir


@pytest.fixture
def run_dir(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


@pytest.fixture
def start(run_dir):
    """The env steps of the oldest checkpoint."""
    return Checkpoints(run_dir / "session_0").env_steps()[0]


def retrain(run_dir, step, *options):
    verify([str(run_dir), "--retrain", str(step), *options])


def refused(run_dir, start, words, *options):
    with pytest.raises(UserError, match=words) as error:
        retrain(run_dir, start, *options)
    assert error.value.exit_status == 2


def test_other_bits_from_other_code_are_no_accusation(run_dir):
    edit_metas(run_dir / "session_0", lambda meta: meta["provenance"].update(git_revision="0123456789ab"))
    start = change_a_weight(run_dir / "session_0", CONFIG)
    refused(run_dir, start, "that proves nothing, because the code was 0123456789ab and is ")


def test_other_bits_from_code_of_the_user_are_no_accusation(run_dir, tmp_path):
    """The user's file may have changed since the training, or something that it imports."""
    idea = tmp_path / "an_idea_of_the_test.py"
    idea.touch()
    start = change_a_weight(run_dir / "session_0", CONFIG)
    refused(run_dir, start, "that proves nothing, because ", "--import", str(idea))


def test_a_resume_that_changed_what_decides_no_bits(run_dir, start, capsys):
    """Log, evaluations, name, number of sessions, threads of the emulators; another discount decides bits."""
    session_dir = run_dir / "session_0"

    def resumed(meta):
        meta["config"].update(name="other", sessions=4, output_dir="elsewhere")
        meta["config"]["log"].update(wandb=True, every_env_steps=64)
        meta["config"]["evaluation"].update(every_env_steps=64)
        meta["config"]["env"].update(num_threads=2)
        meta["config"]["devices"].update(evaluator="learner", memory_fraction=0.5, check=True)

    edit_metas(session_dir, resumed)
    retrain(run_dir, start)
    assert " arrays are equal" in capsys.readouterr().out
    edit_metas(session_dir, lambda meta: meta["config"]["ppo"].update(gamma=0.5))
    refused(run_dir, start, r"the config was changed before the next checkpoint \(ppo\.gamma\)")


def test_games_that_cannot_continue_here_are_refused(run_dir, start):
    """The emulator of another version, say, gives another frame than that of the checkpoint."""
    item = run_dir / "session_0" / "checkpoints" / str(start) / "games"
    shutil.rmtree(item)
    item.mkdir()
    refused(run_dir, start, "games cannot be read")


def test_another_machine_is_refused_with_its_reason(run_dir, start):
    edit_metas(run_dir / "session_0", lambda meta: meta["provenance"].update(learns_on=["NVIDIA H200"]))
    refused(run_dir, start, "learns_on")


def test_a_session_that_went_on_elsewhere_between_the_checkpoints_is_not_accused(run_dir):
    session_dir = run_dir / "session_0"
    start = change_a_weight(session_dir, CONFIG)
    provenance = Checkpoints(session_dir).read_meta(start)["provenance"]
    edit_meta(session_dir, start, provenance=provenance | {"learns_on": ["another CPU"]})
    # A checkout with changes that are not committed has that reason already.
    refused(run_dir, start, "that proves nothing, because (.* on another machine|the code was)")


def test_what_cannot_be_trained_again(run_dir):
    session_dir = run_dir / "session_0"
    steps = Checkpoints(session_dir).env_steps()
    refused(run_dir, steps[-1], "no later checkpoint .* is kept")
    refused(run_dir, 7, r"checkpoints/7: no such checkpoint; there are: ")
    edit_meta(session_dir, steps[0], items={})
    refused(run_dir, steps[0], "its games cannot continue")
