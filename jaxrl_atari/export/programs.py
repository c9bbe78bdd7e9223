"""A policy as three programs, which are compared before they are written: for ONNX, for NumPy, and for JAX."""

import io
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxrl_atari import __version__
from jaxrl_atari.envs import make_pool
from jaxrl_atari.envs.ale_pool import rom_ids
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.export import play
from jaxrl_atari.export.readme import readme
from jaxrl_atari.network_functions import apply_module, initial_carry, make_module
from jaxrl_atari.network_interface import Observation
from jaxrl_atari.report.summary import Run
from jaxrl_atari.runs.files import filled_folder, write_file

PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms of the program for JAX."""

TOLERANCE = 1e-4
"""Largest difference between outputs, absolute or relative. The programs sum float32 in different orders."""


def export_policy(policy: Policy, run: Run, directory: Path) -> float:
    """Writes the folder of an export.

    Returns:
        The largest difference between the outputs of JAX and those of another program, on random inputs.

    Raises:
        UserError: the game is not ALE's; `play.NETWORKS` lacks the network; or its function there cannot compute
            the network or computes something else, for example because the network was edited.
    """
    from jaxrl_atari.export.onnx_model import make_model

    env = policy.config.env
    if env.backend == "gymnasium":
        raise UserError(f"env.backend = 'gymnasium': only ALE games can be exported, not {env.game_name}")
    network_name = policy.config.network.name
    if network_name not in play.NETWORKS:
        raise UserError(
            f"network.name = {network_name!r}: only {', '.join(play.NETWORKS)} can be exported; to export"
            " another, write it with the layers of jaxrl_atari/export/play.py and enter it in NETWORKS there"
        )
    params = jax.tree.map(np.asarray, jax.device_get(policy.params))
    module = make_module(policy.config.network, policy.num_actions, jnp.float32)
    memory_sizes = [x.shape[1] for x in jax.tree.leaves(initial_carry(module, 4))]
    about = about_policy(policy, memory_sizes)

    network = play.NETWORKS[network_name]
    advice = "nothing was written: make jaxrl_atari/export/play.py compute what networks.py does"
    inputs = random_inputs(memory_sizes)
    try:
        numpy_outputs = NumPyOutputs(*network(play.NumPyLayers(), params, *inputs))
    except (KeyError, ValueError) as error:  # no such layer, or one of another shape
        problem = f"its function in play.py fails ({reason(error)})"
        raise UserError(f"network.name = {network_name!r}: {problem}; {advice}") from error
    jax_bytes = bytes(jax_program(module, params, memory_sizes).serialize())
    onnx_bytes = make_model(network, params, policy.num_actions, memory_sizes).SerializeToString()
    expected = run_jax(jax_bytes, *inputs)
    others = {"NumPy": numpy_outputs, "onnxruntime": run_onnx(onnx_bytes, *inputs)}
    differences = {name: largest_difference(expected, outputs) for name, outputs in others.items()}
    worst = max(differences, key=differences.__getitem__)
    difference = differences[worst]
    if difference > TOLERANCE:
        raise UserError(
            f"network.name = {network_name!r}: the outputs of {worst} and JAX differ by {difference:.1e},"
            f" expected at most {TOLERANCE}; {advice}"
        )
    files = {
        "policy.npz": parameters_file(params, about),
        "policy.onnx": onnx_bytes,
        "policy.jaxexport": jax_bytes,
        "play.py": Path(play.__file__).read_bytes(),
        "README.md": readme(policy, about, run, difference, PLATFORMS),
    }
    with filled_folder(directory) as folder:
        for file, content in files.items():
            write_file(folder / file, content)
    return difference


def random_inputs(memory_sizes: list[int]) -> tuple[np.ndarray, np.ndarray, play.Memory]:
    """Stacks, starts of games and memories of four environments, with which the programs are compared."""
    random = np.random.default_rng(0)
    stacks = random.integers(0, 256, (4, *play.STACK_SHAPE), np.uint8)
    first = np.array([True, False, False, True])
    memory = tuple(random.normal(size=(4, size)).astype(np.float32) for size in memory_sizes)
    return stacks, first, memory


class NumPyOutputs(NamedTuple):
    """The outputs of a network for a batch, as NumPy arrays."""

    logits: np.ndarray  # float32 [N, actions]
    value: np.ndarray  # float32 [N]
    memory: tuple[np.ndarray, ...]  # each float32 [N, F]; empty if the network is not recurrent


def about_policy(policy: Policy, memory_sizes: list[int]) -> play.About:
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
        "actions": list(actions),
        "sticky_actions": rules.sticky_actions,
        "full_action_space": rules.full_action_space,
        "noop_max": rules.noop_max,
        "fire_on_reset": rules.fire_on_reset,
        "max_frames": rules.max_frames,
        "env_steps": policy.env_steps,
        "trained_in": policy.network.dtype.name,
        "exported_by": f"jaxrl_atari {__version__}",
    }


def parameters_file(params: Any, about: play.About) -> bytes:
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
    stacks = jax.ShapeDtypeStruct((batch, *play.STACK_SHAPE), jnp.uint8)
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
    """The largest difference between two outputs, absolute or relative, whichever is smaller; infinity for NaN."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    largest = np.max([np.max(np.abs(a - b) / np.maximum(1, np.abs(a))) for a, b in pairs])
    return math.inf if np.isnan(largest) else float(largest)
