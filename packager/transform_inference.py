"""Shape inference that trusts nothing but the inputs and the constants.

Files carry annotations of intermediate shapes that may be stale (traced at one size, or kept by a converter). A fold
that believed one would bake a wrong size into the model, so all of them are dropped before onnx infers shapes anew.
Large constants don't go through protobuf: inference needs their type and shape only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packager.errors import Refused
from packager.graph import Dim

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

SEEN_BYTES = 4096
"""Constants up to this size are shown to shape inference by value: shapes, axes, indices."""


FOLLOWED = 1 << 20
"""Values of one dim with more elements keep shape arithmetic from being followed; see :func:`_inferred`."""


@dataclass(frozen=True)
class Known:
    """What is inferred of a value: its dtype (``TensorProto.DataType``) and its dims, ``None`` for an unknown rank."""

    dtype: int
    dims: tuple[Dim, ...] | None

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The dims if every one is a number, else ``None``."""
        if self.dims is None or not all(isinstance(dim, int) for dim in self.dims):
            return None
        return tuple(dim for dim in self.dims if isinstance(dim, int))


def infer(model: ir.Model) -> dict[ir.Value, Known]:
    """Types and shapes of all values that follow from graph inputs and constants. The model isn't changed.

    Raises:
        Refused: inference finds the model contradictory.
    """
    import onnx_ir as ir

    proto = _light_proto(model)
    inferred = _inferred(proto, strict=False)
    found: dict[ir.Value, Known] = {}
    _read(model.graph, inferred.graph, found)
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and not value.is_graph_input():
                found[value] = Known(int(tensor.dtype), tuple(int(dim) for dim in ir.Shape(tensor.shape)))
    return found


def consistent(model: ir.Model) -> bool:
    """Whether shape inference finds no contradiction anywhere, branches that may never be taken included.

    ONNX Runtime checks the same when it loads a model.
    """
    try:
        _inferred(_light_proto(model), strict=True)
    except Refused:
        return False
    return True


def _inferred(proto: onnx.ModelProto, *, strict: bool) -> onnx.ModelProto:
    """Infer twice: types and shapes first, then with the values of shape arithmetic.

    The second goes element by element through every 1-D value, floats too, at some 50 bytes each, so it is left out
    where the first finds one of more than :data:`FOLLOWED` elements.

    Raises:
        Refused: inference fails.
    """
    import onnx

    for graph in _graphs(proto.graph):
        _forget(graph, keep_inputs=graph is proto.graph)
    try:
        first = onnx.shape_inference.infer_shapes(proto, check_type=False, strict_mode=strict, data_prop=False)
        if any(_long(info) for graph in _graphs(first.graph) for info in (*graph.input, *graph.value_info)):
            return first
        return onnx.shape_inference.infer_shapes(proto, check_type=False, strict_mode=strict, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError, TypeError) as error:
        raise Refused(
            f"shape inference fails: {' '.join(str(error).split())[:600]}", "check the model's shapes at these sizes"
        ) from error


def _long(info: onnx.ValueInfoProto) -> bool:
    if not info.type.HasField("tensor_type"):
        return False
    dims = info.type.tensor_type.shape.dim
    return len(dims) == 1 and dims[0].dim_value > FOLLOWED


def _light_proto(model: ir.Model) -> onnx.ModelProto:
    """The model with its large constants replaced by pointers to nowhere (type and shape stay)."""
    import onnx_ir as ir

    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    kept = [value.const_value for value in values]
    try:
        for value, tensor in zip(values, kept, strict=True):
            if tensor is None or tensor.dtype == ir.DataType.STRING or tensor.nbytes <= SEEN_BYTES:
                continue
            shape = ir.Shape(tuple(tensor.shape))
            value.const_value = ir.ExternalTensor(
                "unread", 0, int(tensor.nbytes), tensor.dtype, shape=shape, name=value.name or ""
            )
        return ir.serde.serialize_model(model)
    finally:
        for value, tensor in zip(values, kept, strict=True):
            value.const_value = tensor


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graphs(inner)


def _forget(graph: onnx.GraphProto, *, keep_inputs: bool) -> None:
    """Drop claims about shapes; element types stay (onnx needs those of graph inputs and outputs)."""
    del graph.value_info[:]
    for info in (*graph.output, *([] if keep_inputs else graph.input)):
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    for info in graph.input if keep_inputs else ():
        for dim in info.type.tensor_type.shape.dim if info.type.HasField("tensor_type") else ():
            if dim.dim_value < 0 or dim.dim_param in ("?", "-1"):  # ways exporters write "unknown"
                dim.Clear()


def _read(graph: ir.Graph, proto: onnx.GraphProto, found: dict[ir.Value, Known]) -> None:
    """Match the inferred annotations to the values of the same graph, then of the graphs inside, in file order."""
    import onnx_ir as ir

    infos: Mapping[str, onnx.ValueInfoProto] = {
        info.name: info for info in (*proto.value_info, *proto.output, *proto.input)
    }
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    for value in values:
        info = infos.get(value.name or "")
        if info is not None and info.type.HasField("tensor_type") and info.type.tensor_type.elem_type:
            found[value] = Known(info.type.tensor_type.elem_type, _dims(info.type.tensor_type))
    for node, node_proto in zip(graph, proto.node, strict=True):
        attributes = {attribute.name: attribute for attribute in node_proto.attribute}
        for attribute in node.attributes.values():
            if attribute.is_ref():
                continue
            if attribute.type == ir.AttributeType.GRAPH:
                _read(attribute.as_graph(), attributes[attribute.name].g, found)
            elif attribute.type == ir.AttributeType.GRAPHS:
                for inner, inner_proto in zip(attribute.as_graphs(), attributes[attribute.name].graphs, strict=True):
                    _read(inner, inner_proto, found)


def _dims(kind: onnx.TypeProto.Tensor) -> tuple[Dim, ...] | None:
    if not kind.HasField("shape"):
        return None
    dims: list[Dim] = []
    for dim in kind.shape.dim:
        if dim.HasField("dim_value"):
            dims.append(dim.dim_value if dim.dim_value >= 0 else None)
        else:
            dims.append(dim.dim_param or None)
    return tuple(dims)


def annotate(model: ir.Model, found: Mapping[ir.Value, Known]) -> None:
    """Write what was inferred to the values between inputs and outputs; what is unknown keeps its annotation.

    Symbols that inference made up (``unk__0``) are written as unknown. Graph inputs and outputs are left alone.
    """
    import onnx_ir as ir

    own = {dim for value in model.graph.inputs for dim in value.shape or () if isinstance(dim, ir.SymbolicDim)}
    names = {dim.value for dim in own}
    for value, known in found.items():
        if value.is_graph_input() or value.is_graph_output() or value.is_initializer():
            continue
        if value.type is None or isinstance(value.type, ir.TensorType):
            value.dtype = ir.DataType(known.dtype)
            if known.dims is not None:
                value.shape = ir.Shape([dim if isinstance(dim, int) or dim in names else None for dim in known.dims])
