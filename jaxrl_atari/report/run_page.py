"""The page of a run: summary, graphs, evaluations, and the video of a game with its page."""

import base64
import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl_atari.report.evaluations import GAME_TEMPLATE, evaluations, written_at
from jaxrl_atari.report.figures import is_drawn
from jaxrl_atari.report.graphs import digest_of_run, plot_run
from jaxrl_atari.report.page_content import PageContent
from jaxrl_atari.report.summary import Run, read_run, trial_summary, verified_text
from jaxrl_atari.runs.layout import GRAPHS_FOLDER, HUB_VIDEO_FILE, game_file
from jaxrl_atari.runs.reading import latest_meta


def run_content(run_dir: Path) -> PageContent:
    """The content of the page of a run. Outdated graphs are drawn."""
    run = read_run(run_dir)
    graphs = _update_graphs(run)
    videos = [*run_dir.glob("session_*/video_*.mp4"), *run_dir.glob(HUB_VIDEO_FILE)]
    video = max(videos, key=written_at, default=None)
    values = {
        "run": run,
        "summary": trial_summary(run),
        "mean_env_steps": float(np.mean([table["env_steps"][-1] for table in run.tables.values()])),
        "graphs": graphs,
        "evaluations": [
            evaluation for directory in (run_dir, *run.tables) for evaluation in evaluations(directory)
        ],
        "verified": {path.name: verified_text(path, table) for path, table in run.tables.items()},
        "video": video,
        "game_page": video and _read_game_page(video),
        "game_file": video and game_file(video),
        "devices": {session_dir.name: latest_meta(session_dir).get("device", "") for session_dir in run.tables},
    }
    return PageContent(run.config, run.description, values)


def _update_graphs(run: Run) -> list[Path]:
    """Draws the graphs of a run if they are outdated, and returns the files that the page shows."""
    graphs = [
        run.path / GRAPHS_FOLDER / "trial.svg",
        *(path / GRAPHS_FOLDER / "session.svg" for path in run.tables),
    ]
    source = digest_of_run(run)
    if not all(is_drawn(graph, source) for graph in graphs):
        plot_run(run)
    return graphs


class GamePage(NamedTuple):
    """A page that `evaluate --video` has written, to be shown within the page of the run."""

    content: str
    script_digest: str  # of its script, for the security policy of the page of the run: `sha256-...`


def _read_game_page(video: Path) -> GamePage | None:
    """The page of the game in a video; None if there is none, or if it has the script of another version.

    The page of the run only links to pages of other versions. It allows the shipped script alone, by its digest,
    so that a run of unknown origin cannot bring a script of its own.
    """
    path = game_file(video)
    if not path.is_file():
        return None
    content = path.read_text(encoding="utf-8", errors="replace")
    script = GAME_TEMPLATE.read_text(encoding="utf-8").rpartition("<script>")[2].partition("</script>")[0]
    if f"<script>{script}</script>" not in content:
        return None
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return GamePage(content, f"sha256-{digest}")
