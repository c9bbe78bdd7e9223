"""The parts of a session that `session.open_session` makes for its devices: networks and log."""

from collections.abc import Callable, Mapping

from jaxrl_atari.algorithm import TrainState
from jaxrl_atari.config import Config, NetworkConfig
from jaxrl_atari.devices import Placement
from jaxrl_atari.hardware.tuning import compile_clock
from jaxrl_atari.network_forms import make_networks
from jaxrl_atari.network_interface import Networks
from jaxrl_atari.runs.checkpoints import ResumedCheckpoint
from jaxrl_atari.runs.progress import Progress
from jaxrl_atari.runs.session_log import SessionLog
from jaxrl_atari.runs.writers import Writer
from jaxrl_atari.session_environments import SessionEnvironments


def networks_of_session(network: NetworkConfig, placement: Placement, num_actions: int) -> Networks:
    """The networks of a session, in the forms that suit the devices that learn and act."""
    return make_networks(network, num_actions, *placement.device_classes)


def make_log(
    config: Config,
    outputs: Writer,
    progress: Progress,
    resumed: ResumedCheckpoint | None,
    train_state: TrainState,
    environments: SessionEnvironments,
    machine: Callable[[], Mapping[str, float]],
) -> SessionLog:
    """The log of a session, which continues that of a checkpoint.

    Args:
        outputs: receives its lines and log points.
        resumed: the checkpoint that the session resumes from; None for a new session.
        train_state: that of the checkpoint, or the first one.
        machine: returns the machine's figures for a log point.
    """
    return SessionLog(
        outputs,
        config.log.every_env_steps,
        progress,
        unlogged=resumed.meta.get("unlogged_metrics", ()) if resumed else (),
        optimizer_steps=int(train_state.optimizer_steps),
        steps_per_update=config.ppo.epochs * config.num_minibatches,
        monitor=machine,
        in_progress=environments.in_progress,
        compiled=compile_clock(),
    )
