"""Runs on the Hugging Face Hub: push and pull (pip install 'jaxrl_atari[hub]').

    python -m jaxrl_atari.hub push RUN_DIR user/repo [--private] [--checkpoint best|latest|STEP]
    python -m jaxrl_atari.hub pull user/repo [DIR]

A repository has the layout of a run directory: config, metrics and graphs of every session, and one checkpoint of the
best session; with `--checkpoint latest`, the latest one of every session. It also has a model card (README.md) and the
newest video of the best session (replay.mp4). `pull` turns it into a run directory, for `evaluate`, `plots` and, with
the latest checkpoints, `train --resume`. HF_TOKEN and HF_ENDPOINT are respected.
"""

import argparse
import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxrl_atari import cli
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.hardware.jax_gpus import forbid_gpu
from jaxrl_atari.hub.card import model_card
from jaxrl_atari.report.summary import counted_sessions, write_trial_summary
from jaxrl_atari.runs.run_dir import checkpoint_steps, read_config, session_dirs

SESSION_FILES = ("config.json", "metrics.csv", "graphs/*.png", "graphs/*.svg", "evaluation_*.json", "evaluations.csv")
RUN_FILES = ("config.json", "trial.json", "evaluation*.json", "graphs/*.png", "graphs/*.svg")

STANDARD_FILES = (".gitattributes", "README.md")
"""Files that any repository on the Hub may have: its Git attributes and its card."""

MAX_FILES, MAX_FILE_BYTES, MAX_BYTES = 10_000, 1 << 30, 8 << 30
"""Limits of `pull`. A session has tens of files; a checkpoint of the largest network here has less than 100 MB."""


class Upload(NamedTuple):
    """Contents of a repository."""

    files: dict[str, Path]  # name in the repository -> file
    card: str  # README.md
    checkpoints: dict[Path, int]  # session directory -> env steps of its checkpoint


def collect(run_dir: str | Path, repo_id: str, checkpoint: Literal["best", "latest"] | int = "best") -> Upload:
    """Chooses the files of a run to push, and makes the model card.

    Args:
        checkpoint: as for `load_policy`: of the best session; `latest`: of every session that has one.

    Raises:
        UserError: not a run directory, or none of its sessions has such a checkpoint, or it is damaged.
    """
    run_dir = Path(run_dir)
    if (run_dir / "checkpoints").is_dir():
        raise UserError(f"{run_dir}: the directory of a session; expected that of the run, {run_dir.resolve().parent}")
    cpu = jax.devices("cpu")[0]
    policy = load_policy(run_dir, checkpoint, cpu)  # of the best session; verifies the checkpoint
    best_session, checkpoints = policy.session_dir, {policy.session_dir: policy.env_steps}
    summary = write_trial_summary(run_dir)
    chosen = [path for pattern in RUN_FILES for path in sorted(run_dir.glob(pattern))]
    for session_dir in counted_sessions(run_dir, read_config(run_dir)):
        chosen += [path for pattern in SESSION_FILES for path in sorted(session_dir.glob(pattern))]
        if checkpoint == "latest" and session_dir != best_session and checkpoint_steps(session_dir):
            checkpoints[session_dir] = load_policy(session_dir, "latest", cpu).env_steps
    for session_dir, step in checkpoints.items():
        checkpoint_dir = session_dir / "checkpoints" / str(step)
        saved = [path for path in sorted(checkpoint_dir.rglob("*")) if path.is_file()]
        if not saved:  # `load_policy` has just read it
            raise UserError(f"{checkpoint_dir}: training has replaced this checkpoint; try again")
        chosen += saved
    files = {path.relative_to(run_dir).as_posix(): path for path in chosen}
    videos = sorted(best_session.glob("video_*.mp4"), key=lambda path: path.stat().st_mtime)
    if (pulled := run_dir / "replay.mp4").is_file():
        videos.insert(0, pulled)
    if videos:
        files["replay.mp4"] = videos[-1]  # the Hub shows a video of this name
    card = model_card(repo_id, run_dir, summary, checkpoints, is_best=checkpoint == "best")
    return Upload(files, card, checkpoints)


def _library() -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise UserError("huggingface_hub is not installed; pip install 'jaxrl_atari[hub]'") from error
    disable_progress_bars()
    return huggingface_hub


