"""Which nodes stay in float32 when a model becomes half precision, and why.

By operator: sums of many terms, squares and exponentials leave float16's range (65504) or its 11 bits of significand
long before their results matter. By what surrounds a node:

- a constant beyond the range (an attention mask of -3.4e38) keeps its consumer in float32, and so on along the
  elementwise operators its value passes, to the first that bounds it (Softmax, Sigmoid, ...), which is kept too.
  Nothing is clamped: a clamped mask changes rows that are masked whole. The one exception is a bound of Clip, Min or
  Max, which becomes infinity: no half number passes 65504, so that is exact in effect;
- a constant below the normal range (an epsilon of 1e-12) keeps the nodes that rely on it: to the division;
- whole-number arithmetic (positions, lengths, sizes, Resize scales) is exact in float32 to 2^24, in float16 to 2048;
- what stands between DequantizeLinear and QuantizeLinear stays as it is, or runtimes don't find their int8 patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

_SUM = "sums many terms"
_SQUARE = "squares leave the range of float16 at 256"
_EXPONENTIAL = "leaves the range of float16 at 11.1"
_NORM = "sums squares, and its variance may be tiny"
_RANDOM = "draws or fills by an attribute's dtype"
_COORDINATES = "coordinates need more than 11 bits"
_QUANTISE = "scales and steps need float32"
_ANGLE = "angles need more than 11 bits"

KEEP: dict[str, str] = {
    "Pow": _SQUARE, "ReduceSumSquare": _SQUARE, "ReduceL2": _SQUARE, "LpNormalization": _SQUARE, "LpPool": _SQUARE,
    "GlobalLpPool": _SQUARE, "ReduceSum": _SUM, "ReduceMean": _SUM, "ReduceL1": _SUM, "ReduceProd": _SUM,
    "ReduceLogSum": _SUM, "GlobalAveragePool": _SUM, "CumSum": _SUM, "CumProd": _SUM, "Det": _SUM, "DFT": _SUM,
    "STFT": _SUM, "Exp": _EXPONENTIAL, "Softplus": _EXPONENTIAL, "ReduceLogSumExp": _EXPONENTIAL, "Sinh": _EXPONENTIAL,
    "Cosh": _EXPONENTIAL, "Log": "its argument may underflow", "LayerNormalization": _NORM,
    "RMSNormalization": _NORM, "InstanceNormalization": _NORM, "GroupNormalization": _NORM, "LRN": _NORM,
    "MeanVarianceNormalization": _NORM, "Sin": _ANGLE, "Cos": _ANGLE, "Tan": _ANGLE, "GridSample": _COORDINATES,
    "AffineGrid": _COORDINATES, "RoiAlign": _COORDINATES, "MaxRoiPool": _COORDINATES,
    "NonMaxSuppression": _COORDINATES, "Range": "counts in float32", "RandomNormal": _RANDOM,
    "RandomNormalLike": _RANDOM, "RandomUniform": _RANDOM, "RandomUniformLike": _RANDOM, "Bernoulli": _RANDOM,
    "Multinomial": _RANDOM, "EyeLike": _RANDOM, "HannWindow": _RANDOM, "HammingWindow": _RANDOM,
    "BlackmanWindow": _RANDOM, "MelWeightMatrix": _RANDOM, "QuantizeLinear": _QUANTISE,
    "DequantizeLinear": _QUANTISE, "DynamicQuantizeLinear": _QUANTISE,
}  # fmt: skip
"""Operators of the default domain that stay float32, with the reason. Softmax is not among them: it subtracts the
row's maximum first, so it can't overflow, and runtimes sum it in float32."""
DEFAULT = tuple(sorted(KEEP))

MOVING = frozenset(
    {"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather", "GatherElements",
     "GatherND", "Concat", "Split", "Expand", "Tile", "Pad", "DepthToSpace", "SpaceToDepth", "Dropout",
     "ScatterElements", "ScatterND", "Compress", "ReverseSequence", "Trilu", "Unfold"}
)  # fmt: skip
"""Operators that move values and compute nothing."""
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Where", "Min", "Max", "Clip", "Sum"})
ROUNDING = frozenset({"Floor", "Ceil", "Round", "Mod", "Sqrt"})
BOUNDS = frozenset({"Clip", "Min", "Max"})
_PROTECTED = frozenset({"Sqrt", "Reciprocal", "Pow", "Log", "Max", "Clip", "Div", "Mul"})
_SIZES = {("Resize", 1), ("Resize", 2), ("Upsample", 1), ("Range", 0), ("Range", 1), ("Range", 2)}
_SMALL = 4096
"""Elements. A MatMul with a constant larger than this is a layer, not the making of angles."""
_CHUNK = 1 << 22


@dataclass
class Kept:
    """Nodes that stay float32 with the reason of each; the first reason stands."""

    reasons: dict[ir.Node, str] = field(default_factory=dict)

    def add(self, node: ir.Node, reason: str) -> bool:
        """Keep a node; whether it is new."""
        if node in self.reasons:
            return False
        self.reasons[node] = reason
        return True


def label_of(node: ir.Node) -> str:
    """How messages name a node (as :attr:`packager.graph.Node.label`)."""
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    if node.name:
        return f"{operator} '{node.name}'"
    made = next((value.name for value in node.outputs if value.name), "")
    return f"{operator} (unnamed, makes '{made}')" if made else f"{operator} (unnamed)"


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs in a node's attributes."""
    import onnx_ir as ir

    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.value
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.value


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor a value always holds: an initializer that is no graph input, or what a Constant node gives."""
    import onnx_ir as ir

    if value is None or value.is_graph_input():
        return None
    if value.is_initializer():
        return value.const_value
    node = value.producer()
    if node is None or node.op_type not in ("Constant", "ConstantOfShape") or node.domain:
        return None
    if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
        return ir.tensor(np.zeros(1, np.float32))
    if "value" in node.attributes:
        return node.attributes["value"].as_tensor()
    for name in ("value_float", "value_floats"):
        if name in node.attributes:
            return ir.tensor(np.asarray(node.attributes[name].value, dtype=np.float32))
    return None


def largest(tensor: ir.TensorProtocol) -> float:
    """The largest finite magnitude, read in pieces so that memory stays flat; 0 where there is none."""
    flat = np.asarray(tensor.numpy()).reshape(-1)
    found = 0.0
    for start in range(0, flat.size, _CHUNK):
        piece = np.abs(flat[start : start + _CHUNK].astype(np.float64))
        piece = piece[np.isfinite(piece)]
        found = max(found, float(piece.max(initial=0.0)))
    return found


def kept_by_rule(
    graphs: dict[ir.Graph, ir.Node | None], keep_types: Iterable[str], largest_low: float, smallest_low: float
) -> Kept:
    """All nodes that stay float32 by the rules of this module.

    Args:
        graphs: every graph of the model, subgraphs with the node that holds them.
        keep_types: operators to keep: ``Pow``, or ``com.acme.Op`` with a domain.
        largest_low: the half type's largest finite number.
        smallest_low: its smallest normal one.
    """
    kept, types = Kept(), frozenset(keep_types)
    nodes = [node for graph in graphs for node in graph]
    for node in nodes:
        operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        if operator in types:
            kept.add(node, KEEP.get(operator, "kept by name of its operator"))
        if node.op_type in ("ScatterElements", "ScatterND") and "reduction" in node.attributes:
            kept.add(node, _SUM)
        if not node.domain and any(map(_is_dequantised, node.inputs)):
            kept.add(node, "stands in a quantised pattern (DequantizeLinear before it)")
    values = [value for graph in graphs for value in graph.initializers.values()]
    values += [value for node in nodes if node.op_type in ("Constant", "ConstantOfShape") for value in node.outputs]
    homes = {output: (graph, holder) for graph, holder in graphs.items() if holder for output in graph.outputs}
    for value in values:
        _judge_constant(value, kept, largest_low, smallest_low, {out: held for out, (_, held) in homes.items()})
    for node in nodes:
        _keep_whole_numbers(node, kept)
    return kept


def _judge_constant(
    value: ir.Value, kept: Kept, largest_low: float, smallest_low: float, holders: dict[ir.Value, ir.Node]
) -> None:
    import onnx_ir as ir

    tensor = constant(value)
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or not tensor.size:
        return
    size = largest(tensor)
    if size > largest_low:
        _keep_huge(value, kept, f"constant '{value.name}' reaches {size:.3g}", holders)
    elif 0 < size < smallest_low:
        _keep_tiny(value, kept, f"constant '{value.name}' is at most {size:.3g}")


def _keep_huge(value: ir.Value, kept: Kept, reason: str, holders: dict[ir.Value, ir.Node]) -> None:
    """The consumers of a value beyond the range, along what hands it on, to what bounds it."""
    todo: list[ir.Value] = [value]
    seen: set[ir.Value] = set()
    first = True
    producer = value.producer()
    if producer is not None and producer.op_type == "ConstantOfShape":
        kept.add(producer, reason)
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in holders:
            kept.add(holders[current], reason)
            todo += holders[current].outputs
        for node, index in current.uses():
            if first and node.op_type in BOUNDS and not node.domain and (index > 0 or node.op_type != "Clip"):
                continue  # becomes infinity, which bounds as much
            kept.add(node, reason)
            if not node.domain and node.op_type in (MOVING | ELEMENTWISE):
                todo += node.outputs
        first = False


def _keep_tiny(value: ir.Value, kept: Kept, reason: str) -> None:
    """The consumers of a value below the normal range, what makes their other inputs, and the way to the division."""
    todo: list[ir.Node] = [node for node, _ in value.uses() if not _is_offset(node) or _protects(node)]
    starts, seen = set(todo), set[object]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        kept.add(node, reason)
        if node in starts:
            for source in node.inputs:
                producer = None if source is None else source.producer()
                if producer is not None and producer.op_type in (ELEMENTWISE | {"Sqrt"}):
                    kept.add(producer, reason)
        if node.op_type in ("Div", "Mul") and node not in starts:
            continue
        if node.op_type in (_PROTECTED | ELEMENTWISE):
            todo += [user for output in node.outputs for user, _ in output.uses() if user.op_type in _PROTECTED]


def _is_offset(node: ir.Node) -> bool:
    """Whether a tiny constant is lost beside the other operand anyway, unless what follows can't stand a zero."""
    return not node.domain and node.op_type in ("Add", "Sub", "Sum", "Max", "Clip", "Where")


