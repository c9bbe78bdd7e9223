"""The files of a repository: what is shared of a run, as name -> content."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxrl_atari.cli.options import CheckpointChoice
from jaxrl_atari.errors import ParametersOnly, UserError
from jaxrl_atari.evaluate.policy import Policy, load_policy
from jaxrl_atari.hub.card import model_card
from jaxrl_atari.output import say
from jaxrl_atari.report.evaluations import written_at
from jaxrl_atari.report.summary import Run, read_run
from jaxrl_atari.runs.checkpoints import Checkpoints, save_parameters
from jaxrl_atari.runs.layout import (
    ACTIONS_FOLDER,
    CODE_FOLDER,
    CONFIG_FILE,
    DIGESTS_FILE,
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

LATEST_FILES = (DIGESTS_FILE,)
"""Files of the sessions that are pushed along with the latest checkpoints, for `verify --retrain`."""

Files = dict[str, Path | bytes]
"""Files of a repository: name -> the file to copy, or the content itself."""


def policies_to_share(run: Run, checkpoint: CheckpointChoice) -> list[Policy]:
    """The policies whose checkpoints are shared: one of the best session, or with `latest` one of every
    session that has any.

    Raises:
        UserError: a checkpoint is missing or damaged.
    """
    if checkpoint != "latest":
        return [load_policy(run.path, checkpoint)]
    folders = [path for path in run.tables if checkpoint_env_steps(path)]
    for path in run.tables:
        if path not in folders:
            say(f"{path.name} has no checkpoint yet, so none is shared")
    return [load_policy(folder, checkpoint) for folder in folders or [run.path]]


def run_files(run: Run, patterns: Sequence[str]) -> Files:
    """The files of a run and of its sessions that fit one of the patterns."""
    folders = (run.path, *run.tables)
    paths = [path for folder in folders for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return {path.relative_to(run.path).as_posix(): path for path in paths}


def parameters_of(policies: Sequence[Policy]) -> Files:
    """Files with the parameters of checkpoints and nothing else."""
    files: Files = {}
    for policy in policies:
        meta = Checkpoints(policy.session_dir).read_meta(policy.env_steps)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, policy.session_dir.name)
            save_parameters(Checkpoints(copy), policy.params, meta)
            written = [path for path in copy.rglob("*") if path.is_file()]
            files |= {path.relative_to(folder).as_posix(): path.read_bytes() for path in written}
    return files


def whole_checkpoints(run: Run, policies: Sequence[Policy]) -> Files:
    """All files of the policies' checkpoints, each of which is read and checked first.

    Raises:
        UserError: an array of a checkpoint is damaged, or the run is a copy whose checkpoints are not whole.
    """
    for policy in policies:
        try:
            Checkpoints(policy.session_dir).check(policy.env_steps)
        except ParametersOnly as error:
            raise UserError(
                f"{checkpoint_path(policy.session_dir, policy.env_steps)}: holds the parameters alone, and"
                " --checkpoint latest pushes whole checkpoints; choose best or an env step"
            ) from error
    folders = [checkpoint_path(policy.session_dir, policy.env_steps) for policy in policies]
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(run.path).as_posix(): path for path in paths}


def newest_video(policies: Sequence[Policy]) -> Files:
    """The newest video of the policies' sessions, named as the Hub shows it; empty without one."""
    videos = [video for policy in policies for video in policy.session_dir.glob("video_*.mp4")]
    return {HUB_VIDEO_FILE: max(videos, key=written_at)} if videos else {}


def packed_files(run_dir: Path, checkpoint: CheckpointChoice) -> Files:
    """The files of a run that is shared without the Hub: the parameters of checkpoints, and no model card.

    Raises:
        UserError: as `repository_files`.
    """
    run = read_run(run_dir)
    policies = policies_to_share(run, checkpoint)
    return parameters_of(policies) | run_files(run, FILES) | newest_video(policies)


def repository_files(run_dir: Path, repo_id: str, checkpoint: CheckpointChoice) -> Files:
    """The contents of a repository.

    Args:
        run_dir: directory of the run.
        repo_id: the repository, which the card names.
        checkpoint: best, or an env step, of the best session; latest, of every session.

    Raises:
        UserError: the directory holds no run; the checkpoint is missing or damaged, or not whole with `latest`.
    """
    run = read_run(run_dir)
    policies = policies_to_share(run, checkpoint)
    checkpoints = {policy.session_dir.name: policy.env_steps for policy in policies}
    card = model_card(run, repo_id, str(checkpoint), checkpoints)
    if checkpoint == "latest":
        files = whole_checkpoints(run, policies) | run_files(run, FILES + LATEST_FILES)
    else:
        files = parameters_of(policies) | run_files(run, FILES)
    return files | newest_video(policies) | {"README.md": card.encode()}
