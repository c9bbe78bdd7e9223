"""The folder of an export: its programs, which are compared before anything is written, and its README."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_atari import __version__
from jaxrl_atari.envs import make_pool
from jaxrl_atari.envs.ale_pool import rom_ids
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.export.onnx_model import NETWORKS, make_model
from jaxrl_atari.export.programs import PLATFORMS, jax_program, largest_difference, run_jax, run_onnx
from jaxrl_atari.networks import make_network
from jaxrl_atari.output import counted
from jaxrl_atari.report.evaluations import evaluations
from jaxrl_atari.report.summary import Run, trial_summary
from jaxrl_atari.report.tables import number_text
from jaxrl_atari.report.text import interval_text
from jaxrl_atari.runs.files import filled_folder, write_file

TOLERANCE = 1e-4
"""Largest difference between outputs, absolute or relative. The programs sum float32 in different orders."""


def export_policy(policy: Policy, run: Run, directory: Path) -> None:
    """Writes the folder of an export. A network that `NETWORKS` lacks is exported for JAX alone.

    Raises:
        UserError: the game is not ALE's; or the function in `NETWORKS` does not compute what the network does, for
            example because the network was edited. Nothing is written.
    """
    env = policy.config.env
    if env.backend == "gymnasium":
        raise UserError(f"env.backend = 'gymnasium': only ALE games can be exported, not {env.game_name}")
    params = jax.tree.map(np.asarray, jax.device_get(policy.params))
    network = make_network(replace(policy.config.network, compute_dtype="float32"), policy.num_actions)
    memory_shapes = [x.shape[1:] for x in jax.tree.leaves(network.initial_carry(1))]
    program = bytes(jax_program(network, params).serialize())
    about = about_policy(policy)
    files: dict[str, bytes] = {"policy.jaxexport": program}
    difference = None
    if policy.config.network.name in NETWORKS:
        model, difference = checked_model(policy, params, memory_shapes, about, program)
        files |= {"policy.onnx": model, "play.py": Path(__file__).with_name("play.py").read_bytes()}
    files["README.md"] = readme(policy, about, run, memory_shapes, difference).encode()
    with filled_folder(directory) as folder:
        for file, content in files.items():
            write_file(folder / file, content)


def checked_model(
    policy: Policy, params: Any, memory_shapes: Sequence[tuple[int, ...]], about: Mapping[str, Any], program: bytes
) -> tuple[bytes, float]:
    """The content of policy.onnx, and the largest difference between its outputs and those of JAX.

    Both run on random stacks, starts of games and memories of four environments.

    Raises:
        UserError: as `export_policy`.
    """
    network = policy.config.network.name
    sizes = [size for (size,) in memory_shapes]
    onnx_model = make_model(network, params, policy.num_actions, sizes, {**about, "memory": sizes})
    model = onnx_model.SerializeToString()
    random = np.random.default_rng(0)
    stacks = random.integers(0, 256, (4, 84, 84, 4), np.uint8)
    first = np.array([True, False, False, True])
    memory = tuple(random.normal(size=(4, size)).astype(np.float32) for size in sizes)
    difference = largest_difference(
        run_jax(program, stacks, first, memory), run_onnx(model, stacks, first, memory)
    )
    if difference > TOLERANCE:
        raise UserError(
            f"network.name = {network!r}: the outputs of onnxruntime and JAX differ by {difference:.1e},"
            f" expected at most {TOLERANCE}; make jaxrl_atari/export/onnx_model.py compute what networks.py does"
        )
    return model, difference


def about_policy(policy: Policy) -> dict[str, Any]:
    """The description of a policy, its game and the rules, as JSON values."""
    env = policy.config.env
    pool = make_pool("ale", env.game_name, 1, seed=0, rules=env.rules)
    actions = list(pool.action_names)
    pool.close()
    return {
        "network": policy.config.network.name,
        "game": env.game_name,
        "rom": rom_ids()[env.game_name],
        "protocol": env.resolved_protocol,
        "actions": actions,
        **env.rules._asdict(),
        "env_steps": policy.env_steps,
        "exported_by": f"jaxrl_atari {__version__}",
    }


# --- README ------------------------------------------------------------------------------------------------------

README = """\
# {game}: a policy trained with {algorithm}

Network `{network}`, {session} of {run} after {env_steps:,} env steps of training,
exported by {exported_by}.

## Score

{score}

Protocol: {protocol}. Do not compare it with scores under other protocols.

## Inputs

