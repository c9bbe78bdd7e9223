"""The command `hub`: pushes, pulls and packs runs for the Hugging Face Hub (pip install 'jaxrl_atari[hub]').

    python -m jaxrl_atari.hub push RUN_DIR user/repo [--private] [--checkpoint best|latest|STEP]
    python -m jaxrl_atari.hub pull user/repo [DIR]
    python -m jaxrl_atari.hub pack RUN_DIR DIR [--checkpoint best|STEP] [--rounded]

A repository has the layout of a run directory:

- config, metrics, evaluations, graphs, logs of actions, and the user's own code
- the parameters of one checkpoint of the best session; with `--checkpoint latest`, the whole latest checkpoint of
  every session
- a model card (README.md), and the newest video of these sessions (replay.mp4)

`pull` downloads a repository into a run directory, for `evaluate`, `verify`, `plots` and, with the latest
checkpoints, `train --resume`. `pack` writes the files of a push to a folder, without the Hub. `push` and `pull`
use HF_TOKEN and HF_ENDPOINT. A run with a network of the user's own needs `--import FILE`, as in every command.
"""

import contextlib
import fnmatch
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from jaxrl_atari import cli
from jaxrl_atari.cli.options import parse_command
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.policy import Policy, load_policy
from jaxrl_atari.hardware.gpus import forbid_gpu
from jaxrl_atari.imports import ImportNames, import_named
from jaxrl_atari.output import say
from jaxrl_atari.report.card import model_card
from jaxrl_atari.report.evaluations import written_at
from jaxrl_atari.report.summary import Run, read_run
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import (
    CONFIG_FILE,
    DIGESTS_FILE,
    STOPPED_FILE,
    TRIAL_FILE,
    VERIFIED_FILE,
    checkpoint_env_steps,
    checkpoint_path,
)

Checkpoint = Literal["best", "latest"] | int

FILES = (
    CONFIG_FILE,
    TRIAL_FILE,
    STOPPED_FILE,
    VERIFIED_FILE,
    "metrics.csv",
    "evaluation*",
    "graphs/*",
    "actions/*",
    "code/*",
    "replay.mp4",
)
"""Files of a run and of its sessions that are pushed along with the checkpoints."""

LATEST_FILES = (DIGESTS_FILE,)
"""Files of the sessions that are pushed along with the latest checkpoints, for `verify --retrain`."""

CHECKPOINT_FILES = "session_*/checkpoints/*/*"
"""A repository without such a file holds no run."""

STANDARD_FILES = {".gitattributes", "README.md"}
"""Files that any repository on the Hub may have: Git attributes and its card."""

VARIABLES = (
    "ALL_PROXY",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
)
"""Environment variables that affect the connection to the Hub. Those of proxies may be in lower case."""

LEFT_OUT = (
    "left out: the optimiser state, the random key and the games in progress, "
    "so a copy can be played and verified but not resumed"
)
"""What a push leaves out of a checkpoint, unless it pushes the latest ones."""

Files = dict[str, Path | bytes]
"""Files of a repository: name -> the file to copy, or the content itself."""


def _require_library() -> None:
    """Raises `UserError` unless huggingface_hub is installed."""
    if find_spec("huggingface_hub") is None:
        raise UserError("huggingface_hub is not installed; pip install 'jaxrl_atari[hub]'")


@contextlib.contextmanager
def _client(repo_id: str) -> Iterator[Any]:
    """A client of the Hub. An error in the block becomes a `UserError` that names the `VARIABLES` in force."""
    _require_library()
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        yield api
    except UserError:
        raise
    except Exception as error:  # an unusable proxy, certificate or URL may raise any type
        if isinstance(error, OSError) and error.filename is not None:  # a file or folder of this machine
            raise UserError(f"{error.filename}: {error.strerror}") from error
        where = f"{repo_id} at {api.endpoint}"
        in_force = [name for name in os.environ if name.upper() in VARIABLES]
        if in_force:
            where += f" (in the environment: {', '.join(in_force)})"
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error


def load_policies(run: Run, checkpoint: Checkpoint) -> list[Policy]:
    """The policies whose checkpoints are shared: one of the best session, or with `latest` one of every session.

    Raises:
        UserError: a checkpoint is missing or damaged.
    """
    folders = [path for path in run.tables if checkpoint_env_steps(path)] if checkpoint == "latest" else []
    return [load_policy(folder, checkpoint) for folder in folders or [run.path]]


def run_files(run: Run, patterns: Sequence[str]) -> Files:
    """The files of a run and of its sessions that fit one of the patterns."""
    folders = (run.path, *run.tables)
    paths = [path for folder in folders for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return {path.relative_to(run.path).as_posix(): path for path in paths}


def parameters_of(policies: Sequence[Policy], rounded: bool = False) -> Files:
    """Files with the parameters of checkpoints and nothing else. `rounded`: see `Checkpoints.save_parameters`."""
    files: Files = {}
    for policy in policies:
        meta = Checkpoints(policy.session_dir).read_meta(policy.env_steps)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, policy.session_dir.name)
            Checkpoints(copy).save_parameters(policy.params, meta, rounded)
            written = [path for path in copy.rglob("*") if path.is_file()]
            files |= {path.relative_to(folder).as_posix(): path.read_bytes() for path in written}
    return files


def whole_checkpoints(run: Run, policies: Sequence[Policy]) -> Files:
    """All files of the policies' checkpoints."""
    folders = [checkpoint_path(policy.session_dir, policy.env_steps) for policy in policies]
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(run.path).as_posix(): path for path in paths}


