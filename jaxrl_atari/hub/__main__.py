"""Shares runs on the Hugging Face Hub (pip install 'jaxrl_atari[hub]').

    python -m jaxrl_atari.hub push RUN_DIR user/repo [--private]
    python -m jaxrl_atari.hub pull user/repo [DIR]

What is pushed has the layout of a run directory: config, metrics and graphs of every session, the best checkpoint of
the best session, and besides these a model card (README.md) and the newest video of that session (replay.mp4). What is
pulled is a run directory again, for `evaluate` and `plots`. HF_TOKEN and HF_ENDPOINT are respected.
"""

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari import cli
from jaxrl_atari.config import Config
from jaxrl_atari.config_files import read_config
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.policy import find_session
from jaxrl_atari.run_dir.checkpoints import Checkpoints
from jaxrl_atari.run_dir.results import session_dirs, write_trial_summary

SESSION_FILES = ("config.json", "metrics.csv", "graphs/*.png", "graphs/*.svg", "evaluation_*.json")
RUN_FILES = ("config.json", "trial.json", "graphs/*.png", "graphs/*.svg")


class Shared(NamedTuple):
    """What is pushed of a run."""

    files: dict[str, Path]  # name in the repository -> file
    card: str  # README.md
    step: int  # env steps of the checkpoint


def collect(run_dir: str | Path, repo_id: str) -> Shared:
    """Chooses what is pushed of a run, and writes its card.

    Raises:
        UserError: no run directory, or none of its sessions has a checkpoint.
    """
    run_dir = Path(run_dir)
    if (run_dir / "checkpoints").is_dir():
        raise UserError(f"{run_dir}: is a session's directory; expected the run's, {run_dir.resolve().parent}")
    best_session, _ = find_session(run_dir)
    config, summary = read_config(run_dir), write_trial_summary(run_dir)
    step = Checkpoints(best_session, read_only=True).best_step()
    if step is None:
        raise UserError(f"{best_session}: holds no complete checkpoint yet; wait for the session's first one")
    chosen = [path for pattern in RUN_FILES for path in sorted(run_dir.glob(pattern))]
    for session_dir in session_dirs(run_dir):
        chosen += [path for pattern in SESSION_FILES for path in sorted(session_dir.glob(pattern))]
    chosen += [path for path in sorted((best_session / "checkpoints" / str(step)).rglob("*")) if path.is_file()]
    files = {path.relative_to(run_dir).as_posix(): path for path in chosen}
    videos = sorted(best_session.glob("video_*.mp4"), key=lambda path: path.stat().st_mtime)
    if videos:
        files["replay.mp4"] = videos[-1]  # the name under which the Hub shows a video of an agent
    described = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    return Shared(files, model_card(repo_id, config, summary, described, files, best_session.name, step), step)


def _score(mean: float | None, std: float | None) -> str:
    return "not known" if mean is None else f"{mean:.2f} +/- {std or 0.0:.2f}"


