"""What is rewritten for QNN, and which nodes are named where it compiles a model not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from packager.errors import BuildError
from packager.targets.npu.compile import compiled
from packager.targets.npu.culprits import culprits
from packager.targets.npu.options import Options
from packager.targets.npu.rewrite import ReciprocalAsDiv
from packager.transform import Context
from tests.builders import FLOAT, model, save, value
from tests.targets.test_npu_builds import build
from tests.transform_models import floats, same, transform


def test_a_reciprocal_becomes_a_division_with_the_same_answers(tmp_path: Path):
    nodes = [
        helper.make_node("Reciprocal", ["x"], ["r"], name="turn/0:a"),
        helper.make_node("Mul", ["r", "x"], ["m"]),
        helper.make_node("Reciprocal", ["m"], ["y"], name="last"),
    ]
    source = save(model(nodes, [value("x")], [value("y")]), tmp_path / "m.onnx")
    made = transform(source, tmp_path, ReciprocalAsDiv())
    assert made.ops() == ["Div", "Mul", "Div"] and made.applied.notes == ("2 Reciprocal rewritten as Div",)
    assert [node.name for node in made.proto.graph.node][::2] == ["turn/0:a", "last"]
    assert made.proto.graph.output[0].name == "y"
    same(made, x=np.array([[0.02, -3, 1e-3], [7, 1e6, 0.5]], np.float32))


def test_others_are_left_alone(tmp_path: Path):
    nodes = [helper.make_node("Reciprocal", ["x"], ["y"], domain="my.ops")]
    proto = model(nodes, [value("x")], [value("y")], domains=[("my.ops", 1)])
    outcome = ReciprocalAsDiv().run(ir.from_proto(proto), Context(tmp_path / "m.onnx", tmp_path, None))  # type: ignore[arg-type]
    assert [node.op_type for node in outcome.model.graph] == ["Reciprocal"] and outcome.notes == ()


@pytest.mark.parametrize("precision", ["int8-a16w8", "int8-a16w16"])
def test_the_npu_divides_rightly_where_it_turned_wrongly(tmp_path: Path, precision: str):
    """As a Reciprocal it came back as 6 where 48 is right."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="mix"),
        helper.make_node("Abs", ["h"], ["a"]),
        helper.make_node("Add", ["a", "e"], ["s"]),
        helper.make_node("Reciprocal", ["s"], ["r"], name="turn"),
        helper.make_node("Mul", ["r", "h"], ["y"], name="scaled"),
    ]
    held = [numpy_helper.from_array(0.05 * floats(8, 8), "w"), numpy_helper.from_array(np.float32(0.02), "e")]
    save(model(nodes, [value("x", FLOAT, [1, 8])], [value("y", FLOAT, [1, 8])], held), tmp_path / "net.onnx")
    (tmp_path / "goldens").mkdir()
    for number in range(4):
        np.savez(tmp_path / f"goldens/{number}.npz", x=floats(1, 8, seed=number))
    _, result = build(tmp_path, f'precision = "{precision}"')
    assert result.status == "passed", result.message
    assert "1 Reciprocal rewritten as Div" in result.notes
    qdq = onnx.load(tmp_path / "dist/net-0.0.0-npu/model.qdq.onnx")
    (weight,) = [each for each in qdq.graph.initializer if each.name.startswith("w_") and list(each.dims) == [8, 8]]
    assert weight.data_type == (onnx.TensorProto.INT8 if precision == "int8-a16w8" else onnx.TensorProto.INT16)


def quantised(folder: Path) -> Path:
    """Three nodes between scales, the first two alike; and one between that has none."""
    scale = numpy_helper.from_array(np.float32(0.01), "s")
    zero, eighth = (
        numpy_helper.from_array(np.uint16(32768), "z"),
        numpy_helper.from_array(np.ones((4, 4), np.int8), "k"),
    )
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q0"], name="in")]
    for number, operator in enumerate(["MatMul", "MatMul", "Add"]):
        nodes += [
            helper.make_node("DequantizeLinear", [f"q{number}", "s", "z"], [f"d{number}"]),
            helper.make_node("DequantizeLinear", ["k", "s"], [f"k{number}"]),
            helper.make_node(operator, [f"d{number}", f"k{number}"], [f"m{number}"], name=f"n/{number}:{operator}"),
            helper.make_node("QuantizeLinear", [f"m{number}", "s", "z"], [f"q{number + 1}"]),
        ]
    nodes.append(helper.make_node("DequantizeLinear", ["q3", "s", "z"], ["y"]))
    inputs, outputs = [value("x", FLOAT, [4, 4])], [value("y", FLOAT, [4, 4])]
    return save(model(nodes, inputs, outputs, [scale, zero, eighth], opset=21, ir=10), folder / "q.onnx")


def test_nodes_that_fail_alone_are_named_and_alike_ones_tried_once(tmp_path: Path):
    tried = []

    def compiles(data: bytes) -> bool:
        part = onnx.load_from_string(data)
        onnx.checker.check_model(part)
        tried.append([node.op_type for node in part.graph.node])
        return "MatMul" not in tried[-1]

    assert culprits(quantised(tmp_path), compiles) == ["MatMul 'n/0:MatMul'", "MatMul 'n/1:MatMul'"]
    pair = "DequantizeLinear"
    assert tried == [[pair, pair, "MatMul", "QuantizeLinear"], [pair, pair, "Add", "QuantizeLinear"]]


def test_looking_ends_when_its_time_is_up(tmp_path: Path):
    assert culprits(quantised(tmp_path), lambda data: False, seconds=0) == []


def test_a_model_that_qnn_cant_finalise_is_refused_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As for an LSTM with weights of 16 bits, of which QNN says "Memory allocation related error" and no more."""
    from packager.targets.npu import compile as compiling

    def refuse(data: bytes, *_: object) -> None:
        if any(node.op_type == "Add" for node in onnx.load_from_string(data).graph.node):
            raise RuntimeError("QNN_COMMON_ERROR_MEM_ALLOC")

    monkeypatch.setattr(compiling, "_compile", refuse)
    path = quantised(tmp_path)
    with pytest.raises(BuildError, match=r"(?s)MEM_ALLOC.*node Add 'n/2:Add': QNN can't compile it alone") as caught:
        compiled(path, tmp_path, Options.model_validate({}), None)
    assert "MatMul" not in caught.value.message
