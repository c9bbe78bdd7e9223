"""The command `export`: writes a policy to a folder that does not need this package.

    python -m jaxrl_atari.export RUN_DIR [--checkpoint best|latest|STEP] [--session N] [--to DIR]

| file | content |
|---|---|
| policy.onnx | a program for any ONNX runtime, from frame stacks to logits and value |
| policy.npz, play.py | the parameters, and a program on NumPy and ale-py that plays games with them |
| policy.jaxexport | a program for JAX, serialized by `jax.export` |
| README.md | game, protocol, preprocessing, score, and how to use each file |

The command needs pip install 'jaxrl_atari[export]'. All three programs compute in float32. Before the command
writes anything, it runs them on the same inputs and compares their outputs.
"""

import dataclasses
import io
import json
import string
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import export

from jaxrl_atari import __version__, cli
from jaxrl_atari.checks import Limits
from jaxrl_atari.cli.options import parse
from jaxrl_atari.envs import make_pool
from jaxrl_atari.envs.ale import rom_ids
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.policy import Policy, load_policy
from jaxrl_atari.export import play
from jaxrl_atari.hardware.gpus import forbid_gpu
from jaxrl_atari.imports import WithImports, import_named
from jaxrl_atari.networks import Observation, apply_module, initial_carry, make_module
from jaxrl_atari.output import counted, say
from jaxrl_atari.report.evaluations import evaluations
from jaxrl_atari.report.summary import Run, read_run, trial_summary
from jaxrl_atari.report.text import interval_text, score_text
from jaxrl_atari.runs.files import unused, write_file
from jaxrl_atari.runs.layout import session_number

PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms of the program for JAX."""
TOLERANCE = 1e-4
"""Largest difference between outputs, absolute or relative. The programs sum float32 in different orders."""
README = Path(__file__).with_name("readme.md")
"""Template of the README of an export."""


@dataclasses.dataclass(frozen=True)
class Options(WithImports):
    """Exports a policy to a folder that does not need this package."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of a run."""
    checkpoint: Annotated[Literal["best", "latest"] | int, Limits(0, 10**12)] = "best"
    """`best` (the highest mean return of the last 100 games), `latest`, or the env step of a checkpoint."""
    session: Annotated[int | None, Limits(0, 10_000)] = None
    """Session of the run. None: the one with the highest mean return of 100 games."""
    to: Path | None = None
    """New folder. None: export_STEP in the session's directory (or export_STEP_2, ...)."""


class NumPyOutputs(NamedTuple):
    """The outputs of a network for a batch, as NumPy arrays."""

    logits: np.ndarray  # float32 [N, actions]
    value: np.ndarray  # float32 [N]
    memory: tuple[np.ndarray, ...]  # each float32 [N, F]; empty if the network is not recurrent


def describe(policy: Policy, memory_sizes: list[int]) -> dict[str, Any]:
    """The description in policy.npz, as JSON values: the network, and the game with its rules.

    Args:
        memory_sizes: sizes of the arrays of the network's memory; empty if the network is not recurrent.
    """
    env = policy.config.env
    rules = env.rules
    pool = make_pool("ale", env.game_name, 1, seed=0, rules=rules)
    actions = pool.action_names
    pool.close()
    return {
        "network": policy.config.network.name,
        "memory": memory_sizes,
        "game": env.game_name,
        "rom": rom_ids()[env.game_name],
        "protocol": env.resolved_protocol,
        "actions": actions,
        "sticky_actions": rules.sticky_actions,
        "full_action_space": rules.full_action_space,
        "noop_max": rules.noop_max,
        "fire_on_reset": rules.fire_on_reset,
        "max_frames": rules.max_frames,
        "env_steps": policy.env_steps,
        "trained_in": policy.network.dtype.name,
        "exported_by": f"jaxrl_atari {__version__}",
    }


