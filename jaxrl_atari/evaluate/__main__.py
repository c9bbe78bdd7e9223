"""Plays full games with a checkpoint, on any device, and reports their raw scores.

    python -m jaxrl_atari.evaluate RUN_DIR [--checkpoint best|latest|STEP] [--episodes N] [--greedy] [--video]
    python -m jaxrl_atari.evaluate RUN_DIR --sessions all --checkpoint latest

The first form plays the best checkpoint of the best session, which is an optimistic pick. The second form plays every
session and reports the mean over sessions with its interval: the figure to quote.

From Python: `load_policy` and `run_evaluation` of `jaxrl_atari`.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import tyro

from jaxrl_atari import cli
from jaxrl_atari.cli import counted
from jaxrl_atari.config import DevicesConfig, EnvConfig, parse_word
from jaxrl_atari.devices import pick_device
from jaxrl_atari.envs import Episode
from jaxrl_atari.envs.games import comparable
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.play import EvaluationResult, run_evaluation
from jaxrl_atari.evaluate.policy import Policy, find_session, load_policy
from jaxrl_atari.evaluate.video import record_video
from jaxrl_atari.hardware import runtime
from jaxrl_atari.hardware.jax_gpus import limit_jax
from jaxrl_atari.hardware.memory_share import do_not_preallocate
from jaxrl_atari.report.pages import REPORT_FILE, try_report
from jaxrl_atari.report.statistics import score_interval
from jaxrl_atari.report.summary import counted_sessions
from jaxrl_atari.runs.files import unused, write_json
from jaxrl_atari.runs.run_dir import read_config, session_dirs, session_number


@dataclasses.dataclass(frozen=True)
class Options:
    """Plays full games with a checkpoint and reports their raw scores."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of a run (data/NAME_TIMESTAMP) or of one of its sessions (data/NAME_TIMESTAMP/session_0)."""
    checkpoint: Literal["best", "latest"] | int = "best"
    """The one with the highest mean return of the last 100 games, the latest one, or the one at an env step."""
    episodes: int = 32
    """Full games to play."""
    video: bool = False
    """Also record one more game, to video_STEP.mp4 in the session's directory (or video_STEP_2.mp4, ...)."""
    greedy: bool = False
    """Take the most probable action instead of drawing one from the policy."""
    session: int | None = None
    """Session of the run. None: its only one, else the one with the highest mean return of 100 games."""
    sessions: Literal["one", "all"] = "one"
    """all: play every session, and report the mean over sessions with its 95% interval."""
    seed: int = 0
    """Seed of games and actions. With --sessions all, session i has seed + i."""
    num_envs: int = 16
    """Games played at once."""
    gpu: str = "auto"
    """Where to act: auto, true, false (the CPU) or the index of a GPU, as devices.gpu of the config."""


