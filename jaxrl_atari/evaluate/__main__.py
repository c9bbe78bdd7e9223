"""The command `evaluate`: plays full games with a checkpoint, on any device, and reports their raw scores.

    python -m jaxrl_atari.evaluate RUN_DIR [--checkpoint best|latest|STEP] [--episodes N] [--greedy] [--video]
    python -m jaxrl_atari.evaluate RUN_DIR --session all --checkpoint latest

The first form plays the best checkpoint of the best session, an optimistic pick. The second form plays every
session and reports the mean over sessions with its interval, which is the figure to quote.

From Python, use `load_policy` and `run_evaluation` of `jaxrl_atari`.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxrl_atari import cli
from jaxrl_atari.cli.options import CheckpointOption, RunDir, WithImports, parse
from jaxrl_atari.config import GpuOption, Limits, NonNegativeInt, PositiveInt
from jaxrl_atari.devices import pick_device
from jaxrl_atari.evaluate.play import run_evaluation
from jaxrl_atari.evaluate.policy import Policy, load_policy
from jaxrl_atari.evaluate.video import record_video
from jaxrl_atari.hardware.memory import do_not_preallocate
from jaxrl_atari.hardware.settings import tune_process
from jaxrl_atari.output import counted, say
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.score_statistics import score_interval
from jaxrl_atari.report.text import interval_text
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.files import unused, write_json
from jaxrl_atari.runs.layout import (
    EVALUATION_SUMMARY_FILE,
    REPORT_FILE,
    game_file,
    session_dirs,
    video_file,
)


@dataclasses.dataclass(frozen=True)
class Options(WithImports):
    """Plays full games with a checkpoint and reports their raw scores."""

    run_dir: RunDir
    """Directory of a run (data/NAME_TIMESTAMP) or, without `--session all`, of one of its sessions
    (data/NAME_TIMESTAMP/session_0)."""
    checkpoint: CheckpointOption = "best"
    episodes: PositiveInt = 32
    """Full games to play."""
    video: bool = False
    """Also record further games, with the seed after `--seed`, to video_STEP.mp4 (or video_STEP_2.mp4, ...) in the
    session's directory."""
    video_games: PositiveInt = 1
    """Games in the video, one after the other, for environments with short games."""
    greedy: bool = False
    """Take the most probable action instead of drawing one from the policy."""
    session: Literal["best", "all"] | NonNegativeInt = "best"
    """`best` (the one with the best checkpoint), `all` (also reports the mean over sessions with its 95%
    interval), or the number of a session."""
    seed: Annotated[int, Limits(0, 2**32 - 1)] = 0
    """Seed of games and actions. With --session all, session i has seed + i."""
    num_envs: PositiveInt = 16
    """Games played at once."""
    backend: Literal["ale", "envpool", "gymnasium"] | None = None
    """Emulator pool. None: as in training. Another pool may have another emulator or start games otherwise, so
    scores may differ."""
    gpu: GpuOption = "auto"
    """Device that acts: auto, true, false (the CPU) or the index of a GPU, as devices.gpu of the config."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Plays full games with the chosen checkpoints, and prints and saves their scores."""
    options = parse(Options, arguments, "evaluate")
    every_session = options.session == "all"
    sessions: Sequence[int | None] = [options.session] if isinstance(options.session, int) else [None]
    if every_session:
        sessions = range(read_config(options.run_dir).sessions)
    say(tune_process())
    do_not_preallocate()  # beside a training run
    device = pick_device(options.gpu)
    if options.backend:
        say(f"note: played on {options.backend}; if the run was trained on another emulator, scores may differ")
    policies = [
        load_policy(options.run_dir, options.checkpoint, device=device, session=number, backend=options.backend)
        for number in sessions
    ]
    run_dir = policies[0].session_dir.absolute().parent
    results = [_evaluate(policy, options, options.seed + i) for i, policy in enumerate(policies)]
    if every_session:
        _summarise(run_dir, results, _settings(policies[-1], options), options.seed)
    is_best_of_several = options.session == "best" and len(session_dirs(options.run_dir)) > 1
    if options.checkpoint == "best" or is_best_of_several:
        picked = "checkpoint" if options.checkpoint == "best" else "session"
        advice = "to quote a score, use --session all --checkpoint latest"
        say(f"note: the best {picked} is an optimistic pick; {advice}")
    if (run_dir / REPORT_FILE).is_file():
        try_report(run_dir)