def parameters_file(params: Any, about: dict[str, Any]) -> bytes:
    """The content of policy.npz: an array for each parameter, `conv1/kernel`, and `about`, JSON as bytes."""
    arrays = {
        jax.tree_util.keystr(at, simple=True, separator="/"): x for at, x in jax.tree.leaves_with_path(params)
    }
    content = io.BytesIO()
    np.savez(content, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
    return content.getvalue()


def jax_program(module: Any, params: Any, memory_sizes: list[int]) -> export.Exported:
    """The program for JAX. It maps stacks uint8 `[batch, 84, 84, 4]` to logits and value.

    A recurrent network maps (stacks, first bool `[batch]`, memory) to (logits, value, memory). The memory is a
    tuple of arrays float32 `[batch, F]`.
    """
    (batch,) = export.symbolic_shape("batch")
    stacks = jax.ShapeDtypeStruct((batch, 84, 84, 4), jnp.uint8)
    if not memory_sizes:

        def act(stacks: Any) -> Any:
            outputs = apply_module(module, params, Observation(stacks))
            return outputs.logits, outputs.value

        return export.export(jax.jit(act), platforms=PLATFORMS)(stacks)

    # A recurrent module can make its memory only for a batch of known size. Here the size is a symbol, so a
    # program for a single environment is mapped over the batch.
    def act_once(stacks: Any, first: Any, carry: Any) -> Any:
        one = jax.tree.map(lambda x: x[None], Observation(stacks, first, carry))
        outputs = apply_module(module, params, one)
        return jax.tree.map(lambda x: x[0], (outputs.logits, outputs.value, outputs.carry))

    first = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    carry = tuple(jax.ShapeDtypeStruct((batch, size), jnp.float32) for size in memory_sizes)
    return export.export(jax.jit(jax.vmap(act_once)), platforms=PLATFORMS)(stacks, first, carry)


def run_jax(program: bytes, stacks: np.ndarray, first: np.ndarray, memory: tuple) -> NumPyOutputs:
    """Runs a serialized program."""
    inputs = (stacks, first, memory) if memory else (stacks,)
    logits, value, *carry = export.deserialize(bytearray(program)).call(*inputs)
    carried = carry[0] if carry else ()
    return NumPyOutputs(np.asarray(logits), np.asarray(value), tuple(map(np.asarray, carried)))


def run_onnx(model: bytes, stacks: np.ndarray, first: np.ndarray, memory: tuple) -> NumPyOutputs:
    """Runs a model in onnxruntime, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    inputs = {"stacks": stacks, "first": first} | {f"memory_{i}": x for i, x in enumerate(memory)}
    wanted = {each.name for each in session.get_inputs()}
    given = {name: x for name, x in inputs.items() if name in wanted}
    logits, value, *carry = (np.asarray(output) for output in session.run(None, given))
    return NumPyOutputs(logits, value, tuple(carry))


def largest_difference(one: NumPyOutputs, other: NumPyOutputs) -> float:
    """The largest difference between two outputs, absolute or relative, whichever is smaller."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(a - b) / np.maximum(1, np.abs(a)))) for a, b in pairs)


def score_lines(policy: Policy, run: Run) -> list[str]:
    """Lines of the README: the score of the run, and the newest evaluation of the policy's checkpoint."""
    trial = trial_summary(run)
    sessions = counted(len(trial["sessions"]), "session")
    lines = ["No game of the run has ended yet.", ""]
    if trial["score"] is not None:
        lines = [
            f"The run's score is {score_text(trial['score'])}, the mean of `return_ma` over {sessions}",
            f"(`return_ma`: {trial['return_ma']} of the mean return of the last 100 full games).",
            interval_text(trial["session_scores"]),
            "",
        ]
    evaluated = [each for each in evaluations(policy.session_dir) if each["env_steps"] == policy.env_steps]
    if not evaluated:
        return [*lines, "This checkpoint has not been evaluated by itself (`python -m jaxrl_atari.evaluate`)."]
    newest = evaluated[-1]
    games = counted(newest["episodes"], "full game")
    actions = "greedy" if newest["greedy"] else "sampled"
    score = f"{score_text(newest['mean'])} over {games} (std {score_text(newest['std'])} over games)"
    return [
        *lines,
        f"This checkpoint, evaluated in {newest.get('compute_dtype', 'another arithmetic')}: mean return",
        f"{score}, {actions} actions, seed {newest['seed']}.",
    ]


def start_of_game(about: dict[str, Any]) -> str:
    """How `play.py` starts a game, in the back end `ale` (see `envs/__init__.py`): `FIRE, then 0 to 28 no-ops`.

    Args:
        about: the result of `describe`.
    """
    presses_fire = about["fire_on_reset"] and "FIRE" in about["actions"]
    most = max(0, about["noop_max"] - (2 if presses_fire else 1))
    no_ops = f"0 to {most} no-ops" if most else ""
    return ", then ".join(filter(None, ["FIRE" if presses_fire else "", no_ops])) or "no no-ops and no FIRE"


def readme(policy: Policy, about: dict[str, Any], run: Run, difference: float) -> str:
    """The README of an export, made from readme.md.

    Args:
        about: the result of `describe`.
        run: the run of the policy.
        difference: the largest difference between the outputs of the programs.
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
    return string.Template(README.read_text(encoding="utf-8")).substitute(
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
        platforms=", ".join(PLATFORMS),
        jax_call=jax_call,
        rounding=rounding,
        difference=f"{difference:.1e}",
    )


def export_policy(policy: Policy, run: Run, directory: Path) -> float:
    """Writes the folder of an export.

    Returns:
        The largest difference between the outputs of the three programs, on random inputs.

    Raises:
        UserError: the game is not ALE's; `play.NETWORKS` lacks the network; or its function there does not compute
            what the network computes, for example because the network was edited.
    """
    from jaxrl_atari.export.onnx import make_model

    env = policy.config.env
    if env.backend == "gymnasium":
        raise UserError(f"env.backend = 'gymnasium': only ALE games can be exported, not {env.game_name}")
    name = policy.config.network.name
    if name not in play.NETWORKS:
        raise UserError(
            f"network.name = {name!r}: only {', '.join(play.NETWORKS)} can be exported; to export another, "
            "write it with the layers of jaxrl_atari/export/play.py and enter it in NETWORKS there"
        )
    params = jax.tree.map(np.asarray, jax.device_get(policy.params))
    num_actions = len(params["policy"]["bias"])
    module = make_module(policy.config.network, num_actions, jnp.float32)
    carry = initial_carry(module, 4)
    memory_sizes = [x.shape[1] for x in jax.tree.leaves(carry)]
    about = describe(policy, memory_sizes)

    program = bytes(jax_program(module, params, memory_sizes).serialize())
    model = make_model(play.NETWORKS[name], params, num_actions, memory_sizes).SerializeToString()
    random = np.random.default_rng(0)
    stacks = random.integers(0, 256, (4, 84, 84, 4), np.uint8)
    first = np.array([True, False, False, True])
    before = tuple(random.normal(size=(4, size)).astype(np.float32) for size in memory_sizes)
    computed = {
        "JAX": run_jax(program, stacks, first, before),
        "NumPy": NumPyOutputs(*play.NETWORKS[name](play.NumPyLayers, params, stacks, first, before)),
        "onnxruntime": run_onnx(model, stacks, first, before),
    }
    differences = {where: largest_difference(computed["JAX"], outputs) for where, outputs in computed.items()}
    difference = max(differences.values())
    if not difference <= TOLERANCE:  # also NaN
        worst = max(differences, key=lambda where: differences[where])
        raise UserError(
            f"network.name = {name!r}: the outputs of {worst} and JAX differ by {difference:.1e}, expected at most"
            f" {TOLERANCE}; nothing was written: make jaxrl_atari/export/play.py compute what networks.py does"
        )
    files = {
        "policy.npz": parameters_file(params, about),
        "policy.onnx": model,
        "policy.jaxexport": program,
        "play.py": Path(play.__file__).read_bytes(),
        "README.md": readme(policy, about, run, difference),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        write_file(directory / file, content)
    return difference


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = parse(Options, arguments, "export")
    import_named(options.imports)
    for package in ("onnx", "onnxruntime"):
        if find_spec(package) is None:
            raise UserError(f"{package} is not installed; pip install 'jaxrl_atari[export]'")
    if options.to is not None and (options.to.is_file() or any(options.to.glob("*"))):
        raise UserError(f"--to {options.to}: exists already; choose another folder, or remove it")
    forbid_gpu()  # a GPU may be training
    run = read_run(options.run_dir)
    policy = load_policy(options.run_dir, options.checkpoint, session=options.session)
    directory = options.to or unused(policy.session_dir / f"export_{policy.env_steps}")
    difference = export_policy(policy, run, directory)
    say(
        f"{run.config.env.game_name}, session {session_number(policy.session_dir)}, env step {policy.env_steps:,}:"
        f" NumPy, onnxruntime and JAX differ by {difference:.1e} at most\nexported: {directory}"
    )


if __name__ == "__main__":
    cli.run(main)
