"""int8: weights and activations as bytes, by ONNX Runtime's quantiser.

Dynamic quantisation measures activations while it runs; static quantisation writes scales found by running
calibration cases (the golden inputs, or a folder of the user's) into QuantizeLinear and DequantizeLinear pairs.
Models that already carry such pairs or integer operators, from quantisation-aware training or another tool, are left
alone: they are verified as they are.

**Saturation.** x86 CPUs without VNNI or AMX multiply u8 by s8 with ``vpmaddubsw``, which adds two products in 16 bits
and saturates: 2 * 255 * 127 is more than 32767. Weights of 7 bits can't: 2 * 255 * 64 = 32640. A bundle is run on other
machines than the one that built it, so ``reduce_range=None`` means 7 bits wherever such a CPU may run the bundle
(dynamic, and scheme ``qdq``), whatever this CPU has. ``symmetric`` (GPUs), ``npu8`` and ``npu16`` (NPUs) keep all 8.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packager.errors import Refused
from packager.float16_rules import constant, label_of
from packager.goldens import GoldenCase
from packager.model import Signature
from packager.room import Step
from packager.transform import Context, Outcome
from packager.transform_int8_linear import quantise_layers
from packager.transform_int8_search import restore, searched
from packager.transform_qdq import throughout
from packager.transform_quantiser import (
    EXTERNAL_BYTES,
    Interface,
    already_quantised,
    calibration_cases,
    excluded_nodes,
    finish,
    interface_of,
    is_large,
    name_nodes,
    need_opset,
    prepare,
    quantising,
    reader,
    weight_bytes,
)  # fmt: skip

if TYPE_CHECKING:
    import onnx_ir as ir

Method = Literal["minmax", "entropy", "percentile"]
Scheme = Literal["qdq", "symmetric", "npu8", "npu16"]
Activation = Literal["uint8", "int8", "uint16"]
Weight = Literal["int8", "uint8", "int16"]

MIN_OPSET = {"dynamic": 11, "static": 13, "uint16": 21}
"""DynamicQuantizeLinear came with opset 11, per-channel QuantizeLinear with 13, its 16 bits with 21."""
PRESETS: dict[Scheme, tuple[Activation, Weight, bool, bool]] = {
    "qdq": ("uint8", "int8", False, True),
    "symmetric": ("int8", "int8", True, False),
    "npu8": ("uint8", "int8", False, False),
    "npu16": ("uint16", "int8", False, False),
}
"""By scheme: dtype of activations, of weights, whether activations are symmetric, whether weights have 7 bits.
OpenVINO and ONNX Runtime take ``qdq``, TensorRT only symmetric int8 (and no int32: biases stay float). Qualcomm's HTP
takes unsigned activations of 8 or 16 bits, and scales per channel only for signed weights."""
THROUGHOUT = ("npu8", "npu16")
"""Schemes that leave no operator in float (:mod:`packager.transform_qdq`)."""
OTHER_OPERATORS = {"Attention": 1, "Conv": 1, "EmbedLayerNormalization": 2, "LSTM": 1}
"""What ONNX Runtime's quantiser makes integer beside linear layers and tables, and which input holds the weight."""
LAYERS = {**OTHER_OPERATORS, "Gather": 0, "Gemm": 1, "MatMul": 1}
"""All that has a weight to quantise."""
_SHOWN = 3


