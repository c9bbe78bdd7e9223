"""Videos of a policy at play, of the emulator's colour screen."""

import contextlib
import os
import subprocess
from pathlib import Path

import numpy as np

from jaxrl_atari.envs import Episode, env_seeds
from jaxrl_atari.envs.ale import SCREEN_SHAPE, AlePool
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.evaluate.play import play
from jaxrl_atari.evaluate.policy import Policy

VIDEO_FPS = 15  # 60 emulator frames a second, 4 of them an env step: real speed
VIDEO_SCALE = 3  # 160x210 -> 480x630 pixels; both even, as H.264 with 4:2:0 colours needs


def _start_ffmpeg(path: Path) -> subprocess.Popen[bytes]:
    """An ffmpeg that makes the video of the screens that are written to its stdin, rgb24 [210, 160, 3] each.

    Started here, not by `imageio_ffmpeg.write_frames`: that one forks in a way that can deadlock a process of JAX.
    """
    try:
        import imageio_ffmpeg

        program = imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise UserError("--video: ffmpeg is not installed; pip install 'imageio[ffmpeg]'") from error
    height, width, _ = SCREEN_SHAPE
    scale = f"scale={VIDEO_SCALE * width}:{VIDEO_SCALE * height}:flags=neighbor"
    options = f"-y -loglevel error -f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {VIDEO_FPS} -i - -vf {scale}"
    # 4:2:0 colours are what browsers play; with the index in front they start before all is loaded.
    options += " -an -c:v libx264 -pix_fmt yuv420p -movflags +faststart -f mp4"
    command = [program, *options.split(), str(path.absolute())]  # a relative one may look like a protocol, as a:b
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def record_video(policy: Policy, path: str | Path, seed: int = 0, greedy: bool = False) -> Episode:
    """Plays one full game and writes its colour screens to an mp4 file (H.264, real speed, 480x630 pixels).

    Raises:
        UserError: a seed that is not possible, ffmpeg is missing, or the file cannot be written.
    """
    require(0 <= seed < 2**32, "seed", seed, "a whole number from 0 to 4294967295")
    path = Path(path)
    partial_path = path.with_name(path.name + ".partial")
    played: list[Episode] = []
    env = policy.config.env
    # Whatever the back end of the training: this one has colour screens.
    pool = AlePool(env.game_name, env_seeds(seed, 1), env.num_threads, env.rules, colour=True)
    ffmpeg = _start_ffmpeg(partial_path)
    assert ffmpeg.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # ffmpeg has ended, and its output has the reason
            for ended in play(policy, pool, np.ones(1, np.int64), seed, greedy):
                ffmpeg.stdin.write(pool.screen.tobytes())
                played += ended
        complaint = ffmpeg.communicate()[1].decode(errors="replace").strip()
        if ffmpeg.returncode != 0:
            raise UserError(f"{path}: the video could not be written ({complaint[-200:]})")
        os.replace(partial_path, path)
    finally:
        if ffmpeg.poll() is None:
            ffmpeg.kill()
            ffmpeg.communicate()
        partial_path.unlink(missing_ok=True)
        pool.close()
    return played[0]
