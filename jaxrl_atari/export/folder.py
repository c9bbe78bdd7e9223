"""The folder of an export: its programs, which are compared before anything is written, and its README."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
from jax import export

from jaxrl_atari import __version__
from jaxrl_atari.envs import make_pool
from jaxrl_atari.envs.ale_pool import rom_ids
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.export.onnx_model import NETWORKS, make_model
from jaxrl_atari.networks import Network, Observation, make_network
from jaxrl_atari.report.summary import Run
from jaxrl_atari.report.tables import number_text
from jaxrl_atari.report.text import interval_text
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.reading import evaluations

TOLERANCE = 1e-4
"""Largest difference between outputs, absolute plus relative. The programs sum float32 in different orders."""

README = Path(__file__).with_name("readme.md")
"""Jinja template of the folder's README."""


def export_policy(policy: Policy, run: Run, directory: Path) -> None:
    """Writes the folder of an export. A network that `NETWORKS` lacks is exported for JAX alone.

    Raises:
        UserError: the graph in `NETWORKS` does not compute what the network does, for example because the network
            was edited. Nothing is written.
    """
    params = jax.device_get(policy.params)
    config = replace(policy.config.network, compute_dtype="float32")
    network = make_network(config, policy.num_actions)
    memory_shapes = [x.shape[1:] for x in jax.tree.leaves(network.initial_carry(1))]
    program = jax_program(network, params)
    about = about_policy(policy)
    files: dict[str, bytes] = {"policy.jaxexport": program}
    if config.name in NETWORKS:
        sizes = [size for (size,) in memory_shapes]
        onnx_model = make_model(config.name, params, policy.num_actions, sizes, {**about, "memory": sizes})
        files["policy.onnx"] = onnx_model.SerializeToString()
        files["play.py"] = Path(__file__).with_name("play.py").read_bytes()
        compare_programs(config.name, program, files["policy.onnx"], memory_shapes)
    files["README.md"] = readme(policy, about, run, memory_shapes).encode()
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        write_file(directory / file, content)


def compare_programs(network: str, program: bytes, model: bytes, memory_shapes: Sequence[tuple[int, ...]]) -> None:
    """Runs both programs on random stacks, starts of games and memories of four environments.

    Raises:
        UserError: their outputs differ by more than `TOLERANCE`, or are not finite.
    """
    random = np.random.default_rng(0)
    inputs = [random.integers(0, 256, (4, 84, 84, 4), np.uint8)]
    if memory_shapes:
        inputs.append(np.array([True, False, False, True]))
    inputs += [random.normal(size=(4, *shape)).astype(np.float32) for shape in memory_shapes]
    for ours, theirs in zip(run_jax(program, inputs), run_onnx(model, inputs), strict=True):
        if not np.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE):
            raise UserError(
                f"network.name = {network!r}: the outputs of onnxruntime and JAX differ by more than {TOLERANCE};"
                " make jaxrl_atari/export/onnx_model.py compute what networks.py does"
            )


def about_policy(policy: Policy) -> dict[str, Any]:
    """The description of a policy, its game and the rules, as JSON values."""
    env = policy.config.env
    pool = make_pool(replace(env, backend="ale"), 1, seed=0)
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


def readme(policy: Policy, about: Mapping[str, Any], run: Run, memory_shapes: Sequence[tuple[int, ...]]) -> str:
    """The README of an export.

    Args:
        policy: the policy.
        about: the result of `about_policy`.
        run: the run of the policy.
        memory_shapes: shapes of the arrays of the network's memory, without the batch.
    """
    evaluated = [each for each in evaluations(policy.session_dir) if each.get("env_steps") == policy.env_steps]
    template = jinja2.Template(README.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True)
    return template.render(
        **about,
        evaluation=evaluated[-1] if evaluated else None,
        has_onnx=policy.config.network.name in NETWORKS,
        interval_text=interval_text,
        number=number_text,
        platforms=PLATFORMS,
        policy=policy,
        run=run,
        shapes=" and ".join(" x ".join(map(str, shape)) for shape in memory_shapes),
        tolerance=TOLERANCE,
    )


# --- The program for JAX -----------------------------------------------------------------------------------------

PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms of the program for JAX."""


def jax_program(network: Network, params: Any) -> bytes:
    """The program for JAX, serialised by `jax.export`.

    It maps stacks uint8 `[batch, 84, 84, 4]` to (logits, value). A recurrent network maps (stacks, first bool
    `[batch]`, *memory) to (logits, value, *memory), where the memory is arrays `[batch, ...]`.
    """
    (batch,) = export.symbolic_shape("batch")
    memory, structure = jax.tree.flatten(network.initial_carry(1))

    # A recurrent network can make its memory only for a batch of known size. Here the size is a symbol, so a
    # program for a single environment is mapped over the batch.
    def act(stacks: Any, first: Any = None, *memory: Any) -> Any:
        observation = Observation(stacks, first, jax.tree.unflatten(structure, memory))
        outputs = network.apply(params, jax.tree.map(lambda x: x[None], observation))
        results = (outputs.logits, outputs.value, *jax.tree.leaves(outputs.carry))
        return jax.tree.map(lambda x: x[0], results)

    inputs = [jax.ShapeDtypeStruct((batch, 84, 84, 4), jnp.uint8)]
    if memory:
        inputs.append(jax.ShapeDtypeStruct((batch,), jnp.bool_))
    inputs += [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in memory]
    return bytes(export.export(jax.jit(jax.vmap(act)), platforms=PLATFORMS)(*inputs).serialize())


def run_jax(program: bytes, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Runs a program for JAX."""
    return [np.asarray(output) for output in export.deserialize(bytearray(program)).call(*inputs)]


def run_onnx(model: bytes, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Runs a model in onnxruntime, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return [np.asarray(output) for output in session.run(None, dict(zip(names, inputs, strict=True)))]