@dataclass(frozen=True)
class Int8Dynamic:
    """Weights int8, activations uint8 measured at run time. ``exclude`` names nodes to leave, ``exclude_types``
    operators. ``reduce_range=None`` is True (see the module). ``search`` runs the golden cases to find what else must
    stay in float."""

    per_channel: bool = True
    reduce_range: bool | None = None
    exclude: tuple[str, ...] = ()
    exclude_types: tuple[str, ...] = ()
    search: bool = True

    @property
    def name(self) -> str:
        """``int8-dynamic``."""
        return "int8-dynamic"

    def step(self) -> Step:
        """The line of the plan."""
        bits = "8" if self.reduce_range is False else "7"
        return Step("Quantising weights to int8, activations at run time", _settings(self, bits))

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Quantise.

        Raises:
            Refused: the opset is below 11, an excluded node doesn't exist, nothing is left to quantise, or the model
                drifts past the policy whatever is left out; nodes are named.
        """
        if (left := already_quantised(model)) is not None:
            return left
        need_opset(model, MIN_OPSET["dynamic"], "dynamic quantisation")
        interface, excluded = interface_of(model), excluded_nodes(model, self.exclude, self.exclude_types)
        if is_large(model):
            name_nodes(model)
            size = f"{weight_bytes(model) / 1e9:.1f} GB of weights are too many"
            left_over = _left_in_float(_others(model, excluded), f"{size} for ONNX Runtime's quantiser")
            searched_not = (f"not searched for nodes that drift: {size} to run",) if context.goldens.cases else ()
            self._layers(model, excluded)
            return finish(model, interface, *left_over, *searched_not)
        before = prepare(model, context, self.name)

        def make(kept: Collection[str]) -> Outcome:
            return self._quantised(before, context, {*excluded, *kept}, interface)

        if not (self.search and context.goldens.cases):
            return make(())
        return searched(make, before, context, self.name)

    def _quantised(self, before: Path, context: Context, excluded: Collection[str], interface: Interface) -> Outcome:
        import onnx_ir as ir
        from onnxruntime.quantization import QuantType, quantize_dynamic

        model, made = ir.load(before), context.folder / f"{self.name}-after.onnx"
        if any(node.graph is model.graph for node in _others(model, excluded)):
            with quantising("exclude the nodes it names"):
                quantize_dynamic(
                    before,
                    made,
                    op_types_to_quantize=list(OTHER_OPERATORS),
                    per_channel=self.per_channel,
                    reduce_range=self.reduce_range is not False,
                    weight_type=QuantType.QInt8,
                    nodes_to_exclude=sorted(excluded),
                )
            model = ir.load(made)
        inside = [node for node in _others(model, excluded) if node.graph is not model.graph]
        notes = _left_in_float(inside, "in a body of If, Loop or Scan")
        self._layers(model, excluded)
        return finish(model, interface, *notes)

    def _layers(self, model: ir.Model, excluded: Collection[str]) -> None:
        quantise_layers(
            model, excluded, per_channel=self.per_channel, reduce_range=self.reduce_range is not False
        )  # fmt: skip


@dataclass(frozen=True)
class Int8Static:
    """QuantizeLinear and DequantizeLinear with scales from calibration.

    ``scheme`` presets what is ``None``: see :data:`PRESETS`. ``method`` finds the range of activations: all values
    (``minmax``), the range that keeps most information (``entropy``) or 99.999 % of values (``percentile``).
    ``calibration`` is the SHA-256 of the files to calibrate with, which are the context's; without, golden cases are.
    """

    scheme: Scheme = "qdq"
    method: Method = "minmax"
    per_channel: bool = True
    reduce_range: bool | None = None
    activation: Activation | None = None
    weight: Weight | None = None
    symmetric: bool | None = None
    exclude: tuple[str, ...] = ()
    exclude_types: tuple[str, ...] = ()
    calibration: str = ""
    search: bool = True

    @property
    def name(self) -> str:
        """``int8-static``."""
        return "int8-static"

    def resolved(self) -> tuple[Activation, Weight, bool, bool]:
        """Dtype of activations, of weights, symmetric activations, 7-bit weights: own settings over the scheme's."""
        activation, weight, symmetric, reduced = PRESETS[self.scheme]
        return (
            self.activation or activation,
            self.weight or weight,
            symmetric if self.symmetric is None else self.symmetric,
            reduced if self.reduce_range is None else self.reduce_range,
        )

    def step(self) -> Step:
        """The line of the plan."""
        activation, weight, symmetric, reduced = self.resolved()
        own = (
            ("scheme", self.scheme),
            ("activations", f"{activation}{', symmetric' if symmetric else ''}"),
            ("weight dtype", weight),
            ("range", self.method),
            ("calibration", f"files {self.calibration[:12]}" if self.calibration else "the golden inputs"),
        )
        return Step("Quantising weights and activations to int8", own + _settings(self, "7" if reduced else "8"))

    def signature(self, before: Signature) -> Signature:
        """Unchanged."""
        return before

    def run(self, model: ir.Model, context: Context) -> Outcome:
        """Calibrate and quantise.

        Raises:
            Refused: the opset is too low, there is nothing to calibrate with or to quantise, an excluded node doesn't
                exist, or the quantiser fails.
            GoldenError: the calibration files don't fit the model.
        """
        if (left := already_quantised(model)) is not None:
            return left
        need_opset(model, MIN_OPSET["static"], "QuantizeLinear with a scale per channel")
        if self.resolved()[0] == "uint16":
            need_opset(model, MIN_OPSET["uint16"], "QuantizeLinear to 16 bits")
        if (size := weight_bytes(model)) > EXTERNAL_BYTES:
            raise Refused(
                f"{size / 1e9:.1f} GB of weights are too many for static quantisation, which holds them in memory "
                "several times",
                "use int8-dynamic, int8-weights or fp16, which are streamed",
            )
        interface, excluded = interface_of(model), excluded_nodes(model, self.exclude, self.exclude_types)
        before = prepare(model, context, self.name)
        quantised = context.folder / f"{self.name}-after.onnx"
        self._quantise(before, quantised, excluded, calibration_cases(before, context, self.calibration))

        def make(kept: Collection[str]) -> Outcome:
            made = restore(before, quantised, kept)
            inside = [node for node in _others(made, excluded, LAYERS) if node.graph is not made.graph]
            return finish(made, interface, *_left_in_float(inside, "in a body of If, Loop or Scan"))

        if not (self.search and context.goldens.cases):
            return make(())
        return searched(make, before, context, self.name)

    def _quantise(self, before: Path, out: Path, excluded: Sequence[str], cases: Sequence[GoldenCase]) -> None:
        from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

        activation, weight, symmetric, reduced = self.resolved()
        types = {
            "uint8": QuantType.QUInt8,
            "int8": QuantType.QInt8,
            "uint16": QuantType.QUInt16,
            "int16": QuantType.QInt16,
        }
        methods = {
            "minmax": CalibrationMethod.MinMax,
            "entropy": CalibrationMethod.Entropy,
            "percentile": CalibrationMethod.Percentile,
        }
        options: dict[str, object] = {
            "ActivationSymmetric": symmetric,
            "WeightSymmetric": weight in ("int8", "int16"),
            # Without, a Relu gives its output's name to what is before it, and names no longer tell tensors apart.
            "QDQKeepRemovableActivations": True,
            "QuantizeBias": self.scheme != "symmetric",
        }
        if self.method != "minmax":
            # One case at a time, so that histograms take cases of several shapes; and over the range of signed values,
            # since the quantiser can't cut a range like [2, 2] into bins.
            options |= {"CalibStridedMinMax": 1, "CalibTensorRangeSymmetric": False}
        operators: tuple[str, ...] | None = None
        hint = "exclude the nodes it names" + ("" if self.method == "minmax" else ", or take method = minmax")
        with quantising(hint):
            if self.scheme in THROUGHOUT:
                whole = throughout(
                    before, types[activation], types[weight], per_channel=self.per_channel, excluded=list(excluded)
                )
                operators, excluded = whole.operators, whole.excluded
                options = {**options, "QDQKeepRemovableActivations": False, **whole.options}
            quantize_static(
                before,
                out,
                reader(cases),
                quant_format=QuantFormat.QDQ,
                per_channel=self.per_channel,
                reduce_range=reduced,
                activation_type=types[activation],
                weight_type=types[weight],
                op_types_to_quantize=operators,
                nodes_to_exclude=list(excluded),
                calibrate_method=methods[self.method],
                extra_options=options,
            )


