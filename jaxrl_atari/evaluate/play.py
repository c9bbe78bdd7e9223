"""Full games played with a policy: scored by their raw rewards, or recorded as a video of the colour screen."""

import contextlib
import itertools
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_atari.config import EvaluationConfig
from jaxrl_atari.envs import EnvPool, EnvStep, EpisodeCounter, FinishedGame, make_pool
from jaxrl_atari.envs.pool import FRAME_SKIP
from jaxrl_atari.errors import UserError, check_fields
from jaxrl_atari.evaluate.game_page import WatchedGame, write_game_page
from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.fast.frames import empty_window, push_frame
from jaxrl_atari.networks import Outputs

SECONDS_BETWEEN_NEWS = 30
SECONDS_BETWEEN_VIDEO_NEWS = 10
VIDEO_HEIGHT = 630
"""Height of videos in pixels, about: the pixels of a screen are enlarged by a whole number, 3 for ALE's
160x210."""

WAIT_FOR_FIRE = {
    "BasicMath", "Bowling", "Breakout", "Casino", "Crossbow", "DonkeyKong", "DoubleDunk", "Gopher", "Hangman",
    "HumanCannonball", "Kaboom", "Pitfall", "SirLancelot", "Tennis", "TicTacToe3D", "VideoPinball", "YarsRevenge",
}  # fmt: skip
"""Games that random play ends within 4,500 env steps, but not without FIRE, which starts the game or the next
life."""


class EvaluationResult(NamedTuple):
    """The games of an evaluation, and what they scored."""

    games: tuple[FinishedGame, ...]  # in the order in which they ended
    returns: np.ndarray  # float64 [episodes]
    mean: float  # mean return
    std: float  # sample standard deviation of the returns over these games; 0 for a single one
    cut_off: int  # games that reached their time limit, `env.max_frames`; their returns count all the same


def play(
    policy: Policy,
    pool: EnvPool,
    seed: int,
    greedy: bool,
    decided: Callable[[np.ndarray, Outputs], object] = lambda actions, outputs: None,
) -> Iterator[tuple[EnvStep, np.ndarray | None]]:
    """Plays game after game in every environment of a pool; yields each step, and the actions before it, if any.

    Args:
        decided: receives the actions chosen at each step, and the outputs of the network.
    """
    window, age = jax.device_put(empty_window(pool.num_envs), policy.device)
    with jax.default_device(policy.device):  # a GPU that trains has no part in an evaluation on the CPU
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(key, 2**31 + 1)  # a session of that seed uses 0 to 2**31
        carry = policy.initial_carry(pool.num_envs)
    step = pool.reset()
    actions = None
    for number in itertools.count():
        yield step, actions
        with jax.default_device(policy.device):
            window, age, stacks = push_frame(window, age, step.frame, step.first)
            actions, outputs = policy.decide(stacks, step.first, carry, jax.random.fold_in(key, number), greedy)
            carry = outputs.carry
            decided(actions, outputs)
        step = pool.step(actions)


