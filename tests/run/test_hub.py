"""Push and pull with the real huggingface_hub and a stand-in for the Hub on loopback."""

import dataclasses
import shutil

import jax
import pytest
from small_training import edit_meta

from jaxrl_atari.config import Config, EnvConfig, LogConfig, PPOConfig
from jaxrl_atari.config_dicts import config_from_dict
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.hub.__main__ import main as hub_command
from jaxrl_atari.hub.files import repository_files
from jaxrl_atari.imports.children import IMPORTS_VARIABLE
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.layout import checkpoint_env_steps
from jaxrl_atari.session import run_session

library = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
from hub_server import TOKEN, serve  # noqa: E402

BUDGET = 1024
CONFIG = Config(
    sessions=2,
    total_env_steps=BUDGET,
    env=EnvConfig(game="Breakout", num_envs=4),
    ppo=PPOConfig(rollout_length=16, minibatch_size=64, epochs=1),
    log=LogConfig(every_env_steps=256, checkpoint_every_env_steps=512, graphs=False),
)


def train(config, run_dir):
    for session in (0, 1):
        run_session(config, run_dir / f"session_{session}", session, resume=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "breakout_20260101_120000"
    train(CONFIG, path)
    write_json(path / "config.json", describe(CONFIG))
    return path


@pytest.fixture
def run_dir(trained, tmp_path):
    path = shutil.copytree(trained, tmp_path / trained.name)
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
    assert sorted(path.relative_to(back).as_posix() for path in back.rglob("*") if path.is_file()) == sorted(files)
    assert [path.name for path in back.parent.iterdir()] == ["back"]
    policy = load_policy(back)
    assert policy.env_steps == original.env_steps
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), policy.params, original.params))
    monkeypatch.chdir(tmp_path)
    pull("user/breakout")
    assert (tmp_path / "data" / "breakout" / "replay.mp4").is_file()


@pytest.mark.long
def test_a_push_of_the_latest_checkpoints_can_be_resumed_everywhere(server, run_dir, tmp_path):
    push(run_dir, "user/breakout", "--checkpoint", "latest")
    pull("user/breakout", back := tmp_path / "back")
    before = [load_policy(run_dir, "latest", session=session).env_steps for session in (0, 1)]
    pushed = {f"session_{session}/checkpoints/{step}" for session, step in enumerate(before)}
    assert checkpoints(server.repos["user/breakout"]) == pushed
    config = config_from_dict(read_json(back / "config.json")["config"] | {"total_env_steps": 2 * BUDGET})
    train(config, back)
    for session in (0, 1):
        assert load_policy(back, "latest", session=session).env_steps > BUDGET + 512
    shutil.rmtree(run_dir / "session_0" / "checkpoints")
    for chosen in ("latest", before[1]):
        assert checkpoints(repository_files(run_dir, "user/x", chosen)) == {f"session_1/checkpoints/{before[1]}"}


def test_a_pack_of_the_latest_checkpoints_has_the_parameters_of_every_session(run_dir, tmp_path):
    packed = tmp_path / "packed"
    hub_command(["pack", str(run_dir), str(packed), "--checkpoint", "latest", "--rounded", "false"])
    for session in (0, 1):
        original, copy = (load_policy(folder, "latest", session=session) for folder in (run_dir, packed))
        assert copy.env_steps == original.env_steps
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), copy.params, original.params))
    assert not [path for path in packed.rglob("*") if "opt_state" in path.name]


IDEA = """
from jaxrl_atari.network_interface import register_network
from jaxrl_atari.networks import NatureActorCritic
register_network("network_of_test_hub", NatureActorCritic)
"""


@pytest.mark.long
def test_a_run_of_ones_own_is_shared_with_its_code(server, run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv(IMPORTS_VARIABLE, "[]")
    own = dataclasses.replace(CONFIG, network=dataclasses.replace(CONFIG.network, name="network_of_test_hub"))
    write_json(run_dir / "config.json", read_json(run_dir / "config.json") | {"config": own.to_dict()})
    for session_dir in (run_dir / "session_0", run_dir / "session_1"):
        for step in checkpoint_env_steps(session_dir):
            edit_meta(session_dir, step, config=own.to_dict())
    (run_dir / "code").mkdir()
    code = run_dir / "code" / "idea_of_test_hub.py"
    code.write_text(IDEA)
    fails("name the file that registers it: --import FILE", push, run_dir, "user/idea")
    push(run_dir, "user/idea", "--import", code)
    files = server.repos["user/idea"]
    assert files["code/idea_of_test_hub.py"].decode() == IDEA
    assert "session_0/digests.jsonl" not in files
    push(run_dir, "user/idea", "--checkpoint", "latest", "--import", code)
    assert "session_0/digests.jsonl" in server.repos["user/idea"]
    hub_command(["pack", str(run_dir), str(tmp_path / "packed"), "--import", str(code)])
    assert (tmp_path / "packed" / "code" / code.name).read_text() == IDEA


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
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert names == {"config.json", "session_0/checkpoints/1/arrays"}
        assert {path.name for path in folder.iterdir()} == {"config.json", "session_0"}
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "empty").mkdir()
    fails("Repository Not Found", pull, "user/nothing", tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())


