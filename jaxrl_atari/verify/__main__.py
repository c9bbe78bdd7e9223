"""The command `verify`: recomputes the scores of a run from its seeds and actions, or trains a part of it again.

    python -m jaxrl_atari.verify RUN_DIR [--session all|N] [--from E --to E] [--sample N]
    python -m jaxrl_atari.verify RUN_DIR --retrain E

The first form needs no GPU, no neural network and no random numbers of JAX. It plays the games of the log of
actions again, compares every return and length, and recomputes every row of metrics.csv from them. docs/verify.md
says what this shows and what it cannot show.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxrl_atari import cli
from jaxrl_atari.cli.options import ENV_STEPS, SESSION_NUMBERS, RunDir, WithImports, parse
from jaxrl_atari.config import Limits
from jaxrl_atari.errors import UserError, VerificationFailed, require
from jaxrl_atari.output import say
from jaxrl_atari.process_tuning import tune_process
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.files import try_write_json
from jaxrl_atari.runs.layout import VERIFIED_FILE, checkpoint_env_steps, session_dirs, session_number
from jaxrl_atari.verify.recompute import verify_session


@dataclasses.dataclass(frozen=True)
class Options(WithImports):
    """Recomputes the scores of a run from its seeds and actions alone."""

    run_dir: RunDir
    """Directory of a run."""
    session: Annotated[Literal["all"] | int, SESSION_NUMBERS] = "all"
    """`all` sessions, or the number of one."""
    start: Annotated[int, tyro.conf.arg(name="from"), ENV_STEPS] = 0
    """Play only pieces of games that end after about this env step."""
    end: Annotated[int | None, tyro.conf.arg(name="to"), ENV_STEPS] = None
    """Play only pieces that start before about this env step. None: to the end."""
    sample: Annotated[int | None, Limits(1)] = None
    """Play only this many random pieces of the games. None: all of them."""
    retrain: Annotated[int | None, ENV_STEPS] = None
    """Instead of playing, train from the kept checkpoint at this env step to the next one that was written, on the
    same software, device and threads, and compare all bits. Nothing in the run is changed."""


def _check_sessions(sessions: Sequence[Path], check: Callable[[Path], str]) -> None:
    """Checks every session, and shows the results: sessions that differ hide no others.

    Raises:
        VerificationFailed: a session differs.
        UserError: no session differs, and some cannot be checked.
    """
    problems: dict[str, UserError] = {}
    for path in sessions:
        try:
            say(f"{path.name}  {check(path)}")
        except UserError as error:
            problems[path.name] = error
            if len(sessions) > 1:  # the others may take hours
                say(f"{path.name}  {error}")
    if problems:
        differs = any(isinstance(error, VerificationFailed) for error in problems.values())
        kind = VerificationFailed if differs else UserError
        raise kind("; ".join(f"{name}: {error}" for name, error in problems.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Verifies sessions of a run, or trains a part of them again.

    Raises:
        VerificationFailed: a session differs.
        UserError: a session cannot be verified.
    """
    options = parse(Options, arguments, "verify")
    config = read_config(options.run_dir)  # refuses a directory without a run
    if config.unrecorded_reason:
        raise UserError(f"{options.run_dir}: has no log of actions; {config.unrecorded_reason}")
    sessions = [path for path in session_dirs(options.run_dir) if options.session in ("all", session_number(path))]
    if not sessions:
        wanted = "session" if options.session == "all" else f"session {options.session}"
        raise UserError(f"{options.run_dir}: has no {wanted}")
    if options.retrain is not None:
        _retrain(options, sessions, options.retrain)
        return

    def recompute(session_dir: Path) -> str:
        """Verifies a session. The result is kept in verified.json if all games were played."""
        try:
            found = verify_session(
                config, session_dir, start=options.start, end=options.end, sample=options.sample
            )
        except VerificationFailed:
            with contextlib.suppress(OSError):  # the result of an earlier verification
                (session_dir / VERIFIED_FILE).unlink()
            raise
        problem = ""
        if found.played_all:
            problem = try_write_json(session_dir / VERIFIED_FILE, found.verification()._asdict())
        return f"verified: {found.text}" + (f"; the result is not saved: {problem}" if problem else "")

    _check_sessions(sessions, recompute)


def _retrain(options: Options, sessions: Sequence[Path], env_steps: int) -> None:
    """Trains sessions again from the checkpoint at `env_steps`; see `retrain`.

    Raises:
        VerificationFailed, UserError: as `_check_sessions`; or no session has such a checkpoint.
    """
    for name, given in (("from", options.start), ("to", options.end), ("sample", options.sample)):
        require(not given, f"--{name}", given, "nothing with --retrain, which plays no games of the log")
    kept = {path: checkpoint_env_steps(path) for path in sessions}
    chosen = [path for path, steps in kept.items() if env_steps in steps]
    if not chosen:
        there = "; ".join(f"{path.name}: {', '.join(map(str, steps)) or 'none'}" for path, steps in kept.items())
        raise UserError(f"--retrain {env_steps}: there is no checkpoint at this env step; kept are: {there}")
    for line in tune_process():
        say(line)
    # Here, so that playing games again need not import Flax and orbax.
    from jaxrl_atari.verify.retrain import retrain

    _check_sessions(chosen, lambda path: retrain(path, env_steps))


if __name__ == "__main__":
    cli.run(main)
