"""Sessions on the real emulator: what they log, save and say, how they stop and fail, what they resume from."""

import gc
import importlib.util
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from small_training import (
    TINY,
    FakeWandb,
    Lines,
    change,
    edit_meta,
    flip_bit,
    latest_meta,
    read_table,
    stop_before,
)
from user_commands import user_environment

from jaxrl_atari import run_training, session
from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.envs.pool import FinishedGame
from jaxrl_atari.errors import ConfigError, InterfaceError, Stopped, UserError
from jaxrl_atari.evaluate import during_training
from jaxrl_atari.evaluate.play import run_evaluation
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.hardware.cpu import xla_threads
from jaxrl_atari.ppo import PPO
from jaxrl_atari.provenance import resume_text
from jaxrl_atari.rollout import EnvGroup
from jaxrl_atari.runs.columns import TIME_COLUMNS
from jaxrl_atari.runs.description import describe, describe_here, read_config, require_same_run
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.layout import checkpoint_env_steps
from jaxrl_atari.runs.progress import EpisodeStatistics, Progress
from jaxrl_atari.runs.reading import is_finished
from jaxrl_atari.runs.run_dir import make_run_dir, removed_if_refused
from jaxrl_atari.runs.session_log import NonFiniteError, SessionLog
from jaxrl_atari.session import iterations, open_session, place_session, run_session

CPU = jax.devices("cpu")[0]


