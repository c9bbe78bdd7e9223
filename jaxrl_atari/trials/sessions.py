"""The sessions of a trial: `unfinished_jobs` makes a job of each that is left to train; `train_job` trains one."""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.config import TRACED_OPTIONS, Config
from jaxrl_atari.errors import Stopped
from jaxrl_atari.hardware import distributed
from jaxrl_atari.runs.columns import COLUMNS
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import CONFIG_FILE, STOPPED_FILE, session_path
from jaxrl_atari.runs.reading import EarlyEnd, is_finished, read_early_end
from jaxrl_atari.runs.run_dir import keep_code
from jaxrl_atari.runs.writers import Row, Writer
from jaxrl_atari.session import run_session
from jaxrl_atari.trials.launch import STOPPING, Job

StopFunction = Callable[[Row], object]
"""Called with each log point of a session. The session ends once the result is true; a text is the reason."""


def unfinished_jobs(
    config: Config, run_dir: Path, *, first_position: int = 0, game: str = "", setting_label: str = ""
) -> list[Job]:
    """Makes a job of each session of a trial that has not trained to its end.

    Args:
        config: config of the trial.
        run_dir: run directory of the trial.
        first_position: `Job.position` of session 0; the other sessions follow.
        game: game of the trial, in a suite.
        setting_label: label of the trial's setting, in a sweep.
    """
    description = describe(config, run_dir)
    key = compile_key(config)
    return [
        Job(
            config,
            run_dir,
            session,
            description=description,
            position=first_position + session,
            game=game,
            setting_label=setting_label,
            compile_key=key,
        )
        for session in unfinished_sessions(config, run_dir)
    ]


def unfinished_sessions(config: Config, run_dir: Path) -> list[int]:
    """The sessions of a trial that have not trained to their end. The run directory may not exist yet."""
    return [
        session for session in range(config.sessions) if not is_finished(config, session_path(run_dir, session))
    ]


def compile_key(config: Config) -> str:
    """A text that two configs share only if they run the same compiled programs.

    The configs may differ in what the programs take as arguments (`TRACED_OPTIONS`), such as the learning rate.
    """
    values = config.to_dict()
    for name in ("name", "seed", "sessions", "total_env_steps", "output_dir", "trial", "evaluation", "log"):
        del values[name]
    for name in TRACED_OPTIONS:
        del values["ppo"][name]
    return json.dumps(values)


def train_job(
    job: Job,
    *,
    writers: Sequence[Writer] = (),
    close_writers: bool = False,
    stop: StopFunction | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    on_first_update: Callable[[], object] = lambda: None,
) -> None:
    """Trains the session of a job, from its newest checkpoint if it has one.

    After its first update, it writes the run's config.json and keeps the user's own code in the run directory.

    Args:
        writers: receive the log points, with `session` and `seed` in each row.
        close_writers: whether the writers are closed at the end. A process of the session's own has copies, which
            nobody else closes.
        stop: called with each log point; the session ends early once the result is true.
        stop_requested: asked besides signals; if true, the session writes its last checkpoint and ends.
        on_first_update: called after the first update.

    Raises:
        UserError, Stopped: as `run_session`.
        KeyboardInterrupt: a signal before the first update, or Ctrl-C after an earlier signal, has ended the
            session at once. With `devices.distributed`, only the latter does.
    """
    config = job.config
    directory = session_path(job.run_dir, job.session)
    rule = StopRule(stop, config.total_env_steps, directory)
    with contextlib.ExitStack() as exits:
        if close_writers:
            for writer in writers:
                exits.callback(writer.close)
        if config.devices.distributed:  # its processes end together, perhaps before their first update
            request = StopRequest(job.name, quick=False, answer=STOPPING)
        else:
            request = StopRequest(job.name)
        signals = exits.enter_context(request)

        def after_first_update() -> None:
            signals.training = True
            if distributed.is_leader():
                write_json(job.run_dir / CONFIG_FILE, job.description)
                for line in keep_code(job.run_dir):
                    job.say(line)
            on_first_update()

        run_session(
            config,
            directory,
            job.session,
            label=job.name,
            resume=True,
            writers=[
                SessionWriter(writer, session=job.session, seed=config.seed + job.session)
                for writer in (*writers, rule)
            ],
            on_first_update=after_first_update,
            stop_requested=lambda: signals.requested or stop_requested(),
            ends_early=rule.ends_session if rule.is_active else None,
        )
        # A request that came after the session had asked for the last time.
        if distributed.sum_over_processes(signals.requested):
            raise Stopped


class SessionWriter(Writer):
    """Passes the log points of a session on to a caller's writer, with `session` and `seed` in each row."""

    def __init__(self, writer: Writer, *, session: int, seed: int):
        self._writer = writer
        self._columns = {"session": session, "seed": seed}

    def write(self, row: Row) -> None:
        self._writer.write(self._columns | dict(row))

    def evaluation(self, row: Row) -> None:
        self._writer.evaluation(self._columns | dict(row))

    def progress(self, env_steps: int, row: Row) -> None:
        self._writer.progress(env_steps, self._columns | dict(row) if row else row)

    def message(self, text: str) -> None:
        self._writer.message(text)


class StopRule(Writer):
    """Calls the caller's `stop` with each log point. Once its result is true, the session is to end early.

    In the row that `stop` gets, a column without a value is NaN, so that comparisons with it are false.

    Args:
        stop: the caller's function; None: no rule.
        total_env_steps: the budget of the session.
        session_dir: directory of the session. If its stopped.json says that the session has met the rule, but was
            interrupted in its last evaluation, the session is to end at once.
    """

    def __init__(self, stop: StopFunction | None, total_env_steps: int, session_dir: Path):
        self._stop = stop
        self._file = session_dir / STOPPED_FILE
        self._total_env_steps = total_env_steps
        before = read_early_end(session_dir)
        self._is_saved = before is not None and before.holds_under(total_env_steps)
        self._end = before if self._is_saved else None  # None until the session is to end

    @property
    def is_active(self) -> bool:
        """Whether there is a rule, or the session has met one before it was resumed."""
        return self._stop is not None or self._end is not None

    def write(self, row: Row) -> None:
        if self._stop is None or self._end is not None:
            return
        values = {name: value for name, value in row.items() if value is not None}
        answer = self._stop(dict.fromkeys(COLUMNS, math.nan) | values)
        if answer:
            reason = answer if isinstance(answer, str) else "stop(row) was true at this log point"
            self._end = EarlyEnd(int(row["env_steps"]), reason, self._total_env_steps)

    def ends_session(self) -> bool:
        """Whether the session is to end, asked while the budget lasts. If so, it writes stopped.json once.

        The file is written before the last checkpoint, without which it does not count, and before the last
        evaluation, during which the session may be stopped or killed.
        """
        if self._end is None:
            return False
        if not self._is_saved and distributed.is_leader():
            write_json(self._file, self._end._asdict())
            self._is_saved = True
        return True
