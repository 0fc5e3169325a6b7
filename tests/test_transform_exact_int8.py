"""Signed weights made unsigned: the same answers, no saturation anywhere, and what must stay stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from packager.dialect import passes_for
from packager.goldens import GoldenCase, GoldenSet
from packager.model import open_model
from packager.reference import OrtSession
from packager.room import kind_named
from packager.transform import Context
from packager.transform_drift import load_session, run_session
from packager.transform_exact_int8 import ExactInt8, planned_exact
from packager.transforming import apply
from tests.builders import FLOAT, model, save, value

node = helper.make_node
RNG = np.random.default_rng(8)
X = RNG.integers(0, 256, (3, 16), np.uint8)
W = RNG.integers(-128, 128, (16, 4), np.int8)
W[0, 0] = -128
IMAGE = RNG.integers(0, 256, (1, 2, 5, 5), np.uint8)
KERNEL = RNG.integers(-128, 128, (3, 2, 3, 3), np.int8)
UINT8, INT8, INT32 = TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32
MICROSOFT = "com.microsoft"


def const(name: str, array: object, dtype: type[np.generic] = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(array, dtype), name)


SCALES = [const("xs", 0.02), const("ws", 0.01), const("ys", 0.5)]
POINTS = [const("xz", 130, np.uint8), const("wz", 3, np.int8), const("yz", 120, np.uint8)]


def matmul_integer(*inputs: str) -> onnx.ModelProto:
    return model([node("MatMulInteger", ["x", "w", *inputs], ["y"])], [value("x", UINT8, ["n", 16])],
                 [value("y", INT32, ["n", 4])], [const("w", W, np.int8), *POINTS[:2]])  # fmt: skip


def qlinear_matmul() -> onnx.ModelProto:
    inputs = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"]
    return model([node("QLinearMatMul", inputs, ["y"])], [value("x", UINT8, ["n", 16])],
                 [value("y", UINT8, ["n", 4])], [const("w", W, np.int8), *SCALES, *POINTS])  # fmt: skip


def qlinear_conv() -> onnx.ModelProto:
    inputs = ["x", "xs", "xz", "w", "channels", "zeros", "ys", "yz"]
    held = [const("channels", [0.01, 0.02, 0.03]), const("zeros", [0, 0, 0], np.int8), *SCALES, *POINTS]
    return model([node("QLinearConv", inputs, ["y"], pads=[1, 1, 1, 1])], [value("x", UINT8, [1, 2, 5, 5])],
                 [value("y", UINT8, [1, 3, 5, 5])], [const("w", KERNEL, np.int8), *held])  # fmt: skip


def dynamic(operator: str, inputs: list[str]) -> onnx.ModelProto:
    """A float input that is quantised on the way, as ONNX Runtime's quantiser does it."""
    domain = MICROSOFT if operator == "MatMulIntegerToFloat" else ""
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"]),
        node(operator, inputs, ["y"], domain=domain),
    ]
    kind = INT32 if operator == "MatMulInteger" else FLOAT
    made = model(nodes, [value("x", FLOAT, ["n", 16])], [value("y", kind, ["n", 4])],
                 [const("w", W, np.int8), *SCALES[1:2], *POINTS[1:2]])  # fmt: skip
    made.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return made


def dynamic_matmul() -> onnx.ModelProto:
    made = model([node("DynamicQuantizeMatMul", ["x", "w", "ws"], ["y"], domain=MICROSOFT)],
                 [value("x", FLOAT, ["n", 16])], [value("y", FLOAT, ["n", 4])],
                 [const("w", W, np.int8), *SCALES])  # fmt: skip
    made.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return made


def qdq(operator: str = "MatMul", points: bool = True, activation: type[np.generic] = np.uint8) -> onnx.ModelProto:
    """Quantised as a pair of QuantizeLinear and DequantizeLinear, a scale for each column of the weights."""
    nodes = [
        node("QuantizeLinear", ["x", "xs", "point"], ["q"]), node("DequantizeLinear", ["q", "xs", "point"], ["d"]),
        node("DequantizeLinear", ["w", "columns", *(["zeros"] if points else [])], ["f"], axis=1),
        node(operator, ["d", "f"], ["y"], name="layer"),
    ]  # fmt: skip
    held = [const("w", W, np.int8), const("columns", [0.01, 0.02, 0.03, 0.04]), const("zeros", [0, 0, 0, 0], np.int8)]
    held += [*SCALES, const("point", 7, activation)]
    return model(nodes, [value("x", FLOAT, ["n", 16])], [value("y", FLOAT, ["n", 4])], held)


