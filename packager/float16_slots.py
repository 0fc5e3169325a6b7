"""Which slots of a node may hold half precision, read off the operator's schema rather than a list of operators.

A slot is an input or an output that holds a float32 tensor. The schema of the node's operator, at the opset the model
imports, gives every slot a type variable with the dtypes it may take. A slot whose variable doesn't include the half
type stays float32 whatever becomes of the rest: ``Resize`` scales and ``Range`` limits
fall out of this, and so do operators whose half kernels only came with a later opset. Operators of other domains than
ONNX's own (ai.onnx.ml, com.microsoft) keep float32 everywhere, and so does what touches a sequence, an optional or a
value of unknown type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import onnx_ir as ir

Need = Literal["low", "wide", "any"]
"""What a slot holds: half precision, float32, or whatever the value is (``Shape`` doesn't care)."""

TYPED_BY_CONTROL = frozenset({"If", "Loop", "Scan"})
TYPED_BY_ATTRIBUTE = frozenset({"Cast", "ConstantOfShape"})
"""Operators whose output dtype an attribute says, which the rewriting changes along."""
ANY_DTYPE = frozenset({"Cast", "Shape", "Size", "IsNaN", "IsInf", "NonZero", "ArgMax", "ArgMin"})
"""Operators whose result doesn't change with the dtype of what they read: no Cast is worth it."""
BITS = frozenset({"BitCast"})
"""Operators that read the bits of what they get."""
ALWAYS_WIDE = {("Resize", 1): "roi is coordinates"}
"""Input slots that could be half and must not be."""


@dataclass(frozen=True)
class Formal:
    """A declared parameter of an operator: its type variable (or literal type) and the dtypes that may take."""

    variable: str
    allowed: frozenset[str]


@dataclass(frozen=True)
class Schema:
    """Declared parameters; a variadic last one stands for all that follow."""

    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]

    def formal(self, side: Literal["inputs", "outputs"], index: int) -> Formal | None:
        """The parameter of a slot, or ``None`` where the node has more than the schema knows."""
        declared = self.inputs if side == "inputs" else self.outputs
        return declared[min(index, len(declared) - 1)] if declared else None


@cache
def schema_of(domain: str, op_type: str, opset: int) -> Schema | None:
    """The operator's schema at an opset, or ``None`` where onnx has none."""
    import onnx

    try:
        found = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None
    constraints = {one.type_param_str: frozenset(one.allowed_type_strs) for one in found.type_constraints}

    def formal(parameter: onnx.defs.OpSchema.FormalParameter) -> Formal:
        name = parameter.type_str
        return Formal(name, constraints.get(name, frozenset({name})))

    return Schema(tuple(map(formal, found.inputs)), tuple(map(formal, found.outputs)))


def is_float32(value: ir.Value | None) -> bool:
    """Whether the value is a float32 tensor as far as is known."""
    import onnx_ir as ir

    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype == ir.DataType.FLOAT


@dataclass(frozen=True)
class Slots:
    """What the slots of a node would hold if it computed in half precision; float32 slots only, by index."""

    inputs: Mapping[int, Need]
    outputs: Mapping[int, Need]

    @property
    def can_be_low(self) -> bool:
        """Whether half precision would change anything."""
        return "low" in self.inputs.values() or "low" in self.outputs.values()


def slots_of(node: ir.Node, opsets: Mapping[str, int], low: str) -> Slots:
    """The slots of a node. ``low`` is the type's name in schemas: ``tensor(float16)`` or ``tensor(bfloat16)``."""

    inputs = {index: value for index, value in enumerate(node.inputs) if is_float32(value)}
    outputs = {index: value for index, value in enumerate(node.outputs) if is_float32(value)}
    wide = Slots(dict.fromkeys(inputs, "wide"), dict.fromkeys(outputs, "wide"))
    control = node.op_type in TYPED_BY_CONTROL
    bodies = [graph for attribute in node.attributes.values() for graph in _graphs(attribute)]
    inner = [value for graph in bodies for value in (*graph.inputs, *graph.outputs)]
    if node.domain not in ("", "ai.onnx") or node.op_type in BITS or (bodies and not control):
        return wide
    if not all(map(_is_plain, (*node.inputs, *node.outputs, *inner))):
        return wide
    if control:
        return Slots(dict.fromkeys(inputs, "low"), dict.fromkeys(outputs, "low"))
    schema = schema_of("", node.op_type, opsets.get("", 0))
    if schema is None:
        return wide

    def of_input(index: int) -> Need:
        formal = schema.formal("inputs", index)
        if formal is None or low not in formal.allowed or (node.op_type, index) in ALWAYS_WIDE:
            return "wide"
        return "any" if node.op_type in ANY_DTYPE else "low"

    needs = {index: of_input(index) for index in inputs}
    bound = {formal.variable for index in needs if (formal := schema.formal("inputs", index)) is not None}

    made: dict[int, Need] = {}
    for index in outputs:
        formal = schema.formal("outputs", index)
        if formal is None or low not in formal.allowed:
            made[index] = "wide"
        elif formal.variable in bound or node.op_type in TYPED_BY_ATTRIBUTE:
            made[index] = "low"
        else:
            return wide  # the operator has a rule of its own for this output's dtype
    return Slots(needs, made)


def _graphs(attribute: ir.Attr) -> list[ir.Graph]:
    import onnx_ir as ir

    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.value]
    return list(attribute.value) if attribute.type == ir.AttributeType.GRAPHS else []


def _is_plain(value: ir.Value | None) -> bool:
    """Whether it is a tensor of known dtype, or an optional left out."""
    import onnx_ir as ir

    return value is None or not value.name or isinstance(value.type, ir.TensorType)