def _protects(node: ir.Node) -> bool:
    users = [use for output in node.outputs for use in output.uses()]
    return any(
        user.op_type in ("Sqrt", "Reciprocal", "Log", "Pow") or (user.op_type == "Div" and index == 1)
        for user, index in users
    )


def _keep_whole_numbers(node: ir.Node, kept: Kept) -> None:
    """Positions, lengths and sizes: forward from casts of integers, backward from casts to integers and sizes."""
    if node.domain:
        return
    reason = "positions, lengths or sizes"
    if node.op_type == "Cast" and _is_integer(node.inputs[0]) and _casts_to_float(node):
        _keep_forward(node, kept, reason)
    if node.op_type == "Cast" and _is_integer(node.outputs[0]):
        _keep_backward(node.inputs[0], kept, reason, _passes_whole)
    for index, value in enumerate(node.inputs):
        if (node.op_type, index) in _SIZES:
            _keep_backward(value, kept, reason, _passes_whole)
    if node.op_type in ("Sin", "Cos", "Tan") and node in kept.reasons:
        _keep_backward(node.inputs[0], kept, _ANGLE, _passes_angle)


def _passes_whole(node: ir.Node) -> bool:
    return node.op_type in (MOVING | ELEMENTWISE | ROUNDING)


def _passes_angle(node: ir.Node) -> bool:
    if node.op_type in ("MatMul", "Einsum"):
        return all(tensor is None or tensor.size <= _SMALL for tensor in map(constant, node.inputs))
    return node.op_type in (MOVING | ELEMENTWISE)


