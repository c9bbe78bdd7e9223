"""Push and pull with the real huggingface_hub and a stand-in for the Hub on loopback."""

import json
import os
import shutil
import socket
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sample_runs import flip_bit, table, write_metrics

from jaxrl_atari import plots
from jaxrl_atari.config import Config, EnvConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.hub import __main__ as hub
from jaxrl_atari.hub.card import model_card
from jaxrl_atari.learner import abstract_arrays
from jaxrl_atari.report.summary import read_run, write_trial_summary
from jaxrl_atari.runs.checkpoint_writer import CheckpointWriter
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.files import write_json

library = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
from hub_server import LFS_BYTES, TOKEN, serve  # noqa: E402
from huggingface_hub import constants  # noqa: E402

# huggingface_hub uploads large files in a way that its HTTP client calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

CPU = jax.devices("cpu")[0]
CONFIG = Config(name="breakout", sessions=2, total_env_steps=2048, env=EnvConfig(game="Breakout"))
NUM_ACTIONS = 4


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Two sessions; session 1 is the better one, and its checkpoint at 1000 is better than the one at 2048."""
    path = tmp_path_factory.mktemp("runs") / "breakout_20260101_120000"
    target = abstract_arrays(CONFIG, NUM_ACTIONS, CPU)
    rng = np.random.default_rng(0)
    for session, scores in enumerate(((1.0, 2.0), (5.0, 4.0))):
        write_metrics(path / f"session_{session}", table(scores, [1000, 2048]))
        checkpoints, best = CheckpointWriter(path / f"session_{session}"), max(scores)
        for step, score in zip((1000, 2048), scores, strict=True):
            state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), target["train_state"])
            meta = {"config": CONFIG.to_dict(), "num_actions": NUM_ACTIONS, "best_score": best}
            checkpoints.save(step, {"train_state": state, "key": jax.random.key(0)}, meta, score)
        checkpoints.close()
        (path / f"session_{session}" / "evaluations.csv").write_text("env_steps,episodes,mean,std\n")
    write_json(path / "config.json", describe(CONFIG))
    (path / "graphs").mkdir()
    (path / "graphs" / "trial.png").write_bytes(b"a picture")
    (path / "session_1" / "video_1000.mp4").write_bytes(b"a film")
    (path / "session_1" / "events.out.tfevents.1").write_bytes(b"not to be shared")
    return path


@pytest.fixture
def server(monkeypatch, tmp_path):
    with serve() as server:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        library.close_session()


def test_a_pushed_run_is_pulled_and_plays(server, run_dir, tmp_path, monkeypatch):
    hub.push(run_dir, "user/breakout", endpoint=server.url)
    assert server.commits == ["breakout_20260101_120000, checkpoint at env step 1,000"]
    files = server.repos["user/breakout"]
    assert files["replay.mp4"] == b"a film"
    assert {
        "config.json",
        "trial.json",
        "graphs/trial.png",
        "session_0/metrics.csv",
        "session_1/evaluations.csv",
    } <= set(files)
    assert not [name for name in files if "tfevents" in name]
    # The only checkpoint is the best one of the best session.
    steps = {name.split("/checkpoints/")[0] + "/" + name.split("/")[2] for name in files if "/checkpoints/" in name}
    assert steps == {"session_1/1000"}
    # Large files travel by Git LFS: the arrays.
    large = {name for name, content in files.items() if len(content) >= LFS_BYTES}
    assert large
    assert all("/arrays/" in name for name in large)
    assert sorted(map(len, server.objects.values())) == sorted(len(files[name]) for name in large)

    monkeypatch.delenv("HF_TOKEN")  # a public repository needs none
    back = hub.pull("user/breakout", tmp_path / "back", server.url)
    assert (back / "session_1" / "metrics.csv").read_bytes() == (run_dir / "session_1" / "metrics.csv").read_bytes()
    policy, original = load_policy(back, device=CPU), load_policy(run_dir, device=CPU)
    assert (policy.env_steps, policy.config) == (1000, CONFIG)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), policy.params, original.params))
    frames = np.random.default_rng(0).integers(0, 255, (8, 84, 84, 4), np.uint8)
    assert policy.act(frames, jax.random.key(1)).tolist() == original.act(frames, jax.random.key(1)).tolist()
    assert plots.plot_trial(read_run(back))
    assert hub.collect(back, "user/breakout").files["replay.mp4"].read_bytes() == b"a film"
    assert not list(tmp_path.glob("*.partial"))


def test_the_card_states_score_and_protocol(run_dir):
    import yaml

    shared = hub.collect(run_dir, "user/breakout")
    _, header, text = shared.card.split("---\n", 2)
    metadata = yaml.safe_load(header)
    result = metadata["model-index"][0]["results"][0]
    # return_ma at the end: (1 + 2) / 2 and (5 + 4) / 2
    assert result["metrics"][0]["value"] == "3.00 +/- 1.50"
    assert result["dataset"]["type"] == "ALE/Breakout-v5"
    assert {"atari", "reinforcement-learning", "ALE/Breakout-v5"} <= set(metadata["tags"])
    text = " ".join(text.split())
    assert "**3.00 +/- 1.50** (mean +/- std of `return_ma` over 2 sessions" in text.replace("Score ", "")
    assert "Protocol: **v5** (sticky actions 0.25" in text
    assert "not complete" not in text
    assert "2,048 env steps per session" in text
    assert "best one of session_1 at env step 1,000. It is an optimistic pick" in text
    later = " ".join(hub.collect(run_dir, "user/breakout", "latest").card.split())
    assert "Checkpoints: session_1 at env step 2,048, session_0 at env step 2,048." in later
    assert "The checkpoint is that of session_1 at env step 1,000." in hub.collect(run_dir, "user/breakout", 1000).card
    assert "optimistic" not in later
    assert "hub pull user/breakout breakout" in text
    assert "![returns](graphs/trial.png)" in text


def test_the_card_quotes_the_evaluation_of_all_sessions(run_dir, tmp_path):
    assert "Evaluated with" not in hub.collect(run_dir, "user/breakout").card
    own = tmp_path / "run"
    shutil.copytree(run_dir, own)
    honest = {
        "checkpoint": "latest", "greedy": False, "episodes": 32, "sessions": ["session_0", "session_1"],
        "mean": 2.5, "interval": [1.0, 4.0], "session_means": [1.0, 4.0], "matrix": [[1.0], [4.0]],
        "env_steps": [2000, 2000],
    }  # fmt: skip
    write_json(own / "evaluation.json", honest)
    write_json(own / "evaluation_2.json", {**honest, "checkpoint": "best", "mean": 9.0})  # later, and not to be quoted
    write_json(own / "evaluation_3.json", {**honest, "date": "2026-02-01 00:00:00", "mean": 3.5})
    write_json(own / "evaluation_4.json", {**honest, "date": "2026-01-01 00:00:00", "mean": 4.5})  # copied last
    assert "mean return **3.5**" in hub.collect(own, "user/breakout").card
    (own / "evaluation_3.json").unlink()
    (own / "evaluation_4.json").unlink()
    one = {"sessions": ["session_0"], "session_means": [1.0], "matrix": [[1.0]], "env_steps": [2000]}
    write_json(own / "evaluation_5.json", honest | one | {"date": "2026-03-01 00:00:00"})  # before session_1 was added
    description = json.loads((own / "config.json").read_text())
    write_json(own / "config.json", description | {"versions": None})  # restored by hand
    shared = hub.collect(own, "user/breakout")
    text = " ".join(shared.card.split())
    assert "all sessions at env step 2,000: mean return **2.5** (95% interval 1.0 to 4.0) over 2 sessions" in text
    assert "It is an optimistic pick" in text
    assert "evaluation.json" in shared.files


def test_the_card_of_another_protocol_names_what_differs_and_compares_nothing(tmp_path):
    import yaml

    env = EnvConfig(game="Breakout", protocol="machado", clip_rewards=False)
    config = Config(name="breakout", total_env_steps=2048, env=env)
    write_metrics(tmp_path / "session_0", table([1.0, 2.0], [1000, 2048]))
    write_json(tmp_path / "config.json", describe(config))
    summary = write_trial_summary(tmp_path)
    _, header, text = model_card("user/x", tmp_path, summary, {tmp_path / "session_0": 2048}, True).split("---\n", 2)
    assert "+/-" not in header + text, "one session has no std"
    assert "**Score 1.50** (mean of `return_ma` over 1 " in text
    protocol = "machado, clip_rewards=false"
    assert yaml.safe_load(header)["model-index"][0]["results"][0]["dataset"]["type"] == f"Breakout ({protocol})"
    assert f"Protocol: **{protocol}** (sticky actions 0.25" in text
    assert "at most 18,000 frames" in text
    assert f"Score {summary['comparison_note']}." in text
    assert "For comparison" not in text


def test_a_second_push_replaces_the_first(server, run_dir):
    hub.push(run_dir, "user/breakout", endpoint=server.url)
    server.repos["user/breakout"]["session_7/metrics.csv"] = b"earlier run"
    assert hub.push(run_dir, "user/breakout", endpoint=server.url) == f"{server.url}/user/breakout"
    left = server.repos["user/breakout"]
    assert "session_7/metrics.csv" not in left
    assert ".gitattributes" in left


@pytest.mark.parametrize("name", ["model.safetensors", "session_notes/checkpoints.md", "config.json"])
def test_a_repository_without_a_run_is_not_replaced(server, run_dir, name):
    others = {".gitattributes": b"", "README.md": b"another model", name: b"weights"}
    server.repos["user/other"] = dict(others)
    push = partial(hub.push, endpoint=server.url)
    fails(f"user/other: has files that are not a run of jaxrl_atari, such as '{name}'", push, run_dir, "user/other")
    assert (server.repos["user/other"], server.objects, server.commits) == (others, {}, [])
    del server.repos["user/other"][name]
    push(run_dir, "user/other")  # a repository with a card only, as made on the web site
    assert "config.json" in server.repos["user/other"]


def test_a_private_push_is_never_public(server, run_dir, tmp_path, monkeypatch):
    push = partial(hub.push, run_dir, endpoint=server.url)
    server.repos["user/public"] = {".gitattributes": b""}
    fails("user/public: a public repository; make it private at", push, "user/public", True)
    assert (server.repos["user/public"], server.objects, server.commits) == ({".gitattributes": b""}, {}, [])
    for _ in range(2):  # a new repository, and an existing private one
        push("user/secret", True)
        assert server.private == {"user/secret"}
    push("user/secret")  # which stays private
    server.private_by_default = True
    push("user/default")
    assert server.private == {"user/secret", "user/default"}
    assert hub.pull("user/secret", tmp_path / "back", server.url).is_dir()
    monkeypatch.delenv("HF_TOKEN")
    fails("no such repository", hub.pull, "user/secret", tmp_path / "new", server.url)


def fails(words, call, *arguments):
    with pytest.raises(UserError) as error:
        call(*arguments)
    assert words in str(error.value), str(error.value)
    assert len(str(error.value)) < 400


def test_errors_of_a_push(server, run_dir, tmp_path, monkeypatch):
    push = partial(hub.push, endpoint=server.url)
    fails("expected user/repo", push, run_dir, "user/a/b")
    fails("write access", push, run_dir, "somebody/breakout")
    fails("no such directory", push, tmp_path / "nowhere", "user/breakout")
    fails("the directory of a session", push, run_dir / "session_0", "user/breakout")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    fails("does not accept the token", push, run_dir, "user/breakout")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(library, "get_token", lambda: None)
    fails("no Hugging Face token", push, run_dir, "user/breakout")
    assert server.repos == {}


def test_errors_of_a_pull(server, tmp_path):
    pull = partial(hub.pull, endpoint=server.url)
    fails("no such repository", pull, "user/nothing", tmp_path / "new")
    server.repos["user/other"] = {"config.json": b"{}"}
    fails("not a run of jaxrl_atari", pull, "user/other", tmp_path / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    fails("exists already", pull, "user/other", tmp_path / "full")
    (tmp_path / "new.partial").mkdir()  # somebody's own
    fails("expected user/repo", pull, "user/a/b", tmp_path / "new")
    fails("expected the name of a new directory", pull, "user/other", ".")
    server.down = True
    fails("answered 503", pull, "user/third", tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir() if "cache" not in path.name} == {"full", "new.partial"}


def refused(words, server, files, directory):
    """A pull of a repository with these files is refused, and leaves nothing behind."""
    server.repos["user/hostile"] = {"config.json": b"{}", "session_0/metrics.csv": b""} | files
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*") if "cache" not in path.parts}
    fails(words, partial(hub.pull, endpoint=server.url), "user/hostile", directory / "new")
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*") if "cache" not in path.parts} == before


@pytest.mark.parametrize(
    "name", ["../outside", "session_0/../../outside", "/tmp/outside", "a//b", "./a", "C:outside", "a\\..\\b", "a\nb"]
)
def test_a_path_that_leaves_the_directory_is_refused(server, tmp_path, name):
    refused("is not a plain path; nothing was pulled", server, {name: b"x"}, tmp_path)
    assert not (tmp_path / "cache").exists(), "nothing was downloaded"


def test_files_beyond_the_limits_are_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "MAX_FILE_BYTES", 100)
    refused("has 101 bytes, more than the limit of 100; nothing was pulled", server, {"big": b"x" * 101}, tmp_path)
    monkeypatch.setattr(hub, "MAX_BYTES", 150)
    files = {"a": b"x" * 100, "b": b"x" * 100}
    refused("has 4 files of 202 bytes, more than the limit", server, files, tmp_path)
    monkeypatch.setattr(hub, "MAX_FILES", 3)
    refused("more than the limit of 3 files", server, {"a": b"", "b": b""}, tmp_path)
    assert not (tmp_path / "cache").exists(), "nothing was downloaded"


def test_a_link_to_another_place_is_refused(server, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("private")
    snapshot_download = library.snapshot_download

    def with_a_link(*arguments, **options):
        snapshot = snapshot_download(*arguments, **options)
        os.symlink(tmp_path / target, os.path.join(snapshot, "link"))
        return snapshot

    monkeypatch.setattr(library, "snapshot_download", with_a_link)
    for target in ("secret", "nowhere", ""):
        server.repos.pop("user/hostile", None)
        refused("link is a link to another place", server, {"version": target.encode()}, tmp_path)


def test_an_incomplete_download_is_refused(server, tmp_path, monkeypatch):
    """As an older huggingface_hub returns it when the connection fails after an interrupted pull."""
    snapshot_download = library.snapshot_download

    def without_a_file(*arguments, **options):
        snapshot = snapshot_download(*arguments, **options)
        os.remove(os.path.join(snapshot, "session_0/metrics.csv"))
        return snapshot

    monkeypatch.setattr(library, "snapshot_download", without_a_file)
    refused("the download is incomplete, session_0/metrics.csv is missing; try again", server, {}, tmp_path)


def test_every_error_of_the_connection_is_known():
    """httpx's names: only the base class of some says that it is one."""
    transport = type("TransportError", (Exception,), {})
    dropped = type("RemoteProtocolError", (type("ProtocolError", (transport,), {}),), {})
    assert hub._is_network(dropped())
    assert hub._is_network(type("ConnectTimeout", (Exception,), {})())
    assert hub._is_network(ConnectionResetError())
    assert not hub._is_network(type("HTTPStatusError", (Exception,), {})())


