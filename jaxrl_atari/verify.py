"""The command `verify`: recomputes the scores of a run from its seeds and actions, or trains a part of it again.

    python -m jaxrl_atari.verify RUN_DIR [--sessions all|0|1...] [--from E --to E] [--sample N]
    python -m jaxrl_atari.verify RUN_DIR --retrain E      see `retrain.py`

The first form needs no GPU, no neural network and no random numbers of JAX. It plays the games of the log of
actions again, compares every return and length, and recomputes every row of metrics.csv from them. docs/verify.md
says what this shows and what it cannot show.
"""

import contextlib
import dataclasses
import itertools
import random
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from jaxrl_atari import __version__, cli
from jaxrl_atari.checks import Limits
from jaxrl_atari.cli.options import parse
from jaxrl_atari.config import Config
from jaxrl_atari.envs import EpisodeCounter, make_pool
from jaxrl_atari.envs.replay import play_again
from jaxrl_atari.errors import UserError, VerificationFailed, reason, require
from jaxrl_atari.hardware.tuning import tune_process
from jaxrl_atari.imports import WithImports, import_named
from jaxrl_atari.output import counted, say, tracked
from jaxrl_atari.runs.actions import ActionLog, games_of_rows, missing_actions, read_actions
from jaxrl_atari.runs.description import other_versions, read_config
from jaxrl_atari.runs.files import try_write_json
from jaxrl_atari.runs.layout import (
    METRICS_FILE,
    VERIFIED_FILE,
    checkpoint_env_steps,
    latest_env_steps,
    session_dirs,
    session_number,
)
from jaxrl_atari.runs.progress import EpisodeStatistics
from jaxrl_atari.runs.reading import logged_env_steps
from jaxrl_atari.runs.tables import cell_number, not_understood, read_table

PIECES_AT_ONCE = 32
"""Emulators that play side by side, each a piece of a session's games."""

GAME_TEXT = "a game that ends at step {:.0f} of environment {:.0f} with return {:g} after {:.0f} env steps"
"""A game in an error: step and environment of its end, return, length."""


@dataclasses.dataclass(frozen=True)
class Options(WithImports):
    """Recomputes the scores of a run from its seeds and actions alone."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of a run."""
    sessions: Annotated[Literal["all"] | int, Limits(0, 10_000)] = "all"
    """All sessions, or the number of one."""
    start: Annotated[int, tyro.conf.arg(name="from"), Limits(0, 10**12)] = 0
    """Play only pieces of games that end after about this env step."""
    end: Annotated[int | None, tyro.conf.arg(name="to"), Limits(0, 10**12)] = None
    """Play only pieces that start before about this env step. None: to the end."""
    sample: Annotated[int | None, Limits(1)] = None
    """Play only this many random pieces of the games. None: all of them."""
    retrain: Annotated[int | None, Limits(0, 10**12)] = None
    """Instead of playing, train from the kept checkpoint at this env step to the next one that was written, on the
    same software, device and threads, and compare all bits. Nothing in the run is changed."""


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


def play(config: Config, log: ActionLog, batch: list[Piece]) -> int:
    """Plays pieces of a session again, side by side, and compares their games with those of the log.

    Returns:
        The number of games that ended in the pieces.

    Raises:
        VerificationFailed: a game has another return or length, or a frame at the end of a segment is another one.
    """
    played = replayed_games(config, log, batch)
    logged = logged_games(log, batch)
    different = logged ^ played
    if different:
        first = min(different)
        side = "the log" if first in logged else "the replay"
        raise VerificationFailed(f"{side} alone has {GAME_TEXT.format(*first)}")
    return len(played)


def logged_games(log: ActionLog, batch: list[Piece]) -> set[tuple[float, ...]]:
    """The games of the log that ended in these pieces: step, environment, return, length."""
    steps, envs = log.games[:, :2].T
    here = np.any([(envs == piece.env) & (piece.start <= steps) & (steps < piece.end) for piece in batch], axis=0)
    return {*map(tuple, log.games[here].tolist())}


