"""The ONNX graph of a network of `play.py`, whose layers become nodes.

The graph is made with `onnx.helper`. The maintained converter, jax2onnx 0.17, needs an orbax-checkpoint older than
0.11.37, which cannot read this package's checkpoints.
"""

from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, checker, helper, numpy_helper

from jaxrl_atari.export import play

OPSET = 17
"""The operators of onnx 1.12 (2022). The graph needs no newer ones, which would shut out older runtimes."""

IR_VERSION = 8
"""The file format of onnx 1.12, for the same reason."""

Tensor = str
"""The name of a value in the graph."""


class OnnxLayers:
    """The `play.Layers` as nodes of a graph. Images are `[N, channels, height, width]`, as in ONNX."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def _node(self, operator: str, *inputs: Tensor, **attributes: Any) -> Tensor:
        name = f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def _constant(self, value: Any) -> Tensor:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def pixels(self, stacks: Tensor) -> Tensor:
        real = self._node("Cast", stacks, to=TensorProto.FLOAT)
        return self._node("Transpose", self._node("Div", real, self._constant(np.float32(255))), perm=[0, 3, 1, 2])

    def conv(self, x: Tensor, layer: play.Parameters, stride: int = 1, pad: int = 0) -> Tensor:
        kernel = self._constant(layer["kernel"].transpose(3, 2, 0, 1))
        bias = self._constant(layer["bias"])
        return self._node("Conv", x, kernel, bias, strides=[stride] * 2, pads=[pad] * 4)

    def max_pool(self, x: Tensor) -> Tensor:
        return self._node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")

    def dense(self, x: Tensor, layer: play.Parameters) -> Tensor:
        product = self._node("MatMul", x, self._constant(layer["kernel"]))
        return self._node("Add", product, self._constant(layer["bias"])) if "bias" in layer else product

    def relu(self, x: Tensor) -> Tensor:
        return self._node("Relu", x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._node("Sigmoid", x)

    def tanh(self, x: Tensor) -> Tensor:
        return self._node("Tanh", x)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._node("Add", x, y)

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        return self._node("Mul", x, y)

    def flatten(self, x: Tensor) -> Tensor:
        # The dense layer was trained with the order [height, width, channels].
        return self._node("Flatten", self._node("Transpose", x, perm=[0, 2, 3, 1]), axis=1)

    def forget(self, memory: Tensor, first: Tensor) -> Tensor:
        column = self._node("Unsqueeze", first, self._constant(np.array([1])))
        return self._node("Where", column, self._constant(np.float32(0)), memory)

    def scalar(self, x: Tensor) -> Tensor:
        return self._node("Squeeze", x, self._constant(np.array([1])))


def make_model(
    network: play.Network, params: play.Parameters, num_actions: int, memory_sizes: list[int]
) -> ModelProto:
    """The graph of a network.

    Args:
        network: one of `play.NETWORKS`.
        params: its parameters, as NumPy arrays.
        num_actions: number of actions.
        memory_sizes: sizes of the arrays of the network's memory; empty if the network is not recurrent.

    Returns:
        A model with the input `stacks` uint8 `[batch, 84, 84, 4]` and the outputs `logits` `[batch, num_actions]`
        and `value` `[batch]`. A recurrent network also has the inputs `first` bool `[batch]` and `memory_<i>`, and
        the outputs `new_memory_<i>`.
    """
    layers = OnnxLayers()
    memory = tuple(f"memory_{i}" for i in range(len(memory_sizes)))
    logits, value, new_memory = network(layers, params, "stacks", "first", memory)
    results = {"logits": logits, "value": value}
    results |= {f"new_{name}": new for name, new in zip(memory, new_memory, strict=True)}
    nodes = [*layers.nodes, *(helper.make_node("Identity", [x], [name]) for name, x in results.items())]

    def info(name: str, kind: int, shape: tuple) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    inputs = [info("stacks", TensorProto.UINT8, ("batch", *play.STACK_SHAPE))]
    outputs = [
        info("logits", TensorProto.FLOAT, ("batch", num_actions)),
        info("value", TensorProto.FLOAT, ("batch",)),
    ]
    if memory_sizes:
        inputs.append(info("first", TensorProto.BOOL, ("batch",)))
    for name, size in zip(memory, memory_sizes, strict=True):
        inputs.append(info(name, TensorProto.FLOAT, ("batch", size)))
        outputs.append(info(f"new_{name}", TensorProto.FLOAT, ("batch", size)))
    graph = helper.make_graph(nodes, "policy", inputs, outputs, layers.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="jaxrl_atari")
    model.ir_version = IR_VERSION
    checker.check_model(model, full_check=True)
    return model
