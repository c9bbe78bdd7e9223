"""One training run: collect -> update -> log -> checkpoint, with one seed, until its budget is spent."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_atari.config import Config, PPOConfig
from jaxrl_atari.devices import Placement, make_networks, place
from jaxrl_atari.envs.pool import FinishedGame
from jaxrl_atari.envs.record import GamesInProgress, join, split
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.evaluate.during_training import Evaluator
from jaxrl_atari.groups import make_groups
from jaxrl_atari.hardware.cpu import xla_threads
from jaxrl_atari.hardware.distributed import is_leader, sum_over_processes
from jaxrl_atari.hardware.memory import out_of_memory_advice
from jaxrl_atari.hardware.monitor import monitor
from jaxrl_atari.hardware.runtime import compile_clock, numeric_settings
from jaxrl_atari.learner import Learner, OverlappedLearner, abstract_arrays, check_update, first_arrays
from jaxrl_atari.rollout import EnvGroup, collect
from jaxrl_atari.runs.actions import cut_segments, write_segment
from jaxrl_atari.runs.checkpoints import Checkpoints, Restored, games_problem, resume_text
from jaxrl_atari.runs.digests import Written, add_digests, cut_digests
from jaxrl_atari.runs.files import only_writer
from jaxrl_atari.runs.progress import Progress, due
from jaxrl_atari.runs.run_dir import require_unused, surroundings
from jaxrl_atari.runs.session_log import ReadMetrics, SessionLog
from jaxrl_atari.runs.writers import TerminalWriter, Writer, make_writers, set_aside_logs


def run_session(
    config: Config,
    session_dir: Path,
    session: int = 0,
    *,
    resume: bool = False,
    writers: Sequence[Writer] = (),
    stop_requested: Callable[[], bool] = lambda: False,
    on_first_update: Callable[[], None] = lambda: None,
    is_enough: Callable[[], bool] | None = None,
) -> None:
    """Trains session `session` of a trial, with seed `config.seed + session`, and writes all its files.

    Args:
        session_dir: where metrics, events and checkpoints go; made if it does not exist.
        resume: continue from the newest sound checkpoint, if there is one.
        writers: receive the log points too, besides the writers of `config.log`; one that raises ends the session.
            They are not closed.
        stop_requested: asked before each rollout and whenever an evaluation is waited for; if true, the session
            writes its last checkpoint and ends.
        on_first_update: called after the first update.
        is_enough: asked after each update; if true, the session ends as if its budget were spent.

    Raises:
        UserError: a loss or a parameter became non-finite (the last checkpoint is kept), a file cannot be used,
            another process is training in `session_dir`, or it holds a session and `resume` is false.
        KeyboardInterrupt: stopped on request, after the last checkpoint was written.
    """
    with prepare(config, session_dir, session, resume, writers, stop_requested=stop_requested) as run:
        run.is_enough = is_enough
        for number, _ in enumerate(train(run)):
            if number == 0:
                on_first_update()
        run.finish()
        # Several processes leave a session together, although the leader alone evaluates at its end.
        if not run.is_over() or run.stops():
            raise KeyboardInterrupt


def train(run: "Session") -> Iterator[ReadMetrics]:
    """The loop: collect, update, log, checkpoint. After each iteration it yields what `Learner.update`
    returned."""
    config = run.config
    progress = run.progress
    learner = run.learner
    run.evaluate_if_due()  # a stop may have left out the one that was due
    while not run.is_over() and not run.stops():
        # With `devices.check`, implicit transfers between host and devices are forbidden once everything is
        # compiled.
        guarded = config.devices.check and not run.log.compiling
        with jax.transfer_guard("disallow" if guarded else "allow"):
            options = current_options(config, progress.env_steps)
            actor_key, update_key = run.keys(progress.updates)
            run.log.phase("first rollout")
            collected = collect(run.groups, learner.acting_params(), actor_key, progress.steps)
            run.log.phase("first update")
            metrics = learner.update(collected.rollouts, options, update_key)
        run.games += collected.games
        optimizer_steps = config.ppo.epochs * config.num_minibatches
        progress.count(collected.env_steps, collected.games, optimizer_steps, config.ppo.rollout_length)
        rate = learning_rate(config, progress.env_steps)
        run.log.after_update(metrics, rate, collected.seconds)
        del collected  # the memory of the rollout, before the next one is filled
        run.evaluate_if_due()
        run.checkpoint_if_due()
        yield metrics


def annealed(value: float, config: Config, env_steps: int) -> float:
    """A value that falls linearly in env steps, to 0 at total_env_steps."""
    return value * max(0.0, 1.0 - env_steps / config.total_env_steps)


def learning_rate(config: Config, env_steps: int) -> float:
    """The rate of the next update."""
    rate = config.ppo.learning_rate
    return annealed(rate, config, env_steps) if config.ppo.anneal_learning_rate else rate


def clip_epsilon(config: Config, env_steps: int) -> float:
    """The clip range of the next update."""
    epsilon = config.ppo.clip_epsilon
    return annealed(epsilon, config, env_steps) if config.ppo.anneal_clip_epsilon else epsilon


def current_options(config: Config, env_steps: int) -> PPOConfig:
    """The options of the next update, its numbers as NumPy scalars. To schedule one of them, compute it here."""
    options = replace(
        config.ppo,
        learning_rate=learning_rate(config, env_steps),
        clip_epsilon=clip_epsilon(config, env_steps),
        gae_lambda=config.resolved_gae_lambda,
    )
    return jax.tree.map(np.float32, options)


@jax.jit
def _keys_of_update(key: jax.Array, update: jax.Array) -> tuple[jax.Array, jax.Array]:
    actor_key, update_key = jax.random.split(jax.random.fold_in(key, update))
    return actor_key, update_key


# --- What surrounds the loop -------------------------------------------------------------------------------------


@dataclass
class Session:
    """State and parts of the loop of `run_session`; made and closed by `prepare`.

    Everything random derives from the seed. Update u takes its keys from `fold_in(key(seed), u)`, and games go on
    where they were (`envs/record.py`), so a resumed session does what an uninterrupted one would have done.
    """

    config: Config
    session_dir: Path
    seed: int  # seed of this session
    game_seed: int
    placement: Placement
    progress: Progress
    groups: list[list[EnvGroup]]
    learner: Learner
    key: jax.Array  # key of everything that JAX draws
    log: SessionLog
    checkpoints: Checkpoints | None  # None in a process that is not the leader
    evaluator: Evaluator | None  # None where there are no evaluations
    evaluated: int  # env steps of the newest evaluation
    stop_requested: Callable[[], bool]

    def __post_init__(self) -> None:
        self._saved = self.progress.env_steps  # at the newest checkpoint
        self.is_enough: Callable[[], bool] | None = None  # see `run_session`
        self.games: list[FinishedGame] = []  # that ended since the last checkpoint, for the log of actions

    def keys(self, update: int) -> tuple[jax.Array, jax.Array]:
        """The keys of an update: for acting and for its minibatches."""
        return _keys_of_update(self.key, jax.device_put(np.uint32(update), self.placement.home))

    def stops(self) -> bool:
        """Whether a stop was requested in any process."""
        return sum_over_processes(self.stop_requested()) > 0

    def is_over(self) -> bool:
        """Whether the session has trained to its end: its budget is spent, or `is_enough` says so in any
        process."""
        if self.config.is_spent(self.progress.env_steps):
            return True
        return self.is_enough is not None and sum_over_processes(self.is_enough()) > 0

    def evaluate_if_due(self) -> None:
        """Starts an evaluation where one is due, once the one before has ended."""
        if self.evaluator is None:
            return
        now = self.progress.env_steps
        # The last update may end just before the budget, where one is due.
        reached = max(now, self.config.total_env_steps) if self.config.is_spent(now) else now
        if due(self.config.evaluation.every_env_steps, self.evaluated, reached) and now > self.evaluated:
            self.evaluator.settle(self.stop_requested)
            if self.evaluator.running() is None:
                self.evaluator.start(self.learner.state.params, now)
                self.evaluated = now

    def checkpoint_if_due(self) -> None:
        """Saves everything where a checkpoint is due."""
        if due(self.config.log.checkpoint_every_env_steps, self._saved, self.progress.env_steps):
            self._saved = self.progress.env_steps
            self.save(self.progress.statistics.mean_return())

    def save(self, score: float | None) -> None:
        """Writes a checkpoint once the newest update is known to be sound.

        Args:
            score: None if it is not to become the best one: an uninterrupted session would not have it.
        """
        self.log.read_newest()
        # An update's metrics do not show what its last gradient step has done.
        self.log.require_finite({"parameter_norm": self.learner.parameter_norm()})
        if self.checkpoints is None:
            self.games = []
            return
        items: dict[str, Any] = {"arrays": {"train_state": self.learner.state, "key": self.key}}
        if self.learner.acting is not None:
            items["acting"] = self.learner.acting
        if self.evaluator and (evaluated := self.evaluator.running()):
            items["evaluation"] = evaluated.params
        taken = [group.take_games() for group in itertools.chain(*self.groups)]
        if all(taken):  # the back end records its games
            games, segments = zip(*taken, strict=True)
            items["games"] = join(games)._asdict()
            carry = join_carries([group.carry() for group in itertools.chain(*self.groups)])
            if carry:
                items["carry"] = carry
            if self.config.log.actions:
                write_segment(self.session_dir, segments, self.games, self.config.ppo.rollout_length)
        self.games = []
        digests = self.checkpoints.save(self.progress.env_steps, items, self.meta(), score)
        # Whether an evaluation runs at that moment depends on the machine's speed.
        kept = {name: digest for name, digest in digests.items() if not name.startswith("evaluation/")}
        progress = self.progress
        written = Written(progress.env_steps, progress.updates, kept, self.config.to_dict(), self.environment)
        add_digests(self.session_dir, written)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What the bits of a session depend on beside its config and seed, as JSON values."""
        around = surroundings(self.config)
        placement = self.placement
        return {
            "python": around["python"],
            "versions": around["versions"],
            "git_revision": around["git_revision"],
            "numeric_settings": around["numeric_settings"],
            "compute_dtype": self.learner.compute_dtype.name,
            "learns_on": [device.device_kind for device in placement.learner],
            "acts_on": [device.device_kind for device in placement.actors],
            "cpu": around["hardware"]["cpu"],
            "instruction_sets": around["hardware"]["instruction_sets"],
            "threads": xla_threads(),
        }

    def meta(self) -> dict[str, Any]:
        """Content of a checkpoint other than the arrays, as JSON values."""
        return {
            "config": self.config.to_dict(),
            "num_actions": self.groups[0][0].pool.num_actions,
            "device": self.device_text(),
            "compute_dtype": self.learner.compute_dtype.name,
            "numeric_settings": numeric_settings(),
            "seed": self.seed,
            "game_seed": self.game_seed,
            "env_steps": self.progress.env_steps,
            "updates": self.progress.updates,
            "steps": self.progress.steps,
            "statistics": self.progress.statistics.to_dict(),
            "evaluated_env_steps": self.evaluated,
            **self.log.state(),
        }

    def device_text(self) -> str:
        """The devices that learn, act and evaluate, why they were chosen, and the arithmetic."""
        placement = self.placement
        text = f"{', '.join(map(str, placement.learner))} ({placement.reason})"
        if not {*placement.actors} <= {*placement.learner}:
            text += f"; acts on {', '.join(map(str, dict.fromkeys(placement.actors)))}"
        if self.evaluator:
            text += f"; evaluates on {placement.evaluator}"
        return f"{text}; computes in {self.learner.compute_dtype.name}"

    def finish(self) -> None:
        """Writes the last log point and checkpoint; once these are on disk, finishes the evaluations."""
        if self.progress.updates == 0:  # stopped before the first update: there is nothing to save
            return
        ended = self.is_over()
        self.log.read_newest()
        self.log.last_point(learning_rate(self.config, self.progress.env_steps))
        self.save(self.progress.statistics.mean_return() if ended else None)
        if self.evaluator is not None:
            self.evaluator.settle(self.stop_requested)


