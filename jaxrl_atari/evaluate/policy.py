"""Policies: load one from a checkpoint, and choose actions with it."""

import contextlib
import dataclasses
import logging
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.config import Config, NetworkConfig, config_from_dict
from jaxrl_atari.devices import check_placement, pick_device
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.fast.forms import Network, make_network
from jaxrl_atari.fast.frames import arrange_stacks
from jaxrl_atari.hardware.gpus import network_platform
from jaxrl_atari.learner import abstract_arrays
from jaxrl_atari.report.summary import counted_sessions
from jaxrl_atari.runs.checkpoints import Checkpoints, Damaged, Restored
from jaxrl_atari.runs.run_dir import checkpoint_steps, read_config, session_dirs

_log = logging.getLogger(__name__)


@partial(jax.jit, static_argnames=("network", "greedy"))
def choose_actions(network: Network, params: Any, stacks: jax.Array, key: jax.Array, greedy: bool) -> jax.Array:
    """Actions int32 `[n]` for stacks uint8 `[n, 84, 84, 4]`: sampled, or the most probable ones (`greedy`)."""
    logits, _ = network.apply(params, arrange_stacks(network.layout, stacks))
    actions = jnp.argmax(logits, axis=-1) if greedy else jax.random.categorical(key, logits)
    return actions.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A trained network on a device, and the config it was trained with."""

    config: Config
    network: Network
    params: Any
    device: jax.Device
    session_dir: Path
    env_steps: int  # of training: the checkpoint's step

    def act(self, frames: np.ndarray | jax.Array, key: jax.Array, greedy: bool = False) -> np.ndarray:
        """Chooses an action for each frame stack.

        Args:
            frames: uint8 [n, 84, 84, 4], preprocessed as in training, the oldest frame first.
            key: the source of the actions; pass a fresh one to each call. Not used if `greedy`.

        Returns:
            int32 [n], indices into the game's action set.
        """
        frames, key = jax.device_put((frames, key), self.device)
        check = self.config.devices.check
        if check:
            check_placement("evaluating", {"params": self.params, "frames": frames, "key": key}, [self.device])
        actions = choose_actions(self.network, self.params, frames, key, greedy)
        if check:
            check_placement("evaluating", {"actions": actions}, [self.device])
        return jax.device_get(actions)


def find_session(run_dir: str | Path, session: int | None = None) -> tuple[Path, str]:
    """The session directory to use, and the reason for that choice.

    Args:
        run_dir: a trial's directory, or a session's.
        session: its number in the trial; None: the only one, else the one with the highest score.

    Raises:
        UserError: no such directory, no sessions in it, or none that has a checkpoint.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such directory; expected a run directory such as data/qbert_20260101_120000")
    if (run_dir / "checkpoints").is_dir():
        if session is not None:
            raise UserError(f"--session {session}: {run_dir} is a session's directory already; leave --session out")
        return run_dir, "the session given"
    sessions = session_dirs(run_dir)
    if not sessions:
        raise UserError(f"{run_dir}: not a run directory; expected one that holds session_0")
    if session is not None:
        directory = run_dir / f"session_{session}"
        if directory not in sessions:
            there = ", ".join(path.name.removeprefix("session_") for path in sessions)
            raise UserError(f"--session {session}: {run_dir} has no such session; there are: {there}")
        return directory, "the session chosen"
    with contextlib.suppress(UserError):  # no config: every session counts
        sessions = counted_sessions(run_dir, read_config(run_dir)) or sessions
    saved = list(filter(checkpoint_steps, sessions))
    if not saved:
        raise UserError(f"{run_dir}: none of its sessions has a checkpoint yet; wait for the first one")
    if len(sessions) == 1:
        return sessions[0], "the only session"
    return max(saved, key=_best_score), f"the best of {len(sessions)} sessions, --session N picks another"


def _best_score(session_dir: Path) -> float:
    """The best score at any checkpoint of a session, as its newest readable one has it; -inf before a finished game."""
    checkpoints = Checkpoints(session_dir)
    for step in reversed(checkpoints.steps()):
        try:
            score = checkpoints.read_meta(step, ("best_score",))["best_score"]
        except Damaged as error:
            _log.warning("%s; it is left out of the ranking of the sessions", error)
        else:
            return -np.inf if score is None else score
    return -np.inf


def _config(checkpoints: Checkpoints, meta: dict[str, Any]) -> Config:
    """The config that a checkpoint was saved with."""
    try:
        return config_from_dict(meta["config"])
    except UserError as error:
        raise UserError(f"{checkpoints.directory / str(meta['env_steps'])}: its config: {error}") from error


def evaluation_network(config: NetworkConfig, num_actions: int, device: jax.Device) -> Network:
    """The network of a config on a device; with plain convolutions, if it was edited and `auto` would refuse it.

    A GPU trains an edited network with `auto`, and its games may be played on a CPU.
    """
    platform = network_platform(device)
    try:
        return make_network(config, num_actions, platform)
    except ConfigError:
        if config.conv != "auto":
            raise
        return make_network(dataclasses.replace(config, conv="plain"), num_actions, platform)


def load_policy(
    run_dir: str | Path,
    checkpoint: Literal["best", "latest"] | int = "best",
    device: jax.Device | None = None,
    session: int | None = None,
) -> Policy:
    """The policy of a checkpoint, whatever device it was trained on.

    Args:
        run_dir: a trial's directory, or a session's.
        checkpoint: `best` (by mean return of the last 100 games), `latest` (the newest sound one; a warning names
            newer, damaged ones), or an env step.
        device: where to act; None: the first GPU, or the CPU if there is none.
        session: see `find_session`.

    Raises:
        UserError: no run directory, no such checkpoint, or a damaged one.
    """
    session_dir, _ = find_session(run_dir, session)
    checkpoints = Checkpoints(session_dir)
    home = pick_device("auto")[0] if device is None else device

    def target(meta: dict[str, Any]) -> dict[str, Any]:
        return abstract_arrays(_config(checkpoints, meta), meta["num_actions"], home)

    fields = ("config", "num_actions")
    while True:
        steps = checkpoints.steps()
        try:
            step = checkpoints.best_step() if checkpoint == "best" else checkpoint
            if step is None or not steps:
                raise UserError(f"{session_dir}: holds no complete checkpoint yet; wait for the session's first one")
            if step == "latest":
                found = checkpoints.restore_newest(target, fields)
            else:
                meta = checkpoints.read_meta(step, fields)
                found = Restored(step, checkpoints.restore(step, target(meta)), meta, {})
            break
        except UserError:
            if set(steps) <= set(checkpoints.steps()):
                raise
            # The session, which is training, has deleted a checkpoint meanwhile.
    for damaged in found.damaged.values():
        _log.warning("%s; the one at env step %s is used", damaged, found.step)
    config = _config(checkpoints, found.meta)
    # The threads of training were its share of the cores.
    config = dataclasses.replace(config, env=dataclasses.replace(config.env, num_threads=0))
    network = evaluation_network(config.network, found.meta["num_actions"], home)
    return Policy(config, network, found.arrays["train_state"].params, home, session_dir, found.step)
