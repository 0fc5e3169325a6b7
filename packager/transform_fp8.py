"""fp8: weights and activations of matrix products and convolutions as float8e4m3fn, the form GPUs since Ada multiply.

A float8e4m3fn has 3 bits of significand and ends at 448. Each tensor is divided by a scale that brings its largest
magnitude there: weights by channel, when the model is converted; activations by one scale each, found by running
calibration cases. There are no zero points. What is written are QuantizeLinear and DequantizeLinear pairs, so that any
runtime that has those two operators computes what the hardware does, in float32 between them.

ONNX Runtime's quantiser makes such pairs too, and isn't used: it takes scales from standard deviations, cuts what lies
far out, and has one scale for a whole weight. A text recogniser of the corpus then answers with a cosine of 0.35; here
with 0.84, before what drifts most stays in float.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from packager.errors import Refused
from packager.float16_rules import constant
from packager.goldens import GoldenCase
from packager.model import Signature
from packager.room import Step
from packager.transform import Context, Outcome
from packager.transform_drift import Probe
from packager.transform_graphs import all_names, drop_dead, fresh
from packager.transform_int8_search import searched
from packager.transform_quantiser import (
    EXTERNAL_BYTES,
    already_quantised,
    calibration_cases,
    excluded_nodes,
    finish,
    interface_of,
    need_opset,
    prepare,
    weight_bytes,
)

if TYPE_CHECKING:
    import onnx_ir as ir

MIN_OPSET = 21
"""QuantizeLinear names the dtype it makes since then."""
LARGEST = 448.0
"""Of float8e4m3fn."""
FETCHED = 16
"""Activations that are fetched in one run."""


@dataclass(frozen=True)
class Float8:
    """``exclude`` names nodes to leave in float32, ``exclude_types`` operators. ``calibration`` is the SHA-256 of the
    files to calibrate with, which are the context's; without, golden cases are. ``search`` runs the golden cases to
    find what else must stay in float32."""

    exclude: tuple[str, ...] = ()
    exclude_types: tuple[str, ...] = ()
    calibration: str = ""
    search: bool = True

    @property
    def name(self) -> str:
        """``fp8``."""
        return "fp8"

    def step(self) -> Step:
        """The line of the plan."""
        settings = [
            ("operators", "MatMul, Gemm, Conv"),
            ("calibration", f"files {self.calibration[:12]}" if self.calibration else "the golden inputs"),
        ]
        settings += [("excluded", ", ".join(self.exclude))] if self.exclude else []
        settings += [("excluded operators", ", ".join(self.exclude_types))] if self.exclude_types else []
        settings += [("search for nodes that drift", "yes" if self.search else "no")]
        return Step("Quantising weights and activations to float8e4m3fn", tuple(settings))

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Calibrate and quantise.

        Raises:
            Refused: the opset is too low, there is nothing to calibrate with or to quantise, an excluded node doesn't
                exist, or the model drifts past the policy whatever is left out; nodes are named.
            GoldenError: the calibration files don't fit the model.
        """
        if (left := already_quantised(model)) is not None:
            return left
        need_opset(model, MIN_OPSET, "QuantizeLinear to float8e4m3fn without a zero point")
        if (size := weight_bytes(model)) > EXTERNAL_BYTES:
            raise Refused(
                f"{size / 1e9:.1f} GB of weights are too many to calibrate with, which holds them in memory",
                "use fp16 or int8-weights, which are streamed",
            )
        import onnx_ir as ir

        interface, excluded = interface_of(model), excluded_nodes(model, self.exclude, self.exclude_types)
        before = prepare(model, context, self.name)
        wanted = [layer.source for layer in layers(model, excluded)]
        cases = calibration_cases(before, context, self.calibration)
        scales = activation_scales(before, wanted, cases)

        def make(kept: Collection[str]) -> Outcome:
            made = ir.load(before)
            quantise(made, {*excluded, *kept}, scales)
            return finish(made, interface)

        if not (self.search and context.goldens.cases):
            return make(())
        return searched(make, before, context, self.name, "fp8")


@dataclass(frozen=True)
class Layer:
    """A node with a constant float32 weight: the name of its activation, its weight, and the weight's channels."""

    node: ir.Node
    source: str
    weight: ir.Value
    axis: int


def layers(model: ir.Model, excluded: Collection[str]) -> Iterator[Layer]:
    """What can become fp8, in the order of the main graph.

    A product of activations is left in float: its scales would be guesses twice over. So is a weight of one element.
    """
    import onnx_ir as ir

    for node in model.graph:
        if node.domain or node.op_type not in ("MatMul", "Gemm", "Conv") or node.name in excluded:
            continue
        source, weight = node.inputs[0], node.inputs[1]
        tensor = constant(weight)
        if source is None or weight is None or tensor is None or constant(source) is not None or not source.name:
            continue
        if tensor.dtype != ir.DataType.FLOAT or tensor.size < 2 or len(tensor.shape) < 2:
            continue
        if node.op_type == "MatMul" and len(tensor.shape) != 2:
            continue
        turned = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
        yield Layer(node, source.name, weight, 0 if turned or node.op_type == "Conv" else 1)


