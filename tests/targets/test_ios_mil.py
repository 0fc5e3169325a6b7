"""Core ML's operations by their definitions: ONNX models become ML Programs, are saved, translated back and run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from packager.targets.ios import mlpackage
from packager.targets.ios.mil_onnx import Call, Translation, Untranslated, translate
from packager.targets.ios.mil_program import Feature, MalformedProgram, Operation, Program, read_program
from packager.targets.ios.mil_rules import RULES
from tests.builders import FLOAT, INT64, model, save, value

Shape = list[int | str | None]
RNG = np.random.default_rng(7)
NODES: dict[str, tuple[onnx.NodeProto, list[int], dict[str, np.ndarray]]] = {}


def case(name: str, op_type: str, shape: list[int], *constants: np.ndarray, **attributes: object) -> None:
    """One operator on an input ``x``, with further inputs as constants."""
    names = [f"c{place}" for place in range(len(constants))]
    node = helper.make_node(op_type, ["x", *names], ["y"], name=op_type, **attributes)
    NODES[name] = (node, shape, dict(zip(names, constants, strict=True)))


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def i64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


UNARY = "Relu Sigmoid Tanh Erf Exp Sqrt Abs Floor Ceil Round Sign Sin Cos Atan Softplus Neg Log"
for unary in UNARY.split():
    case(unary, unary, [2, 3])
for binary in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow"):
    case(binary, binary, [2, 3], np.abs(f32(3)) + np.float32(0.5))
case("conv", "Conv", [1, 3, 6, 6], f32(4, 3, 3, 3), f32(4), pads=[1, 0, 2, 1], strides=[2, 1])
case("conv same", "Conv", [1, 2, 5, 5], f32(4, 2, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2])
case("conv grouped", "Conv", [1, 4, 5, 5], f32(4, 2, 3, 3), group=2, dilations=[2, 2])
case("conv 1d", "Conv", [1, 3, 7], f32(4, 3, 3), pads=[1, 1])
case("conv transpose", "ConvTranspose", [1, 3, 4, 4], f32(3, 2, 3, 3), f32(2), strides=[2, 2], pads=[1, 1, 1, 1])
case("gemm", "Gemm", [2, 3], f32(4, 3), f32(4), transB=1)
case("matmul", "MatMul", [2, 2, 3], f32(3, 4))
case("average pool", "AveragePool", [1, 2, 6, 6], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
case("average pool with pads", "AveragePool", [1, 2, 6, 6], kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)
case("max pool", "MaxPool", [1, 2, 6, 6], kernel_shape=[3, 3], strides=[2, 2], pads=[0, 1, 0, 1])
case("global average pool", "GlobalAveragePool", [1, 3, 4, 5])
case("global max pool", "GlobalMaxPool", [1, 3, 4, 5])
case("softmax", "Softmax", [2, 3, 4], axis=1)
case("leaky relu", "LeakyRelu", [2, 3], alpha=0.2)
case("elu", "Elu", [2, 3], alpha=0.7)
case("hard sigmoid", "HardSigmoid", [2, 3], alpha=0.3, beta=0.4)
case("prelu", "PRelu", [1, 3, 2, 2], f32(3, 1, 1))
case("clip", "Clip", [2, 3], np.array(-0.3, np.float32), np.array(0.4, np.float32))
case("batch norm", "BatchNormalization", [1, 3, 4, 4], f32(3), f32(3), f32(3), np.abs(f32(3)) + np.float32(0.1))
case("instance norm", "InstanceNormalization", [1, 3, 4, 4], f32(3), f32(3))
case("layer norm", "LayerNormalization", [2, 3, 4], f32(4), f32(4))
case("reshape", "Reshape", [2, 6], i64(3, -1))
case("transpose", "Transpose", [2, 3, 4], perm=[2, 0, 1])
case("squeeze", "Squeeze", [2, 1, 3], i64(1))
case("unsqueeze", "Unsqueeze", [2, 3], i64(0, 3))
case("slice", "Slice", [4, 6], i64(1, 0), i64(3, 5), i64(0, 1), i64(1, 2))
case("slice backwards", "Slice", [4, 6], i64(-1), i64(-7), i64(1), i64(-1))
case("concat", "Concat", [2, 3], f32(2, 2), axis=1)
case("gather", "Gather", [4, 3], i64(2, 0, -1), axis=0)
case("tile", "Tile", [2, 3], i64(2, 1))
case("pad", "Pad", [1, 1, 3, 3], i64(0, 0, 1, 2, 0, 0, 0, 1), np.array(0.5, np.float32))
case("pad reflect", "Pad", [1, 1, 4, 4], i64(0, 0, 1, 2, 0, 0, 2, 1), mode="reflect")
for reduction in ("Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare"):
    case(f"reduce {reduction}", f"Reduce{reduction}", [2, 3, 4], axes=[1, 2], keepdims=0)
case("reduce sum", "ReduceSum", [2, 3, 4], i64(-1), keepdims=1)
case("depth to space", "DepthToSpace", [1, 8, 2, 2], blocksize=2)
case("space to depth", "SpaceToDepth", [1, 2, 4, 4], blocksize=2)
case("upsample", "Resize", [1, 2, 3, 3], np.zeros(0, np.float32), np.array([1, 1, 2, 2], np.float32),
     coordinate_transformation_mode="asymmetric", nearest_mode="floor")  # fmt: skip
case("bilinear", "Resize", [1, 2, 3, 3], np.zeros(0, np.float32), np.array([1, 1, 2, 2], np.float32), mode="linear",
     coordinate_transformation_mode="half_pixel")  # fmt: skip


def converted(path: Path) -> Program:
    target = path.with_suffix(".mlpackage")
    with mlpackage._quietly():
        mlpackage._convert(path, target, "iOS15")
    mlpackage._settle(target)
    return read_program(target)


def answers(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(each) for each in session.run(None, feeds)]


@pytest.mark.parametrize("name", NODES)
def test_an_operator_comes_back_as_it_went(name: str, tmp_path: Path):
    node, shape, constants = NODES[name]
    tensors = [numpy_helper.from_array(array, key) for key, array in constants.items()]
    x = np.abs(f32(*shape)) + np.float32(0.1) if name in ("Sqrt", "Log", "Pow") else f32(*shape)
    proto = model([node], [value("x", FLOAT, [*shape])], [value("y", FLOAT, None)], tensors, opset=17)
    expected = answers(proto, {"x": x})[0]
    proto.graph.output[0].CopyFrom(value("y", FLOAT, [*expected.shape]))
    program = converted(save(proto, tmp_path / "m.onnx"))
    (found,) = answers(translate(program), {program.inputs[0].name: x})
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_the_epsilon_that_core_ml_adds_to_a_reciprocal_is_not_hidden(tmp_path: Path):
    """Left to the converter, 1 / x becomes 1 / (x + 1e-4): carrying out what was saved shows it."""
    nodes = [helper.make_node("Reciprocal", ["x"], ["y"], name="inverse")]
    program = converted(save(model(nodes, [value("x", FLOAT, [2])], [value("y", FLOAT, [2])]), tmp_path / "m.onnx"))
    (found,) = answers(translate(program), {"x": np.array([0.01, 1], np.float32)})
    np.testing.assert_allclose(found, [1 / 0.0101, 1 / 1.0001], rtol=1e-5)


def test_comparisons_choices_and_parts(tmp_path: Path):
    """Where, Split and ArgMax: truth values, several outputs, and whole numbers that were 64 bits wide."""
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["above"], name="above"),
        helper.make_node("Where", ["above", "x", "zero"], ["kept"], name="kept"),
        helper.make_node("Split", ["kept", "sizes"], ["left", "right"], name="parts", axis=1),
        helper.make_node("ArgMax", ["x"], ["best"], name="best", axis=1, keepdims=0),
    ]
    constants = [numpy_helper.from_array(np.float32(0), "zero"), numpy_helper.from_array(i64(1, 3), "sizes")]
    outputs = [value("left", FLOAT, [2, 1]), value("right", FLOAT, [2, 3]), value("best", INT64, [2])]
    proto = model(nodes, [value("x", FLOAT, [2, 4])], outputs, constants)
    x = f32(2, 4)
    program = converted(save(proto, tmp_path / "m.onnx"))
    found = answers(translate(program), {"x": x})
    for one, other in zip(found, answers(proto, {"x": x}), strict=True):
        assert np.array_equal(one, other)
    assert [feature.dtype for feature in program.outputs] == ["float32", "float32", "int32"]


def one_operation(kind: str, constants: dict[str, np.ndarray], shape: tuple[int, ...], out: tuple[int, ...]) -> Program:
    arguments = {"x": ("x",), **{key: (key,) for key in constants}}
    made = Feature("y", "float32", out)
    return Program((Feature("x", "float32", shape),), (made,), (Operation(kind, arguments, (made,)),), constants)


@pytest.mark.parametrize(
    ("kind", "constants", "expected"),
    [
        ("rsqrt", {"epsilon": np.float32(0.25)}, lambda x: 1 / np.sqrt(x + 0.25)),
        ("inverse", {}, lambda x: 1 / (x + 1e-4)),
        ("log", {"epsilon": np.float32(0.5)}, lambda x: np.log(x + 0.5)),
        ("square", {}, lambda x: x * x),
        ("relu6", {}, lambda x: np.clip(x, 0, 6)),
        ("mod", {"y": np.float32(0.3)}, lambda x: np.mod(x, 0.3)),
        ("not_equal", {"y": np.float32(1)}, None),
    ],
)
def test_what_only_core_ml_has(kind: str, constants: dict[str, np.ndarray], expected):
    x = np.array([[0.5, 1.0, 7.25]], np.float32)
    program = one_operation(kind, {key: np.asarray(each) for key, each in constants.items()}, (1, 3), (1, 3))
    if expected is None:
        made = Feature("y", "bool", (1, 3))
        program = Program(program.inputs, (made,), (Operation(kind, {"x": ("x",), "y": ("y0",)}, (made,)),), {
            "y0": np.float32(1)})  # fmt: skip
        assert answers(translate(program), {"x": x})[0].tolist() == [[True, False, True]]
        return
    if "y" in constants:
        renamed = Operation(kind, {"x": ("x",), "y": ("other",)}, program.operations[0].outputs)
        program = Program(program.inputs, program.outputs, (renamed,), {"other": np.asarray(constants["y"])})
    np.testing.assert_allclose(answers(translate(program), {"x": x})[0], expected(x), rtol=1e-5)


def test_a_setting_without_a_translation_is_named():
    program = one_operation("gelu", {"mode": np.array("SIGMOID_APPROXIMATION", dtype=object)}, (1, 3), (1, 3))
    with pytest.raises(Untranslated, match="SIGMOID_APPROXIMATION"):
        translate(program)
    with pytest.raises(Untranslated, match="operation of_tomorrow"):
        translate(one_operation("of_tomorrow", {}, (1,), (1,)))
    call = Call(Translation(program), program.operations[0])
    with pytest.raises(Untranslated, match="operation gelu has no axes"):
        call.constant("axes")


def test_a_program_that_uses_what_it_does_not_make_is_malformed():
    program = one_operation("relu", {}, (1, 3), (1, 3))
    lost = Operation("relu", {"x": ("nobody",)}, program.operations[0].outputs)
    for broken in (
        Program(program.inputs, program.outputs, (), {}),
        Program(program.inputs, program.outputs, (Operation("softmax", {"x": ("x",), "axis": ("x", "x")}, (
            program.operations[0].outputs)),), {}),
        Program(program.inputs, program.outputs, (Operation("clip", lost.arguments, lost.outputs),), {}),
    ):  # fmt: skip
        with pytest.raises(MalformedProgram):
            translate(broken)


def test_every_rule_is_an_operation_of_core_ml():
    with mlpackage._quietly():
        import coremltools as ct
        from coremltools.converters.mil import Builder
    assert ct and sorted(name for name in RULES if not hasattr(Builder, name)) == []


def test_a_file_that_is_no_program_is_said_to_be_malformed(tmp_path: Path):
    (tmp_path / mlpackage.SPEC).parent.mkdir(parents=True)
    with pytest.raises(MalformedProgram, match=r"model\.mlmodel"):
        read_program(tmp_path)
    (tmp_path / mlpackage.SPEC).write_bytes(b"\xff\xff\xff")
    with pytest.raises(MalformedProgram, match=r"model\.mlmodel"):
        read_program(tmp_path)