def _steps(upload):
    return {directory.name: step for directory, step in upload.checkpoints.items()}


def test_a_push_of_the_latest_checkpoints_has_one_of_every_session(server, run_dir, tmp_path):
    """So that whoever pulls the run can play what its score to quote was measured with, and resume every session."""
    hub.push(run_dir, "user/breakout", endpoint=server.url, checkpoint="latest")
    back = hub.pull("user/breakout", tmp_path / "back", server.url)
    for session in (0, 1):
        policy = load_policy(back, "latest", CPU, session)
        original = load_policy(run_dir, "latest", CPU, session)
        assert policy.env_steps == 2048
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), policy.params, original.params))
    begun = tmp_path / "begun"
    shutil.copytree(run_dir, begun)
    shutil.rmtree(begun / "session_0" / "checkpoints")
    assert _steps(hub.collect(begun, "user/breakout", "latest")) == {"session_1": 2048}


def test_a_push_verifies_its_checkpoint(run_dir, tmp_path, caplog):
    damaged = tmp_path / "damaged"
    shutil.copytree(run_dir, damaged)

    def damage(step):
        files = (damaged / "session_1" / "checkpoints" / str(step) / "arrays").rglob("[0-9]*")
        flip_bit(max(files, key=lambda path: path.stat().st_size))

    damage(2048)
    assert _steps(hub.collect(damaged, "user/breakout")) == {"session_1": 1000}, "the best is sound"
    shared = hub.collect(damaged, "user/breakout", "latest")
    assert _steps(shared) == {"session_0": 2048, "session_1": 1000}
    assert not [name for name in shared.files if "session_1/checkpoints/2048" in name]
    assert "checkpoints/2048: damaged: its array" in caplog.text
    assert "the one at env step 1000 is used" in caplog.text
    damage(1000)
    fails("checkpoints/1000: damaged: its array", hub.collect, damaged, "user/breakout")
    assert _steps(hub.collect(run_dir, "user/breakout", 2048)) == {"session_1": 2048}
    fails("has no checkpoint at env step 7", hub.collect, run_dir, "user/breakout", 7)


def test_the_command_takes_a_checkpoint(monkeypatch, capsys):
    pushed = []
    monkeypatch.setattr(hub, "push", lambda *arguments, **options: pushed.append(options["checkpoint"]))
    for chosen in ((), ("--checkpoint", "latest"), ("--checkpoint", "2048")):
        hub.main(["push", "data/x", "user/x", *chosen])
    assert pushed == ["best", "latest", 2048]
    fails(
        "--checkpoint newest: expected best, latest", hub.main, ["push", "data/x", "user/x", "--checkpoint", "newest"]
    )


def test_without_a_network_the_command_prints_one_line(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        environment = os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{unused.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
        }
        command = [sys.executable, "-m", "jaxrl_atari.hub", "pull", "user/breakout", str(tmp_path / "new")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {environment['HF_ENDPOINT']} cannot be reached (")
    assert done.stderr.count("\n") == 1