@pytest.fixture
def session_dir(tmp_path):
    return tmp_path / "session_0"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a finished session, with checkpoints of an overlapped update and of a running
    evaluation."""
    session_dir = tmp_path_factory.mktemp("trained") / "session_0"
    evaluation = {"every_env_steps": 64, "episodes": 20, "num_envs": 1}
    run_session(change(TINY, overlap="update", evaluation=evaluation), session_dir)
    return session_dir


@pytest.fixture
def copied(trained, session_dir):
    return shutil.copytree(trained, session_dir)


def resume(session_dir, capsys, **options):
    """Resumes a session to a larger budget; returns what it says."""
    capsys.readouterr()
    run_session(change(TINY, total_env_steps=320, **options), session_dir, resume=True)
    assert latest_meta(session_dir)["env_steps"] > 280
    steps = [int(row["env_steps"]) for row in read_table(session_dir / "metrics.csv")]
    assert steps == sorted(set(steps))
    return capsys.readouterr().out


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- Training ----------------------------------------------------------------------------------------------------


def test_log_points_and_checkpoints_come_at_their_intervals(session_dir):
    """A log point has the means of the updates since the one before, without the newest, which may still run."""
    lines, began = Lines(), []
    config = change(TINY, env={"max_frames": 800}, log={"every_env_steps": 64, "tensorboard": True})
    with open_session(config, place_session(config), session_dir, writers=[lines]) as run:
        losses = [read()["policy_loss"] for read in iterations(run)]
        run.finish()
    assert [(row["updates"], row["env_steps"]) for row in lines.rows] == [(2, 64), (4, 128), (6, 192)]
    assert [row["policy_loss"] for row in lines.rows] == pytest.approx(
        [losses[0], np.mean(losses[1:3]), np.mean(losses[3:5])]
    )
    table = read_table(session_dir / "metrics.csv")
    assert [row["policy_loss"] for row in table] == [f"{row['policy_loss']:.9g}" for row in lines.rows]
    assert float(table[-1]["learning_rate"]) == 0
    assert sum(float(table[-1][name]) for name in TIME_COLUMNS) == pytest.approx(100)
    assert checkpoint_env_steps(session_dir) == [128, 192]
    assert f"device: {latest_meta(session_dir)['device']}" in lines.messages
    assert {path.name.split(".")[0] for path in session_dir.iterdir()} > {
        "events",
        "metrics",
        "checkpoints",
        "actions",
    }
    short = change(TINY, total_env_steps=32)
    with pytest.raises(UserError, match="session_0: holds a session already"):
        run_session(short, session_dir)
    assert read_table(session_dir / "metrics.csv") == table
    run_session(short, session_dir.with_name("session_1"), on_first_update=lambda: began.append(1))
    (row,) = read_table(session_dir.with_name("session_1") / "metrics.csv")
    assert (began, row["updates"], row["sps"]) == ([1], "1", ""), "of one update, which compiles"


def test_a_session_that_ends_early_ends_as_if_its_budget_were_spent(session_dir):
    """It is over once `ends_early` was true. It is not asked again, and so cannot take that back."""
    asked = []

    def ends_early():
        asked.append(True)
        return len(asked) == 3

    run_session(TINY, session_dir, ends_early=ends_early)
    meta = latest_meta(session_dir)
    assert (len(asked), meta["updates"]) == (3, 2)
    assert meta["score"] is not None


def session_log(writer, every_env_steps, progress, unlogged=()):
    """The log of a session without gradient steps, figures of the machine and games in progress."""
    return SessionLog(
        writer,
        every_env_steps,
        progress,
        unlogged=unlogged,
        optimizer_steps=0,
        steps_per_update=0,
        monitor=dict,
        games_so_far=lambda: np.zeros((0, 2)),
        compiled=lambda: 0.0,
    )


@pytest.mark.parametrize("name", ["updates", "sps", "cpu_percent", "learning_percent"])
def test_a_metric_that_has_the_name_of_a_column(name):
    progress = Progress({})
    log = session_log(Lines(), 1000, progress)
    log.after_update(lambda: {"loss": 1.0, name: 2.0}, 1e-3, (0.0, 0.0))
    log.read_newest()
    progress.count(300, [], 16)
    with pytest.raises(
        InterfaceError, match=rf"metric {name} = .*: expected another name than those of the columns"
    ):
        log.last_point(1e-3)


def test_sps_and_shares_of_the_time(monkeypatch):
    """On a clock of its own: acting takes 1 s, of which 0.75 s wait for the emulators, and the update 2 s."""
    clock, lines, progress, end = SimpleNamespace(now=0.0), Lines(), Progress({}), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    log = session_log(lines, 600, progress)

    def wait_until(end):
        clock.now = max(clock.now, end)
        return {"loss": 1.0}

    for _ in range(7):
        clock.now = max(clock.now, end) + 1.0  # acting waits for the parameters
        end = clock.now + 2.0
        progress.count(300, [], 16)
        log.after_update(lambda end=end: wait_until(end), 1e-3, (0.75, 0.25))
    log.read_newest()
    log.last_point(1e-3)
    # The last point is of one rollout, and of two updates: it waits for the newest.
    assert [(row["env_steps"], row.get("sps")) for row in lines.rows] == [
        (600, None), (1200, 100), (1800, 100), (2100, 60)
    ]  # fmt: skip
    shares = [[row[name] for name in TIME_COLUMNS] for row in lines.rows[1:]]
    assert shares == [pytest.approx(x) for x in ([25, 25 / 3, 200 / 3], [25, 25 / 3, 200 / 3], [15, 5, 80])]
    assert lines.rows[0]["wall_seconds"] == 1, "without the first update, which compiles"


@pytest.mark.parametrize("log_every", [1_000, 10_000, 100_000])
@pytest.mark.parametrize("update", [80, 2_048, 131_072])
def test_return_ma_depends_neither_on_log_points_nor_on_the_size_of_updates(log_every, update):
    """On a line that rises to 10 at 10M env steps, the mean of the last 1M is 9.5."""
    statistics = EpisodeStatistics()
    for env_steps in range(update, 10_000_001, update):
        statistics.returns.clear()
        statistics.count([FinishedGame(0, 0, env_steps / 1e6, 1)], env_steps)
        if env_steps % log_every < update:
            row = statistics.to_row()
    statistics.returns.clear()
    statistics.count([FinishedGame(0, 0, 10.0, 1)], 10_000_000)
    assert statistics.to_row()["return_ma"] == pytest.approx(9.5, rel=0.005)
    assert row["return_ma"] == pytest.approx(9.5, rel=0.02)


def test_a_session_has_the_seed_of_the_trial_plus_its_number(tmp_path):
    found = []
    for seed, number in ((5, 2), (7, 0), (5, 0)):
        config = change(TINY, seed=seed)
        folder = tmp_path / f"{seed}" / f"session_{number}"
        with open_session(config, place_session(config), folder, number) as run:
            keys, games = (
                jax.tree.map(jax.random.key_data, run.keys(0)),
                run.environments.groups[0][0].cut_segment()[0].anchor_seed,
            )
            found.append(jax.tree.map(np.asarray, (run.learner.state.params["dense"]["kernel"], keys, games)))
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1])
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, found[0], found[2])))


@pytest.mark.long
def test_keys_do_not_depend_on_the_environment(copied, capsys):
    """JAX_DEFAULT_PRNG_IMPL names another implementation of random keys: a session trains and resumes alike."""
    code = (
        "import sys; from small_training import *; from jaxrl_atari.session import run_session;"
        "run_session(TINY, __import__('pathlib').Path(sys.argv[1]))"
    )
    usual, other = copied.with_name("usual"), copied.with_name("rbg")
    run_session(TINY, usual)
    environment = user_environment(JAX_DEFAULT_PRNG_IMPL="rbg")
    subprocess.run([sys.executable, "-c", code, other], cwd=__file__[:-15], env=environment, check=True)
    assert latest_meta(other)["checksums"] == latest_meta(usual)["checksums"]
    assert "resumed at" in resume(other, capsys)


# --- Stops and errors --------------------------------------------------------------------------------------------


def test_a_signal_stops_after_the_update_with_a_last_checkpoint(session_dir):
    class Signal(Lines):
        def progress(self, env_steps, row):
            if env_steps > 80:
                signal.raise_signal(signal.SIGTERM)

    with StopRequest(quick=False) as stop, pytest.raises(Stopped):
        run_session(TINY, session_dir, writers=[Signal()], stop_requested=lambda: stop.requested)
    meta = latest_meta(session_dir)
    assert (meta["updates"], meta["score"]) == (3, None)
    assert str(meta["env_steps"]) == read_table(session_dir / "metrics.csv")[-1]["env_steps"]


def test_a_stop_before_the_first_update_leaves_no_checkpoint(session_dir):
    """An evaluation would play an untrained network and count it in the score."""
    with pytest.raises(Stopped):
        run_session(TINY, session_dir, stop_requested=stop_before(1))
    assert not checkpoint_env_steps(session_dir)


@pytest.mark.long
def test_a_second_process_is_refused_and_disturbs_nothing(session_dir):
    held = []

    class Intruder(Lines):
        def progress(self, env_steps, row):
            with pytest.raises(
                UserError, match="session_0: another process is training there; wait until it ends"
            ):
                run_session(TINY, session_dir, resume=True)
            held.append(env_steps)

    run_session(TINY, session_dir, writers=[Intruder()])
    assert latest_meta(session_dir)["env_steps"] == held[-1]
    run_session(TINY, session_dir, resume=True)  # free again


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["none", "update"])
def test_what_is_not_finite_is_not_saved(overlap, session_dir, monkeypatch):
    options = session.current_options

    def broken(config, at):
        return jax.tree.map(lambda x: x * np.float32(math.nan if at > 120 else 1), options(config, at))

    monkeypatch.setattr(session, "current_options", broken)
    with pytest.raises(
        NonFiniteError, match=r"loss = nan.* training stopped at .* the last checkpoint is kept: lower"
    ):
        run_session(change(TINY, overlap=overlap), session_dir)
    assert checkpoint_env_steps(session_dir)[-1] < 120
    with open_session(TINY, place_session(TINY), session_dir, resume=True) as run:
        state = run.learner.state
        run.learner._state = state.replace(params=jax.tree.map(lambda x: x + math.inf, state.params))
        with pytest.raises(NonFiniteError, match="parameter_norm = "):  # the newest metrics do not show it
            run.save(None)


def test_an_error_in_the_first_update_leaves_no_directory(session_dir, monkeypatch):
    def loss(params, apply, batch, options):
        return jnp.zeros(3), {}

    monkeypatch.setattr(session, "find_algorithm", lambda name: PPO._replace(loss=loss))
    with pytest.raises(InterfaceError, match=r"loss = 'float32\[3\]': expected a single float"):
        run_session(TINY, session_dir)
    assert not session_dir.exists()


@pytest.mark.long
def test_what_is_not_finite_before_the_first_checkpoint(session_dir, monkeypatch):
    options = session.current_options

    def broken(config, at):
        return jax.tree.map(lambda x: x * np.float32(math.nan), options(config, at))

    monkeypatch.setattr(session, "current_options", broken)
    with pytest.raises(NonFiniteError, match=r"env steps, before the first checkpoint: .* starts again at 0$"):
        run_session(TINY, session_dir)


@pytest.mark.long
def test_an_evaluation_is_written_after_the_first_update_that_finds_it_ended(session_dir, monkeypatch):
    ended = threading.Event()

    def evaluation(*args, **options):
        try:
            return run_evaluation(*args, **options)
        finally:
            ended.set()

    monkeypatch.setattr(during_training, "run_evaluation", evaluation)
    config = change(
        TINY, log={"checkpoint_every_env_steps": 10**6}, evaluation={"every_env_steps": 64, "episodes": 1}
    )
    lines = Lines()
    with open_session(config, place_session(config), session_dir, writers=[lines]) as run:
        assert run.evaluator is not None
        updates = iterations(run)
        while not run.evaluator.is_running:
            next(updates)
        assert ended.wait(60)
        time.sleep(0.5)  # the thread has its result soon after
        assert lines.evaluations == []
        next(updates)
        assert [row["env_steps"] for row in lines.evaluations] == [64]
        assert run.progress.env_steps < 128, "the next evaluation is not due"


@pytest.mark.long
def test_an_error_leaves_neither_threads_nor_processes(session_dir):
    class Failing(Lines):
        def write(self, row):
            if row["updates"] > 4:
                raise UserError("the disk is full")

    config = change(
        TINY, overlap="update", log={"graphs": True}, evaluation={"every_env_steps": 96, "episodes": 9_999}
    )
    write_json(session_dir.parent / "config.json", {"config": config.to_dict()})
    before = psutil.Process().children()
    with pytest.raises(UserError, match="the disk is full"):
        run_session(config, session_dir, writers=[Failing()])
    assert not {*psutil.Process().children()} - {*before}, "graphs were drawn"
    assert not [thread.name for thread in threading.enumerate() if re.match("learner|evaluator", thread.name)]


# --- Evaluations -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("every", "played"), [(96, 2), (192, 1)])
def test_evaluations_play_the_parameters_of_their_moment(every, played, session_dir, simulate, capsys):
    """On a device of their own; once where the last update ends just before the budget."""
    simulate(2)
    lines = Lines()
    options = {"every_env_steps": every, "episodes": 3, "num_envs": 2}
    config = change(
        TINY, env={"game": "SpaceInvaders"}, evaluation=options, devices={"gpu": "auto", "evaluator": 1}
    )
    run_session(config, session_dir, writers=[lines])
    assert len(lines.evaluations) == played
    table = read_table(session_dir / "evaluations.csv")
    assert [{name: float(value) for name, value in row.items()} for row in table] == lines.evaluations
    step, games, mean, std, cut_off, _ = lines.evaluations[-1].values()
    policy = load_policy(session_dir, step, device=CPU)
    seed = int(np.random.SeedSequence([config.seed, step]).generate_state(1)[0])
    result = run_evaluation(policy, 3, seed=seed, num_envs=2)
    assert (games, mean, std, cut_off) == (3, result.mean, result.std, 3), (
        "SpaceInvaders, cut off after 32 env steps"
    )
    assert (
        f"evaluation at {step:,} env steps: mean return {mean:,.1f} ± {std:,.1f} over 3 full"
        in capsys.readouterr().out
    )
    assert jax.devices("cpu")[2] == session.place(config.devices).evaluator


def test_training_goes_on_when_an_evaluation_fails(session_dir, monkeypatch, capsys):
    class NoRoms(Lines):
        def progress(self, env_steps, row):
            monkeypatch.setenv("ALE_ROMS_DIR", str(session_dir))

    config = change(TINY, evaluation={"every_env_steps": 64, "episodes": 1})
    run_session(config, session_dir, writers=[NoRoms()])
    output = capsys.readouterr()
    assert re.search(r"evaluation at \d+ env steps failed: env\.game = 'Breakout': its ROM cannot", output.out)
    assert "Traceback" not in output.err  # the user can correct it
    assert config.is_spent(latest_meta(session_dir)["env_steps"])


def test_an_evaluation_that_fails_for_a_bug_shows_its_traceback(session_dir, monkeypatch, capsys):
    def network_with_a_bug(*_, **__):
        raise ZeroDivisionError("in a network of the user's own")

    monkeypatch.setattr(during_training, "run_evaluation", network_with_a_bug)
    config = change(TINY, evaluation={"every_env_steps": 64, "episodes": 1})
    run_session(config, session_dir)
    output = capsys.readouterr()
    assert "env steps failed: ZeroDivisionError: in a network of the user's own" in output.out
    assert "in network_with_a_bug\n" in output.err


@pytest.mark.long
def test_a_stop_during_the_last_evaluation(session_dir):
    """A thousand games would take hours. The budget is spent, but the session was interrupted: a resume plays
    them."""
    config = change(TINY, evaluation={"every_env_steps": 192, "episodes": 1_000})
    with pytest.raises(KeyboardInterrupt):
        run_session(
            config,
            session_dir,
            stop_requested=lambda: config.is_spent(max([0, *checkpoint_env_steps(session_dir)])),
        )
    assert not (session_dir / "evaluations.csv").exists()
    assert not is_finished(config, session_dir)
    run_session(change(config, evaluation={"episodes": 2}), session_dir, resume=True)
    assert (session_dir / "evaluations.csv").read_text().splitlines()[1].split(",")[1] == "2"
    assert is_finished(config, session_dir)


@pytest.mark.long
def test_stops_during_the_last_two_evaluations(session_dir):
    """The first one is still running when the last update ends, so that the checkpoint has nothing of the
    second one. Each is stopped once; a resume plays both."""
    config = change(TINY, evaluation={"every_env_steps": 96, "episodes": 1_000})
    place = place_session(config)
    with open_session(
        config, place, session_dir, stop_requested=lambda: config.is_spent(run.progress.env_steps)
    ) as run:
        for _ in iterations(run):
            pass
        run.finish()
        assert run.is_over
    meta = latest_meta(session_dir)
    first, last = (str(meta[name]) for name in ("evaluated_env_steps", "env_steps"))
    assert first != last
    assert not is_finished(config, session_dir)
    evaluations = session_dir / "evaluations.csv"
    config = change(config, evaluation={"every_env_steps": 96, "episodes": 1})
    with pytest.raises(KeyboardInterrupt):
        run_session(config, session_dir, resume=True, stop_requested=evaluations.is_file)
    assert [row["env_steps"] for row in read_table(evaluations)] == [first]
    assert not is_finished(config, session_dir)
    without = change(config, evaluation={"every_env_steps": 64})
    assert is_finished(without, session_dir)  # a new interval makes no evaluation due in a finished session
    run_session(config, session_dir, resume=True)
    assert [row["env_steps"] for row in read_table(evaluations)] == [first, last]
    assert is_finished(config, session_dir)


# --- Resuming ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_arrays_of_a_checkpoint_are_freed_once_the_learner_has_copied_them(copied):
    def live_bytes():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    before = live_bytes()
    config = change(TINY, total_env_steps=320)
    with open_session(config, place_session(config), copied, resume=True) as run:
        held = live_bytes() - before
        state = sum(array.nbytes for array in jax.tree.leaves(run.learner.state))
    assert state > 10e6
    assert held < 1.2 * state


@pytest.mark.long
def test_a_larger_budget(copied, capsys):
    before = read_table(copied / "metrics.csv")
    at = latest_meta(copied)["env_steps"]
    was = latest_meta(copied)["compute_dtype"]  # it depends on the CPU
    wanted = {"float32": "bfloat16", "bfloat16": "float32"}[was]
    out = resume(copied, capsys, network={"compute_dtype": wanted}, log={"tensorboard": True})
    assert (
        f"session 0  resumed at {at} env steps (update 6); compute_dtype {was} -> {wanted}, so numbers may" in out
    )
    after = read_table(copied / "metrics.csv")
    assert after[: len(before) - 1] == before[:-1]
    assert float(after[-1]["wall_seconds"]) > float(before[-1]["wall_seconds"])
    assert float(after[len(before)]["learning_rate"]) > 0.1 * TINY.ppo.learning_rate


def test_a_resume_names_numeric_settings_that_have_changed(copied, capsys, monkeypatch):
    before = xla_threads()
    monkeypatch.setenv("NPROC", str(before + 1))
    out = resume(copied, capsys)
    assert f"; numeric_settings.xla_threads {before} -> {before + 1}, so numbers may differ from here on\n" in out


def test_a_resume_names_a_coefficient_with_another_default():
    before = {"env_steps": 10, "updates": 1, "coefficients": {"z_loss": 0.1}}
    now = {"coefficients": {"z_loss": 0.2}}
    assert "; coefficients.z_loss 0.1 -> 0.2, so numbers may differ" in resume_text(before, now)
    assert "differ" not in resume_text(before, {"coefficients": {"z_loss": 0.1}})


def flip_all(step_dir, item):
    for path in (step_dir / item).rglob("[0-9]*"):
        if path.is_file():
            flip_bit(path)


@pytest.mark.long
@pytest.mark.parametrize("item", ["arrays", "acting", "meta"])
def test_a_damaged_checkpoint_is_passed_over(item, copied, capsys):
    before, last = checkpoint_env_steps(copied)[-2:]
    flip_all(copied / "checkpoints" / str(last), item)
    if item == "meta":
        flip_bit(copied / "checkpoints" / str(last) / "meta" / "metadata")
    out = resume(copied, capsys, overlap="update")
    aside = copied / "checkpoints" / f"damaged_{last}"
    assert re.search(rf"session 0  {copied}/checkpoints/{last}: damaged: .*; it is now {aside}\n", out)
    assert f"resumed at {before} env steps" in out
    assert aside.is_dir()
    assert "new games" not in out


def as_of_an_earlier_version(session_dir):
    """Format 3 before games were saved."""
    last = str(checkpoint_env_steps(session_dir)[-1])
    path = session_dir / "checkpoints" / last / "meta" / "metadata"
    meta = json.loads(path.read_text())
    for name in ("items", "game_seed", "steps", "evaluated_env_steps", "logged_env_steps", "unlogged_metrics"):
        del meta[name]
    meta["statistics"]["points"] = [mean for _, mean in meta["statistics"]["points"]]
    del meta["config"]["env"]["anchor_steps"], meta["config"]["log"]["actions"]
    meta["config"]["log"]["jsonl"] = False
    path.write_text(json.dumps(meta))
    edit_meta(session_dir, last)
    for item in ("games", "acting", "evaluation"):
        shutil.rmtree(session_dir / "checkpoints" / last / item, ignore_errors=True)
    shutil.rmtree(session_dir / "actions")


@pytest.mark.long
@pytest.mark.parametrize(
    ("prepare_it", "options", "problem"),
    [
        (
            as_of_an_earlier_version,
            {},
            "the checkpoint has none: the back end ale records them, in a single process",
        ),
        (lambda path: None, {"env": {"num_envs": 4}}, "env.num_envs 2 -> 4"),
        (lambda path: None, {"env": {"backend": "envpool"}}, "env.backend ale -> envpool"),
        (
            lambda path: [flip_all(each, "games") for each in path.glob("checkpoints/*")],
            {},
            ".*games cannot be read .*",
        ),
    ],
    ids=["an earlier version", "more environments", "envpool", "damaged games"],
)
def test_where_games_cannot_go_on_new_ones_are_started(prepare_it, options, problem, copied, capsys):
    if problem.endswith("envpool") and importlib.util.find_spec("envpool") is None:
        pytest.skip("the extra envpool is not installed")
    prepare_it(copied)
    logged = read_table(copied / "metrics.csv")
    (policy,) = [load_policy(copied, "latest", device=CPU)]
    out = resume(copied, capsys, **options)
    assert re.search(rf"session 0  new games are started \({problem}\)\n", out)
    assert f"resumed at {policy.env_steps} env steps" in out
    assert read_table(copied / "metrics.csv")[: len(logged) - 1] == logged[:-1]


def test_games_that_cannot_go_on_for_a_bug_show_its_traceback(copied, capsys, monkeypatch):
    def buggy(*_):
        raise LookupError("a bug")

    monkeypatch.setattr(EnvGroup, "resume", buggy)
    with pytest.raises(Stopped):
        run_session(TINY, copied, resume=True, stop_requested=lambda: True)
    output = capsys.readouterr()
    assert "session 0  new games are started (LookupError: a bug)\n" in output.out
    assert output.err.startswith("Traceback (most recent call last):\n")


@pytest.mark.long
def test_a_session_that_resumes_and_stops_at_once_is_as_it_was(copied, capsys):
    edit_meta(copied, checkpoint_env_steps(copied)[-1], items={})  # with new games, of which none has made a step
    before = contents(copied)
    with pytest.raises(KeyboardInterrupt):
        run_session(change(TINY, total_env_steps=320), copied, resume=True, stop_requested=stop_before(1))
    after = contents(copied)
    assert {path.name for path in before.keys() ^ after.keys()} <= {"evaluations.csv"}
    assert before[copied / "metrics.csv"].count(b"\n") == after[copied / "metrics.csv"].count(b"\n")
    assert "new games" not in resume(copied, capsys) or True


def test_a_resume_that_cannot_be_changes_nothing(copied):
    before = contents(copied)
    with pytest.raises(
        UserError, match=r"holds another network or optimiser: .*; use the game, network and optimiser"
    ):
        run_session(change(TINY, network={"name": "impala"}), copied, resume=True)
    assert contents(copied) == before
    for step in checkpoint_env_steps(copied):
        flip_all(copied / "checkpoints" / str(step), "arrays")
    before = contents(copied)
    with pytest.raises(UserError, match="no checkpoint is sound"):
        run_session(TINY, copied, resume=True)
    assert contents(copied) == before


@pytest.mark.long
def test_without_a_checkpoint_a_session_starts_anew_and_sets_its_logs_aside(copied, capsys):
    before = [(copied / name).read_bytes() for name in ("metrics.csv", "evaluations.csv")]
    shutil.rmtree(copied / "checkpoints")
    out = resume(copied, capsys)
    before_it = "metrics_2.csv, evaluations_2.csv, actions_2, digests_2.jsonl"
    line = f"the session starts at 0; what was logged before is in {before_it}"
    assert f"session 0  there is no checkpoint: {line}\n" in out
    assert [(copied / name).read_bytes() for name in ("metrics_2.csv", "evaluations_2.csv")] == before
    assert read_table(copied / "metrics.csv")[0]["updates"] == "1"


# --- The run directory -------------------------------------------------------------------------------------------


def test_a_new_run_never_takes_the_folder_of_another(tmp_path):
    config = change(TINY, output_dir=str(tmp_path))
    made = {make_run_dir(config) for _ in range(3)}
    assert len(made) == 3
    assert all(re.fullmatch(r"tiny_\d{8}_\d{6}(_\d)?", path.name) for path in made)
    (tmp_path / "notes").touch()
    with pytest.raises(UserError, match=r"holds .*, and no run; choose another folder or an empty one"):
        make_run_dir(config, tmp_path)
    with pytest.raises(UserError, match="Not a directory; choose a folder that can be written to"):
        make_run_dir(config, tmp_path / "notes" / "run")


@pytest.mark.parametrize(
    ("file", "kind", "name"),
    [
        ("config.json", "run", "train"),
        ("suite.json", "suite", "suite"),
        ("sweep.json", "sweep", "suite"),
        ("search.json", "search", "search"),
    ],
)
def test_a_folder_that_is_taken_says_what_it_holds(tmp_path, file, kind, name):
    (tmp_path / file).write_text("{}")
    (tmp_path / "trial.json").write_text("{}")
    line = (
        f"{tmp_path}: holds a {kind}, which `python -m jaxrl_atari.{name} --resume {tmp_path}` continues; choose"
    )
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        make_run_dir(TINY, tmp_path)
    other = "suite.json" if kind == "search" else "search.json"
    with pytest.raises(UserError, match=rf"it has no {other}\); it holds a {kind}$"):
        read_config(tmp_path, other)


def test_config_json_says_how_a_run_began_and_what_each_resume_changed(tmp_path):
    write_json(tmp_path / "config.json", describe(change(TINY, seed=3)) | {"git_revision": "abc", "python": "3.0"})
    assert read_config(tmp_path) == change(TINY, seed=3)
    write_json(tmp_path / "config.json", describe(change(TINY, seed=3, total_env_steps=320), tmp_path))
    described = read_json(tmp_path / "config.json")
    assert (described["seed"], described["game"], described["protocol"]) == (3, "Breakout", "v5, max_frames=128")
    assert (described["git_revision"], described["hardware"]["gpus"]) == ("abc", None)
    (entry,) = described["resumed"]
    assert entry["changed"] == {"total_env_steps": [192, 320]}
    since = datetime.now(UTC) - datetime.strptime(entry["date"], "%Y-%m-%d %H:%M:%S %Z").replace(tzinfo=UTC)
    assert 0 <= since.total_seconds() < 60, "UTC, also in an hour that a local clock shows twice"
    assert entry["versions"]["jax"] == jax.__version__
    assert entry["numeric_settings"]["xla_threads"] == described["numeric_settings"]["xla_threads"]
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(
        UserError, match=r"config\.json: cannot be used \(JSONDecodeError.*; restore it from a copy"
    ):
        read_config(tmp_path)
    with pytest.raises(UserError, match="not a run directory"):
        read_config(tmp_path / "none")


def test_a_description_of_another_machine_becomes_one_of_this_machine(tmp_path):
    """It is then what `describe` would have returned here, for a new run and for a resume."""
    elsewhere = {"python": "3.0", "git_revision": "abc", "hardware": {"cpu": "another"}}
    there = change(TINY, total_env_steps=320)
    here = change(there, env={"num_threads": 2})
    assert describe_here(here, describe(there) | elsewhere) == describe(here)
    first = change(here, seed=0, total_env_steps=192)
    write_json(tmp_path / "config.json", describe(first) | {"git_revision": "def"})
    described = describe(there, tmp_path)
    described["resumed"][-1] |= elsewhere
    date = {"date": described["resumed"][-1]["date"]}
    expected = describe(here, tmp_path)
    expected["resumed"][-1] |= date
    assert describe_here(here, described) == expected
    assert expected["git_revision"] == "def"
    assert expected["resumed"][-1]["changed"] == {"total_env_steps": (192, 320)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": {"game": "Pong"}}, "env.game = 'Pong': expected Breakout, with which the run began"),
        (
            {"env": {"protocol": "classic"}},
            "env.protocol = 'classic, max_frames=128': expected v5, max_frames=128",
        ),
        (
            {"env": {"life_loss_terminal": False}},
            "env.protocol = 'v5, life_loss_terminal=false, max_frames=128': exp",
        ),
        ({"seed": 9}, "seed = 9: expected 0, with which the run began"),
        ({"total_env_steps": 96}, "total_env_steps = 96: expected at least 1"),
    ],
)
def test_going_on_with_another_run_or_a_budget_that_is_passed_is_refused(options, message, trained):
    with pytest.raises(ConfigError, match=re.escape(message)):
        require_same_run(change(TINY, **options), TINY, trained.parent)
    require_same_run(change(TINY, total_env_steps=1_000), TINY, trained.parent)


def test_whether_a_session_is_finished_is_known_without_starting_jax(trained):
    code = (
        "import sys, pathlib, small_training as t; from jaxrl_atari.hardware.jax_settings import has_started;"
        "from jaxrl_atari.runs.reading import is_finished; print(is_finished(t.TINY, pathlib.Path(sys.argv[1])));"
        "print(has_started())"
    )
    command = [sys.executable, "-c", code, trained]
    assert subprocess.check_output(command, cwd=__file__[:-15], env=user_environment()).split() == [
        b"True",
        b"False",
    ]


def test_without_wandb_a_run_is_refused_before_a_directory_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = change(TINY, output_dir=str(tmp_path / "data"), log={"wandb": True})
    with pytest.raises(UserError, match=r"wandb is not installed; pip install 'jaxrl_atari\[wandb\]'"):
        run_training(config)
    with pytest.raises(UserError, match="wandb is not installed"):
        run_session(config, tmp_path / "session_0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_run_whose_sessions_are_refused_leaves_no_directory(tmp_path, monkeypatch, sessions):
    """The user's own folder stays as it was."""
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(refuses=True))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".notes").write_text("mine")
    config = change(TINY, sessions=sessions, output_dir=str(tmp_path / "data"), log={"wandb": True})
    for run_dir in (None, tmp_path / "mine"):
        with pytest.raises(UserError, match="not logged in"):
            run_training(config, run_dir)
    assert list((tmp_path / "data").iterdir()) == []
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [".notes"]