def newest_video(policies: Sequence[Policy]) -> Files:
    """The newest video of the policies' sessions, named as the Hub shows it; empty without one."""
    videos = [video for policy in policies for video in policy.session_dir.glob("video_*.mp4")]
    return {"replay.mp4": max(videos, key=written_at)} if videos else {}


def repository_files(run_dir: Path, repo_id: str, checkpoint: Checkpoint) -> Files:
    """The contents of a repository.

    Args:
        run_dir: directory of the run.
        repo_id: the repository, which the card names.
        checkpoint: best, or an env step, of the best session; latest, of every session.

    Raises:
        UserError: the directory holds no run, or the checkpoint is missing or damaged.
    """
    run = read_run(run_dir)
    policies = load_policies(run, checkpoint)
    checkpoints = {policy.session_dir.name: policy.env_steps for policy in policies}
    card = model_card(run, repo_id, str(checkpoint), checkpoints)
    if checkpoint == "latest":
        files = whole_checkpoints(run, policies) | run_files(run, FILES + LATEST_FILES)
    else:
        files = parameters_of(policies) | run_files(run, FILES)
    return files | newest_video(policies) | {"README.md": card.encode()}


def push(
    run_dir: Positional[Path],
    repo_id: Positional[str],
    private: bool = False,
    checkpoint: Checkpoint = "best",
    imports: ImportNames = (),
) -> None:
    """Pushes a run to a model repository, which is created if it does not exist.

    Afterwards the repository has only this run: the same commit removes the files of an earlier push.

    Args:
        run_dir: directory of a run, such as data/NAME_TIMESTAMP
        repo_id: model repository, USER/REPO
        private: create a private repository, and refuse an existing public one
        checkpoint: best, or an env step, of the best session; latest, of every session
        imports: module, or path of a Python file, that registers the run's network
    """
    import_named(imports)
    _require_library()
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    files = repository_files(run_dir, repo_id, checkpoint)
    with _client(repo_id) as api:
        api.whoami()  # fails on a bad token, before anything is created
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:  # `create_repo` leaves an existing repository as it is
            raise UserError(
                f"{repo_id}: a public repository; make it private at {url}/settings, or omit --private"
            )
        others = set(api.list_repo_files(repo_id)) - STANDARD_FILES
        if others and not fnmatch.filter(others, CHECKPOINT_FILES):
            raise UserError(
                f"{repo_id}: has files that are not a run of jaxrl_atari, such as {min(others)!r:.80}, "
                "which a push would delete; check the name, or push to a new repository"
            )
        added = [CommitOperationAdd(*item) for item in files.items()]
        api.create_commit(
            repo_id,
            [*added, *map(CommitOperationDelete, others - files.keys())],
            commit_message=f"{run_dir.resolve().name}, checkpoint {checkpoint}",
        )
    if checkpoint != "latest":
        say(f"{LEFT_OUT}; --checkpoint latest pushes everything")
    say(f"pushed: {url}")


def pack(
    run_dir: Positional[Path],
    directory: Positional[Path],
    checkpoint: Literal["best"] | int = "best",
    rounded: bool = False,
    imports: ImportNames = (),
) -> None:
    """Writes the files of a push, without a model card, to a new folder, to share a run without the Hub.

    Args:
        run_dir: directory of a run, such as data/NAME_TIMESTAMP
        directory: new or empty directory
        checkpoint: best, or an env step, of the best session
        rounded: halve the size of the parameters, for a run that computed in bfloat16: round the largest kernel
            to bfloat16; a machine that computes in float32 then uses the rounded kernel
        imports: module, or path of a Python file, that registers the run's network
    """
    import_named(imports)
    if directory.is_file() or any(directory.glob("*")):
        raise UserError(f"{directory}: exists already; choose another directory, or remove it")
    run = read_run(run_dir)
    policies = load_policies(run, checkpoint)
    files = parameters_of(policies, rounded) | run_files(run, FILES) | newest_video(policies)
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content if isinstance(content, bytes) else content.read_bytes())
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    say(f"{LEFT_OUT}\npacked: {directory} ({size / 1e6:.1f} MB)")


def pull(repo_id: Positional[str], directory: Positional[Path | None] = None) -> None:
    """Downloads a run, completely or not at all.

    Args:
        repo_id: model repository, USER/REPO
        directory: new or empty directory of the run; data/REPO if it is left out
    """
    directory = directory or Path("data", Path(repo_id).name)
    if directory.is_file() or any(directory.glob("*")):
        raise UserError(f"{directory}: exists already; choose another directory, or remove it")
    with _client(repo_id) as api:
        names = [file.rfilename for file in api.model_info(repo_id).siblings]
        if not fnmatch.filter(names, CHECKPOINT_FILES):
            raise UserError(f"{repo_id}: not a run of jaxrl_atari (it has no {CHECKPOINT_FILES}); check the name")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull_", dir=directory.parent) as folder:
            path = Path(api.snapshot_download(repo_id, local_dir=Path(folder, "run")))
            shutil.rmtree(path / ".cache", ignore_errors=True)  # notes of huggingface_hub
            path.rename(directory)
    say(f"pulled: {directory}\nnext: python -m jaxrl_atari.evaluate {directory}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m jaxrl_atari.hub`."""
    forbid_gpu()  # orbax starts JAX's back end to read a checkpoint; a GPU may be training
    commands = {"push": push, "pull": pull, "pack": pack}
    parse_command(commands, arguments, "hub")()


if __name__ == "__main__":
    cli.run(main)
