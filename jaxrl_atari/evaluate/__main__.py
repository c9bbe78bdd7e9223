"""Plays full games with a checkpoint, on any device, and reports their raw scores.

    python -m jaxrl_atari.evaluate RUN_DIR [--checkpoint best|latest|STEP] [--episodes N] [--greedy] [--video]

From Python: `load_policy` and `run_evaluation` of `jaxrl_atari`.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from jaxrl_atari import cli
from jaxrl_atari.config import DevicesConfig, parse_gpu
from jaxrl_atari.devices import limit_jax, pick_device
from jaxrl_atari.envs import Episode
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.play import run_evaluation
from jaxrl_atari.evaluate.policy import find_session, load_policy
from jaxrl_atari.evaluate.video import record_video
from jaxrl_atari.hardware import runtime
from jaxrl_atari.hardware.memory_share import do_not_preallocate
from jaxrl_atari.run_dir.files import unused, write_json


@dataclasses.dataclass(frozen=True)
class Options:
    """Plays full games with a checkpoint and reports their raw scores."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of a run (data/NAME_TIMESTAMP) or of one of its sessions (data/NAME_TIMESTAMP/session_0)."""
    checkpoint: Literal["best", "latest"] | int = "best"
    """The checkpoint with the best score, the latest one, or the one at an env step."""
    episodes: int = 32
    """Full games to play."""
    video: bool = False
    """Also record one more game, to video_STEP.mp4 in the session's directory (or video_STEP_2.mp4, ...)."""
    greedy: bool = False
    """Take the most probable action instead of drawing one from the policy."""
    session: int | None = None
    """Session of the run. None: its only one, else the one with the highest score."""
    seed: int = 0
    """Of the games and the actions."""
    num_envs: int = 16
    """Games played at once."""
    gpu: str = "auto"
    """Where to act: auto, true, false (the CPU) or the index of a GPU, as devices.gpu of the config."""


def _scores_to_compare(game: str) -> str:
    scores = {
        "random play (v5)": GAMES[game].random_mean,
        "human tester (as in DQN Zoo)": GAMES[game].human,
        "reference PPO (v5, 10,000,000 env steps)": GAMES[game].reference_score,
    }
    known = [f"{name} {score:,.1f}" for name, score in scores.items() if score is not None]
    return "to compare: " + ("; ".join(known) or "no scores known")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = cli.parse(
        Options,
        sys.argv[1:] if arguments is None else arguments,
        prog="python -m jaxrl_atari.evaluate",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    for line in runtime.configure():
        print(line, flush=True)
    gpu = parse_gpu(options.gpu, "--gpu")
    do_not_preallocate()  # beside a training run
    limit_jax(DevicesConfig(gpu=gpu))
    device = pick_device(gpu).device
    session_dir, reason = find_session(options.run_dir, options.session)
    if not os.access(session_dir, os.W_OK):
        raise UserError(f"{session_dir}: cannot be written to; the results go there, so copy the run elsewhere first")
    policy = load_policy(session_dir, options.checkpoint, device)
    env = policy.config.env
    print(f"{session_dir} ({reason}), checkpoint {options.checkpoint}: env step {policy.env_steps:,}")
    print(
        f"{env.game_name}, protocol {env.resolved_protocol}, {options.episodes} full games, "
        f"{'greedy' if options.greedy else 'sampled'} actions, seed {options.seed}, on {device}"
    )
    print(f"{'game':>6} {'return':>12} {'env steps':>10}", flush=True)
    count = 0

    def print_game(game: Episode) -> None:
        nonlocal count
        count += 1
        note = "  cut off at env.max_frames" if game.truncated else ""
        print(f"{count:>6} {game.episode_return:>12,.1f} {game.length:>10,}{note}", flush=True)

    result = run_evaluation(policy, options.episodes, options.seed, options.greedy, options.num_envs, print_game)
    print(f"{'mean':>6} {result.mean:>12,.1f}\n{'std':>6} {result.std:>12,.1f}\n{_scores_to_compare(env.game_name)}")
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
        "device": device.device_kind,
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
        path = unused(session_dir / f"video_{policy.env_steps}.mp4")
        game = record_video(policy, path, options.seed, options.greedy)
        print(f"written: {path} ({game.length:,} env steps at real speed, return {game.episode_return:,.1f})")


if __name__ == "__main__":
    cli.run(main)
