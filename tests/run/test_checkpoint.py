"""Checkpoints with real orbax: what is kept, what is restored, and what damage, kills and full disks leave."""

import asyncio
import contextlib
import gc
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_training import abstract_arrays, edit_meta, flip_bit
from user_commands import one_error_line

from jaxrl_atari.algorithm import TrainState
from jaxrl_atari.config import Config, EnvConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs import checkpoints
from jaxrl_atari.runs.arrays import array_digests, array_shapes
from jaxrl_atari.runs.checkpoints import Checkpoints, DamagedCheckpoint, meta_digest
from jaxrl_atari.runs.early_runs import complete_meta
from jaxrl_atari.runs.published import save_parameters
from jaxrl_atari.session_environments import games_problem

NAN = math.nan
GAMES = {"steps": np.arange(3), "frame": np.full((3, 84, 84), 7, np.uint8)}


def small_arrays(value, actions=6):
    """A small train state with the real structure."""
    params = {"policy": {"bias": jnp.full(actions, value, jnp.float32)}, "value": {"bias": jnp.zeros(1)}}
    state = TrainState(params, (jnp.full(actions, -value, jnp.float32),), jnp.int32(value))
    return {"train_state": state, "key": jax.random.key(value)}


def save(checkpoints, step, score, arrays=None):
    checkpoints.save(step, {"arrays": arrays or small_arrays(step), "games": GAMES}, {"seed": 3}, score)


def newest(session):
    return Checkpoints(session).restore_newest(lambda meta: small_arrays(0))


@pytest.fixture
def session(tmp_path):
    """A session with checkpoints at 10 (the best) and 20."""
    for step, score in ((10, 5.0), (20, 4.0)):
        save(Checkpoints(tmp_path), step, score)
    return tmp_path


def assert_same(a, b):
    assert array_shapes(a) == array_shapes(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_everything_is_restored_bit_for_bit_in_whole_or_in_part(tmp_path):
    rng = np.random.default_rng(1)
    target = abstract_arrays(Config(), 6)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), target["train_state"])
    arrays = {"train_state": state, "key": jax.random.key(7)}
    save(Checkpoints(tmp_path), 2048, NAN, arrays)
    checkpoints = Checkpoints(tmp_path)
    assert_same(checkpoints.restore(2048, target), arrays)
    found = checkpoints.restore(2048, target, part="train_state/params/")
    assert_same(found["train_state"].params, state.params)
    assert found["key"] is target["key"]
    assert_same(checkpoints.restore(2048, item="games"), GAMES)
    meta = checkpoints.read_meta(2048)
    assert (meta["env_steps"], meta["seed"], meta["score"]) == (2048, 3, None)


def test_what_checkpoints_hold_can_be_read_by_later_versions():
    """A change here makes every existing run unreadable: it needs another `FORMAT_VERSION`."""
    assert meta_digest({"env_steps": 10, "score": None}) == "a314a40edb1f87ee"
    assert array_digests({"x": np.arange(3, dtype=np.float32)}) == {"x": "e56626e76d326cb6"}
    layers = {
        "conv1": ([8, 8, 4, 32], [32]), "conv2": ([4, 4, 32, 64], [64]), "conv3": ([3, 3, 64, 64], [64]),
        "dense": ([3136, 512], [512]), "policy": ([512, 6], [6]), "value": ([512, 1], [1]),
    }  # fmt: skip
    expected = {
        "key": "key<fry>[]",
        "train_state/optimizer_steps": "int32[]",
        "train_state/opt_state/1/count": "int32[]",
    }
    for name, shapes in layers.items():
        for part in ("params", "opt_state/1/mu", "opt_state/1/nu"):
            for leaf, shape in zip(("kernel", "bias"), shapes, strict=True):
                expected[f"train_state/{part}/{name}/{leaf}"] = f"float32{shape}"
    assert array_shapes(abstract_arrays(Config(), 6)) == expected


def test_an_early_checkpoint_of_format_3_gets_what_later_ones_have():
    counted = {"env_steps": 50_000, "updates": 3, "config": {"ppo": {"rollout_length": 128}}}
    statistics = {"episodes": 2, "returns": [1.0, 3.0], "lengths": [10, 20]}
    early = {**counted, "statistics": statistics | {"points": [1.0, 2.0]}}
    complete = {
        **counted, "steps": 384, "logged_env_steps": 50_000, "evaluated_env_steps": 50_000,
        "unlogged_metrics": [], "statistics": statistics | {"points": [(40_000, 1.0), (50_000, 2.0)]},
    }  # fmt: skip
    assert complete_meta(early) == complete
    later = complete | {"steps": 400, "logged_env_steps": 45_000, "items": {"games": {}}}
    assert complete_meta(later) == later


