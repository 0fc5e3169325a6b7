"""BatchNormalization at inference is a multiplication and an addition per channel: folded into weights where it can be.

Accelerators that compute in integers have little use for the operator itself: its statistics would be rounded to bytes
each, and with 16-bit activations some have no kernel for it. After a convolution whose result nothing else reads, the
factor goes into the weights and the shift into the bias, which costs nothing and lets a quantiser see the weights that
are really used. Anywhere else the node becomes a Mul and an Add. Other constant factors after a convolution go the same
way where that is asked: a runtime that folds them itself, into weights that are rounded already, rounds twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from packager.float16_rules import constant, label_of
from packager.goldens import Array
from packager.model import Signature
from packager.room import Step
from packager.transform import Context, Outcome
from packager.transform_inference import infer

if TYPE_CHECKING:
    import onnx_ir as ir

Floats = npt.NDArray[np.floating]

EPSILON = 1e-5
"""The operator's default ``epsilon``."""


@dataclass(frozen=True)
class FoldBatchNorm:
    """Replace every BatchNormalization whose statistics are constant.

    ``y = (x - mean) / sqrt(var + epsilon) * scale + bias`` (ONNX, BatchNormalization) is ``x * factor + shift`` with
    ``factor = scale / sqrt(var + epsilon)`` and ``shift = bias - mean * factor``, both computed in float64. Nodes whose
    statistics are not constant, or that give statistics themselves (training), stay, and a note names them. With
    ``scales``, Mul by a constant (one for all, or one a channel) after a convolution goes into its weights too.
    """

    scales: bool = False
    name: Literal["fold-batchnorm"] = "fold-batchnorm"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Folding batch normalisation", (("into", "weights of convolutions; elsewhere a Mul and an Add"),))

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Fold; shapes are inferred first, since a Mul must know where the channels are."""
        found = infer(model)
        ranks = {value: len(known.dims) for value, known in found.items() if known.dims is not None}
        nodes = [node for node in model.graph if node.op_type == "BatchNormalization" and not node.domain]
        held = {name for name, value in model.graph.initializers.items() if value.uses()}
        left = [node for node in nodes if not _fold(model.graph, node, ranks)]
        for node in [node for node in model.graph if self.scales and node.op_type == "Mul" and not node.domain]:
            _fold_scale(model.graph, node)
        for name, value in list(model.graph.initializers.items()):
            if name in held and not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del model.graph.initializers[name]
        listed = ", ".join(label_of(node) for node in left)
        return Outcome(model, (f"batch normalisation without constant statistics stays: {listed}",) if left else ())


def _fold(graph: ir.Graph, node: ir.Node, ranks: Mapping[ir.Value, int]) -> bool:
    """Replace one node; ``False`` where it must stay."""
    values = [_array(value) for value in node.inputs[1:5]]
    statistics = node.outputs[1:]
    training = "training_mode" in node.attributes and node.attributes["training_mode"].as_int() != 0
    if (
        training
        or any(value is None for value in values)
        or any(out.uses() or out.is_graph_output() for out in statistics)
    ):
        return False
    scale, bias, mean, variance = (value.astype(np.float64) for value in values if value is not None)
    attribute = node.attributes.get("epsilon")
    factor = scale / np.sqrt(variance + (EPSILON if attribute is None else attribute.as_float()))
    shift = bias - mean * factor
    source = node.inputs[0]
    made = None if source is None else source.producer()
    if source is None:
        return False
    alone = made is not None and len(source.uses()) == 1 and not source.is_graph_output() and made.graph is graph
    if alone and made is not None and _into_weights(graph, made, node, factor, shift):
        return True
    rank = ranks.get(source)
    if rank is None:
        return False
    shape = [-1, *[1] * (rank - 2)]
    dtype = np.dtype(values[0].dtype) if values[0] is not None else np.dtype(np.float32)
    _as_arithmetic(graph, node, source, factor.reshape(shape).astype(dtype), shift.reshape(shape).astype(dtype))
    return True


def _fold_scale(graph: ir.Graph, node: ir.Node) -> None:
    """Let the convolution before a Mul by a constant do its work, where there is one that can."""
    for source, value in (node.inputs, node.inputs[::-1]):
        conv, factor = None if source is None else source.producer(), _array(value)
        if source is None or conv is None or factor is None or factor.dtype.kind != "f" or not _is_convolution(conv):
            continue
        weights = _array(conv.inputs[1])
        alone = len(source.uses()) == 1 and not source.is_graph_output() and conv.graph is graph
        if weights is None or not alone or factor.ndim > weights.ndim:
            continue
        sizes = (1,) * (weights.ndim - factor.ndim) + factor.shape
        channels = weights.shape[0] if conv.op_type == "Conv" else weights.shape[1]
        if sizes[1] in (1, channels) and factor.size == sizes[1]:
            wide = np.broadcast_to(factor.reshape(-1).astype(np.float64), channels)
            _into_weights(graph, conv, node, wide, np.zeros(channels))
            return


def _into_weights(graph: ir.Graph, conv: ir.Node, node: ir.Node, factor: Floats, shift: Floats) -> bool:
    """Let a convolution do the work of the node after it; ``False`` where its weights are not its own."""
    if not _is_convolution(conv):
        return False
    group = conv.attributes.get("group")
    weights = _array(conv.inputs[1])
    bias = _array(conv.inputs[2]) if len(conv.inputs) > 2 and conv.inputs[2] is not None else np.zeros(1)
    transposed = conv.op_type == "ConvTranspose"
    if weights is None or bias is None or (transposed and group is not None and group.as_int() != 1):
        return False
    # Output channels are the first axis of Conv's weights, and with one group the second of ConvTranspose's.
    shape = [1] * weights.ndim
    shape[1 if transposed else 0] = -1
    scaled = weights.astype(np.float64) * factor.reshape(shape)
    output, before = node.outputs[0], conv.outputs[0]
    new_weights = _initializer(graph, f"{output.name}_weight", scaled, weights.dtype)
    new_bias = _initializer(graph, f"{output.name}_bias", bias.astype(np.float64) * factor + shift, weights.dtype)
    conv.resize_inputs(3)
    conv.replace_input_with(1, new_weights)
    conv.replace_input_with(2, new_bias)
    _take_over(graph, node, before)
    return True


def _is_convolution(node: ir.Node) -> bool:
    return not node.domain and node.op_type in ("Conv", "ConvTranspose") and len(node.inputs) > 1


def _as_arithmetic(graph: ir.Graph, node: ir.Node, source: ir.Value, factor: Array, shift: Array) -> None:
    import onnx_ir as ir

    output = node.outputs[0]
    factors = _initializer(graph, f"{output.name}_factor", factor, factor.dtype)
    shifts = _initializer(graph, f"{output.name}_shift", shift, shift.dtype)
    multiply = ir.node("Mul", [source, factors], name=f"{node.name or output.name}_factor")
    add = ir.node("Add", [multiply.outputs[0], shifts], name=f"{node.name or output.name}_shift")
    multiply.outputs[0].name = f"{output.name}_scaled"
    for value in (multiply.outputs[0], add.outputs[0]):
        value.type, value.shape = source.type, source.shape
    graph.insert_before(node, [multiply, add])
    _take_over(graph, node, add.outputs[0])


def _take_over(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Remove a node; ``value`` takes the place, and the name, of its first output."""
    output = node.outputs[0]
    name, kind, shape = output.name, output.type, output.shape
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    value.name, value.type, value.shape = name, kind, shape


def _array(value: ir.Value | None) -> Array | None:
    """What a value always holds, where that is known."""
    tensor = constant(value)
    return None if tensor is None else tensor.numpy()


def _initializer(graph: ir.Graph, name: str, array: Array, dtype: np.dtype[np.generic]) -> ir.Value:
    import onnx_ir as ir

    while name in graph.initializers:
        name += "_"
    value = ir.Value(name=name, const_value=ir.tensor(np.ascontiguousarray(array.astype(dtype)), name=name))
    value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(dtype)), ir.Shape(array.shape)
    graph.register_initializer(value)
    return value
