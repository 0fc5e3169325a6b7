"""Linear layers and tables in int8 with activations measured at run time, in the main graph and in bodies.

``y = x @ w`` becomes ``y = float(q(x) @ q(w)) * (s(x) * s(w))``: ``q(x)`` is uint8 with one scale and zero point, found
by DynamicQuantizeLinear in each run; ``q(w)`` is int8 without a zero point, a scale for each output (``per_channel``)
or one. That is what ONNX Runtime's quantiser makes of a MatMul, with the same numbers (a test holds it to that). But
it wants the model three times in memory and leaves Gemm and the bodies of If, Loop and Scan alone; here weights are
worked on a few megabytes at a time, one tensor after another while the model is saved, wherever they are.

A table (a Gather of rows from a constant matrix) becomes rows of int8 with a scale for each: ``float(q[i]) * s[i]``.
Nothing is multiplied in integers there, so all 8 bits count whatever the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from packager.float16_rules import constant
from packager.transform_graphs import all_names, drop_dead, fresh

if TYPE_CHECKING:
    import onnx_ir as ir

MIN_TABLE = 1 << 12
"""Elements of the smallest table that is worth it."""
TABLE_STEPS = 127
Floats = npt.NDArray[np.float32]
CHUNK = 1 << 22
"""Elements of a weight that are worked on at once."""


@dataclass(frozen=True)
class Layer:
    """A MatMul or Gemm with a constant float32 weight: ``[..., K, N]``, or ``[N, K]`` where ``transposed``."""

    node: ir.Node
    value: ir.Value
    tensor: ir.TensorProtocol
    transposed: bool

    @property
    def outputs(self) -> int:
        """N."""
        return int(self.tensor.shape[-2 if self.transposed else -1])


def layers(model: ir.Model) -> Iterator[Layer]:
    """Every layer that can become integer, in the main graph and in bodies. A Gemm that scales or turns can't."""
    import onnx_ir as ir

    for node in model.graph.all_nodes():
        if node.domain or node.op_type not in ("MatMul", "Gemm"):
            continue
        value = node.inputs[1]
        tensor = constant(value)
        if value is None or tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) < 2:
            continue
        found = {name: attribute.value for name, attribute in node.attributes.items()}
        plain = found.get("alpha", 1.0) == 1.0 and found.get("beta", 1.0) == 1.0 and not found.get("transA")
        if plain and tensor.size and constant(node.inputs[0]) is None:
            yield Layer(node, value, tensor, bool(found.get("transB")))


def tables(model: ir.Model) -> Iterator[Layer]:
    """Every Gather of rows from a constant float32 matrix."""
    import onnx_ir as ir

    for node in model.graph.all_nodes():
        if node.domain or node.op_type != "Gather":
            continue
        value, axis = node.inputs[0], node.attributes.get("axis")
        tensor = constant(value)
        if value is None or tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
            continue
        if (axis is None or axis.as_int() == 0) and tensor.size >= MIN_TABLE:
            yield Layer(node, value, tensor, True)


def quantise_layers(model: ir.Model, exclude: Collection[str], *, per_channel: bool, reduce_range: bool) -> int:
    """Make every layer and table integer whose node isn't named in ``exclude``; how many. Nodes must have names."""
    chosen = [layer for layer in layers(model) if layer.node.name not in exclude]
    looked_up = [table for table in tables(model) if table.node.name not in exclude]
    work = _Work(all_names(model), per_channel, 64 if reduce_range else 127)
    for layer in chosen:
        work.replace(layer)
    for table in looked_up:
        work.replace_table(table)
    drop_dead(model)
    return len(chosen) + len(looked_up)


