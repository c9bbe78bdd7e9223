"""How a real browser shows a report."""

from io import BytesIO

import numpy as np
from browser import chromium
from PIL import Image
from sample_runs import describe, learning_table, write_run

from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.report.page import write_report

HOSTILE = """"><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"""


def test_a_page_in_a_real_browser(tmp_path):
    """Light and dark, narrow and wide: nothing requested, no complaint, no overflow, a picture with content."""
    tables = [learning_table(GAMES["Qbert"], seed, count=100) for seed in range(2)]
    name = "a_" + "very_" * 20 + "long_name"
    run_dir = write_run(tmp_path / "learned", tables, total_env_steps=10_000_000, name=name)
    describe(run_dir, git_revision="x" * 200, python=HOSTILE)
    (run_dir / "session_0" / "video_1.mp4").write_bytes(b"no video")
    path = write_report(run_dir)
    with chromium(tmp_path / "profile") as page:
        for width, dark in ((400, False), (1280, True)):
            page.open(path, width, dark=dark)
            page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert page.requests == [path.as_uri()]
            assert page.complaints == []
            assert page.evaluate("document.title") != "owned"
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("[...document.images].every(each => each.naturalWidth > 0)")
            pixels = np.asarray(Image.open(BytesIO(page.picture())).convert("L"), np.float64)
            assert pixels.shape[1] == width
            assert pixels.std() > 8  # text and graphs
            assert (np.median(pixels[:, 0]) < 60) == dark
