"""Verification of a session: its rows are recomputed from the log of actions, and its games are played again.

At an anchor, an environment began a game from a new seed (`envs/record.py`). The steps from one anchor to the next
are a piece. Each piece can be played without the others, so many are played side by side, and a part is enough.
"""

import dataclasses
import itertools
import random
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl_atari import __version__
from jaxrl_atari.config import Config
from jaxrl_atari.envs import EpisodeCounter, env_seeds, first_game_seed, make_pool
from jaxrl_atari.envs.pool import FinishedGame
from jaxrl_atari.envs.replay import play_again
from jaxrl_atari.errors import MetricsError, VerificationFailed, os_reason
from jaxrl_atari.output import counted, tracked
from jaxrl_atari.runs.actions import ActionLog, read_actions
from jaxrl_atari.runs.description import field_values
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import METRICS_FILE, VERIFIED_FILE, latest_env_steps, session_number
from jaxrl_atari.runs.progress import EpisodeStatistics, return_ma_window
from jaxrl_atari.runs.reading import latest_meta
from jaxrl_atari.runs.tables import read_table


def verify_session(config: Config, session_dir: Path, sample: int | None) -> str:
    """Recomputes all rows of a session, and plays its games again. Writes verified.json if it plays all of them.

    Args:
        sample: plays only this many random pieces of the games; None: all of them.

    Returns:
        The result in words.

    Raises:
        VerificationFailed: as `read_actions`, `check_start`, `check_rows` and `check_games`; the log ends before
            the newest checkpoint.
        UserError: as `read_actions`.
    """
    # Before the log and the rows are read: a session that trains may add to all of them.
    saved = latest_env_steps(session_dir)
    logged = latest_meta(session_dir).get("logged_env_steps", 0)
    log = read_actions(session_dir)
    check_start(config.seed + session_number(session_dir), log)
    all_pieces = pieces(log)
    chosen = all_pieces
    if sample is not None:
        # Without a seed, so that nobody can know beforehand which pieces will be played.
        chosen = random.sample(all_pieces, min(sample, len(all_pieces)))
    plays_all = len(chosen) == len(all_pieces)
    budgets = field_values(session_dir.parent, "total_env_steps")
    expected = expected_rows(log, [return_ma_window(budget) for budget in dict.fromkeys(budgets)])
    env_steps = max(expected, default=0)
    rows, all_rows = check_rows(session_dir, expected, logged)
    if env_steps < saved:
        raise VerificationFailed(
            f"the log of actions ends at {env_steps:,} env steps, before the checkpoints: its end"
            " was removed, or `log.actions` was off then"
        )
    games = check_games(config, session_dir.name, log, chosen)
    if plays_all and games < len(log.games):
        raise VerificationFailed(f"the log of actions has {len(log.games)} games, the actions give {games}")
    text = f"verified: {rows:,} of {all_rows:,} rows and {counted(games, 'game')}"
    if not plays_all:
        return f"{text} in {len(chosen)} of {len(all_pieces)} pieces are equal"
    verification = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "version": __version__,
        "rows": rows,
        "games": games,
        "env_steps": env_steps,
    }
    try:
        write_json(session_dir / VERIFIED_FILE, verification)
    except OSError as error:
        return f"{text} are equal; the result is not saved: {os_reason(error)}"
    return f"{text} are equal"


def check_start(seed: int, log: ActionLog) -> None:
    """Compares the seeds with which the environments start with those that follow from the seed of the session.

    Raises:
        VerificationFailed: they differ: the log is that of another session, or lacks an environment.
    """
    expected = env_seeds(first_game_seed(seed, updates=0), log.actions.shape[1])
    found = {env: start for step, env, start in log.anchors.tolist() if step == 0}
    if found != dict(enumerate(expected)):
        raise VerificationFailed(f"the games of the log do not start as those of a session with seed {seed}")


def expected_rows(log: ActionLog, windows: Iterable[int]) -> dict[int, list[dict[str, float]]]:
    """Env steps at the end of each update -> the columns of metrics.csv that the games of a log give.

    Args:
        windows: those of `return_ma` under the budgets that the run has had; an update has a row for each.
    """
    # The step after the end of a game is an auto-reset step, which does not count. There is none where a resume
    # started new games just then.
    anchors = set(map(tuple, log.anchors[:, :2].tolist()))
    resets = np.array([step + 1 for step, env, *_ in log.games.tolist() if (step + 1, env) not in anchors])
    ends = np.array(log.ends, np.int64)
    env_steps = ends * log.actions.shape[1] - np.searchsorted(resets, ends)
    games_before = np.searchsorted(log.games[:, 0], ends).tolist()  # both are sorted by steps
    statistics = EpisodeStatistics()
    rows: dict[int, list[dict[str, float]]] = {}
    for reached, (first, last) in zip(env_steps.tolist(), itertools.pairwise([0, *games_before]), strict=True):
        games = [
            FinishedGame(int(step), int(env), episode_return, int(length))
            for step, env, episode_return, length in log.games[first:last].tolist()
        ]
        statistics.count(games, reached)
        rows[reached] = []
        for window in windows:
            statistics.window = window
            rows[reached].append(statistics.to_row())
    return rows


