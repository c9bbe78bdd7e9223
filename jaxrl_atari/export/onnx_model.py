"""The ONNX graphs of this package's networks, in ONNX's text syntax.

The maintained converter, jax2onnx 0.17, needs an orbax-checkpoint older than 0.11.37, which cannot read this
package's checkpoints.

A parameter has the name of its path, such as `conv1_kernel`. A graph gets `stacks` and, if the network is
recurrent, `first` and `memory_<i>`. It ends with `features`, the input of the heads, and `new_memory_<i>`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from onnx import ModelProto, checker, helper, numpy_helper, parser

VERSIONS = 'ir_version: 8, opset_import: ["": 17]'
"""The file format and the operators of onnx 1.12 (2022). Newer ones would shut out older runtimes."""

CONSTANTS = "float white = {255.0}, int64[1] second = {1}"

IMAGE = """
    pixels = Cast <to = 1> (stacks)
    scaled = Div (pixels, white)
    image = Transpose <perm = [0, 3, 1, 2]> (scaled)
"""
"""Frame stacks as images of float32 in [0, 1], `[batch, channels, height, width]`."""

TORSO = f"""{IMAGE}
    conv1 = Conv <strides = [4, 4]> (image, conv1_kernel, conv1_bias)
    relu1 = Relu (conv1)
    conv2 = Conv <strides = [2, 2]> (relu1, conv2_kernel, conv2_bias)
    relu2 = Relu (conv2)
    conv3 = Conv (relu2, conv3_kernel, conv3_bias)
    relu3 = Relu (conv3)
    channels_last = Transpose <perm = [0, 2, 3, 1]> (relu3)
    flat = Flatten (channels_last)
    dense = Gemm (flat, dense_kernel, dense_bias)
"""
"""The convolutions of Mnih et al. 2015, and a dense layer without its ReLU."""

NATURE = f"""{TORSO}
    features = Relu (dense)
"""

SECTION = """
    conv{a} = Conv <pads = [1, 1, 1, 1]> ({image}, Conv_{a}_kernel, Conv_{a}_bias)
    pooled{a} = MaxPool <kernel_shape = [3, 3], strides = [2, 2], auto_pad = "SAME_UPPER"> (conv{a})
    relu{b} = Relu (pooled{a})
    conv{b} = Conv <pads = [1, 1, 1, 1]> (relu{b}, Conv_{b}_kernel, Conv_{b}_bias)
    relu{c} = Relu (conv{b})
    conv{c} = Conv <pads = [1, 1, 1, 1]> (relu{c}, Conv_{c}_kernel, Conv_{c}_bias)
    sum{c} = Add (pooled{a}, conv{c})
    relu{d} = Relu (sum{c})
    conv{d} = Conv <pads = [1, 1, 1, 1]> (relu{d}, Conv_{d}_kernel, Conv_{d}_bias)
    relu{e} = Relu (conv{d})
    conv{e} = Conv <pads = [1, 1, 1, 1]> (relu{e}, Conv_{e}_kernel, Conv_{e}_bias)
    sum{e} = Add (sum{c}, conv{e})
"""
"""A section of the network of Espeholt et al. 2018: a convolution, a max pooling and two residual blocks."""

IMPALA = f"""{IMAGE}
    {SECTION.format(image="image", a=0, b=1, c=2, d=3, e=4)}
    {SECTION.format(image="sum4", a=5, b=6, c=7, d=8, e=9)}
    {SECTION.format(image="sum9", a=10, b=11, c=12, d=13, e=14)}
    last_relu = Relu (sum14)
    channels_last = Transpose <perm = [0, 2, 3, 1]> (last_relu)
    flat = Flatten (channels_last)
    dense = Gemm (flat, dense_kernel, dense_bias)
    features = Relu (dense)
"""

GATE = """
    input_{gate} = MatMul (x, lstm_cell_i{gate}_kernel)
    hidden_{gate} = Gemm (hidden, lstm_cell_h{gate}_kernel, lstm_cell_h{gate}_bias)
    sum_{gate} = Add (input_{gate}, hidden_{gate})
    gate_{gate} = {activation} (sum_{gate})
"""

NATURE_LSTM = f"""{TORSO}
    x = Relu (dense)
    starts = Unsqueeze (first, second)
    zero = Constant <value_float = 0.0> ()
    cell = Where (starts, zero, memory_0)
    hidden = Where (starts, zero, memory_1)
    {GATE.format(gate="i", activation="Sigmoid")}
    {GATE.format(gate="f", activation="Sigmoid")}
    {GATE.format(gate="g", activation="Tanh")}
    {GATE.format(gate="o", activation="Sigmoid")}
    kept = Mul (gate_f, cell)
    added = Mul (gate_i, gate_g)
    new_memory_0 = Add (kept, added)
    squashed = Tanh (new_memory_0)
    features = Mul (gate_o, squashed)
    new_memory_1 = Identity (features)
"""
"""`NATURE` with an LSTM between its features and its heads. The memory is (cell, output)."""

HEADS = """
    logits = Gemm (features, policy_kernel, policy_bias)
    value_column = Gemm (features, value_kernel, value_bias)
    value = Squeeze (value_column, second)
"""

NETWORKS = {"nature": NATURE, "impala": IMPALA, "nature_lstm": NATURE_LSTM}
"""Name of a network -> its graph, up to its features."""


def make_model(
    network: str, params: Any, num_actions: int, memory_sizes: Sequence[int], about: Mapping[str, Any]
) -> ModelProto:
    """The model of a network.

    Args:
        network: a name in `NETWORKS`.
        params: its parameters, nested dicts of float32 arrays.
        num_actions: number of actions.
        memory_sizes: sizes of the arrays of the network's memory; empty if the network is not recurrent.
        about: JSON values for the entry `about` of the model's metadata.

    Returns:
        A model with the input `stacks` uint8 `[batch, 84, 84, 4]` and the outputs `logits` `[batch, num_actions]`
        and `value` `[batch]`. A recurrent network also has the inputs `first` bool `[batch]` and `memory_<i>`
        `[batch, size]`, and the outputs `new_memory_<i>`.
    """
    inputs = ["uint8[batch, 84, 84, 4] stacks"]
    outputs = [f"float[batch, {num_actions}] logits", "float[batch] value"]
    if memory_sizes:
        inputs.append("bool[batch] first")
    for i, size in enumerate(memory_sizes):
        inputs.append(f"float[batch, {size}] memory_{i}")
        outputs.append(f"float[batch, {size}] new_memory_{i}")
    signature = f"policy ({', '.join(inputs)}) => ({', '.join(outputs)})"
    model = parser.parse_model(f"<{VERSIONS}> {signature} <{CONSTANTS}> {{ {NETWORKS[network]} {HEADS} }}")
    for path, array in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="_")
        # A kernel of a convolution is [height, width, in, out] in flax, and [out, in, height, width] in ONNX.
        parameter = np.transpose(array, (3, 2, 0, 1)) if np.ndim(array) == 4 else np.asarray(array)
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(parameter), name))
    helper.set_model_props(model, {"about": json.dumps(about)})
    checker.check_model(model, full_check=True)
    return model