def run_evaluation(
    policy: Policy,
    episodes: int = 32,
    seed: int = 0,
    greedy: bool = False,
    num_envs: int = 16,
    say: Callable[[str], object] = lambda line: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> EvaluationResult:
    """Plays full games with raw scores, under the protocol that the policy was trained with.

    Each environment plays a number of games that is fixed beforehand. Taking the first `episodes` games to end,
    from whichever environment, would favour short games, which are mostly the bad ones.

    Args:
        episodes: number of games in all.
        seed: seed of games and actions. The same seed, `num_envs` and device give the same games.
        greedy: take the most probable action instead of sampling.
        num_envs: games played at once.
        say: receives a line for each game as it ends, and every 30 seconds one on those that have not ended.
        cancelled: asked at each step.

    Raises:
        CancelledError: `cancelled()` was true.
        ConfigError: a number that is not possible.
    """
    check_fields(EvaluationConfig(episodes=episodes, num_envs=num_envs))
    env = policy.config.env
    if greedy and env.atari_game in WAIT_FOR_FIRE:
        note = "greedy play can stand still: %s may wait for FIRE, as after a lost life"
        logging.getLogger(__name__).warning(note, env.game_name)
    quota = np.bincount(np.arange(episodes) % num_envs)  # games of each environment
    pool = make_pool(
        env.backend, env.game_name, len(quota), seed=seed,
        num_threads=env.num_threads, rules=env.rules, gymnasium=env.gymnasium,
    )  # fmt: skip
    longest = f" of {env.rules.max_frames // FRAME_SKIP:,}" if env.rules.max_frames else ""
    counter = EpisodeCounter(len(quota))
    games = []
    news_at = time.monotonic() + SECONDS_BETWEEN_NEWS
    for number, (step, _) in enumerate(play(policy, pool, seed, greedy)):
        if cancelled():
            raise CancelledError
        for game in counter.count(step, number):
            if quota[game.env]:
                quota[game.env] -= 1
                games.append(game)
                line = f"{len(games):>6} {game.episode_return:>12,.1f} {game.length:>10,}"
                say(f"{line}  cut off at {env.time_limit}" if game.truncated else line)
        if len(games) == episodes:
            break
        if time.monotonic() > news_at:
            news_at += SECONDS_BETWEEN_NEWS
            most = counter.in_progress[quota > 0, 1].max()
            say(f"{np.sum(quota > 0)} games in progress, longest {most:,.0f}{longest} env steps")
    returns = np.array([game.episode_return for game in games])
    std = float(np.std(returns, ddof=1)) if len(returns) > 1 else 0.0
    cut_off = sum(game.truncated for game in games)
    return EvaluationResult(tuple(games), returns, float(np.mean(returns)), std, cut_off)


def record_video(
    policy: Policy,
    path: str | Path,
    seed: int = 0,
    greedy: bool = False,
    say: Callable[[str], object] = lambda line: None,
    page: str | Path | None = None,
) -> FinishedGame:
    """Plays one full game and writes its colour screens to an mp4 file (H.264, real speed, about 630 pixels high).

    A game that was trained on `envpool` is played on `ale`, which has colour screens. A Gymnasium environment
    shows what it renders as `rgb_array` or, where it renders nothing, the gray frames that the policy sees. The
    file has its name once it is complete: a recording that is interrupted leaves none.

    Args:
        say: receives a line every 10 seconds on how far the game is.
        page: an HTML file to write beside the video: it contains the video and, moving with it, the value, the
            probabilities of the actions, the reward and the return (`game_page.py`).

    Raises:
        UserError: a seed that is not possible, or the file cannot be written.
    """
    import imageio_ffmpeg

    path = Path(path).expanduser().absolute()  # to ffmpeg, a relative a:b is a protocol
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    env = policy.config.env
    pool = make_pool(
        "ale" if env.backend == "envpool" else env.backend, env.game_name, 1, seed=seed,
        num_threads=env.num_threads, rules=env.rules, gymnasium=env.gymnasium, screens=True,
    )  # fmt: skip
    counter = EpisodeCounter(1)
    games = []
    record = WatchedGame(pool.action_names, pool.fps)
    steps = play(policy, pool, seed, greedy, record.decided)
    step, _ = next(steps)
    height, width, _ = pool.screen().shape
    scale = max(1, round(VIDEO_HEIGHT / height))
    even = f"pad=ceil(iw/2)*2:ceil(ih/2)*2,scale={scale}*iw:{scale}*ih:flags=neighbor"
    # 4:2:0 colours are what browsers play; with the index in front they start before all is loaded.
    options = (
        f"-y -loglevel error -f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {pool.fps} -i -"
        f" -vf {even}"
        " -an -c:v libx264 -pix_fmt yuv420p -movflags +faststart -f mp4"
    )
    command = [imageio_ffmpeg.get_ffmpeg_exe(), *options.split(), partial]
    news_at = time.monotonic() + SECONDS_BETWEEN_VIDEO_NEWS
    try:
        # Not `imageio_ffmpeg.write_frames`, which forks in a way that can deadlock a process of JAX.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as ffmpeg:
            assert ffmpeg.stdin
            with contextlib.suppress(BrokenPipeError):  # ffmpeg has ended, and its output has the reason
                while True:
                    ffmpeg.stdin.write(pool.screen().tobytes())
                    record.rewards.append(float(step.reward[0]))
                    games = counter.count(step)
                    if games:
                        break
                    if time.monotonic() > news_at:
                        news_at += SECONDS_BETWEEN_VIDEO_NEWS
                        score, length = counter.in_progress[0]
                        say(f"recording: {length:,.0f} env steps, return {score:,.1f}")
                    step, _ = next(steps)
            complaint = ffmpeg.communicate()[1].decode(errors="replace")
        if ffmpeg.returncode:
            complaint = complaint.replace(partial.name, path.name)
            raise UserError(f"{path}: the video could not be written ({complaint[-200:]})")
        partial.replace(path)
        if page is not None:
            write_game_page(Path(page), path, record, policy, seed, greedy)
    finally:
        partial.unlink(missing_ok=True)
    return games[0]
