"""The structure of an ONNX model, without its weights: nodes, attributes, types and where each tensor's bytes are.

Gates, hazards and plans are pure functions of this view. It is read from the file in place (see
:mod:`packager.wire`), so a model with gigabytes of weights costs what its graph costs. Work that *changes* a graph
belongs to onnx-ir, in a child process.

Field numbers follow ``onnx.proto`` of ONNX 1.23 (IR version 14).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from packager import wire

Dim = int | str | None
"""A dimension: its size, the name of a symbolic one, or ``None`` where nothing is known."""

MAX_DEPTH = 64
"""Subgraphs and types nested deeper than this are refused (protobuf's own default limit is 100 messages)."""

MAX_RANK = 64
"""Tensors of more dimensions are refused: numpy has no more (``NPY_MAXDIMS`` of numpy 2), and no runtime does."""

KEPT_BYTES = 4096
"""Tensor payloads up to this size are kept: shapes, axes, scalars and zero points, which checks look at."""

DTYPES: dict[int, str] = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float8e4m3fn", 18: "float8e4m3fnuz", 19: "float8e5m2", 20: "float8e5m2fnuz", 21: "uint4", 22: "int4",
    23: "float4e2m1", 24: "float8e8m0", 25: "uint2", 26: "int2", 27: "float6e2m3", 28: "float6e3m2",
}  # fmt: skip
"""ONNX ``TensorProto.DataType`` to the names used everywhere in packager (numpy's and ml_dtypes')."""

BITS: dict[str, int] = {
    "float32": 32, "uint8": 8, "int8": 8, "uint16": 16, "int16": 16, "int32": 32, "int64": 64, "bool": 8,
    "float16": 16, "float64": 64, "uint32": 32, "uint64": 64, "complex64": 64, "complex128": 128, "bfloat16": 16,
    "float8e4m3fn": 8, "float8e4m3fnuz": 8, "float8e5m2": 8, "float8e5m2fnuz": 8, "uint4": 4, "int4": 4,
    "float4e2m1": 4, "float8e8m0": 8, "uint2": 2, "int2": 2, "float6e2m3": 6, "float6e3m2": 6,
}  # fmt: skip
"""Bits per element; strings have none."""


@dataclass(frozen=True)
class ValueType:
    """The type of a value: ``kind`` is ``tensor``, ``sparse``, ``sequence``, ``map``, ``optional`` or ``unknown``.

    For tensors ``dtype`` names the element type and ``dims`` is ``None`` where the rank is unknown. For the others
    ``element`` is what they hold (a map's values), and ``dtype`` is a map's key type.
    """

    kind: str
    dtype: str = ""
    dims: tuple[Dim, ...] | None = None
    element: ValueType | None = None

    def __str__(self) -> str:
        if self.kind == "tensor":
            return self.dtype + ("[...]" if self.dims is None else format_dims(self.dims))
        inner = "" if self.element is None else str(self.element)
        return f"{self.kind}({self.dtype + ' to ' if self.kind == 'map' else ''}{inner})"


@dataclass(frozen=True)
class Value:
    """A named, typed value: a graph input or output, or an annotation in between."""

    name: str
    type: ValueType


