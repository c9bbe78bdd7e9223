"""Recorded games: an mp4 file and a page with the video and, in step with it, the network's outputs."""

import base64
import contextlib
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jinja2
import numpy as np
from scipy.special import softmax

from jaxrl_atari.envs import EpisodeCounter, FinishedGame, make_pool
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.play import play
from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.runs.files import write_file

VIDEO_HEIGHT = 630
"""Approximate height of videos in pixels. Screens are enlarged by a whole number: 3 for ALE's 160x210 pixels."""

TEMPLATE = Path(__file__).with_name("game.html")
"""Jinja template of the page."""


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
            raise UserError(f"{path}: the video could not be written ({complaint[-200:].strip()})")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def record_video(
    policy: Policy,
    path: str | Path,
    *,
    games: int = 1,
    seed: int = 0,
    greedy: bool = False,
    page: str | Path | None = None,
) -> list[FinishedGame]:
    """Plays full games and writes their colour screens to an mp4 file (H.264, real speed, about 630 pixels high).

    With the back end `envpool`, the games are played on `ale`, which has colour screens. A Gymnasium environment
    shows what it renders as `rgb_array` or, if it renders nothing, the grey frames that the policy sees. The file
    gets its name when it is complete, so that an interrupted recording leaves none.

    Args:
        policy: chooses the actions.
        path: the mp4 file.
        games: number of games, one after the other.
        seed: seed of the games and the actions.
        greedy: take the most probable action instead of sampling.
        page: also write this HTML file, with the video and, in step with it, the value, the probabilities of the
            actions, the reward and the return.

    Raises:
        UserError: the seed is out of range, or the file cannot be written.
    """
    path = Path(path).expanduser().absolute()
    counter = EpisodeCounter(1)
    finished: list[FinishedGame] = []
    # A value for each frame of the video, or for each decision: one less, because nothing is decided at the end.
    watched: dict[str, list[Any]] = {name: [] for name in ("reward", "return", "value", "probabilities", "action")}
    with contextlib.closing(make_pool(policy.config.env, 1, seed=seed, screens=True)) as pool:
        steps = play(policy, pool, seed=seed, greedy=greedy)
        step, decision = next(steps)
        with _video_writer(path, pool.screen().shape, pool.steps_per_second) as write:
            for number in itertools.count(-1):  # -1: the start of the first game
                write(pool.screen())
                finished += counter.count(step, number)
                watched["reward"].append(float(step.reward[0]))
                watched["return"].append(float(counter.so_far[0, 0]))
                if decision is not None:
                    logits, value = jax.device_get((decision.outputs.logits[0], decision.outputs.value[0]))
                    watched["value"].append(round(float(value), 3))
                    watched["probabilities"].append(softmax(logits.astype(np.float64)).round(4).tolist())
                    watched["action"].append(int(decision.actions[0]))
                if len(finished) == games:
                    break
                step, decision = next(steps)
        names = list(pool.action_names) or [f"action {i}" for i in range(pool.num_actions)]
        data = {"fps": pool.steps_per_second, "actions": names, **watched}
    if page is not None:
        returns = ", ".join(f"{game.episode_return:,.1f}" for game in finished)
        env = policy.config.env
        about = (
            f"return {returns} in {sum(game.length for game in finished):,} env steps, "
            f"protocol {env.resolved_protocol}, trained for {policy.env_steps:,} env steps, "
            f"{'greedy' if greedy else 'sampled'} actions, seed {seed}"
        )
        template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True)
        html = template.render(
            title=env.game_name,
            about=about,
            clipped=" of clipped rewards" if env.rules.clip_rewards else "",
            video=base64.b64encode(path.read_bytes()).decode(),
            data=data,
        )
        write_file(Path(page).expanduser(), html)
    return finished