@pytest.mark.parametrize(
    ("scores", "kept", "best"),
    [
        ([], [], None),
        ([NAN, NAN, None], [2, 3], 3),  # no game has ended: the latest is the best
        ([NAN, -5.0, NAN], [2, 3], 2),  # NaN loses, also against a negative score
        ([5.0, 7.0, 3.0, 4.0], [2, 3, 4], 2),
        ([9.0, 7.0, None, 4.0, None], [1, 4, 5], 1),  # None: written because of a stop
        ([5.0, 7.0, 7.0], [2, 3], 3),  # the newest among equals
    ],
)
def test_the_latest_two_and_the_best_are_kept(tmp_path, scores, kept, best):
    checkpoints = Checkpoints(tmp_path)
    for step, score in enumerate(scores, start=1):
        save(checkpoints, step, score)
    for reader in (checkpoints, Checkpoints(tmp_path)):  # from memory, from disk
        assert (reader.env_steps(), reader.best_env_steps()) == (kept, best)
    assert sorted(path.name for path in tmp_path.glob("checkpoints/*")) == list(map(str, kept))


def test_a_checkpoint_that_exists_is_renamed_and_named(session):
    said = []
    checkpoints = Checkpoints(session, said.append)
    save(checkpoints, 20, 99.0, small_arrays(1))
    assert said == [
        f"{checkpoints.directory}/20: was there already; it is now {checkpoints.directory}/replaced_20"
    ]
    assert_same(newest(session).arrays, small_arrays(1))
    (checkpoints.directory / "replaced_20").rename(checkpoints.directory / "30")
    assert_same(checkpoints.restore(30, small_arrays(20)), small_arrays(20))
    flip_bit(checkpoints.directory / "20" / "meta" / "metadata")
    save(checkpoints, 20, 99.0, small_arrays(1))  # a damaged one too
    assert len(said) == 2
    assert_same(checkpoints.restore(20, small_arrays(1)), small_arrays(1))


def test_devices_of_any_number_restore_what_others_saved(tmp_path):
    mesh = jax.make_mesh((8,), ("d",))
    arrays = {"split": jnp.arange(16.0), "copied": jnp.arange(3), "key": jax.random.key(5)}
    names = {"split": ["d"], "copied": [], "key": []}
    placed = jax.device_put(
        arrays, {name: NamedSharding(mesh, PartitionSpec(*axes)) for name, axes in names.items()}
    )
    for step, (saved, target) in enumerate([(placed, arrays), (arrays, placed)]):
        save(Checkpoints(tmp_path), step, NAN, saved)
        restored = Checkpoints(tmp_path).restore(step, target)
        assert_same(restored, arrays)
        assert [x.sharding for x in restored.values()] == [target[name].sharding for name in restored]


# --- Damage ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax's own, of a damaged .zarray
def test_a_flipped_bit_is_never_silent(session):
    step_dir, found = session / "checkpoints" / "20", set()
    sound = Checkpoints(session).read_meta(20)
    for path in sorted(filter(Path.is_file, step_dir.rglob("*"))):
        content = path.read_bytes()
        for at in (0, 0.3, 0.7, 1):
            flip_bit(path, at)
            checkpoints = Checkpoints(session)
            try:
                assert_same(checkpoints.restore(20, small_arrays(0)), small_arrays(20))
                assert_same(checkpoints.restore(20, item="games"), GAMES)
                assert checkpoints.read_meta(20) == sound
            except DamagedCheckpoint:
                found.add(path.relative_to(step_dir).as_posix())
            restored = newest(session)
            assert_same(restored.arrays, small_arrays(restored.env_steps))
            assert list(restored.damaged) == ([] if restored.env_steps == 20 else [20])
            path.write_bytes(content)
    assert {"meta/metadata", "games/steps/0", "arrays/train_state.params.policy.bias/0"} <= found


def flip_all_data(step_dir):
    """pytest would report a traceback of orbax beside our line."""
    for path in step_dir.glob("arrays/*/0"):
        flip_bit(path)


def replaced_by_another(step_dir):
    shutil.rmtree(step_dir / "arrays")
    shutil.copytree(step_dir.with_name("10") / "arrays", step_dir / "arrays")