@dataclass(frozen=True)
class Tensor:
    """A constant of the model: its type and where its bytes are, not the bytes themselves.

    ``inline_bytes`` counts payload bytes inside the model file, ``raw_bytes`` those of raw data (``None`` where there
    is none). ``external`` is the tensor's key-value record of external data (``location``, ``offset``, ``length``),
    empty for inline tensors. ``raw`` holds the little-endian payload of small inline tensors and ``values`` the numbers
    of small ones stored in typed fields.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    inline_bytes: int = 0
    raw_bytes: int | None = None
    external: tuple[tuple[str, str], ...] = ()
    raw: bytes | None = None
    values: tuple[float, ...] | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int | None:
        """Payload size in bytes as shape and dtype give it; ``None`` for strings."""
        bits = BITS.get(self.dtype)
        return None if bits is None else (self.elements * bits + 7) // 8

    def numbers(self) -> tuple[float, ...] | None:
        """The elements in row-major order if the tensor is small, numeric and inline, else ``None``."""
        if self.values is not None:
            return self.values
        if self.raw is None or self.dtype in ("complex64", "complex128") or BITS.get(self.dtype, 0) < 8:
            return None
        import numpy as np

        if self.dtype.startswith("float8") or self.dtype == "bfloat16":
            return None
        return tuple(np.frombuffer(self.raw, dtype=np.dtype(self.dtype).newbyteorder("<")).tolist())


@dataclass(frozen=True)
class Attribute:
    """An attribute of a node. ``value`` is a number, a text, or a tuple of either; ``None`` for graphs and tensors."""

    name: str
    value: float | str | bytes | tuple[float, ...] | tuple[bytes, ...] | None = None
    tensors: tuple[Tensor, ...] = ()
    graphs: tuple[Graph, ...] = ()
    reference: str = ""


@dataclass(frozen=True)
class Node:
    """One operator call. ``name`` may be empty in the file; use :attr:`label` in messages."""

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[Attribute, ...] = ()
    overload: str = ""

    @property
    def operator(self) -> str:
        """``Conv`` or ``ai.onnx.ml.Scaler``: the operator with its domain unless that is the default one."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type

    @property
    def label(self) -> str:
        """How messages name the node: its name, or the output it makes where it has none."""
        if self.name:
            return printable(f"{self.operator} '{self.name}'")
        made = next((name for name in self.outputs if name), "")
        return printable(f"{self.operator} (unnamed, makes '{made}')" if made else f"{self.operator} (unnamed)")

    def attribute(self, name: str) -> Attribute | None:
        """The attribute of that name, if the node has it."""
        return next((attribute for attribute in self.attributes if attribute.name == name), None)

    def integer(self, name: str, default: int) -> int:
        """An integer attribute's value, or ``default`` where the node has none of that name and type."""
        found = self.attribute(name)
        return found.value if found is not None and isinstance(found.value, int) else default

    def subgraphs(self) -> Iterator[Graph]:
        """Graphs held in attributes: branches and bodies."""
        for attribute in self.attributes:
            yield from attribute.graphs


@dataclass(frozen=True)
class Graph:
    """A graph or subgraph: nodes in file order, its constants, typed inputs and outputs."""

    name: str
    nodes: tuple[Node, ...]
    initializers: tuple[Tensor, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    values: tuple[Value, ...] = ()

    def walk(self) -> Iterator[Node]:
        """Every node of this graph and of the graphs inside it, in file order."""
        for node in self.nodes:
            yield node
            for inner in node.subgraphs():
                yield from inner.walk()

    def tensors(self) -> Iterator[Tensor]:
        """Every constant of this graph and of the graphs inside it, those in attributes included."""
        yield from self.initializers
        yield from node_tensors(self.nodes)


@dataclass(frozen=True)
class Function:
    """A model-local function."""

    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    opsets: tuple[tuple[str, int], ...]
    overload: str = ""


@dataclass(frozen=True)
class Structure:
    """A whole model without weights. ``opsets`` maps each imported domain (``""`` is ai.onnx) to its version."""

    ir_version: int
    producer: str
    opsets: tuple[tuple[str, int], ...]
    graph: Graph
    functions: tuple[Function, ...] = ()
    has_training_info: bool = False

    def opset(self, domain: str = "") -> int | None:
        """The imported version of a domain, or ``None``."""
        return dict(self.opsets).get(domain)

    def walk(self) -> Iterator[Node]:
        """Every node: the main graph, its subgraphs, then the local functions."""
        yield from self.graph.walk()
        for function in self.functions:
            for node in function.nodes:
                yield node
                for inner in node.subgraphs():
                    yield from inner.walk()

    def tensors(self) -> Iterator[Tensor]:
        """Every constant anywhere in the model."""
        yield from self.graph.tensors()
        for function in self.functions:
            yield from node_tensors(function.nodes)


def node_tensors(nodes: tuple[Node, ...]) -> Iterator[Tensor]:
    """Constants held in the attributes of ``nodes`` and in their subgraphs."""
    for node in nodes:
        for attribute in node.attributes:
            yield from attribute.tensors
            for inner in attribute.graphs:
                yield from inner.tensors()


def printable(text: str) -> str:
    """The text on one line without control characters: names in a model may hold anything, a terminal gets none of it.

    Letters of all scripts stay; what isn't printable is shown as its Python escape.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def format_dims(dims: tuple[Dim, ...]) -> str:
    """``[batch, 3, ?, 224]``."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in dims) + "]"