@dataclass
class _Work:
    """What has been made so far: activations by value and graph, weights by value and the way they lie."""

    taken: set[str]
    per_channel: bool
    top: int
    activations: dict[tuple[ir.Value, ir.Graph], tuple[ir.Value, ...]] = field(default_factory=dict)
    weights: dict[tuple[ir.Value, bool], tuple[ir.Value, ...]] = field(default_factory=dict)
    rows: dict[ir.Value, tuple[ir.Value, ...]] = field(default_factory=dict)

    def replace(self, layer: Layer) -> None:
        """Put the integer form in place of the node; its output keeps its name, type and shape."""
        import onnx_ir as ir

        node, stem = layer.node, layer.node.name
        x, x_scale, x_zero = self.activation(node)
        w, w_scale, w_zero = self.weight(layer)
        made: list[ir.Node] = []

        def new(op_type: str, inputs: list[ir.Value], suffix: str, dtype: ir.DataType, **attributes: int) -> ir.Value:
            settings = ir.convenience.convert_attributes(attributes)
            each = ir.Node("", op_type, inputs, settings, num_outputs=1, name=f"{stem}_{suffix}")
            each.outputs[0].name = fresh(f"{stem}_{suffix}", self.taken)
            each.outputs[0].type = ir.TensorType(dtype)
            made.append(each)
            return each.outputs[0]

        whole = new("MatMulInteger", [x, w, x_zero, w_zero], "quant", ir.DataType.INT32)
        cast = new("Cast", [whole], "quant_cast", ir.DataType.FLOAT, to=int(ir.DataType.FLOAT))
        scale = new("Mul", [x_scale, w_scale], "quant_scales_mul", ir.DataType.FLOAT)
        result = new("Mul", [cast, scale], "quant_output_scale_mul", ir.DataType.FLOAT)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None:
            result = new("Add", [result, bias], "quant_bias", ir.DataType.FLOAT)
        ir.convenience.replace_nodes_and_values(
            node.graph, insertion_point=node, old_nodes=[node], new_nodes=made,
            old_values=[node.outputs[0]], new_values=[result],
        )  # fmt: skip

    def replace_table(self, table: Layer) -> None:
        """Put rows of int8 and their scales in place of a table; the node's output keeps its name, type and shape."""
        import onnx_ir as ir

        node, tensor, stem = table.node, table.tensor, table.node.name
        rows, columns = (int(size) for size in tensor.shape)

        def scale() -> Floats:
            return weight_scale(np.asarray(tensor.numpy()).T, TABLE_STEPS, per_channel=True)

        def integers() -> npt.NDArray[np.int8]:
            return to_int8(np.asarray(tensor.numpy()).T, scale()).T

        key = table.value
        if key not in self.rows:
            self.rows[key] = (
                self._initializer(table, "rows", ir.DataType.INT8, [rows, columns], integers),
                self._initializer(table, "row_scales", ir.DataType.FLOAT, [rows, 1], lambda: scale().reshape(rows, 1)),
            )
        found = [ir.Node("", "Gather", [part, node.inputs[1]], num_outputs=1) for part in self.rows[key]]
        cast = ir.Node("", "Cast", [found[0].outputs[0]], [ir.AttrInt64("to", int(ir.DataType.FLOAT))], num_outputs=1)
        product = ir.Node("", "Mul", [cast.outputs[0], found[1].outputs[0]], num_outputs=1)
        made = [*found, cast, product]
        dtypes = (ir.DataType.INT8, ir.DataType.FLOAT, ir.DataType.FLOAT, ir.DataType.FLOAT)
        for each, suffix, dtype in zip(made, ("quant", "scales", "quant_cast", "quant_mul"), dtypes, strict=True):
            each.name, each.outputs[0].name = f"{stem}_{suffix}", fresh(f"{stem}_{suffix}", self.taken)
            each.outputs[0].type = ir.TensorType(dtype)
        ir.convenience.replace_nodes_and_values(
            node.graph, insertion_point=node, old_nodes=[node], new_nodes=made,
            old_values=[node.outputs[0]], new_values=[product.outputs[0]],
        )  # fmt: skip

    def activation(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """Quantised input, scale and zero point: measured once for all layers of a graph that read the value."""
        import onnx_ir as ir

        value, graph = node.inputs[0], node.graph
        assert value is not None and isinstance(graph, ir.Graph)  # noqa: S101 - for the type checker
        key = value, graph
        if key not in self.activations:
            measure = ir.Node("", "DynamicQuantizeLinear", [value], num_outputs=3)
            suffixes = (
                ("quantized", ir.DataType.UINT8),
                ("scale", ir.DataType.FLOAT),
                ("zero_point", ir.DataType.UINT8),
            )
            for output, (suffix, dtype) in zip(measure.outputs, suffixes, strict=True):
                output.name, output.type = fresh(f"{value.name}_{suffix}", self.taken), ir.TensorType(dtype)
            measure.name = f"{measure.outputs[0].name}_QuantizeLinear"
            node.prepend(measure)
            self.activations[key] = tuple(measure.outputs)
        return self.activations[key]

    def weight(self, layer: Layer) -> tuple[ir.Value, ...]:
        """Integers, scale and zero point: initializers of the graph the weight is in, computed when saved."""
        import onnx_ir as ir

        key = layer.value, layer.transposed
        if key in self.weights:
            return self.weights[key]
        tensor, by_channel = layer.tensor, self.per_channel
        shape = [int(size) for size in tensor.shape]
        shape = shape[::-1] if layer.transposed else shape
        width = [layer.outputs] if by_channel else []
        zeros = width if len(shape) == 2 else []

        def array() -> Floats:
            found: Floats = np.asarray(tensor.numpy())
            return found.T if layer.transposed else found

        def scale() -> Floats:
            return weight_scale(array(), self.top, per_channel=by_channel)

        int8 = ir.DataType.INT8
        made = (
            self._initializer(layer, "quantized", int8, shape, lambda: to_int8(array(), scale())),
            self._initializer(layer, "scale", ir.DataType.FLOAT, width, scale),
            self._initializer(layer, "zero_point", int8, zeros, lambda: np.zeros(zeros, np.int8)),
        )
        self.weights[key] = made
        return made

    def _initializer(
        self, layer: Layer, suffix: str, dtype: ir.DataType, shape: list[int], make: Callable[[], object]
    ) -> ir.Value:
        import onnx_ir as ir

        name = fresh(f"{layer.value.name}_{suffix}", self.taken)

        def tensor() -> ir.TensorProtocol:
            return ir.Tensor(np.ascontiguousarray(make()).reshape(shape), dtype=dtype, name=name)

        lazy = ir.LazyTensor(tensor, dtype, ir.Shape(shape), name=name)
        made = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=lazy)
        producer = layer.value.producer()
        graph = layer.value.graph if producer is None else producer.graph
        assert isinstance(graph, ir.Graph)  # noqa: S101 - for the type checker
        graph.register_initializer(made)
        return made


