"""Checkpoints of a session: everything the learner needs, on disk. The only module that imports orbax.

SESSION_DIR/checkpoints/<env_steps>/arrays    the arrays, in orbax's format (OCDBT); of PRNG keys, their data
SESSION_DIR/checkpoints/<env_steps>/meta      JSON: whatever the session adds, `format_version`, `env_steps`, `shapes`
SESSION_DIR/checkpoints/<env_steps>/metrics   JSON: the score by which the best one is kept

Orbax writes a step under a temporary name and renames it when it is complete, so a step that is listed is whole.
"""

import contextlib
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jaxrl_atari import __version__
from jaxrl_atari.errors import UserError

FORMAT_VERSION = 2

# Orbax tells its inner life, also what it raises, through absl, which prints to the terminal from "warning" on.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in Path(record.pathname).parts)


def _ranking(metrics: dict[str, Any]) -> float:
    return -math.inf if metrics["score"] is None else metrics["score"]


def _alone() -> ocp.options.MultiprocessingOptions:
    """Of several processes that learn together one writes, and each reads by itself: none waits for the others."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process_{process}"
    )


def _options(read_only: bool) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(
        # Together: `best_fn` alone would delete the latest one, and without `best_fn` no score is written to disk.
        best_fn=_ranking,
        preservation_policy=AnyPreservationPolicy([LatestN(1), BestN(get_metric_fn=_ranking, n=1)]),
        create=False,  # orbax would not object to a file in its place
        read_only=read_only,
        cleanup_tmp_directories=not read_only,
        multiprocessing_options=_alone(),
    )


def array_shapes(arrays: Any) -> dict[str, str]:
    """Path -> dtype and shape of every array of a pytree: `{"train_state/params/value/bias": "float32[1]", ...}`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
    }


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _to_host(arrays: Any) -> Any:
    """Copies in NumPy: what one process writes by itself may not lie on devices that it shares with others."""
    plain = jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, arrays)
    return jax.tree.map(np.array, jax.device_get(plain))


def _blank(like: Any) -> np.ndarray:
    """What orbax is to read for an array of the target."""
    data = jax.eval_shape(jax.random.key_data, like) if _is_key(like) else like
    return np.empty(data.shape, data.dtype)


def _place(value: np.ndarray, like: Any) -> jax.Array:
    """An array that was read, where the target says."""
    if not _is_key(like):
        return jax.device_put(value, like.sharding)
    return jax.device_put(jax.random.wrap_key_data(jnp.asarray(value)), like.sharding)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _first_difference(saved: dict[str, str], wanted: dict[str, str]) -> str | None:
    for path in dict.fromkeys([*wanted, *saved]):
        if saved.get(path) != wanted.get(path):
            return f"{path} is {saved.get(path, 'not there')}, expected {wanted.get(path, 'none')}"
    return None


