"""A policy as a program for JAX, and running exported programs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxrl_atari.networks import Network, Observation

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
