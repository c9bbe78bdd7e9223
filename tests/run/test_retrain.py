"""`verify --retrain`: a part of a session is trained again to the same bits, and a changed weight is found."""

import contextlib
import importlib.metadata
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from small_training import TINY, abstract_arrays, change, edit_meta, stop_before

from jaxrl_atari import provenance
from jaxrl_atari.errors import UserError, VerificationFailed
from jaxrl_atari.imports.children import IMPORTS_VARIABLE
from jaxrl_atari.runs import description
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.digests import read_digests
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.session import run_session
from jaxrl_atari.verify import retrain as retrain_module
from jaxrl_atari.verify.__main__ import main as verify

pytestmark = pytest.mark.long
CONFIG = change(TINY, total_env_steps=256, devices={"check": False})


@pytest.fixture(scope="module", autouse=True)
def known_revision():
    """The tests may run in a checkout with changes, where nothing says whether the code was the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(description, "_git_revision", lambda: "0123456789ab")
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A session that was stopped between two checkpoints: digests of five checkpoints, of which two are kept."""
    run_dir = tmp_path_factory.mktemp("run") / "tiny"
    for rollout in (4, 100):
        with contextlib.suppress(KeyboardInterrupt):
            run_session(CONFIG, run_dir / "session_0", resume=True, stop_requested=stop_before(rollout))
    write_json(run_dir / "config.json", {"config": CONFIG.to_dict()})
    return run_dir


@pytest.fixture
def run_dir(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def retrain(run_dir, step):
    verify([str(run_dir), "--retrain", str(step)])


def test_every_checkpoint_leaves_its_digests(run_dir):
    written = read_digests(run_dir / "session_0")
    steps = [each.env_steps for each in written]
    assert steps == sorted(set(steps))
    assert len(steps) > len(Checkpoints(run_dir / "session_0").env_steps()) >= 2
    for each in written:
        if each.env_steps in Checkpoints(run_dir / "session_0").env_steps():
            meta = Checkpoints(run_dir / "session_0").read_meta(each.env_steps)
            own = {f"arrays/{path}": digest for path, digest in meta["checksums"].items()}
            assert own.items() <= each.digests.items()
            assert [path for path in each.digests if path.startswith("games/")]


def test_a_part_is_trained_again_to_the_same_bits(run_dir, capsys):
    before = contents(run_dir)
    start = Checkpoints(run_dir / "session_0").env_steps()[0]
    retrain(run_dir, start)
    (target,) = [each for each in read_digests(run_dir / "session_0") if each.env_steps > start][:1]
    line = capsys.readouterr().out.splitlines()[-1]
    arrays = len(target.digests)
    expected = (
        f"retrained: from {start:,} to {target.env_steps:,} env steps, all bits of {arrays} arrays are equal"
    )
    assert line == f"session_0  {expected}"
    assert contents(run_dir) == before


@pytest.mark.parametrize("games_are_lost", [False, True])
def test_a_session_that_trains_nothing_leaves_the_digests_to_the_one_that_trained(games_are_lost, run_dir, capsys):
    """It is resumed for its last evaluation, say, with other software than it was trained with."""
    session_dir = run_dir / "session_0"
    edit_digests(session_dir, lambda line: line["environment"].update(threads=99))
    before = (session_dir / "digests.jsonl").read_bytes()
    *_, start, last = Checkpoints(session_dir).env_steps()
    meta = Checkpoints(session_dir).read_meta(last)
    if games_are_lost:  # new ones are started
        edit_meta(session_dir, last, items={})
    run_session(CONFIG, session_dir, resume=True)
    assert ("new games are started" in capsys.readouterr().out) == games_are_lost
    assert (session_dir / "digests.jsonl").read_bytes() == before
    assert Checkpoints(session_dir).read_meta(last)["checksums"] == meta["checksums"]
    refused(run_dir, start, r"where bits may differ \(threads 99 -> ")


def change_a_weight(run_dir):
    """Changes a weight of the oldest checkpoint, which stays sound in itself. Returns its env steps."""
    session_dir = run_dir / "session_0"
    checkpoints = Checkpoints(session_dir)
    start = checkpoints.env_steps()[0]
    meta = checkpoints.read_meta(start)
    target = abstract_arrays(CONFIG, meta["num_actions"])
    arrays = checkpoints.restore(start, target)
    kernel = np.array(arrays["train_state"].params["dense"]["kernel"])
    kernel[100, 100] += 1e-3
    params = {**arrays["train_state"].params, "dense": {**arrays["train_state"].params["dense"], "kernel": kernel}}
    arrays["train_state"] = arrays["train_state"].replace(params=params)
    games = checkpoints.restore(start, item="games")
    shutil.rmtree(checkpoints.directory / str(start))
    checkpoints.save(start, {"arrays": arrays, "games": games}, meta, meta["score"])
    assert checkpoints.read_meta(start)["checksums"] != meta["checksums"]
    return start


def test_one_changed_weight_is_found(run_dir):
    start = change_a_weight(run_dir)
    with pytest.raises(VerificationFailed, match=r"--retrain .*: \d+ of \d+ arrays differ from those written"):
        retrain(run_dir, start)


def test_every_session_is_trained_again_although_one_differs(run_dir, capsys):
    shutil.copytree(run_dir / "session_0", run_dir / "session_1")
    start = change_a_weight(run_dir)
    edit_digests(run_dir / "session_1", lambda line: line["environment"].update(threads=99))
    shutil.copytree(run_dir / "session_0", run_dir / "session_2")
    with pytest.raises(VerificationFailed) as error:
        retrain(run_dir, start)
    out = capsys.readouterr().out
    for session in (0, 1, 2):
        assert f"session_{session}, --retrain {start}: " in str(error.value)
        assert f"session_{session}, --retrain {start}: " in out


def edit_digests(session_dir, edit):
    path = session_dir / "digests.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        edit(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def refused(run_dir, start, words):
    with pytest.raises(UserError, match=words) as error:
        retrain(run_dir, start)
    assert error.value.exit_status == 2


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ("0123456789ab", "ba9876543210", "the code was 0123456789ab and is ba9876543210 now"),
        ("0123456789ab+", "0123456789ab+", "the code of this package differs from its commit"),
    ],
)
def test_other_bits_from_other_code_are_no_accusation(then, now, words, run_dir, monkeypatch):
    monkeypatch.setattr(description, "_git_revision", lambda: now)
    edit_digests(run_dir / "session_0", lambda line: line["environment"].update(git_revision=then))
    refused(run_dir, change_a_weight(run_dir), f"that proves nothing, because {words}")


