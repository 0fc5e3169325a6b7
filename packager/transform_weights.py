"""Weight-only quantisation: large linear layers in 4 or 8 bits by block, activations untouched.

A weight of K inputs and N outputs is cut along K into blocks with one scale (and zero point) for each block and output:
``w = (q - zero) * scale``. ONNX Runtime computes with it directly (``com.microsoft.MatMulNBits``). Runtimes without
that operator get the fallback: the same integers behind a DequantizeLinear, by block from opset 21 on; before, ONNX has
only a scale per output channel, so weights become int8 by channel whatever ``bits`` says. (ONNX Runtime, optimising,
fuses that DequantizeLinear and its MatMul into MatMulNBits again and then rounds activations to int8; its option
``session.qdq_matmulnbits_accuracy_level`` says how far.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from packager.errors import Refused
from packager.float16_rules import constant, label_of
from packager.model import Signature
from packager.names import nearest
from packager.room import Step
from packager.transform import Context, Outcome

if TYPE_CHECKING:
    import onnx_ir as ir

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
MIN_ELEMENTS = 1 << 14
"""Smaller weights aren't worth what they lose."""
BLOCKS = (16, 32, 64, 128, 256)
"""Block sizes MatMulNBits takes: powers of two from 16 (com.microsoft operator documentation)."""
BLOCK_OPSET, CHANNEL_OPSET = 21, 13
_DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class Blocks:
    """A quantised weight: ``q`` uint8 [N, blocks, block] (padded with the zero point), ``scales`` float32 [N, blocks],
    ``zeros`` uint8 [N, blocks]."""

    q: Bytes
    scales: Floats
    zeros: Bytes

    def restored(self, inputs: int) -> Floats:
        """The weight they stand for, float32 [N, inputs]."""
        wide = (self.q.astype(np.float32) - self.zeros[..., None]) * self.scales[..., None]
        return wide.reshape(len(self.q), -1)[:, :inputs].astype(np.float32)


def quantise(weight: Floats, bits: Literal[4, 8], block: int, *, symmetric: bool) -> Blocks:
    """Round to nearest by block.

    Args:
        weight: float32 [N, K], a row for each output.
        bits: 4 or 8.
        block: values along K that share a scale.
        symmetric: the zero point is the middle (8 or 128), and the scale reaches the largest magnitude; else the
            range from the block's least to its largest value, 0 included, is spread over all steps.
    """
    outputs, inputs = weight.shape
    count = -(-inputs // block)
    padded = np.zeros((outputs, count * block), np.float32)
    padded[:, :inputs] = weight
    cut = padded.reshape(outputs, count, block)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = np.abs(cut).max(axis=2) / (middle - 1)
        zeros = np.full((outputs, count), middle, np.uint8)
    else:
        low, high = np.minimum(cut.min(axis=2), 0), np.maximum(cut.max(axis=2), 0)
        scales = (high - low) / top
        safe = np.where(scales == 0, 1, scales)
        zeros = np.clip(np.rint(-low / safe), 0, top).astype(np.uint8)
    scales = np.where(scales == 0, 1, scales).astype(np.float32)
    q = np.clip(np.rint(cut / scales[..., None]) + zeros[..., None], 0, top).astype(np.uint8)
    return Blocks(q, scales, zeros)


def packed(values: Bytes, bits: Literal[4, 8]) -> Bytes:
    """The last axis in bytes; of two 4-bit values the first is the low half, an odd end is padded with 0."""
    if bits == 8:
        return values
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros_like(values[..., :1])], axis=-1)
    return (values[..., 0::2] | (values[..., 1::2] << 4)).astype(np.uint8)