@contextlib.contextmanager
def _errors_in_one_line(repo_id: str, endpoint: str) -> Iterator[None]:
    """Turns the library's exceptions into `UserError`."""
    from huggingface_hub import errors

    try:
        yield
    except UserError:
        raise
    except errors.HFValidationError as error:
        raise UserError(f"{repo_id}: not a repository name; expected user/repo") from error
    except Exception as error:
        chain = list(_causes(error))
        if any(isinstance(cause, errors.RepositoryNotFoundError) for cause in chain):
            # The Hub gives the same answer for a missing and a private repository.
            hint = "check the name; a private one needs a token with read access (hf auth login, or HF_TOKEN)"
            raise UserError(f"{repo_id}: no such repository on {endpoint}, or a private one; {hint}") from error
        status = next((cause.response.status_code for cause in chain if isinstance(cause, errors.HfHubHTTPError)), None)
        if status == 401:
            raise UserError(f"{endpoint} does not accept the token; create a new one and run: hf auth login") from error
        if status == 403:
            raise UserError(f"{repo_id}: the token lacks permission; it needs write access") from error
        if status is not None:
            raise UserError(
                f"{repo_id}: {endpoint} answered {status} ({_reason(chain[-1])}); try again later"
            ) from error
        if any(map(_is_network, chain)):
            raise UserError(f"{endpoint} cannot be reached ({_reason(chain[-1])}); is there a network?") from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and the chain of its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def _reason(error: BaseException) -> str:
    """An exception in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _is_network(error: BaseException) -> bool:
    """Whether a connection failed. The library has used three HTTP clients, whose errors share only parts of names."""
    names = " ".join(each.__name__ for each in type(error).__mro__)
    return bool(re.search("Connect|Timeout|Network|Proxy|Transport", names))


def _check_replaceable(repo_id: str, names: Sequence[str]) -> None:
    """Raises `UserError` if a repository has files but no run: under a mistyped name, a push would delete a model."""
    others = [name for name in names if name not in STANDARD_FILES]
    if others and not any(re.match(r"session_\d+/checkpoints/\d+/", name) for name in others):  # every push has one
        raise UserError(
            f"{repo_id}: has files that are not a run of jaxrl_atari, such as {others[0]!r:.80}, which a push would "
            "delete; check the name, or push to a new repository; nothing was pushed"
        )


def push(
    run_dir: str | Path,
    repo_id: str,
    private: bool = False,
    endpoint: str | None = None,
    checkpoint: Literal["best", "latest"] | int = "best",
) -> str:
    """Pushes a run to a model repository, which is created if it does not exist; returns its URL.

    The repository then has this run only: files of an earlier push are removed in the same commit.

    Args:
        private: create a private repository, and refuse an existing public one. False: a new repository is public
            unless its organization's default is private.
        endpoint: URL of the Hub; None: HF_ENDPOINT, else huggingface.co.
        checkpoint: as for `collect`.

    Raises:
        UserError: no run, no token, no network, no write access to the repository, a repository with files but no run,
            or a public one where `private` was asked for.
    """
    library = _library()
    upload = collect(run_dir, repo_id, checkpoint)
    if library.get_token() is None:
        raise UserError("no Hugging Face token; create one with write access at huggingface.co and run: hf auth login")
    api = library.HfApi(endpoint=endpoint, library_name="jaxrl_atari")
    with _errors_in_one_line(repo_id, api.endpoint):
        api.whoami()  # fails on a bad token or no network, before anything is created
        try:
            added = [library.CommitOperationAdd(name, str(path)) for name, path in upload.files.items()]
        except (ValueError, OSError) as error:
            raise UserError(f"{run_dir}: training has replaced a file meanwhile ({error}); try again") from error
        newest = max(upload.checkpoints.values())
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:  # `create_repo` leaves an existing repository as it is
            raise UserError(
                f"{repo_id}: a public repository; make it private at {url}/settings, or leave out --private; "
                "nothing was pushed"
            )
        present = api.list_repo_files(repo_id)
        _check_replaceable(repo_id, present)
        stale = [name for name in present if name not in {*upload.files, *STANDARD_FILES}]
        api.create_commit(
            repo_id,
            [
                library.CommitOperationAdd("README.md", upload.card.encode()),
                *added,
                *(library.CommitOperationDelete(name) for name in stale),
            ],
            commit_message=f"{Path(run_dir).resolve().name}, checkpoint at env step {newest:,}",
        )
    return str(url)


def _check_sizes(repo_id: str, sizes: Mapping[str, int]) -> None:
    """Raises `UserError` unless these files may be downloaded: name in the repository -> bytes."""
    for name, size in sizes.items():
        if {"", ".", ".."} & set(name.split("/")) or re.search(r"[\\:\x00-\x1f]", name):
            raise UserError(f"{repo_id}: has a file named {name!r:.80}, which is not a plain path; nothing was pulled")
        if size > MAX_FILE_BYTES:
            raise UserError(
                f"{repo_id}: {name} has {size:,} bytes, more than the limit of {MAX_FILE_BYTES:,}; nothing was pulled"
            )
    if len(sizes) > MAX_FILES or sum(sizes.values()) > MAX_BYTES:
        raise UserError(
            f"{repo_id}: has {len(sizes):,} files of {sum(sizes.values()):,} bytes, more than the limit of "
            f"{MAX_FILES:,} files and {MAX_BYTES:,} bytes; nothing was pulled"
        )


def _checked_files(repo_id: str, snapshot: Path) -> dict[str, Path]:
    """The files of a download: name -> path. The library's cache has links to its own files; others are refused."""
    cache = snapshot.parent.parent.resolve()  # CACHE/models--USER--REPO/snapshots/COMMIT
    files = {}
    for path in sorted(snapshot.rglob("*")):
        name, target = path.relative_to(snapshot).as_posix(), path.resolve()
        if (path.is_symlink() and not target.is_file()) or not target.is_relative_to(cache):
            raise UserError(f"{repo_id}: {name} is a link to another place; nothing was pulled")
        if target.is_file():
            files[name] = target
    _check_sizes(repo_id, {name: path.stat().st_size for name, path in files.items()})
    return files