@contextlib.contextmanager
def prepare(
    config: Config,
    session_dir: Path,
    session: int = 0,
    resume: bool = False,
    writers: Sequence[Writer] = (),
    quiet: bool = False,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[Session]:
    """Chooses the devices, restores the newest sound checkpoint if asked to, and makes what the loop uses.

    Args:
        quiet: print nothing.
    """
    placement = place(config.devices)
    config.check_split(len(placement.learner))
    check_update(config, len(placement.learner))
    seed = config.seed + session
    leader = is_leader()  # only the leader of several processes writes

    with contextlib.ExitStack() as exits:
        exits.enter_context(out_of_memory_advice(config))
        outputs: list[Writer] = []
        if leader and not quiet:
            outputs.append(TerminalWriter(config.total_env_steps, f"session {session}"))

        def say(text: str) -> None:
            for writer in outputs:
                writer.message(text)

        began: list[bool] = []
        if leader:
            if not session_dir.exists():  # a session that is refused leaves no directory
                exits.enter_context(removed_if_refused(session_dir, began))
            session_dir.mkdir(parents=True, exist_ok=True)
            exits.enter_context(only_writer(session_dir))
            if not resume:
                require_unused(session_dir)

        # Checkpoint and games.
        say("starting the games and the network")
        checkpoints = Checkpoints(session_dir, say)
        restored = None
        if resume:
            restored = checkpoints.resume(
                lambda meta: abstract_arrays(config, meta["num_actions"], placement.home)
            )
        meta = restored.meta if restored else {}
        progress = Progress(meta)
        groups, game_seed = start_games(config, placement, seed, checkpoints, restored, progress, say)
        for group in itertools.chain(*groups):
            exits.callback(group.pool.close)

        # Learner.
        num_actions = groups[0][0].pool.num_actions
        arrays = restored.arrays if restored else first_arrays(config, num_actions, seed, placement.home)
        progress.optimizer_steps = int(arrays["train_state"].optimizer_steps)
        make_learner = Learner if config.overlap == "none" else OverlappedLearner
        learner = make_learner(config, placement, make_networks(config.network, num_actions, placement), arrays)
        exits.callback(learner.close)

        # Logs, cut back to the checkpoint.
        running = "evaluation" in arrays  # it is started again, and its row is written anew
        evaluated = meta.get("evaluated_env_steps", progress.env_steps)
        if leader:  # only now are the logs cut back to the checkpoint: whatever is missing has been reported
            if resume and restored is None:
                set_aside_logs(session_dir, say)
            cut_segments(session_dir, progress.steps)
            cut_digests(session_dir, progress.env_steps)
            (session_dir / "verified.json").unlink(missing_ok=True)  # it describes what was there before
            logged = meta.get("logged_env_steps", progress.env_steps)
            last_evaluation = evaluated - 1 if running else evaluated
            outputs += make_writers(config, session_dir, logged, last_evaluation, say)
        for writer in outputs:
            exits.callback(writer.close)
        if leader:
            outputs += writers  # whoever made them closes them
        read_monitor = exits.enter_context(monitor([*placement.learner, *placement.actors]))
        log = SessionLog(
            outputs, config.log.every_env_steps, progress, read_monitor, meta,
            in_progress=lambda: np.concatenate([group.in_progress() for group in itertools.chain(*groups)]),
            compiled=compile_clock(),
        )  # fmt: skip

        # Evaluator.
        evaluator = None
        if leader and config.evaluation.every_env_steps:
            evaluator = Evaluator(config, seed, num_actions, placement.evaluator, session_dir, say, log.evaluation)
            exits.callback(evaluator.close)
            if running:
                evaluator.start(arrays["evaluation"], evaluated)
        run = Session(
            config=config,
            session_dir=session_dir,
            seed=seed,
            game_seed=game_seed,
            placement=placement,
            progress=progress,
            groups=groups,
            learner=learner,
            key=arrays["key"],
            log=log,
            checkpoints=checkpoints if leader else None,
            evaluator=evaluator,
            evaluated=evaluated,
            stop_requested=stop_requested,
        )
        say(f"device: {run.device_text()}")
        if restored:
            say(resume_text(meta, run.meta()))
        began.append(True)
        yield run


@contextlib.contextmanager
def removed_if_refused(directory: Path, began: list[bool]) -> Iterator[None]:
    """Removes a new directory if the block ends with a `UserError` while `began` is empty."""
    try:
        yield
    except UserError:
        if not began:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def start_games(
    config: Config,
    placement: Placement,
    seed: int,
    checkpoints: Checkpoints,
    restored: Restored | None,
    progress: Progress,
    say: Callable[[str], None],
) -> tuple[list[list[EnvGroup]], int]:
    """The environments and the seed of their games: those of a checkpoint where it has games, else new ones."""
    problem = restored and games_problem(config, restored.meta)
    if restored and not problem:
        groups = make_groups(config, placement, restored.meta["game_seed"])
        try:
            games = GamesInProgress(**checkpoints.restore(restored.step, item="games"))
            carry = {}
            if "carry" in restored.meta["items"]:
                carry = checkpoints.restore(restored.step, item="carry")
            for group in itertools.chain(*groups):
                own_games = split(games, group.first_env, group.pool.num_envs)
                group.resume(own_games, split_carry(carry, group))
            return groups, restored.meta["game_seed"]
        except Exception as error:  # a damaged or hostile item may raise any type; the pool checks every action
            problem = reason(error)
            for group in itertools.chain(*groups):
                group.pool.close()
    if restored:
        say(f"new games are started ({problem})")
    game_seed = int(np.random.SeedSequence([seed, progress.updates]).generate_state(1)[0] >> 1)
    return make_groups(config, placement, game_seed, progress.steps), game_seed


def join_carries(carries: Sequence[Any]) -> dict[str, np.ndarray]:
    """The carries of all groups as an item of a checkpoint: number of a leaf -> `[B, ...]`. Empty if there is
    none."""
    leaves = [jax.tree.leaves(jax.device_get(carry)) for carry in carries]
    return {str(number): np.concatenate(parts) for number, parts in enumerate(zip(*leaves, strict=True))}


def split_carry(saved: dict[str, np.ndarray], group: EnvGroup) -> Any:
    """The carry of a group, from what `join_carries` returned."""
    envs = slice(group.first_env, group.first_env + group.pool.num_envs)
    leaves, structure = jax.tree.flatten(group.carry())
    return structure.unflatten([saved[str(number)][envs] for number in range(len(leaves))])
