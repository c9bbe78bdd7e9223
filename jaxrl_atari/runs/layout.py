"""Names of the files and folders of a run, suite, sweep or search, and what a directory holds (`held_kind`).

RUN_DIR/config.json     what the run is; see `description.py`
RUN_DIR/.resume.json    what the run is to be, while jobs train it: config.json, once one has made an update
RUN_DIR/trial.json      the summary of its sessions
RUN_DIR/evaluation.json the mean of an evaluation over all sessions
RUN_DIR/code/           copies of the user's own files that the run imported: NAME.py, NAME_2.py, ...
RUN_DIR/.lock           locked while a process trains in the directory; each session has a `.lock` too
RUN_DIR/session_<i>/    session i of the trial:
    metrics.csv, evaluations.csv   log points; evaluations during training (`tables.py`)
    checkpoints/<env_steps>/       see `checkpoints.py`
    actions/                       all actions, which `verify` plays again (`actions.py`)
    stopped.json, verified.json    why the session ended early; what `verify` found
    events.out.tfevents.*          for TensorBoard
    wandb_id                       the session's run on Weights & Biases
    output.txt                     the session's output, if it trained on a Ray cluster
    evaluation_<env_steps>.json    the games of an evaluation of one checkpoint
    video_<env_steps>.mp4          a further game with that checkpoint
    game_<env_steps>.html          the same game on a page, beside the network's outputs

SUITE_DIR/suite.json    what the suite is; SUITE_DIR/GAME/ is the run of a game
SWEEP_DIR/sweep.json    what the sweep is; SWEEP_DIR/SETTING/ is the suite of a setting
    results.json, results.csv, results.md    the results of the suite or sweep
SEARCH_DIR/search.json  what the search is; SEARCH_DIR/trial_<i>/ is the run of a trial
    trials.csv, trials.md    its results
    NAME_best.py             the config of its best trial
    journal.log              its trials, as Optuna writes them

A file that may not be overwritten leads to NAME_2, NAME_3, ... beside it (`files.unused`).
Each of these may have graphs/ and report.html (see `report/`). The output of a trial of a
search is in trial_<i>/output.txt.

The constants are the names that several modules need.
"""

import shlex
from pathlib import Path

# Of a run, a suite, a sweep or a search.
CONFIG_FILE = "config.json"
RESUME_FILE = ".resume.json"
"""The config.json to be of a run that jobs train."""
SUITE_FILE = "suite.json"
SWEEP_FILE = "sweep.json"
SEARCH_FILE = "search.json"
TRIAL_SUMMARY_FILE = "trial.json"
EVALUATION_SUMMARY_FILE = "evaluation.json"
HUB_VIDEO_FILE = "replay.mp4"
"""The video of a run from the Hub, which plays a file of this name on the model's page."""
CODE_FOLDER = "code"
LOCK_FILE = ".lock"
JOURNAL_FILE = "journal.log"
GRAPHS_FOLDER = "graphs"
REPORT_FILE = "report.html"
OUTPUT_FILE = "output.txt"
"""The output of a trial of a search, or of a session that trained on a Ray cluster."""

# Of a session.
METRICS_FILE = "metrics.csv"
EVALUATIONS_FILE = "evaluations.csv"
CHECKPOINTS_FOLDER = "checkpoints"
ACTIONS_FOLDER = "actions"
WANDB_FILE = "wandb_id"
STOPPED_FILE = "stopped.json"
"""What ended a session before its budget was spent, other than a stop request; see `reading.EarlyEnd`."""
VERIFIED_FILE = "verified.json"

KINDS = {CONFIG_FILE: "run", SUITE_FILE: "suite", SWEEP_FILE: "sweep", SEARCH_FILE: "search"}
"""File that describes what a directory holds -> what that is."""


def held_kind(directory: Path) -> str | None:
    """What a directory holds: `run`, `suite`, `sweep` or `search`; None if it holds none of them."""
    return next((kind for file, kind in KINDS.items() if (directory / file).is_file()), None)


def session_path(run_dir: Path, number: int) -> Path:
    """The directory of session `number` of a trial."""
    return run_dir / f"session_{number}"


def session_dirs(run_dir: Path) -> list[Path]:
    """The directories `session_<i>` of a run, ordered by i."""
    numbers = [path.name.removeprefix("session_") for path in run_dir.glob("session_*/")]
    return [run_dir / f"session_{number}" for number in sorted(filter(str.isdecimal, numbers), key=int)]


def session_number(session_dir: Path) -> int:
    """The number i of a directory `session_<i>`."""
    return int(session_dir.name.removeprefix("session_"))


def trial_dir(search_dir: Path, number: int) -> Path:
    """The directory of trial `number` of a search."""
    return search_dir / f"trial_{number}"


def session_files(session_dir: Path) -> list[str]:
    """The files and folders of a session that show that it has trained; none if it has not."""
    names = (CHECKPOINTS_FOLDER, METRICS_FILE, EVALUATIONS_FILE, ACTIONS_FOLDER)
    return [name for name in names if (session_dir / name).exists()]


def checkpoint_env_steps(session_dir: Path) -> list[int]:
    """Env steps of a session's complete checkpoints, in ascending order; none before its first one."""
    return sorted(int(path.name) for path in (session_dir / CHECKPOINTS_FOLDER).glob("*") if path.name.isdecimal())


def latest_env_steps(session_dir: Path) -> int:
    """Env steps of a session's latest checkpoint; 0 before its first one."""
    return max(checkpoint_env_steps(session_dir), default=0)


def checkpoint_path(session_dir: Path, env_steps: int) -> Path:
    """The directory of a session's checkpoint."""
    return session_dir / CHECKPOINTS_FOLDER / str(env_steps)


def meta_file(session_dir: Path, env_steps: int) -> Path:
    """The file in which orbax keeps the meta of a checkpoint."""
    return checkpoint_path(session_dir, env_steps) / "meta" / "metadata"


def video_file(evaluation: Path) -> Path:
    """The video of a game that belongs to an evaluation: video_<env_steps>.mp4 beside its file."""
    return evaluation.with_name(f"{evaluation.stem.replace('evaluation', 'video')}.mp4")


def game_file(video: Path) -> Path:
    """The page of the game in a video: game_<env_steps>.html beside it."""
    return video.with_name(f"{video.stem.replace('video', 'game')}.html")


def has_session(directory: Path) -> bool:
    """Whether a session of a run, suite or search has trained; not if every session was refused."""
    return any(map(session_files, directory.rglob("session_*/")))


def command_line(command: str, *words: str | Path) -> str:
    """A command line for the user to paste into a shell: `python -m jaxrl_atari.report DIR`."""
    return shlex.join(["python", "-m", f"jaxrl_atari.{command}", *map(str, words)])
