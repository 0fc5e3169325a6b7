"""int8 arithmetic kept exact on CPUs without VNNI, where ONNX Runtime saturates in silence.

There it multiplies u8 by s8 with ``vpmaddubsw``, which adds two products in 16 bits (see
:mod:`packager.transform_int8`). Products of u8 and u8 are added in 32 bits everywhere. A signed weight ``w`` with zero
point ``z`` becomes ``w + 128`` with ``z + 128``: the integers that are multiplied, ``w - z``, are the same, so the
answers are too.

``session.x64quantprecision`` does the same inside ONNX Runtime, where it can be set, with two holes: it doesn't see
weights that a body of If or Loop takes from the graph around it, and it fails at DequantizeLinear with a scale for each
channel and no zero points. With the setting, only these need to be rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packager.goldens import Array
from packager.graph import Structure
from packager.model import Signature, open_model
from packager.room import Step
from packager.scratch import scratch
from packager.transform import Context, Outcome
from packager.transform_graphs import all_names, constant, fresh

if TYPE_CHECKING:
    import onnx_ir as ir

MICROSOFT = "com.microsoft"
WEIGHTS: dict[tuple[str, str], tuple[int | None, tuple[tuple[int, int], ...]]] = {
    ("", "ConvInteger"): (0, ((1, 3),)),
    ("", "MatMulInteger"): (0, ((1, 3),)),
    ("", "QLinearConv"): (0, ((3, 5),)),
    ("", "QLinearMatMul"): (0, ((3, 5),)),
    (MICROSOFT, "DynamicQuantizeLSTM"): (None, ((1, 9), (2, 11))),
    (MICROSOFT, "DynamicQuantizeMatMul"): (None, ((1, 3),)),
    (MICROSOFT, "MatMulIntegerToFloat"): (0, ((1, 5),)),
    (MICROSOFT, "QAttention"): (0, ((1, 7),)),
    (MICROSOFT, "QGemm"): (0, ((3, 5),)),
}
"""By operator: which input is the activation (``None`` where the operator makes unsigned ones itself), and which are
weights with their zero points."""
DEQUANTIZE = ("", "DequantizeLinear")
FUSED = {"Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1}
"""Operators that ONNX Runtime makes integer where DequantizeLinear feeds them, and which input is the weight."""
MOVERS = {"Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
LARGEST = 64
"""Weights up to this magnitude can't saturate: 2 * 255 * 64 = 32640 is less than 2 ** 15."""
OFFSET = 128


def planned_exact(structure: Structure, *, setting: bool) -> ExactInt8 | None:
    """The pass, where the model has signed 8-bit constants and operators that it may have to rewrite.

    Args:
        structure: of the model.
        setting: whether the runtime is given ``session.x64quantprecision``.
    """
    if not any(tensor.dtype == "int8" and tensor.dims for tensor in structure.tensors()):
        return None
    bodies = (node for outer in structure.graph.nodes for body in outer.subgraphs() for node in body.walk())
    for node in bodies if setting else structure.graph.walk():
        if (node.domain, node.op_type) in {*WEIGHTS, DEQUANTIZE}:
            return ExactInt8(setting)
    pointless = any(
        (node.domain, node.op_type) == DEQUANTIZE and len([name for name in node.inputs if name]) < 3
        for node in structure.graph.nodes
    )
    return ExactInt8(setting) if pointless else None


@contextmanager
def exact_form(path: Path, *, quantized: bool) -> Iterator[Path]:
    """A form of a model that ``session.x64quantprecision`` makes exact: itself, or a copy that lasts for the block."""
    planned = planned_exact(open_model(path).structure, setting=True) if quantized else None
    if planned is None:
        yield path
        return
    import onnx_ir as ir

    with scratch() as folder:
        model = ir.load(path)
        planned.rewrite(model)
        ir.save(model, folder / path.name, external_data=f"{path.name}.data")
        yield folder / path.name