@dataclass(frozen=True)
class WeightOnly:
    """MatMul and Gemm with a constant weight of ``min_elements`` or more. ``exclude`` names nodes to leave;
    ``fallback`` writes DequantizeLinear instead of MatMulNBits."""

    bits: Literal[4, 8] = 4
    block: int = 32
    symmetric: bool = True
    min_elements: int = MIN_ELEMENTS
    exclude: tuple[str, ...] = ()
    fallback: bool = False

    @property
    def name(self) -> str:
        """``int4-weights`` or ``int8-weights``."""
        return f"int{self.bits}-weights"

    def step(self) -> Step:
        """The line of the plan."""
        settings = [
            ("block", str(self.block)),
            ("zero point", "fixed" if self.symmetric else "by block"),
            ("layers", f"of {self.min_elements} weights or more"),
            ("operator", "DequantizeLinear" if self.fallback else f"{_DOMAIN}.MatMulNBits"),
        ]
        settings += [("excluded", ", ".join(self.exclude))] if self.exclude else []
        return Step(f"Quantising weights of large linear layers to int{self.bits}", tuple(settings))

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Quantise.

        Raises:
            Refused: the block size isn't one of :data:`BLOCKS`, an excluded node doesn't exist, the opset has no
                DequantizeLinear by channel, or no layer is large enough.
        """
        if self.block not in BLOCKS:
            raise Refused(f"block = {self.block} is no block size", f"one of {', '.join(map(str, BLOCKS))}")
        opset = model.graph.opset_imports.get("", 0)
        if self.fallback and opset < CHANNEL_OPSET:
            hint = f"raise it first: opset = {CHANNEL_OPSET}"
            raise Refused(f"DequantizeLinear by channel needs opset {CHANNEL_OPSET}, the model has {opset}", hint)
        nodes = [node for node in model.graph.all_nodes() if node.op_type in ("MatMul", "Gemm") and not node.domain]
        named = {node.name: node for node in nodes if node.name}
        for name in self.exclude:
            if name not in named:
                close = nearest(name, named)
                raise Refused(f"exclude: no layer '{name}'", f"did you mean '{close}'?" if close else "name a MatMul")
        layers = [layer for node in nodes if node.name not in self.exclude if (layer := _layer(node)) is not None]
        large = [layer for layer in layers if layer.tensor.size >= self.min_elements]
        if not large:
            raise Refused(
                f"no MatMul or Gemm has a constant float32 weight of {self.min_elements} elements or more",
                "use another precision, or lower min_elements",
            )
        notes = tuple(note for layer in large for note in self._replace(model, layer, opset))
        _drop_unused(model)
        return Outcome(model, notes)

    def _replace(self, model: ir.Model, layer: _Layer, opset: int) -> list[str]:
        if not self.fallback and layer.fits_kernel:
            _to_kernel(model, layer, self)
            return []
        by_block = opset >= BLOCK_OPSET and layer.inputs % self.block == 0
        _to_dequantize(layer, self, by_block=by_block)
        if by_block and self.fallback:
            return []
        why = "MatMulNBits can't compute its scaling" if not self.fallback else (
            f"blocks need opset {BLOCK_OPSET}" if opset < BLOCK_OPSET else f"{layer.inputs} isn't whole blocks"
        )  # fmt: skip
        form = "by block" if by_block else "int8 by channel"
        return [f"{label_of(layer.node)}: DequantizeLinear {form} ({why})"]


@dataclass(frozen=True)
class _Layer:
    """A linear layer: its node, the weight's value and tensor, and how the weight lies."""

    node: ir.Node
    value: ir.Value
    tensor: ir.TensorProtocol
    transposed: bool
    fits_kernel: bool

    @property
    def inputs(self) -> int:
        """K."""
        return int(self.tensor.shape[1 if self.transposed else 0])

    @property
    def outputs(self) -> int:
        """N."""
        return int(self.tensor.shape[0 if self.transposed else 1])

    def weight(self) -> Floats:
        """float32 [N, K]."""
        array = np.asarray(self.tensor.numpy(), dtype=np.float32)
        return array if self.transposed else array.T


def _layer(node: ir.Node) -> _Layer | None:
    import onnx_ir as ir

    value = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = constant(value)
    if value is None or tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
        return None
    if node.op_type == "MatMul":
        return _Layer(node, value, tensor, False, True)
    attribute = node.attributes
    transposed = bool(attribute["transB"].as_int()) if "transB" in attribute else False
    plain = not ("transA" in attribute and attribute["transA"].as_int()) and all(
        attribute[name].as_float() == 1.0 for name in ("alpha", "beta") if name in attribute
    )
    return _Layer(node, value, tensor, transposed, plain)


def _constant(layer: _Layer, suffix: str, dtype: ir.DataType, shape: list[int], make: Callable[[], object]) -> ir.Value:
    """A new initializer beside the weight, whose bytes are made when the model is saved.

    Weights of one value used by several layers are stored once for each: their names carry the node's output.
    """
    import onnx_ir as ir

    name = f"{layer.node.outputs[0].name}_{suffix}"

    def tensor() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(make()), dtype=dtype, name=name)

    lazy = ir.LazyTensor(tensor, dtype, ir.Shape(shape), name=name)
    made = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=lazy)
    graph = layer.node.graph
    if graph is not None:
        graph.register_initializer(made)
    return made