@pytest.mark.parametrize(
    "damage",
    [
        replaced_by_another,
        flip_all_data,
        lambda step_dir: shutil.rmtree(step_dir / "arrays"),
        lambda step_dir: shutil.rmtree(step_dir / "meta"),
        lambda step_dir: shutil.rmtree(step_dir / "arrays" / "train_state.params.policy.bias"),
        lambda step_dir: (step_dir / "arrays" / "_METADATA").write_text("{"),
        lambda step_dir: (step_dir / "meta" / "metadata").write_text("[1, 2]"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_set_aside(damage, session):
    damage(session / "checkpoints" / "20")
    restored = newest(session)
    assert restored.env_steps == 10
    assert "\n" not in str(restored.damaged[20])
    checkpoints = Checkpoints(session)
    assert checkpoints.set_aside(20) == session / "checkpoints" / "damaged_20"
    save(checkpoints, 20, 1.0)
    assert checkpoints.set_aside(20).name == "damaged_20_2"
    assert checkpoints.env_steps() == [10]


def test_late_reports_of_a_failed_restore_are_dropped(session, monkeypatch):
    """Orbax's threads may report after another checkpoint was restored. It depends on the machine's load."""
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", report := reports.append)
    shutil.rmtree(session / "checkpoints" / "20" / "arrays" / "train_state.params.policy.bias")
    assert newest(session).env_steps == 10
    sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError("Event loop is closed")))
    sys.unraisablehook(other := SimpleNamespace(exc_value=RuntimeError("another")))
    assert reports == [other]
    save(Checkpoints(session), 30, 1.0)
    assert sys.unraisablehook is report


def test_without_a_sound_checkpoint_nothing_is_restored(session):
    for step in (10, 20):
        shutil.rmtree(session / "checkpoints" / str(step) / "arrays")
    with pytest.raises(
        UserError, match=r"no checkpoint is sound \(.*/20: damaged: .*; .*/10: damaged: .*\); restore"
    ):
        newest(session)


def test_what_may_be_the_best_is_not_removed(session, capsys):
    (session / "checkpoints" / "10" / "meta" / "metadata").write_text("{")
    checkpoints = Checkpoints(session, print)
    for step in (30, 40):
        save(checkpoints, step, 1.0)
    assert checkpoints.env_steps() == [10, 20, 30, 40]
    assert "checkpoints/10: damaged: its meta cannot be read" in capsys.readouterr().out


def test_errors_name_what_is_wrong(session):
    checkpoints = Checkpoints(session)
    with pytest.raises(UserError, match="checkpoints/15: no such checkpoint; there are: 10, 20"):
        checkpoints.restore(15, small_arrays(0))
    for actions in (18, 4):
        expected = (
            rf"another network .*: train_state/params/policy/bias is float32\[6\], expected float32\[{actions}\]"
        )
        with pytest.raises(UserError, match=expected):
            checkpoints.restore_newest(lambda meta, n=actions: small_arrays(0, n))
    edit_meta(session, 20, format_version=99, package_version="7.0")
    with pytest.raises(UserError, match=r"has checkpoint format 99, .* 3; use the version that saved it \(7.0\)"):
        newest(session)


# --- Kills and disks ---------------------------------------------------------------------------------------------

SAVE = """
    import sys, jax
    from pathlib import Path
    from jaxrl_atari import cli
    from jaxrl_atari.runs.checkpoints import Checkpoints
    # Many arrays, so that some are being written when one fails; random ones, because ones would vanish.
    arrays = {str(i): jax.random.uniform(jax.random.key(i), int(sys.argv[2]) // 20) for i in range(20)}
    cli.run(lambda: Checkpoints(Path(sys.argv[1])).save(30, {"arrays": arrays}, {}, 9.0))
"""


def start_save(session, size, environment):
    command = [sys.executable, "-c", textwrap.dedent(SAVE), str(session), f"{size:.0f}"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_killed_save_keeps_the_previous_checkpoints(session, environment):
    with start_save(session, 3e7, environment) as process:
        while len(list((session / "checkpoints").iterdir())) < 3:
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    assert Checkpoints(session).env_steps() == [10, 20], (
        "the save was complete before the kill: nothing was tested"
    )
    assert_same(newest(session).arrays, small_arrays(20))
    (session / "checkpoints" / "removed_5").mkdir()  # a killed deletion
    save(Checkpoints(session), 30, 1.0)
    assert sorted(path.name for path in (session / "checkpoints").iterdir()) == ["10", "20", "30"]


@contextlib.contextmanager
def small_disk(folder, limit="size=1m"):
    mount = ["mount", "-t", "tmpfs", "-o", limit, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_a_save_at_once_and_nothing_is_lost(tmp_path, environment):
    with small_disk(tmp_path):
        for step in (10, 20):
            save(Checkpoints(tmp_path), step, 1.0)
        with start_save(tmp_path, 1e6, environment) as process:
            _, errors = process.communicate(timeout=100)
        assert process.returncode == 2, errors
        line = one_error_line(errors)
        assert errors == f"{line}\n"
        assert "checkpoints/30: the checkpoint could not be written (" in line
        assert line.endswith("; fix the cause, then use --resume")
        assert "No space left on device" in line
        assert_same(newest(tmp_path).arrays, small_arrays(20))
        save(Checkpoints(tmp_path), 40, 1.0)  # the rest of the failed one makes room


@pytest.mark.parametrize("free", range(4))
def test_where_no_further_file_or_folder_can_be_made_a_save_ends_at_once(tmp_path, environment, free):
    """Orbax's threads must not wait for a folder that never comes: Python would wait for them."""
    with small_disk(tmp_path, "nr_inodes=200"):
        save(Checkpoints(tmp_path), 20, 1.0)
        while os.statvfs(tmp_path).f_favail > free:
            (tmp_path / str(os.statvfs(tmp_path).f_favail)).touch()
        with start_save(tmp_path, 10, environment) as process:
            _, errors = process.communicate(timeout=100)
        assert process.returncode == 2, errors
        assert "checkpoints/30: the checkpoint could not be written (" in one_error_line(errors)
        assert_same(newest(tmp_path).arrays, small_arrays(20))


@contextlib.contextmanager
def an_ordinary_user(*writable):
    """Root may do everything; this process becomes nobody for a moment."""
    if os.geteuid() != 0:
        yield
        return
    for folder in writable:
        shutil.chown(folder, "nobody")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_an_old_checkpoint_that_cannot_be_removed_is_left_with_one_line(session, capsys):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # nobody may not enter pytest's
        Path(folder).chmod(0o755)
        checkpoints = Path(shutil.copytree(session / "checkpoints", Path(folder) / "checkpoints"))
        arrays = checkpoints / "20" / "arrays"
        arrays.chmod(0o555)
        with an_ordinary_user(folder, checkpoints, checkpoints / "20"):
            for step in (30, 40, 50):
                save(Checkpoints(Path(folder), print), step, 4.0)
        problem = "this old checkpoint cannot be removed (Permission denied) and is left there"
        assert capsys.readouterr().out == f"{checkpoints}/removed_20: {problem}\n"
        assert Checkpoints(Path(folder)).env_steps() == [10, 40, 50]
        for path in checkpoints.glob("removed_20/arrays"):
            path.chmod(0o755)


def test_late_reports_of_failed_saves_are_dropped_until_a_save_succeeds(tmp_path, monkeypatch, caplog):
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", hook := reports.append)

    def late_hook():
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError("Event loop is closed")))

    def late_log(file):
        """What asyncio logs of a task whose error nobody has asked for."""

        async def write():
            raise ValueError(f"Error writing local file {file}")

        async def start():
            asyncio.create_task(write())  # noqa: RUF006
            await asyncio.sleep(0)

        caplog.clear()
        asyncio.run(start())
        gc.collect()
        return len(caplog.records)

    one_of_ours, another = "checkpoints/30.orbax-checkpoint-tmp/arrays/13", "a file of the user"
    assert late_log(one_of_ours) == 1
    with monkeypatch.context() as disk:
        disk.setattr(checkpoints, "write_checkpoint", lambda *_: os.close(-1))
        for _ in range(2):
            with pytest.raises(UserError, match="could not be written"):
                save(Checkpoints(tmp_path), 10, 1.0)
    late_hook()
    sys.unraisablehook(other := SimpleNamespace(exc_value=RuntimeError("another")))
    assert reports == [other]
    assert [late_log(one_of_ours), late_log(another)] == [0, 1]
    save(Checkpoints(tmp_path), 10, 1.0)
    assert sys.unraisablehook is hook
    assert late_log(one_of_ours) == 1


def test_a_checkpoint_stays_if_the_one_that_replaces_it_cannot_be_written(session, monkeypatch):
    before = sorted(path.name for path in (session / "checkpoints").iterdir())
    with monkeypatch.context() as disk:
        disk.setattr(checkpoints, "write_checkpoint", lambda *_: os.close(-1))
        with pytest.raises(UserError, match="checkpoints/20: the checkpoint could not be written"):
            save(Checkpoints(session), 20, 6.0)
    assert sorted(path.name for path in (session / "checkpoints").iterdir()) == before
    assert newest(session).env_steps == 20


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "checkpoints").write_text("a file of that name")
    with pytest.raises(UserError, match="checkpoints/10: the checkpoint could not be written"):
        save(Checkpoints(tmp_path), 10, 1.0)
    with pytest.raises(UserError, match="; fix the cause, then publish again"):
        save_parameters(Checkpoints(tmp_path), {"bias": np.zeros(2)}, {"env_steps": 10, "score": 1.0})


def test_a_checkpoint_of_an_early_version_has_no_games(tmp_path):
    save(Checkpoints(tmp_path), 10, 1.0)
    path = tmp_path / "checkpoints" / "10" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    del meta["items"]
    path.write_text(json.dumps(meta))
    edit_meta(tmp_path, 10, config=Config().to_dict())
    early = Checkpoints(tmp_path)
    assert games_problem(EnvConfig(), early.read_meta(10)).startswith("the checkpoint has none: ")
    early.check(10)