def _settings(chosen: Int8Dynamic | Int8Static, bits: str) -> tuple[tuple[str, str], ...]:
    found = [("scales", "per channel" if chosen.per_channel else "per tensor"), ("bits of a weight", bits)]
    found += [("excluded", ", ".join(chosen.exclude))] if chosen.exclude else []
    found += [("excluded operators", ", ".join(chosen.exclude_types))] if chosen.exclude_types else []
    found += [("search for nodes that drift", "yes" if chosen.search else "no")]
    return tuple(found)


def _others(
    model: ir.Model, excluded: Collection[str], operators: Mapping[str, int] = OTHER_OPERATORS
) -> list[ir.Node]:
    """Nodes with a constant weight, in bodies too, of operators given with the place of that weight."""
    import onnx_ir as ir

    found: list[ir.Node] = []
    for node in model.graph.all_nodes():
        place = operators.get(node.op_type)
        if place is None or node.name in excluded or place >= len(node.inputs):
            continue
        tensor = constant(node.inputs[place])
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT and tensor.size > 1:
            found.append(node)
    return found


def _left_in_float(nodes: Sequence[ir.Node], why: str) -> tuple[str, ...]:
    """The note about nodes that could be integer and aren't."""
    if not nodes:
        return ()
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return (f"left in float: {', '.join(label_of(node) for node in nodes[:_SHOWN])}{more} ({why})",)