class Checkpoints:
    """The checkpoints of one session; of all that were saved, the latest and the best stay on disk.

    Args:
      session_dir: the session's directory; the checkpoints lie in its folder `checkpoints`.
      read_only: only look. Otherwise the folder is made, and what an interrupted save left behind is removed.

    Raises:
      UserError: `read_only` and there is no such directory or no folder `checkpoints`; it cannot be read or written.
    """

    def __init__(self, session_dir: str | Path, *, read_only: bool = False):
        self.directory = Path(session_dir) / "checkpoints"
        if read_only and not Path(session_dir).is_dir():
            raise UserError(f"{session_dir}: no such directory; expected a session directory such as RUN_DIR/session_0")
        if read_only and not self.directory.is_dir():
            raise UserError(
                f"{session_dir}: holds no checkpoints; expected a session directory (RUN_DIR/session_0) of a session "
                "that has written its first checkpoint"
            )
        try:
            if not read_only:
                self.directory.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self.directory.absolute(), options=_options(read_only))
        except Exception as error:  # orbax and the file system raise many kinds
            damaged = [path for path in sorted(self.directory.glob("*/metrics/metrics")) if not _is_json(path)]
            advice = f"; remove the damaged {damaged[0].parents[1]} to use the other checkpoints" if damaged else ""
            raise UserError(f"{self.directory}: cannot be opened ({_reason(error)}){advice}") from error

    def save(self, env_steps: int, arrays: Any, meta: dict[str, Any], score: float) -> None:
        """Copies the arrays to the host and returns; they are written in the background.

        The arrays may be donated or changed afterwards. Waits for the save before this one, if that is still going on.
        A step that is there already is left as it is: a resumed session that has made no step since.

        Args:
          arrays: a pytree of `jax.Array`, typed keys among them.
          meta: JSON values; `format_version`, `package_version`, `env_steps` and `shapes` are added.
          score: what the best one is the highest of (of equals, the newest). NaN ranks below every number.

        Raises:
          UserError: this save or the one before failed, for example because the disk is full.
        """
        if env_steps in self.steps():
            return
        added = {"format_version": FORMAT_VERSION, "package_version": __version__, "shapes": array_shapes(arrays)}
        meta = {**meta, **added, "env_steps": env_steps}
        try:
            with _one_report():
                saved = self._manager.save(
                    env_steps,
                    args=ocp.args.Composite(
                        arrays=ocp.args.StandardSave(_to_host(arrays)), meta=ocp.args.JsonSave(meta)
                    ),
                    metrics={"score": None if math.isnan(score) else float(score)},
                )
        except Exception as error:
            raise self._not_written(error) from error
        if not saved:
            raise RuntimeError(f"orbax refused to save step {env_steps} after step {self.latest_step()}")

    def steps(self) -> list[int]:
        """Env steps of the checkpoints that are there, in rising order, with the one that is being written."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The last of `steps()`, None where there is none."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """The one of `steps()` with the highest score, the latest where no game had ended yet."""
        return self._manager.best_step()

    def read_meta(self, step: int) -> dict[str, Any]:
        """The `meta` that was saved with a checkpoint.

        Raises:
          UserError: no such step, another format version, or it cannot be read.
        """
        meta = self._read(step, "meta", ocp.args.JsonRestore())
        if not isinstance(meta, dict):
            raise UserError(f"{self.directory / str(step)}: is no checkpoint of jaxrl_atari: its meta is {meta!r:.50}")
        version = meta.get("format_version")
        if version != FORMAT_VERSION:
            raise UserError(
                f"{self.directory / str(step)}: has checkpoint format {version}, and this version of jaxrl_atari reads "
                f"format {FORMAT_VERSION}; use jaxrl_atari {meta.get('package_version', 'as it was when it was saved')}"
            )
        return meta

    def restore(self, step: int, target: Any) -> Any:
        """The arrays of a checkpoint, on the devices of `target`, whatever devices they were saved from.

        Args:
          target: a pytree like the one that was saved, of `jax.Array`, or of `jax.ShapeDtypeStruct` with shardings.

        Raises:
          UserError: no such step, another format version, other arrays than `target` (another network), or damaged.
        """
        shapes = self.read_meta(step)["shapes"]
        if difference := _first_difference(shapes, array_shapes(target)):
            raise UserError(
                f"{self.directory / str(step)}: holds another network or optimiser: {difference}; use the game, "
                "network and optimiser settings that it was saved with"
            )
        values = self._read(step, "arrays", ocp.args.StandardRestore(jax.tree.map(_blank, target)))
        return jax.tree.map(_place, values, target)

    def wait(self) -> None:
        """Returns when everything is on disk. Raises `UserError` if that failed."""
        try:
            with _one_report():
                self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_written(error) from error

    def _not_written(self, error: Exception) -> UserError:
        full = shutil.disk_usage(self.directory).free < 64 << 20
        advice = "free some space" if full else "mend what is wrong there"
        what = f"a checkpoint could not be written ({_reason(error)})"
        return UserError(f"{self.directory}: {what}; {advice}, then go on with --resume")

    def close(self) -> None:
        """`wait`, then frees the threads."""
        self.wait()
        self._manager.close()

    def _read(self, step: int, item: str, how: Any) -> Any:
        if step not in self.steps():
            if not self.steps():
                raise UserError(f"{self.directory}: holds no complete checkpoint yet; wait for the session's first one")
            there = ", ".join(map(str, self.steps()))
            raise UserError(f"{self.directory}: has no checkpoint at env step {step}; there are: {there}")
        try:
            with _one_report():
                return self._manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
        except Exception as error:  # a damaged file can make orbax raise anything
            raise UserError(
                f"{self.directory / str(step)}: its {item} cannot be read ({_reason(error)}); "
                "if it is damaged, remove this directory to use another checkpoint"
            ) from error


@contextlib.contextmanager
def _one_report() -> Iterator[None]:
    """When one array cannot be read or written, others report later to orbax's event loop, which is closed by then.

    Python would print a traceback for each of them, before or after the one line that tells what is wrong. After an
    error they are left out to the end of the process.
    """
    hook = sys.unraisablehook
    sys.unraisablehook = partial(_without_stragglers, hook)
    yield
    sys.unraisablehook = hook


def _without_stragglers(hook: Callable[[Any], object], unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)


def _reason(error: Exception) -> str:
    """An exception in one line of bearable length; what counts stands at its begin and at its end."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 240 else f"{text[:120]} ... {text[-120:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
