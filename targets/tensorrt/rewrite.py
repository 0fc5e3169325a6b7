"""Exact equivalents of what TensorRT refuses or misreads, put into the copy of the model that the engine is built from.

That copy ships as ``model.onnx``, and it is what ONNX Runtime answers the golden cases with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from packager.model import Signature
from packager.room import Step
from packager.targets.tensorrt.rules import is_floor_resize
from packager.transform import Context, Outcome
from packager.transform_edit import peek, put
from packager.transform_graphs import all_names, constant, drop_dead, fresh, replace_value

if TYPE_CHECKING:
    import onnx_ir as ir

UNKNOWN = "?"
"""How some exporters call every dim that they know nothing of."""

CHANNEL_OPSET, HALF_SCALE_OPSET = 13, 19
"""DequantizeLinear has a scale per channel since opset 13, and scales of float16 since 19."""


@dataclass(frozen=True)
class ForTensorRT:
    """Weights stored as int8 behind a Cast become DequantizeLinear, Resize says half_pixel where it can, and dims that
    nothing is known of have no name."""

    name: str = "for-tensorrt"

    def step(self) -> Step:
        """The line of the plan."""
        return Step("Rewriting for TensorRT")

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Rewrite in place; what is rewritten stands in the plan's steps."""
        taken = all_names(model)
        for value in model.graph.inputs:
            _unname(value)
        for node in list(model.graph.all_nodes()):
            if node.domain:
                continue
            mode = str(peek(node, "coordinate_transformation_mode", ""))
            if is_floor_resize(node.op_type, mode, str(peek(node, "nearest_mode", ""))):
                put(node, "coordinate_transformation_mode", "half_pixel")
                put(node, "nearest_mode", "round_prefer_ceil")
            elif node.op_type == "Cast":
                _unpack(model, node, taken)
        drop_dead(model)
        return Outcome(model)


def _unname(value: ir.Value) -> None:
    """Take the name ``?`` from dims: TensorRT would take all dims of that name for one size."""
    if value.shape is None:
        return
    shape = value.shape.copy(frozen=False)
    for axis, dim in enumerate(shape):
        if getattr(dim, "value", dim) == UNKNOWN:
            shape[axis] = None
    value.shape = shape


def _unpack(model: ir.Model, cast: ir.Node, taken: set[str]) -> None:
    """``Cast(int8 constant)``, times a constant scale where one follows, as DequantizeLinear; as float where it can't.

    TensorRT takes an int8 constant in front of DequantizeLinear only.
    """
    import onnx_ir as ir

    stored, result = cast.inputs[0], cast.outputs[0]
    tensor = constant(stored)
    if stored is None or tensor is None or tensor.dtype != ir.DataType.INT8:
        return
    target = ir.DataType(int(peek(cast, "to")))
    opset = model.graph.opset_imports.get("", 0)
    scales = target == ir.DataType.FLOAT or (target == ir.DataType.FLOAT16 and opset >= HALF_SCALE_OPSET)
    for user, _ in list(result.uses()) if scales and opset >= CHANNEL_OPSET else ():
        scale = _scale(user, result)
        axis = None if scale is None or scale.dtype != target else _axis(scale.shape, tensor.shape)
        if axis is not None:
            _dequantize(model, user, stored, scale.numpy(), axis, taken)
    if result.uses() or result.is_graph_output():
        cast.replace_input_with(
            0, _initializer(model, f"{stored.name}_float", tensor.numpy().astype(target.numpy()), taken)
        )


def _scale(node: ir.Node, other: ir.Value) -> Any:  # noqa: ANN401 - onnx-ir's tensors are a protocol of its own
    """The constant that a Mul multiplies ``other`` by."""
    if node.op_type != "Mul" or node.domain:
        return None
    return next((constant(value) for value in node.inputs if value is not other), None)


def _axis(scale: Sequence[int], weight: Sequence[int]) -> int | None:
    """The axis along which a scale of that shape varies; ``None`` where DequantizeLinear can't say it.

    A scalar varies along none, for which axis 0 is as good as any.
    """
    sizes = [1] * (len(weight) - len(scale)) + [int(size) for size in scale]
    if len(sizes) != len(weight):
        return None
    axes = [axis for axis, size in enumerate(sizes) if size != 1]
    if not axes:
        return 0
    return axes[0] if len(axes) == 1 and sizes[axes[0]] == int(weight[axes[0]]) else None


def _dequantize(model: ir.Model, mul: ir.Node, stored: ir.Value, scale: np.ndarray, axis: int, taken: set[str]) -> None:
    """Let DequantizeLinear, which has no zero point and so a zero one, stand for a Mul: both give x * scale."""
    import onnx_ir as ir

    graph, output = mul.graph, mul.outputs[0]
    assert graph is not None  # noqa: S101 - for the type checker
    flat = _initializer(model, f"{output.name}_scale", scale.reshape(() if scale.size == 1 else -1), taken)
    made = ir.Node("", "DequantizeLinear", [stored, flat], [ir.AttrInt64("axis", axis)], num_outputs=1, name=mul.name)
    new = made.outputs[0]
    new.name, new.type, new.shape = fresh(f"{output.name}_dequantized", taken), output.type, output.shape
    graph.insert_before(mul, made)
    replace_value(output, new, graph, taken)


def _initializer(model: ir.Model, name: str, array: np.ndarray, taken: set[str]) -> ir.Value:
    import onnx_ir as ir

    tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape), name=fresh(name, taken))
    made = ir.Value(
        name=tensor.name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    model.graph.register_initializer(made)
    return made
