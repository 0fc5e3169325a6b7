"""Loading a model into onnx-ir and saving what passes made of it, without a second copy of the weights in memory.

onnx-ir drops or refuses three things that ONNX allows: sparse constants, map types and training information. Loading
deals with each in the open: sparse constants become dense ones (the same values), map types are set aside and put
back when saving, training information is left out and noted. External data stays on disk: it is mapped when a pass
looks at it and streamed from file to file when saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from packager.errors import ModelError, Refused
from packager.graph import DTYPES, Dim, read_structure
from packager.model import Signature, TensorSpec

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

MAX_DENSE_BYTES = 256 << 20
"""A sparse constant that would be larger than this when dense is refused rather than expanded."""

INLINE_BYTES = 4096
"""External tensors up to this size are read into memory: shapes and axes, which shape inference must see."""

STREAMED_BYTES = 64 << 10
"""Initializers of the main graph larger than this are streamed into the file instead of going through protobuf."""

EXTERNAL_BYTES = 1024
"""Where external data is used, initializers larger than this go there."""

PAGE = 65536
"""Large tensors start at multiples of this in data files: Windows maps files at this granularity, others at less."""

LARGE_BYTES = 1 << 20
"""Tensors from this size on are aligned to :data:`PAGE`, smaller ones to 64 bytes."""

STAND_IN = "\0streamed"


@dataclass(frozen=True)
class Loaded:
    """A model in onnx-ir; ``foreign`` holds serialized types, by name, of graph inputs and outputs it can't hold."""

    model: ir.Model
    foreign: Mapping[str, bytes]
    notes: tuple[str, ...] = ()


def load(path: Path) -> Loaded:
    """Load a model file; external data is not read.

    Raises:
        ModelError: the file can't be parsed.
        Refused: a sparse constant is too large to make dense.
    """
    import onnx
    import onnx_ir as ir

    try:
        proto = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's exception types differ between its implementations
        raise ModelError(f"{path}: not a whole ONNX model: {error}") from error
    notes = _prepare(proto, path)
    foreign = _set_maps_aside(proto)
    model = ir.serde.deserialize_model(proto)
    folder = str(path.parent.resolve())
    for graph in (*model.graphs(), *(function.graph for function in model.functions.values())):
        for value in graph.initializers.values():
            value.const_value = _placed(value.const_value, folder)
        for node in graph:
            for attribute in list(node.attributes.values()):
                if not attribute.is_ref() and attribute.type == ir.AttributeType.TENSOR:
                    # Runtimes differ on external data in attributes, so it is not kept there.
                    tensor = _in_memory(_placed(attribute.value, folder))
                    node.attributes[attribute.name] = ir.AttrTensor(attribute.name, tensor)
    return Loaded(model, foreign, tuple(notes))


def _placed(tensor: Any, folder: str) -> Any:  # noqa: ANN401 - onnx-ir's tensors are a protocol of its own
    """The tensor, told where its external data lies; small external ones come into memory."""
    import onnx_ir as ir

    if isinstance(tensor, ir.ExternalTensor):
        tensor.base_dir = folder
        if tensor.nbytes <= INLINE_BYTES:
            return _in_memory(tensor)
    return tensor


def _in_memory(tensor: Any) -> Any:  # noqa: ANN401
    import onnx_ir as ir

    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    array = tensor.numpy().copy()
    tensor.release()
    return ir.Tensor(array, dtype=tensor.dtype, name=tensor.name)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        yield from _inner_graphs(node)


def _inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from _graphs(inner)


def _prepare(proto: onnx.ModelProto, path: Path) -> list[str]:
    """Rewrite what onnx-ir would drop; says what it did."""
    notes: list[str] = []
    if proto.training_info:
        del proto.training_info[:]
        notes.append("training information was left out")
    for opset in proto.opset_import:
        opset.domain = "" if opset.domain == "ai.onnx" else opset.domain
    inside = [inner for function in proto.functions for node in function.node for inner in _inner_graphs(node)]
    graphs = [*_graphs(proto.graph), *inside]
    for nodes in (*(graph.node for graph in graphs), *(function.node for function in proto.functions)):
        for node in nodes:
            node.domain = "" if node.domain == "ai.onnx" else node.domain
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor"):
                    dense = _dense(attribute.sparse_tensor, path)
                    attribute.ClearField("sparse_tensor")
                    attribute.name, attribute.type = "value", 4  # AttributeProto.TENSOR
                    attribute.t.CopyFrom(dense)
                    notes.append(f"the sparse constant of node '{node.name or node.output[0]}' was made dense")
    for graph in graphs:
        for sparse in graph.sparse_initializer:
            graph.initializer.append(_dense(sparse, path))
            notes.append(f"sparse initializer '{sparse.values.name}' was made dense")
        del graph.sparse_initializer[:]
    return notes


