"""A policy as a program for JAX; running exported programs, and comparing their outputs."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxrl_atari.networks import Network, Observation

PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms of the program for JAX."""


class ProgramOutputs(NamedTuple):
    """The outputs of a network for N environments, as NumPy arrays."""

    logits: np.ndarray  # float32 [N, actions]
    value: np.ndarray  # float32 [N]
    memory: tuple[np.ndarray, ...]  # each [N, ...]; empty if the network is not recurrent


def jax_program(network: Network, params: Any) -> export.Exported:
    """The program for JAX. It maps stacks uint8 `[batch, 84, 84, 4]` to logits and value.

    A recurrent network maps (stacks, first bool `[batch]`, memory) to (logits, value, memory). The memory is a
    tuple of arrays `[batch, ...]`.
    """
    (batch,) = export.symbolic_shape("batch")
    stacks = jax.ShapeDtypeStruct((batch, 84, 84, 4), jnp.uint8)
    memory, structure = jax.tree.flatten(network.initial_carry(1))
    if not memory:

        def act(stacks: Any) -> Any:
            outputs = network.apply(params, Observation(stacks))
            return outputs.logits, outputs.value

        return export.export(jax.jit(act), platforms=PLATFORMS)(stacks)

    # A recurrent network can make its memory only for a batch of known size. Here the size is a symbol, so a
    # program for a single environment is mapped over the batch.
    def act_once(stacks: Any, first: Any, memory: Any) -> Any:
        carry = jax.tree.unflatten(structure, memory)
        one = jax.tree.map(lambda x: x[None], Observation(stacks, first, carry))
        outputs = network.apply(params, one)
        results = (outputs.logits, outputs.value, tuple(jax.tree.leaves(outputs.carry)))
        return jax.tree.map(lambda x: x[0], results)

    first = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    shapes = tuple(jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in memory)
    return export.export(jax.jit(jax.vmap(act_once)), platforms=PLATFORMS)(stacks, first, shapes)


def run_jax(program: bytes, stacks: np.ndarray, first: np.ndarray, memory: tuple) -> ProgramOutputs:
    """Runs a serialised program."""
    inputs = (stacks, first, memory) if memory else (stacks,)
    logits, value, *carry = export.deserialize(bytearray(program)).call(*inputs)
    carried = carry[0] if carry else ()
    return ProgramOutputs(np.asarray(logits), np.asarray(value), tuple(map(np.asarray, carried)))


def run_onnx(model: bytes, stacks: np.ndarray, first: np.ndarray, memory: tuple) -> ProgramOutputs:
    """Runs a model in onnxruntime, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    inputs = {"stacks": stacks}
    if memory:
        inputs |= {"first": first} | {f"memory_{i}": x for i, x in enumerate(memory)}
    logits, value, *carry = (np.asarray(output) for output in session.run(None, inputs))
    return ProgramOutputs(logits, value, tuple(carry))


def largest_difference(one: ProgramOutputs, other: ProgramOutputs) -> float:
    """The largest difference between two outputs, absolute or relative, whichever is smaller; infinity for NaN."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    largest = np.max([np.max(np.abs(a - b) / np.maximum(1, np.abs(a))) for a, b in pairs])
    return math.inf if np.isnan(largest) else float(largest)
