"""The type of every value of a model, as far as it can be known: nothing is rewritten whose type is a guess.

onnx infers most. Where it has no inference function, the operator's schema may leave only one type (ai.onnx.ml.Scaler
gives float32). What comes from operators of other domains, ONNX Runtime knows once it has loaded the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from packager.errors import ModelError
from packager.float16_slots import TYPED_BY_CONTROL, schema_of
from packager.transform_drift import load_session

if TYPE_CHECKING:
    import onnx_ir as ir

MAX_BYTES = 1_500_000_000
"""Larger models aren't given to ONNX Runtime for types only."""
_ROUNDS = 8
_MIXED = TYPED_BY_CONTROL | {"SequenceMap"}
"""Operators of which one type variable stands for many types."""


def infer_types(model: ir.Model) -> None:
    """Set the type of all values of the model and its subgraphs, where it can be found out."""
    from onnx_ir.passes.common import ShapeInferencePass

    for _ in range(_ROUNDS):
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
        if not _fill_by_schema(model) and not _fill_by_runtime(model):
            return


def _fill_by_schema(model: ir.Model) -> bool:
    """Whether a type was found: an output's only type, or that of an input of the same type variable."""
    import onnx_ir as ir

    opsets: Mapping[str, int] = model.graph.opset_imports
    found = False
    for node in model.graph.all_nodes():
        schema = schema_of(node.domain, node.op_type, opsets.get(node.domain, 0))
        if schema is None or node.op_type in _MIXED or all(output.type is not None for output in node.outputs):
            continue
        bound: dict[str, ir.DataType] = {}
        for index, value in enumerate(node.inputs):
            formal = schema.formal("inputs", index)
            if value is not None and formal is not None and isinstance(value.type, ir.TensorType):
                bound.setdefault(formal.variable, value.type.dtype)
        for index, output in enumerate(node.outputs):
            formal = schema.formal("outputs", index)
            if formal is None or output.type is not None or not output.name:
                continue
            dtype = bound.get(formal.variable)
            if dtype is None and formal.allowed == {"tensor(float)"}:
                dtype = ir.DataType.FLOAT
            if dtype is not None:
                output.type = ir.TensorType(dtype)
                found = True
    return found


def _fill_by_runtime(model: ir.Model) -> bool:
    """Whether ONNX Runtime knew types of the main graph's values that nobody else knows."""
    import onnx_ir as ir
    from onnx import helper

    open_ones = {value.name: value for node in model.graph for value in node.outputs if value.name and not value.type}
    size = sum(int(value.const_value.nbytes) for value in model.graph.initializers.values() if value.const_value)
    if not open_ones or size > MAX_BYTES:
        return False
    proto = ir.to_proto(model)
    del proto.graph.output[:]
    proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in open_ones)
    folder = next((tensor.base_dir for value in model.graph.initializers.values()
                   if isinstance(tensor := value.const_value, ir.ExternalTensor)), ".")  # fmt: skip
    try:
        outputs = load_session(proto.SerializeToString(), folder, quantized=False).get_outputs()
    except ModelError:
        return False
    found = False
    for output in outputs:
        dtype = _TYPES.get(output.type)
        if dtype is not None:
            open_ones[output.name].type = ir.TensorType(ir.DataType[dtype])
            found = True
    return found


_TYPES = {
    "tensor(float)": "FLOAT", "tensor(float16)": "FLOAT16", "tensor(bfloat16)": "BFLOAT16", "tensor(double)": "DOUBLE",
    "tensor(int8)": "INT8", "tensor(uint8)": "UINT8", "tensor(int16)": "INT16", "tensor(uint16)": "UINT16",
    "tensor(int32)": "INT32", "tensor(uint32)": "UINT32", "tensor(int64)": "INT64", "tensor(uint64)": "UINT64",
    "tensor(bool)": "BOOL", "tensor(string)": "STRING",
}  # fmt: skip
"""ONNX Runtime's names of types to those of onnx_ir."""
