"""ONNX Runtime's quantiser: what it is given, and what is made of its answer.

It takes a file, with weights as initializers only, types and shapes inferred and every node named; it advises by
logging and prints while it calibrates; and its answer has nodes out of order, and inputs and outputs declared anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from packager.errors import PackagerError, Refused
from packager.float16_rules import label_of
from packager.golden_formats import read_goldens
from packager.goldens import Array, GoldenCase
from packager.model import QUANTIZED_OPERATORS, open_model
from packager.names import nearest
from packager.transform import Context, Outcome
from packager.transform_graphs import fresh

if TYPE_CHECKING:
    import onnx_ir as ir

CARRIERS = QUANTIZED_OPERATORS | {"DequantizeLinear", "MatMulNBits", "GatherBlockQuantized"}
"""Operators of a model that is quantised already."""
EXTERNAL_BYTES = 1_000_000_000
"""Larger models have their weights beside them: a protobuf message ends at 2 GB."""
_PREPROCESSED = "onnx.quant.pre_process"


def is_large(model: ir.Model) -> bool:
    """Whether the weights are too many for one file in memory."""
    return weight_bytes(model) > EXTERNAL_BYTES


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers of the main graph."""
    return sum(int(value.const_value.nbytes) for value in model.graph.initializers.values() if value.const_value)


def prepare(model: ir.Model, context: Context, name: str) -> Path:
    """Write the model as the quantiser wants it.

    Raises:
        Refused: nothing in it is a float.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass

    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    unpack_weights(model)
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
    if not _has_floats(model):
        raise Refused(
            "there is nothing to quantise: no tensor of the model is float32 or float16",
            "use fp32 for this target, where it takes that; nothing would be lost",
        )
    name_nodes(model)
    model.metadata_props[_PREPROCESSED] = "packager"  # or the quantiser advises, on stderr, to do what was just done
    source = context.folder / f"{name}-before.onnx"
    ir.save(model, source, external_data=f"{source.name}.data" if is_large(model) else None)
    return source


def _has_floats(model: ir.Model) -> bool:
    """Whether the main graph has a tensor that can get a scale, as far as dtypes are known."""
    import onnx_ir as ir

    made = (value for node in model.graph for value in node.outputs)
    values = (*model.graph.inputs, *model.graph.initializers.values(), *made)
    return any(value.dtype in (None, ir.DataType.FLOAT, ir.DataType.FLOAT16) for value in values)


def name_nodes(model: ir.Model) -> None:
    """Give every node a name, those in bodies too."""
    nodes = list(model.graph.all_nodes())
    taken = {node.name for node in nodes if node.name}
    for number, node in enumerate(nodes):
        if not node.name:
            node.name = fresh(f"{node.op_type}_{number}", taken)


def unpack_weights(model: ir.Model) -> None:
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


def already_quantised(model: ir.Model) -> Outcome | None:
    """The outcome for a model that is quantised already."""
    found = next((node for node in model.graph.all_nodes() if node.op_type in CARRIERS), None)
    if found is None:
        return None
    return Outcome(model, (f"left as it is: the model is quantised already ({label_of(found)})",))


def need_opset(model: ir.Model, least: int, what: str) -> None:
    """Refuse a model of an operator set below ``least``.

    Raises:
        Refused: it is, and ``what`` needs more; or it has no operators of ai.onnx at all.
    """
    if "" not in model.graph.opset_imports:
        raise Refused(
            "there is nothing to quantise: no operator of ai.onnx is in the model", "use fp32 for this target"
        )
    opset = model.graph.opset_imports[""]
    if opset < least:
        raise Refused(f"{what} needs opset {least}, the model has {opset}", f"raise it first: opset = {least}")


def excluded_nodes(model: ir.Model, names: Sequence[str], types: Sequence[str]) -> list[str]:
    """Names of the nodes to leave.

    Raises:
        Refused: no node has such a name.
    """
    known = {node.name: node for node in model.graph.all_nodes() if node.name}
    for name in names:
        if name not in known:
            close = nearest(name, known)
            raise Refused(f"exclude: no node '{name}'", f"did you mean '{close}'?" if close else "name a node")
    return sorted({*names, *(name for name, node in known.items() if node.op_type in types)})


def calibration_cases(source: Path, context: Context, files: str) -> Sequence[GoldenCase]:
    """The cases to calibrate with: the context's own files where ``files`` has their digest, else the golden cases.

    Raises:
        Refused: there are none.
        GoldenError: the files don't fit the model.
    """
    signature = open_model(source).signature
    cases: Sequence[GoldenCase] = [case for case in context.goldens.cases if signature.takes(case.inputs)]
    if files:
        if context.calibration is None:
            raise Refused("the files it was calibrated with aren't here", "build it again with its manifest")
        cases = read_goldens(context.calibration, signature).cases
    if not cases:
        raise Refused("there is nothing to calibrate with", "give golden cases, or calibration_data")
    return cases


Interface = dict[str, tuple["ir.TypeProtocol | None", "ir.Shape | None"]]


def interface_of(model: ir.Model) -> Interface:
    """Types and shapes of graph inputs and outputs, which shape inference and the quantiser may fill in or rename."""
    values = (*model.graph.inputs, *model.graph.outputs)
    return {value.name or "": (value.type, None if value.shape is None else value.shape.copy()) for value in values}


def finish(model: ir.Model, interface: Interface, *notes: str) -> Outcome:
    """The outcome of a quantised model: its nodes sorted, its inputs and outputs declared as they were.

    Raises:
        Refused: nothing in it is quantised.
    """
    from onnx_ir.passes.common import TopologicalSortPass

    TopologicalSortPass()(model)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.type, value.shape = interface.get(value.name or "", (value.type, value.shape))
    for mark in (_PREPROCESSED, "onnx.infer"):  # the quantiser's notes to itself
        model.metadata_props.pop(mark, None)
    found = [node.op_type for node in model.graph.all_nodes() if node.op_type in CARRIERS - {"DynamicQuantizeLinear"}]
    if not found:
        raise Refused(
            "there is nothing to quantise: no MatMul, Gemm, Conv or other operator with constant weights is left",
            "use fp16 or fp32 for this target, or exclude less",
        )
    made = ", ".join(f"{op_type} {count}" for op_type, count in sorted(Counter(found).items()))
    return Outcome(model, (f"quantised operators: {made}", *filter(None, notes)))


@contextmanager
def quantising(hint: str) -> Iterator[None]:
    """Around a call of the quantiser, which advises by logging, and prints; what matters here is in notes and errors.

    Raises:
        Refused: it failed, with ``hint``. It raises whatever comes to it, ONNX Runtime's own exceptions too.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stdout(StringIO()):
            yield
    except (MemoryError, PackagerError):
        raise
    except Exception as error:  # ONNX Runtime's exception types are not public
        raise Refused(f"ONNX Runtime's quantiser failed: {error}", hint) from error
    finally:
        logging.disable(before)


def reader(cases: Sequence[GoldenCase]) -> object:
    """The cases' inputs as the quantiser wants them: one after another, or those of a range."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = iter(cases)

        def __len__(self) -> int:
            return len(cases)

        def set_range(self, start_index: int, end_index: int) -> None:
            self._left = iter(cases[start_index:end_index])

        def get_next(self) -> dict[str, Array] | None:
            case = next(self._left, None)
            return None if case is None else dict(case.inputs)

    return Reader()
