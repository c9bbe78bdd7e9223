"""The ONNX graphs of this package's networks.

They are made with `onnx.helper`. The maintained converter, jax2onnx 0.17, needs an orbax-checkpoint older than
0.11.37, which cannot read this package's checkpoints.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, checker, helper, numpy_helper

OPSET = 17
"""The operators of onnx 1.12 (2022). The graph needs no newer ones, which would shut out older runtimes."""

IR_VERSION = 8
"""The file format of onnx 1.12, for the same reason."""

Tensor = str
"""The name of a value in the graph."""

Layer = Mapping[str, np.ndarray]
"""The `kernel` and, unless the layer has none, the `bias`."""


class Graph:
    """The nodes of a graph, one for each call. Images are `[N, channels, height, width]`."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def node(self, operator: str, *inputs: Tensor, **attributes: Any) -> Tensor:
        """Adds an operator with one output."""
        name = f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def constant(self, value: Any) -> Tensor:
        """Adds an array."""
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def pixels(self, stacks: Tensor) -> Tensor:
        """Frame stacks, uint8 `[N, 84, 84, 4]`, as images of float32 in [0, 1]."""
        scaled = self.node("Div", self.node("Cast", stacks, to=TensorProto.FLOAT), self.constant(np.float32(255)))
        return self.node("Transpose", scaled, perm=[0, 3, 1, 2])

    def conv(self, x: Tensor, layer: Layer, stride: int = 1, pad: int = 0) -> Tensor:
        """A convolution of images with `pad` zeros on each side; the kernel is `[height, width, in, out]`."""
        kernel = self.constant(layer["kernel"].transpose(3, 2, 0, 1))
        bias = self.constant(layer["bias"])
        return self.node("Conv", x, kernel, bias, strides=[stride] * 2, pads=[pad] * 4)

    def dense(self, x: Tensor, layer: Layer) -> Tensor:
        """`x @ kernel + bias`."""
        product = self.node("MatMul", x, self.constant(layer["kernel"]))
        return self.node("Add", product, self.constant(layer["bias"])) if "bias" in layer else product

    def relu(self, x: Tensor) -> Tensor:
        """`max(x, 0)`."""
        return self.node("Relu", x)

    def flatten(self, x: Tensor) -> Tensor:
        """Images as `[N, features]`, in the order height, width, channels of the trained dense layer."""
        return self.node("Flatten", self.node("Transpose", x, perm=[0, 2, 3, 1]), axis=1)


# --- Networks ----------------------------------------------------------------------------------------------------

Params = Mapping[str, Any]
"""Nested dicts of float32 arrays, by the names of the network's layers."""

Network = Callable[[Graph, Params, list[Tensor]], tuple[Tensor, list[Tensor]]]
"""(graph, parameters, memory before the step) -> (features for the heads, memory after it).

The inputs are `stacks` and, if the network is recurrent, `first` and the memory.
"""


def nature_torso(graph: Graph, params: Params) -> Tensor:
    """The convolutions of Mnih et al. 2015, and a dense layer."""
    x = graph.pixels("stacks")
    for name, stride in (("conv1", 4), ("conv2", 2), ("conv3", 1)):
        x = graph.relu(graph.conv(x, params[name], stride=stride))
    return graph.relu(graph.dense(graph.flatten(x), params["dense"]))


def nature(graph: Graph, params: Params, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The network of Mnih et al. 2015 with two heads."""
    return nature_torso(graph, params), []


def impala(graph: Graph, params: Params, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The residual network of Espeholt et al. 2018: three sections of five convolutions."""
    x = graph.pixels("stacks")
    convolutions = iter(params[f"Conv_{i}"] for i in range(15))
    for _ in range(3):
        x = graph.conv(x, next(convolutions), pad=1)
        x = graph.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")
        for _ in range(2):
            residual = graph.conv(graph.relu(x), next(convolutions), pad=1)
            x = graph.node("Add", x, graph.conv(graph.relu(residual), next(convolutions), pad=1))
    return graph.relu(graph.dense(graph.flatten(graph.relu(x)), params["dense"])), []


def nature_lstm(graph: Graph, params: Params, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """`nature` with an LSTM between its features and its heads. The memory is (cell, output)."""
    x = nature_torso(graph, params)
    starts = graph.node("Unsqueeze", "first", graph.constant(np.array([1])))
    cell, hidden = (graph.node("Where", starts, graph.constant(np.float32(0)), each) for each in memory)
    gates = params["lstm"]["cell"]

    def gate(name: str, activation: str) -> Tensor:
        total = graph.node("Add", graph.dense(x, gates[f"i{name}"]), graph.dense(hidden, gates[f"h{name}"]))
        return graph.node(activation, total)

    kept = graph.node("Mul", gate("f", "Sigmoid"), cell)
    cell = graph.node("Add", kept, graph.node("Mul", gate("i", "Sigmoid"), gate("g", "Tanh")))
    hidden = graph.node("Mul", gate("o", "Sigmoid"), graph.node("Tanh", cell))
    return hidden, [cell, hidden]


NETWORKS: dict[str, Network] = {"nature": nature, "impala": impala, "nature_lstm": nature_lstm}


def make_model(
    network: str, params: Params, num_actions: int, memory_sizes: Sequence[int], about: Mapping[str, Any]
) -> ModelProto:
    """The model of a network.

    Args:
        network: a name in `NETWORKS`.
        params: its parameters, as NumPy arrays.
        num_actions: number of actions.
        memory_sizes: sizes of the arrays of the network's memory; empty if the network is not recurrent.
        about: JSON values for the entry `about` of the model's metadata.

    Returns:
        A model with the input `stacks` uint8 `[batch, 84, 84, 4]` and the outputs `logits` `[batch, num_actions]`
        and `value` `[batch]`. A recurrent network also has the inputs `first` bool `[batch]` and `memory_<i>`
        `[batch, size]`, and the outputs `new_memory_<i>`.
    """
    graph = Graph()
    memory = [f"memory_{i}" for i in range(len(memory_sizes))]
    features, new_memory = NETWORKS[network](graph, params, memory)
    value = graph.node("Squeeze", graph.dense(features, params["value"]), graph.constant(np.array([1])))
    results = {"logits": graph.dense(features, params["policy"]), "value": value}
    results |= {f"new_{name}": new for name, new in zip(memory, new_memory, strict=True)}
    nodes = [*graph.nodes, *(helper.make_node("Identity", [x], [name]) for name, x in results.items())]

    info = helper.make_tensor_value_info
    inputs = [info("stacks", TensorProto.UINT8, ("batch", 84, 84, 4))]
    outputs = [
        info("logits", TensorProto.FLOAT, ("batch", num_actions)),
        info("value", TensorProto.FLOAT, ("batch",)),
    ]
    if memory:
        inputs.append(info("first", TensorProto.BOOL, ("batch",)))
    for name, size in zip(memory, memory_sizes, strict=True):
        inputs.append(info(name, TensorProto.FLOAT, ("batch", size)))
        outputs.append(info(f"new_{name}", TensorProto.FLOAT, ("batch", size)))
    model = helper.make_model(
        helper.make_graph(nodes, "policy", inputs, outputs, graph.constants),
        opset_imports=[helper.make_opsetid("", OPSET)],
        producer_name="jaxrl_atari",
    )
    model.ir_version = IR_VERSION
    helper.set_model_props(model, {"about": json.dumps(about)})
    checker.check_model(model, full_check=True)
    return model
