"""The structure read in place is what the official parser sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from packager.graph import BITS, DTYPES, Graph, read_structure
from packager.wire import WireError
from tests import builders


def structure(proto: onnx.ModelProto):
    data = proto.SerializeToString()
    return read_structure(data, len(data))


def same_graph(ours: Graph, theirs: onnx.GraphProto) -> None:
    assert ours.name == theirs.name
    assert [value.name for value in ours.inputs] == [value.name for value in theirs.input]
    assert [value.name for value in ours.outputs] == [value.name for value in theirs.output]
    assert len(ours.nodes) == len(theirs.node)
    for mine, node in zip(ours.nodes, theirs.node, strict=True):
        assert (mine.op_type, mine.name) == (node.op_type, node.name)
        assert mine.domain == ("" if node.domain == "ai.onnx" else node.domain)
        assert (list(mine.inputs), list(mine.outputs)) == (list(node.input), list(node.output))
        for attribute in node.attribute:
            found = mine.attribute(attribute.name)
            assert found is not None
            kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
            if kind == "INT":
                assert found.value == attribute.i
            elif kind == "FLOAT":
                assert found.value == attribute.f
            elif kind == "STRING":
                assert found.value == attribute.s.decode()
            elif kind == "INTS" and len(attribute.ints) and len(attribute.ints) < 100:
                assert found.value == tuple(attribute.ints)
            elif kind == "GRAPH":
                same_graph(found.graphs[0], attribute.g)
            elif kind == "TENSOR":
                assert found.tensors[0].dims == tuple(attribute.t.dims)
    assert [tensor.name for tensor in ours.initializers] == [tensor.name for tensor in theirs.initializer]
    for read, tensor in zip(ours.initializers, theirs.initializer, strict=True):
        assert read.dims == tuple(tensor.dims)
        assert read.dtype == DTYPES[tensor.data_type]
        if read.numbers() is not None:
            np.testing.assert_array_equal(np.array(read.numbers()), numpy_helper.to_array(tensor).ravel())


def test_real_models_read_as_the_official_parser_reads_them(corpus: Path):
    paths = sorted(corpus.glob("*.onnx"))
    assert len(paths) == 13
    for path in paths:
        proto = onnx.load(path)
        data = path.read_bytes()
        ours = read_structure(data, len(data))
        assert ours.ir_version == proto.ir_version
        assert dict(ours.opsets) == {("" if o.domain == "ai.onnx" else o.domain): o.version for o in proto.opset_import}
        same_graph(ours.graph, proto.graph)


def test_every_dtype_of_onnx_is_known():
    known = {number: name for name, number in TensorProto.DataType.items() if number}
    assert set(known) == set(DTYPES)
    assert set(BITS) == set(DTYPES.values()) - {"string"}


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint16, np.int64, np.bool_, np.float16, np.float64])
@pytest.mark.parametrize("raw", [True, False])
def test_small_tensors_keep_their_numbers(dtype: type, raw: bool):
    array: np.ndarray = np.array([[0, 1], [1, 0]], dtype)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    values = array.tobytes() if raw else array.ravel().tolist()
    tensor = helper.make_tensor("w", kind, array.shape, values, raw=raw)
    node = helper.make_node("Identity", ["w"], ["y"])
    read = structure(builders.model([node], [], [builders.value("y")], [tensor])).graph.initializers[0]
    if read.numbers() is None:
        assert not raw and dtype in (np.float16, np.float64)  # typed fields that nobody needs to look into
    else:
        assert read.numbers() == tuple(array.ravel().tolist())


def test_large_payloads_are_not_kept():
    tensor = numpy_helper.from_array(np.zeros(100_000, np.float32), "w")
    node = helper.make_node("Identity", ["w"], ["y"])
    read = structure(builders.model([node], [], [builders.value("y")], [tensor])).graph.initializers[0]
    assert (read.raw, read.inline_bytes, read.nbytes) == (None, 400_000, 400_000)


def test_functions_subgraphs_and_types_are_read():
    body = helper.make_graph([helper.make_node("Relu", ["x"], ["b"], name="inner")], "body", [], [builders.value("b")])
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body),
        helper.make_node("F", ["x"], ["z"], domain="my"),
    ]
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [None, "k"])
    inputs = [builders.value("c", builders.BOOL, ()), builders.value("x"), sequence]
    proto = builders.model(nodes, inputs, [builders.value("y"), builders.value("z")], domains=[("my", 1)])
    proto.functions.append(
        helper.make_function(
            "my",
            "F",
            ["a"],
            ["b"],
            [helper.make_node("Abs", ["a"], ["b"], name="local")],
            [helper.make_opsetid("", 17)],
        )
    )
    read = structure(proto)
    assert [node.label for node in read.walk()] == [
        "If (unnamed, makes 'y')", "Relu 'inner'", "Relu 'inner'", "my.F (unnamed, makes 'z')", "Abs 'local'",
    ]  # fmt: skip
    assert str(read.graph.inputs[2].type) == "sequence(float32[?, k])"
    assert read.opset("my") == 1


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    size, head = len(payload), bytearray()
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2]) + bytes(head) + bytes([size]) + payload


def test_deep_nesting_is_refused():
    graph = field(2, b"leaf")
    for _ in range(80):  # a graph in an attribute (6) of a node (5) of a graph (1), and so on
        graph = field(1, field(5, field(6, graph)))
    data = field(7, graph)
    with pytest.raises(WireError, match="nested more than 64 deep"):
        read_structure(data, len(data))


def test_a_negative_dimension_is_refused():
    proto = builders.model([], [], [builders.value("y")])
    proto.graph.initializer.add(name="w", data_type=1, dims=[-3])
    with pytest.raises(WireError, match="negative dimension"):
        structure(proto)


def test_a_number_where_a_graph_belongs_is_no_place_to_read_from():
    """Read as an offset it would lead back to the graph itself, twice at every depth."""

    def message(number: int, payload: bytes) -> bytes:
        assert len(payload) < 128
        return bytes([number << 3 | 2, len(payload)]) + payload

    for offset in range(16):
        back = bytes([6 << 3, offset, 5 << 3, offset])  # AttributeProto.g and .t as varints
        graph = message(1, message(4, b"If") + message(5, message(1, b"then_branch") + back * 3))
        data = bytes([1 << 3, 8]) + message(7, graph) + message(8, bytes([2 << 3, 17]))
        (attribute,) = read_structure(data, len(data)).graph.nodes[0].attributes
        assert (attribute.name, attribute.graphs, attribute.tensors) == ("then_branch", (), ())
