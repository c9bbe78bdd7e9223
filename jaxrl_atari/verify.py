"""Recomputes the scores of a run from its seeds and actions alone.

    python -m jaxrl_atari.verify RUN_DIR [--sessions all|0|1...] [--from E --to E] [--sample N]

needs no network, no GPU and none of JAX's random numbers. It plays the games of the log of actions again, compares
every return and length, and recomputes every row of metrics.csv from them. docs/verify.md says what this shows and what
it cannot show.
"""

import dataclasses
import io
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import tyro

from jaxrl_atari import __version__, cli
from jaxrl_atari.config import Config
from jaxrl_atari.envs import EpisodeCounter, make_pool
from jaxrl_atari.envs.replay import play_again
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.runs.actions import segments
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.progress import EpisodeStatistics
from jaxrl_atari.runs.reading import METRICS_FILE, read_rows
from jaxrl_atari.runs.run_dir import checkpoint_steps, read_config, session_dirs, session_number

VERIFIED_FILE = "verified.json"
SLOTS = 32
"""Games played at once."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Recomputes the scores of a run from its seeds and actions alone."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of a run."""
    sessions: Literal["all"] | int = "all"
    """All sessions, or the number of one."""
    start: Annotated[int, tyro.conf.arg(name="from")] = 0
    """Play only games from this env step on."""
    end: Annotated[int | None, tyro.conf.arg(name="to")] = None
    """Play only games up to this env step. None: to the end."""
    sample: int | None = None
    """Play only so many random pieces of the games, which takes seconds. None: all of them."""


class Differs(UserError):
    """A figure of a run is not what its seeds and actions give."""

    exit_status = 1


class Log(NamedTuple):
    """The log of actions of a session: S steps of B environments."""

    actions: np.ndarray  # uint8 [S, B]
    anchors: np.ndarray  # int64 [k, 3]: step, environment, seed
    games: np.ndarray  # float64 [m, 4]: step, environment, return, length, in this order
    frame_crc: dict[int, np.ndarray]  # step -> uint32 [B], of the frames after so many steps
    ends: list[int]  # of the updates, in steps


def read_log(session_dir: Path) -> Log:
    """Reads the log of actions of a session.

    Raises:
        UserError: there is none, or `env.num_envs` was changed by a resume.
        Differs: a segment is missing or damaged, or has games that cannot be.
    """
    found, reached = segments(session_dir), 0
    parts: list[dict[str, np.ndarray]] = []
    ends: list[int] = []
    if not found:
        raise UserError(f"{session_dir}: has no log of actions; `log.actions` and the back end ale write one")
    for first, last, path in found:
        if first != reached:
            raise Differs(f"{path}: the segment with steps {reached} to {first} before it is missing")
        try:
            with np.load(io.BytesIO(path.read_bytes())) as arrays:
                parts.append(dict(arrays))
            length = int(parts[-1]["rollout_length"])
            ends += range(first + length, last + 1, length)
        except Exception as error:  # a damaged archive raises many types
            raise Differs(f"{path}: damaged ({type(error).__name__}: {error})") from error
        reached = last
    if len({part["actions"].shape[1] for part in parts}) > 1:
        raise UserError(f"{session_dir}: env.num_envs was changed by a resume; `verify` needs one number of them")
    actions, anchors, games = (np.concatenate([part[n] for part in parts]) for n in ("actions", "anchors", "games"))
    started, places = anchors[anchors[:, 0] == 0, 1], games[:, :2]
    if not np.array_equal(np.sort(started), range(actions.shape[1])) or len(actions) != reached:
        raise Differs(f"{session_dir}: the log of actions does not begin with a seed of every environment")
    if not np.all((places >= 0) & (places < actions.shape)) or len(np.unique(places, axis=0)) < len(games):
        raise Differs(f"{session_dir}: the log of actions has games that cannot be")
    return Log(
        actions,
        anchors,
        games[np.lexsort((games[:, 1], games[:, 0]))],
        {last: part["frame_crc"] for (_, last, _), part in zip(found, parts, strict=True)},
        ends,
    )


class Piece(NamedTuple):
    """Steps of an environment from an anchor to the next one."""

    env: int
    start: int
    end: int
    seed: int


def pieces(log: Log) -> list[Piece]:
    """The games of a session, cut at their anchors, the longest pieces first."""
    found = []
    for env in range(log.actions.shape[1]):
        anchors = sorted((step, seed) for step, number, seed in log.anchors.tolist() if number == env)
        ends = [step for step, _ in anchors[1:]] + [len(log.actions)]
        found += [Piece(env, step, end, seed) for (step, seed), end in zip(anchors, ends, strict=True) if end > step]
    return sorted(found, key=lambda piece: piece.start - piece.end)


