"""A half-precision model as half-precision hardware would compute it, on a runtime that computes in float32."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from packager.float16_rewrite import Work, cast_of, graphs_of, insert_behind, outputs_of, redirect, values_of
from packager.float16_slots import TYPED_BY_CONTROL
from packager.float16_types import infer_types
from packager.model import Model

if TYPE_CHECKING:
    import onnx_ir as ir


UNROUNDED = TYPED_BY_CONTROL | {"Cast", "Constant", "ConstantOfShape"}
"""Operators that compute nothing themselves, and that any runtime runs in half precision."""


def round_between(model: ir.Model, low: ir.DataType) -> None:
    """Rewrite a half-precision model in place so that any runtime computes what half-precision hardware would.

    Runtimes without half kernels (ONNX Runtime's CPU provider) run neighbouring nodes in float32 and skip the
    rounding between them: 7000 * 7000 / 7000 is 7000 there and infinity elsewhere. Here every node computes in
    float32 and each of its half outputs is cast to half and back, which no optimiser may remove.
    """
    import onnx_ir as ir

    graphs = graphs_of(model)
    names = {value.name for value in values_of(graphs) if value.name} | {node.name or "" for g in graphs for node in g}
    work = Work(graphs, low, True, {}, names=names)
    outputs, widened = outputs_of(graphs), dict[ir.Value, ir.Value]()

    def wide(value: ir.Value) -> ir.Value:
        if value not in widened:
            made = cast_of(work, value, "wide", work.fresh(value.name or "value", "wide"), value)
            insert_behind(value, made)
            widened[value] = made.outputs[0]
        return widened[value]

    for node in [node for graph in graphs for node in graph if node.domain or node.op_type not in UNROUNDED]:
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == low:
                node.replace_input_with(index, wide(value))
        for output in node.outputs:
            if output.dtype != low or not output.name:
                continue
            name = output.name
            output.name, output.dtype = work.fresh(name, "wide"), ir.DataType.FLOAT
            users, places = list(output.uses()), outputs.get(output, [])
            made = cast_of(work, output, "low", name, output)
            node.append(made)
            redirect(made.outputs[0], users, places)


BFLOAT16 = 16
"""Of ONNX's data types."""
STANDS_IN = "in float32 with every result rounded to bfloat16, of which ONNX Runtime has no kernels on CPU"
"""How :func:`runnable` has a bfloat16 model computed, as the end of a sentence."""


def computes_in_bfloat16(model: Model) -> bool:
    """Whether anything in a model is bfloat16, of which ONNX Runtime's CPU provider has hardly a kernel."""
    structure = model.structure
    return any(tensor.dtype == "bfloat16" for tensor in structure.tensors()) or any(
        node.op_type == "Cast" and node.integer("to", 0) == BFLOAT16 for node in structure.walk()
    )


def runnable(model: Model, folder: Path) -> Path:
    """A file that ONNX Runtime's CPU provider runs: the model's own, or one that stands in for bfloat16.

    Args:
        model: any.
        folder: where the one that stands in goes, if one is needed.
    """
    if not computes_in_bfloat16(model):
        return model.path
    import onnx_ir as ir

    made, path = ir.load(model.path), folder / "bfloat16.onnx"
    infer_types(made)
    round_between(made, ir.DataType.BFLOAT16)
    ir.save(made, path, external_data=f"{path.name}.data")
    return path
