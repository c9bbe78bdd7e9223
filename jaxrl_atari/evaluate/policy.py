"""Policies: loading them from checkpoints, and choosing actions."""

import dataclasses
import logging
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.algorithm import new_key
from jaxrl_atari.config import CheckpointChoice, Config, config_from_dict
from jaxrl_atari.devices import device_class, pick_device
from jaxrl_atari.envs.pool import FRAME_SIZE, STACK
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.networks import Network, Observation, Outputs, make_network
from jaxrl_atari.runs.arrays import array_digests, by_path, digest_of
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.layout import CHECKPOINTS_FOLDER, session_path

_log = logging.getLogger(__name__)


class Decision(NamedTuple):
    """What a policy has decided for n environments."""

    actions: np.ndarray  # int32 [n]
    outputs: Outputs  # of the network, which the actions were chosen from


@partial(jax.jit, static_argnames=("network", "greedy"))
def choose_actions(
    network: Network, params: Any, observation: Observation, key: jax.Array, greedy: bool
) -> tuple[jax.Array, Outputs]:
    """Chooses actions for stacks uint8 `[n, 84, 84, 4]`: sampled ones, or the most probable ones if `greedy`.

    Returns:
        The actions int32 `[n]`, and the outputs of the network.
    """
    outputs = network.apply(params, observation)
    actions = jnp.argmax(outputs.logits, axis=-1) if greedy else jax.random.categorical(key, outputs.logits)
    return actions, outputs


@dataclasses.dataclass(frozen=True)
class Policy:
    """A trained network on a device, with the config of its training."""

    config: Config
    network: Network
    params: Any = dataclasses.field(repr=False)
    device: jax.Device
    session_dir: Path
    env_steps: int  # env steps of training at the checkpoint
    num_actions: int

    def act(
        self, frames: np.ndarray | jax.Array, key: jax.Array | None = None, greedy: bool = False
    ) -> np.ndarray | np.int32:
        """Chooses an action for each frame stack, or for a single one, such as an observation of `make_env`.

        A recurrent network needs `decide` instead.

        Args:
            frames: uint8 [n, 84, 84, 4], preprocessed as in training, the oldest frame first; or one stack,
                [84, 84, 4].
            key: random key; pass a new one to each call. Not used if `greedy`.
            greedy: take the most probable action instead of sampling.

        Returns:
            int32 [n], indices into the game's action set; for one stack, int32 [].

        Raises:
            ValueError: `frames` has another type or shape; there is no key, but sampling needs one; or the network
                is recurrent.
        """
        actions = self._decide_at_once(frames, key, greedy).actions
        return actions[0] if frames.ndim == 3 else actions

    def distribution(self, frames: np.ndarray | jax.Array) -> tuple[np.ndarray, np.ndarray]:
        """The probabilities of the actions, and the value, for each frame stack or for a single one.

        A recurrent network needs `decide` instead.

        Args:
            frames: as in `act`.

        Returns:
            float32 [n, actions] and float32 [n]; for one stack, [actions] and [].

        Raises:
            ValueError: `frames` has another type or shape, or the network is recurrent.
        """
        outputs = self._decide_at_once(frames, None, True).outputs
        probabilities, value = jax.device_get((jax.nn.softmax(outputs.logits), outputs.value))
        return (probabilities[0], value[0]) if frames.ndim == 3 else (probabilities, value)

    def _decide_at_once(self, frames: np.ndarray | jax.Array, key: jax.Array | None, greedy: bool) -> Decision:
        """`decide` for a network without a memory; `frames` may be one stack."""
        if self.network.is_recurrent:
            raise ValueError("the network is recurrent: use Policy.decide, which takes and returns its memory")
        stacks = frames[None] if frames.ndim == 3 else frames
        return self.decide(stacks, np.zeros(len(stacks), bool), (), key, greedy)

    def initial_carry(self, num_envs: int) -> Any:
        """The memory of a recurrent network before its first game, for `decide`; `()` for others."""
        return self.network.initial_carry(num_envs)

    def decide(
        self,
        frames: np.ndarray | jax.Array,
        first: np.ndarray,
        carry: Any,
        key: jax.Array | None = None,
        greedy: bool = False,
    ) -> Decision:
        """Chooses an action for each frame stack, with a network that may be recurrent.

        Args:
            frames, key, greedy: as in `act`, with several stacks.
            first: bool [n], true where a game starts. There, the network forgets its memory.
            carry: the memory, `outputs.carry` of the decision before; `initial_carry(n)` at first.

        Raises:
            ValueError: `frames` has another type or shape, or there is no key, but sampling needs one.
        """
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1:] != (FRAME_SIZE, FRAME_SIZE, STACK):
            raise ValueError(f"frames: expected uint8 [n, 84, 84, 4], got {frames.dtype} {list(frames.shape)}")
        if key is None:
            if not greedy:
                raise ValueError("key: expected a JAX key, such as jax.random.key(0), or greedy=True")
            key = jax.random.key(0)
        inputs = jax.device_put((frames, first, carry), self.device)
        actions, outputs = choose_actions(
            self.network, self.params, Observation(*inputs), jax.device_put(key, self.device), greedy
        )
        return Decision(jax.device_get(actions), outputs)