def replayed_games(config: Config, log: ActionLog, batch: list[Piece]) -> set[tuple[float, ...]]:
    """The games that end when these pieces are played again, side by side: step, environment, return, length.

    Raises:
        VerificationFailed: a frame at the end of a segment is not that of the log, or an action is out of range.
    """
    env = config.env
    played: set[tuple[float, ...]] = set()
    pool = make_pool("ale", env.game_name, len(batch), seed=0, num_threads=env.num_threads, rules=env.rules)
    counter = EpisodeCounter(len(batch))
    try:
        actions = [log.actions[piece.start : piece.end, piece.env] for piece in batch]
        for remaining, _, step in play_again(pool, np.array([piece.seed for piece in batch]), actions):
            reached = [piece.end - remaining for piece in batch]
            for game in counter.count(step):
                piece = batch[game.env]
                at = reached[game.env]
                if at > piece.start:  # otherwise the game was played before the piece began
                    played.add((at - 1, piece.env, game.episode_return, game.length))
            for piece, at, frame in zip(batch, reached, step.frame, strict=True):
                # Where a piece ends with an anchor, the frame is that of the next piece.
                shows = at in log.frame_crc and piece.start < at and (at < piece.end or at == len(log.actions))
                if shows and zlib.crc32(frame.tobytes()) != log.frame_crc[at][piece.env]:
                    raise VerificationFailed(
                        f"environment {piece.env}: the actions give another frame after step {at}"
                    )
    except ValueError as error:  # an action or a seed out of range
        raise VerificationFailed(f"the actions cannot be played ({reason(error)})") from error
    finally:
        pool.close()
    return played


def expected_rows(log: ActionLog) -> dict[int, dict[str, float]]:
    """Env steps at the end of each update -> the columns of metrics.csv that the games of a log give."""
    # The step after the end of a game is an auto-reset step, which does not count. There is none where a resume
    # started new games just then.
    anchors = set(map(tuple, log.anchors[:, :2].tolist()))
    resets = np.array([step + 1 for step, env, *_ in log.games.tolist() if (step + 1, env) not in anchors])
    ends = np.array(log.ends, np.int64)
    env_steps = ends * log.actions.shape[1] - np.searchsorted(resets, ends)
    games_before = np.searchsorted(log.games[:, 0], ends).tolist()  # both are sorted by steps
    statistics = EpisodeStatistics()
    rows = {}
    for reached, (first, last) in zip(env_steps.tolist(), itertools.pairwise([0, *games_before]), strict=True):
        statistics.count(games_of_rows(log.games[first:last]), reached)
        rows[reached] = statistics.to_row()
    return rows


def check_rows(session_dir: Path, expected: dict[int, dict[str, float]], logged: int) -> tuple[int, int]:
    """Compares the rows of metrics.csv with those that the games of the log give.

    A column that the file lacks is not checked.

    Args:
        expected: what `expected_rows` returned.
        logged: env steps of the last row that the file had at the newest checkpoint; 0 if it had none.

    Returns:
        The rows compared, and all rows. Later rows are beyond the end of the log.

    Raises:
        VerificationFailed: a row has another number of env steps or games, or another `return_mean`, `return_ma`
            or length; a line is not understood; the file ends before `logged`.
    """
    env_steps = max(expected, default=0)
    path = session_dir / METRICS_FILE
    table = read_table(path)
    rows = table.rows
    # The last line may be one that the session is writing: it is left out here, and counts as missing below.
    if lost := table._replace(unfinished="").lost_before(env_steps):
        raise VerificationFailed(f"{path}: {not_understood(lost)}; restore it from a copy")
    last_row = max((float(row["env_steps"]) for row in rows), default=0)
    if last_row < logged:
        raise VerificationFailed(
            f"{path}: ends at {last_row:,.0f} env steps, and had rows up to {logged:,} at the newest"
            " checkpoint; restore it from a copy"
        )
    covered = [row for row in rows if float(row["env_steps"]) <= env_steps]
    for row in covered:
        at = f"{session_dir}, {row['env_steps']} env steps"
        if float(row["env_steps"]) not in expected:
            raise VerificationFailed(f"{at}: metrics.csv has a row where no update ended")
        for name, value in expected[int(float(row["env_steps"]))].items():
            text = "" if np.isnan(value) else f"{value:.9g}"
            recorded = row.get(name, text)
            if recorded != text and f"{cell_number(recorded):.9g}" != text:  # a spreadsheet writes 2.0 as 2
                raise VerificationFailed(f"{at}: {name} is {recorded}, the games give {text}")
    return len(covered), len(rows)