@dataclass(frozen=True)
class ExactInt8:
    """Rewrite every weight that could saturate, or with the ``setting`` what that leaves; a note says how many nodes.

    Weights that aren't constant, or whose zero points aren't, stay, as do those against signed activations: these are
    multiplied otherwise.
    """

    setting: bool = False
    name: Literal["exact-int8"] = "exact-int8"

    def step(self) -> Step:
        """The line of the plan."""
        what = "in bodies, and zero points that are left out" if self.setting else "all that could saturate"
        return Step("Keeping int8 exact on CPUs without VNNI", (("unsigned weights", what),))

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Rewrite in place."""
        nodes = self.rewrite(model)
        kinds = ", ".join(sorted({node.op_type for node in nodes}))
        return Outcome(model, (f"weights of {len(nodes)} nodes made exact without VNNI ({kinds})",) if nodes else ())

    def rewrite(self, model: ir.Model) -> list[ir.Node]:
        """Rewrite in place; the nodes that changed."""
        rewriting = _Rewriting(model)
        nodes = []
        for node in model.graph.all_nodes():
            rewritten = (not self.setting or node.graph is not model.graph) and rewriting.unsign(node)
            if rewritten or (self.setting and rewriting.add_points(node)):
                nodes.append(node)
        for value in rewriting.replaced:
            _drop_unused(value)
        return nodes


class _Rewriting:
    """One run: the unsigned forms that were made, by the values they were made from."""

    def __init__(self, model: ir.Model) -> None:
        self._graph, self._taken = model.graph, all_names(model)
        self._made: dict[tuple[object, ...], tuple[ir.Value, ir.Value]] = {}
        self.replaced: list[ir.Value] = []

    def unsign(self, node: ir.Node) -> bool:
        """Make the weights of one node unsigned; whether there were any."""
        if (node.domain, node.op_type) == DEQUANTIZE:
            return _feeds_integers(node) and self._weight(node, 0, 2)
        activation, places = WEIGHTS.get((node.domain, node.op_type), (None, ()))
        if activation is not None and not _is_unsigned(node.inputs[activation]):
            return False
        found = [self._weight(node, *place) for place in places]
        return any(found)

    def _weight(self, node: ir.Node, weight: int, zero: int) -> bool:
        import numpy as np
        import onnx_ir as ir

        if weight >= len(node.inputs):
            return False
        value, point = node.inputs[weight], node.inputs[zero] if zero < len(node.inputs) else None
        tensor, offset = constant(value), constant(point)
        if value is None or tensor is None or tensor.dtype != ir.DataType.INT8 or not tensor.shape.rank():
            return False
        if point is not None and (offset is None or offset.dtype != ir.DataType.INT8):
            return False
        key = (value, _points_shape(node) if point is None else point)
        if key not in self._made:
            array = tensor.numpy()
            if not array.size or int(np.abs(array.astype(np.int16)).max()) <= LARGEST:
                return False
            given = np.zeros(_points_shape(node), np.int8) if offset is None else offset.numpy()
            self._made[key] = (
                self._unsigned(f"{value.name}_unsigned", array),
                self._unsigned(f"{value.name}_unsigned_zero_point", given),
            )
            self.replaced += [value] if point is None else [value, point]
        node.resize_inputs(max(len(node.inputs), zero + 1))
        for index, made in zip((weight, zero), self._made[key], strict=True):
            node.replace_input_with(index, made)
        return True

    def add_points(self, node: ir.Node) -> bool:
        """Give a DequantizeLinear of signed weights, a scale for each channel, the zero points that it leaves out."""
        import numpy as np
        import onnx_ir as ir

        if (node.domain, node.op_type) != DEQUANTIZE or (len(node.inputs) > 2 and node.inputs[2] is not None):
            return False
        tensor, shape = constant(node.inputs[0]), _points_shape(node)
        if tensor is None or tensor.dtype != ir.DataType.INT8 or not shape or _is_blocked(node):
            return False
        node.resize_inputs(3)
        node.replace_input_with(2, self._held(f"{node.inputs[0].name}_zero_point", np.zeros(shape, np.int8)))
        return True

    def _unsigned(self, name: str, signed: object) -> ir.Value:
        import numpy as np

        return self._held(name, (np.asarray(signed, np.int16) + OFFSET).astype(np.uint8))

    def _held(self, name: str, array: Array) -> ir.Value:
        import onnx_ir as ir

        made = ir.Value(name=fresh(name, self._taken), const_value=ir.tensor(array))
        made.type, made.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
        self._graph.register_initializer(made)  # every body sees those of the main graph
        return made


def _drop_unused(value: ir.Value) -> None:
    """Remove a constant that nothing uses any more."""
    node, graph = value.producer(), value.graph
    if graph is None or value.uses() or value.is_graph_output():
        return
    if node is not None:
        graph.remove(node, safe=True)
    elif value.is_initializer() and not value.is_graph_input():
        del graph.initializers[value.name or ""]


def _points_shape(node: ir.Node) -> tuple[int, ...]:
    """Shape of a zero point that was left out: of the scale for DequantizeLinear, else one for all."""
    scale = constant(node.inputs[1]) if node.op_type == "DequantizeLinear" else None
    return () if scale is None else tuple(scale.numpy().shape)


def _feeds_integers(node: ir.Node) -> bool:
    """Whether a DequantizeLinear gives the weight of an operator that is made integer, with unsigned activations.

    Blocks of weights (``block_size``) are dequantised as they are; a scale that isn't constant is, too.
    """
    if constant(node.inputs[1]) is None or _is_blocked(node):
        return False
    uses = list(node.outputs[0].uses())
    return bool(uses) and all(_is_integer(use.node, use.idx) for use in uses)


def _is_blocked(node: ir.Node) -> bool:
    block = node.attributes.get("block_size")
    return block is not None and block.as_int() != 0


def _is_integer(node: ir.Node, index: int) -> bool:
    if node.domain or FUSED.get(node.op_type) != index:
        return False
    source = node.inputs[0]
    made = None if source is None else source.producer()
    return made is not None and made.op_type == "DequantizeLinear" and _is_unsigned(made.inputs[0])


def _is_unsigned(value: ir.Value | None) -> bool:
    """Whether a value is known to be uint8, by its declared dtype or by what makes it."""
    import onnx_ir as ir

    if value is None:
        return False
    if value.dtype is not None:
        return bool(value.dtype == ir.DataType.UINT8)
    node = value.producer()
    if node is None or node.op_type not in ("DynamicQuantizeLinear", "QuantizeLinear"):
        return node is not None and any(_is_unsigned(each) for each in _passed(node))
    if node.op_type == "DynamicQuantizeLinear" or len(node.inputs) < 3 or node.inputs[2] is None:
        return "output_dtype" not in node.attributes
    point = constant(node.inputs[2])
    return point is not None and bool(point.dtype == ir.DataType.UINT8)


def _passed(node: ir.Node) -> Iterator[ir.Value | None]:
    """The value whose dtype a node that only moves data hands on."""
    if node.op_type in MOVERS and not node.domain:
        yield node.inputs[0]
