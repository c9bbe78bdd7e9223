"""The command `hub`: pushes and pulls runs to and from the Hugging Face Hub (pip install 'jaxrl_atari[hub]').

    python -m jaxrl_atari.hub push RUN_DIR user/repo [--private] [--checkpoint best|latest|STEP]
    python -m jaxrl_atari.hub pull user/repo [DIR]

docs/share.md says what a repository has. Both commands use HF_TOKEN and HF_ENDPOINT.
"""

import contextlib
import dataclasses
import fnmatch
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxrl_atari import cli
from jaxrl_atari.cli.options import RunDir, WithImports, parse
from jaxrl_atari.config import CheckpointChoice
from jaxrl_atari.errors import UserError, require_package
from jaxrl_atari.hardware.gpus import limit_to_cpu
from jaxrl_atari.hub.files import fill_repository
from jaxrl_atari.output import say
from jaxrl_atari.runs.files import require_new_folder
from jaxrl_atari.runs.layout import command_line

CHECKPOINT_FILES = "session_*/checkpoints/*/*"
"""A repository of `push` has such a file; one without holds no run."""

STANDARD_FILES = {".gitattributes", "README.md"}
"""Files that any repository on the Hub may have: Git attributes and its card."""


PURPOSES = {
    "push": "push a run to a model repository of the Hugging Face Hub",
    "pull": "download a run from the Hub",
}
"""Commands of `hub` -> what they do."""

RepoId = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="USER/REPO")]
"""The type of an argument that names a repository."""


@dataclasses.dataclass(frozen=True)
class PushOptions(WithImports):
    """Pushes a run to a model repository, which is created if it does not exist.

    Afterwards the repository has only this run: the same commit removes the files of an earlier push.
    """

    run_dir: RunDir
    """Directory of a run, such as data/NAME_TIMESTAMP."""
    repo_id: RepoId
    """Model repository on the Hub."""
    private: bool = False
    """Create a private repository, and refuse an existing public one."""
    checkpoint: CheckpointChoice = "best"
    """`best` or an env step: the parameters of this checkpoint of the best session. `latest`: the whole latest
    checkpoint of every session."""


@dataclasses.dataclass(frozen=True)
class PullOptions:
    """Downloads a run, completely or not at all."""

    repo_id: RepoId
    """Model repository on the Hub."""
    directory: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = None
    """New or empty directory of the run. None: data/REPO."""


@contextlib.contextmanager
def _client(repo_id: str) -> Iterator[Any]:
    """A client of the Hub. An error in the block becomes a `UserError` that names the server."""
    require_package("huggingface_hub", "hub")
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        yield api
    except UserError:
        raise
    except Exception as error:  # an unusable proxy, certificate or URL may raise any type
        raise UserError(f"{repo_id} at {api.endpoint}: {type(error).__name__}: {error}") from error


def push(options: PushOptions) -> None:
    """Pushes a run; see `PushOptions`."""
    repo_id = options.repo_id
    require_package("huggingface_hub", "hub")
    with contextlib.ExitStack() as exits:
        folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="jaxrl_atari_hub_"))
        fill_repository(Path(folder), options.run_dir, repo_id, options.checkpoint)
        api = exits.enter_context(_client(repo_id))
        api.whoami()  # fails on a bad token, before anything is created
        url = api.create_repo(repo_id, private=options.private or None, exist_ok=True)
        # `create_repo` leaves an existing repository as it is.
        if options.private and not api.model_info(repo_id).private:
            raise UserError(
                f"{repo_id}: a public repository; make it private at {url}/settings, or omit --private"
            )
        files = set(api.list_repo_files(repo_id)) - STANDARD_FILES
        if files and not fnmatch.filter(files, CHECKPOINT_FILES):
            raise UserError(
                f"{repo_id}: has files that are not a run of jaxrl_atari, such as {min(files)!r:.80}, "
                "which a push would delete; check the name, or push to a new repository"
            )
        message = f"{options.run_dir.resolve().name}, checkpoint {options.checkpoint}"
        api.upload_folder(repo_id=repo_id, folder_path=folder, delete_patterns="*", commit_message=message)
    if options.checkpoint != "latest":
        say(
            "left out: the optimiser state, the random key and the games in progress, so a copy can be played and"
            " verified but not resumed; --checkpoint latest pushes everything"
        )
    say(f"pushed: {url}")


def pull(options: PullOptions) -> None:
    """Downloads a run; see `PullOptions`."""
    repo_id = options.repo_id
    directory = options.directory or Path("data", Path(repo_id).name)
    require_new_folder(directory)
    with _client(repo_id) as api:
        names = [file.rfilename for file in api.model_info(repo_id).siblings]
        if not fnmatch.filter(names, CHECKPOINT_FILES):
            raise UserError(f"{repo_id}: not a run of jaxrl_atari (it has no {CHECKPOINT_FILES}); check the name")
        directory.parent.mkdir(parents=True, exist_ok=True)
        beside = directory if directory.is_dir() else directory.parent  # on the same file system
        with tempfile.TemporaryDirectory(prefix=".partial_", dir=beside) as hidden:
            api.snapshot_download(repo_id, local_dir=hidden)
            shutil.rmtree(Path(hidden, ".cache"), ignore_errors=True)  # notes of huggingface_hub
            directory.mkdir(exist_ok=True)
            for path in list(Path(hidden).iterdir()):
                path.rename(directory / path.name)
    say(f"pulled: {directory}\nnext: {command_line('evaluate', directory)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m jaxrl_atari.hub`."""
    limit_to_cpu()  # orbax starts JAX's back end to read a checkpoint; a GPU may be training
    command, *words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command == "push":
        push(parse(PushOptions, words, "hub push"))
    elif command == "pull":
        pull(parse(PullOptions, words, "hub pull"))
    else:
        cli.list_commands([command], PURPOSES, "python -m jaxrl_atari.hub ")


if __name__ == "__main__":
    cli.run(main)