`stacks` is uint8 `[batch, 84, 84, 4]`: the last four frames of a game, the oldest first. A game's first frame
fills the stack. A frame is the maximum of the last two of 4 emulator frames (frame skip 4), in grey, resized to
84x84 by area (OpenCV's `INTER_AREA`). ale-py's `AtariVectorEnv` makes such frames. The division by 255 is part of
the network.

Rules: sticky actions {sticky_actions}, at most {max_frames:,} emulator frames a game, all lives.
Start of a game: {start}.
{memory}
## Outputs

`logits` float32 `[batch, {num_actions}]`, of the actions {actions};
the policy samples from their softmax. `value` float32 `[batch]`: the discounted return that the network
expects{rewards}.

{onnx}## Use in JAX

    from jax import export  # a program for {platforms}; it needs JAX alone
    policy = export.deserialize(bytearray(open("policy.jaxexport", "rb").read()))
    {jax_call}

Everything computes in float32; the policy was trained in {trained_in}.
"""

MEMORY = """
The network has a memory: arrays of float32 `[batch, ...]` with {shapes} values each, zero before the first game.
Pass the memory that a step returns to the next step, and `first`, bool `[batch]`, true where a game starts.
"""

ONNX = """\
## Play

    pip install numpy onnxruntime 'ale-py[vector]'
    python play.py --games 3

## Use in ONNX

    import onnxruntime
    session = onnxruntime.InferenceSession("policy.onnx")
    {outputs} = session.run(None, {inputs})

When this was written, the outputs of onnxruntime and JAX differed by {difference:.1e} at most.

"""


def readme(
    policy: Policy,
    about: Mapping[str, Any],
    run: Run,
    memory_shapes: Sequence[tuple[int, ...]],
    difference: float | None,
) -> str:
    """The README of an export.

    Args:
        policy: the policy.
        about: the result of `about_policy`.
        run: the run of the policy.
        memory_shapes: shapes of the arrays of the network's memory, without the batch.
        difference: the largest difference between the outputs of the programs; None: only JAX has one.
    """
    onnx_inputs = '{"stacks": stacks}'
    outputs = "logits, value"
    jax_call = "logits, value = policy.call(stacks)"
    memory = ""
    if memory_shapes:
        arrays = ", ".join(f'"memory_{i}": memory[{i}]' for i in range(len(memory_shapes)))
        onnx_inputs = f'{{"stacks": stacks, "first": first, {arrays}}}'
        outputs = "logits, value, *memory"
        jax_call = "logits, value, memory = policy.call(stacks, first, memory)"
        memory = MEMORY.format(shapes=" and ".join(" x ".join(map(str, shape)) for shape in memory_shapes))
    onnx = ""
    if difference is not None:
        onnx = ONNX.format(outputs=outputs, inputs=onnx_inputs, difference=difference)
    return README.format(
        **{**about, "actions": ", ".join(about["actions"])},
        algorithm=policy.config.algorithm,
        session=policy.session_dir.name,
        run=run.path.absolute().name,
        score="\n".join(score_lines(policy, run)),
        start=start_of_game(about),
        memory=memory,
        num_actions=len(about["actions"]),
        rewards=", of rewards clipped to [-1, 1]" if policy.config.env.rules.clip_rewards else "",
        onnx=onnx,
        platforms=", ".join(PLATFORMS),
        jax_call=jax_call,
        trained_in=policy.network.dtype.name,
    )


def score_lines(policy: Policy, run: Run) -> list[str]:
    """Lines of the README: the score of the run, and the newest evaluation of the policy's checkpoint."""
    summary = trial_summary(run)
    lines = ["No game of the run has ended yet.", ""]
    if summary["score"] is not None:
        sessions = counted(len(summary["sessions"]), "session")
        lines = [
            f"The run's score is {number_text(summary['score'])}, the mean of `return_ma` over {sessions}",
            f"(`return_ma`: {summary['return_ma']} of the mean return of the last 100 full games).",
            interval_text(summary["session_scores"]),
            "",
        ]
    evaluated = [each for each in evaluations(policy.session_dir) if each.get("env_steps") == policy.env_steps]
    if not evaluated:
        return [*lines, "This checkpoint has not been evaluated by itself (`python -m jaxrl_atari.evaluate`)."]
    newest = evaluated[-1]
    score = f"{number_text(newest['mean'])} over {counted(newest['episodes'], 'full game')}"
    if "std" in newest:
        score += f" (std {number_text(newest['std'])} over games)"
    actions = "greedy" if newest["greedy"] else "sampled"
    return [
        *lines,
        f"This checkpoint, evaluated in {newest['compute_dtype']}: mean return",
        f"{score}, {actions} actions, seed {newest['seed']}.",
    ]


def start_of_game(about: Mapping[str, Any]) -> str:
    """How the back end `ale` starts a game (see `envs/__init__.py`), such as `FIRE, then 0 to 28 no-ops`."""
    presses_fire = about["fire_on_reset"] and "FIRE" in about["actions"]
    most = max(0, about["noop_max"] - (2 if presses_fire else 1))
    parts = [*(["FIRE"] if presses_fire else []), *([f"0 to {most} no-ops"] if most else [])]
    return ", then ".join(parts) or "no no-ops and no FIRE"