def test_a_pack_that_fails_leaves_nothing_behind(run_dir, tmp_path, monkeypatch):
    """The second try would say that the folder exists already."""
    video = load_policy(run_dir).session_dir / "video_1000.mp4"
    video.unlink()
    video.symlink_to("/proc/self/mem")  # a file that cannot be read
    with pytest.raises(OSError, match="Input/output error"):
        hub_command(["pack", str(run_dir), str(tmp_path / "packed")])
    assert {path.name for path in tmp_path.iterdir()} == {run_dir.name}


def test_a_copy_with_parameters_alone_is_not_pushed_as_whole_checkpoints(run_dir, tmp_path):
    hub_command(["pack", str(run_dir), str(packed := tmp_path / "packed"), "--checkpoint", "latest"])
    fails("choose best or an env step", repository_files, packed, "user/x", "latest")
    assert checkpoints(repository_files(packed, "user/x", "best"))


def test_a_damaged_checkpoint_is_not_pushed(run_dir):
    policy = load_policy(run_dir)
    arrays = policy.session_dir / "checkpoints" / str(policy.env_steps) / "arrays"
    largest = max(arrays.rglob("[0-9]*"), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    fails("damaged", repository_files, run_dir, "user/x", "best")
    fails("checkpoints/7: no such checkpoint", repository_files, run_dir, "user/x", 7)


def test_a_push_of_the_latest_checkpoints_checks_all_that_it_pushes(run_dir, capsys):
    shutil.rmtree(run_dir / "session_0" / "checkpoints")
    repository_files(run_dir, "user/x", "latest")
    assert capsys.readouterr().out == "session_0 has no checkpoint yet, so none is shared\n"
    newest = load_policy(run_dir, "latest", session=1).env_steps
    games = run_dir / "session_1" / "checkpoints" / str(newest) / "games"
    largest = max(games.rglob("[0-9]*"), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    load_policy(run_dir, "latest", session=1)  # the parameters are sound
    fails("damaged: games", repository_files, run_dir, "user/x", "latest")


def card(run_dir, checkpoint="best"):
    found = library.ModelCard(repository_files(run_dir, "user/breakout", checkpoint)["README.md"].decode())
    return found.data.to_dict(), " ".join(found.text.split())


def test_the_card_makes_the_run_findable_and_says_what_it_is(run_dir):
    metadata, text = card(run_dir)
    (result,) = metadata["model-index"][0]["results"]
    score = result["metrics"][0]["value"]
    assert " +/- " in score
    assert result["dataset"]["type"] == "ALE/Breakout-v5"
    assert {"atari", "reinforcement-learning", "ALE/Breakout-v5"} <= set(metadata["tags"])
    for words in (
        f"**Score {score}** (mean of `return_ma` over 2 sessions", "Protocol: **v5** (sticky actions 0.25",
        "at most 108,000 frames", "1,024 env steps per session", "| random play", "| return_ma at the end |",
        "It is the best one of the best session",
        "hub pull user/breakout data/breakout", "![returns](graphs/trial.png)",
        "Trained with seeds 0, 1, lambda 0.7 and 4 environments",
    ):  # fmt: skip
        assert words in text
    assert "not complete" not in text
    assert "Verified" not in text
    verified = {"date": "2026-11-27", "version": "1.0", "rows": 1, "games": 3, "env_steps": 400}
    write_json(run_dir / "session_1" / "verified.json", verified)  # and then it trained on
    assert "Verified" not in card(run_dir)[1]
    write_json(run_dir / "session_1" / "verified.json", verified | {"rows": 4})
    assert "recomputed from seeds and actions (`verify`): session_1. Checkpoints: " in card(run_dir)[1]
    assert "Checkpoints: session_0 at env step 1," in card(run_dir, "latest")[1]

    honest = {
        "checkpoint": "latest", "greedy": False, "episodes": 32, "sessions": ["session_0", "session_1"],
        "mean": 2.5, "interval": None,
        "session_means": [1.0, 4.0], "returns": [[1.0], [4.0]], "env_steps": [BUDGET, BUDGET],
    }  # fmt: skip
    write_json(run_dir / "evaluation.json", honest)
    write_json(run_dir / "evaluation_2.json", honest | {"checkpoint": "best"})  # later, and not to be quoted
    quoted = "at env step 1024: mean return **2.50** over 2 sessions of 32 full games. 2 sessions: 1 and 4"
    assert quoted in card(run_dir)[1]
    assert "evaluation.json" in repository_files(run_dir, "user/x", "best")


def test_the_card_of_another_protocol_compares_nothing(run_dir):
    described = read_json(run_dir / "config.json")
    described["config"]["env"] |= {"protocol": "machado", "clip_rewards": False}
    write_json(run_dir / "config.json", described)
    metadata, text = card(run_dir)
    protocol = "machado, clip_rewards=false"
    assert metadata["model-index"][0]["results"][0]["dataset"]["type"] == f"Breakout ({protocol})"
    assert f"Protocol: **{protocol}** (sticky actions 0.25" in text
    assert "to compare with" not in text


def test_the_card_names_the_algorithm_and_claims_no_atari_rules_elsewhere(run_dir):
    described = read_json(run_dir / "config.json")
    described["config"] |= {"algorithm": "vtrace"}
    described["config"]["env"] |= {"game": "CartPole-v1", "backend": "gymnasium"}
    write_json(run_dir / "config.json", described)
    metadata, text = card(run_dir)
    assert {"vtrace", "jax"} <= set(metadata["tags"])
    assert {"ppo", "atari"}.isdisjoint(metadata["tags"])
    assert "# CartPole-v1, trained with vtrace" in text
    assert "Protocol: **gymnasium**. Budget: 1,024 env steps per session. " in text
    for words in ("frame skip", "lives", "emulator frames", "PPO"):
        assert words not in text, words


def test_the_card_of_an_environment_with_options_names_them(run_dir):
    described = read_json(run_dir / "config.json")
    env = {"game": "CartPole-v1", "backend": "gymnasium", "options": {"sutton_barto_reward": True}}
    described["config"]["env"] |= env
    write_json(run_dir / "config.json", described)
    metadata, _ = card(run_dir)
    expected = 'CartPole-v1 (gymnasium, options={"sutton_barto_reward": true})'
    assert metadata["model-index"][0]["results"][0]["dataset"]["type"] == expected


def test_the_card_of_a_single_session(run_dir):
    shutil.rmtree(run_dir / "session_1")
    text = repository_files(run_dir, "user/x", "best")["README.md"].decode()
    assert "Trained with seed 0, lambda 0.7" in " ".join(text.split())
    assert [line for line in text.splitlines() if line.endswith(" ")] == []


def test_a_second_push_replaces_the_first(server, run_dir):
    push(run_dir, "user/breakout")
    server.repos["user/breakout"]["session_7/metrics.csv"] = b"earlier run"
    push(run_dir, "user/breakout")
    assert "session_7/metrics.csv" not in server.repos["user/breakout"]
    assert ".gitattributes" in server.repos["user/breakout"]


@pytest.mark.parametrize("name", ["model.safetensors", "session_notes/checkpoints.md", "config.json"])
def test_a_repository_without_a_run_is_not_replaced(server, run_dir, name):
    server.repos["user/other"] = others = {".gitattributes": b"", "README.md": b"another model", name: b"weights"}
    before = dict(others)
    fails(f"has files that are not a run of jaxrl_atari, such as '{name}'", push, run_dir, "user/other")
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


def test_what_cannot_be_pushed(server, run_dir, tmp_path, monkeypatch):
    fails("Repo id must be in the form", push, run_dir, "user/a/b")
    fails("not your namespace", push, run_dir, "somebody/breakout")
    fails(f"{tmp_path}/nowhere: not a run directory", push, tmp_path / "nowhere", "user/breakout")
    fails("session_0: not a run directory", push, run_dir / "session_0", "user/breakout")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    fails("The token from HF_TOKEN environment variable is invalid", push, run_dir, "user/breakout")
    assert server.repos == {}


def test_what_cannot_be_pulled_leaves_nothing_behind(server, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    fails("exists already", pull, "user/x", tmp_path / "full")
    fails("Repository Not Found", pull, "user/nothing", tmp_path / "new")
    for name in ("../outside", "session_0/../../outside", "/tmp/outside"):
        server.repos["user/hostile"] = {"session_0/checkpoints/1/arrays": b"", name: b"x"}
        fails("Invalid filename", pull, "user/hostile", tmp_path / "new")
    assert {path.name for path in tmp_path.rglob("*")} == {"full", "mine"}
    server.repos["user/run"] = {"session_0/checkpoints/1/arrays": b""}
    with pytest.raises(UserError, match=r"^/[^ ]*mine: File exists$"):  # no word of the Hub
        pull("user/run", tmp_path / "full" / "mine" / "new")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HF_ENDPOINT", "http://127.0.0.1:1"),
        ("HF_ENDPOINT", "localhost:1"),
        ("ALL_PROXY", "socks5://localhost:1"),
        ("https_proxy", "foo://localhost"),
        ("SSL_CERT_FILE", "/gone"),
        ("HF_TOKEN", "hf_ü"),
    ],
)
def test_a_setting_of_the_network_that_does_not_work_is_named(variable, value, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, value)
    library.close_session()
    fails(variable, pull, "user/breakout", tmp_path / "new")
    library.close_session()
    assert not list(tmp_path.iterdir())
