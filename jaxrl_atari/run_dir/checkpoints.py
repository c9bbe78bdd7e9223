"""Checkpoints of a session: the learner's complete state on disk.

SESSION_DIR/checkpoints/<env_steps>/arrays   the arrays as orbax writes them; PRNG keys as their key data
SESSION_DIR/checkpoints/<env_steps>/meta     JSON: the session's values, `score`, `shapes`, checksums of each array and
                                             of the meta itself (`meta.py`), `format_version`
SESSION_DIR/checkpoints/damaged_<env_steps>  a damaged checkpoint that a resumed session has set aside
SESSION_DIR/checkpoints/deleted              exists while old checkpoints are being deleted

Orbax writes a step under a temporary name and renames it when it is complete. A step that is no longer kept is moved to
`deleted` before its files are removed. So every listed step is complete, whenever the process is killed.
Formats: 3 has checksums; 2 has none, and its score is in a file of its own.
"""

import contextlib
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from jaxrl_atari.cli.errors import UserError
from jaxrl_atari.run_dir.arrays import hide_closed_loops, read_arrays, reason_text, single_process, to_device, to_host
from jaxrl_atari.run_dir.files import read_json, unused
from jaxrl_atari.run_dir.meta import (
    SESSION_FIELDS,
    array_checksums,
    array_shapes,
    meta_checksum,
    read_score,
    require_fields,
)

FORMAT_VERSION = 3
READABLE_VERSIONS = (2, 3)
DELETED = "deleted"


def _first_difference(saved: dict[str, str], wanted: dict[str, str]) -> str | None:
    for path in dict.fromkeys([*wanted, *saved]):
        if saved.get(path) != wanted.get(path):
            return f"{path} is {saved.get(path, 'not there')}, expected {wanted.get(path, 'none')}"
    return None


class Damaged(UserError):
    """A checkpoint that cannot be read, or that differs from its checksums.

    Args:
      directory: of the checkpoint.
      reason: completes "damaged: ...".
      others: env steps of the other checkpoints.
    """

    def __init__(self, directory: Path, reason: str, others: Sequence[int] = ()):
        self.directory, self.reason, self.others = directory, reason, others
        there = f"other checkpoints: {', '.join(map(str, others))}" if others else "there is no other checkpoint"
        super().__init__(f"{directory}: damaged: {reason}; {there}")

    def __reduce__(self):
        return type(self), (self.directory, self.reason, self.others)


@dataclass(frozen=True)
class Restored:
    """The newest sound checkpoint of a session."""

    step: int
    arrays: Any
    meta: dict[str, Any]
    damaged: dict[int, Damaged]  # newer checkpoints, which are damaged


