"""The README of an export: game, protocol, preprocessing, score, and how to use each file."""

import string
from collections.abc import Sequence
from pathlib import Path

from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.export.play import About
from jaxrl_atari.output import counted
from jaxrl_atari.report.evaluations import evaluations
from jaxrl_atari.report.summary import Run, trial_summary
from jaxrl_atari.report.text import interval_text, score_text

TEMPLATE = Path(__file__).with_name("readme_template.md")


def readme(policy: Policy, about: About, run: Run, difference: float, platforms: Sequence[str]) -> str:
    """The README of an export, made from readme_template.md.

    Args:
        about: the result of `programs.about_policy`.
        run: the run of the policy.
        difference: the largest difference between the outputs of the programs.
        platforms: those of the program for JAX.
    """
    num_memories = len(about["memory"])
    onnx_inputs = '{"stacks": stacks}'
    outputs = "logits, value"
    jax_call = "logits, value = policy.call(stacks)"
    memory_text = ""
    if num_memories:
        inputs = ", ".join(f'"memory_{i}": memory[{i}]' for i in range(num_memories))
        onnx_inputs = f'{{"stacks": stacks, "first": first, {inputs}}}'
        outputs = "logits, value, *memory"
        jax_call = "logits, value, memory = policy.call(stacks, first, memory)"
        memory_text = (
            f"The network has a memory: {num_memories} arrays of float32 `[batch, {about['memory'][0]}]`, zero "
            "before the first game.\nPass the memory that a step returns to the next step, and `first`, bool "
            "`[batch]`, true where a game starts.\n\n"
        )
    rounding = ""
    if about["trained_in"] != "float32":
        rounding = (
            f" The policy was trained in {about['trained_in']}, so its logits in training differed slightly."
        )
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        game=about["game"],
        algorithm=policy.config.algorithm,
        network=about["network"],
        session=policy.session_dir.name,
        run=run.path.absolute().name,
        env_steps=f"{policy.env_steps:,}",
        exported_by=about["exported_by"],
        score="\n".join(score_lines(policy, run)),
        protocol=about["protocol"],
        sticky_actions=about["sticky_actions"],
        start=start_of_game(about),
        max_frames=f"{about['max_frames']:,}",
        memory_text=memory_text,
        num_actions=len(about["actions"]),
        actions=", ".join(about["actions"]),
        rewards=", of rewards clipped to [-1, 1]" if policy.config.env.rules.clip_rewards else "",
        outputs=outputs,
        onnx_inputs=onnx_inputs,
        platforms=", ".join(platforms),
        jax_call=jax_call,
        rounding=rounding,
        difference=f"{difference:.1e}",
    )


def score_lines(policy: Policy, run: Run) -> list[str]:
    """Lines of the README: the score of the run, and the newest evaluation of the policy's checkpoint."""
    summary = trial_summary(run)
    sessions = counted(len(summary["sessions"]), "session")
    lines = ["No game of the run has ended yet.", ""]
    if summary["score"] is not None:
        lines = [
            f"The run's score is {score_text(summary['score'])}, the mean of `return_ma` over {sessions}",
            f"(`return_ma`: {summary['return_ma']} of the mean return of the last 100 full games).",
            interval_text(summary["session_scores"]),
            "",
        ]
    evaluated = [
        each
        for each in evaluations(policy.session_dir)
        if each.get("env_steps") == policy.env_steps and {"greedy", "seed"} <= each.keys()
    ]
    if not evaluated:
        return [*lines, "This checkpoint has not been evaluated by itself (`python -m jaxrl_atari.evaluate`)."]
    newest = evaluated[-1]
    games = counted(newest["episodes"], "full game")
    actions = "greedy" if newest["greedy"] else "sampled"
    score = f"{score_text(newest['mean'])} over {games}"
    if newest["episodes"] > 1 and "std" in newest:
        score += f" (std {score_text(newest['std'])} over games)"
    return [
        *lines,
        f"This checkpoint, evaluated in {newest.get('compute_dtype', 'another arithmetic')}: mean return",
        f"{score}, {actions} actions, seed {newest['seed']}.",
    ]


def start_of_game(about: About) -> str:
    """How `play.py` starts a game, in the back end `ale` (see `envs/__init__.py`): `FIRE, then 0 to 28 no-ops`.

    Args:
        about: the result of `programs.about_policy`.
    """
    presses_fire = about["fire_on_reset"] and "FIRE" in about["actions"]
    most = max(0, about["noop_max"] - (2 if presses_fire else 1))
    no_ops = f"0 to {most} no-ops" if most else ""
    return ", then ".join(filter(None, ["FIRE" if presses_fire else "", no_ops])) or "no no-ops and no FIRE"
