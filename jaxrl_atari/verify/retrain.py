"""Training a part of a session again, from a kept checkpoint to the next one (docs/verify.md)."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config, LogConfig, changed_fields, config_from_dict
from jaxrl_atari.errors import UserError, VerificationFailed
from jaxrl_atari.imports import passed_on
from jaxrl_atari.runs.checkpoints import Checkpoints, item_metas
from jaxrl_atari.runs.layout import checkpoint_path, session_number
from jaxrl_atari.session import iterations, open_session


def retrain(session_dir: Path, start: int) -> str:
    """Trains from the checkpoint at `start` env steps to the next one that is kept, and compares bits.

    Nothing in the session's directory is changed.

    Returns:
        The result in words.

    Raises:
        VerificationFailed: training arrives at other bits.
        UserError: the part cannot be trained again here, or other bits would prove nothing.
    """
    checkpoints = Checkpoints(session_dir)
    meta = checkpoints.read_meta(start)
    later = [env_steps for env_steps in checkpoints.env_steps() if env_steps > start]
    if not later:
        raise UserError(f"no later checkpoint than that at {start:,} env steps is kept")
    target = checkpoints.read_meta(later[0])
    config = _for_retraining(config_from_dict(target["config"]))
    before = _for_retraining(config_from_dict(meta["config"]))
    if changed := changed_fields(before.to_dict(), config.to_dict()):
        raise UserError(f"the config was changed before the next checkpoint ({', '.join(changed)})")
    if target["provenance"]["gpu_software"] and not config.devices.deterministic:
        raise UserError(
            "it was trained on a GPU without devices.deterministic, where two runs may have other bits"
        )
    arrived = _train_again(config, session_dir, start, target)
    _compare(meta, target, arrived)
    arrays = f"all bits of {len(_digests(target))} arrays are equal"
    return f"retrained: from {start:,} to {target['env_steps']:,} env steps, {arrays}"


def _for_retraining(config: Config) -> Config:
    """A config that trains to the same bits, with the defaults of all options that decide none.

    It writes no log, evaluation, graph or checkpoint on the way.
    """
    plain = Config()
    log = LogConfig(
        tensorboard=False, graphs=False, actions=False, every_env_steps=10**12, checkpoint_every_env_steps=10**12
    )
    return replace(
        config,
        name=plain.name,
        sessions=plain.sessions,
        output_dir=plain.output_dir,
        trial=plain.trial,
        evaluation=plain.evaluation,
        log=log,
        env=replace(config.env, num_threads=0),
        devices=replace(config.devices, evaluator=False, memory_fraction=None, check=False),
    )


def _train_again(config: Config, session_dir: Path, start: int, target: dict[str, Any]) -> dict[str, Any]:
    """Trains a copy of a session from its checkpoint at `start` env steps up to the env steps of `target`, a meta.

    Returns:
        The meta of the checkpoint at which it arrives.

    Raises:
        UserError: other bits are expected here.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, session_dir.name)
        shutil.copytree(checkpoint_path(session_dir, start), checkpoint_path(copy, start))
        with open_session(config, copy, session_number(session_dir)) as session:
            # Most commits change no number: the revision is named only if the bits differ.
            here = session.provenance | {"git_revision": None}
            if changed := changed_fields(target["provenance"] | {"git_revision": None}, here):
                differences = ", ".join(f"{field} {was} -> {present}" for field, (was, present) in changed.items())
                hint = "use the software and the devices of the training"
                raise UserError(f"cannot be compared here, where bits may differ ({differences}); {hint}")
            if session.environments.why_new:
                raise UserError(f"its games cannot continue here ({session.environments.why_new})")
            for _ in iterations(session):
                if session.progress.env_steps >= target["env_steps"]:
                    break
            session.save(None)
        checkpoints = Checkpoints(copy)
        return checkpoints.read_meta(checkpoints.env_steps()[-1])


def _digests(meta: dict[str, Any]) -> dict[str, str]:
    """`ITEM/PATH` of each array of a checkpoint with this meta -> its digest.

    An item `evaluation` is left out: whether an evaluation is running depends on the machine's speed.
    """
    return {
        f"{item}/{path}": digest
        for item, described in item_metas(meta).items()
        if item != "evaluation"
        for path, digest in described["checksums"].items()
    }


def _compare(start: dict[str, Any], target: dict[str, Any], arrived: dict[str, Any]) -> None:
    """Compares the meta of the checkpoint where a session arrives with that of the one written in training.

    `start` is that of the checkpoint from which it was trained.

    Raises:
        VerificationFailed: it arrives at other bits.
        UserError: it does, but the code or the machine may have changed, so this proves nothing.
    """
    expected, found = _digests(target), _digests(arrived)
    different = sorted(path for path, digest in expected.items() if found.get(path) != digest)
    if not different:
        return
    problem = (
        f"{len(different)} of {len(expected)} arrays differ from those written at {target['env_steps']:,} env"
        f" steps, first {different[0]}"
    )
    then, now = target["provenance"]["git_revision"], arrived["provenance"]["git_revision"]
    other = ""
    if then != now or (now or "").endswith("+"):
        other = f"the code was {then} and is {now} now (+: with changes that are not committed)"
    elif start["provenance"] != target["provenance"]:
        other = "between the two checkpoints the training went on with other software or on another machine"
    elif passed_on():
        other = f"{', '.join(passed_on())} may have changed"
    if other:
        raise UserError(f"{problem}; that proves nothing, because {other}: train it again with the same code")
    raise VerificationFailed(problem)
