"""Verification of a session: its rows are recomputed, and its games are played again."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxrl_atari import __version__
from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError, VerificationFailed
from jaxrl_atari.output import counted
from jaxrl_atari.runs.actions import read_actions
from jaxrl_atari.runs.description import field_values, other_versions
from jaxrl_atari.runs.layout import latest_env_steps
from jaxrl_atari.runs.progress import return_ma_window
from jaxrl_atari.runs.reading import Verification, logged_env_steps
from jaxrl_atari.verify.games import check_games, choose_pieces, pieces
from jaxrl_atari.verify.rows import check_rows, expected_rows


class Recomputed(NamedTuple):
    """The part of a session that was recomputed, and is equal."""

    rows: int  # of metrics.csv
    all_rows: int
    pieces: int  # of games
    all_pieces: int
    games: int  # that ended in these pieces
    env_steps: int  # of the log of actions

    @property
    def played_all(self) -> bool:
        """Whether all games were played."""
        return self.pieces == self.all_pieces

    @property
    def text(self) -> str:
        """The result in a line."""
        games = counted(self.games, "game")
        if not self.played_all or not self.games:
            games = f"{self.pieces} of {self.all_pieces} pieces of games, in which {games} ended,"
        return f"{self.rows:,} of {self.all_rows:,} rows and {games} are equal"

    def verification(self) -> Verification:
        """The content of verified.json, with the date of today."""
        today = time.strftime("%Y-%m-%d", time.gmtime())
        return Verification(
            date=today, version=__version__, rows=self.rows, games=self.games, env_steps=self.env_steps
        )


def verify_session(
    config: Config, session_dir: Path, *, start: int, end: int | None, sample: int | None
) -> Recomputed:
    """Recomputes all rows of a session, and plays its games again.

    Args:
        start, end, sample: which pieces of the games are played; see `choose_pieces`.

    Raises:
        VerificationFailed: as `read_actions`, `check_rows` and `check_games`; the log ends before the newest
            checkpoint.
        UserError: as `read_actions` and `choose_pieces`; or the session differs, and other software trained it,
            which may explain the difference (`_excused_by`).
    """
    # Before the log and the rows are read: a session that trains may add to all of them.
    saved = latest_env_steps(session_dir)
    logged = logged_env_steps(session_dir)
    log = read_actions(session_dir)
    all_pieces = pieces(log)
    chosen = choose_pieces(all_pieces, log, start=start, end=end, sample=sample)
    run_dir = session_dir.parent
    budgets = field_values(run_dir, "total_env_steps")
    expected = expected_rows(log, [return_ma_window(budget) for budget in dict.fromkeys(budgets)])
    env_steps = max(expected, default=0)
    with _excused_by(run_dir, "jaxrl_atari"):  # the rows follow from the log without an emulator
        rows, all_rows = check_rows(session_dir, expected, logged)
    if env_steps < saved:
        raise VerificationFailed(
            f"{session_dir}: the log of actions ends at {env_steps:,} env steps, before the checkpoints: its end"
            " was removed, or `log.actions` was off then"
        )
    with _excused_by(run_dir, "ale-py", "jaxrl_atari"):
        games = check_games(config, session_dir, log, chosen)
        if len(chosen) == len(all_pieces) and games < len(log.games):
            raise VerificationFailed(
                f"{session_dir}: the log of actions has {len(log.games)} games, the actions give {games}"
            )
    return Recomputed(
        rows=rows,
        all_rows=all_rows,
        pieces=len(chosen),
        all_pieces=len(all_pieces),
        games=games,
        env_steps=env_steps,
    )


@contextlib.contextmanager
def _excused_by(run_dir: Path, *packages: str) -> Iterator[None]:
    """Context for comparisons whose result depends on these packages.

    Raises:
        UserError: in place of `VerificationFailed`, if one of them had another version in training.
    """
    try:
        yield
    except VerificationFailed as error:
        versions = {package: other_versions(run_dir, package) for package in packages}
        other = [
            f"{package} was {' or '.join(others)} in training" for package, others in versions.items() if others
        ]
        if not other:
            raise
        raise UserError(
            f"{error}; that proves nothing, because {', and '.join(other)}: verify it with the versions of the"
            " training"
        ) from error