def check_rows(
    session_dir: Path, expected: dict[int, list[dict[str, float]]], logged_env_steps: int
) -> tuple[int, int]:
    """Compares the rows of metrics.csv with those that the games of the log give.

    A column that the file lacks is not checked.

    Args:
        expected: what `expected_rows` returned.
        logged_env_steps: env steps of the last row that the file had at the newest checkpoint; 0 if it had none.

    Returns:
        The rows compared, and all rows. Later rows are beyond the end of the log.

    Raises:
        VerificationFailed: a row has another number of env steps or games, or another `return_mean`, `return_ma`
            or length; a line is not understood; the file ends before `logged_env_steps`.
    """
    env_steps = max(expected, default=0)
    path = session_dir / METRICS_FILE
    try:
        rows = read_table(path)
    except MetricsError as error:
        raise VerificationFailed(str(error)) from error
    last_row = max((float(row["env_steps"]) for row in rows), default=0)
    if last_row < logged_env_steps:
        raise VerificationFailed(
            f"{path}: ends at {last_row:,.0f} env steps, and had rows up to {logged_env_steps:,} at the newest"
            " checkpoint; restore it from a copy"
        )
    covered = [row for row in rows if float(row["env_steps"]) <= env_steps]
    for row in covered:
        at = f"{row['env_steps']} env steps"
        if float(row["env_steps"]) not in expected:
            raise VerificationFailed(f"{at}: metrics.csv has a row where no update ended")
        differences = [_difference(row, games) for games in expected[int(float(row["env_steps"]))]]
        if all(differences):
            raise VerificationFailed(f"{at}: {differences[-1]}")
    return len(covered), len(rows)


def _difference(row: Mapping[str, str], games: Mapping[str, float]) -> str:
    """The first difference of a row of metrics.csv from what the games give; empty if there is none."""
    for name, value in games.items():
        text = "" if np.isnan(value) else f"{value:.9g}"
        if row.get(name, text) != text:
            return f"{name} is {row[name]}, the games give {text}"
    return ""


# --- The games, played again -------------------------------------------------------------------------------------

PIECES_AT_ONCE = 32
"""Emulators that play side by side, each a piece of a session's games."""


class Piece(NamedTuple):
    """Steps of an environment from an anchor to the next one."""

    env: int
    start: int
    end: int
    seed: int


def pieces(log: ActionLog) -> list[Piece]:
    """The games of a session, cut at their anchors, the longest pieces first."""
    anchors = sorted((env, step, seed) for step, env, seed in log.anchors.tolist())
    result = []
    for (env, step, seed), (next_env, next_step, _) in itertools.pairwise([*anchors, (-1, 0, 0)]):
        end = next_step if next_env == env else len(log.actions)
        if end > step:
            result.append(Piece(env, step, end, seed))
    return sorted(result, key=lambda piece: piece.start - piece.end)


def check_games(config: Config, name: str, log: ActionLog, chosen: list[Piece]) -> int:
    """Plays pieces of a session again, `PIECES_AT_ONCE` side by side, and compares their games with the log.

    Args:
        name: of the session, for the progress that is shown.
        chosen: some of the `pieces` of the log.

    Returns:
        The number of games that ended in the pieces.

    Raises:
        VerificationFailed: a game has another return or length; or as `replayed_games`.
    """
    games = 0
    steps, envs = log.games[:, :2].T
    batches = [chosen[first : first + PIECES_AT_ONCE] for first in range(0, len(chosen), PIECES_AT_ONCE)]
    for batch in tracked(batches, f"{name}  batches played", len(batches)):
        inside = [(envs == piece.env) & (piece.start <= steps) & (steps < piece.end) for piece in batch]
        logged = {*map(tuple, log.games[np.any(inside, axis=0)].tolist())}
        played = replayed_games(config, log, batch)
        if different := logged ^ played:
            first = min(different)
            side = "the log" if first in logged else "the replay"
            at, env, episode_return, length = first
            raise VerificationFailed(
                f"{side} alone has a game that ends at step {at:.0f} of environment {env:.0f} with return"
                f" {episode_return:g} after {length:.0f} env steps"
            )
        games += len(played)
    return games


def replayed_games(config: Config, log: ActionLog, batch: list[Piece]) -> set[tuple[float, ...]]:
    """The games that end when these pieces are played again, side by side: step, environment, return, length.

    Raises:
        VerificationFailed: a frame at the end of a segment differs from the log, or the game has no such action.
    """
    played: set[tuple[float, ...]] = set()
    # `env.num_threads` was the session's share of the cores in training. Here, all usable cores play (0).
    pool = make_pool(dataclasses.replace(config.env, num_threads=0), len(batch), seed=0)
    counter = EpisodeCounter(len(batch))
    try:
        if log.actions.max() >= pool.num_actions:
            raise VerificationFailed(f"the actions cannot be played: the game has no action {log.actions.max()}")
        actions = [log.actions[piece.start : piece.end, piece.env] for piece in batch]
        seeds = np.array([piece.seed for piece in batch])
        for remaining, step in play_again(pool, pool.reset(), seeds, actions):
            reached = [piece.end - remaining for piece in batch]
            for game in counter.count(step):
                piece = batch[game.env]
                at = reached[game.env]
                if at > piece.start:  # otherwise the game was played before the piece began
                    played.add((at - 1, piece.env, game.episode_return, game.length))
            for piece, at, frame in zip(batch, reached, step.frame, strict=True):
                # Where a piece ends with an anchor, the frame belongs to the next piece.
                shows = at in log.frame_crc and piece.start < at and (at < piece.end or at == len(log.actions))
                if shows and zlib.crc32(frame.tobytes()) != log.frame_crc[at][piece.env]:
                    raise VerificationFailed(
                        f"environment {piece.env}: the frame after step {at} differs from that of the log"
                    )
    finally:
        pool.close()
    return played