def _dense(sparse: onnx.SparseTensorProto, path: Path) -> onnx.TensorProto:
    """The dense tensor of a sparse one: ``indices`` are linear ([nnz]) or per axis ([nnz, rank])."""
    import numpy as np
    from onnx import external_data_helper, numpy_helper

    for part in (sparse.values, sparse.indices):
        if part.data_location == part.EXTERNAL:
            external_data_helper.load_external_data_for_tensor(part, str(path.parent))
    values = numpy_helper.to_array(sparse.values)
    indices = numpy_helper.to_array(sparse.indices)
    shape = tuple(sparse.dims)
    if int(np.prod(shape, dtype=np.float64)) * values.itemsize > MAX_DENSE_BYTES:
        raise Refused(
            f"{path}: sparse constant '{sparse.values.name}' {list(shape)} would take more than "
            f"{MAX_DENSE_BYTES >> 20} MiB when dense",
            "export it dense",
        )
    made = np.zeros(shape, values.dtype)
    if indices.ndim == 2:
        made[tuple(indices.T)] = values
    else:
        made.reshape(-1)[indices] = values
    return numpy_helper.from_array(made, sparse.values.name)


def _set_maps_aside(proto: onnx.ModelProto) -> dict[str, bytes]:
    """Take map types, which onnx-ir can't represent, off the values of all graphs; gives those of the main graph."""
    foreign: dict[str, bytes] = {}
    for graph in _graphs(proto.graph):
        for info in (*graph.input, *graph.output):
            if _has_map(info.type):
                if graph is proto.graph:
                    foreign[info.name] = info.type.SerializeToString()
                info.ClearField("type")
        kept = [info for info in graph.value_info if not _has_map(info.type)]
        if len(kept) < len(graph.value_info):
            del graph.value_info[:]
            graph.value_info.extend(kept)
    return foreign


def _has_map(kind: onnx.TypeProto) -> bool:
    if kind.HasField("map_type"):
        return True
    for field in ("sequence_type", "optional_type"):
        if kind.HasField(field):
            return _has_map(getattr(kind, field).elem_type)
    return False


def signature_of(model: ir.Model, foreign: Mapping[str, bytes] = {}) -> Signature:
    """What the model takes and gives: the same view :func:`packager.model.open_model` has of the file."""
    defaults = set(model.graph.initializers)
    inputs = [value for value in model.graph.inputs if value.name not in defaults]
    return Signature(
        tuple(_spec(value, foreign) for value in inputs), tuple(_spec(value, foreign) for value in model.graph.outputs)
    )


def _spec(value: ir.Value, foreign: Mapping[str, bytes]) -> TensorSpec:
    import onnx_ir as ir

    if isinstance(value.type, ir.TensorType):
        return TensorSpec(value.name or "", DTYPES.get(int(value.type.dtype), ""), dims_of(value.shape))
    return _read_back(value, foreign)


def _read_back(value: ir.Value, foreign: Mapping[str, bytes]) -> TensorSpec:
    """The spec of a value that is no tensor, printed by the one reader of types there is."""
    import onnx
    import onnx_ir as ir

    name = value.name or ""
    info = onnx.ValueInfoProto(name=name)
    if value.type is not None:
        info = ir.serde.serialize_value(value)
    elif name in foreign:
        info.type.ParseFromString(foreign[name])
    proto = onnx.ModelProto(ir_version=8, graph=onnx.GraphProto(output=[info]))
    data = proto.SerializeToString()
    kind = read_structure(data, len(data)).graph.outputs[0].type
    return TensorSpec(name, str(kind), None, kind.kind)


def dims_of(shape: ir.Shape | None) -> tuple[Dim, ...] | None:
    """Sizes, symbols and ``None`` for unknown dims; ``None`` where the rank is unknown.

    The ways exporters write "unknown" (-1, an empty symbol, ``?``) all give ``None``.
    """
    if shape is None:
        return None
    dims: list[Dim] = []
    for dim in shape:
        if isinstance(dim, int):
            dims.append(dim if dim >= 0 else None)
        else:
            dims.append(None if dim.value in (None, "", "?") else dim.value)
    return tuple(dims)