@pytest.mark.parametrize(
    ("kept", "helper", "words"),
    [
        (["import idea_helper\n", "edited\n"], "idea_helper.py", "is not the one file of that name"),
        (["edited\n"], "idea_helper.py", "is not the one file of that name"),
        (["import idea_helper\n"], "idea_helper.py", "the run keeps no copy of idea_helper,"),
        (["import idea_helper\n"], "idea_helper/__init__.py", "the run keeps no copy of idea_helper,"),
        (["import idea_helper.part\n"], "idea_helper/part.py", "the run keeps no copy of idea_helper,"),
    ],
)
def test_other_bits_from_code_of_the_user_are_no_accusation(kept, helper, words, run_dir, tmp_path, monkeypatch):
    """`helper` is what the user's file imports from beside it."""
    monkeypatch.setenv(IMPORTS_VARIABLE, "[]")
    monkeypatch.setattr(sys, "path", [*sys.path])
    idea = tmp_path / "an_idea_of_the_test.py"
    (tmp_path / helper).parent.mkdir(exist_ok=True)
    (tmp_path / helper).touch()
    idea.write_text(f"import {helper.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}\n")
    (run_dir / "code").mkdir()
    for number, content in enumerate(kept, 1):
        (run_dir / "code" / f"{idea.stem}{'' if number == 1 else f'_{number}'}.py").write_text(content)
    start = change_a_weight(run_dir)
    try:
        with pytest.raises(UserError, match=f"that proves nothing, because .*{words}") as error:
            verify([str(run_dir), "--retrain", str(start), "--import", str(idea)])
    finally:
        for name in ("idea_helper.part", "idea_helper", idea.stem):
            sys.modules.pop(name, None)
    assert error.value.exit_status == 2


def test_a_resume_that_changed_what_decides_no_bits(run_dir, capsys):
    """Log, evaluations, name, number of sessions, threads of the emulators; another discount decides bits."""
    session_dir = run_dir / "session_0"
    start = Checkpoints(session_dir).env_steps()[0]

    def resumed(line):
        line["config"].update(name="other", sessions=4, output_dir="elsewhere")
        line["config"]["log"].update(wandb=True, every_env_steps=64)
        line["config"]["evaluation"].update(every_env_steps=64)
        line["config"]["env"].update(num_threads=2)
        line["config"]["devices"].update(evaluator="learner", memory_fraction=0.5, check=True)

    edit_digests(session_dir, resumed)
    retrain(run_dir, start)
    assert " arrays are equal" in capsys.readouterr().out
    edit_digests(session_dir, lambda line: line["config"]["ppo"].update(gamma=0.5))
    refused(run_dir, start, r"the config was changed before the next checkpoint \(ppo\.gamma\)")