def activation_scales(before: Path, names: Sequence[str], cases: Sequence[GoldenCase]) -> Mapping[str, np.float32]:
    """By tensor: what brings its largest finite magnitude in all cases to 448.

    Raises:
        ModelError: the model can't be run.
    """
    probe, largest = Probe(before), dict.fromkeys(names, 0.0)
    unique = list(largest)
    for start in range(0, len(unique), FETCHED):
        for case in cases:
            for name, array in probe.run(unique[start : start + FETCHED], case.inputs).items():
                finite = np.abs(array[np.isfinite(array)])
                largest[name] = max(largest[name], float(finite.max(initial=0.0)))
    return {name: scale_of(np.float32(found)) for name, found in largest.items()}


def scale_of(largest: np.float32) -> np.float32:
    """The scale that brings a magnitude to 448; 1 where that is no normal float32."""
    scale = np.float32(largest / np.float32(LARGEST))
    return scale if scale >= np.finfo(np.float32).tiny else np.float32(1.0)


def quantise(model: ir.Model, excluded: Collection[str], scales: Mapping[str, np.float32]) -> None:
    """Put pairs in front of every layer, in place; weights become float8e4m3fn."""
    taken = all_names(model)
    activations: dict[str, ir.Value] = {}
    weights: dict[tuple[ir.Value, int], ir.Value] = {}
    for layer in list(layers(model, excluded)):
        if layer.source not in activations:
            activations[layer.source] = _pair(model, layer, scales[layer.source], taken)
        key = layer.weight, layer.axis
        if key not in weights:
            weights[key] = _stored(model, layer, taken)
        layer.node.replace_input_with(0, activations[layer.source])
        layer.node.replace_input_with(1, weights[key])
    drop_dead(model)


def _pair(model: ir.Model, layer: Layer, scale: np.float32, taken: set[str]) -> ir.Value:
    """QuantizeLinear and DequantizeLinear of the layer's activation, in front of it."""
    import onnx_ir as ir

    value = layer.node.inputs[0]
    held = _initializer(model, f"{layer.source}_scale", ir.tensor(scale), taken)
    dtype = ir.AttrInt64("output_dtype", int(ir.DataType.FLOAT8E4M3FN))
    low = _node("QuantizeLinear", [value, held], [dtype], layer.source, ir.DataType.FLOAT8E4M3FN, taken)
    high = _node("DequantizeLinear", [low.outputs[0], held], [], layer.source, ir.DataType.FLOAT, taken)
    layer.node.prepend([low, high])
    return high.outputs[0]


def _stored(model: ir.Model, layer: Layer, taken: set[str]) -> ir.Value:
    """The layer's weight as float8e4m3fn behind a DequantizeLinear."""
    import onnx_ir as ir

    tensor, name = constant(layer.weight), str(layer.weight.name)
    assert tensor is not None  # noqa: S101 - for the type checker
    array = np.asarray(tensor.numpy())
    scale, low = to_float8(array, layer.axis)
    stored = _initializer(model, f"{name}_fp8", ir.tensor(low), taken)
    held = _initializer(model, f"{name}_scale", ir.tensor(scale), taken)
    axis = ir.AttrInt64("axis", layer.axis)
    high = _node("DequantizeLinear", [stored, held], [axis], name, ir.DataType.FLOAT, taken)
    layer.node.prepend(high)
    return high.outputs[0]


def to_float8(weight: npt.NDArray[np.float32], axis: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.generic]]:
    """Scales along ``axis``, and the weight in float8e4m3fn, rounded to nearest even."""
    import ml_dtypes

    others = tuple(each for each in range(weight.ndim) if each != axis)
    largest = np.abs(weight).max(axis=others, initial=0.0)
    scale = np.array([scale_of(each) for each in largest], np.float32)
    shape = [-1 if each == axis else 1 for each in range(weight.ndim)]
    low = np.clip(weight / scale.reshape(shape), -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
    return scale, low


def _node(
    op_type: str, inputs: list[ir.Value | None], attributes: list[ir.Attr], stem: str, dtype: ir.DataType,
    taken: set[str],
) -> ir.Node:  # fmt: skip
    import onnx_ir as ir

    node = ir.Node("", op_type, inputs, attributes, num_outputs=1, name=fresh(f"{stem}_{op_type}", taken))
    node.outputs[0].name, node.outputs[0].type = fresh(f"{stem}_{op_type}_output", taken), ir.TensorType(dtype)
    return node


def _initializer(model: ir.Model, name: str, tensor: ir.TensorProtocol, taken: set[str]) -> ir.Value:
    import onnx_ir as ir

    tensor.name = fresh(name, taken)
    made = ir.Value(
        name=tensor.name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    model.graph.register_initializer(made)
    return made
