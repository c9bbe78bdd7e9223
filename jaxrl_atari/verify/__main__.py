"""The command `verify`: recomputes the scores of a run from its seeds and actions, or trains a part of it again.

    python -m jaxrl_atari.verify RUN_DIR [--session all|N] [--sample N]
    python -m jaxrl_atari.verify RUN_DIR --retrain E

docs/verify.md says what this shows and what it cannot show.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jaxrl_atari import cli
from jaxrl_atari.cli.options import RunDir, WithImports, parse
from jaxrl_atari.config import Config, NonNegativeInt, PositiveInt
from jaxrl_atari.errors import UserError, VerificationFailed
from jaxrl_atari.hardware.settings import tune_process
from jaxrl_atari.output import say
from jaxrl_atari.runs.description import other_versions, read_config
from jaxrl_atari.runs.layout import VERIFIED_FILE, checkpoint_env_steps, session_dirs, session_number
from jaxrl_atari.runs.reading import require_own_seed
from jaxrl_atari.verify.recompute import verify_session


@dataclasses.dataclass(frozen=True)
class Options(WithImports):
    """Recomputes the scores of a run from its seeds and actions alone."""

    run_dir: RunDir
    """Directory of a run."""
    session: Literal["all"] | NonNegativeInt = "all"
    """`all` sessions, or the number of one."""
    sample: PositiveInt | None = None
    """Play only this many random pieces of the games; a piece starts from one seed. None: all of them."""
    retrain: NonNegativeInt | None = None
    """Instead of playing, train from the checkpoint at this env step to the next one that is kept, on the same
    software, device and threads, and compare all bits. Nothing in the run is changed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Verifies sessions of a run, or trains a part of them again. A session that differs hides no others.

    Raises:
        VerificationFailed: a session differs.
        UserError: no session differs, and some cannot be verified.
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
        sessions = [path for path in sessions if options.retrain in checkpoint_env_steps(path)] or sessions
        say(tune_process())
    problems: dict[str, UserError] = {}
    for path in sessions:
        try:
            say(f"{path.name}  {_check(path, config, options)}")
        except UserError as error:
            problems[path.name] = error
            if len(sessions) > 1:  # the others may take hours
                say(f"{path.name}  {error}")
    if problems:
        differs = any(isinstance(error, VerificationFailed) for error in problems.values())
        kind = VerificationFailed if differs else UserError
        raise kind("; ".join(f"{name}: {error}" for name, error in problems.items()))


def _check(session_dir: Path, config: Config, options: Options) -> str:
    """Verifies a session or trains a part of it again. Returns the result in words, and raises as `main`."""
    require_own_seed(config, session_dir)
    if options.retrain is not None:
        # Here, so that playing games again need not import Flax and orbax.
        from jaxrl_atari.verify.retrain import retrain

        return retrain(session_dir, options.retrain)
    try:
        return verify_session(config, session_dir, options.sample)
    except VerificationFailed as error:
        for package in ("ale-py", "jaxrl_atari"):
            if others := other_versions(session_dir.parent, package):
                cause = f"{package} was {' or '.join(others)} in training"
                raise UserError(
                    f"{error}; that proves nothing, because {cause}: verify it with that version"
                ) from error
        with contextlib.suppress(OSError):  # the result of an earlier verification
            (session_dir / VERIFIED_FILE).unlink()
        raise


if __name__ == "__main__":
    cli.run(main)
