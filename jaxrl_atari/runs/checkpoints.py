"""Checkpoints of a session: the learner's complete state on disk, and reading it.

SESSION_DIR/checkpoints/<env_steps>/arrays   the arrays as orbax writes them; PRNG keys as their key data
SESSION_DIR/checkpoints/<env_steps>/meta     JSON: the session's values, `score`, `shapes`, checksums of each array and
                                             of the meta itself (`meta.py`), `format_version`
SESSION_DIR/checkpoints/damaged_<env_steps>  a damaged checkpoint that a resumed session has set aside
SESSION_DIR/checkpoints/deleted              exists while old checkpoints are being deleted

Orbax writes a step under a temporary name and renames it when it is complete. A step that is no longer kept is moved to
`deleted` before its files are removed. So every listed step is complete, whenever the process is killed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.arrays import read_arrays, reason_text, to_device
from jaxrl_atari.runs.files import read_json, refusal
from jaxrl_atari.runs.meta import (
    SESSION_FIELDS,
    array_checksums,
    array_shapes,
    meta_checksum,
    require_fields,
)
from jaxrl_atari.runs.reading import checkpoint_steps

FORMAT_VERSION = 3


def _first_difference(saved: dict[str, str], wanted: dict[str, str]) -> str | None:
    for path in dict.fromkeys([*wanted, *saved]):
        if saved.get(path) != wanted.get(path):
            return f"{path} is {saved.get(path, 'not there')}, expected {wanted.get(path, 'none')}"
    return None


class Damaged(UserError):
    """A checkpoint whose files are incomplete or broken, or that differs from its checksums."""

    def __init__(self, message: str, reason: str = ""):  # pickle passes the message alone
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was restored."""

    step: int
    arrays: Any
    meta: dict[str, Any]
    damaged: dict[int, Damaged]  # newer checkpoints, which were passed over because they are damaged


class Checkpoints:
    """The checkpoints of one session, to be read: nothing on disk changes. `CheckpointWriter` saves.

    Args:
        session_dir: the session's directory; the checkpoints are in its folder `checkpoints`.

    Raises:
        UserError: that folder does not exist.
    """

    def __init__(self, session_dir: str | Path):
        self.directory = Path(session_dir) / "checkpoints"
        if not Path(session_dir).is_dir():
            raise UserError(f"{session_dir}: no such directory; expected a session directory such as RUN_DIR/session_0")
        if not self.directory.is_dir():
            raise UserError(
                f"{session_dir}: holds no checkpoints; expected the directory (RUN_DIR/session_0) of a session "
                "that has written its first checkpoint"
            )

    def steps(self) -> list[int]:
        """Env steps of the complete checkpoints, in ascending order."""
        return checkpoint_steps(self.directory.parent)

    def best_step(self) -> int | None:
        """The step with the highest score, or the latest step if no checkpoint has a score.

        Raises:
            Damaged: the score of a checkpoint cannot be read, so it may be the best.
            UserError: the system refuses to read a checkpoint.
        """
        scores = {step: self._score(step) for step in self.steps()}
        return max(scores, key=lambda step: (scores[step], step), default=None)

    def _score(self, step: int) -> float:
        score = self.read_meta(step, ("score",))["score"]
        return -math.inf if score is None else score

    def read_meta(self, step: int, fields: tuple[str, ...] = ()) -> dict[str, Any]:
        """The `meta` that was saved with a checkpoint.

        Args:
            fields: names of `meta.py`: fields that the caller needs.

        Raises:
            Damaged: it cannot be read, differs from its checksum, or lacks a field.
            UserError: the step does not exist or has another format version, or the system refuses to read it.
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
        # The checksum comes first: a flipped bit is damage, not another format.
        if ("checksum" in meta or saved_version == FORMAT_VERSION) and meta.get("checksum") != meta_checksum(meta):
            raise self._damaged(step, "its meta differs from its checksum")
        if not isinstance(saved_version, int) or not isinstance(meta.get("shapes"), dict):
            raise self._damaged(step, "its meta is not that of a checkpoint of jaxrl_atari")
        if saved_version != FORMAT_VERSION:
            raise UserError(
                f"{self.directory / str(step)}: has checkpoint format {saved_version}, and this version of jaxrl_atari "
                f"reads format {FORMAT_VERSION}; use the version that saved it "
                f"({meta.get('package_version', 'unknown')}; config.json of the run has its git revision)"
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
        for name, checksum in found.items():
            if checksum != meta["checksums"].get(name):
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
            UserError: as `restore`; there is no checkpoint, or every one is damaged; the system refuses to read a
                newer one, which is therefore not skipped.
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

    def _damaged(self, step: int, reason: str) -> UserError:
        """The error of a checkpoint that cannot be used: `Damaged`, unless the system refuses to read its files."""
        directory = self.directory / str(step)
        if not directory.is_dir():
            return UserError(f"{directory}: was deleted while it was being read")
        if refused := refusal(directory):
            return UserError(
                f"{directory}: cannot be read ({reason_text(refused)}) and may be sound; fix the cause, or move it "
                "away to use another checkpoint"
            )
        others = ", ".join(str(other) for other in self.steps() if other != step)
        there = f"other checkpoints: {others}" if others else "there is no other checkpoint"
        return Damaged(f"{directory}: damaged: {reason}; {there}", reason)