def read_structure(data: wire.Buffer, size: int) -> Structure:
    """Read a serialized ``ModelProto`` of ``size`` bytes.

    Raises:
        packager.wire.WireError: the bytes are cut, or are not an ONNX model.
    """
    ir_version, producer, graph, training = 0, "", None, False
    opsets: list[tuple[str, int]] = []
    functions: list[Function] = []
    for number, kind, a, b in wire.fields(data, 0, size):
        if number == 1 and kind == wire.VARINT:
            ir_version = wire.signed(a)
        elif kind != wire.BYTES:
            continue
        elif number == 2:
            producer = wire.text(data, a, b)
        elif number == 7:
            if graph is not None:
                raise wire.WireError(f"a second graph at offset {a}")
            graph = _graph(data, a, b, 0)
        elif number == 8:
            opsets.append(_opset(data, a, b))
        elif number == 20:
            training = True
        elif number == 25:
            functions.append(_function(data, a, b))
    if graph is None:
        raise wire.WireError("it holds no graph")
    return Structure(ir_version, producer, tuple(opsets), graph, tuple(functions), training)


def _opset(data: wire.Buffer, start: int, end: int) -> tuple[str, int]:
    domain, version = "", 0
    for number, kind, a, b in wire.fields(data, start, end):
        if number == 1 and kind == wire.BYTES:
            domain = wire.text(data, a, b)
        elif number == 2 and kind == wire.VARINT:
            version = wire.signed(a)
    return ("" if domain == "ai.onnx" else domain), version


def _graph(data: wire.Buffer, start: int, end: int, depth: int) -> Graph:
    if depth > MAX_DEPTH:
        raise wire.WireError(f"graphs nested more than {MAX_DEPTH} deep at offset {start}")
    name = ""
    nodes: list[Node] = []
    tensors: list[Tensor] = []
    listed: dict[int, list[Value]] = {11: [], 12: [], 13: []}
    for number, kind, a, b in wire.fields(data, start, end):
        if kind != wire.BYTES:
            continue
        if number == 1:
            nodes.append(_node(data, a, b, depth))
        elif number == 2:
            name = wire.text(data, a, b)
        elif number == 5:
            tensors.append(_tensor(data, a, b))
        elif number == 15:
            tensors.append(_sparse(data, a, b))
        elif number in listed:
            listed[number].append(_value(data, a, b))
    return Graph(name, tuple(nodes), tuple(tensors), tuple(listed[11]), tuple(listed[12]), tuple(listed[13]))


def _function(data: wire.Buffer, start: int, end: int) -> Function:
    texts: dict[int, str] = {1: "", 10: "", 13: ""}
    inputs: list[str] = []
    outputs: list[str] = []
    nodes: list[Node] = []
    opsets: list[tuple[str, int]] = []
    for number, kind, a, b in wire.fields(data, start, end):
        if kind != wire.BYTES:
            continue
        if number in texts:
            texts[number] = wire.text(data, a, b)
        elif number == 4:
            inputs.append(wire.text(data, a, b))
        elif number == 5:
            outputs.append(wire.text(data, a, b))
        elif number == 7:
            nodes.append(_node(data, a, b, 0))
        elif number == 9:
            opsets.append(_opset(data, a, b))
    return Function(texts[10], texts[1], tuple(inputs), tuple(outputs), tuple(nodes), tuple(opsets), texts[13])