def choose_pieces(log: ActionLog, options: Options) -> list[Piece]:
    """The pieces of a session's games that the options select; with `sample`, a random choice of them.

    Raises:
        UserError: they select none.
    """
    envs = log.actions.shape[1]
    last = len(log.actions) if options.end is None else options.end // envs
    chosen = [piece for piece in pieces(log) if piece.end > options.start // envs and piece.start < last]
    if not chosen:
        given = f"--from {options.start}" if options.end is None else f"--from {options.start} --to {options.end}"
        raise UserError(
            f"{given}: no piece of a game lies there; the log has {len(log.actions) * envs:,} env steps"
        )
    if options.sample is not None:
        chosen = random.sample(chosen, min(options.sample, len(chosen)))
    return chosen


def play_all(config: Config, session_dir: Path, log: ActionLog, chosen: list[Piece]) -> int:
    """Plays pieces of a session again, `PIECES_AT_ONCE` at a time.

    Returns:
        The number of games that ended in the pieces.

    Raises:
        VerificationFailed: as `play`.
    """
    batches = [chosen[first : first + PIECES_AT_ONCE] for first in range(0, len(chosen), PIECES_AT_ONCE)]
    try:
        with contextlib.closing(tracked(batches, f"{session_dir.name}  playing")) as shown:
            return sum(play(config, log, batch) for batch in shown)
    except VerificationFailed as error:
        raise VerificationFailed(f"{session_dir}: {error}") from error


def verify_session(config: Config, session_dir: Path, options: Options) -> tuple[str, dict[str, Any]]:
    """Verifies a session.

    Returns:
        A line on the result, and the content of verified.json, which is empty unless all was played.

    Raises:
        VerificationFailed: as `read_actions`, `check_rows` and `play`; the log ends before the newest checkpoint.
        UserError: as `read_actions` and `choose_pieces`; or the session differs, and other software trained it,
            which may explain it.
    """
    # Before the log and the rows are read: a session that trains may add to all of them.
    saved = latest_env_steps(session_dir)
    logged = logged_env_steps(session_dir)
    log = read_actions(session_dir)
    expected = expected_rows(log)
    env_steps = max(expected, default=0)
    chosen = choose_pieces(log, options)
    all_pieces = len(pieces(log))
    is_whole = len(chosen) == all_pieces
    try:
        rows, all_rows = check_rows(session_dir, expected, logged)
        if env_steps < saved:
            raise missing_actions(
                session_dir,
                f"{session_dir}: the log of actions ends at {env_steps:,} env steps, before the checkpoints",
            )
        played = play_all(config, session_dir, log, chosen)
        if is_whole and played < len(log.games):
            raise VerificationFailed(
                f"{session_dir}: the log of actions has {len(log.games)} games, the actions give {played}"
            )
    except VerificationFailed as error:
        other = other_software(options.run_dir)
        if not other:
            raise
        raise UserError(f"{error}; that proves nothing, because {other}: verify it with the same") from error
    games = counted(played, "game")
    if not is_whole or not played:
        games = f"{len(chosen)} of {all_pieces} pieces of games, in which {games} ended,"
    line = f"{session_dir.name}  verified: {rows:,} of {all_rows:,} rows and {games} are equal"
    if not is_whole:
        return line, {}
    values = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "version": __version__,
        "rows": rows,
        "games": played,
        "env_steps": env_steps,
    }
    return line, values


