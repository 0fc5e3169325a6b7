"""The IR version: the file format's own number, apart from operator sets. Raising is free, lowering is checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from packager.errors import Refused
from packager.graph import DTYPES

if TYPE_CHECKING:
    import onnx_ir as ir

DTYPE_IR: Mapping[str, int] = {
    "bfloat16": 4, "float8e4m3fn": 9, "float8e4m3fnuz": 9, "float8e5m2": 9, "float8e5m2fnuz": 9, "uint4": 10,
    "int4": 10, "float4e2m1": 11, "float8e8m0": 12, "uint2": 13, "int2": 13, "float6e2m3": 14, "float6e3m2": 14,
}  # fmt: skip
"""The IR version that brought a dtype; others were there from the start. Source: onnx.proto of ONNX 1.23."""

LOWEST_IR = 4
"""Before IR 4 every initializer had to be a graph input; models are not lowered that far."""

SHOWN = 8
"""Reasons listed in a refusal."""


def set_ir_version(model: ir.Model, version: int) -> None:
    """Set the IR version, dropping metadata older ones can't hold.

    Raises:
        Refused: the model uses what came with a later IR version; it is named.
    """
    problems = list(_needs_newer(model, version))
    if problems:
        raise Refused(f"IR version {version} can't hold {'; '.join(problems[:SHOWN])}")
    if version < 10:  # metadata_props on graphs, nodes, values and functions came with IR 10
        for graph in model.graphs():
            graph.metadata_props.clear()
            for value in (*graph.inputs, *graph.initializers.values()):
                value.metadata_props.clear()
            for node in graph:
                node.metadata_props.clear()
                for value in node.outputs:
                    value.metadata_props.clear()
    model.ir_version = version


def _needs_newer(model: ir.Model, version: int) -> Iterator[str]:
    if version < LOWEST_IR:
        yield f"initializers that aren't inputs (IR {LOWEST_IR} is the lowest packager goes)"
    if version < 8 and model.functions:
        yield "local functions (IR 8; inline them first)"
    for key, function in model.functions.items():
        if version < 9 and any(attribute.value is not None for attribute in function.attributes.values()):
            yield f"default attributes of function '{function.name}' (IR 9)"
        if version < 10 and key[2]:
            yield f"overloads of function '{function.name}' (IR 10)"
    if version < 11 and model.device_configurations:
        yield "device configurations (IR 11)"
    for graph in model.graphs():
        made = (value for node in graph for value in node.outputs)
        for value in (*graph.inputs, *graph.initializers.values(), *made):
            dtype = "" if value.dtype is None else DTYPES.get(int(value.dtype), "")
            if DTYPE_IR.get(dtype, 0) > version:
                yield f"{dtype} of '{value.name}' (IR {DTYPE_IR[dtype]})"
