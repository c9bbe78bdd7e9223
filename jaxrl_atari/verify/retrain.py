"""Training a part of a session again, from a kept checkpoint to the next one that was written.

The log of actions shows what was played, but not that the parameters of the network chose it. Where a resumed
session repeats an uninterrupted one bit for bit, training from one checkpoint must arrive at the next one, whose
digests are in `digests.jsonl`. Where a known cause may give honest training other bits, a `UserError` names
it, and `VerificationFailed` is not raised.
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config, LogConfig, changed_fields, config_from_dict
from jaxrl_atari.devices import Placement
from jaxrl_atari.errors import UserError, VerificationFailed
from jaxrl_atari.imports import imported_files, imported_modules, modules_beside
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.digests import WrittenCheckpoint, read_digests
from jaxrl_atari.runs.layout import CODE_FOLDER, DIGESTS_FILE, checkpoint_path, session_number
from jaxrl_atari.runs.run_dir import is_only_copy
from jaxrl_atari.session import games_problem, iterations, open_session, place_session


def retrain(session_dir: Path, start: int) -> str:
    """Trains from the checkpoint at `start` env steps to the next one that was written, and compares bits.

    Nothing in the session's directory is changed.

    Returns:
        A line on the result.

    Raises:
        VerificationFailed: training arrives at other bits.
        UserError: the part cannot be trained again here.
    """
    prefix = f"{session_dir}, --retrain {start}"
    try:
        target = _find_target(session_dir, start)
        arrived = _train_again(session_dir, start, target)
        _require_same_bits(session_dir.parent, target, arrived)
    except VerificationFailed as error:
        raise VerificationFailed(f"{prefix}: {error}") from error
    except UserError as error:
        raise UserError(f"{prefix}: {error}") from error
    return (
        f"{session_dir.name}  retrained: from {start:,} to {target.env_steps:,} env steps, all bits of"
        f" {len(target.digests)} arrays are equal"
    )


def _find_target(session_dir: Path, start: int) -> WrittenCheckpoint:
    """The checkpoint that was written after the one at `start` env steps.

    Raises:
        UserError: there is none, or what was trained between the two cannot be trained again.
    """
    checkpoints = Checkpoints(session_dir)
    meta = checkpoints.read_meta(start)
    if meta.get("parameters_only"):
        raise UserError("the checkpoint holds the parameters alone; ask its owner for the whole run")
    if not (session_dir / DIGESTS_FILE).is_file():
        raise UserError(f"the session has no {DIGESTS_FILE}")
    target = next((written for written in read_digests(session_dir) if written.env_steps > start), None)
    if target is None:
        kept = ", ".join(map(str, checkpoints.env_steps()))
        raise UserError(f"no later checkpoint was written; there are: {kept}; choose one before the last")
    config = config_from_dict(target.config)
    before = config_from_dict(meta["config"])
    if changed := changed_fields(_bit_deciding_fields(before), _bit_deciding_fields(config)):
        raise UserError(f"the config was changed before the next checkpoint ({', '.join(changed)})")
    if problem := config.unrecorded_reason or games_problem(config.env, meta):
        raise UserError(f"its games cannot continue ({problem})")
    return target


def _train_again(session_dir: Path, start: int, target: WrittenCheckpoint) -> WrittenCheckpoint:
    """Trains a copy of a session from its checkpoint at `start` env steps up to the env steps of `target`.

    Returns:
        The checkpoint at which it arrives.

    Raises:
        UserError: other bits are expected here.
    """
    config = _for_retraining(config_from_dict(target.config))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, session_dir.name)
        shutil.copytree(checkpoint_path(session_dir, start), checkpoint_path(copy, start))
        placement = place_session(config)
        _require_reproducible(config, placement, target)
        with open_session(config, placement, copy, session_number(session_dir), resume=True) as session:
            _require_same_provenance(target, session.provenance)
            if session.environments.why_new:
                raise UserError(f"its games cannot continue here ({session.environments.why_new})")
            for _ in iterations(session):
                if session.progress.env_steps >= target.env_steps:
                    break
            session.save(None)
        (arrived,) = read_digests(copy)
    return arrived


def _require_reproducible(config: Config, placement: Placement, target: WrittenCheckpoint) -> None:
    """Refuses devices on which two runs may differ in the last bits.

    Args:
        placement: the devices here, which may differ from the devices that wrote `target`.
    """
    devices = [*placement.learner, *placement.actors]
    if config.devices.deterministic or all(device.platform == "cpu" for device in devices):
        return
    here = [device.device_kind for device in devices]
    before = [*target.provenance["learns_on"], *target.provenance["acts_on"]]
    if here != before:
        raise UserError(
            f"it was trained on {', '.join(dict.fromkeys(before))} and would be trained on"
            f" {', '.join(dict.fromkeys(here))} here, where bits may differ; use the same devices as in training"
            " (JAX_PLATFORMS=cpu selects the CPU)"
        )
    raise UserError("it was trained on a GPU without devices.deterministic, where two runs may have other bits")


def _for_retraining(config: Config) -> Config:
    """A config that trains to the same bits, and writes no log, evaluation, graph or checkpoint on the way."""
    log = LogConfig(
        tensorboard=False, graphs=False, actions=False, every_env_steps=10**12, checkpoint_every_env_steps=10**12
    )
    plain = Config()
    return replace(
        config,
        name=plain.name,
        sessions=plain.sessions,
        output_dir=plain.output_dir,
        trial=plain.trial,
        evaluation=plain.evaluation,
        log=log,
    )


def _bit_deciding_fields(config: Config) -> dict[str, Any]:
    """A config as nested dicts, with the defaults of the options that decide no bits of a session."""
    plain = _for_retraining(config)
    env = replace(plain.env, num_threads=0)
    devices = replace(plain.devices, evaluator=False, memory_fraction=None, check=False)
    return replace(plain, env=env, devices=devices).to_dict()


def _require_same_provenance(target: WrittenCheckpoint, provenance: dict[str, Any]) -> None:
    """Refuses to train where other bits are expected.

    Args:
        provenance: `Session.provenance` of the session that would train.
    """
    # Most commits change no number: the revision is named only if the bits differ.
    before = target.provenance | {"git_revision": None}
    if changed := changed_fields(before, provenance | {"git_revision": None}):
        differences = ", ".join(f"{field} {was} -> {present}" for field, (was, present) in changed.items())
        raise UserError(
            f"cannot be compared here, where bits may differ ({differences}); use the software and the devices of"
            " the training"
        )


def _require_same_bits(run_dir: Path, target: WrittenCheckpoint, arrived: WrittenCheckpoint) -> None:
    """Refuses bits that differ from `target`.

    Raises:
        VerificationFailed: training has arrived at other bits, or elsewhere.
        UserError: it has, but the code may have changed since the training, so this proves nothing.
    """
    different = sorted(path for path, digest in target.digests.items() if arrived.digests.get(path) != digest)
    if (arrived.env_steps, arrived.updates) != (target.env_steps, target.updates):
        problem = (
            f"arrives at {arrived.env_steps:,} env steps after {arrived.updates} updates, where the session"
            f" wrote a checkpoint at {target.env_steps:,} after {target.updates}"
        )
    elif different:
        problem = (
            f"{len(different)} of {len(target.digests)} arrays differ from those written at"
            f" {target.env_steps:,} env steps, first {different[0]}"
        )
    else:
        return
    then = target.provenance["git_revision"]
    if other := _other_code(run_dir, then, arrived.provenance["git_revision"]):
        raise UserError(f"{problem}; that proves nothing, because {other}: train it again with the same code")
    raise VerificationFailed(problem)


def _other_code(run_dir: Path, then: str | None, now: str | None) -> str:
    """Why the code of this process may differ from the code that trained; empty if nothing speaks for it.

    Args:
        then, now: the commits of this package, with `+` where files differ from it.
    """
    if then != now:
        was, present = (revision or "an unknown commit" for revision in (then, now))
        return f"the code was {was} and is {present} now"
    if now is not None and now.endswith("+"):
        return f"the code of this package differs from its commit ({now})"
    for path in imported_files():
        if not is_only_copy(run_dir, path):
            return f"{path} is not the one file of that name in {run_dir / CODE_FOLDER}"
    unknown = [*imported_modules(), *(name for path in imported_files() for name in modules_beside(path))]
    if unknown:
        return f"the run keeps no copy of {', '.join(unknown)}, which may have changed"
    return ""
