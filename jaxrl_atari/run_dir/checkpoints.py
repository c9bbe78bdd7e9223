"""Checkpoints of a session: the learner's complete state on disk. The only module that imports orbax.

SESSION_DIR/checkpoints/<env_steps>/arrays    the arrays in orbax's format (OCDBT); PRNG keys as their key data
SESSION_DIR/checkpoints/<env_steps>/meta      JSON: the session's values, `format_version`, `env_steps`, `shapes`
SESSION_DIR/checkpoints/<env_steps>/metrics   JSON: the score that decides which checkpoint is the best

Orbax writes a step under a temporary name and renames it when it is complete, so every listed step is complete.
"""

import contextlib
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jaxrl_atari.errors import UserError

FORMAT_VERSION = 2

# Orbax logs internals, and errors that it also raises, through absl, which prints warnings to the terminal.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in Path(record.pathname).parts)


def _ranking(metrics: dict[str, Any]) -> float:
    return -math.inf if metrics["score"] is None else metrics["score"]


def _single_process() -> ocp.options.MultiprocessingOptions:
    """Options that keep orbax from waiting for other processes: one process writes, and each reads on its own."""
    if not jax.distributed.is_initialized():
        return ocp.options.MultiprocessingOptions()
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process_{process}"
    )


def _options(read_only: bool) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(
        # Both are needed: `best_fn` alone deletes the latest step, and without `best_fn` no score is written.
        best_fn=_ranking,
        preservation_policy=AnyPreservationPolicy([LatestN(1), BestN(get_metric_fn=_ranking, n=1)]),
        create=False,  # orbax would not report a file of that name
        read_only=read_only,
        cleanup_tmp_directories=not read_only,
        multiprocessing_options=_single_process(),
    )