def _node(data: wire.Buffer, start: int, end: int, depth: int) -> Node:
    inputs: list[str] = []
    outputs: list[str] = []
    attributes: list[Attribute] = []
    texts: dict[int, str] = {3: "", 4: "", 7: "", 8: ""}
    for number, kind, a, b in wire.fields(data, start, end):
        if kind != wire.BYTES:
            continue
        if number == 1:
            inputs.append(wire.text(data, a, b))
        elif number == 2:
            outputs.append(wire.text(data, a, b))
        elif number == 5:
            attributes.append(_attribute(data, a, b, depth))
        elif number in texts:
            texts[number] = wire.text(data, a, b)
    domain = "" if texts[7] == "ai.onnx" else texts[7]
    return Node(texts[4], domain, texts[3], tuple(inputs), tuple(outputs), tuple(attributes), texts[8])


def _attribute(data: wire.Buffer, start: int, end: int, depth: int) -> Attribute:
    name, reference = "", ""
    single: float | bytes | None = None
    many: list[float] = []
    strings: list[bytes] = []
    tensors: list[Tensor] = []
    graphs: list[Graph] = []
    for number, kind, a, b in wire.fields(data, start, end):
        if number == 2 and kind == wire.FIXED32:
            single = wire.floats(data, kind, a, b)[0]
        elif number == 3 and kind == wire.VARINT:
            single = wire.signed(a)
        elif number == 7:
            many.extend(wire.floats(data, kind, a, b) if b - a <= KEPT_BYTES else [])
        elif number == 8:
            many.extend(wire.integers(data, kind, a, b) if kind == wire.VARINT or b - a <= KEPT_BYTES else [])
        elif kind != wire.BYTES:
            continue  # of the wrong wire type: a and b are no place in the file
        elif number == 1:
            name = wire.text(data, a, b)
        elif number == 4:
            single = bytes(data[a:b])
        elif number in (5, 10):
            tensors.append(_tensor(data, a, b))
        elif number in (6, 11):
            graphs.append(_graph(data, a, b, depth + 1))
        elif number == 9 and len(strings) * 8 < KEPT_BYTES:
            strings.append(bytes(data[a:b]))
        elif number == 21:
            reference = wire.text(data, a, b)
        elif number in (22, 23):
            tensors.append(_sparse(data, a, b))
    value: float | str | bytes | tuple[float, ...] | tuple[bytes, ...] | None
    if strings:
        value = tuple(strings)
    elif many:
        value = tuple(many)
    elif isinstance(single, bytes):
        value = single.decode("utf-8", "surrogateescape")
    else:
        value = single
    return Attribute(name, value, tuple(tensors), tuple(graphs), reference)


def _tensor(data: wire.Buffer, start: int, end: int) -> Tensor:
    name, dtype, inline, raw, raw_bytes = "", 0, 0, None, None
    dims: list[int] = []
    external: list[tuple[str, str]] = []
    values: list[float] = []
    is_external = False
    for number, kind, a, b in wire.fields(data, start, end):
        if number == 1:
            dims.extend(wire.integers(data, kind, a, b))
        elif number == 2 and kind == wire.VARINT:
            dtype = a
        elif number == 14 and kind == wire.VARINT:
            is_external = a == 1
        elif number in (8, 9, 13) and kind != wire.BYTES:
            continue  # of the wrong wire type: a and b are no place in the file
        elif number == 8:
            name = wire.text(data, a, b)
        elif number == 9:
            inline, raw_bytes = inline + b - a, b - a
            raw = bytes(data[a:b]) if b - a <= KEPT_BYTES else None
        elif number in (4, 5, 6, 7, 10, 11):
            inline += b - a if kind == wire.BYTES else 4
            if number in (5, 7) and len(values) * 8 < KEPT_BYTES and (kind == wire.VARINT or b - a <= KEPT_BYTES):
                values.extend(wire.integers(data, kind, a, b))
            elif number == 4 and len(values) * 8 < KEPT_BYTES and b - a <= KEPT_BYTES:
                values.extend(wire.floats(data, kind, a, b))
        elif number == 13:
            external.append(_entry(data, a, b))
    if any(dim < 0 for dim in dims):
        raise wire.WireError(f"tensor '{name}' at offset {start} has a negative dimension in {dims}")
    if len(dims) > MAX_RANK:
        raise wire.WireError(f"tensor '{name}' at offset {start} has {len(dims)} dimensions, more than {MAX_RANK}")
    kept = tuple(values) if values and len(values) == math.prod(dims) and dtype not in (10, 16) else None
    return Tensor(
        name=name,
        dtype=DTYPES.get(dtype, f"type {dtype}"),
        dims=tuple(dims),
        inline_bytes=inline,
        raw_bytes=None if is_external else raw_bytes,
        external=tuple(external) if is_external else (),
        raw=None if is_external else raw,
        values=None if is_external else kept,
    )


