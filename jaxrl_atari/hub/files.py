"""The files of a repository: what is shared of a run, written to a folder."""

import shutil
from pathlib import Path

from jaxrl_atari.cli.options import CheckpointChoice
from jaxrl_atari.evaluate.policy import Policy, load_policy
from jaxrl_atari.hub.card import model_card
from jaxrl_atari.report.evaluations import played_at
from jaxrl_atari.report.summary import Run, read_run
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.layout import (
    ACTIONS_FOLDER,
    CODE_FOLDER,
    CONFIG_FILE,
    EVALUATIONS_FILE,
    GRAPHS_FOLDER,
    HUB_VIDEO_FILE,
    METRICS_FILE,
    STOPPED_FILE,
    TRIAL_SUMMARY_FILE,
    VERIFIED_FILE,
    checkpoint_env_steps,
    checkpoint_path,
)

FILES = (
    CONFIG_FILE,
    TRIAL_SUMMARY_FILE,
    STOPPED_FILE,
    VERIFIED_FILE,
    METRICS_FILE,
    EVALUATIONS_FILE,
    "evaluation*.json",
    f"{GRAPHS_FOLDER}/*",
    f"{ACTIONS_FOLDER}/*",
    f"{CODE_FOLDER}/*",
    HUB_VIDEO_FILE,
)
"""Files of a run and of its sessions that are pushed along with the checkpoints."""


def fill_repository(folder: Path, run_dir: Path, repo_id: str, checkpoint: CheckpointChoice) -> None:
    """Writes the files of a repository.

    Args:
        folder: an empty folder, which gets them.
        run_dir: directory of the run.
        repo_id: the repository, which the card names.
        checkpoint: best, or an env step, of the best session; latest, of every session.

    Raises:
        UserError: the directory holds no run; the checkpoint is missing or damaged, or not whole with `latest`.
    """
    run = read_run(run_dir)
    policies = _policies(run, checkpoint)
    for directory in (run.path, *run.tables):
        for path in (found for pattern in FILES for found in directory.glob(pattern) if found.is_file()):
            copy = folder / path.relative_to(run.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    for policy in policies:
        checkpoints = Checkpoints(policy.session_dir)
        copy = folder / policy.session_dir.name
        if checkpoint == "latest":
            whole = checkpoints.read(policy.env_steps)  # compares it with its digests
            shutil.copytree(whole.path, checkpoint_path(copy, policy.env_steps))
        else:
            meta = checkpoints.read_meta(policy.env_steps) | {"parameters_only": True}
            arrays = {"train_state": {"params": policy.params}}  # 7 MB instead of 20 for `nature`
            Checkpoints(copy).save(policy.env_steps, {"arrays": arrays}, meta, meta["score"])
    videos = [video for policy in policies for video in policy.session_dir.glob("video_*.mp4")]
    if videos:
        shutil.copyfile(max(videos, key=played_at), folder / HUB_VIDEO_FILE)  # which the Hub shows
    steps = {policy.session_dir.name: policy.env_steps for policy in policies}
    (folder / "README.md").write_text(model_card(run, repo_id, str(checkpoint), steps), encoding="utf-8")


def _policies(run: Run, checkpoint: CheckpointChoice) -> list[Policy]:
    """The policies whose checkpoints are shared: one of the best session; with `latest`, of each that has any.

    Raises:
        UserError: a checkpoint is missing or damaged.
    """
    if checkpoint != "latest":
        return [load_policy(run.path, checkpoint)]
    folders = [path for path in run.tables if checkpoint_env_steps(path)]
    return [load_policy(folder, checkpoint) for folder in folders or [run.path]]
