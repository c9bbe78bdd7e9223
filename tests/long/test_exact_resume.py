"""A session that was stopped or killed and resumed leaves, bit for bit, what an uninterrupted one leaves."""

import math
import os
import random
import subprocess
import sys
import time

import jax
import pytest
from sample_runs import read_csv
from small_training import TINY, Lines, change, first_arrays, latest_meta, stop_before

from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.columns import MACHINE_COLUMNS
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import checkpoint_env_steps
from jaxrl_atari.session import open_session, run_session
from jaxrl_atari.verify.__main__ import main as verify

CONFIG = change(
    TINY,
    total_env_steps=640,
    env={"max_frames": 800, "anchor_steps": 30},
    log={"every_env_steps": 100, "checkpoint_every_env_steps": 300},
)
OVERLAP = change(CONFIG, overlap="update")
TIMES = {"wall_seconds", "unix_time", "sps", *MACHINE_COLUMNS}


def train(config, session_dir, stops=(), later=None):
    """Trains to the end, stopped before the given rollouts; from the first resume on with another config."""
    for rollout in (*stops, math.inf):
        try:
            run_session(config, session_dir, stop_requested=stop_before(rollout))
        except KeyboardInterrupt:
            config = later or config
    return session_dir


def left(session_dir):
    """What a session has left: digests of all arrays, counters, statistics, log points, evaluations."""
    meta = latest_meta(session_dir)
    meta["items"].pop("evaluation", None)  # of one that was still running
    # A stop may leave the last evaluation to a session that writes no checkpoint any more; evaluations.csv has it.
    for name in ("config", "wall_seconds", "checksum", "evaluated_env_steps"):
        del meta[name]
    rows = [{name: row[name] for name in row.keys() - TIMES} for row in read_csv(session_dir / "metrics.csv")]
    evaluations = session_dir / "evaluations.csv"
    results = read_csv(evaluations) if evaluations.exists() else []
    return meta, rows, [{name: text for name, text in result.items() if name != "unix_time"} for result in results]


@pytest.mark.parametrize(
    ("config", "later"),
    [
        (CONFIG, {"log": {"checkpoint_every_env_steps": 200}}),
        (change(OVERLAP, devices={"data_parallel": 2}), {"env": {"num_threads": 3}}),
        (
            change(
                CONFIG, env={"protocol": "classic", "num_envs": 16, "max_frames": 60}, ppo={"rollout_length": 4}
            ),
            {"env": {"num_groups": 2}},  # of 8: a policy that acts for fewer rounds some sums differently
        ),
        (  # what the LSTM remembers goes on; RND's statistics and its target do
            change(
                CONFIG,
                network={"name": "nature_lstm"},
                algorithm="rnd",
                evaluation={"every_env_steps": 300, "episodes": 2},
            ),
            {"env": {"num_threads": 3}},
        ),
        (  # stopped while an evaluation that is due waits for the one before
            change(
                CONFIG,
                total_env_steps=320,
                env={"max_frames": 100},
                evaluation={"every_env_steps": 64, "episodes": 8, "num_envs": 1},
            ),
            {},
        ),
    ],
    ids=[
        "v5",
        "v5, overlap, two devices",
        "classic, groups",
        "LSTM, RND",
        "waiting evaluations",
    ],
)
def test_stops_change_nothing(config, later, tmp_path, capsys):
    straight = left(train(config, tmp_path / "straight"))
    games = Checkpoints(tmp_path / "straight").read(straight[0]["env_steps"]).items["games"]
    assert games["anchor_step"].max() > 0, "no game has started from a new seed"
    # The second resume is stopped at once.
    stopped = left(train(config, tmp_path / "stopped", (4, 1, 7), change(config, **later)))
    assert capsys.readouterr().out.count("resumed at") == 3
    for one, other in zip(straight, stopped, strict=True):
        assert one == other


KILLS = int(os.environ.get("JAXRL_ATARI_FAULT_ROUNDS", "2"))
"""More before a release, by hand: 20."""


@pytest.mark.timeout(3_000)
def test_kills_at_random_moments_change_nothing(tmp_path, environment):
    """The killed run leaves what a straight run leaves, and `verify` accepts it."""
    config = change(OVERLAP, total_env_steps=1_000 * KILLS, evaluation={"every_env_steps": 500, "episodes": 2})
    session_dir = tmp_path / "session_0"
    write_json(tmp_path / "config.json", {"config": config.to_dict()})
    code = (
        "import sys; from pathlib import Path; from jaxrl_atari.runs.description import read_config; "
        "from jaxrl_atari.session import run_session; run_dir = Path(sys.argv[1]); "
        "run_session(read_config(run_dir), run_dir / 'session_0')"
    )
    for _ in range(KILLS):
        before = checkpoint_env_steps(session_dir)
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment) as process:
            while checkpoint_env_steps(session_dir) == before and process.poll() is None:
                time.sleep(0.02)
            time.sleep(random.uniform(0, 1))
            process.kill()
        assert process.returncode == -9, "it has ended before the kill"
    assert left(train(config, session_dir)) == left(train(config, tmp_path / "straight"))
    verify([str(tmp_path)])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A session with overlap that was stopped."""
    session_dir = tmp_path_factory.mktemp("stopped") / "session_0"
    with pytest.raises(KeyboardInterrupt):
        run_session(OVERLAP, session_dir, stop_requested=stop_before(7))
    return session_dir


@pytest.mark.parametrize(
    "damage",
    [
        lambda games: {"anchor_seed": games["anchor_seed"] + 1},
        lambda games: {"lives": games["lives"] + 1},
        lambda games: {"in_progress": games["in_progress"] + 1},
    ],
)
def test_games_that_do_not_play_again_as_they_were_are_not_continued(damage, stopped, tmp_path):
    """As with another emulator."""
    checkpoint, _ = Checkpoints(stopped).newest()
    meta = checkpoint.meta
    arrays = checkpoint.to_device("arrays", first_arrays(OVERLAP, 4), jax.devices("cpu")[0])
    games = checkpoint.items["games"]
    items = {"arrays": arrays, "games": games | damage(games)}
    Checkpoints(tmp_path / "session_0").save(meta["env_steps"], items, meta, None)
    lines = Lines()
    with open_session(OVERLAP, tmp_path / "session_0", writers=[lines]) as run:
        assert run.environments.groups[0][0].cut_segment()[0].anchor_step.tolist() == [meta["steps"]] * 4
    assert "".join(lines.messages).count("new games are started (") == 1