FLOATS = RNG.normal(0, 1, (3, 16)).astype(np.float32)
CASES = {
    "MatMulInteger without points": (matmul_integer(), X),
    "MatMulInteger with points": (matmul_integer("xz", "wz"), X),
    "MatMulInteger after DynamicQuantizeLinear": (dynamic("MatMulInteger", ["q", "w", "qz", "wz"]), FLOATS),
    "MatMulIntegerToFloat": (dynamic("MatMulIntegerToFloat", ["q", "w", "qs", "ws", "qz", "wz"]), FLOATS),
    "DynamicQuantizeMatMul": (dynamic_matmul(), FLOATS),
    "QLinearMatMul": (qlinear_matmul(), X),
    "QLinearConv": (qlinear_conv(), IMAGE),
    "QDQ MatMul": (qdq(), FLOATS),
    "QDQ Gemm without points": (qdq("Gemm", points=False), FLOATS),
}


def convert(proto: onnx.ModelProto, feed: np.ndarray, tmp_path: Path) -> tuple[Path, Path, tuple[str, ...]]:
    """The source, what the pass made of it, and its notes."""
    source, work, target = save(proto, tmp_path / "m.onnx"), tmp_path / "work", tmp_path / "out.onnx"
    work.mkdir()
    made = apply((ExactInt8(),), Context(source, work, GoldenSet((GoldenCase("0", {"x": feed}),))), target)
    return source, made.path, made.notes


def signed(path: Path) -> set[str]:
    return {tensor.name for tensor in onnx.load(path).graph.initializer if tensor.data_type == INT8 and tensor.dims}


@pytest.mark.parametrize("name", CASES)
def test_answers_stay_the_same_to_the_last_bit(name: str, tmp_path: Path):
    proto, feed = CASES[name]
    source, made, notes = convert(proto, feed, tmp_path)
    structure = open_model(source).structure
    assert planned_exact(structure, setting=False) == ExactInt8()
    assert planned_exact(structure, setting=True) == (ExactInt8(True) if "QDQ Gemm" in name else None)
    assert "w" in signed(source) and "w" not in signed(made)
    assert len(notes) == 1 and notes[0].startswith("weights of 1 nodes made exact without VNNI (")
    before: Any
    after: Any
    before, after = (OrtSession(path, quantized=True).run({"x": feed}, ["y"], "")["y"] for path in (source, made))
    np.testing.assert_array_equal(before, after)
    plain: Any = OrtSession(made, quantized=False).run({"x": feed}, ["y"], "")["y"]
    np.testing.assert_allclose(plain, after, rtol=1e-6, err_msg="no setting is needed, on any CPU")


def test_a_weight_that_two_nodes_share_is_rewritten_once(tmp_path: Path):
    nodes = [node("MatMulInteger", ["x", "w"], ["a"]), node("MatMulInteger", ["x", "w"], ["b"]),
             node("Add", ["a", "b"], ["y"])]  # fmt: skip
    proto = model(nodes, [value("x", UINT8, ["n", 16])], [value("y", INT32, ["n", 4])], [const("w", W, np.int8)])
    source, made, (note,) = convert(proto, X, tmp_path)
    assert note == "weights of 2 nodes made exact without VNNI (MatMulInteger)"
    names = {tensor.name for tensor in onnx.load(made).graph.initializer}
    assert names == {"w_unsigned", "w_unsigned_zero_point"}
    before, after = (OrtSession(path, quantized=True).run({"x": X}, ["y"], "")["y"] for path in (source, made))
    np.testing.assert_array_equal(before, after)


def test_a_weight_that_a_constant_node_holds_leaves_no_dead_node(tmp_path: Path):
    nodes = [node("Constant", [], ["w"], value=const("w", W, np.int8)), node("MatMulInteger", ["x", "w"], ["y"])]
    proto = model(nodes, [value("x", UINT8, ["n", 16])], [value("y", INT32, ["n", 4])])
    _, made, notes = convert(proto, X, tmp_path)
    assert len(notes) == 1 and [each.op_type for each in onnx.load(made).graph.node] == ["MatMulInteger"]
    answer = OrtSession(made, quantized=False).run({"x": X}, ["y"], "")["y"]
    np.testing.assert_array_equal(answer, X.astype(np.int32) @ W.astype(np.int32))


def branches() -> onnx.ModelProto:
    """Two bodies, one with weights of its own, one with those of the graph around it."""
    outputs = [value("r", INT32, None)]
    then = helper.make_graph([node("MatMulInteger", ["x", "w"], ["r"])], "then", [], outputs)
    held = [const("v", W[::-1].copy(), np.int8)]
    other = helper.make_graph([node("MatMulInteger", ["x", "v"], ["r"])], "else", [], outputs, held)
    return model(
        [node("If", ["c"], ["y"], then_branch=then, else_branch=other)],
        [value("c", TensorProto.BOOL, []), value("x", UINT8, ["n", 16])],
        [value("y", INT32, ["n", 4])],
        [const("w", W, np.int8)],
    )


