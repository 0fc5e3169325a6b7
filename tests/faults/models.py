"""The witness, a small network with something of everything, and what a converter could do wrong to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Change = Callable[[onnx.ModelProto], None]
node = helper.make_node


def witness() -> onnx.ModelProto:
    """Convolutions with and without padding, normalisation, pooling, a resize, linear layers, two outputs alike.

    ``image`` is float32 [2, 3, 16, 16]; ``scores`` are probabilities and ``levels`` plain numbers, both [2, 5].
    """
    rng = np.random.default_rng(7)

    def weight(*shape: int) -> Array:
        made: Array = (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)
        return made

    held = {
        "w1": weight(8, 3, 3, 3), "b1": weight(8), "gamma": np.abs(weight(8)) + 1, "beta": weight(8),
        "mean": weight(8) / 4, "var": np.abs(weight(8)) + 0.5, "w2": weight(6, 8, 3, 3), "b2": weight(6),
        "w3": weight(96, 10), "b3": weight(10), "w4": weight(10, 5), "w5": weight(10, 5), "b5": weight(5),
        "sizes": np.array([2, 6, 4, 4], np.int64), "flat": np.array([0, -1], np.int64),
    }  # fmt: skip
    nodes = [
        node("Conv", ["image", "w1", "b1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c1", "gamma", "beta", "mean", "var"], ["n1"], "norm", epsilon=1e-3),
        node("Relu", ["n1"], ["r1"], "relu"),
        node("MaxPool", ["r1"], ["p1"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["p1", "w2", "b2"], ["c2"], "conv2"),
        node("Tanh", ["c2"], ["t2"], "tanh"),
        node("Resize", ["t2", "", "", "sizes"], ["s2"], "resize", mode="linear",
             coordinate_transformation_mode="half_pixel"),
        node("Reshape", ["s2", "flat"], ["f2"], "flatten"),
        node("Gemm", ["f2", "w3", "b3"], ["g3"], "dense"),
        node("Sigmoid", ["g3"], ["h3"], "gate"),
        node("MatMul", ["h3", "w4"], ["m4"], "head"),
        node("Softmax", ["m4"], ["scores"], "softmax", axis=-1),
        node("Gemm", ["h3", "w5", "b5"], ["levels"], "levels"),
    ]  # fmt: skip
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 5]) for name in ("scores", "levels")]
    graph = helper.make_graph(
        nodes, "witness", [helper.make_tensor_value_info("image", TensorProto.FLOAT, [2, 3, 16, 16])], outputs,
        [numpy_helper.from_array(array.astype(array.dtype), name) for name, array in held.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _tensor(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def _node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(each for each in model.graph.node if each.name == name)


def weights(name: str, change: Callable[[Array], Array]) -> Change:
    """Other values for one constant."""

    def apply(model: onnx.ModelProto) -> None:
        tensor = _tensor(model, name)
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(change(array.copy()).astype(array.dtype), name))

    return apply


def operator(name: str, op_type: str, drop: tuple[str, ...] = (), **attributes: object) -> Change:
    """Another operator, or other attributes, for one node."""

    def apply(model: onnx.ModelProto) -> None:
        changed = _node(model, name)
        kept = [each for each in changed.attribute if each.name not in (*drop, *attributes)]
        del changed.attribute[:]
        changed.attribute.extend([*kept, *(helper.make_attribute(key, value) for key, value in attributes.items())])
        changed.op_type = op_type

    return apply


def swapped_outputs(model: onnx.ModelProto) -> None:
    """Each output under the other's name."""
    softmax, levels = _node(model, "softmax"), _node(model, "levels")
    softmax.output[0], levels.output[0] = "levels", "scores"


def before(name: str, *more: onnx.NodeProto) -> Change:
    """Nodes between one node and its first input; the last of them makes ``detour``."""

    def apply(model: onnx.ModelProto) -> None:
        changed = _node(model, name)
        made = [onnx.NodeProto.FromString(each.SerializeToString()) for each in more]
        made[0].input[0] = changed.input[0]
        changed.input[0] = "detour"
        place = list(model.graph.node).index(changed)
        nodes = [*model.graph.node[:place], *made, *model.graph.node[place:]]
        copies = [onnx.NodeProto.FromString(each.SerializeToString()) for each in nodes]
        del model.graph.node[:]
        model.graph.node.extend(copies)

    return apply


def with_constant(name: str, array: Array, change: Change) -> Change:
    """A change that needs a constant of its own."""

    def apply(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(array, name))
        change(model)

    return apply


def cast_output(model: onnx.ModelProto) -> None:
    """``levels`` as float64."""
    _node(model, "levels").output[0] = "narrow"
    model.graph.node.append(node("Cast", ["narrow"], ["levels"], "widen", to=TensorProto.DOUBLE))
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.DOUBLE


