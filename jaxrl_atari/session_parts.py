"""The parts of a session that `session.open_session` makes for its devices: learner, evaluator and log."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_atari.algorithm import TrainState
from jaxrl_atari.config import Config, NetworkConfig
from jaxrl_atari.devices import Placement
from jaxrl_atari.evaluate.during_training import Evaluator
from jaxrl_atari.hardware.device_class import device_class
from jaxrl_atari.hardware.tuning import compile_clock
from jaxrl_atari.learner import Learner, OverlappedLearner
from jaxrl_atari.network_forms import make_network, make_networks
from jaxrl_atari.network_interface import Networks
from jaxrl_atari.runs.checkpoints import RestoredCheckpoint
from jaxrl_atari.runs.progress import Progress
from jaxrl_atari.runs.session_log import SessionLog
from jaxrl_atari.runs.writers import Writer
from jaxrl_atari.session_environments import SessionEnvironments


def networks_of_session(network: NetworkConfig, placement: Placement, num_actions: int) -> Networks:
    """The networks of a session, in the forms that suit the devices that learn and act."""
    return make_networks(network, num_actions, *placement.device_classes)


def make_learner(
    config: Config,
    placement: Placement,
    num_actions: int,
    arrays: dict[str, Any],
    say: Callable[[str], object],
) -> Learner:
    """The learner that `config.overlap` selects. It copies the train state. `say` gets advice on slow networks."""
    networks = networks_of_session(config.network, placement, num_actions)
    if networks.learning.advice:
        say(networks.learning.advice)
    if config.overlap == "none":
        return Learner(config, placement, networks, arrays["train_state"])
    return OverlappedLearner(config, placement, networks, arrays["train_state"], arrays.get("acting"))


def make_evaluator(
    config: Config, placement: Placement, *, seed: int, num_actions: int, session_dir: Path, outputs: Writer
) -> Evaluator:
    """The evaluator of a session, with the network in the form that suits its device. See `Evaluator`."""
    device = placement.evaluator
    network = make_network(config.network, num_actions, device_class(device))
    return Evaluator(
        config,
        seed=seed,
        network=network,
        num_actions=num_actions,
        device=device,
        session_dir=session_dir,
        say=outputs.message,
        write=outputs.evaluation,
    )


def make_log(
    config: Config,
    outputs: Writer,
    progress: Progress,
    restored: RestoredCheckpoint | None,
    train_state: TrainState,
    environments: SessionEnvironments,
    machine: Callable[[], Mapping[str, float]],
) -> SessionLog:
    """The log of a session, which continues that of a checkpoint.

    Args:
        outputs: receives its lines and log points.
        restored: the checkpoint that the session resumes from; None for a new session.
        train_state: that of the checkpoint, or the first one.
        machine: returns the machine's figures for a log point.
    """
    return SessionLog(
        outputs,
        config.log.every_env_steps,
        progress,
        unlogged=restored.meta.get("unlogged_metrics", ()) if restored else (),
        optimizer_steps=int(train_state.optimizer_steps),
        steps_per_update=config.ppo.epochs * config.num_minibatches,
        monitor=machine,
        in_progress=environments.in_progress,
        compiled=compile_clock(),
    )