def _keep_backward(value: ir.Value | None, kept: Kept, reason: str, passes: Callable[[ir.Node], bool]) -> None:
    todo = [value]
    seen: set[object] = set()
    while todo:
        current = todo.pop()
        producer = None if current is None else current.producer()
        if producer is None or producer in seen or producer.domain or not passes(producer):
            continue
        seen.add(producer)
        kept.add(producer, reason)
        todo += producer.inputs


def _keep_forward(cast: ir.Node, kept: Kept, reason: str) -> None:
    """Elementwise arithmetic whose other float inputs are constants or whole numbers too."""
    whole: set[ir.Value] = set(cast.outputs)
    todo: list[ir.Value] = list(cast.outputs)
    while todo:
        for node, _ in todo.pop().uses():
            if node.domain or node.op_type not in (MOVING | ELEMENTWISE | ROUNDING):
                continue
            if all(not _is_float(one) or one in whole or constant(one) is not None for one in node.inputs):
                kept.add(node, reason)
                fresh = [output for output in node.outputs if output not in whole]
                whole.update(fresh)
                todo += fresh


def _is_integer(value: ir.Value | None) -> bool:
    """Whether the value holds integers of 16 bits or more; smaller ones are exact in half precision too."""
    return value is not None and value.dtype is not None and value.dtype.is_integer() and value.dtype.bitwidth > 8


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and (value.dtype is None or value.dtype.is_floating_point())


def _casts_to_float(node: ir.Node) -> bool:
    import onnx_ir as ir

    return bool(node.attributes["to"].as_int() == ir.DataType.FLOAT)


def _is_dequantised(value: ir.Value | None) -> bool:
    """Whether an activation comes from a DequantizeLinear; weights stored as integers don't count."""
    producer = None if value is None else value.producer()
    if producer is None or producer.domain or producer.op_type != "DequantizeLinear":
        return False
    return constant(producer.inputs[0]) is None
