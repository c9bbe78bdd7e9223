"""Checkpoints with real orbax: restoring, retention, and error messages."""

import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import resource
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

from jaxrl_atari.config import Config, NetworkConfig, PPOConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.learner import abstract_arrays
from jaxrl_atari.networks import init_params
from jaxrl_atari.ppo import TrainState, init_train_state
from jaxrl_atari.runs.arrays import hide_later_errors
from jaxrl_atari.runs.checkpoint_writer import CheckpointWriter
from jaxrl_atari.runs.checkpoints import FORMAT_VERSION, Checkpoints, Damaged
from jaxrl_atari.runs.meta import array_checksum, array_shapes, is_sound, meta_checksum

NAN = math.nan


def small_arrays(value, actions=6):
    """A small train state with the real structure."""
    params = {"policy": {"bias": jnp.full(actions, value, jnp.float32)}, "value": {"bias": jnp.zeros(1)}}
    state = TrainState(params, (jnp.full(actions, -value, jnp.float32),), jnp.int32(value))
    return {"train_state": state, "key": jax.random.key(value)}


def save(checkpoints, step, score, arrays=None):
    checkpoints.save(step, arrays or small_arrays(step), {"seed": 3}, score)


@pytest.fixture
def session(tmp_path):
    """A session with checkpoints at 10 (the best) and 20."""
    checkpoints = CheckpointWriter(tmp_path)
    save(checkpoints, 10, 5.0)
    save(checkpoints, 20, 4.0)
    checkpoints.close()
    return tmp_path


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_train_state_is_restored_bit_for_bit(tmp_path):
    shapes = jax.eval_shape(
        lambda key: init_train_state(init_params(NetworkConfig(), 6, key), PPOConfig()), jax.random.key(0)
    )
    rng = np.random.default_rng(1)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)
    arrays = {"train_state": state, "key": jax.random.key(7)}
    checkpoints = CheckpointWriter(tmp_path)
    checkpoints.save(2048, arrays, {"seed": 3, "statistics": {"returns": [1.5]}}, NAN)
    checkpoints.close()

    other = {"train_state": jax.tree.map(jnp.zeros_like, state), "key": jax.random.key(0)}
    reader = Checkpoints(tmp_path)
    assert_same(reader.restore(2048, other), arrays)
    meta = reader.read_meta(2048)
    assert meta["env_steps"] == 2048
    assert meta["format_version"] == FORMAT_VERSION
    assert meta["seed"] == 3
    assert meta["statistics"] == {"returns": [1.5]}
    assert meta["shapes"]["train_state/params/policy/kernel"] == "float32[512, 6]"


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    arrays = {"x": double(jnp.ones(2_000_000))}
    checkpoints = CheckpointWriter(tmp_path)
    checkpoints.save(1, arrays, {}, 0.0)
    x = arrays["x"]
    for _ in range(20):
        x = double(x)
    jax.block_until_ready(x)
    checkpoints.wait()
    np.testing.assert_array_equal(checkpoints.restore(1, {"x": x})["x"], np.full(2_000_000, 2.0))
    checkpoints.close()


@pytest.mark.parametrize(
    ("scores", "kept", "best"),
    [
        ([NAN], [1], 1),
        ([NAN, NAN, NAN], [2, 3], 3),  # no game has ended: the latest is the best
        ([NAN, -5.0, NAN], [2, 3], 2),  # NaN loses, also against a negative score
        ([5.0, 7.0, 3.0, 4.0], [2, 3, 4], 2),
        ([9.0, 7.0, 3.0, 4.0], [1, 3, 4], 1),
        ([5.0, 7.0, 7.0], [2, 3], 3),  # the newest among equals
        ([1.0, 2.0, 3.0], [2, 3], 3),
    ],
)
def test_the_latest_two_and_the_best_are_kept(tmp_path, scores, kept, best):
    checkpoints = CheckpointWriter(tmp_path)
    assert checkpoints.steps() == []
    assert checkpoints.best_step() is None
    for step, score in enumerate(scores, start=1):
        save(checkpoints, step, score)
    checkpoints.close()
    for manager in (checkpoints, Checkpoints(tmp_path)):  # from memory, from disk
        assert manager.steps() == kept
        assert manager.best_step() == best
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [str(step) for step in kept]