def _scores_to_compare(env: EnvConfig) -> str:
    if note := comparison_note(env.resolved_protocol):
        return note
    game = comparable(env.game_name, env.resolved_protocol)
    scores = {
        "random play (v5)": game.random_mean,
        "human tester (as in DQN Zoo)": game.human,
        "reference PPO (v5, 10,000,000 env steps)": game.reference_score,
        "the same in SLM Lab's tutorial": game.tutorial_score,
    }
    known = [f"{name} {score:,.1f}" for name, score in scores.items() if score is not None]
    return "to compare: " + ("; ".join(known) or "no scores known")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = tyro.cli(
        Options,
        args=arguments,
        prog="python -m jaxrl_atari.evaluate",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    for line in runtime.configure():
        print(line, flush=True)
    gpu = parse_word(options.gpu)
    do_not_preallocate()  # beside a training run
    limit_jax(DevicesConfig(gpu=gpu))
    device, _ = pick_device(gpu, field="--gpu")
    if options.sessions == "all":
        _evaluate_all(options, device)
        run_dir = options.run_dir
    else:
        session_dir, reason = find_session(options.run_dir, options.session)
        _check_writable(session_dir)
        policy = load_policy(session_dir, options.checkpoint, device)
        _evaluate_session(policy, reason, options)
        if options.checkpoint == "best":
            print(
                "note: the best checkpoint is an optimistic pick; to quote a score, use --sessions all --checkpoint"
                " latest",
                flush=True,
            )
        run_dir = session_dir.absolute().parent  # of `.` too
    if (run_dir / REPORT_FILE).is_file():
        try_report(run_dir)


def _check_writable(directory: Path) -> None:
    if not os.access(directory, os.W_OK):
        raise UserError(f"{directory}: cannot be written to; the results go there, so copy the run elsewhere first")


def _evaluate_all(options: Options, device: jax.Device) -> None:
    """Plays every session of a run; writes and prints the mean over sessions, its interval and the matrix of returns.

    Raises:
        UserError: a session has not begun or has no such checkpoint: the mean would be over other sessions than those
            of the run.
    """
    if options.session is not None:
        raise UserError(f"--session {options.session}: --sessions all plays every session; leave one of the two out")
    directories, planned = session_dirs(options.run_dir), None
    if not directories:
        raise UserError(f"{options.run_dir}: not a run directory; expected one that holds session_0")
    with contextlib.suppress(UserError):  # only the sessions are here
        config = read_config(options.run_dir)  # as the last resume has it
        directories, planned = counted_sessions(options.run_dir, config), config.sessions
    for directory in (options.run_dir, *directories):
        _check_writable(directory)
    numbers = [session_number(directory) for directory in directories]
    policies = [load_policy(options.run_dir, options.checkpoint, device, number) for number in numbers]
    planned = planned or max(policy.config.sessions for policy in policies)
    begun = len(set(range(planned)) & set(numbers))
    if begun < planned:
        raise UserError(
            f"{options.run_dir}: {begun} of {planned} sessions have begun; finish it first (train --resume)"
        )
    results = [
        _evaluate_session(policy, "each session is played", dataclasses.replace(options, seed=options.seed + number))
        for number, policy in zip(numbers, policies, strict=True)
    ]
    means = [result.mean for result in results]
    mean, interval = float(np.mean(means)), score_interval(means)  # no interval of a single session
    bounds = "-" if interval is None else f"{interval[0]:,.1f} to {interval[1]:,.1f}"
    count = counted(len(results), "session")
    print(f"\n{count}, checkpoint {options.checkpoint}, {options.episodes} games each")
    for directory, result in zip(directories, results, strict=True):
        print(f"{directory.name:>12} {result.mean:>12,.1f}")
    print(f"{'mean':>12} {mean:>12,.1f}   95% interval over sessions: {bounds}")
    path = unused(options.run_dir / "evaluation.json")
    env = policies[0].config.env
    figures = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "game": env.game_name,
        "protocol": env.resolved_protocol,
        "checkpoint": options.checkpoint,
        "greedy": options.greedy,
        "seed": options.seed,
        "num_envs": min(options.num_envs, options.episodes),
        "device": device.device_kind,
        "compute_dtype": policies[0].network.dtype.name,
        "episodes": options.episodes,
        "sessions": [directory.name for directory in directories],
        "env_steps": [policy.env_steps for policy in policies],
        "mean": mean,
        "interval": None if interval is None else list(interval),
        "session_means": means,
        "matrix": [result.returns.tolist() for result in results],  # sessions x games
    }
    write_json(path, figures)
    print(f"written: {path}", flush=True)


def _evaluate_session(policy: Policy, reason: str, options: Options) -> EvaluationResult:
    """Plays one session's games, prints them, and writes evaluation_STEP.json and the video."""
    env, session_dir = policy.config.env, policy.session_dir
    print(f"{session_dir} ({reason}), checkpoint {options.checkpoint}: env step {policy.env_steps:,}")
    print(
        f"{env.game_name}, protocol {env.resolved_protocol}, {options.episodes} full games, "
        f"{'greedy' if options.greedy else 'sampled'} actions, seed {options.seed}, on {policy.device}"
    )
    print(f"{'game':>6} {'return':>12} {'env steps':>10}", flush=True)
    count = 0

    def print_game(game: Episode) -> None:
        nonlocal count
        count += 1
        note = "  cut off at env.max_frames" if game.truncated else ""
        print(f"{count:>6} {game.episode_return:>12,.1f} {game.length:>10,}{note}", flush=True)

    result = run_evaluation(policy, options.episodes, options.seed, options.greedy, options.num_envs, print_game)
    print(f"{'mean':>6} {result.mean:>12,.1f}\n{'std':>6} {result.std:>12,.1f}\n{_scores_to_compare(env)}")
    path = unused(session_dir / f"evaluation_{policy.env_steps}.json")
    figures = {
        "game": env.game_name,
        "protocol": env.resolved_protocol,
        "backend": env.backend,
        "env_steps": policy.env_steps,
        "checkpoint": options.checkpoint,
        "greedy": options.greedy,
        "seed": options.seed,
        "num_envs": min(options.num_envs, options.episodes),
        "device": policy.device.device_kind,
        "compute_dtype": policy.network.dtype.name,
        "episodes": options.episodes,
        "mean": result.mean,
        "std": result.std,
        "returns": result.returns.tolist(),
        "lengths": [game.length for game in result.games],
        "truncated": [game.truncated for game in result.games],
    }
    write_json(path, figures)
    print(f"written: {path}", flush=True)
    if options.video:
        # Another evaluation of this checkpoint may record, too.
        own = session_dir / f".video_{policy.env_steps}_{os.getpid()}.mp4"
        game = record_video(policy, own, options.seed, options.greedy)
        path = own.rename(unused(session_dir / f"video_{policy.env_steps}.mp4"))
        print(f"written: {path} ({game.length:,} env steps at real speed, return {game.episode_return:,.1f})")
    return result


if __name__ == "__main__":
    cli.run(main)
