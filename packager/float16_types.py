"""The type of every value of a model, as far as it can be known: nothing is rewritten whose type is a guess.

onnx infers most. Where it has no inference function, the operator's schema may leave only one type (ai.onnx.ml.Scaler
gives float32). What comes from operators of other domains, ONNX Runtime knows once it has loaded the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from packager.errors import ModelError
from packager.float16_slots import TYPED_BY_CONTROL, schema_of
from packager.transform_drift import load_session

if TYPE_CHECKING:
    import onnx_ir as ir

MAX_BYTES = 1_500_000_000
"""Larger models aren't given to ONNX Runtime for types only."""
_ROUNDS = 8
_LARGE = 1024
"""Bytes. Shapes are computed from constants of a few numbers, not from weights."""
_MIXED = TYPED_BY_CONTROL | {"SequenceMap"}
"""Operators of which one type variable stands for many types."""


def infer_types(model: ir.Model) -> None:
    """Set the type of all values of the model and its subgraphs, where it can be found out."""
    for _ in range(_ROUNDS):
        _infer(model)
        if not _fill_by_schema(model) and not _fill_by_body(model) and not _fill_by_runtime(model):
            return


def _infer(model: ir.Model) -> None:
    """Types and shapes by onnx. Large weights are left out of what it gets.

    onnx_ir's own pass is not used: it makes tensors of sequences (onnx_ir 1.1, ``shape_inference._merge_func``).
    """
    import onnx
    import onnx_ir as ir

    proto = ir.to_proto(model)
    for tensor in proto.graph.initializer:
        if len(tensor.raw_data) > _LARGE:
            tensor.ClearField("raw_data")
    try:
        inferred = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(proto))
    except onnx.shape_inference.InferenceError:
        return
    for graph, other in zip(model.graphs(), inferred.graphs(), strict=True):
        known = {value.name: value for value in _values(other)}
        for value in _values(graph):
            found = known.get(value.name)
            if found is not None:
                value.type = value.type or found.type
                if value.shape is None and not value.is_graph_output():  # what the signature leaves open stays open
                    value.shape = found.shape


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _fill_by_body(model: ir.Model) -> bool:
    """Whether a type was found: of a Loop or Scan body's input, which is that of what the node hands it."""
    found = False
    for node in model.graph.all_nodes():
        if node.op_type in ("Loop", "Scan") and not node.domain:
            body = node.attributes["body"].as_graph()
            given = list(node.inputs)[-len(body.inputs) :] if node.op_type == "Scan" else list(node.inputs)
            for inner, outer in zip(body.inputs, given, strict=False):
                if inner.type is None and outer is not None and outer.type is not None:
                    inner.type, found = outer.type, True
            for inner, outer in zip(body.outputs[1 if node.op_type == "Loop" else 0 :], node.outputs, strict=False):
                if outer.type is None and inner.type is not None:
                    outer.type, found = inner.type, True
    return found


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