def pull(repo_id: str, directory: str | Path | None = None, endpoint: str | None = None) -> Path:
    """Downloads a run, completely or not at all; returns its directory.

    Args:
        directory: a new or empty directory. None: data/REPO.
        endpoint: as for `push`.

    Raises:
        UserError: the directory is not empty, no such repository, no network, or a repository without a run, with a
            path that leaves the directory, or beyond the limits.
    """
    directory = Path("data") / repo_id.rpartition("/")[2] if directory is None else Path(directory)
    if directory.name in ("", ".."):
        raise UserError(f"{directory}: expected the name of a new directory; leave it out for data/REPO")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: exists already; choose another directory, or remove it")
    library = _library()
    api = library.HfApi(endpoint=endpoint)
    with _errors_in_one_line(repo_id, api.endpoint):
        revision = api.model_info(repo_id).sha
        entries = api.list_repo_tree(repo_id, recursive=True, revision=revision)
        sizes = {entry.path: entry.size for entry in entries if hasattr(entry, "size")}
        _check_sizes(repo_id, sizes)
        # The library's cache resumes an interrupted download.
        snapshot = Path(library.snapshot_download(repo_id, revision=revision, endpoint=endpoint))
    files = _checked_files(repo_id, snapshot)
    if missing := sizes.keys() - files.keys():  # where the connection fails, the library may return what it has
        raise UserError(f"{repo_id}: the download is incomplete, {min(missing)} is missing; try again")
    if not (snapshot / "config.json").is_file() or not session_dirs(snapshot):
        raise UserError(f"{repo_id}: not a run of jaxrl_atari (expected config.json and session_0); check the name")
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    try:
        for name, path in files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, partial / name)
        if directory.exists():
            directory.rmdir()
        partial.rename(directory)
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error.strerror or error}); choose another one") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _checkpoint(text: str) -> Literal["best", "latest"] | int:
    if text == "best" or text == "latest":
        return text
    if not text.isdecimal():
        raise UserError(f"--checkpoint {text}: expected best, latest or an env step")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_atari.hub", description="Runs on the Hugging Face Hub.")
    commands = parser.add_subparsers(dest="command", required=True)
    push_parser = commands.add_parser("push", help="upload a run")
    push_parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run, such as data/NAME_TIMESTAMP")
    push_parser.add_argument("repo_id", metavar="USER/REPO", help="model repository, created if it does not exist")
    push_parser.add_argument("--private", action="store_true", help="create a private repository; refuse a public one")
    push_parser.add_argument(
        "--checkpoint",
        type=_checkpoint,
        default="best",
        help="of the best session: best, or an env step; of every session: latest [best]",
    )
    pull_parser = commands.add_parser("pull", help="download a run, to evaluate it")
    pull_parser.add_argument("repo_id", metavar="USER/REPO")
    pull_parser.add_argument("directory", metavar="DIR", nargs="?", help="new directory of the run [data/REPO]")
    options = parser.parse_args(arguments)
    forbid_gpu()  # orbax starts JAX's back end to read a checkpoint; a GPU may be training
    if options.command == "push":
        print(f"pushed: {push(options.run_dir, options.repo_id, options.private, checkpoint=options.checkpoint)}")
    else:
        directory = pull(options.repo_id, options.directory)
        print(f"pulled: {directory}\nnext: python -m jaxrl_atari.evaluate {directory}")


if __name__ == "__main__":
    cli.run(main)