def test_a_resumed_session_remembers_the_best(session):
    checkpoints = CheckpointWriter(session)
    save(checkpoints, 30, 4.5)
    checkpoints.wait()
    assert checkpoints.steps() == [10, 20, 30]
    assert checkpoints.best_step() == 10
    save(checkpoints, 40, 4.5)
    checkpoints.wait()
    assert checkpoints.steps() == [10, 30, 40]
    save(checkpoints, 30, 99.0, small_arrays(1))  # no step since: not written again
    checkpoints.close()
    assert_same(Checkpoints(session).restore(30, small_arrays(0)), small_arrays(30))


def test_a_killed_save_keeps_the_previous_checkpoint(session):
    """SIGKILL ends the process while orbax is writing."""
    script = """
        import sys, jax, os, signal
        from jaxrl_atari.runs.checkpoint_writer import CheckpointWriter
        checkpoints = CheckpointWriter(sys.argv[1])
        arrays = {"x": jax.random.uniform(jax.random.key(0), int(3e7))}  # ones would be compressed to nothing
        checkpoints.save(30, arrays, {}, 9.0)
        while len(list(checkpoints.directory.iterdir())) < 3:  # orbax makes the folder in a thread
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(session)], timeout=120, check=False)
    assert result.returncode == -9
    names = {path.name for path in (session / "checkpoints").iterdir()}
    assert names > {"10", "20"}, "the save had not started"
    assert "30" not in names, "the save was complete before the kill: nothing was tested"
    reader = Checkpoints(session)
    assert reader.steps() == [10, 20]
    assert_same(reader.restore(20, small_arrays(0)), small_arrays(20))
    writer = CheckpointWriter(session)  # removes the partial save
    save(writer, 30, 1.0)
    writer.close()
    assert sorted(path.name for path in (session / "checkpoints").iterdir()) == ["10", "20", "30"]


@pytest.mark.parametrize("name", ["DOMAIN\\user", b"caf\xe9".decode(errors="surrogateescape")])
def test_a_path_to_which_orbax_cannot_write_is_refused(tmp_path, name):
    """It would write the arrays of a\\b to a/b, and say nothing."""
    with pytest.raises(UserError, match="has a backslash or is not UTF-8; choose another folder"):
        CheckpointWriter(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_save_after_one_that_failed_is_written_before_the_error(session):
    writer, before = CheckpointWriter(session), resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"x": jax.random.normal(jax.random.key(0), (500_000,))}
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, before[1]))  # as on a full disk
    try:
        save(writer, 30, 4.0, large)
        while writer._manager.is_saving_in_progress():
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(UserError, match=r"could not be written .*then use --resume"):
        save(writer, 40, 4.0)
    writer.close()
    assert_same(writer.restore(40, small_arrays(0)), small_arrays(40))
    assert sorted(path.name for path in writer.directory.iterdir()) == ["10", "20", "40"], "of 30, nothing is left"


def test_a_killed_deletion_leaves_no_half_checkpoint(session, monkeypatch):
    """Removing files takes time; a process that is killed meanwhile leaves what it has not removed."""
    writer = CheckpointWriter(session)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *a, **k: None)
        for step in (30, 40):
            save(writer, step, 6.0)
        writer.close()
    assert writer.steps() == [30, 40]
    moved = sorted(path.name for path in (session / "checkpoints" / "deleted").iterdir())
    assert moved == ["10", "20"]
    assert writer.best_step() == 40
    writer = CheckpointWriter(session)
    save(writer, 50, 6.0)
    writer.close()
    assert not (session / "checkpoints" / "deleted").exists()


def placed_arrays():
    """Arrays on eight devices, one of them split."""
    mesh = jax.make_mesh((8,), ("d",))
    split, copied = (NamedSharding(mesh, PartitionSpec(*names)) for names in (["d"], []))
    arrays = {"split": jnp.arange(16.0), "copied": jnp.arange(3), "key": jax.random.key(5)}
    return arrays, jax.device_put(arrays, {"split": split, "copied": copied, "key": copied})


def test_eight_devices_save_and_one_restores_and_saves_quietly(tmp_path):
    arrays, placed = placed_arrays()
    checkpoints = CheckpointWriter(tmp_path)
    checkpoints.save(1, placed, {}, NAN)
    checkpoints.close()
    script = """
        import sys, jax, jax.numpy as jnp
        from jaxrl_atari.runs.checkpoint_writer import CheckpointWriter
        checkpoints = CheckpointWriter(sys.argv[1])
        arrays = {"split": jnp.zeros(16), "copied": jnp.zeros(3, int), "key": jax.random.key(0)}
        for step in (1, 2, 3):
            arrays = checkpoints.restore(step, arrays)
            assert all(x.devices() == set(jax.devices()) for x in arrays.values())
            checkpoints.save(step + 1, arrays, {}, float("nan"))
            checkpoints.wait()
        checkpoints.close()
    """
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), str(tmp_path)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
    assert_same(Checkpoints(tmp_path).restore(4, arrays), arrays)


def test_one_device_saves_and_eight_restore(tmp_path):
    arrays, placed = placed_arrays()
    checkpoints = CheckpointWriter(tmp_path)
    checkpoints.save(1, arrays, {}, 0.0)
    checkpoints.close()
    restored = Checkpoints(tmp_path).restore(1, placed)
    assert_same(restored, arrays)
    assert {name: x.sharding for name, x in restored.items()} == {name: x.sharding for name, x in placed.items()}


def test_other_users_of_absl_still_log(caplog):
    logging.getLogger("absl").warning("not from orbax")
    assert "not from orbax" in caplog.text


def one_line(error):
    message = str(error.value)
    assert "\n" not in message
    return message


def test_no_such_directory(tmp_path):
    with pytest.raises(UserError, match="no such directory") as error:
        Checkpoints(tmp_path / "missing")
    assert str(tmp_path / "missing") in one_line(error)
    assert not (tmp_path / "missing").exists()


def test_directory_without_checkpoints(tmp_path):
    with pytest.raises(UserError, match="holds no checkpoints"):
        Checkpoints(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "checkpoints").mkdir()
    empty = Checkpoints(tmp_path)
    assert empty.steps() == []
    with pytest.raises(UserError, match="no complete checkpoint"):
        empty.read_meta(1)


def test_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "checkpoints").write_text("a file of that name")
    with pytest.raises(UserError, match="cannot be opened") as error:
        CheckpointWriter(tmp_path)
    one_line(error)


def test_missing_step_names_the_existing_ones(session):
    with pytest.raises(UserError, match="no checkpoint at env step 15; there are: 10, 20"):
        Checkpoints(session).restore(15, small_arrays(0))


def test_another_network_names_the_first_difference(session):
    reader = Checkpoints(session)
    expected = r"policy/bias is float32\[6\], expected float32\[18\]"
    with pytest.raises(UserError, match=expected):
        reader.restore(20, small_arrays(0, actions=18))
    target = small_arrays(0)
    target["train_state"].params["memory"] = jnp.zeros(2)
    with pytest.raises(UserError, match=r"params/memory is not there, expected float32\[2\]"):
        reader.restore(20, target)
    target = small_arrays(0)
    del target["train_state"].params["value"]
    with pytest.raises(UserError, match=r"params/value/bias is float32\[1\], expected none"):
        reader.restore(20, target)


def edit_meta(session, step, **changes):
    """Changes a meta and signs it again."""
    path = session / "checkpoints" / str(step) / "meta" / "metadata"
    meta = json.loads(path.read_text()) | changes
    meta["checksum"] = meta_checksum(meta)
    path.write_text(json.dumps(meta))


def test_another_format_version(session):
    edit_meta(session, 20, format_version=99, package_version="7.0")
    advice = rf"has checkpoint format 99.* reads format {FORMAT_VERSION}; use the version that saved it \(7.0;"
    for read in (lambda c: c.restore(20, small_arrays(0)), lambda c: c.restore_newest(lambda m: small_arrays(0), ())):
        with pytest.raises(UserError, match=advice):
            read(Checkpoints(session))


def damage_arrays(step_dir):
    for path in (step_dir / "arrays").rglob("[0-9]*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        damage_arrays,
        lambda step_dir: shutil.rmtree(step_dir / "arrays"),
        lambda step_dir: shutil.rmtree(step_dir / "meta"),
        lambda step_dir: (step_dir / "meta" / "metadata").write_text('{"format_ver'),
        lambda step_dir: (step_dir / "arrays" / "train_state.params.policy.bias" / ".zarray").write_bytes(b""),
        lambda step_dir: shutil.rmtree(step_dir / "arrays" / "train_state.params.policy.bias"),
        lambda step_dir: (step_dir / "arrays" / "_METADATA").write_text("{"),
    ],
    ids=["cut arrays", "no arrays", "no meta", "cut meta", "empty array", "no array", "cut metadata"],
)
def test_damaged_checkpoint_is_named_and_the_other_can_be_restored(session, damage):
    damage(session / "checkpoints" / "20")
    reader = Checkpoints(session)
    with pytest.raises(UserError, match=r"checkpoints/20: damaged: its (arrays|meta) cannot be read") as error:
        reader.restore(20, small_arrays(0))
    one_line(error)
    assert_same(reader.restore(10, small_arrays(0)), small_arrays(10))


@pytest.mark.parametrize("content", ["[1, 2]", "{}", '{"format_version": "3"}', "[" * 100_000])
def test_meta_of_another_program(session, content):
    (session / "checkpoints" / "20" / "meta" / "metadata").write_text(content)
    with pytest.raises(Damaged, match=r"checkpoints/20: damaged: its meta .*; other checkpoints: 10") as error:
        Checkpoints(session).read_meta(20)
    one_line(error)


@contextlib.contextmanager
def as_an_ordinary_user():
    """Root may read everything; this process becomes nobody for a moment."""
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("refused", ["meta/metadata", "arrays/train_state.params.policy.bias/.zarray", "arrays", "."])
def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(session, refused):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # nobody may not enter pytest's, nor perhaps TMPDIR
        os.chmod(folder, 0o755)
        session = shutil.copytree(session, Path(folder) / "session_0")
        session.chmod(0o755)
        path = session / "checkpoints" / "20" / refused
        mode = path.stat().st_mode
        path.chmod(0)
        with as_an_ordinary_user(), pytest.raises(UserError, match=r"checkpoints/20: cannot be read \(Perm") as error:
            newest(session)
        assert "move it away to use another checkpoint" in one_line(error)
        path.chmod(mode)
        with as_an_ordinary_user():
            assert newest(session).step == 20


def flips(step_dir, places):
    """Flips one bit in each file at several places; yields the file's name while the bit is flipped."""
    for path in sorted(path for path in step_dir.rglob("*") if path.is_file()):
        sound = path.read_bytes()
        for index in range(places):
            at = index * (len(sound) - 1) // (places - 1)
            damaged = bytearray(sound)
            damaged[at] ^= 1 << (index % 8)
            path.write_bytes(damaged)
            yield path.relative_to(step_dir).as_posix()
        path.write_bytes(sound)


