"""Hypothesis strategies for ONNX models: odd ones that are legal, and ones that lie.

A model is a handful of nodes over a few values, out of :data:`TEMPLATES`, with names, shapes, dtypes, versions and
constants drawn from what exporters, attackers and accidents write. Then, as often as not, one field anywhere in the
message is dropped, doubled or replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

NAMES = (
    "x", "y", "a:0", "scope/b", "two words", "名前", "line\nbreak", "__proto__", "constructor", "class", "../up",
    "it's \"quoted\"", "$(touch pwned)", "<script>", "{{ 7 * 7 }}", "%s%n", "\u202egnp", "n" * 300, "\x1b[31m", "0",
    "-", "con.", "\0", "a\\b", "😀",
)  # fmt: skip

DTYPES = (
    TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE,
    TensorProto.INT64, TensorProto.INT32, TensorProto.UINT8, TensorProto.BOOL, TensorProto.STRING, TensorProto.BFLOAT16,
    TensorProto.INT4,
    TensorProto.FLOAT8E4M3FN, TensorProto.COMPLEX64, TensorProto.UNDEFINED, 99,
)  # fmt: skip

DIMS = (1, 1, 2, 3, 0, "n", "n", "batch size", "", None, -1, 10**6, 10**12, 2**62)
SIZES = (1, 2, 3, 0, 4, 7, 10**12, 2**62, -1)
OPSETS = (17, 13, 21, 1, 6, 7, 9, 11, 23, 27, 0, -1, 999, 2**40)
IRS = (8, 8, 10, 3, 4, 13, 0, -1, 99)
NUMBERS = (0, 1, -1, 2, 7, 127, 128, 2**31, 2**63 - 1, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 1e-45, 3.4e38, float("inf"), float("nan"))

LOCATIONS = (
    "w.bin", "w.bin", "sub/w.bin", "../secret", "/etc/passwd", "link.bin", "links/w.bin", ".", "", "m.onnx", "w.bin\0",
    "n" * 300, "C:\\w.bin", "..\\secret", "a/../../secret", "./w.bin", "absent.bin",
)  # fmt: skip
OFFSETS = ("0", "", "3", "4096", "-1", "x", str(2**70), "1" * 5000, "\u0661", "0x10")

EXTERNAL_FILES = {"w.bin": bytes(range(256)) * 32, "sub/w.bin": bytes(4096)}
LINKS = {"link.bin": "../secret", "links": "sub"}


@dataclass(frozen=True)
class Drawn:
    """A model's bytes with the files and links beside it."""

    data: bytes
    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


Template = Callable[["Maker", str, str], None]


