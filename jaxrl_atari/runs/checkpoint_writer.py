"""Writing the checkpoints of a session, with orbax."""

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from jaxrl_atari import __version__
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.arrays import hide_later_errors, reason_text, single_process, to_host
from jaxrl_atari.runs.checkpoints import FORMAT_VERSION, Checkpoints
from jaxrl_atari.runs.files import unused
from jaxrl_atari.runs.meta import array_checksums, array_shapes, meta_checksum

DELETED = "deleted"


@dataclass
class _LatestTwoAndBest(PreservationPolicy):
    """Keeps the latest two checkpoints, the best, and those whose score cannot be read."""

    scores: dict[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        steps = sorted(info.step for info in checkpoints)
        best = max((step for step in steps if step in self.scores), key=lambda step: (self.scores[step], step))
        kept = {*steps[-2:], best}
        return [info.step in kept or info.step not in self.scores for info in checkpoints]


class CheckpointWriter(Checkpoints):
    """Saves the checkpoints of one session, and reads them. The latest two and the best stay on disk.

    Makes the folder `checkpoints` if it is missing. The first save removes what an interrupted one left behind.

    Raises:
        UserError: the folder cannot be made, or orbax cannot write to its path.
    """

    def __init__(self, session_dir: str | Path):
        directory = Path(session_dir) / "checkpoints"
        name = str(directory.absolute())
        if "\\" in name or name.encode(errors="ignore").decode() != name:
            raise UserError(
                f"{directory}: orbax cannot write to a path that has a backslash or is not UTF-8; choose another folder"
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{directory}: cannot be opened ({reason_text(error)})") from error
        super().__init__(session_dir)

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
        hide_later_errors()
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

        The arrays may be donated or changed afterwards. Waits for the previous save if it is still running; if that one
        failed, this one is tried before the error is raised, because the cause may have gone.
        A step that exists already is not written again: the session has made no step since its last save or its resume.

        Args:
            arrays: a pytree of `jax.Array`; typed keys are allowed.
            meta: JSON values; `checkpoints.py` lists what is added.
            score: the best checkpoint is the one with the highest score, the newest among equals. NaN ranks lowest.

        Raises:
            UserError: this save or the previous one failed, for example because the disk is full.
        """
        try:
            self.wait()
        except UserError:
            with contextlib.suppress(Exception):
                self._manager.close()
            del self._manager  # it counts the failed checkpoint among those to keep; the next one removes its remains
            with contextlib.suppress(UserError):
                self._start(env_steps, arrays, meta, score)
                self.wait()
            raise
        self._start(env_steps, arrays, meta, score)

    def _start(self, env_steps: int, arrays: Any, meta: dict[str, Any], score: float) -> None:
        try:
            if not self.directory.is_dir():  # somebody has deleted it
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if env_steps in self.steps():
                return
        except OSError as error:
            raise self._not_written(error) from error
        host = to_host(arrays)
        meta = meta | {
            "format_version": FORMAT_VERSION,
            "package_version": __version__,
            "env_steps": env_steps,
            "score": None if math.isnan(score) else float(score),
            "shapes": array_shapes(arrays),
            "checksums": array_checksums(host),
        }
        meta["checksum"] = meta_checksum(meta)
        try:
            manager = self._manager
            self._policy.scores[env_steps] = -math.inf if math.isnan(score) else float(score)
            items = {"arrays": ocp.args.StandardSave(host), "meta": ocp.args.JsonSave(meta)}
            saved = manager.save(env_steps, args=ocp.args.Composite(**items))
        except Exception as error:  # orbax and the file system raise many types
            raise self._not_written(error) from error
        if not saved:
            raise RuntimeError(f"orbax refused to save step {env_steps} beside {self.steps()}")

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
        advice = "fix the cause"
        if shutil.disk_usage(existing).free < 64 << 20:
            advice = "free some space"
        elif existing != self.directory:
            advice = "the folder is gone: put it back if you can"
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
