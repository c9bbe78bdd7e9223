"""Recorded games: an mp4 file and a page with the video and, in step with it, the network's outputs."""

import base64
import contextlib
import html
import json
import math
import os
import string
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxrl_atari.envs import EnvStep, EpisodeCounter, FinishedGame
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.play import make_evaluation_pool, play
from jaxrl_atari.evaluate.policy import Decision, Policy
from jaxrl_atari.report.evaluations import GAME_TEMPLATE
from jaxrl_atari.runs.files import write_file

SECONDS_BETWEEN_LINES = 10
"""Seconds between two lines on the progress of a recording."""

VIDEO_HEIGHT = 630
"""Approximate height of videos in pixels. Screens are enlarged by a whole number: 3 for ALE's 160x210 pixels."""


@contextlib.contextmanager
def _video_writer(path: Path, shape: tuple[int, ...], fps: int) -> Iterator[Callable[[np.ndarray], object]]:
    """Writes an mp4 file with ffmpeg. The file gets its name at the end of the block, when it is complete.

    Browsers need 4:2:0 colours (yuv420p), which need even sizes. `+faststart` lets a video start while it loads.

    Args:
        path: an absolute path; in a relative one, ffmpeg would take `a:b` for a protocol.
        shape: height and width of the screens, and 3 colours.
        fps: screens per second.

    Yields:
        A function that adds an RGB screen, uint8 [height, width, 3].

    Raises:
        UserError: the file cannot be written.
    """
    import imageio_ffmpeg

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    height, width, _ = shape
    scale = max(1, round(VIDEO_HEIGHT / height))
    filters = f"pad=ceil(iw/2)*2:ceil(ih/2)*2,scale={scale}*iw:{scale}*ih:flags=neighbor"
    command = [
        *(imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error"),
        *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"),
        *("-vf", filters, "-an", "-c:v", "libx264", "-pix_fmt", "yuv420p"),
        *("-movflags", "+faststart", "-f", "mp4", partial),
    ]
    try:
        # `imageio_ffmpeg.write_frames` forks in a way that can deadlock a process that runs JAX.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as ffmpeg:
            assert ffmpeg.stdin
            stdin = ffmpeg.stdin
            with contextlib.suppress(BrokenPipeError):  # ffmpeg has failed, and its stderr has the reason
                yield lambda screen: stdin.write(screen.tobytes())
            complaint = ffmpeg.communicate()[1].decode(errors="replace")
        if ffmpeg.returncode:
            why = complaint.replace(partial.name, path.name)[-200:].strip()
            raise UserError(
                f"{path}: the video could not be written ({why or f'ffmpeg ended with {ffmpeg.returncode}'})"
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def record_video(
    policy: Policy,
    path: str | Path,
    *,
    seed: int = 0,
    greedy: bool = False,
    say: Callable[[str], object] = lambda line: None,
    page: str | Path | None = None,
) -> FinishedGame:
    """Plays one full game and writes its colour screens to an mp4 file (H.264, real speed, about 630 pixels high).

    With the back end `envpool`, the game is played on `ale`, which has colour screens. A Gymnasium environment
    shows what it renders as `rgb_array` or, if it renders nothing, the grey frames that the policy sees. The file
    gets its name when it is complete, so that an interrupted recording leaves none.

    Args:
        policy: chooses the actions.
        path: the mp4 file.
        seed: seed of the game and the actions.
        greedy: take the most probable action instead of sampling.
        say: receives a line on the progress every 10 seconds.
        page: also write this HTML file, with the video and, in step with it, the value, the probabilities of the
            actions, the reward and the return.

    Raises:
        UserError: the seed is out of range, or the file cannot be written.
    """
    path = Path(path).expanduser().absolute()
    counter = EpisodeCounter(1)
    games: list[FinishedGame] = []
    next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES
    with contextlib.closing(make_evaluation_pool(policy.config.env, 1, seed=seed, screens=True)) as pool:
        watched = WatchedGame(pool.action_names, pool.steps_per_second)
        steps = enumerate(play(policy, pool, seed=seed, greedy=greedy), start=-1)  # -1: the start of the game
        number, (step, decision) = next(steps)
        with _video_writer(path, pool.screen().shape, pool.steps_per_second) as write:
            while True:
                write(pool.screen())
                watched.add(step, decision)
                games = counter.count(step, number)
                if games:
                    break
                if time.monotonic() > next_line_at:
                    next_line_at += SECONDS_BETWEEN_LINES
                    score, length = counter.so_far[0]
                    say(f"recording: {length:,.0f} env steps, return {score:,.1f}")
                number, (step, decision) = next(steps)
    if page is not None:
        write_game_page(Path(page).expanduser(), path, watched, policy, seed=seed, greedy=greedy)
    return games[0]


class WatchedGame:
    """The outputs of a network and the rewards at each step of a game.

    A game has one more frame than decisions, because nothing is decided at its end.

    Args:
        action_names: names of the actions; empty if they are unknown.
        fps: frames per second of the video, which has one frame for each env step.
    """

    def __init__(self, action_names: Sequence[str], fps: float):
        self.action_names = action_names
        self.fps = fps
        self.rewards: list[float] = []  # for each frame, the raw reward that came with it
        self.values: list[float] = []  # for each decision
        self.probabilities: list[np.ndarray] = []  # for each decision, float32 [A]
        self.chosen: list[int] = []  # for each decision, the index of the action

    def add(self, step: EnvStep, decision: Decision | None) -> None:
        """Adds a step of environment 0, and the decision that led to it; None at the start of the game."""
        self.rewards.append(float(step.reward[0]))
        if decision is None:
            return
        logits, value = jax.device_get((decision.outputs.logits[0], decision.outputs.value[0]))
        weights = np.exp(logits - logits.max())
        self.probabilities.append(weights / weights.sum())
        self.values.append(float(value))
        self.chosen.append(int(decision.actions[0]))


def _rounded(value: float, digits: int) -> float | None:
    """A number for JSON, which has no NaN and no infinities: they are None."""
    return round(value, digits) if math.isfinite(value) else None


def write_game_page(
    path: Path, video: Path, watched: WatchedGame, policy: Policy, *, seed: int, greedy: bool
) -> None:
    """Writes the page of a game.

    Args:
        path: the HTML file.
        video: mp4 file of the game, which the page embeds.
        watched: the outputs and rewards of the game.
        policy, seed, greedy: the policy that played, and how.
    """
    env = policy.config.env
    rewards = np.array(watched.rewards)
    facts = [
        f"return {rewards.sum():,.1f} in {len(rewards) - 1:,} env steps",
        f"protocol {env.resolved_protocol}",
        f"trained for {policy.env_steps:,} env steps",
        "greedy actions" if greedy else "sampled actions",
        f"seed {seed}",
    ]
    data = {
        "fps": watched.fps,
        "actions": list(watched.action_names) or [f"action {i}" for i in range(len(watched.probabilities[0]))],
        "reward": rewards.tolist(),
        "return": np.cumsum(rewards).tolist(),
        "value": [_rounded(value, 3) for value in watched.values],
        "probabilities": [[_rounded(p, 4) for p in each.tolist()] for each in watched.probabilities],
        "action": watched.chosen,
    }
    page = string.Template(GAME_TEMPLATE.read_text(encoding="utf-8")).safe_substitute(
        title=html.escape(env.game_name),
        about=html.escape(", ".join(facts)),
        clipped=" of clipped rewards" if env.rules.clip_rewards else "",
        video=base64.b64encode(video.read_bytes()).decode(),
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )
    write_file(path, page)
