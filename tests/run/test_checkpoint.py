"""Checkpoints with real orbax: what is kept, what is restored, and what damage does."""

import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_checkpoints import CPU, GAMES, assert_same, newest, save, save_two, small_arrays
from small_training import edit_meta, first_arrays, flip_bit

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.columns import EVALUATION_COLUMNS

NAN = math.nan


@pytest.fixture
def session(tmp_path):
    """A session with checkpoints at 10 (the best) and 20."""
    return save_two(tmp_path)


def test_everything_is_restored_bit_for_bit_in_whole_or_in_part(tmp_path):
    rng = np.random.default_rng(1)
    target = first_arrays(Config(), 6)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), target["train_state"])
    arrays = {"train_state": state, "key": jax.random.key(7)}
    save(Checkpoints(tmp_path), 2048, NAN, arrays)
    checkpoint = Checkpoints(tmp_path).read(2048)
    assert_same(checkpoint.to_device("arrays", target, CPU), arrays)
    found = checkpoint.to_device("arrays", {"train_state": {"params": target["train_state"].params}}, CPU)
    assert_same(found["train_state"]["params"], state.params)
    assert_same(checkpoint.items["games"], GAMES)
    meta = checkpoint.meta
    assert (meta["env_steps"], meta["seed"], meta["score"]) == (2048, 3, None)


@pytest.mark.parametrize(
    ("scores", "kept", "best"),
    [
        ([], [], None),
        ([NAN, -5.0, NAN], [2, 3], 2),  # NaN loses, also against a negative score
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


def test_a_device_restores_what_several_have_saved(tmp_path):
    mesh = jax.make_mesh((8,), ("d",))
    arrays = {"split": jnp.arange(16.0), "copied": jnp.arange(3), "key": jax.random.key(5)}
    names = {"split": ["d"], "copied": [], "key": []}
    placed = jax.device_put(
        arrays, {name: NamedSharding(mesh, PartitionSpec(*axes)) for name, axes in names.items()}
    )
    save(Checkpoints(tmp_path), 1, NAN, placed)
    device = jax.devices("cpu")[3]
    restored = Checkpoints(tmp_path).read(1).to_device("arrays", arrays, device)
    assert_same(restored, arrays)
    assert [x.devices() for x in restored.values()] == [{device}] * 3


def replaced_by_another(step_dir):
    shutil.rmtree(step_dir / "arrays")
    shutil.copytree(step_dir.with_name("10") / "arrays", step_dir / "arrays")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax's own, of a missing array
@pytest.mark.parametrize(
    "damage",
    [
        replaced_by_another,
        lambda step_dir: shutil.rmtree(step_dir / "arrays"),
        lambda step_dir: shutil.rmtree(step_dir / "arrays" / "train_state.params.policy.bias"),
        lambda step_dir: (step_dir / "meta" / "metadata").write_text("[1, 2]"),
        lambda step_dir: flip_bit(step_dir / "meta" / "metadata"),
    ],
    ids=["arrays of another", "no arrays", "an array is missing", "another meta", "a bit of the meta"],
)
def test_a_damaged_checkpoint_is_passed_over_and_set_aside(damage, session):
    damage(session / "checkpoints" / "20")
    env_steps, arrays, damaged = newest(session)
    assert env_steps == 10
    assert_same(arrays, small_arrays(10))
    assert "\n" not in str(damaged[20])
    checkpoints = Checkpoints(session)
    assert checkpoints.set_aside(20) == session / "checkpoints" / "damaged_20"
    save(checkpoints, 20, 1.0)
    assert checkpoints.set_aside(20).name == "damaged_20_2"
    assert checkpoints.env_steps() == [10]


def test_what_may_be_the_best_is_not_removed(session, capsys):
    (session / "checkpoints" / "10" / "meta" / "metadata").write_text("{")
    checkpoints = Checkpoints(session, print)
    for step in (30, 40):
        save(checkpoints, step, 1.0)
    assert checkpoints.env_steps() == [10, 20, 30, 40]
    assert "checkpoints/10: damaged: its meta cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize(("keep", "kept"), [(0, [10, 20, 30, 40, 50]), (1, [10, 30, 50]), (2, [10, 30, 40, 50])])
def test_the_best_by_evaluation_and_the_latest_are_kept(keep, kept, tmp_path):
    """10 has the highest evaluation, 20 the highest return in training; 30 is being evaluated."""
    evaluated = Path(tmp_path, "evaluations.csv")
    header = ",".join(EVALUATION_COLUMNS)
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step, in_training in ((10, 1.0), (20, 9.0), (30, 2.0), (40, 3.0), (50, 3.0)):
        arrays = {"arrays": small_arrays(step)}
        checkpoints.save(step, arrays, {"evaluated_env_steps": 10 if step < 30 else 30}, in_training)
        evaluated.write_text(f"{header}\n10,4,7.0,1.0,0,0,0\n")
    assert checkpoints.env_steps() == kept
    assert checkpoints.best_env_steps() == 10
    evaluated.write_text(f"{header}\n10,4,7.0,1.0,0,0,0\n30,4,8.0,1.0,0,0,0\n")
    assert checkpoints.best_env_steps() == 30
    evaluated.unlink()
    assert checkpoints.best_env_steps() == (20 if keep == 0 else 50)


def test_errors_name_what_is_wrong(session):
    with pytest.raises(UserError, match=r"train_state/params/policy/bias is float32\[6\], expected float32\[4\]"):
        newest(session, actions=4)
    edit_meta(session, 20, format_version=99, package_version="7.0")
    with pytest.raises(UserError, match=r"has checkpoint format 99, .* use the version that saved it \(7.0\)"):
        newest(session)
