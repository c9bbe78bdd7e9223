"""Model card of a run: README.md of its repository, from the template model_card.md."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from jaxrl_atari.cli import counted
from jaxrl_atari.report.summary import evaluated_at, newest_evaluation, seeds_text, sessions_text
from jaxrl_atari.runs.files import read_json
from jaxrl_atari.runs.run_dir import read_config


def model_card(
    repo_id: str, run_dir: Path, summary: dict[str, Any], checkpoints: Mapping[Path, int], is_best: bool
) -> str:
    """Fills in the template. The card starts with the metadata that the Hub reads (YAML).

    Args:
        summary: the result of `write_trial_summary`.
        checkpoints: session directory -> env steps of its checkpoint that is pushed.
        is_best: whether the checkpoint is the best one of the best session.
    """
    template = resources.files("jaxrl_atari.hub").joinpath("model_card.md").read_text(encoding="utf-8")
    config, description = read_config(run_dir), read_json(run_dir / "config.json")
    rules = config.env.rules
    mean, std = summary["score"], summary["score_std"]
    score = "unknown" if mean is None else f"{mean:.2f}" if std is None else f"{mean:.2f} +/- {std:.2f}"
    repo_name = repo_id.rpartition("/")[2]
    rows = []
    for session_summary in summary["sessions"]:
        final = session_summary["final_return_ma"]
        text = "-" if final is None else f"{final:,.2f}"
        env_steps, episodes = session_summary["env_steps"], session_summary["episodes"]
        rows.append(f"| {session_summary['session']} | {text} | {env_steps:,.0f} | {episodes:,.0f} |")
    references = {
        "random play": summary["random_score"],
        "SLM Lab's PPO after 10,000,000 env steps (v5)": summary["reference_score"],
        "the same in SLM Lab's tutorial": summary["tutorial_score"],
        "a human tester": summary["human_score"],
    }
    versions = description.get("versions")
    versions = versions if isinstance(versions, dict) else {}  # config.json was restored by hand
    known = [f"{name} {value:,.2f}" for name, value in references.items() if value is not None]
    note = summary["comparison_note"]
    comparison = f"Score {note}." if note else f"For comparison: {'; '.join(known) or 'no scores known'}."
    return Template(template).substitute(
        metadata=_metadata(repo_name, summary, score),
        game=summary["game"],
        score=score,
        statistic="mean" if std is None else "mean +/- std",
        sessions=sessions_text(summary),
        incomplete="" if summary["complete"] else "\nThe run is **not complete**: it has not spent its budget.\n",
        protocol=summary["protocol"],
        sticky_actions=f"sticky actions {rules.sticky_actions:g}" if rules.sticky_actions else "no sticky actions",
        max_frames=f"{rules.max_frames:,}",
        budget=f"{summary['planned_env_steps']:,}",
        comparison=comparison,
        session_rows="\n".join(rows),
        evaluation=_evaluation_text(newest_evaluation(run_dir, [row["session"] for row in summary["sessions"]])),
        checkpoints=_checkpoints_text(checkpoints, is_best),
        optimistic="It is an optimistic pick: the scores of other seeds are usually lower." if is_best else "",
        repo_id=repo_id,
        repo_name=repo_name,
        graph="\n![returns](graphs/trial.png)\n" if (run_dir / "graphs" / "trial.png").is_file() else "",
        seeds=seeds_text(summary),
        gae_lambda=description.get("gae_lambda"),
        num_envs=config.env.num_envs,
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
    )


def _checkpoints_text(checkpoints: Mapping[Path, int], is_best: bool) -> str:
    places = [f"{directory.name} at env step {step:,}" for directory, step in checkpoints.items()]
    if is_best:
        return f"The checkpoint is the best one of {places[0]}."
    return f"The checkpoint is that of {places[0]}." if len(places) == 1 else f"Checkpoints: {', '.join(places)}."


def _evaluation_text(evaluation: dict[str, Any] | None) -> str:
    """The score of an evaluation of all sessions as a paragraph; no text if there is none."""
    if evaluation is None:
        return ""
    interval, count = evaluation["interval"], len(evaluation["sessions"])
    bounds = (
        "no interval: one session" if interval is None else f"95% interval {interval[0]:,.1f} to {interval[1]:,.1f}"
    )
    actions = ", greedy actions" if evaluation["greedy"] else ""
    return (
        f"\nEvaluated with the checkpoints of all sessions at env step {evaluated_at(evaluation)}: mean return "
        f"**{evaluation['mean']:,.1f}** ({bounds}) over {counted(count, 'session')} of "
        f"{evaluation['episodes']} full games{actions}.\n"
    )


def _metadata(repo_name: str, summary: dict[str, Any], score: str) -> str:
    """The metadata of the card as YAML."""
    from huggingface_hub import EvalResult, ModelCardData

    game = summary["game"]
    registered = {"v5": f"ALE/{game}-v5", "classic": f"{game}NoFrameskip-v4"}
    environment = registered.get(summary["protocol"], f"{game} ({summary['protocol']})")
    tags = [environment] if environment in registered.values() else [game]
    result = EvalResult(
        task_type="reinforcement-learning",
        task_name="reinforcement-learning",
        dataset_type=environment,
        dataset_name=environment,
        metric_type="mean_reward",
        metric_name="return_ma",
        metric_value=score,
    )
    metadata = ModelCardData(
        library_name="jaxrl_atari",
        pipeline_tag="reinforcement-learning",
        tags=["reinforcement-learning", "deep-reinforcement-learning", "ppo", "atari", "jax", *tags],
        model_name=repo_name,
        eval_results=None if summary["score"] is None else [result],
    )
    return metadata.to_yaml().strip()
