"""The sessions of a trial: which are left, the jobs that train them, and `train_session`, which trains one."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.config import Config, LogConfig
from jaxrl_atari.errors import Stopped
from jaxrl_atari.evaluate.policy import load_parameters
from jaxrl_atari.hardware import distributed
from jaxrl_atari.output import say
from jaxrl_atari.runs.arrays import digest_of
from jaxrl_atari.runs.columns import COLUMNS
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import (
    CONFIG_FILE,
    RESUME_FILE,
    STOPPED_FILE,
    session_dirs,
    session_files,
    session_path,
)
from jaxrl_atari.runs.reading import EarlyEnd, is_finished, read_early_end
from jaxrl_atari.runs.run_dir import keep_code
from jaxrl_atari.runs.writers import Row, Writer, WriterGroup
from jaxrl_atari.session import run_session
from jaxrl_atari.trials.launch import Job
from jaxrl_atari.trials.programs import compiled_once

StopFunction = Callable[[Row], object]
"""Called with each log point of a session. The session ends once the result is true; a text is the reason."""


def unfinished_sessions(config: Config, run_dir: Path) -> list[int]:
    """The sessions of a trial that have not trained to their end. The run directory may not exist yet."""
    return [
        session for session in range(config.sessions) if not is_finished(config, session_path(run_dir, session))
    ]


def session_jobs(config: Config, run_dir: Path, label: str = "", first_position: int = 0) -> list[Job]:
    """The jobs of a trial: the command `train --session` for each session that has not trained to its end.

    Args:
        label: stands before the names of the jobs, such as the game of a suite.
        first_position: `Job.position` of session 0; the other sessions follow.
    """
    run_dir = run_dir.absolute()
    return [
        Job(
            name=f"{label}session {session}",
            words=("jaxrl_atari.train", "--resume", str(run_dir), "--session", str(session)),
            folder=session_path(run_dir, session),
            position=first_position + session,
        )
        for session in unfinished_sessions(config, run_dir)
    ]


def with_init_digest(config: Config) -> Config:
    """The config with the digest of the parameters that `init_from` names: later sessions refuse others."""
    if config.init_from is None or config.init_digest is not None:
        return config
    return replace(config, init_digest=digest_of(load_parameters(config.init_from, config.init_checkpoint)))


def begin_run(config: Config, run_dir: Path) -> Config:
    """Writes config.json of a trial that starts. One that is resumed gets it once a session has made an update.

    Returns:
        The config, as `with_init_digest` returns it.
    """
    config = with_init_digest(config)
    if not any(map(session_files, session_dirs(run_dir))):
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json(run_dir / CONFIG_FILE, describe(config))
    return config


@contextlib.contextmanager
def described_for_jobs(config: Config, run_dir: Path) -> Iterator[None]:
    """Context in which the jobs of a trial train: the run directory has the file from which they read how."""
    config = begin_run(config, run_dir)
    file = run_dir / RESUME_FILE
    write_json(file, describe(config, run_dir))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def train_session(
    config: Config,
    run_dir: Path,
    session: int,
    *,
    name: str = "",
    writers: Sequence[Writer] = (),
    stop: StopFunction | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> None:
    """Trains a session of a trial, from its newest checkpoint if it has one.

    If another session is compiling the same programs, it waits for them. After its first update, it writes
    config.json and keeps the user's own code in the run directory.

    Args:
        name: stands before each printed line. Empty: `session 0`, with the session's number.
        writers: receive the log points, with `session` and `seed` in each row.
        stop: called with each log point; the session ends early once the result is true.
        stop_requested: asked besides signals; if true, the session writes its last checkpoint and ends.

    Raises:
        UserError, Stopped: as `run_session`.
        KeyboardInterrupt: a signal before the first update, or Ctrl-C after an earlier signal, has ended the
            session at once. With `devices.distributed`, only the latter does.
    """
    name = name or f"session {session}"
    directory = session_path(run_dir, session)
    rule = StopRule(stop, config, directory)
    # The processes of `devices.distributed` end together, perhaps before their first update.
    request = StopRequest(name, saves=config.devices.distributed)

    with request, compiled_once(config, name) as compiled:

        def after_first_update() -> None:
            request.saves = True
            if distributed.is_leader():
                write_json(run_dir / CONFIG_FILE, describe(config, run_dir))
                for line in keep_code(run_dir):
                    say(f"{name}  {line}")
            compiled()

        run_session(
            config,
            directory,
            session,
            label=name,
            resume=True,
            writers=[WriterGroup([*writers, rule], {"session": session, "seed": config.seed + session})],
            on_first_update=after_first_update,
            stop_requested=lambda: request.requested or stop_requested(),
            ends_early=rule.ends_session,
        )
        # A request that came after the session had asked for the last time.
        if distributed.sum_over_processes(request.requested):
            raise Stopped


# --- Writers -----------------------------------------------------------------------------------------------------


def reached_limit(log: LogConfig, row: Row) -> str:
    """The limit of `log` that a session has reached at a log point, in words; empty if it has reached none."""
    if log.stop_at_return is not None and row["episodes"] >= 100 and row["return_mean"] >= log.stop_at_return:
        return f"return_mean {row['return_mean']:,.2f} has reached log.stop_at_return = {log.stop_at_return:,g}"
    hours = row["wall_seconds"] / 3600
    if log.stop_after_hours is not None and hours >= log.stop_after_hours:
        return f"{hours:.3g} hours of training have reached log.stop_after_hours = {log.stop_after_hours:g}"
    return ""


class StopRule(Writer):
    """Decides at each log point, by the limits of `config.log` and the caller's `stop`, whether to end early.

    In the row that `stop` gets, a column without a value is NaN, so that comparisons with it are false.

    Args:
        stop: the caller's function, if there is one.
        session_dir: directory of the session. If its stopped.json says that the session has met the rule, but was
            interrupted in its last evaluation, the session is to end at once.
    """

    def __init__(self, stop: StopFunction | None, config: Config, session_dir: Path):
        self._stop = stop
        self._log = config.log
        self._file = session_dir / STOPPED_FILE
        self._total_env_steps = config.total_env_steps
        self._end = read_early_end(session_dir, config.total_env_steps)  # None until the session is to end

    def write(self, row: Row) -> None:
        if self._end is not None:
            return
        values = dict.fromkeys(COLUMNS, math.nan) | {k: value for k, value in row.items() if value is not None}
        answer = reached_limit(self._log, values) or (self._stop is not None and self._stop(values))
        if answer:
            reason = answer if isinstance(answer, str) else "stop(row) was true at this log point"
            self._end = EarlyEnd(int(row["env_steps"]), reason, self._total_env_steps)

    def ends_session(self) -> bool:
        """Whether the session is to end, asked while the budget lasts. If so, it writes stopped.json.

        The file is written before the last checkpoint, without which it does not count, and before the last
        evaluation, during which the session may be stopped or killed.
        """
        if self._end is None:
            return False
        if distributed.is_leader():
            write_json(self._file, self._end._asdict())
        return True