def array_shapes(arrays: Any) -> dict[str, str]:
    """Path -> dtype and shape of each array in a pytree: `{"train_state/params/value/bias": "float32[1]", ...}`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
    }


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _to_host(arrays: Any) -> Any:
    """NumPy copies: a process that writes alone cannot write arrays on devices that it shares with other processes."""
    plain = jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, arrays)
    return jax.tree.map(np.array, jax.device_get(plain))


def _restore_template(target: Any) -> np.ndarray:
    """An array of the shape and dtype that orbax reads for `target`."""
    data = jax.eval_shape(jax.random.key_data, target) if _is_key(target) else target
    return np.empty(data.shape, data.dtype)


def _to_device(value: np.ndarray, target: Any) -> jax.Array:
    """Moves a restored array to the devices of `target`; key data become a key again."""
    array = jax.device_put(value, target.sharding)
    return jax.random.wrap_key_data(array) if _is_key(target) else array


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
    """The checkpoints of one session. The latest and the best stay on disk; the others are deleted.

    Args:
      session_dir: the session's directory; the checkpoints are in its folder `checkpoints`.
      read_only: change nothing on disk. Otherwise create the folder, and remove what an interrupted save left behind.

    Raises:
      UserError: the folder cannot be read or written, or it does not exist and `read_only` is set.
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
        except Exception as error:  # orbax and the file system raise many types
            damaged = [path for path in sorted(self.directory.glob("*/metrics/metrics")) if not _is_json(path)]
            advice = f"; remove the damaged {damaged[0].parents[1]} to use the other checkpoints" if damaged else ""
            raise UserError(f"{self.directory}: cannot be opened ({_reason(error)}){advice}") from error

    def save(self, env_steps: int, arrays: Any, meta: dict[str, Any], score: float) -> None:
        """Copies the arrays to the host and returns; a background thread writes them.

        The arrays may be donated or changed afterwards. Waits for the previous save if it is still running.
        A step that exists already is not written again: a session was resumed and has made no step since.

        Args:
          arrays: a pytree of `jax.Array`; typed keys are allowed.
          meta: JSON values; `format_version`, `package_version`, `env_steps` and `shapes` are added.
          score: the best checkpoint is the one with the highest score, the newest among equals. NaN ranks lowest.

        Raises:
          UserError: this save or the previous one failed, for example because the disk is full.
        """
        if env_steps in self.steps():
            return
        added = {
            "format_version": FORMAT_VERSION,
            "package_version": version("jaxrl_atari"),
            "shapes": array_shapes(arrays),
        }
        meta = {**meta, **added, "env_steps": env_steps}
        try:
            with _one_error_line():
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
        """Env steps of the checkpoints, in ascending order, including one that is still being written."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The last of `steps()`, or None if there is none."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """The step with the highest score, or the latest step if no checkpoint has a score."""
        return self._manager.best_step()

    def read_meta(self, step: int) -> dict[str, Any]:
        """The `meta` that was saved with a checkpoint.

        Raises:
          UserError: the step does not exist, has another format version, or cannot be read.
        """
        meta = self._read(step, "meta", ocp.args.JsonRestore())
        if not isinstance(meta, dict):
            raise UserError(f"{self.directory / str(step)}: not a checkpoint of jaxrl_atari: its meta is {meta!r:.50}")
        version = meta.get("format_version")
        if version != FORMAT_VERSION:
            raise UserError(
                f"{self.directory / str(step)}: has checkpoint format {version}, and this version of jaxrl_atari reads "
                f"format {FORMAT_VERSION}; use jaxrl_atari {meta.get('package_version', 'as it was when it was saved')}"
            )
        return meta

    def restore(self, step: int, target: Any) -> Any:
        """Restores the arrays of a checkpoint to the devices of `target`, whatever devices they were saved from.

        Args:
          target: a pytree of the saved structure, of `jax.Array` or of `jax.ShapeDtypeStruct` with shardings.

        Raises:
          UserError: the step does not exist, has another format version, holds other arrays than `target` (another
            network), or is damaged.
        """
        shapes = self.read_meta(step)["shapes"]
        if difference := _first_difference(shapes, array_shapes(target)):
            raise UserError(
                f"{self.directory / str(step)}: holds another network or optimiser: {difference}; use the game, "
                "network and optimiser settings that it was saved with"
            )
        values = self._read(step, "arrays", ocp.args.StandardRestore(jax.tree.map(_restore_template, target)))
        return jax.tree.map(_to_device, values, target)

    def wait(self) -> None:
        """Waits until everything is on disk. Raises `UserError` if writing failed."""
        try:
            with _one_error_line():
                self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_written(error) from error

    def _not_written(self, error: Exception) -> UserError:
        full = shutil.disk_usage(self.directory).free < 64 << 20
        advice = "free some space" if full else "fix the cause"
        return UserError(
            f"{self.directory}: a checkpoint could not be written ({_reason(error)}); {advice}, then use --resume"
        )

    def close(self) -> None:
        """Calls `wait`, then stops orbax's threads."""
        self.wait()
        self._manager.close()

    def _read(self, step: int, item: str, how: Any) -> Any:
        if step not in self.steps():
            if not self.steps():
                raise UserError(f"{self.directory}: holds no complete checkpoint yet; wait for the session's first one")
            existing = ", ".join(map(str, self.steps()))
            raise UserError(f"{self.directory}: has no checkpoint at env step {step}; there are: {existing}")
        try:
            with _one_error_line():
                return self._manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
        except Exception as error:  # orbax can raise any type for a damaged file
            raise UserError(
                f"{self.directory / str(step)}: its {item} cannot be read ({_reason(error)}); "
                "if it is damaged, remove this directory to use another checkpoint"
            ) from error


@contextlib.contextmanager
def _one_error_line() -> Iterator[None]:
    """Hides the "Event loop is closed" tracebacks that follow an error of orbax.

    When one array cannot be read or written, other arrays fail later, on orbax's event loop, which is closed by then.
    Python would print a traceback for each, beside our one-line error. After an error they stay hidden until the
    process ends.
    """
    hook = sys.unraisablehook
    sys.unraisablehook = partial(_hide_closed_loop, hook)
    yield
    sys.unraisablehook = hook


def _hide_closed_loop(hook: Callable[[Any], object], unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)


def _reason(error: Exception) -> str:
    """An exception as one short line. Long texts lose their middle: the cause is at the start or at the end."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 240 else f"{text[:120]} ... {text[-120:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