def model_card(
    repo_id: str,
    config: Config,
    summary: dict[str, Any],
    described: dict[str, Any],
    files: dict[str, Path],
    session: str,
    step: int,
) -> str:
    """README.md: the metadata that the Hub reads (YAML), then what people want to know.

    Args:
        config: of the run.
        summary: as `write_trial_summary` returns it.
        described: all of the run's config.json.
        files: what is pushed beside the card.
        session: the session whose checkpoint is pushed.
        step: env steps of that checkpoint.
    """
    from huggingface_hub import EvalResult, ModelCardData

    game, protocol, score = summary["game"], summary["protocol"], _score(summary["score"], summary["score_std"])
    suffix = {"v5": f"ALE/{game}-v5", "classic": f"{game}NoFrameskip-v4"}[protocol]
    result = EvalResult(
        task_type="reinforcement-learning", task_name="reinforcement-learning", dataset_type=suffix,
        dataset_name=suffix, metric_type="mean_reward", metric_name="return_ma", metric_value=score,
    )  # fmt: skip
    metadata = ModelCardData(
        library_name="jaxrl_atari",
        pipeline_tag="reinforcement-learning",
        tags=["reinforcement-learning", "deep-reinforcement-learning", "ppo", "atari", "jax", suffix],
        model_name=repo_id.rpartition("/")[2],
        eval_results=None if summary["score"] is None else [result],
    )
    sessions = summary["sessions"]
    sticky = "sticky actions 0.25" if protocol == "v5" else "no sticky actions"
    versions = ", ".join(f"{name} {number}" for name, number in described.get("versions", {}).items())
    table = ["| session | return_ma at the end | env steps | games |", "|---|---:|---:|---:|"]
    for one in sessions:
        ma = "-" if one["final_return_ma"] is None else f"{one['final_return_ma']:,.2f}"
        table.append(f"| {one['session']} | {ma} | {one['env_steps']:,.0f} | {one['episodes']:,.0f} |")
    compare = [
        f"{name} {summary[key]:,.2f}"
        for key, name in (
            ("random_score", "random play"),
            ("reference_score", "SLM Lab's PPO after 10,000,000 env steps (v5)"),
            ("human_score", "a human tester"),
        )
        if summary[key] is not None
    ]
    lines = [
        "---",
        metadata.to_yaml().strip(),
        "---",
        "",
        f"# PPO on {game}",
        "",
        f"**Score {score}** (mean +/- std over {len(sessions)} session{'s' if len(sessions) > 1 else ''} of "
        "`return_ma`, the mean of the last 100 log points of the mean return of the last 100 full games, raw rewards).",
        "" if summary["complete"] else "\nThe run is **not complete**: it has not spent its budget.",
        f"Protocol: **{protocol}** ({sticky}, frame skip 4, full games of all lives, at most "
        f"{config.env.max_frames:,} frames). Budget: {summary['planned_env_steps']:,} env steps a session "
        "(1 env step = 4 emulator frames).",
        "",
        f"To compare: {'; '.join(compare) or 'no scores known'}.",
        "",
        *table,
        "",
        f"The checkpoint is the best one of {session}: env step {step:,}.",
        "",
        "```",
        f"python -m jaxrl_atari.hub pull {repo_id} {repo_id.rpartition('/')[2]}",
        f"python -m jaxrl_atari.evaluate {repo_id.rpartition('/')[2]} --video",
        "```",
        "",
        *(["![returns](graphs/trial.png)", ""] if "graphs/trial.png" in files else []),
        f"Trained with seed {summary['seed']}, lambda {described.get('gae_lambda')}, {config.env.num_envs} "
        f"environments; all of it in config.json. {versions}.",
        "",
    ]
    return "\n".join(lines)


def _library() -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise UserError("huggingface_hub is not installed; pip install 'jaxrl_atari[hub]'") from error
    disable_progress_bars()
    return huggingface_hub