def newest(session):
    return Checkpoints(session).restore_newest(lambda meta: small_arrays(0), ())


def test_a_flipped_bit_never_gives_other_parameters(session):
    step_dir = session / "checkpoints" / "20"
    assert is_sound(step_dir)
    sound_meta, found = Checkpoints(session).read_meta(20), {}
    for name in flips(step_dir, places=5):
        reader = Checkpoints(session)
        try:
            assert_same(reader.restore(20, small_arrays(0)), small_arrays(20))
            assert reader.read_meta(20) == sound_meta
            assert reader.best_step() == 10
        except Damaged as error:
            found[name] = str(error)
            assert not is_sound(step_dir) or name == "arrays/_METADATA", name
        restored = newest(session)
        assert_same(restored.arrays, small_arrays(restored.step))
        assert list(restored.damaged) == ([] if restored.step == 20 else [20])
    assert not any("\n" in message for message in found.values())
    assert "meta/metadata" in found
    assert "arrays/train_state.params.policy.bias/.zarray" in found


def test_soundness_is_known_without_restoring(session):
    step_dir = session / "checkpoints" / "20"
    metadata = step_dir / "arrays" / "_METADATA"
    text = metadata.read_text()
    metadata.write_text(text[: len(text) // 2])
    assert not is_sound(step_dir)
    metadata.write_text(text)
    assert is_sound(step_dir)
    damage_arrays(step_dir)
    assert not is_sound(step_dir)
    assert not is_sound(session / "checkpoints" / "30")


@pytest.mark.slow
def test_a_flipped_bit_in_a_checkpoint_of_real_size(tmp_path):
    state = init_train_state(init_params(NetworkConfig(), 6, jax.random.key(0)), PPOConfig())
    arrays, other = ({"train_state": state, "key": jax.random.key(key)} for key in (7, 8))
    checkpoints = CheckpointWriter(tmp_path)
    checkpoints.save(10, arrays, {}, 1.0)
    checkpoints.close()
    found, tried = set(), 0
    for name in flips(tmp_path / "checkpoints" / "10", places=40):
        tried += 1
        try:
            assert_same(Checkpoints(tmp_path).restore(10, other), arrays)
        except Damaged:
            found.add(name)
    assert tried > 300
    assert any(name.startswith("arrays/") for name in found)


@pytest.mark.parametrize("digit", range(10))
def test_no_other_format_version_hides_damage(session, digit):
    """One flipped bit turns format 3 into format 2, which would advise the user to look for another version."""
    path = session / "checkpoints" / "20" / "meta" / "metadata"
    text = path.read_text()
    assert '"format_version": 3' in text
    path.write_text(text.replace('"format_version": 3', f'"format_version": {digit}').replace('"seed": 3', '"seed": 4'))
    with pytest.raises(Damaged, match="its meta differs from its checksum"):
        Checkpoints(session).read_meta(20)


def test_changed_arrays_are_found_though_they_can_be_read(session):
    """The arrays of another checkpoint of the same shapes."""
    shutil.rmtree(session / "checkpoints" / "20" / "arrays")
    shutil.copytree(session / "checkpoints" / "10" / "arrays", session / "checkpoints" / "20" / "arrays")
    with pytest.raises(Damaged, match=r"checkpoints/20: damaged: its array \S+ differs from its checksum"):
        Checkpoints(session).restore(20, small_arrays(0))
    shutil.copytree(session / "checkpoints" / "10", session / "checkpoints" / "30")
    with pytest.raises(Damaged, match="checkpoints/30: damaged: its meta is that of env step 10"):
        Checkpoints(session).read_meta(30)


def test_the_newest_sound_checkpoint_is_restored_and_the_damaged_one_set_aside(session):
    damage_arrays(session / "checkpoints" / "20")
    before = sorted(path.name for path in (session / "checkpoints").iterdir())
    restored = newest(session)
    assert (restored.step, list(restored.damaged)) == (10, [20])
    assert sorted(path.name for path in (session / "checkpoints").iterdir()) == before, "reading changes nothing"
    writer = CheckpointWriter(session)
    assert writer.set_aside(20) == session / "checkpoints" / "damaged_20"
    save(writer, 20, 4.0, small_arrays(21))
    save(writer, 30, 4.0)
    writer.close()
    assert writer.steps() == [10, 20, 30]
    assert_same(writer.restore(20, small_arrays(0)), small_arrays(21))
    assert writer.set_aside(20).name == "damaged_20_2"
    assert (session / "checkpoints" / "damaged_20" / "arrays").is_dir()


def test_without_a_sound_checkpoint_nothing_is_restored(session):
    for step in (10, 20):
        damage_arrays(session / "checkpoints" / str(step))
    with pytest.raises(UserError, match=r"no checkpoint is sound \(20: its arrays .*; 10: its arrays .*\); restore"):
        newest(session)


@pytest.mark.parametrize("damaged_step", [10, 20])
def test_writing_beside_a_damaged_checkpoint(session, damaged_step):
    """Whatever file of an earlier checkpoint is damaged, orbax saves, and what may be the best is not deleted."""
    for path in (session / "checkpoints" / str(damaged_step)).rglob("*"):
        if path.is_file():
            path.write_bytes(b'{"score": "x", "commit_timestamp_nsecs": 1e99')
    writer = CheckpointWriter(session)
    for step in (30, 40):
        save(writer, step, 1.0)
    writer.close()
    assert writer.steps() == [10, 20, 30, 40]


@pytest.mark.parametrize(("free", "advice"), [(0, "free some space"), (1 << 40, "fix the cause")])
def test_a_checkpoint_that_cannot_be_written(free, advice, tmp_path, monkeypatch):
    checkpoints = CheckpointWriter(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    reported = "RESOURCE_EXHAUSTED: " + "x" * 500 + " No space left on device"
    monkeypatch.setattr(checkpoints._manager, "save", lambda *a, **k: (_ for _ in ()).throw(ValueError(reported)))
    expected = rf"written \(ValueError: RESOURCE_EXHAUSTED: x.*x No space left on device\); {advice}, then use --resume"
    with pytest.raises(UserError, match=expected) as error:
        checkpoints.save(1, small_arrays(0), {}, 0.0)
    assert len(str(error.value)) < 500


def test_a_folder_that_is_deleted_while_training(session):
    writer = CheckpointWriter(session)
    shutil.rmtree(session / "checkpoints")
    with pytest.raises(UserError, match="the folder is gone: put it back if you can, then use --resume"):
        save(writer, 30, 1.0)


def test_only_tensorstores_calls_of_a_closed_loop_are_hidden(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    monkeypatch.setattr(logging.getLogger("asyncio"), "filters", [])
    hide_later_errors.__wrapped__()
    closed = RuntimeError("Event loop is closed")
    sys.unraisablehook(SimpleNamespace(object=None, exc_value=closed))
    assert shown == []
    for seen in (
        SimpleNamespace(object=None, exc_value=RuntimeError("the disk is broken")),
        SimpleNamespace(object=print, exc_value=closed),  # a callback of Python
    ):
        sys.unraisablehook(seen)
        assert shown.pop() is seen


@pytest.mark.parametrize(("error", "hidden"), [(ValueError("NOT_FOUND: gone"), True), (ValueError("a bug"), False)])
def test_asyncio_reports_only_errors_that_are_not_tensorstores(error, hidden, monkeypatch, caplog):
    logger = logging.getLogger("asyncio")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    hide_later_errors.__wrapped__()
    loop = asyncio.new_event_loop()
    loop.create_future().set_exception(error)  # nobody retrieves it
    gc.collect()
    loop.close()
    assert ("never retrieved" in caplog.text) is not hidden


def test_what_checkpoints_hold_can_be_read_by_later_versions():
    """A change here makes every existing run unreadable: it needs another `FORMAT_VERSION`."""
    assert meta_checksum({"env_steps": 10, "score": None}) == "a314a40edb1f87ee"
    assert array_checksum(np.arange(3, dtype=np.float32)) == "e56626e76d326cb6"
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
    assert array_shapes(abstract_arrays(Config(), 6, jax.devices("cpu")[0])) == expected