@pytest.mark.parametrize("setting", [True, False])
def test_bodies_are_exact_in_the_reference_and_after_the_pass(tmp_path: Path, setting: bool):
    source, work = save(branches(), tmp_path / "m.onnx"), tmp_path / "work"
    work.mkdir()
    cases = tuple(GoldenCase(str(flag), {"c": np.array(flag), "x": X}) for flag in (True, False))
    made = apply((ExactInt8(setting),), Context(source, work, GoldenSet(cases)), tmp_path / "out.onnx")
    assert made.notes == ("weights of 2 nodes made exact without VNNI (MatMulInteger)",)
    for case, weights in zip(cases, (W, W[::-1]), strict=True):
        expected = X.astype(np.int32) @ weights.astype(np.int32)
        for path in (source, made.path):
            answer = OrtSession(path, quantized=True).run(dict(case.inputs), ["y"], "")["y"]
            np.testing.assert_array_equal(answer, expected)
        session = load_session(source, tmp_path, quantized=True)
        np.testing.assert_array_equal(run_session(session, ["y"], case.inputs)["y"], expected)


def embedding() -> onnx.ModelProto:
    nodes = [node("DequantizeLinear", ["w", "ws"], ["f"]), node("Gather", ["f", "x"], ["y"])]
    return model(nodes, [value("x", TensorProto.INT64, [3])], [value("y", FLOAT, [3, 4])],
                 [const("w", W, np.int8), *SCALES])  # fmt: skip


@pytest.mark.parametrize(
    ("proto", "feed"),
    [
        (qdq(activation=np.int8), FLOATS),
        (embedding(), np.array([0, 2, 1])),
        (model([node("MatMulInteger", ["x", "w"], ["y"])], [value("x", UINT8, ["n", 16])],
               [value("y", INT32, ["n", 4])], [const("w", W // 2, np.int8)]), X),
        (model([node("MatMulInteger", ["s", "w"], ["y"])], [value("x", UINT8, ["n", 16])],
               [value("y", INT32, [16, 4])], [const("w", W, np.int8), const("s", np.eye(16), np.int8)]), X),
    ],
    ids=["signed activations", "a table", "seven bits", "a signed constant"],
)  # fmt: skip
def test_what_can_t_saturate_stays(proto: onnx.ModelProto, feed: np.ndarray, tmp_path: Path):
    source, made, notes = convert(proto, feed, tmp_path)
    assert notes == () and signed(made) == signed(source) >= {"w"}


def test_zero_points_that_the_setting_fails_without_are_added(tmp_path: Path):
    proto = qdq("Gemm", points=False)
    source, work = save(proto, tmp_path / "m.onnx"), tmp_path / "work"
    work.mkdir()
    goldens = GoldenSet((GoldenCase("0", {"x": FLOATS}),))
    made = apply((ExactInt8(True),), Context(source, work, goldens), tmp_path / "out.onnx")
    assert made.notes == ("weights of 1 nodes made exact without VNNI (DequantizeLinear)",)
    (dequantised,) = (each for each in onnx.load(made.path).graph.node if each.input[0] == "w")
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(made.path).graph.initializer}
    assert held[dequantised.input[2]].tolist() == [0, 0, 0, 0] and held[dequantised.input[2]].dtype == np.int8
    expected: Any = OrtSession(source, quantized=False).run({"x": FLOATS}, ["y"], "")["y"]
    for path in (source, made.path):
        answer: Any = OrtSession(path, quantized=True).run({"x": FLOATS}, ["y"], "")["y"]
        np.testing.assert_allclose(answer, expected, rtol=1e-5)


def test_only_models_with_integer_weights_get_the_pass(tmp_path: Path):
    triton, web, cpu = (kind_named(name) for name in ("triton", "web", "cpu"))
    plain = open_model(save(model([node("Relu", ["x"], ["y"])], [value("x")], [value("y")]), tmp_path / "plain.onnx"))
    integers = open_model(save(matmul_integer(), tmp_path / "integers.onnx"))
    assert ExactInt8() in passes_for(triton, integers, "fp32", ())
    assert ExactInt8() not in passes_for(web, integers, "fp32", ())
    assert ExactInt8() not in passes_for(triton, plain, "fp32", ())
    inside = open_model(save(branches(), tmp_path / "branches.onnx"))
    assert ExactInt8(True) in passes_for(cpu, inside, "fp32", ())
    assert ExactInt8(True) not in passes_for(cpu, integers, "fp32", ())
