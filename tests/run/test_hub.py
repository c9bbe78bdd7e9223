"""Push and pull with the real huggingface_hub and a stand-in for the Hub on loopback."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from small_training import TINY, contents, edit_meta, flip_all

from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.hub.__main__ import main as hub_command
from jaxrl_atari.hub.files import fill_repository
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.layout import checkpoint_env_steps, latest_env_steps
from jaxrl_atari.session import run_session

library = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
from hub_server import TOKEN, serve  # noqa: E402

BUDGET = TINY.total_env_steps


@pytest.fixture
def run_dir(trained, tmp_path):
    path = shutil.copytree(trained("plain"), tmp_path / "breakout_20260101_120000")
    (path / "graphs").mkdir()
    (path / "graphs" / "trial.png").write_bytes(b"a picture")
    (load_policy(path).session_dir / "video_1000.mp4").write_bytes(b"a film")
    return path


@pytest.fixture
def server(monkeypatch):
    with serve() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        library.close_session()


def push(*arguments):
    hub_command(["push", *map(str, arguments)])


def pull(*arguments):
    hub_command(["pull", *map(str, arguments)])


def fails(words, call, *arguments):
    with pytest.raises(UserError) as error:
        call(*arguments)
    assert words in str(error.value), str(error.value)


def checkpoints(names):
    return {"/".join(str(name).split("/")[:3]) for name in names if "/checkpoints/" in str(name)}


def test_a_pushed_run_is_pulled_and_plays(server, run_dir, tmp_path, monkeypatch, capsys):
    push(run_dir, "user/breakout")
    assert capsys.readouterr().out.endswith(f"pushed: {server.url}/user/breakout\n")
    files, original = server.repos["user/breakout"], load_policy(run_dir)
    assert files["replay.mp4"] == b"a film"
    expected = {"config.json", "graphs/trial.png", "session_0/metrics.csv", "session_1/metrics.csv"}
    assert expected <= files.keys()
    assert not [name for name in files if "tfevents" in name]
    assert checkpoints(files) == {f"{original.session_dir.name}/checkpoints/{original.env_steps}"}

    monkeypatch.delenv("HF_TOKEN")  # a public repository needs none
    pull("user/breakout", back := tmp_path / "data" / "back")
    assert contents(back).keys() == files.keys()
    assert [path.name for path in back.parent.iterdir()] == ["back"]
    policy = load_policy(back)
    assert policy.env_steps == original.env_steps
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), policy.params, original.params))
    monkeypatch.chdir(tmp_path)
    pull("user/breakout")
    assert (tmp_path / "data" / "breakout" / "replay.mp4").is_file()


def test_a_push_of_the_latest_checkpoints_can_be_resumed(server, run_dir, tmp_path):
    push(run_dir, "user/breakout", "--checkpoint", "latest")
    pull("user/breakout", back := tmp_path / "back")
    before = [load_policy(run_dir, "latest", session=session).env_steps for session in (0, 1)]
    pushed = {f"session_{session}/checkpoints/{step}" for session, step in enumerate(before)}
    assert checkpoints(server.repos["user/breakout"]) == pushed
    config = replace(read_config(back), total_env_steps=2 * BUDGET)
    run_session(config, back / "session_1", 1)
    assert load_policy(back, "latest", session=1).env_steps > BUDGET + 128


IDEA = """
from jaxrl_atari.networks import register_network
from jaxrl_atari.networks import NatureActorCritic
register_network("network_of_test_hub", NatureActorCritic)
"""


def test_a_run_of_ones_own_is_shared_with_its_code(server, run_dir):
    own = replace(TINY, sessions=2, network=replace(TINY.network, name="network_of_test_hub"))
    write_json(run_dir / "config.json", read_json(run_dir / "config.json") | {"config": own.to_dict()})
    for session_dir in (run_dir / "session_0", run_dir / "session_1"):
        for step in checkpoint_env_steps(session_dir):
            edit_meta(session_dir, step, config=own.to_dict())
    (run_dir / "code").mkdir()
    code = run_dir / "code" / "idea_of_test_hub.py"
    code.write_text(IDEA)
    fails("name the file that registers it: --import FILE", push, run_dir, "user/idea")
    push(run_dir, "user/idea", "--import", code)
    assert server.repos["user/idea"]["code/idea_of_test_hub.py"].decode() == IDEA


def test_a_pull_into_an_empty_folder_keeps_the_folder(server, tmp_path, monkeypatch):
    """The working directory cannot be replaced, and a link to a folder should stay one."""
    server.repos["user/run"] = {"config.json": b"{}", "session_0/checkpoints/1/arrays": b"x"}
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    monkeypatch.chdir(tmp_path / "here")
    for directory in (".", "../link"):
        pull("user/run", directory)
        folder = tmp_path / "here" / directory
        assert contents(folder).keys() == {"config.json", "session_0/checkpoints/1/arrays"}
        assert {path.name for path in folder.iterdir()} == {"config.json", "session_0"}
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "empty").mkdir()
    fails("Repository Not Found", pull, "user/nothing", tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())


def test_a_push_of_the_latest_checkpoints_checks_all_that_it_pushes(run_dir):
    shutil.rmtree(run_dir / "session_0" / "checkpoints")
    shared = checkpoints(repository_files(run_dir, "latest"))
    assert [name.split("/")[0] for name in shared] == ["session_1"]
    newest = load_policy(run_dir, "latest", session=1).env_steps
    flip_all(run_dir / "session_1", newest, "games")
    load_policy(run_dir, "latest", session=1)  # the parameters are sound
    fails("damaged: games", repository_files, run_dir, "latest")


def repository_files(run_dir, checkpoint):
    """The files of a repository: name -> content."""
    with tempfile.TemporaryDirectory() as folder:
        fill_repository(Path(folder), run_dir, "user/breakout", checkpoint)
        return contents(Path(folder))


def card(run_dir, checkpoint="best"):
    found = library.ModelCard(repository_files(run_dir, checkpoint)["README.md"].decode())
    return found.data.to_dict(), " ".join(found.text.split())


def describe_as(run_dir, config):
    """Changes values of the config in config.json; the games have no limit of their own."""
    described = read_json(run_dir / "config.json")
    env = described["config"]["env"] | {"max_frames": None} | config.get("env", {})
    write_json(run_dir / "config.json", described | {"config": described["config"] | config | {"env": env}})


def test_the_card_makes_the_run_findable_and_says_what_it_is(run_dir):
    describe_as(run_dir, {})
    metadata, text = card(run_dir)
    (result,) = metadata["model-index"][0]["results"]
    summary = read_run(run_dir).summary
    score = result["metrics"][0]["value"]
    assert score == f"{summary['score']:.2f} +/- {summary['score_std']:.2f}"
    assert f"**Score {score}**" in text
    assert {"atari", "reinforcement-learning", "ALE/Breakout-v5"} <= set(metadata["tags"])
    assert "to compare with" in text
    assert "an optimistic pick" in text
    assert "an optimistic pick" not in card(run_dir, "latest")[1]

    table = run_dir / "session_1" / "metrics.csv"
    rows = len(table.read_text().splitlines()) - 1
    verified = {"date": "2026-11-27", "version": "1.0", "rows": rows - 1, "games": 3, "env_steps": 400}
    write_json(run_dir / "session_1" / "verified.json", verified)  # and then it trained on
    assert "Verified" not in text + card(run_dir)[1]
    write_json(run_dir / "session_1" / "verified.json", verified | {"rows": rows})
    assert "recomputed from seeds and actions (`verify`): session_1. " in card(run_dir)[1]

    honest = {
        "checkpoint": "latest", "greedy": False, "episodes": 32, "sessions": ["session_0", "session_1"],
        "mean": 2.5, "interval": None,
        "session_means": [1.0, 4.0], "returns": [[1.0], [4.0]],
        "env_steps": [latest_env_steps(run_dir / f"session_{i}") for i in (0, 1)],
    }  # fmt: skip
    write_json(run_dir / "evaluation.json", honest)
    write_json(run_dir / "evaluation_2.json", honest | {"checkpoint": "best", "mean": 9.5})  # not to be quoted
    write_json(run_dir / "evaluation_3.json", honest | {"env_steps": [64, 64], "mean": 8.5})  # before a resume
    assert "mean return **2.50** over 2 sessions of 32 full games. 2 sessions: 1 and 4" in card(run_dir)[1]


@pytest.mark.parametrize(
    ("config", "environment", "is_atari"),
    [
        ({"env": {"protocol": "machado", "clip_rewards": False}}, "Breakout (machado, clip_rewards=false)", True),
        (
            {
                "algorithm": "vtrace",
                "env": {
                    "game": "CartPole-v1",
                    "backend": "gymnasium",
                    "num_threads": 0,
                    "options": {"sutton_barto_reward": True},
                },
            },
            'CartPole-v1 (gymnasium, options={"sutton_barto_reward": true})',
            False,
        ),
    ],
)
def test_the_card_of_other_rules_compares_nothing(run_dir, config, environment, is_atari):
    describe_as(run_dir, config)
    metadata, text = card(run_dir)
    assert metadata["model-index"][0]["results"][0]["dataset"]["type"] == environment
    assert config.get("algorithm", "ppo") in metadata["tags"]
    assert ("atari" in metadata["tags"]) == ("lives" in text) == is_atari
    assert "to compare with" not in text


def test_a_second_push_replaces_the_first(server, run_dir):
    push(run_dir, "user/breakout")
    server.repos["user/breakout"]["session_7/metrics.csv"] = b"earlier run"
    push(run_dir, "user/breakout")
    assert "session_7/metrics.csv" not in server.repos["user/breakout"]
    assert ".gitattributes" in server.repos["user/breakout"]


@pytest.mark.parametrize("name", ["model.safetensors", "session_notes/checkpoints.md"])
def test_a_repository_without_a_run_is_not_replaced(server, run_dir, name):
    server.repos["user/other"] = others = {".gitattributes": b"", "README.md": b"another model", name: b"weights"}
    before = dict(others)
    fails("has files that are not a run of jaxrl_atari", push, run_dir, "user/other")
    assert (others, server.commits) == (before, [])
    fails("user/other: not a run", pull, "user/other", run_dir.parent / "new")
    del others[name]
    push(run_dir, "user/other")  # a repository with a card only, as made on the web site
    assert "config.json" in others


def test_a_private_push_is_never_public(server, run_dir, tmp_path, monkeypatch):
    server.repos["user/public"] = {}
    fails("user/public: a public repository; make it private at", push, run_dir, "user/public", "--private")
    assert (server.repos, server.commits) == ({"user/public": {}}, [])
    # A new repository, an existing one, and one that stays private.
    for options in (["--private"], ["--private"], []):
        push(run_dir, "user/secret", *options)
        assert server.private == {"user/secret"}
    pull("user/secret", tmp_path / "back")
    monkeypatch.delenv("HF_TOKEN")
    fails("Repository Not Found", pull, "user/secret", tmp_path / "new")


def test_what_cannot_be_pushed_or_pulled_leaves_nothing_behind(server, run_dir, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    before = {path.name for path in tmp_path.iterdir()}
    hostile = "session_0/../../outside"
    server.repos["user/hostile"] = {"session_0/checkpoints/1/arrays": b"", hostile: b"x"}
    repos = {**server.repos}
    for words, call, *arguments in (
        ("somebody/breakout", push, run_dir, "somebody/breakout"),
        ("nowhere: not a run directory", push, tmp_path / "nowhere", "user/breakout"),
        ("exists already", pull, "user/x", tmp_path / "full"),
        ("user/nothing", pull, "user/nothing", tmp_path / "new"),
        ("Invalid filename", pull, "user/hostile", tmp_path / "new"),
    ):
        fails(words, call, *arguments)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    fails("token", push, run_dir, "user/breakout")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    library.close_session()
    fails("http://127.0.0.1:1", pull, "user/breakout", tmp_path / "new")
    assert server.repos == repos
    assert {path.name for path in tmp_path.iterdir()} == before
