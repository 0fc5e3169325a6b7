"""fp8: right values by the definition of float8e4m3fn, pairs that any runtime computes, refusals that name nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from packager import parity
from packager.errors import Refused
from packager.goldens import GoldenCase, GoldenSet
from packager.transform import Context
from packager.transform_fp8 import Float8, scale_of, to_float8
from packager.transforming import Applied, apply
from tests.builders import FLOAT, model, save, value
from tests.transform_models import answer, array, f32, floats

node = helper.make_node
X = floats(6, 16, seed=1)
CASES = GoldenSet((GoldenCase("one", {"x": X[:3]}), GoldenCase("other", {"x": X[3:]})))


def network(folder: Path, opset: int = 21, nodes=None, weights=None) -> Path:
    nodes = nodes or [
        node("MatMul", ["x", "w"], ["h:0"], name="fc/0:a"),
        node("Relu", ["h:0"], ["r"], name="act"),
        node("Gemm", ["r", "v", "b"], ["y"], name="last", transB=1),
    ]
    weights = weights or [array("w", floats(16, 8)), array("v", floats(4, 8, seed=2)), array("b", floats(4, seed=3))]
    made = model(nodes, [value("x", shape=("n", 16))], [value("y", FLOAT, None)], weights, opset=opset, ir=10)
    return save(made, folder / "m.onnx")


def converted(source: Path, *, goldens: GoldenSet = CASES, rules=None, **settings: Any) -> Applied:
    folder = source.parent
    (folder / "work").mkdir()
    (folder / "out").mkdir()
    context = Context(source, folder / "work", goldens, rules)
    return apply((Float8(**{"search": False, **settings}),), context, folder / "out/m.onnx")


def low(data: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.clip(data, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return found


def rounded(data: np.ndarray, scale: np.ndarray | np.float32) -> np.ndarray:
    return low(data / scale) * scale


def test_the_answers_are_those_of_float8_arithmetic(tmp_path: Path):
    """Computed here from ml_dtypes: activations by one scale of all cases, weights by one of each channel."""
    made = converted(network(tmp_path))
    w, v, b = floats(16, 8), floats(4, 8, seed=2), floats(4, seed=3)
    full = np.maximum(X @ w, 0)
    hidden = np.maximum(
        rounded(X, np.float32(np.abs(X).max() / np.float32(448))) @ rounded(w, np.abs(w).max(axis=0) / f32(448)), 0
    )
    last = rounded(hidden, np.float32(full.max() / np.float32(448)))
    expected = last @ rounded(v, np.abs(v).max(axis=1, keepdims=True) / f32(448)).T + b
    assert answer(made.path, {"x": X})[0] == pytest.approx(expected, abs=1e-5)
    assert ReferenceEvaluator(onnx.load(made.path)).run(None, {"x": X})[0] == pytest.approx(expected, abs=1e-5)
    assert not np.allclose(expected, full @ v.T + b, atol=1e-3), "rounding to 3 bits shows"


def test_weights_lie_in_the_file_as_float8(tmp_path: Path):
    made = converted(network(tmp_path))
    graph = onnx.load(made.path).graph
    stored = [each for each in graph.initializer if each.data_type == TensorProto.FLOAT8E4M3FN]
    assert sorted(tuple(each.dims) for each in stored) == [(4, 8), (16, 8)]
    assert not any(each.dims in ([16, 8], [4, 8]) for each in graph.initializer if each.data_type == FLOAT)
    operators = [each.op_type for each in graph.node]
    assert operators.count("QuantizeLinear") == 2 and operators.count("DequantizeLinear") == 4
    assert made.notes == ("quantised operators: DequantizeLinear 4, QuantizeLinear 2",)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_has_a_scale_for_each_channel_it_makes(tmp_path: Path, groups: int):
    kernel = floats(8, 4 // groups, 3, 3) * np.arange(1, 9, dtype=np.float32).reshape(8, 1, 1, 1)
    nodes = [node("Conv", ["x", "k"], ["y"], name="c", group=groups)]
    proto = model(nodes, [value("x", FLOAT, ["n", 4, 5, 5])], [value("y", FLOAT, None)], [array("k", kernel)], 21, 10)
    case = GoldenCase("one", {"x": floats(2, 4, 5, 5)})
    made = converted(save(proto, tmp_path / "m.onnx"), goldens=GoldenSet((case,)))
    held = {each.name: numpy_helper.to_array(each) for each in onnx.load(made.path).graph.initializer}
    assert held["k_scale"] == pytest.approx(np.abs(kernel).max(axis=(1, 2, 3)) / 448)
    x = case.inputs["x"]
    whole = {
        "x": rounded(x, np.float32(np.abs(x).max() / np.float32(448))),
        "k": rounded(kernel, np.abs(kernel).max(axis=(1, 2, 3), keepdims=True) / f32(448)),
    }
    del proto.graph.initializer[:]
    proto.graph.input.append(value("k", FLOAT, kernel.shape))
    expected = ReferenceEvaluator(proto).run(None, whole)[0]
    assert answer(made.path, {"x": x})[0] == pytest.approx(expected, abs=1e-4)


def test_what_shares_a_value_shares_its_pair(tmp_path: Path):
    nodes = [node("MatMul", ["x", name], [f"{name}y"], name=name) for name in "ab"]
    weights = [array(name, floats(16, 8, seed=seed)) for seed, name in enumerate("ab")]
    made = converted(network(tmp_path, nodes=[*nodes, node("Add", ["ay", "by"], ["y"])], weights=weights))
    operators = [each.op_type for each in onnx.load(made.path).graph.node]
    assert operators.count("QuantizeLinear") == 1 and operators.count("DequantizeLinear") == 3


def test_products_of_activations_and_other_weights_stay(tmp_path: Path):
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="dense"),
        node("Transpose", ["h"], ["t"], perm=[1, 0]),
        node("MatMul", ["h", "t"], ["p"], name="attention"),
        node("Mul", ["p", "s"], ["y"], name="scaled"),
    ]
    made = converted(network(tmp_path, nodes=nodes, weights=[array("w", floats(16, 8)), array("s", f32(2.0))]))
    inputs = {each.name: list(each.input) for each in onnx.load(made.path).graph.node}
    assert inputs["attention"] == ["h", "t"] and inputs["scaled"] == ["p", "s"]
    assert "w" not in inputs["dense"]


@pytest.mark.parametrize("settings", [{"exclude": ("fc/0:a",)}, {"exclude_types": ("MatMul",)}])
def test_excluded_nodes_keep_their_inputs(tmp_path: Path, settings: dict[str, Any]):
    made = converted(network(tmp_path), **settings)
    inputs = {each.name: list(each.input) for each in onnx.load(made.path).graph.node}
    assert inputs["fc/0:a"] == ["x", "w"] and inputs["last"][1] != "v"


def test_nodes_that_drift_too_far_stay_in_float_and_are_named(tmp_path: Path):
    """What is left of a product when its large mean is taken away: 3 bits of significand leave nothing of it."""
    nodes = [
        node("MatMul", ["x", "a"], ["p"], name="one"),
        node("ReduceMean", ["p", "axes"], ["m"], keepdims=1),
        node("Sub", ["p", "m"], ["d"], name="cancel"),
        node("MatMul", ["d", "c"], ["y"], name="fine"),
    ]
    common = 100 * floats(16, 1) + floats(16, 8, seed=5)
    weights = [array("a", common), array("axes", np.array([1])), array("c", floats(8, 120, seed=6))]
    rules = {"y": parity.OutputRule(parity.Tolerance(scaled=0.1, cosine=0.99))}
    made = converted(network(tmp_path, nodes=nodes, weights=weights), rules=rules, search=True)
    inputs = {each.name: list(each.input) for each in onnx.load(made.path).graph.node}
    assert inputs["one"] == ["x", "a"] and inputs["fine"][1] != "c"
    assert any(note.startswith("kept in float: MatMul 'one' (fp8 costs ") for note in made.notes)


def test_an_older_opset_is_refused(tmp_path: Path):
    with pytest.raises(Refused, match="needs opset 21, the model has 17"):
        converted(network(tmp_path, opset=17))


def test_nothing_to_calibrate_with_is_refused(tmp_path: Path):
    with pytest.raises(Refused, match="nothing to calibrate with"):
        converted(network(tmp_path), goldens=GoldenSet(()))


def test_nothing_to_quantise_is_refused(tmp_path: Path):
    with pytest.raises(Refused, match="there is nothing to quantise"):
        converted(network(tmp_path, nodes=[node("Relu", ["x"], ["y"])], weights=[array("unused", floats(2))]))


def test_a_quantised_model_is_left_alone(tmp_path: Path):
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], name="theirs"),
        node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    source = network(tmp_path, nodes=nodes, weights=[array("s", f32(0.1)), array("z", np.int8(0))])
    made = converted(source)
    assert made.notes == ("left as it is: the model is quantised already (QuantizeLinear 'theirs')",)


def test_a_scale_is_a_normal_number():
    assert scale_of(np.float32(448)) == 1 and scale_of(np.float32(0)) == 1 and scale_of(np.float32(1e-38)) == 1
    scales, stored = to_float8(f32([[0, 0], [896, -3]]), axis=0)
    assert scales.tolist() == [1, 2] and stored.astype(np.float32).tolist() == [[0, 0], [448, -1.5]]


def test_the_step_says_what_decides_the_result():
    shown = dict(Float8(exclude=("a",), exclude_types=("Conv",), calibration="0123456789abcdef").step().settings)
    assert shown["calibration"] == "files 0123456789ab" and shown["excluded"] == "a"
    assert shown["excluded operators"] == "Conv" and shown["search for nodes that drift"] == "yes"