@pytest.mark.parametrize(
    ("written", "end", "stays"),
    [
        ("suite.json", UserError("refused"), False),
        ("suite.json", KeyboardInterrupt(), True),
        ("Pong/session_0/metrics.csv", UserError("refused"), True),
        ("trial_0/output.txt", UserError("failed on a cluster, in a way that its output shows"), True),
    ],
)
def test_what_a_refused_command_has_written_is_removed_unless_a_session_has_begun(written, end, stays, tmp_path):
    """From a new directory, and from a folder of the user's own, in which hidden files and links are."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/notes.txt").write_text("mine")
    for name in ("new", "mine"):
        directory = tmp_path / name
        was_there = name == "mine"
        (directory / ".git").mkdir(parents=True)
        (directory / written).parent.mkdir(parents=True, exist_ok=True)
        (directory / written).touch()
        (directory / "link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(type(end)), removed_if_refused(directory, is_new=True, was_there=was_there):
            raise end
        assert (directory / written).exists() == stays
        assert (directory / ".git").exists() == (stays or was_there)
        assert (directory / "link").is_symlink() == stays
    assert (tmp_path / "elsewhere/notes.txt").read_text() == "mine"


def test_the_start_names_its_phases(session_dir, capsys):
    run_session(change(TINY, total_env_steps=32), session_dir)
    lines = capsys.readouterr().out
    assert "session 0  starting the games and the network\n" in lines
    first_rollout = r"first rollout \.\.\.\n.*first rollout: [\d.]+ s, [\d.]+ s compiling; "
    assert re.search(first_rollout + r"first update \.\.\.\n.*first update: ", lines)


def test_hours_and_sps_of_a_resume_on_other_clocks(monkeypatch):
    """After a restart of the machine the monotonic clock begins anew, and the date was set back by a day."""
    monotonic, date = SimpleNamespace(now=1e6), SimpleNamespace(now=1.8e9)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic.now)
    monkeypatch.setattr(time, "time", lambda: date.now)
    meta, found = {}, []
    for _ in range(2):
        lines, progress = Lines(), Progress(meta)
        log = session_log(lines, 100, progress, meta.get("unlogged_metrics", ()))
        for _ in range(3):
            monotonic.now += 2
            date.now += 2
            progress.count(100, [], 1)
            log.after_update(lambda: {"loss": 1.0}, 0.1, (0.5, 0.5))
        found += [(row["env_steps"], row["wall_seconds"], row.get("sps")) for row in lines.rows]
        log.read_newest()
        meta = {"config": TINY.to_dict(), **progress.state(), **log.state()}
        monotonic.now, date.now = 5.0, date.now - 86_400
    # The first update of each start, which may compile, does not count.
    assert found[:3] == [(100, 0, None), (200, 2, 50), (300, 4, 50)]
    assert found[3:] == [(400, 4, None), (500, 6, 50), (600, 8, 50)]
