"""Session: one training run with one seed. Its loop is `iterations`: collect, update, log, checkpoint."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_atari.algorithm import check_config, find_algorithm, new_key, resolved_options
from jaxrl_atari.config import Config
from jaxrl_atari.devices import Placement, device_class, place
from jaxrl_atari.envs import first_game_seed
from jaxrl_atari.envs.pool import FinishedGame
from jaxrl_atari.errors import Stopped, UserError
from jaxrl_atari.evaluate.during_training import Evaluator
from jaxrl_atari.evaluate.policy import Policy, load_parameters, parameters_digest
from jaxrl_atari.hardware.distributed import is_leader, sum_over_processes
from jaxrl_atari.hardware.memory import out_of_memory_advice
from jaxrl_atari.hardware.monitor import monitor
from jaxrl_atari.learner import Learner, PendingMetrics, abstract_arrays, first_arrays
from jaxrl_atari.networks import Network, make_network, speed_hints
from jaxrl_atari.rollout import Environments, collect
from jaxrl_atari.runs.actions import write_segment
from jaxrl_atari.runs.arrays import array_shapes
from jaxrl_atari.runs.checkpoints import Checkpoint, Checkpoints
from jaxrl_atari.runs.description import device_text, find_provenance, resume_text
from jaxrl_atari.runs.files import only_writer
from jaxrl_atari.runs.logs import open_logs
from jaxrl_atari.runs.progress import Progress, due, evaluation_due, return_ma_window
from jaxrl_atari.runs.session_log import SessionLog
from jaxrl_atari.runs.writers import TerminalWriter, Writer, WriterGroup
from jaxrl_atari.update import current_options, learning_rate


def run_session(
    config: Config,
    session_dir: Path,
    session_number: int = 0,
    *,
    label: str = "",
    writers: Sequence[Writer] = (),
    stop_requested: Callable[[], bool] = lambda: False,
    on_first_update: Callable[[], None] = lambda: None,
    ends_early: Callable[[], bool] = lambda: False,
) -> None:
    """Trains one session of a trial, with seed `config.seed + session_number`, and writes all its files.

    It continues from its newest sound checkpoint, if it has one.

    Args:
        session_dir: where metrics, events and checkpoints go; made if it does not exist.
        label: stands before each printed line. Empty: `session 0`, with the session's number.
        writers: receive the log points, as the writers of `config.log` do. They are not closed. An error of a
            writer ends the session.
        stop_requested: asked before each rollout and whenever an evaluation is waited for; if true, the session
            writes its last checkpoint and ends.
        on_first_update: called after the first update.
        ends_early: asked before each rollout while the budget lasts. Once it is true in any process, the session
            ends as if its budget were spent, but without an evaluation that is due at the end of the budget.

    Raises:
        UserError: a loss or a parameter became non-finite (the last checkpoint, if any, is kept), a file cannot be
            used, or another process is training in `session_dir`.
        Stopped: stopped on request, after the last checkpoint was written. It is a `KeyboardInterrupt`.
    """
    terminal = TerminalWriter(config.total_env_steps, label or f"session {session_number}")
    with (
        contextlib.closing(terminal),
        open_session(
            config,
            session_dir,
            session_number,
            writers=[terminal, *writers],
            stop_requested=stop_requested,
            ends_early=ends_early,
        ) as session,
    ):
        for number, _ in enumerate(iterations(session)):
            if number == 0:
                on_first_update()
        session.finish()
        # A stop may come during the last evaluation, for which only the leader waits. `is_stopping` waits for all
        # processes and gives each the same answer, so that they leave together.
        if not session.is_over or session.is_stopping():
            raise Stopped


def iterations(session: "Session") -> Iterator[PendingMetrics]:
    """The loop: collect, update, log, checkpoint. It trains while it is iterated over.

    Yields:
        What `Learner.update` returned, after each iteration.
    """
    config = session.config
    progress = session.progress
    environments = session.environments
    learner = session.learner
    log = session.log
    session.evaluate_if_due()  # a stop may have left out an evaluation that was due
    while session.goes_on():
        # With `devices.check`, implicit transfers between host and devices are forbidden once everything is
        # compiled.
        guarded = config.devices.check and not log.is_first_iteration
        update_options = current_options(config, progress.env_steps)
        actor_key, update_key = session.keys(progress.updates)
        with jax.transfer_guard("disallow" if guarded else "allow"):
            log.phase("first rollout")  # silent after the first iteration
            collected = collect(
                environments.groups,
                learner.acting_params(),
                actor_key,
                length=config.ppo.rollout_length,
                first_step=progress.steps_per_env,
            )
            log.phase("first update")
            pending_metrics = learner.update(collected.rollouts, update_options, update_key)
        session.finished_games += collected.games
        progress.count(collected.env_steps, collected.games, config.ppo.rollout_length)
        rate = learning_rate(config, progress.env_steps)
        acting_seconds = collected.waiting_seconds, collected.other_seconds
        log.after_update(pending_metrics, rate, acting_seconds, collected.logged)
        del collected  # without overlap, this frees the memory of the rollout before the next one is filled
        session.evaluate_if_due()
        session.checkpoint_if_due()
        yield pending_metrics


# --- What surrounds the loop -------------------------------------------------------------------------------------


@dataclass
class Session:
    """What the loop `iterations` works with; `open_session` makes it and closes its parts.

    Everything random derives from the seed. Update u takes its keys from `fold_in(key(seed), u)`, and games
    continue where they were (`envs/record.py`). So a resumed session does what an uninterrupted one does.
    """

    config: Config
    seed: int  # seed of this session
    key: jax.Array  # key of everything that JAX draws
    placement: Placement
    network: Network
    progress: Progress
    environments: Environments
    learner: Learner
    log: SessionLog
    evaluator: Evaluator | None  # None where there are no evaluations
    checkpoints: Checkpoints | None  # None in a process that is not the leader
    stop_requested: Callable[[], bool]
    ends_early: Callable[[], bool]
    finished_games: list[FinishedGame] = field(default_factory=list, init=False)  # since the last checkpoint
    _has_ended_early: bool = field(default=False, init=False)  # whether `ends_early` was true in any process

    def keys(self, update: int) -> jax.Array:
        """The keys of an update, [2]: to act and to learn (`algorithm.py`)."""
        return jax.random.split(jax.random.fold_in(self.key, update))

    def is_stopping(self) -> bool:
        """Whether a stop was requested in any process. All processes must ask."""
        return sum_over_processes(self.stop_requested()) > 0

    @property
    def is_over(self) -> bool:
        """Whether training has come to its end: the budget is spent, or `ends_early` was true."""
        return self._has_ended_early or self.config.is_spent(self.progress.env_steps)

    def ends(self) -> bool:
        """Asks all processes whether training has come to its end."""
        if not self.is_over:
            self._has_ended_early = sum_over_processes(self.ends_early()) > 0
        return self.is_over

    def goes_on(self) -> bool:
        """Asks all processes whether to collect another rollout: training is not over, and no stop requested."""
        return not self.ends() and not self.is_stopping()

    def evaluate_if_due(self) -> None:
        """Writes the result of an evaluation that has ended, and starts one if it is due.

        It waits for the one before, and training with it. A stop request ends the wait; then none is started.
        """
        if self.evaluator is None:
            return
        self.evaluator.poll()
        progress = self.progress
        if evaluation_due(self.config, progress.evaluated_env_steps, progress.env_steps):
            self.evaluator.settle(self.stop_requested)
            if self.evaluator.snapshot is None:
                self.evaluator.start(self.learner.params, progress.env_steps)
                progress.evaluated_env_steps = progress.env_steps

    def checkpoint_if_due(self) -> None:
        """Writes a checkpoint if one is due, or if its parameters are being evaluated: it may be the best one.

        At the end of training it leaves that to `finish`, which writes the last log point before.
        """
        progress = self.progress
        is_evaluated = self.evaluator is not None and progress.evaluated_env_steps == progress.env_steps
        is_due = due(self.config.log.checkpoint_every_env_steps, progress.saved_env_steps, progress.env_steps)
        if (is_due or sum_over_processes(is_evaluated) > 0) and not self.ends():
            self.save(progress.statistics.mean_return())

    def save(self, return_mean: float | None) -> None:
        """Writes a checkpoint and the actions that led to it. Only the leader writes.

        It first waits for the newest update, which has to be sound.

        Args:
            return_mean: the best checkpoint is the one with the highest value. None if a stop request or `retrain`
                caused the checkpoint: it counts as the best only while no other has a value.
        """
        progress = self.progress
        self.log.read_newest()
        self.learner.check_state()
        # An update's metrics do not show what its last gradient step has done.
        self.log.require_finite({"parameter_norm": self.learner.parameter_norm()})
        progress.saved_env_steps = progress.env_steps
        finished, self.finished_games = self.finished_games, []
        if self.checkpoints is None:
            return
        games, segments = self.environments.cut_segments()
        if segments and self.config.log.actions:
            write_segment(self.checkpoints.session_dir, segments, finished, self.config.ppo.rollout_length)
        items: dict[str, Any] = {"arrays": {"train_state": self.learner.state, "key": self.key}}
        items |= self.learner.checkpoint_items()
        if self.evaluator is not None:
            self.evaluator.poll()  # an evaluation that has just ended is no part of the checkpoint
            if self.evaluator.snapshot is not None:
                items["evaluation"] = self.evaluator.snapshot
        self.checkpoints.save(progress.env_steps, items | games, self.meta(), return_mean)

    def meta(self) -> dict[str, Any]:
        """Content of a checkpoint other than the arrays, as JSON values."""
        return {
            "config": self.config.to_dict(),
            "num_actions": self.network.module.num_actions,
            "device": self.describe_devices(),
            "provenance": self.provenance,
            "seed": self.seed,
            "game_seed": self.environments.game_seed,
            **self.progress.state(),
            **self.log.state(),
        }

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """What the bits of this session depend on besides its config and seed, as JSON values."""
        options = resolved_options(self.config)
        return find_provenance(self.config.devices, options, self.placement, self.network.dtype.name)

    def describe_devices(self) -> str:
        """The session's devices and its arithmetic, in one line."""
        return device_text(self.placement, self.network.dtype.name, self.evaluator is not None)

    def finish(self) -> None:
        """Writes the last log point and checkpoint; once these are on disk, finishes the evaluations."""
        if self.progress.updates == 0:  # stopped before the first update: there is nothing to save
            return
        self.log.read_newest()
        self.log.last_point(learning_rate(self.config, self.progress.env_steps))
        # A session that has trained nothing leaves the checkpoint to the one that trained it.
        if self.progress.saved_env_steps < self.progress.env_steps:
            self.save(self.progress.statistics.mean_return() if self.is_over else None)
        if self.evaluator is not None:
            self.evaluator.settle(self.stop_requested)


