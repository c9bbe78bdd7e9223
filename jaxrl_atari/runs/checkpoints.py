"""Checkpoints of a session, written and read by orbax.

SESSION_DIR/checkpoints/<env_steps>/arrays   train state and key of the learner
SESSION_DIR/checkpoints/<env_steps>/meta     JSON: the session's values, and shapes and digests of every array
SESSION_DIR/checkpoints/<env_steps>/games, carry, acting, evaluation    further items, if there are any
SESSION_DIR/checkpoints/damaged_<env_steps>  a damaged checkpoint that a resumed session has set aside

A published checkpoint (`hub/files.py`) holds only the parameters: it can be played, but not resumed.

Orbax writes a checkpoint under a temporary name and renames it when it is complete. So every checkpoint that is
listed is complete, whenever the process is killed. Orbax does not notice flipped bits, and most of them would
give other values without an error. So each array has a digest, BLAKE2b of 64 bits.

In the meta of format 3, digests have the keys `checksum` and `checksums`, and the `return_mean` by which the best
checkpoint is chosen has the key `score`. (The score of a run is another figure, `return_ma`.)
"""

import logging
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_atari import __version__
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.hardware.distributed import agree, is_leader
from jaxrl_atari.runs.arrays import (
    array_digests,
    array_shapes,
    digest_of,
    read_arrays,
    this_process,
    to_device,
    to_host,
)
from jaxrl_atari.runs.files import read_json, unused
from jaxrl_atari.runs.layout import CHECKPOINTS_FOLDER, checkpoint_env_steps, checkpoint_path, meta_file
from jaxrl_atari.runs.reading import read_evaluations

_log = logging.getLogger(__name__)

FORMAT_VERSION = 3
"""Version of the form of checkpoints, which their meta has. Checkpoints of other versions are refused."""

logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs internals there, and errors that it also raises


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are incomplete or broken, or that differs from its digests."""


class Checkpoint(NamedTuple):
    """A checkpoint in the memory of the host, equal to its digests."""

    path: Path
    env_steps: int
    items: dict[str, dict[str, np.ndarray]]  # `arrays`, `games`, ... -> path -> array
    meta: dict[str, Any]

    def to_device(self, item: str, target: Any, device: jax.Device) -> Any:
        """Arrays of an item on a device, whatever devices they were saved from.

        Args:
            target: a part of the saved structure, a pytree of `jax.Array` or of `jax.ShapeDtypeStruct`.

        Raises:
            UserError: the checkpoint holds other arrays than `target` (another network).
        """
        saved = item_metas(self.meta)[item]["shapes"]
        for name, shape in array_shapes(target).items():
            if saved.get(name) != shape:
                raise UserError(
                    f"{self.path}: holds another network or optimiser: {name} is {saved.get(name)}, expected"
                    f" {shape}; use the game, network and optimiser settings that it was saved with"
                )
        return to_device(self.items[item], target, device)


class Checkpoints:
    """The checkpoints of one session.

    Args:
        say: receives lines for the user.
        keep: number of the latest checkpoints that `save` keeps besides the best; 0: all.
    """

    def __init__(self, session_dir: Path, say: Callable[[str], object] = _log.warning, keep: int = 2):
        self.session_dir = session_dir
        self._keep = keep
        self.directory = session_dir / CHECKPOINTS_FOLDER
        self._say = say

    def env_steps(self) -> list[int]:
        """Env steps of the complete checkpoints, in ascending order."""
        return checkpoint_env_steps(self.session_dir)

    def mean_returns(self) -> dict[int, float]:
        """The mean returns by which the best checkpoint is chosen: env steps -> mean.

        They are those of the evaluations during training. If none of the checkpoints has been evaluated, they are
        those of the last 100 games of training, and -inf before the first finished game.

        Raises:
            DamagedCheckpoint: the meta of a checkpoint cannot be read, so it may be the best.
            UserError: a checkpoint has another format version, or evaluations.csv cannot be read.
        """
        existing = self.env_steps()
        table = read_evaluations(self.session_dir)
        evaluations = zip(table["env_steps"].tolist(), table["mean"].tolist(), strict=True)
        means = {int(env_steps): mean for env_steps, mean in evaluations if env_steps in existing}
        if means:
            return means
        scores = {env_steps: self.read_meta(env_steps)["score"] for env_steps in existing}
        return {env_steps: -math.inf if score is None else score for env_steps, score in scores.items()}

    def best_env_steps(self) -> int | None:
        """Env steps of the best checkpoint, the newest among equals; None without any.

        Raises:
            UserError: as `mean_returns`.
        """
        means = self.mean_returns()
        return max(means, key=lambda env_steps: (means[env_steps], env_steps), default=None)

    # --- Reading ---

    def read_meta(self, env_steps: int) -> dict[str, Any]:
        """The `meta` that was saved with a checkpoint.

        Raises:
            DamagedCheckpoint: it cannot be read, or differs from its digest.
            UserError: there is no such checkpoint, or it has another format version.
        """
        path = checkpoint_path(self.session_dir, env_steps)
        existing = self.env_steps()
        if env_steps not in existing:
            raise UserError(
                f"{path}: no such checkpoint; there are: {', '.join(map(str, existing)) or 'none yet'}"
            )
        try:
            meta = read_json(meta_file(self.session_dir, env_steps))
            if meta["checksum"] != meta_digest(meta):
                raise ValueError("it differs from its digest")
        except (OSError, ValueError, KeyError) as error:
            raise DamagedCheckpoint(f"{path}: damaged: its meta cannot be read ({reason(error)})") from error
        if meta["format_version"] != FORMAT_VERSION:
            raise UserError(
                f"{path}: has checkpoint format {meta['format_version']}, and this version of jaxrl_atari reads"
                f" format {FORMAT_VERSION}; use the version that saved it ({meta['package_version']})"
            )
        return meta

    def read(self, env_steps: int, items: Iterable[str] | None = None) -> Checkpoint:
        """Reads a checkpoint, and compares its arrays with their digests.

        Args:
            items: the names of the items that are read; None: all.

        Raises:
            DamagedCheckpoint: the arrays cannot be read, or differ from their digests.
            UserError: as `read_meta`.
        """
        path = checkpoint_path(self.session_dir, env_steps)
        meta = self.read_meta(env_steps)
        described = item_metas(meta)
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for item in described if items is None else items:
            try:
                arrays[item] = read_arrays(path / item)
            except Exception as error:  # orbax can raise any type for a damaged file
                raise DamagedCheckpoint(f"{path}: damaged: {item} cannot be read ({reason(error)})") from error
            digests = array_digests(arrays[item])
            for name, saved in described[item]["checksums"].items():
                if digests.get(name) != saved:
                    raise DamagedCheckpoint(f"{path}: damaged: {name} differs from its digest")
        return Checkpoint(path, env_steps, arrays, meta)

    def newest(self, items: Iterable[str] | None = None) -> tuple[Checkpoint, dict[int, DamagedCheckpoint]]:
        """Reads the newest checkpoint that is sound.

        Args:
            items: as in `read`.

        Returns:
            The checkpoint, and the newer ones, which are damaged: env steps -> error.

        Raises:
            UserError: as `read`; there is no checkpoint, or every one is damaged.
        """
        damaged: dict[int, DamagedCheckpoint] = {}
        for env_steps in reversed(self.env_steps()):
            try:
                return self.read(env_steps, items), damaged
            except DamagedCheckpoint as error:
                damaged[env_steps] = error
        reasons = "; ".join(map(str, damaged.values())) or "there is none yet"
        raise UserError(f"{self.directory}: no checkpoint is sound ({reasons}); restore one from a copy")

    def resume(self) -> Checkpoint | None:
        """Reads the newest sound checkpoint, if there is one, and renames newer ones, which are damaged.

        With several processes, each reads the checkpoint that the leader chose.

        Raises:
            UserError: every checkpoint is damaged or has another format version, or it is a published copy.
        """
        resumed = None
        found = ""  # env steps of the checkpoint, or why there is none
        if is_leader() and self.env_steps():
            try:
                resumed, damaged = self.newest()
                for env_steps, error in damaged.items():
                    self._say(f"{error}; it is now {self.set_aside(env_steps)}")
                if resumed.meta.get("parameters_only"):
                    raise UserError(
                        f"{resumed.path}: holds the parameters alone, without the optimiser state: it can be"
                        " played and not resumed; resume the run that it was copied from, or start a new one"
                    )
                found = str(resumed.env_steps)
            except UserError as error:
                found = str(error)
        found = agree(found)
        if found and not found.isdecimal():
            raise UserError(found)
        if found and resumed is None:
            resumed = self.read(int(found))
        return resumed

    # --- Writing ---

    def save(
        self,
        env_steps: int,
        items: dict[str, Any],
        meta: dict[str, Any],
        return_mean: float | None,
    ) -> None:
        """Writes a checkpoint, and removes those that are no longer kept.

        Args:
            items: name -> pytree of `jax.Array` or NumPy arrays; one is `arrays`. Typed keys are allowed.
            meta: JSON values.
            return_mean: the best checkpoint is the one with the highest value. One without a value (None or NaN)
                is the best only while no other has one.

        Raises:
            UserError: it cannot be written, for example because the disk is full.
        """
        path = checkpoint_path(self.session_dir, env_steps)
        host = {name: to_host(tree) for name, tree in items.items()}
        described = {
            name: {"shapes": array_shapes(tree), "checksums": array_digests(host[name])}
            for name, tree in items.items()
        }
        meta = meta | described.pop("arrays") | {
            "items": described,
            "format_version": FORMAT_VERSION,
            "package_version": __version__,
            "env_steps": env_steps,
            "score": None if return_mean is None or math.isnan(return_mean) else return_mean,
        }  # fmt: skip
        meta["checksum"] = meta_digest(meta)
        try:
            self._remove_leftovers()
            _write(path, host, meta)
        except Exception as error:  # orbax and the file system raise many types
            raise UserError(
                f"{path}: the checkpoint could not be written ({reason(error)}); fix the cause, then use --resume"
            ) from error
        self._remove_old(being_evaluated=meta.get("evaluated_env_steps", 0))

    def _remove_leftovers(self) -> None:
        """Removes what a killed process has left of a checkpoint, and makes the directory of new ones."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in (*self.directory.glob("*.orbax-checkpoint-tmp*"), *self.directory.glob("removed_*")):
            shutil.rmtree(leftover, ignore_errors=True)

    def _remove_old(self, being_evaluated: int) -> None:
        """Removes all checkpoints but the latest, the best and the one that was evaluated last."""
        try:
            kept = {*self.env_steps()[-self._keep :], self.best_env_steps(), being_evaluated}
        except UserError as error:  # a damaged checkpoint may be the best
            self._say(str(error))
            return
        for env_steps in set(self.env_steps()) - kept:
            # What a killed process leaves of it must not look like a checkpoint.
            removed = self.directory / f"removed_{env_steps}"
            shutil.rmtree(checkpoint_path(self.session_dir, env_steps).rename(removed), ignore_errors=True)

    def set_aside(self, env_steps: int) -> Path:
        """Renames a damaged checkpoint to `damaged_<env_steps>` and returns its new path."""
        path = checkpoint_path(self.session_dir, env_steps)
        return path.rename(unused(self.directory / f"damaged_{env_steps}"))