def weight_scale(weight: Floats, top: int, *, per_channel: bool) -> Floats:
    """The scale of a weight ``[..., N]``: its largest magnitude, by output or of all, over ``top`` steps.

    Where that is no normal float32, the scale is 1, as ONNX Runtime's quantiser has it.
    """
    flat = weight.reshape(-1, weight.shape[-1])
    largest = np.zeros(flat.shape[-1], np.float32)
    for rows in _pieces(flat):
        np.maximum(largest, np.abs(rows).max(axis=0), out=largest)
    found = (largest if per_channel else largest.max(keepdims=True)).astype(np.float64) * 2 / (2 * top)
    found[found < np.finfo(np.float32).tiny] = 1.0
    return found.astype(np.float32) if per_channel else found.astype(np.float32).reshape(())


def to_int8(weight: Floats, scale: Floats) -> npt.NDArray[np.int8]:
    """The weight ``[..., N]`` in steps of ``scale``, rounded to nearest even."""
    flat = weight.reshape(-1, weight.shape[-1])
    made = np.empty(flat.shape, np.int8)
    start = 0
    for rows in _pieces(flat):
        made[start : start + len(rows)] = np.clip(np.rint(rows / scale), -128, 127)
        start += len(rows)
    return made.reshape(weight.shape)


def _pieces(flat: Floats) -> Iterator[Floats]:
    step = max(1, CHUNK // max(1, flat.shape[-1]))
    for start in range(0, len(flat), step):
        yield flat[start : start + step]