def _to_kernel(model: ir.Model, layer: _Layer, settings: WeightOnly) -> None:
    import onnx_ir as ir

    node, bits, block = layer.node, settings.bits, settings.block
    count = -(-layer.inputs // block)
    uint8, float32 = ir.DataType.UINT8, ir.DataType.FLOAT

    def made() -> Blocks:
        return quantise(layer.weight(), bits, block, symmetric=settings.symmetric)

    shape = [layer.outputs, count, block * bits // 8]
    inputs = [
        node.inputs[0],
        _constant(layer, f"q{bits}", uint8, shape, lambda: packed(made().q, bits)),
        _constant(layer, f"q{bits}_scales", float32, [layer.outputs * count], lambda: made().scales.reshape(-1)),
    ]
    if not settings.symmetric:
        width = -(-count * bits // 8)
        zeros = _constant(layer, f"q{bits}_zeros", uint8, [layer.outputs * width],
                          lambda: packed(made().zeros, bits).reshape(-1))  # fmt: skip
        inputs.append(zeros)
    attributes = {"K": layer.inputs, "N": layer.outputs, "bits": bits, "block_size": block}
    kernel = ir.Node(
        _DOMAIN,
        "MatMulNBits",
        inputs,
        [ir.AttrInt64(name, number) for name, number in attributes.items()],
        num_outputs=1,
        name=node.name,
    )
    made_value, output = kernel.outputs[0], node.outputs[0]
    made_value.type, made_value.shape = output.type, output.shape
    new, bias = [kernel], node.inputs[2] if len(node.inputs) > 2 else None
    name = output.name or "linear"
    if bias is not None:
        made_value.name = f"{name}_linear"
        new.append(ir.Node("", "Add", [made_value, bias], num_outputs=1, name=f"{node.name}_bias" if node.name else ""))
        new[1].outputs[0].type, new[1].outputs[0].shape = output.type, output.shape
    ir.convenience.replace_nodes_and_values(
        node.graph, insertion_point=node, old_nodes=[node], new_nodes=new,
        old_values=[output], new_values=[new[-1].outputs[0]],
    )  # fmt: skip
    model.graph.opset_imports[_DOMAIN] = 1


def _to_dequantize(layer: _Layer, settings: WeightOnly, *, by_block: bool) -> None:
    """Put a DequantizeLinear between the integers, stored as the weight lay, and the node."""
    import onnx_ir as ir

    bits: Literal[4, 8] = settings.bits if by_block else 8
    block = settings.block if by_block else layer.inputs
    symmetric = settings.symmetric or not by_block
    middle = 2 ** (bits - 1)
    dtype = {4: ir.DataType.INT4, 8: ir.DataType.INT8}[bits]

    def made() -> Blocks:
        return quantise(layer.weight(), bits, block, symmetric=symmetric)

    def laid(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return array if layer.transposed else array.T

    def signed(values: Bytes) -> npt.NDArray[np.generic]:
        found: npt.NDArray[np.generic] = (values.astype(np.int16) - middle).astype(dtype.numpy())
        return found

    shape = [int(size) for size in layer.tensor.shape]
    along = 1 if layer.transposed else 0
    scale_shape = [size // block if axis == along else size for axis, size in enumerate(shape)]
    scale_shape = scale_shape if by_block else [layer.outputs]

    def of_blocks(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return laid(array) if by_block else array[:, 0]

    float32 = ir.DataType.FLOAT
    inputs = [
        _constant(layer, f"q{bits}", dtype, shape, lambda: laid(signed(made().q.reshape(layer.outputs, -1)))),
        _constant(layer, f"q{bits}_scales", float32, scale_shape, lambda: of_blocks(made().scales)),
    ]
    if not symmetric:
        zeros = _constant(layer, f"q{bits}_zeros", dtype, scale_shape, lambda: of_blocks(signed(made().zeros)))
        inputs.append(zeros)
    attributes = [ir.AttrInt64("axis", along if by_block else 1 - along)]
    attributes += [ir.AttrInt64("block_size", block)] if by_block else []
    name = f"{layer.node.outputs[0].name}_weight"
    node = ir.Node("", "DequantizeLinear", inputs, attributes, num_outputs=1, name=name)
    made_value = node.outputs[0]
    made_value.name, made_value.type, made_value.shape = name, layer.value.type, ir.Shape(shape)
    layer.node.prepend(node)
    layer.node.replace_input_with(1, made_value)


def _drop_unused(model: ir.Model) -> None:
    """Remove weights and Constant nodes that nothing reads any more."""
    for graph in model.graphs():
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del graph.initializers[name]
        for node in [node for node in graph if node.op_type == "Constant" and not node.domain]:
            if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
                graph.remove(node)