def transposed_output(model: onnx.ModelProto) -> None:
    """``levels`` as [5, 2]."""
    _node(model, "levels").output[0] = "upright"
    model.graph.node.append(node("Transpose", ["upright"], ["levels"], "turn", perm=[1, 0]))
    model.graph.output[1].CopyFrom(helper.make_tensor_value_info("levels", TensorProto.FLOAT, [5, 2]))


def other_weights(model: onnx.ModelProto) -> None:
    """Another model of the same signature: every float constant drawn anew."""
    rng = np.random.default_rng(99)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name != "var":
            array = numpy_helper.to_array(tensor)
            made = rng.standard_normal(array.shape).astype(np.float32) * np.std(array)
            tensor.CopyFrom(numpy_helper.from_array(made.astype(np.float32), tensor.name))


def scaled_element(array: Array, place: int, factor: float) -> Array:
    """One element times ``factor``."""
    array.reshape(-1)[place] *= factor
    return array


def rounded(array: Array, bits: int) -> Array:
    """Rounded to whole steps of the largest magnitude over ``2 ** (bits - 1) - 1``: weights quantised in silence."""
    step = float(np.abs(array).max()) / (2 ** (bits - 1) - 1)
    made: Array = np.round(array / step) * step
    return made


def rolled(axis: int) -> Callable[[Array], Array]:
    """Everything one place further along an axis: an off-by-one."""
    return lambda array: np.roll(array, 1, axis=axis)


MODEL_FAULTS: dict[str, Change] = {
    "a layer's weights scaled by 1.01": weights("w2", lambda w: w * 1.01),
    "a linear layer's weights scaled by 0.99": weights("w3", lambda w: w * 0.99),
    "two output channels swapped": weights("w1", lambda w: w[[1, 0, *range(2, 8)]]),
    "two input channels swapped": weights("w1", lambda w: w[:, [1, 0, 2]]),
    "red and blue swapped": with_constant(
        "bgr", np.array([2, 1, 0], np.int64), before("conv1", node("Gather", ["", "bgr"], ["detour"], "bgr", axis=1))
    ),
    "a layout misread": before("conv1", node("Transpose", [""], ["detour"], "turn", perm=[0, 1, 3, 2])),
    "two outputs swapped": swapped_outputs,
    "an output transposed": transposed_output,
    "an output of another dtype": cast_output,
    "a bias zeroed": weights("b1", np.zeros_like),
    "a linear layer's bias zeroed": weights("b3", np.zeros_like),
    "a kernel flipped": weights("w1", lambda w: w[:, :, ::-1, ::-1]),
    "a kernel transposed": weights("w2", lambda w: w.transpose(0, 1, 3, 2)),
    "weights one column further": weights("w3", rolled(1)),
    "weights one row further": weights("w4", rolled(0)),
    "one axis beside the right one": operator("softmax", "Softmax", axis=0),
    "padding on one side only": operator("conv1", "Conv", pads=[0, 0, 2, 2]),
    "a normalisation's epsilon": operator("norm", "BatchNormalization", epsilon=0.1),
    "a normalisation's mean ignored": weights("mean", np.zeros_like),
    "a normalisation's variance taken for a deviation": weights("var", lambda v: v * v),
    "an activation left out": operator("relu", "Identity"),
    "Relu taken for LeakyRelu": operator("relu", "LeakyRelu", alpha=0.1),
    "Sigmoid taken for HardSigmoid": operator("gate", "HardSigmoid"),
    "Tanh taken for Softsign": operator("tanh", "Softsign"),
    "MaxPool taken for AveragePool": operator("pool", "AveragePool"),
    "a resize with aligned corners": operator("resize", "Resize", coordinate_transformation_mode="align_corners"),
    "a resize by nearest neighbours": operator("resize", "Resize", mode="nearest"),
    "Softmax taken for LogSoftmax": operator("softmax", "LogSoftmax"),
    "NaN in one weight": weights("w3", lambda w: scaled_element(w, 17, np.nan)),
    "infinity in one weight": weights("w2", lambda w: scaled_element(w, 17, np.inf)),
    "one weight's sign": weights("w4", lambda w: scaled_element(w, int(np.abs(w).argmax()), -1)),
    "values cut off": with_constant(
        "most", np.array(0.2, np.float32), before("head", node("Clip", ["", "", "most"], ["detour"], "cut"))
    ),
    "weights of 8 bits in an fp32 bundle": weights("w3", lambda w: rounded(w, 8)),
    "weights cut short": weights("w3", lambda w: np.where(np.arange(96)[:, None] < 90, w, 0)),
    "a bias added twice": weights("b5", lambda b: b * 2),
    "Gemm's alpha": operator("dense", "Gemm", alpha=1.02),
    "Gemm's beta": operator("dense", "Gemm", beta=0.0),
    "another model of the same signature": other_weights,
}
"""Sentences and what they do to the witness."""