class Maker:
    """Builds one graph. ``draw`` is hypothesis's."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.external = False
        self.count = 0

    def pick(self, choices: Sequence[Any]) -> Any:
        """One of a few."""
        return self.draw(st.sampled_from(choices))

    def node(self, op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        """Add a node."""
        name = self.pick(("", f"node{self.count}", *NAMES))
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=name, **attributes))

    def fresh(self) -> str:
        """A name for a value that is new in this graph."""
        self.count += 1
        return str(self.pick((f"v{self.count}", f"{self.pick(NAMES)}{self.count}")))

    def constant(self, values: list[float], dtype: int = TensorProto.FLOAT) -> str:
        """An initializer that is right."""
        name = self.fresh()
        self.initializers.append(helper.make_tensor(name, dtype, [len(values)], values))
        return name

    def odd_constant(self) -> str:
        """An initializer that may lie: about its size, its dtype, or where its data is."""
        tensor = TensorProto(name=self.fresh(), data_type=self.pick(DTYPES))
        tensor.dims.extend(self.draw(st.lists(st.sampled_from(SIZES), max_size=4)))
        where = self.pick(("raw", "float", "int64", "string", "external", "external", "nothing"))
        if where == "raw":
            tensor.raw_data = bytes(self.pick((0, 1, 4, 8, 12, 5000)))
        elif where == "float":
            tensor.float_data.extend(self.draw(st.lists(st.sampled_from(FLOATS), max_size=4)))
        elif where == "int64":
            tensor.int64_data.extend(self.draw(st.lists(st.sampled_from(NUMBERS), max_size=4)))
        elif where == "string":
            tensor.string_data.append(b"\xff\xfe")
        elif where == "external":
            self.external = True
            tensor.data_location = TensorProto.EXTERNAL
            for key, values in (("location", LOCATIONS), ("offset", OFFSETS), ("length", OFFSETS)):
                if self.pick((True, True, key == "location")):
                    tensor.external_data.add(key=key, value=self.pick(values))
        self.initializers.append(tensor)
        return str(tensor.name)


def _unary(make: Maker, x: str, y: str) -> None:
    make.node(make.pick(("Relu", "Abs", "Neg", "Identity", "Sigmoid", "Softmax", "Flatten", "Not", "Shape")), [x], [y])


def _binary(make: Maker, x: str, y: str) -> None:
    other = make.pick((x, make.constant([1.0, 2.0, 3.0])))
    make.node(make.pick(("Add", "Mul", "Div", "MatMul", "Where", "Pow")), [x, other], [y])


def _odd_binary(make: Maker, x: str, y: str) -> None:
    make.node(make.pick(("Add", "Reshape", "Gather", "Slice", "Conv", "Gemm", "Tile")), [x, make.odd_constant()], [y])


def _reshape(make: Maker, x: str, y: str) -> None:
    shape = make.constant(make.draw(st.lists(st.sampled_from(NUMBERS), max_size=3)), TensorProto.INT64)
    make.node(make.pick(("Reshape", "Expand", "Tile", "ConstantOfShape")), [x, shape], [y])


def _empty_inputs(make: Maker, x: str, y: str) -> None:
    make.node(make.pick(("Clip", "Resize", "Pad", "Dropout", "LSTM")), [x, "", "", ""], [y])


def _attributes(make: Maker, x: str, y: str) -> None:
    odd = {"axis": make.pick(NUMBERS), "to": make.pick((*DTYPES, *NUMBERS)), "perm": [make.pick(NUMBERS)]}
    odd |= {"training_mode": make.pick((0, 1, float("inf"), "text")), "epsilon": make.pick(FLOATS)}
    make.node(make.pick(("Concat", "Cast", "Transpose", "BatchNormalization", "Softmax", "Split")), [x], [y], **odd)


def _branch(make: Maker, x: str, y: str) -> None:
    """An If whose branches read a value of the graph around them."""
    inner = [helper.make_graph([helper.make_node(op, [x], [f"{op}.{y}"])], op,
                               [], [helper.make_tensor_value_info(f"{op}.{y}", TensorProto.FLOAT, None)])
             for op in ("Relu", "Neg")]  # fmt: skip
    condition = make.pick((make.odd_constant, lambda: make.constant([1], TensorProto.BOOL), lambda: x))()
    make.node("If", [condition], [y], then_branch=inner[0], else_branch=inner[1])


def _loop(make: Maker, x: str, y: str) -> None:
    """A Loop that carries ``x``. It ends: one that runs for ever is what time limits are for, after minutes."""
    trips = make.constant([make.pick((0, 1, 3, -1))], TensorProto.INT64)
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Relu", ["h"], ["h2"])],
        "body",
        [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []), info("h", TensorProto.FLOAT, None)],
        [info("c2", TensorProto.BOOL, []), info("h2", TensorProto.FLOAT, None)],
    )
    make.node("Loop", [trips, "", x], [y], body=body)


def _function(make: Maker, x: str, y: str) -> None:
    """A call of a local function, which may call itself."""
    domain, name = make.pick(("local", "", "名前")), make.pick(("F", "Relu", "a b"))
    op_type, inner = make.pick((("Relu", ""), (name, domain)))
    body = helper.make_node(op_type, ["a"], ["b"], domain=inner)
    made = helper.make_function(domain, name, ["a"], ["b"], [body], [helper.make_opsetid("", 17)])
    self_known = {(function.domain, function.name) for function in make.functions}
    if (domain, name) not in self_known:
        make.functions.append(made)
    make.node(name, [x], [y], domain=domain)


def _custom(make: Maker, x: str, y: str) -> None:
    domain = make.pick(("com.microsoft", "ai.onnx.ml", "ai.onnx", "no.such.domain", "../up"))
    make.node(make.pick(("Gelu", "Scaler", "Relu", "NoSuchOp", "")), [x], [y], domain=domain)


def _sequence(make: Maker, x: str, y: str) -> None:
    make.node("SequenceConstruct", [x], [f"s.{y}"])
    make.node("SequenceAt", [f"s.{y}", make.constant([0], TensorProto.INT64)], [y])


TEMPLATES: tuple[Template, ...] = (
    _unary, _unary, _binary, _odd_binary, _reshape, _empty_inputs, _attributes, _branch, _loop, _function, _custom,
    _sequence,
)  # fmt: skip


@st.composite
def values(draw: st.DrawFn, name: str) -> onnx.ValueInfoProto:
    """A typed graph input or output; mostly a small float matrix."""
    if draw(st.integers(0, 2)):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3])
    info = onnx.ValueInfoProto(name=name)
    kinds = {"sequence": info.type.sequence_type, "optional": info.type.optional_type}
    kind = draw(st.sampled_from(("tensor", "tensor", *kinds)))
    tensor = kinds[kind].elem_type.tensor_type if kind in kinds else info.type.tensor_type
    tensor.elem_type = draw(st.sampled_from(DTYPES))
    for dim in draw(st.lists(st.sampled_from(DIMS), max_size=6)):
        added = tensor.shape.dim.add()
        if isinstance(dim, int):
            added.dim_value = dim
        elif dim is not None:
            added.dim_param = dim
    return info


@st.composite
def models(draw: st.DrawFn) -> Drawn:
    """A model, with its files."""
    make = Maker(draw)
    first = last = draw(st.sampled_from(("x", *NAMES)))
    chain: list[Template] = draw(st.lists(st.sampled_from(TEMPLATES), min_size=1, max_size=3))
    for template in chain:
        output = make.fresh()
        template(make, last, output)
        last = output
    inputs = [draw(values(first))]
    if make.initializers and make.pick((True, False)):
        inputs.append(draw(values(make.initializers[0].name)))
    graph = helper.make_graph(make.nodes, make.pick(NAMES), inputs, [draw(values(last))])
    graph.initializer.extend(make.initializers)
    proto = helper.make_model(graph, functions=make.functions)
    proto.ir_version = draw(st.sampled_from(IRS))
    del proto.opset_import[:]
    more = st.sampled_from(("", "ai.onnx", "com.microsoft", "ai.onnx.ml", "local"))
    domains = ["", *draw(st.lists(more, max_size=2))]
    for domain in domains:
        proto.opset_import.append(helper.make_opsetid(domain, draw(st.sampled_from(OPSETS))))
    for _ in range(draw(st.integers(0, 2))):
        damage(draw, proto)
    files, links = (EXTERNAL_FILES, LINKS) if make.external else ({}, {})
    return Drawn(proto.SerializeToString(), dict(files), dict(links))


def damage(draw: st.DrawFn, proto: onnx.ModelProto) -> None:
    """Drop, double or replace one field somewhere in the message."""
    spots = [(message, each.name) for message in _messages(proto) for each, _ in message.ListFields()]
    message, name = draw(st.sampled_from(spots))
    value = getattr(message, name)
    if hasattr(value, "add") or hasattr(value, "append"):
        at = draw(st.integers(0, len(value) - 1))
        if draw(st.booleans()):
            del value[at]
        else:
            value.append(value[at])
    elif isinstance(value, str):
        setattr(message, name, draw(st.sampled_from(("", *NAMES))))
    elif isinstance(value, int) and not isinstance(value, bool):
        kind = message.DESCRIPTOR.fields_by_name[name]
        wide = kind.cpp_type in (kind.CPPTYPE_INT64, kind.CPPTYPE_UINT64)
        choices = [number for number in NUMBERS if wide or -(2**31) <= number < 2**31]
        if kind.cpp_type != kind.CPPTYPE_ENUM:
            setattr(message, name, draw(st.sampled_from(choices)))
    else:
        message.ClearField(name)


def _messages(message: Any) -> Iterator[Any]:
    """A protobuf message and all messages inside it."""
    yield message
    for kind, value in message.ListFields():
        if kind.cpp_type == kind.CPPTYPE_MESSAGE:
            for inner in value if hasattr(value, "add") else [value]:
                yield from _messages(inner)