def test_a_gpu_whose_bits_vary_is_refused(run_dir, monkeypatch):
    """A GPU of this machine says nothing about the devices of the training."""
    gpu = SimpleNamespace(platform="gpu", device_kind="Some GPU")
    monkeypatch.setattr(
        retrain_module, "place_session", lambda config: SimpleNamespace(learner=[gpu], actors=[gpu])
    )
    start = Checkpoints(run_dir / "session_0").env_steps()[0]
    refused(run_dir, start, "it was trained on cpu and would be trained on Some GPU here, where bits may differ")
    on_gpu = {"learns_on": ["Some GPU"], "acts_on": ["Some GPU"]}
    edit_digests(run_dir / "session_0", lambda line: line["environment"].update(on_gpu))
    refused(run_dir, start, "on a GPU without devices.deterministic, where two runs may have other bits")


def test_games_that_cannot_continue_here_are_refused(run_dir):
    """The emulator of another version, say, gives another frame than that of the checkpoint."""
    start = Checkpoints(run_dir / "session_0").env_steps()[0]
    item = run_dir / "session_0" / "checkpoints" / str(start) / "games"
    shutil.rmtree(item)
    item.mkdir()
    refused(run_dir, start, "its games cannot continue here")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("threads", 99, r"where bits may differ \(threads 99 -> "),
        ("versions", {"jax": "0.1"}, r"versions\.jax 0\.1 -> "),
        ("learns_on", ["NVIDIA H100"], r"learns_on"),
        ("compute_dtype", "float16", r"compute_dtype float16 -> "),
        ("gpu_software", {"driver": "550.1"}, r"gpu_software\.driver 550\.1 -> None"),
    ],
)
def test_another_machine_is_refused_with_its_reason(field, value, words, run_dir):
    edit_digests(run_dir / "session_0", lambda line: line["environment"].update({field: value}))
    refused(run_dir, Checkpoints(run_dir / "session_0").env_steps()[0], words)


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_the_libraries_of_a_gpu_are_recorded_where_it_computes(platform, monkeypatch):
    names = ("numpy", "nvidia-ml-py", "nvidia-cudnn-cu12", None)  # a broken package has no name
    installed = [SimpleNamespace(name=name, version="9.1") for name in names]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    device = SimpleNamespace(platform=platform, device_kind="some device")
    found = provenance.find_provenance(
        CONFIG.devices, CONFIG.ppo, SimpleNamespace(learner=[device], actors=[device]), "float32"
    )
    expected = {"driver": None, "nvidia-cudnn-cu12": "9.1"} if platform == "gpu" else {}
    assert found["gpu_software"] == expected


def test_what_cannot_be_trained_again(run_dir, tmp_path):
    steps = Checkpoints(run_dir / "session_0").env_steps()
    with pytest.raises(UserError, match="no later checkpoint was written"):
        retrain(run_dir, steps[-1])
    with pytest.raises(
        UserError, match=r"--retrain 7: there is no checkpoint at this env step; kept are: session_0: "
    ):
        retrain(run_dir, 7)
    with pytest.raises(UserError, match=r"has no session 5$"):
        verify([str(run_dir), "--retrain", str(steps[0]), "--session", "5"])
    config = change(CONFIG, devices={"distributed": True}).to_dict()
    edit_meta(run_dir / "session_0", steps[0], config=config)
    digests = (run_dir / "session_0" / "digests.jsonl").read_bytes()
    edit_digests(run_dir / "session_0", lambda line: line.update(config=config))
    with pytest.raises(UserError, match=r"cannot continue \(games are not recorded with devices\.distributed"):
        retrain(run_dir, steps[0])
    (run_dir / "session_0" / "digests.jsonl").write_bytes(digests)
    edit_meta(run_dir / "session_0", steps[0], config=CONFIG.to_dict())
    edit_meta(run_dir / "session_0", steps[0], items={})
    with pytest.raises(UserError, match="its games cannot continue"):
        retrain(run_dir, steps[0])
    (run_dir / "session_0" / "digests.jsonl").unlink()
    with pytest.raises(UserError, match=r"has no digests\.jsonl"):
        retrain(run_dir, steps[0])