def other_software(run_dir: Path) -> str:
    """The packages that decide what actions give, and had other versions in training; empty if there are none."""
    versions = {package: other_versions(run_dir, package) for package in ("ale-py", "jaxrl_atari")}
    return ", and ".join(
        f"{package} was {' or '.join(each)} in training" for package, each in versions.items() if each
    )


def verify_sessions(config: Config, options: Options) -> None:
    """Verifies one session or all, and shows the results. One of which all was played is kept in verified.json.

    Raises:
        VerificationFailed: sessions differ. All others have been verified before, if they can be.
        UserError: no session differs, and some cannot be verified (`verify_session`); the run has no such session.
    """
    if config.unrecorded_reason:
        raise UserError(f"{options.run_dir}: has no log of actions; {config.unrecorded_reason}")
    chosen = [path for path in session_dirs(options.run_dir) if options.sessions in ("all", session_number(path))]
    if not chosen:
        raise UserError(f"{options.run_dir}: has no session {options.sessions}")
    problems: list[UserError] = []
    for session_dir in chosen:
        try:
            line, result = verify_session(config, session_dir, options)
        except UserError as error:
            differs = isinstance(error, VerificationFailed)
            problems.append(error)
            if len(chosen) > 1:  # the others may take hours
                say(f"{session_dir.name}  {'differs' if differs else 'is not verified'}: {error}")
            if differs:
                remove_result(session_dir / VERIFIED_FILE)
            continue
        say(line)
        if result:
            problem = try_write_json(session_dir / VERIFIED_FILE, result)
            if problem:
                say(f"{session_dir.name}  the result is not saved: {problem}")
    raise_problems(problems)


def raise_problems(problems: Sequence[UserError]) -> None:
    """Raises the errors of all sessions, if any, as one: `VerificationFailed` if one of them is."""
    if not problems:
        return
    differs = any(isinstance(error, VerificationFailed) for error in problems)
    kind = VerificationFailed if differs else UserError
    raise kind("; ".join(map(str, problems)))


def remove_result(verified: Path) -> None:
    """Removes the result of an earlier verification, or says why that is not possible."""
    try:
        verified.unlink(missing_ok=True)
    except OSError as error:
        say(f"{verified}: cannot be removed ({error.strerror}); it is of an earlier verification")


def retrain_sessions(options: Options, checkpoint: int) -> None:
    """Trains one session, or all, again from the checkpoint at `checkpoint` env steps; see `retrain`.

    Raises:
        VerificationFailed: sessions differ. All others have been trained again before, if they can be.
        UserError: no session differs, and some cannot be trained again; no session has such a checkpoint.
    """
    for name, given in (("from", options.start), ("to", options.end), ("sample", options.sample)):
        require(not given, f"--{name}", given, "nothing with --retrain, which plays no games of the log")
    found = session_dirs(options.run_dir)
    if options.sessions == "all":
        chosen = [path for path in found if checkpoint in checkpoint_env_steps(path)]
    else:
        chosen = [path for path in found if options.sessions == session_number(path)]
    if not chosen:
        kept = {path.name: checkpoint_env_steps(path) for path in found}
        raise UserError(f"--retrain {checkpoint}: no session has a checkpoint there; there are: {kept}")
    for line in tune_process():
        say(line)
    from jaxrl_atari.retrain import retrain  # here, so that playing games again need not import Flax and orbax

    problems: list[UserError] = []
    for session_dir in chosen:
        try:
            say(retrain(session_dir, checkpoint))
        except UserError as error:
            problems.append(error)
            if len(chosen) > 1:  # the others may take hours
                say(str(error))
    raise_problems(problems)


def main(arguments: Sequence[str] | None = None) -> None:
    """Verifies sessions of a run, or trains a part of them again.

    Raises:
        VerificationFailed: a session differs.
        UserError: a session cannot be verified.
    """
    options = parse(Options, arguments, "verify")
    import_named(options.imports)
    config = read_config(options.run_dir)
    if options.retrain is not None:
        retrain_sessions(options, options.retrain)
    else:
        verify_sessions(config, options)


if __name__ == "__main__":
    cli.run(main)
