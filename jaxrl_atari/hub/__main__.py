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
use HF_TOKEN and HF_ENDPOINT. If the network is the user's own, `push` and `pack` need `--import FILE`.
"""

import contextlib
import fnmatch
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from jaxrl_atari import cli
from jaxrl_atari.cli.options import parse_command
from jaxrl_atari.errors import UserError, os_reason, require_package
from jaxrl_atari.hardware.gpus import forbid_gpu
from jaxrl_atari.hub.files import Checkpoint, packed_files, repository_files
from jaxrl_atari.imports import ImportNames, import_named
from jaxrl_atari.output import say
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import command_line

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


def _require_new(directory: Path) -> None:
    """Raises `UserError` if there is a file of that name, or a directory that is not empty."""
    if directory.is_file() or any(directory.glob("*")):
        raise UserError(f"{directory}: exists already; choose another directory, or remove it")


@contextlib.contextmanager
def _client(repo_id: str) -> Iterator[Any]:
    """A client of the Hub. An error in the block becomes a `UserError` that names the `VARIABLES` in force."""
    require_package("huggingface_hub", "hub")
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        yield api
    except UserError:
        raise
    except Exception as error:  # an unusable proxy, certificate or URL may raise any type
        if isinstance(error, OSError) and error.filename is not None:  # a file or folder of this machine
            raise UserError(os_reason(error)) from error
        where = f"{repo_id} at {api.endpoint}"
        in_force = [name for name in os.environ if name.upper() in VARIABLES]
        if in_force:
            where += f" (in the environment: {', '.join(in_force)})"
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error


def _require_run_repository(repo_id: str, files: set[str]) -> None:
    """Refuses a repository with these files if they are not those of a run: a push would delete them."""
    if files and not fnmatch.filter(files, CHECKPOINT_FILES):
        raise UserError(
            f"{repo_id}: has files that are not a run of jaxrl_atari, such as {min(files)!r:.80}, "
            "which a push would delete; check the name, or push to a new repository"
        )


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
    require_package("huggingface_hub", "hub")
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
        _require_run_repository(repo_id, others)
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
    _require_new(directory)
    for name, content in packed_files(run_dir, checkpoint, rounded).items():
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
    _require_new(directory)
    with _client(repo_id) as api:
        names = [file.rfilename for file in api.model_info(repo_id).siblings]
        if not fnmatch.filter(names, CHECKPOINT_FILES):
            raise UserError(f"{repo_id}: not a run of jaxrl_atari (it has no {CHECKPOINT_FILES}); check the name")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull_", dir=directory.parent) as folder:
            path = Path(api.snapshot_download(repo_id, local_dir=Path(folder, "run")))
            shutil.rmtree(path / ".cache", ignore_errors=True)  # notes of huggingface_hub
            path.rename(directory)
    say(f"pulled: {directory}\nnext: {command_line('evaluate', directory)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `python -m jaxrl_atari.hub`."""
    forbid_gpu()  # orbax starts JAX's back end to read a checkpoint; a GPU may be training
    commands = {"push": push, "pull": pull, "pack": pack}
    parse_command(commands, arguments, "hub")()


if __name__ == "__main__":
    cli.run(main)