def save(loaded: Loaded, out: Path, *, max_inline_bytes: int, max_file_bytes: int) -> None:
    """Write the model to ``out``, an ``.onnx`` path in an empty folder.

    All in one file where the constants take at most ``max_inline_bytes``, else with ``weights-000.bin`` and so on
    beside it, each of at most ``max_file_bytes`` (a larger tensor has a file of its own). Memory stays flat: one
    tensor at a time is made, and external ones are copied from file to file.
    """
    import onnx_ir as ir
    from onnx_ir.passes import common

    model = loaded.model
    total = sum(_nbytes(value) for graph in model.graphs() for value in graph.initializers.values())
    external = total > max_inline_bytes
    if external:
        common.LiftConstantsToInitializersPass(size_limit=EXTERNAL_BYTES)(model)
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    kept = [value.const_value for value in values]
    try:
        streamed: list[tuple[str, Any]] = []
        if external:
            _move_out(values, out.parent, max_file_bytes)
        else:
            streamed = _stand_in(model, values)
        proto = ir.serde.serialize_model(model)
    finally:
        for value, tensor in zip(values, kept, strict=True):
            value.const_value = tensor
    for info in (*proto.graph.input, *proto.graph.output):
        if not info.HasField("type") and info.name in loaded.foreign:
            info.type.ParseFromString(loaded.foreign[info.name])
    _write(proto, dict(streamed), out)


def _nbytes(value: ir.Value) -> int:
    import onnx_ir as ir

    tensor = value.const_value
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return 0
    return int(tensor.nbytes)


def _pointer(tensor: Any, name: str, location: str, offset: int) -> ir.ExternalTensor:  # noqa: ANN401
    import onnx_ir as ir

    return ir.ExternalTensor(
        location, offset, int(tensor.nbytes), tensor.dtype, shape=ir.Shape(tuple(tensor.shape)), name=name
    )


def _move_out(values: list[ir.Value], folder: Path, max_file_bytes: int) -> None:
    """Write large tensors to data files and point to them; a tensor used twice is written twice only if it is two."""
    handle: BinaryIO | None = None
    count, position, written = 0, 0, dict[int, tuple[str, int]]()
    try:
        for value in values:
            tensor = value.const_value
            if _nbytes(value) <= EXTERNAL_BYTES or tensor is None:
                value.const_value = _in_memory(tensor)
                continue
            if id(tensor) not in written:
                step = PAGE if tensor.nbytes >= LARGE_BYTES else 64
                start = -(-position // step) * step
                if handle is None or (start + tensor.nbytes > max_file_bytes and start):
                    if handle is not None:
                        handle.close()
                    handle = (folder / f"weights-{count:03d}.bin").open("xb")
                    count, start = count + 1, 0
                handle.seek(start)
                tensor.tofile(handle)
                position = start + int(tensor.nbytes)
                if handle.tell() != position:
                    raise ModelError(f"tensor '{value.name}' has {handle.tell() - start} bytes of {tensor.nbytes}")
                written[id(tensor)] = (f"weights-{count - 1:03d}.bin", start)
            value.const_value = _pointer(tensor, value.name or "", *written[id(tensor)])
    finally:
        if handle is not None:
            handle.close()


def _stand_in(model: ir.Model, values: list[ir.Value]) -> list[tuple[str, Any]]:
    """Keep large tensors of the main graph out of protobuf, to be streamed; bring the other external ones in."""
    streamed: list[tuple[str, Any]] = []
    for value in values:
        tensor = value.const_value
        if value.graph is model.graph and _nbytes(value) > STREAMED_BYTES:
            streamed.append((value.name or "", tensor))
            value.const_value = _pointer(tensor, value.name or "", STAND_IN, 0)
        else:
            value.const_value = _in_memory(tensor)
    return streamed


def _write(proto: onnx.ModelProto, streamed: Mapping[str, Any], out: Path) -> None:
    """Write a ``ModelProto`` whose graph's ``streamed`` initializers come last, their bytes copied as they are.

    Fields of a protobuf message may come in any order and in pieces, so the model is its small fields, then field 7
    (the graph: its small fields, then field 5 per streamed tensor: its header, then field 9, the raw bytes).
    """
    headers: list[tuple[bytes, Any]] = []
    rest: list[onnx.TensorProto] = []
    for tensor in proto.graph.initializer:
        if tensor.name in streamed:
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            source = streamed[tensor.name]
            headers.append((tensor.SerializeToString() + b"\x4a" + _varint(int(source.nbytes)), source))
        else:
            rest.append(tensor)
    if headers:
        del_all = list(rest)
        proto.graph.ClearField("initializer")
        proto.graph.initializer.extend(del_all)
    graph = proto.graph.SerializeToString()
    proto.ClearField("graph")
    entries = [(b"\x2a" + _varint(len(header) + int(source.nbytes)) + header, source) for header, source in headers]
    size = len(graph) + sum(len(head) + int(source.nbytes) for head, source in entries)
    with out.open("xb") as handle:
        handle.write(proto.SerializeToString() + b"\x3a" + _varint(size) + graph)
        for head, source in entries:
            handle.write(head)
            source.tofile(handle)


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(made) + bytes([number])