def _sparse(data: wire.Buffer, start: int, end: int) -> Tensor:
    """The values tensor of a sparse constant: what names it and may be stored outside."""
    for number, kind, a, b in wire.fields(data, start, end):
        if number == 1 and kind == wire.BYTES:
            return _tensor(data, a, b)
    raise wire.WireError(f"a sparse tensor at offset {start} has no values")


def _entry(data: wire.Buffer, start: int, end: int) -> tuple[str, str]:
    texts = {1: "", 2: ""}
    for number, kind, a, b in wire.fields(data, start, end):
        if number in texts and kind == wire.BYTES:
            texts[number] = wire.text(data, a, b)
    return texts[1], texts[2]


def _value(data: wire.Buffer, start: int, end: int) -> Value:
    name, kind_of = "", ValueType("unknown")
    for number, kind, a, b in wire.fields(data, start, end):
        if number == 1 and kind == wire.BYTES:
            name = wire.text(data, a, b)
        elif number == 2 and kind == wire.BYTES:
            kind_of = _type(data, a, b, 0)
    return Value(name, kind_of)


def _type(data: wire.Buffer, start: int, end: int, depth: int) -> ValueType:
    if depth > MAX_DEPTH:
        raise wire.WireError(f"types nested more than {MAX_DEPTH} deep at offset {start}")
    kinds = {1: "tensor", 4: "sequence", 5: "map", 8: "sparse", 9: "optional"}
    for number, kind, a, b in wire.fields(data, start, end):
        if kind != wire.BYTES or number not in kinds:
            continue
        dtype, dims, element = "", None, None
        for inner, inner_kind, c, d in wire.fields(data, a, b):
            if inner == 1 and inner_kind == wire.VARINT:
                dtype = DTYPES.get(c, f"type {c}")
            elif inner == 2 and number in (1, 8):
                dims = _shape(data, c, d)
            elif inner_kind == wire.BYTES:
                element = _type(data, c, d, depth + 1)
        return ValueType(kinds[number], dtype, dims, element)
    return ValueType("unknown")


def _shape(data: wire.Buffer, start: int, end: int) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    for number, kind, a, b in wire.fields(data, start, end):
        if number != 1 or kind != wire.BYTES:
            continue
        dim: Dim = None
        for inner, inner_kind, c, d in wire.fields(data, a, b):
            if inner == 1 and inner_kind == wire.VARINT:
                dim = wire.signed(c)
            elif inner == 2 and inner_kind == wire.BYTES:
                dim = wire.text(data, c, d)
        if dim in ("", "?") or (isinstance(dim, int) and dim < 0):  # ways exporters write "unknown"
            dim = None
        dims.append(dim)
    if len(dims) > MAX_RANK:
        raise wire.WireError(f"a type at offset {start} has {len(dims)} dimensions, more than {MAX_RANK}")
    return tuple(dims)