@dataclass
class _LatestTwoAndBest(PreservationPolicy):
    """Keeps the latest two checkpoints, the best, and those whose score cannot be read."""

    scores: dict[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        steps = sorted(info.step for info in checkpoints)
        best = max((step for step in steps if step in self.scores), key=lambda step: (self.scores[step], step))
        kept = {*steps[-2:], best}
        return [info.step in kept or info.step not in self.scores for info in checkpoints]


class Checkpoints:
    """The checkpoints of one session. The latest two and the best stay on disk; the others are deleted.

    Args:
      session_dir: the session's directory; the checkpoints are in its folder `checkpoints`.
      read_only: change nothing on disk. Otherwise create the folder, and let the first save remove what an interrupted
        one left behind.

    Raises:
      UserError: the folder cannot be made, or it does not exist and `read_only` is set.
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
        if not read_only:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"{self.directory}: cannot be opened ({reason_text(error)})") from error

    # --- Writing -----------------------------------------------------------------------------------------------------

    @cached_property
    def _policy(self) -> _LatestTwoAndBest:
        scores = {}
        for step in self.steps():
            with contextlib.suppress(UserError):
                scores[step] = self._score(step)
        return _LatestTwoAndBest(scores)

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax's manager, for writing only: it reads the names of the steps, and nothing that may be damaged.

        Each array has a folder of its own (`use_ocdbt=False`). In one database for all arrays, orbax asks TensorStore
        for JSON at every array, and TensorStore 0.1.86 never frees it: 160 Python objects a checkpoint.
        """
        hide_closed_loops()
        processes = single_process()
        return ocp.CheckpointManager(
            self.directory.absolute(),
            item_handlers={
                "arrays": ocp.StandardCheckpointHandler(multiprocessing_options=processes, use_ocdbt=False),
                "meta": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._policy,
                create=False,
                cleanup_tmp_directories=True,
                todelete_subdir=DELETED,
                lightweight_initialize=True,
                multiprocessing_options=processes,
            ),
        )

    def save(self, env_steps: int, arrays: Any, meta: dict[str, Any], score: float) -> None:
        """Copies the arrays to the host and returns; a background thread writes them.

        The arrays may be donated or changed afterwards. Waits for the previous save if it is still running.
        A step that exists already is not written again: a session was resumed and has made no step since.

        Args:
          arrays: a pytree of `jax.Array`; typed keys are allowed.
          meta: JSON values; what this module adds is listed at its top.
          score: the best checkpoint is the one with the highest score, the newest among equals. NaN ranks lowest.

        Raises:
          UserError: this save or the previous one failed, for example because the disk is full.
        """
        try:
            if env_steps in self.steps():
                return
        except OSError as error:  # somebody has deleted the folder
            raise self._not_written(error) from error
        self.wait()
        host = to_host(arrays)
        meta = meta | {
            "format_version": FORMAT_VERSION,
            "package_version": version("jaxrl_atari"),
            "env_steps": env_steps,
            "score": None if math.isnan(score) else float(score),
            "shapes": array_shapes(arrays),
            "checksums": array_checksums(host),
        }
        meta["checksum"] = meta_checksum(meta)
        try:
            manager = self._manager
            self._policy.scores[env_steps] = _rank(meta["score"])
            items = {"arrays": ocp.args.StandardSave(host), "meta": ocp.args.JsonSave(meta)}
            saved = manager.save(env_steps, args=ocp.args.Composite(**items))
        except Exception as error:  # orbax and the file system raise many types
            raise self._not_written(error) from error
        if not saved:
            raise RuntimeError(f"orbax refused to save step {env_steps} after step {self.latest_step()}")

    def wait(self) -> None:
        """Waits until everything is on disk. Raises `UserError` if writing failed."""
        if "_manager" not in vars(self):
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_written(error) from error
        shutil.rmtree(self.directory / DELETED, ignore_errors=True)

    def _not_written(self, error: Exception) -> UserError:
        existing = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        full = shutil.disk_usage(existing).free < 64 << 20
        advice = "free some space" if full else "fix the cause"
        return UserError(
            f"{self.directory}: a checkpoint could not be written ({reason_text(error)}); {advice}, then use --resume"
        )

    def close(self) -> None:
        """Calls `wait`, then stops orbax's threads."""
        self.wait()
        if "_manager" in vars(self):
            self._manager.close()

    def set_aside(self, step: int) -> Path:
        """Renames a damaged checkpoint to `damaged_<step>` and returns its new path. Call it before the first save.

        Raises:
          UserError: it cannot be renamed.
        """
        path = self.directory / str(step)
        try:
            return path.rename(unused(self.directory / f"damaged_{step}"))
        except OSError as error:
            raise UserError(f"{path}: damaged, and cannot be renamed ({reason_text(error)}); move it away") from error

    # --- Reading -----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Env steps of the complete checkpoints, in ascending order."""
        names = (path.name for path in self.directory.iterdir() if path.is_dir())
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]{0,17}", name))

    def latest_step(self) -> int | None:
        """The last of `steps()`, or None if there is none."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the highest score, or the latest step if no checkpoint has a score.

        Raises:
          Damaged: the score of a checkpoint cannot be read, so it may be the best.
        """
        scores = {step: self._score(step) for step in self.steps()}
        return max(scores, key=lambda step: (scores[step], step), default=None)

    def _score(self, step: int) -> float:
        meta = self.read_meta(step)
        try:
            return _rank(read_score(self.directory / str(step), meta))
        except (OSError, ValueError) as error:
            raise self._damaged(step, f"its score cannot be read ({reason_text(error)})") from error

    def read_meta(self, step: int, fields: tuple[str, ...] = ()) -> dict[str, Any]:
        """The `meta` that was saved with a checkpoint.

        Args:
          fields: names of `meta.py`: fields that the caller needs.

        Raises:
          Damaged: it cannot be read, differs from its checksum, or lacks a field.
          UserError: the step does not exist or has another format version.
        """
        if step not in (steps := self.steps()):
            if not steps:
                raise UserError(f"{self.directory}: holds no complete checkpoint yet; wait for the session's first one")
            raise UserError(
                f"{self.directory}: has no checkpoint at env step {step}; there are: {', '.join(map(str, steps))}"
            )
        try:
            meta = read_json(self.directory / str(step) / "meta" / "metadata")
        except (OSError, ValueError) as error:
            raise self._damaged(step, f"its meta cannot be read ({reason_text(error)})") from error
        saved_version = meta.get("format_version")
        # The checksum comes first: without it, a flipped bit would turn format 3 into format 2, which has none.
        if ("checksum" in meta or saved_version == 3) and meta.get("checksum") != meta_checksum(meta):
            raise self._damaged(step, "its meta differs from its checksum")
        if not isinstance(saved_version, int) or not isinstance(meta.get("shapes"), dict):
            raise self._damaged(step, "its meta is not that of a checkpoint of jaxrl_atari")
        if saved_version not in READABLE_VERSIONS:
            raise UserError(
                f"{self.directory / str(step)}: has checkpoint format {saved_version}, and this version of jaxrl_atari "
                f"reads formats {READABLE_VERSIONS[0]} to {READABLE_VERSIONS[-1]}; use jaxrl_atari "
                f"{meta.get('package_version', 'as it was when it was saved')}"
            )
        if meta.get("env_steps") != step:
            raise self._damaged(step, f"its meta is that of env step {meta.get('env_steps')!r:.40}")
        try:
            require_fields(meta, fields)
        except ValueError as error:
            raise self._damaged(step, f"its meta cannot be used: {error}") from error
        return meta

    def restore(self, step: int, target: Any) -> Any:
        """Restores the arrays of a checkpoint to the devices of `target`, whatever devices they were saved from.

        Args:
          target: a pytree of the saved structure, of `jax.Array` or of `jax.ShapeDtypeStruct` with shardings.

        Raises:
          Damaged: they cannot be read, or differ from their checksums.
          UserError: as `read_meta`; the checkpoint holds other arrays than `target` (another network).
        """
        meta = self.read_meta(step)
        if difference := _first_difference(meta["shapes"], array_shapes(target)):
            raise UserError(
                f"{self.directory / str(step)}: holds another network or optimiser: {difference}; use the game, "
                "network and optimiser settings that it was saved with"
            )
        try:
            values = read_arrays(self.directory / str(step) / "arrays", target)
            found = array_checksums(values)
        except Exception as error:  # orbax can raise any type for a damaged file
            raise self._damaged(step, f"its arrays cannot be read ({reason_text(error)})") from error
        expected = meta["checksums"] if meta["format_version"] >= 3 else found
        for name, checksum in found.items():
            if checksum != expected.get(name):
                raise self._damaged(step, f"its array {name} differs from its checksum")
        return jax.tree.map(to_device, values, target)

    def restore_newest(
        self, target: Callable[[dict[str, Any]], Any], fields: tuple[str, ...] = SESSION_FIELDS
    ) -> Restored:
        """Restores the newest checkpoint that is sound.

        Args:
          target: meta -> `target` of `restore`.
          fields: as for `read_meta`.

        Raises:
          UserError: as `restore`; there is no checkpoint, or every one is damaged.
        """
        damaged: dict[int, Damaged] = {}
        for step in reversed(self.steps()):
            try:
                meta = self.read_meta(step, fields)
                return Restored(step, self.restore(step, target(meta)), meta, damaged)
            except Damaged as error:
                damaged[step] = error
        reasons = "; ".join(f"{step}: {error.reason}" for step, error in damaged.items())
        raise UserError(
            f"{self.directory}: no checkpoint is sound ({reasons or 'there is none'}); restore one from a copy, or "
            "start a new run"
        )

    def _damaged(self, step: int, reason: str) -> Damaged:
        return Damaged(self.directory / str(step), reason, [other for other in self.steps() if other != step])


def _rank(score: float | None) -> float:
    return -math.inf if score is None else score