def play(config: Config, log: Log, batch: list[Piece]) -> None:
    """Plays pieces of a session again, side by side, and compares their games with those of the log.

    Raises:
        Differs: a game has another return or length, or a frame at the end of a segment is another one.
    """
    env, ends = config.env, np.array([piece.end for piece in batch])
    pool = make_pool("ale", env.game_name, len(batch), seed=0, num_threads=env.num_threads, rules=env.rules)
    counter, played = EpisodeCounter(len(batch)), {}
    try:
        actions = [log.actions[piece.start : piece.end, piece.env] for piece in batch]
        for left, step in play_again(pool, np.array([piece.seed for piece in batch]), actions):
            games = {game.env: game for game in counter.count(step)}
            for i, piece in enumerate(batch):
                at = int(ends[i] - left[i])  # steps of the environment so far
                if i in games and at > piece.start:
                    played[at - 1, piece.env] = games[i].episode_return, games[i].length
                # Where a piece ends with an anchor, the frame is that of the next piece.
                shows = at in log.frame_crc and piece.start < at and (at < piece.end or at == len(log.actions))
                if shows and zlib.crc32(step.frame[i].tobytes()) != log.frame_crc[at][piece.env]:
                    raise Differs(f"environment {piece.env}: the actions give another frame after step {at}")
    except (TypeError, ValueError) as error:  # an action or a seed out of range
        raise Differs(f"the actions cannot be played ({reason(error)})") from error
    finally:
        pool.close()
    steps, envs = log.games[:, :2].T
    logged = {
        (int(t), int(number)): (episode_return, int(length))
        for piece in batch
        for t, number, episode_return, length in log.games[
            (envs == piece.env) & (steps >= piece.start) & (steps < piece.end)
        ].tolist()
    }
    for at, number in sorted({*logged, *played}):
        found = logged.get((at, number)), played.get((at, number))
        if found[0] != found[1]:
            texts = ["no end of a game" if not f else f"a game of {f[1]} env steps with return {f[0]:g}" for f in found]
            raise Differs(f"environment {number}, step {at}: the log has {texts[0]}, the actions give {texts[1]}")


def check_rows(session_dir: Path, log: Log) -> tuple[int, int, int]:
    """Recomputes the rows of metrics.csv from the games of the log.

    Returns:
        The rows recomputed, all rows, and the env steps at the end of the log. Later rows are beyond it.

    Raises:
        Differs: a row has another number of env steps or games, or another `return_mean`, `return_ma` or length; the
            log ends before the newest checkpoint.
    """
    rows = {int(row["env_steps"]): row for row in read_rows(session_dir / METRICS_FILE)}
    statistics, left, games, start, env_steps = EpisodeStatistics(), dict(rows), log.games, 0, 0
    anchors = {(step, env) for step, env, _ in log.anchors.tolist()}
    # The step after the end of a game is an auto-reset step, which does not count; where a resume started new games
    # just then, there is none.
    resets = np.array([t + 1 for t, env in games[:, :2].tolist() if (t + 1, env) not in anchors])
    for end in log.ends:
        ended = games[(games[:, 0] >= start) & (games[:, 0] < end)]
        env_steps += (end - start) * log.actions.shape[1] - int(((resets >= start) & (resets < end)).sum())
        start = end
        statistics.count([(int(t), int(e), r, int(n)) for t, e, r, n in ended.tolist()], env_steps)
        if (row := left.pop(env_steps, None)) is not None:
            for name, value in statistics.to_row().items():
                text = "" if np.isnan(value) else f"{value:.9g}"
                if row[name] != text:
                    raise Differs(
                        f"{session_dir}, {env_steps:,} env steps: {name} is {row[name]}, the games give {text}"
                    )
    if beyond := [steps for steps in left if steps <= env_steps]:
        raise Differs(f"{session_dir}: metrics.csv has a row at {beyond[0]:,} env steps, where no update ended")
    if env_steps < (newest := max(checkpoint_steps(session_dir), default=0)):
        raise Differs(
            f"{session_dir}: the log of actions ends at {env_steps:,} env steps, the checkpoints at {newest:,}"
        )
    return len(rows) - len(left), len(rows), env_steps


def verify_session(config: Config, session_dir: Path, options: Options) -> str:
    """Verifies a session, writes verified.json if all was played, and returns a line on the result."""
    log = read_log(session_dir)
    rows, all_rows, env_steps = check_rows(session_dir, log)
    envs, found = log.actions.shape[1], pieces(log)
    last = len(log.actions) if options.end is None else options.end // envs
    chosen = [piece for piece in found if piece.end > options.start // envs and piece.start < last]
    if options.sample is not None:
        picked = np.random.default_rng().choice(len(chosen), min(options.sample, len(chosen)), replace=False)
        chosen = [chosen[i] for i in picked]
    live = sys.stdout.isatty()
    for first in range(0, len(chosen), SLOTS):
        play(config, log, chosen[first : first + SLOTS])
        text = f"{session_dir.name}  {min(first + SLOTS, len(chosen))} of {len(chosen)} pieces played"
        cli.write(f"{cli.CLEAR_LINE}{text}" if live else f"{text}\n")
    games = f"{len(log.games):,} games"
    if len(chosen) == len(found):
        values = {"date": time.strftime("%Y-%m-%d"), "version": __version__, "rows": rows, "games": len(log.games)}
        write_json(session_dir / VERIFIED_FILE, values | {"env_steps": env_steps})
    else:
        games = f"{len(chosen)} of {len(found)} pieces of {games}"
    return f"{cli.CLEAR_LINE * live}{session_dir.name}  verified: {rows:,} of {all_rows:,} rows and {games} are equal"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = tyro.cli(Options, args=arguments, prog="python -m jaxrl_atari.verify")
    config = read_config(options.run_dir)
    chosen = [path for path in session_dirs(options.run_dir) if options.sessions in ("all", session_number(path))]
    if not chosen:
        raise UserError(f"{options.run_dir}: has no session {options.sessions}")
    for session_dir in chosen:
        try:
            cli.say(verify_session(config, session_dir, options))
        except Differs:
            (session_dir / VERIFIED_FILE).unlink(missing_ok=True)
            raise


if __name__ == "__main__":
    cli.run(main)