# --- Making a session --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_session(
    config: Config,
    session_dir: Path,
    session_number: int = 0,
    *,
    writers: Sequence[Writer] = (),
    stop_requested: Callable[[], bool] = lambda: False,
    ends_early: Callable[[], bool] = lambda: False,
) -> Iterator[Session]:
    """Makes a session, from its newest sound checkpoint if it has one, and closes its parts after the block.

    Of several processes, only the leader writes files and lines. The logs come after all that may fail on a wrong
    option or a damaged checkpoint, because opening them truncates files.

    Args:
        writers: receive lines and log points besides the writers of `config.log`. They are not closed.
        session_dir, session_number, stop_requested, ends_early: see `run_session`.

    Raises:
        UserError: as `run_session`, or as `devices.place`; sizes do not suit the number of devices that learn.
    """
    placement = place(config.devices)
    check_config(config, len(placement.learner))
    leads = is_leader()
    algorithm = find_algorithm(config.algorithm)
    options = resolved_options(config)
    seed = config.seed + session_number
    with contextlib.ExitStack() as exits:
        if leads:
            session_dir.mkdir(parents=True, exist_ok=True)
            exits.enter_context(only_writer(session_dir))
        outputs = exits.enter_context(contextlib.closing(WriterGroup(writers if leads else ())))
        say = outputs.message
        say("starting the games and the network")
        # Errors in training get this advice, too: the context lasts until the session is closed.
        exits.enter_context(out_of_memory_advice(config.ppo.minibatch_size, config.env.num_envs))

        # What it continues from.
        checkpoints = Checkpoints(session_dir, say, config.log.keep_checkpoints)
        resumed = checkpoints.resume()
        meta = resumed.meta if resumed else {}
        progress = Progress(meta, return_ma_window(config.total_env_steps))

        # What plays, learns and evaluates.
        environments = start_environments(
            config, placement, seed=seed, progress=progress, resumed=resumed, say=say
        )
        exits.callback(environments.close)
        network = environments.network
        for hint in speed_hints(network):
            say(hint)
        acting = evaluated = None  # of the checkpoint: parameters that act, and those in an evaluation
        if resumed is None:
            initial = initial_parameters(config, network, say) if config.init_from else None
            arrays = first_arrays(network, algorithm, options, seed=seed, device=placement.home, initial=initial)
        else:
            home = placement.home
            arrays = resumed.to_device("arrays", abstract_arrays(network, algorithm, options), home)
            if "acting" in resumed.items:
                acting = resumed.to_device("acting", arrays["train_state"].params, home)
            if "evaluation" in resumed.items:
                evaluated = resumed.to_device("evaluation", arrays["train_state"].params, home)
        learner = Learner(
            placement,
            network,
            algorithm,
            arrays["train_state"],
            overlap=config.overlap == "update",
            lagged_params=acting,
            check=config.devices.check,
        )
        exits.callback(learner.close)
        evaluator = None
        if leads and config.evaluation.every_env_steps:
            num_actions = network.module.num_actions
            policy = Policy(
                config=config,
                network=make_network(config.network, num_actions, device_class(placement.evaluator)),
                params=None,
                device=placement.evaluator,
                session_dir=session_dir,
                env_steps=0,
                num_actions=num_actions,
            )
            evaluator = Evaluator(policy, seed=seed, writer=outputs)
            exits.callback(evaluator.close)
            if evaluated is not None:
                evaluator.start(evaluated, progress.evaluated_env_steps)

        # What is written down.
        if leads:
            open_logs(
                config,
                session_dir,
                progress,
                outputs,
                starts_anew=resumed is None,
                was_evaluating=evaluator is not None and evaluated is not None,
            )
        log = SessionLog(
            outputs,
            config.log_interval,
            progress,
            unlogged=meta.get("unlogged_metrics", ()),
            optimizer_steps=int(arrays["train_state"].optimizer_steps),
            steps_per_update=config.ppo.epochs * config.num_minibatches,
            monitor=exits.enter_context(monitor([*placement.local_learner, *placement.actors])),
            games_so_far=environments.games_so_far,
        )

        session = Session(
            config=config,
            seed=seed,
            key=arrays["key"],
            placement=placement,
            network=network,
            progress=progress,
            environments=environments,
            learner=learner,
            log=log,
            evaluator=evaluator,
            checkpoints=checkpoints if leads else None,
            stop_requested=stop_requested,
            ends_early=ends_early,
        )
        say(f"device: {session.describe_devices()}")
        if resumed is not None:
            say(resume_text(meta, session.meta()))
        del arrays, acting, evaluated, resumed  # frees the checkpoint: the learner has a copy
        yield session


