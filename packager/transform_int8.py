"""int8: weights and activations as bytes, by ONNX Runtime's quantiser.

Dynamic quantisation measures activations while it runs; static quantisation writes scales found by running
calibration cases (the golden inputs, or a folder of the user's) into QuantizeLinear and DequantizeLinear pairs.
Models that already carry such pairs or integer operators, from quantisation-aware training or another tool, are left
alone: they are verified as they are.

**Saturation.** x86 CPUs without VNNI or AMX multiply u8 by s8 with ``vpmaddubsw``, which adds two products in 16 bits
and saturates: 2 * 255 * 127 is more than 32767. Weights of 7 bits can't: 2 * 255 * 64 = 32640. A bundle is run on other
machines than the one that built it, so ``reduce_range=None`` means 7 bits wherever such a CPU may run the bundle
(dynamic, and scheme ``qdq``), whatever this CPU has. ``symmetric`` (GPUs) and ``npu16`` (NPUs) keep all 8.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packager.errors import Refused
from packager.float16_rules import label_of
from packager.golden_formats import read_goldens
from packager.goldens import Array, GoldenCase
from packager.model import QUANTIZED_OPERATORS, Signature, open_model
from packager.names import nearest
from packager.room import Step
from packager.transform import Context, Outcome

if TYPE_CHECKING:
    import onnx_ir as ir

Method = Literal["minmax", "entropy", "percentile"]
Scheme = Literal["qdq", "symmetric", "npu16"]
Activation = Literal["uint8", "int8", "uint16"]
Weight = Literal["int8", "uint8"]

CARRIERS = QUANTIZED_OPERATORS | {"DequantizeLinear", "MatMulNBits", "GatherBlockQuantized"}
"""Operators of a model that is quantised already."""
MIN_OPSET = {"dynamic": 11, "static": 13, "uint16": 21}
"""DynamicQuantizeLinear came with opset 11, per-channel QuantizeLinear with 13, its 16 bits with 21."""
EXTERNAL_BYTES = 1_000_000_000
"""Larger models go to the quantiser with their weights beside them: a protobuf message ends at 2 GB."""
PRESETS: dict[Scheme, tuple[Activation, Weight, bool, bool]] = {
    "qdq": ("uint8", "int8", False, True),
    "symmetric": ("int8", "int8", True, False),
    "npu16": ("uint16", "uint8", False, False),
}
"""By scheme: dtype of activations, of weights, whether activations are symmetric, whether weights have 7 bits.
OpenVINO and ONNX Runtime take ``qdq``, TensorRT only symmetric int8 (and no int32: biases stay float), Qualcomm's HTP
uint16 with uint8 weights."""
_PREPROCESSED = "onnx.quant.pre_process"


@dataclass(frozen=True)
class Int8Dynamic:
    """Weights int8, activations uint8 measured at run time. ``exclude`` names nodes to leave, ``exclude_types``
    operators. ``reduce_range=None`` is True (see the module)."""

    per_channel: bool = True
    reduce_range: bool | None = None
    exclude: tuple[str, ...] = ()
    exclude_types: tuple[str, ...] = ()

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
            Refused: the opset is below 11, an excluded node doesn't exist, or nothing is left to quantise.
        """
        from onnxruntime.quantization import QuantType, quantize_dynamic

        if (left := _already(model)) is not None:
            return left
        _need_opset(model, "dynamic", "dynamic quantisation")
        interface = _interface(model)
        source, target = _prepare(model, context, self.name)
        with _quiet():
            try:
                quantize_dynamic(
                    source,
                    target,
                    per_channel=self.per_channel,
                    reduce_range=self.reduce_range is not False,
                    weight_type=QuantType.QInt8,
                    nodes_to_exclude=_excluded(model, self.exclude, self.exclude_types),
                    use_external_data_format=_is_large(model),
                )
            except (ValueError, KeyError, IndexError, RuntimeError, AssertionError) as error:
                raise Refused(f"ONNX Runtime's quantiser failed: {error}", "exclude the nodes it names") from error
        return _finish(target, "", interface)