def _evaluate(policy: Policy, options: Options, seed: int) -> dict[str, Any]:
    """Plays the games of one session, prints and saves their scores, and records the video if it is wanted.

    Returns:
        The content of its file; see `runs.reading.evaluations`.
    """
    env = policy.config.env
    session_dir = policy.session_dir
    say(
        f"{session_dir}, checkpoint {options.checkpoint}: env step {policy.env_steps:,}\n"
        f"{env.game_name}, protocol {env.resolved_protocol}, {options.episodes} full games, "
        f"{'greedy' if options.greedy else 'sampled'} actions, seed {seed}, on {policy.device}\n"
        f"{'game':>6} {'return':>12} {'env steps':>10}"
    )
    result = run_evaluation(
        policy, options.episodes, seed=seed, greedy=options.greedy, num_envs=options.num_envs, say=say
    )
    std = "-" if result.std is None else f"{result.std:,.1f}"
    say(
        f"{'mean':>6} {result.mean:>12,.1f}\n{'std':>6} {std:>12}\n"
        f"{result.num_truncated} of {counted(options.episodes, 'game')} cut off at {env.time_limit}"
    )
    evaluation = {
        "session": session_dir.name,
        **_settings(policy, options),
        "env_steps": policy.env_steps,
        "seed": seed,
        "mean": result.mean,
        "std": result.std,
        "cut_off": result.num_truncated,
        "returns": [game.episode_return for game in result.games],
        "lengths": [game.length for game in result.games],
        "truncated": [game.truncated for game in result.games],
    }
    path = unused(session_dir / f"evaluation_{policy.env_steps}.json")
    write_json(path, evaluation)
    say(f"written: {path}")
    if options.video:
        video = unused(video_file(path))  # with the STEP of `path`, by which a report finds its date
        page = unused(game_file(video))
        other = (seed + 1) % 2**32  # with the same seed, the game would be the first one of the evaluation
        say(f"recording {counted(options.video_games, 'game')} with seed {other} to {video}")
        games = record_video(
            policy, video, games=options.video_games, seed=other, greedy=options.greedy, page=page
        )
        returns = ", ".join(f"{game.episode_return:,.1f}" for game in games)
        length = sum(game.length for game in games)
        say(
            f"written: {video} ({length:,} env steps at real speed, return {returns})\n"
            f"written: {page} (the video beside the network's outputs; it opens in a browser)"
        )
    return evaluation


def _settings(policy: Policy, options: Options) -> dict[str, Any]:
    """How the games are played, which is the same for all sessions of a run, and the date."""
    env = policy.config.env
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "game": env.game_name,
        "protocol": env.resolved_protocol,
        "backend": env.backend,
        "checkpoint": options.checkpoint,
        "greedy": options.greedy,
        "num_envs": options.num_envs,
        "device": policy.device.device_kind,
        "compute_dtype": policy.network.dtype.name,
        "episodes": options.episodes,
    }


def _summarise(run_dir: Path, results: list[dict[str, Any]], settings: dict[str, Any], seed: int) -> None:
    """Prints the mean over sessions with its interval, and saves it in evaluation.json with all returns.

    Args:
        results: the result of `_evaluate` for each session.
        settings: see `_settings`.
        seed: seed of the first session.
    """
    means = [result["mean"] for result in results]
    mean = sum(means) / len(means)
    games = f"{settings['episodes']} games each"
    say(f"\n{counted(len(means), 'session')}, checkpoint {settings['checkpoint']}, {games}")
    for result in results:
        say(f"{result['session']:>12} {result['mean']:>12,.1f}")
    say(f"{'mean':>12} {mean:>12,.1f}   {interval_text(means)}")
    summary = {
        **settings,
        "seed": seed,
        "sessions": [result["session"] for result in results],
        "env_steps": [result["env_steps"] for result in results],
        "mean": mean,
        "interval": score_interval(means),
        "session_means": means,
        "cut_off": sum(result["cut_off"] for result in results),
        "returns": [result["returns"] for result in results],
    }
    path = unused(run_dir / EVALUATION_SUMMARY_FILE)
    write_json(path, summary)
    say(f"written: {path}")


if __name__ == "__main__":
    cli.run(main)
