"""The page of a game, in a real browser: it loads nothing, and a click on a curve goes to that moment."""

import subprocess
import time
from types import SimpleNamespace

import imageio_ffmpeg
import pytest
from browser import chromium

from jaxrl_atari.config import Config, EnvConfig
from jaxrl_atari.evaluate.video import write_game_page

STEPS = 60  # decisions: the game has a frame more


@pytest.fixture
def page(tmp_path):
    """A page of a made-up game whose reward is 1 at step 45, and whose value is the number of the step."""
    video = tmp_path / "video.mp4"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-f", "lavfi"]
    source = f"testsrc=size=160x210:rate=15:duration={(STEPS + 1) / 15}"
    subprocess.run([*command, "-i", source, "-pix_fmt", "yuv420p", "-c:v", "libx264", video], check=True)
    data = {
        "fps": 15,
        "actions": ["NOOP", "<FIRE>"],
        "reward": [float(frame == 45) for frame in range(STEPS + 1)],
        "return": [float(frame >= 45) for frame in range(STEPS + 1)],
        "value": list(range(STEPS)),
        "probabilities": [[0.25, 0.75]] * STEPS,
        "action": [number % 2 for number in range(STEPS)],
    }
    policy = SimpleNamespace(config=Config(env=EnvConfig(game="Pong")))
    path = tmp_path / "game.html"
    write_game_page(path, video, data, policy, "return 1.0 in 60 env steps")
    return path


def wait_until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_page_has_everything_in_it(page):
    text = page.read_text()
    assert "return 1.0 in 60 env steps" in text
    assert "<FIRE>" not in text  # names are data
    assert "http" not in text.replace("http-equiv", "")


def test_a_click_on_a_curve_goes_to_that_moment(page, tmp_path):
    with chromium(tmp_path / "profile") as browser:
        for width in (1280, 400):
            browser.open(page, width=width)
            wait_until(lambda: browser.evaluate("video.readyState") >= 2)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            for chart, at in (("value", 0.75), ("return", 0.5), ("probabilities", 0.25)):
                canvas = f"document.querySelector('[data-chart={chart}]')"
                box = f"{canvas}.getBoundingClientRect()"
                browser.evaluate(f"{canvas}.scrollIntoView()")
                x = browser.evaluate(f"{box}.left + {at} * {box}.width")
                y = browser.evaluate(f"{box}.top + 20")
                for kind in ("mousePressed", "mouseReleased"):
                    browser.call(
                        "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1
                    )
                step = round(at * STEPS)
                wait_until(lambda step=step: browser.evaluate("at('step').textContent") == f"{step} of {STEPS}")
                assert browser.evaluate("at('value').textContent") == str(step)
                assert browser.evaluate("at('return').textContent") == str(int(step >= 45))
                chosen = browser.evaluate("document.querySelector('#actions .chosen').textContent")
                assert chosen == ["NOOP", "<FIRE>"][step % 2]
            assert [url for url in browser.requests if not url.startswith("file:")] == []
            assert browser.complaints == []