@dataclass(frozen=True)
class Int8Static:
    """QuantizeLinear and DequantizeLinear with scales from calibration.

    ``scheme`` presets what is ``None``: see :data:`PRESETS`. ``method`` finds the range of activations: all values
    (``minmax``), the range that keeps most information (``entropy``) or 99.999 % of values (``percentile``).
    ``calibration`` is a file or folder of cases in any of the golden formats; ``None`` takes the golden cases.
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
    calibration: Path | None = None

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
            ("calibration", str(self.calibration) if self.calibration else "the golden inputs"),
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
        from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

        if (left := _already(model)) is not None:
            return left
        activation, weight, symmetric, reduced = self.resolved()
        _need_opset(model, "static", "QuantizeLinear with a scale per channel")
        if activation == "uint16":
            _need_opset(model, "uint16", "QuantizeLinear to 16 bits")
        excluded = _excluded(model, self.exclude, self.exclude_types)
        interface = _interface(model)
        source, target = _prepare(model, context, self.name)
        cases, note = self._cases(source, context)
        types = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8, "uint16": QuantType.QUInt16}
        methods = {
            "minmax": CalibrationMethod.MinMax,
            "entropy": CalibrationMethod.Entropy,
            "percentile": CalibrationMethod.Percentile,
        }
        hint = "exclude the nodes it names" + ("" if self.method == "minmax" else ", or take method = minmax")
        with _quiet():
            try:
                quantize_static(
                    source,
                    target,
                    _reader(cases),
                    quant_format=QuantFormat.QDQ,
                    per_channel=self.per_channel,
                    reduce_range=reduced,
                    activation_type=types[activation],
                    weight_type=types[weight],
                    nodes_to_exclude=excluded,
                    use_external_data_format=_is_large(model),
                    calibrate_method=methods[self.method],
                    extra_options={
                        "ActivationSymmetric": symmetric,
                        "WeightSymmetric": weight == "int8",
                        "QuantizeBias": self.scheme != "symmetric",
                    },
                )
            except (ValueError, KeyError, IndexError, RuntimeError, AssertionError, TypeError) as error:
                raise Refused(f"ONNX Runtime's quantiser failed: {error}", hint) from error
        return _finish(target, note, interface)

    def _cases(self, source: Path, context: Context) -> tuple[list[GoldenCase], str]:
        """The calibration cases. Histograms need cases of one shape: the most common one is taken.

        Raises:
            Refused: there are none.
        """
        cases: Sequence[GoldenCase] = context.goldens.cases
        if self.calibration is not None:
            cases = read_goldens(self.calibration, open_model(source).signature).cases
        if not cases:
            raise Refused("there is nothing to calibrate with", "give golden cases, or calibration = a folder of them")
        if self.method == "minmax":
            return list(cases), ""
        groups: dict[tuple[tuple[str, tuple[int, ...]], ...], list[GoldenCase]] = {}
        for case in cases:
            shapes = tuple(sorted((name, array.shape) for name, array in case.inputs.items()))
            groups.setdefault(shapes, []).append(case)
        most = max(groups.values(), key=len)
        note = f"calibrated with {len(most)} of {len(cases)} cases: {self.method} needs cases of one shape"
        return most, note if len(most) < len(cases) else ""


def _settings(chosen: Int8Dynamic | Int8Static, bits: str) -> tuple[tuple[str, str], ...]:
    found = [("scales", "per channel" if chosen.per_channel else "per tensor"), ("bits of a weight", bits)]
    found += [("excluded", ", ".join(chosen.exclude))] if chosen.exclude else []
    found += [("excluded operators", ", ".join(chosen.exclude_types))] if chosen.exclude_types else []
    return tuple(found)


def _nodes(model: ir.Model) -> list[ir.Node]:
    return list(model.graph.all_nodes())


def _already(model: ir.Model) -> Outcome | None:
    """The outcome for a model that is quantised already."""
    found = [node for node in _nodes(model) if node.op_type in CARRIERS]
    if not found:
        return None
    return Outcome(model, (f"left as it is: the model is quantised already ({label_of(found[0])})",))


def _need_opset(model: ir.Model, key: str, what: str) -> None:
    opset, least = model.graph.opset_imports.get("", 0), MIN_OPSET[key]
    if opset < least:
        raise Refused(f"{what} needs opset {least}, the model has {opset}", f"raise it first: opset = {least}")


def _excluded(model: ir.Model, names: Sequence[str], types: Sequence[str]) -> list[str]:
    """Names of the nodes to leave.

    Raises:
        Refused: no node has such a name.
    """
    known = {node.name: node for node in _nodes(model) if node.name}
    for name in names:
        if name not in known:
            close = nearest(name, known)
            raise Refused(f"exclude: no node '{name}'", f"did you mean '{close}'?" if close else "name a node")
    return sorted({*names, *(name for name, node in known.items() if node.op_type in types)})


def _is_large(model: ir.Model) -> bool:
    sizes = (int(value.const_value.nbytes) for value in model.graph.initializers.values() if value.const_value)
    return sum(sizes) > EXTERNAL_BYTES


def _prepare(model: ir.Model, context: Context, name: str) -> tuple[Path, Path]:
    """Write the model for the quantiser, which takes weights from initializers only, wants types and shapes inferred
    and every node named; and say where its answer goes."""
    import onnx_ir as ir
    from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass

    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _unpack_weights(model)
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
    taken = {node.name for node in _nodes(model) if node.name}
    for number, node in enumerate(_nodes(model)):
        if not node.name:
            made = f"{node.op_type}_{number}"
            while made in taken:
                made += "_"
            node.name = made
            taken.add(made)
    model.metadata_props[_PREPROCESSED] = "packager"  # or the quantiser advises, on stderr, to do what was just done
    source = context.folder / f"{name}-before.onnx"
    ir.save(model, source, external_data=f"{source.name}.data" if _is_large(model) else None)
    return source, context.folder / f"{name}-after.onnx"


def _unpack_weights(model: ir.Model) -> None:
    """Weights stored as bytes behind a Cast and a Mul by their scale become float32, as the quantiser wants them."""
    import numpy as np
    import onnx_ir as ir

    for node in [node for node in model.graph if node.op_type == "Mul" and not node.domain]:
        cast = next((made for value in node.inputs if value and (made := value.producer()) is not None), None)
        scale = next((value.const_value for value in node.inputs if value and value.is_initializer()), None)
        if cast is None or cast.op_type != "Cast" or scale is None or scale.dtype != ir.DataType.FLOAT:
            continue
        stored = cast.inputs[0].const_value if cast.inputs[0] is not None else None
        output = node.outputs[0]
        if stored is None or stored.dtype.bitwidth > 8 or output.is_graph_output():
            continue
        array = stored.numpy().astype(np.float32) * scale.numpy()
        made = ir.Value(name=f"{output.name}_unpacked", const_value=ir.tensor(array))
        made.shape, made.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.FLOAT)
        model.graph.register_initializer(made)
        output.replace_all_uses_with(made)
        model.graph.remove(node, safe=True)
        if not cast.outputs[0].uses() and not cast.outputs[0].is_graph_output():
            model.graph.remove(cast, safe=True)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            del model.graph.initializers[name]


Interface = dict[str, tuple["ir.TypeProtocol | None", "ir.Shape | None"]]


def _interface(model: ir.Model) -> Interface:
    """Types and shapes of graph inputs and outputs, which shape inference and the quantiser may fill in or rename."""
    values = (*model.graph.inputs, *model.graph.outputs)
    return {value.name or "": (value.type, None if value.shape is None else value.shape.copy()) for value in values}


def _finish(target: Path, note: str, interface: Interface) -> Outcome:
    """Read the quantiser's answer, its nodes sorted and its inputs and outputs declared as they were.

    Raises:
        Refused: it quantised nothing.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import TopologicalSortPass

    model = ir.load(target)
    TopologicalSortPass()(model)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.type, value.shape = interface.get(value.name or "", (value.type, value.shape))
    for mark in (_PREPROCESSED, "onnx.infer"):  # the quantiser's notes to itself
        model.metadata_props.pop(mark, None)
    counts = Counter(node.op_type for node in _nodes(model) if node.op_type in CARRIERS - {"DynamicQuantizeLinear"})
    if not counts:
        raise Refused(
            "there is nothing to quantise: no MatMul, Gemm, Conv or other operator with constant weights is left",
            "use fp16 or fp32 for this target, or exclude less",
        )
    made = "quantised operators: " + ", ".join(f"{op_type} {count}" for op_type, count in sorted(counts.items()))
    return Outcome(model, (made, note) if note else (made,))


@contextmanager
def _quiet() -> Iterator[None]:
    """The quantiser advises by logging and calibration prints; what matters here is in notes and errors."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(before)


def _reader(cases: Sequence[GoldenCase]) -> object:
    """The cases' inputs as the quantiser wants them, one after another."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = iter(cases)

        def get_next(self) -> dict[str, Array] | None:
            case = next(self._left, None)
            return None if case is None else dict(case.inputs)

    return Reader()