def _write(path: Path, items: dict[str, Any], meta: dict[str, Any]) -> None:
    """Writes a checkpoint with orbax.

    Args:
        path: its directory, which does not exist.
        items: name -> pytree of NumPy arrays.
        meta: JSON values.
    """
    arguments = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
    # A folder for each array: with one database for all (OCDBT), TensorStore 0.1.86 leaks memory at each save.
    alone = this_process()
    handlers: dict[str, Any] = {
        name: ocp.StandardCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone) for name in items
    }
    handlers["meta"] = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    # If a folder could not be made in the background, orbax's threads would wait for it for 5 minutes.
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CompositeOptions(multiprocessing_options=alone, async_options=at_once)
    handler = ocp.CompositeCheckpointHandler(composite_options=options, **handlers)
    ocp.Checkpointer(handler, multiprocessing_options=alone).save(
        path.absolute(), args=ocp.args.Composite(**arguments, meta=ocp.args.JsonSave(meta))
    )


def item_metas(meta: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The name of each item of a checkpoint -> the part of its meta with the item's `shapes` and `checksums`."""
    return {"arrays": meta, **meta["items"]}


def meta_digest(meta: dict[str, Any]) -> str:
    """The digest of a meta, without its own `checksum`."""
    return digest_of({k: v for k, v in meta.items() if k != "checksum"})