@contextlib.contextmanager
def _told_in_one_line(repo_id: str, endpoint: str) -> Iterator[None]:
    """What the library raises, as `UserError`."""
    from huggingface_hub import errors

    try:
        yield
    except UserError:
        raise
    except errors.HFValidationError as error:
        raise UserError(f"{repo_id}: not the name of a repository; expected user/repo") from error
    except Exception as error:
        chain = list(_causes(error))
        if any(
            isinstance(cause, errors.RepositoryNotFoundError) for cause in chain
        ):  # the Hub does not tell the two apart
            hint = "check the name; a private one needs a token that may read it (hf auth login, or HF_TOKEN)"
            raise UserError(f"{repo_id}: no such repository on {endpoint}, or a private one; {hint}") from error
        status = next((cause.response.status_code for cause in chain if isinstance(cause, errors.HfHubHTTPError)), None)
        if status == 401:
            raise UserError(f"{endpoint} does not accept the token; make a new one and run: hf auth login") from error
        if status == 403:
            raise UserError(f"{repo_id}: the token may not do this; it needs write access to the repository") from error
        if status is not None:
            raise UserError(
                f"{repo_id}: {endpoint} answered {status} ({_reason(chain[-1])}); try again later"
            ) from error
        if any(map(_is_network, chain)):
            raise UserError(f"{endpoint} cannot be reached ({_reason(chain[-1])}); is there a network?") from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what caused it, what caused that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _reason(error: BaseException) -> str:
    """An exception in one line of bearable length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _is_network(error: BaseException) -> bool:
    """Whether a connection failed: the library has passed through three HTTP clients, whose errors share names only."""
    name = type(error).__name__
    return isinstance(error, ConnectionError | TimeoutError) or bool(re.search("Connect|Timeout|Network|Proxy", name))


def push(run_dir: str | Path, repo_id: str, private: bool = False, endpoint: str | None = None) -> str:
    """Pushes a run to a model repository, which is made if it is not there; returns its address.

    The repository then holds this run alone: files of an earlier push are removed in the same commit.

    Args:
        endpoint: address of the Hub; None: HF_ENDPOINT, else huggingface.co.

    Raises:
        UserError: no run, no token, no network, or a repository that cannot be written to.
    """
    library = _library()
    shared = collect(run_dir, repo_id)
    if library.get_token() is None:
        raise UserError("no Hugging Face token; make one with write access at huggingface.co and run: hf auth login")
    api = library.HfApi(endpoint=endpoint, library_name="jaxrl_atari")
    with _told_in_one_line(repo_id, api.endpoint):
        api.whoami()  # a bad token or no network shows here, before anything is made
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        kept = {*shared.files, "README.md", ".gitattributes"}
        stale = [name for name in api.list_repo_files(repo_id) if name not in kept]
        api.create_commit(
            repo_id,
            [
                library.CommitOperationAdd("README.md", shared.card.encode()),
                *(library.CommitOperationAdd(name, str(path)) for name, path in shared.files.items()),
                *(library.CommitOperationDelete(name) for name in stale),
            ],
            commit_message=f"{Path(run_dir).resolve().name}, checkpoint at env step {shared.step:,}",
        )
    return str(url)


def pull(repo_id: str, directory: str | Path | None = None, endpoint: str | None = None) -> Path:
    """Brings a run here, whole or not at all; returns its directory.

    Args:
        directory: where to; it must not hold anything yet. None: data/REPO.
        endpoint: as for `push`.

    Raises:
        UserError: the directory is in use, no such repository, no network, or the repository holds no run.
    """
    directory = Path("data") / repo_id.rpartition("/")[2] if directory is None else Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: is there already; name another directory, or remove it")
    library = _library()
    with _told_in_one_line(repo_id, library.HfApi(endpoint=endpoint).endpoint):
        # Into the library's cache, which goes on where a download was cut off and knows what is complete.
        snapshot = Path(library.snapshot_download(repo_id, endpoint=endpoint))
    if not (snapshot / "config.json").is_file() or not session_dirs(snapshot):
        raise UserError(f"{repo_id}: holds no run of jaxrl_atari (no config.json with session_0)")
    partial = directory.with_name(directory.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(snapshot, partial)
        if directory.exists():
            directory.rmdir()
        partial.rename(directory)
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error.strerror or error}); choose another place") from error
    return directory


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = cli.Parser(prog="python -m jaxrl_atari.hub", description="Shares runs on the Hugging Face Hub.")
    commands = parser.add_subparsers(dest="command", required=True)
    pushing = commands.add_parser("push", help="push a run")
    pushing.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run, such as data/NAME_TIMESTAMP")
    pushing.add_argument("repo_id", metavar="USER/REPO", help="model repository, made if it is not there")
    pushing.add_argument("--private", action="store_true", help="make it a private one")
    pulling = commands.add_parser("pull", help="bring a run here, to evaluate it")
    pulling.add_argument("repo_id", metavar="USER/REPO")
    pulling.add_argument("directory", metavar="DIR", nargs="?", help="where to [data/REPO]")
    options = parser.parse_args(arguments)
    if options.command == "push":
        print(f"pushed: {push(options.run_dir, options.repo_id, options.private)}")
    else:
        directory = pull(options.repo_id, options.directory)
        print(f"pulled: {directory}\nnext: python -m jaxrl_atari.evaluate {directory}")


if __name__ == "__main__":
    cli.run(lambda: main(sys.argv[1:]))