def start_environments(
    config: Config,
    placement: Placement,
    *,
    seed: int,
    progress: Progress,
    resumed: Checkpoint | None,
    say: Callable[[str], object],
) -> Environments:
    """Makes the environments of a session. The games of its checkpoint continue if they can; else new games start.

    Args:
        seed: seed of the session, from which that of new games derives.
        progress: how far the session has come.
        resumed: the checkpoint that the session resumes from; None for a new session.
        say: receives a line for the user if the games of a checkpoint cannot continue.
    """
    why_new = ""
    if resumed is not None:
        envs_before = resumed.meta["config"]["env"]["num_envs"]
        if config.unrecorded_reason:
            why_new = config.unrecorded_reason
        elif "games" not in resumed.items:
            why_new = "the checkpoint has none: the back end ale records them, in a single process"
        elif envs_before != config.env.num_envs:
            why_new = f"env.num_envs {envs_before} -> {config.env.num_envs}"
        else:
            # `first_step` is 0: the games are played again from their start, which counts their steps.
            environments = Environments(config, placement, resumed.meta["game_seed"])
            try:
                environments.resume(resumed.items)
                return environments
            except UserError as error:
                environments.close()
                why_new = str(error)
        say(f"new games are started ({why_new})")
    game_seed = first_game_seed(seed, progress.updates)
    return Environments(config, placement, game_seed, first_step=progress.steps_per_env, why_new=why_new)


def initial_parameters(config: Config, network: Network, say: Callable[[str], object]) -> dict[str, np.ndarray]:
    """The parameters of `init_from` that a network can start from: path -> array.

    Args:
        say: receives a line for the user that names the parameters that stay random.

    Raises:
        UserError: the source cannot be read, holds other parameters than when the run began, or none that fits.
    """
    assert config.init_from is not None
    found = load_parameters(config.init_from, config.init_checkpoint)
    if config.init_digest not in (None, parameters_digest(config.init_from, config.init_checkpoint)):
        raise UserError(f"{config.init_from}: holds other parameters than when the run began; restore them")
    own = array_shapes(jax.eval_shape(lambda: network.init(new_key(0))))
    shapes = array_shapes(found)
    taken = {path: found[path] for path in own if own[path] == shapes.get(path)}
    if not taken:
        raise UserError(
            f"{config.init_from}: none of its parameters fits {config.network.name}: {own} -> {shapes}"
        )
    new = ", ".join(f"{path} {own[path]}" for path in own if path not in taken) or "none"
    say(f"starts from {config.init_from}: {len(taken)} of {len(own)} arrays; random: {new}")
    return taken