def load_policy(
    run_dir: str | Path,
    checkpoint: CheckpointChoice = "best",
    *,
    device: jax.Device | None = None,
    session: int | None = None,
    backend: Literal["ale", "envpool", "gymnasium"] | None = None,
) -> Policy:
    """Loads the policy of a checkpoint, whatever device it was trained on.

    Args:
        run_dir: directory of a run, or of a session.
        checkpoint: `best` (by its evaluation during training, or else by the mean return of the last 100 games),
            `latest` (a warning names newer checkpoints that
            are damaged), or an env step.
        device: the device that acts; None: the first GPU, or the CPU if there is none.
        session: number of the session in the run; None: the one with the best checkpoint.
        backend: emulator pool; None: as in training. Another pool may have another emulator or start games
            otherwise, so scores may differ.

    Raises:
        UserError: the directory holds no run, or the checkpoint is missing or damaged.
    """
    checkpoints, wanted = _find(run_dir, checkpoint, session)
    device = device or pick_device("auto")
    if checkpoint == "latest":
        loaded, damaged = checkpoints.newest(["arrays"])
        for error in damaged.values():
            _log.warning("%s; the checkpoint at env step %s is used", error, loaded.env_steps)
    else:
        loaded = checkpoints.read(wanted, ["arrays"])
    config = config_from_dict(loaded.meta["config"])
    num_actions = loaded.meta["num_actions"]
    shapes = jax.eval_shape(lambda: make_network(config.network, num_actions).init(new_key(0)))
    arrays = loaded.to_device("arrays", {"train_state": {"params": shapes}}, device)
    # `num_threads` was the session's share of the cores in training. Here, all usable cores play.
    env = dataclasses.replace(config.env, num_threads=0)
    if backend is not None:  # each names games in its own way
        rules = {"game": env.atari_game, "protocol": env.protocol_name} if env.atari_game else {}
        env = dataclasses.replace(env, backend=backend, **rules)
    return Policy(
        config=dataclasses.replace(config, env=env),
        network=make_network(config.network, num_actions, device_class(device)),
        params=arrays["train_state"]["params"],
        device=device,
        session_dir=checkpoints.session_dir,
        env_steps=loaded.env_steps,
        num_actions=num_actions,
    )


def load_parameters(source: str | Path, checkpoint: CheckpointChoice = "best") -> dict[str, np.ndarray]:
    """The parameters of a trained network: path, such as `value/bias` -> array.

    Args:
        source: directory of a run or of a session, or an .npz file that has such arrays.
        checkpoint: as in `load_policy`, for a directory.

    Raises:
        UserError: as `load_policy`; or the file cannot be read.
    """
    path = Path(source).expanduser()
    if path.suffix != ".npz":
        params = load_policy(path, checkpoint, device=jax.local_devices(backend="cpu")[0]).params
        return by_path(jax.device_get(params))
    try:
        with np.load(path) as file:
            return dict(file)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({reason(error)}); expected a file that np.savez wrote"
        ) from error


def parameters_digest(source: str | Path, checkpoint: CheckpointChoice) -> str:
    """The digest of all parameters in the source of `load_parameters`. Starts no back end of JAX."""
    if Path(source).suffix == ".npz":
        return digest_of(array_digests(load_parameters(source)))
    checkpoints, env_steps = _find(source, checkpoint)
    prefix = "train_state/params/"
    saved = checkpoints.read_meta(env_steps)["checksums"]
    return digest_of({path.removeprefix(prefix): saved[path] for path in saved if path.startswith(prefix)})


def _find(
    run_dir: str | Path, checkpoint: CheckpointChoice, session: int | None = None
) -> tuple[Checkpoints, int]:
    """The checkpoints of a session, and the env steps of the chosen one. Arguments, errors: as `load_policy`."""
    path = Path(run_dir).expanduser()
    session_dir = _best_session(path) if session is None else session_path(path, session)
    checkpoints = Checkpoints(session_dir)
    if not checkpoints.env_steps():
        raise UserError(
            f"{session_dir}: holds no checkpoint; there is no such session, or it has written none yet"
        )
    if checkpoint == "latest":
        return checkpoints, checkpoints.newest([])[0].env_steps  # with a sound meta
    wanted = checkpoints.best_env_steps() if checkpoint == "best" else checkpoint
    assert wanted is not None  # there is a checkpoint, and so a best one
    return checkpoints, wanted


def _best_session(path: Path) -> Path:
    """The session of a run whose checkpoints have the highest mean return; or `path`, if that is a session.

    Raises:
        UserError: the directory holds no run, or a checkpoint's mean return cannot be read.
    """
    if (path / CHECKPOINTS_FOLDER).is_dir():
        return path

    def rank(session_dir: Path) -> tuple[bool, float]:
        means = Checkpoints(session_dir).mean_returns()
        return bool(means), max(means.values(), default=-np.inf)

    return max((session_path(path, number) for number in range(read_config(path).sessions)), key=rank)
