"""The files of a repository on the Hugging Face Hub: what is shared of a run, and README.md, its model card."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_atari.config import CheckpointChoice
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.evaluate.policy import Policy, load_policy
from jaxrl_atari.report.summary import Run, read_run
from jaxrl_atari.report.tables import number_text
from jaxrl_atari.report.text import interval_text, left_out_text, reference_rows, sessions_text
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
    latest_env_steps,
)
from jaxrl_atari.runs.reading import evaluations, played_at, read_verification

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


# --- The model card ----------------------------------------------------------------------------------------------

TEMPLATE = Path(__file__).with_name("card.md")
"""Jinja template of the card; the first block of metadata is `ModelCardData`'s."""

ENVIRONMENTS = {"v5": "ALE/{}-v5", "classic": "{}NoFrameskip-v4"}
"""Protocol -> Gymnasium's id of a game under it, by which the Hub sorts models."""


def model_card(run: Run, repo_id: str, checkpoint: str, checkpoints: Mapping[str, int]) -> str:
    """The model card of a run, in Markdown. It starts with the metadata that the Hub reads.

    Args:
        run: the run.
        repo_id: the repository, USER/REPO, which the card names.
        checkpoint: as chosen by the user: best, latest, or an env step.
        checkpoints: name of a session -> env steps of its checkpoint in the repository.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    config = run.config
    summary = run.summary
    score_and_std = [value for value in (summary["score"], summary["score_std"]) if value is not None]
    score = " +/- ".join(f"{value:.2f}" for value in score_and_std)
    if run.protocol in ENVIRONMENTS:
        environment = ENVIRONMENTS[run.protocol].format(run.game.name)
    else:
        environment = f"{run.game.name} ({run.protocol})"
    is_atari = config.env.atari_game is not None
    task = "reinforcement-learning"
    tags = [task, "deep-reinforcement-learning", config.algorithm]
    tags += ["atari"] if is_atari else []
    metadata = ModelCardData(
        library_name="jaxrl_atari",
        pipeline_tag=task,
        tags=[*tags, "jax", environment],
        model_name=Path(repo_id).name,
        eval_results=[
            EvalResult(task, environment, environment, "mean_reward", score, metric_name="return_ma")
        ] if score else None,
    )  # fmt: skip
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        checkpoint=checkpoint,
        checkpoints=checkpoints,
        comparison_note=comparison_note(run.protocol),
        evaluation=_newest_evaluation(run),
        has_graph=(run.path / GRAPHS_FOLDER / "trial.png").is_file(),
        interval_text=interval_text,
        is_atari=is_atari,
        left_out=left_out_text(run),
        name=Path(repo_id).name,
        number=number_text,
        references=reference_rows(run),
        repo_id=repo_id,
        run=run,
        score=score or "unknown",
        sessions=sessions_text(run),
        summary=summary,
        verified=[path.name for path in run.tables if _is_verified(run, path)],
    )
    return str(card)


def _is_verified(run: Run, session_dir: Path) -> bool:
    """Whether `verify` has recomputed every row of a session's metrics.

    A session may be verified while it trains, and then has rows that are not.
    """
    verification = read_verification(session_dir)
    return verification is not None and verification["rows"] >= len(run.tables[session_dir]["env_steps"])


def _newest_evaluation(run: Run) -> dict[str, Any] | None:
    """The newest result of `evaluate` with the latest checkpoints of all sessions; None if there is none."""
    wanted = {
        "checkpoint": "latest",
        "sessions": [path.name for path in run.tables],
        "env_steps": [latest_env_steps(path) for path in run.tables],
    }
    of_all_sessions = [evaluation for evaluation in evaluations(run.path) if wanted.items() <= evaluation.items()]
    return of_all_sessions[-1] if of_all_sessions else None
