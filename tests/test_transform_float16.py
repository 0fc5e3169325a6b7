"""Half precision: each known fault of converters has a model here, with the right value computed in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from packager.errors import Refused
from packager.float16_rounding import round_between
from packager.float16_slots import schema_of
from packager.goldens import GoldenCase, GoldenSet
from packager.model import Signature, TensorSpec, open_model
from packager.reference import ReferenceJob, SynthesisSettings, answer
from packager.transform import Context
from packager.transform_float16 import DEFAULT, BFloat16, Float16
from tests.builders import BOOL, FLOAT, INT64, model, save, value

FLOAT16, BFLOAT16, DOUBLE = TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE
node = helper.make_node


def const(name, array, dtype=np.float32):
    return numpy_helper.from_array(np.asarray(array, dtype), name)


def session(path):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(path, feeds):
    names = [output.name for output in session(path).get_outputs()]
    return dict(zip(names, session(path).run(names, feeds), strict=True))


def convert(proto, tmp_path, settings=None, feeds=None, outputs=None):
    """Convert by file; the result is whole by onnx's own checker, types included. Gives its path, proto and notes."""
    source, target, folder = save(proto, tmp_path / "model.onnx"), tmp_path / "half.onnx", tmp_path / "work"
    folder.mkdir(exist_ok=True)
    cases = () if feeds is None else (GoldenCase("one", feeds, outputs or {}),)
    made = (settings or Float16()).run(ir.load(source), Context(source, folder, GoldenSet(cases)))
    ir.save(made.model, target)
    onnx.checker.check_model(str(target), full_check=True)
    return target, onnx.load(target), made.notes


def rounded(path, tmp_path, low=ir.DataType.FLOAT16):
    """The model with every half result rounded, as half hardware has it."""
    loaded = ir.load(path)
    round_between(loaded, low)
    ir.save(loaded, tmp_path / "rounded.onnx")
    return tmp_path / "rounded.onnx"


def casts(proto):
    return [(one.input[0], one.output[0], one.attribute[0].i) for one in proto.graph.node if one.op_type == "Cast"]


def by_name(proto, name):
    return next(one for one in proto.graph.node if one.name == name)


def dtypes(proto):
    found = {one.name: one.type.tensor_type.elem_type for one in (*proto.graph.value_info, *proto.graph.output)}
    return found | {one.name: one.data_type for one in proto.graph.initializer}


def linear(weight="w", out="h", name="layer"):
    return node("MatMul", ["x", weight], [out], name=name)


X = np.array([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]], np.float32)
W = np.array([[0.5, 1.0, -1.0], [2.0, 0.25, 0.125], [1.0, 1.5, -0.5]], np.float32)


def test_signature_and_names_stay_and_weights_halve(tmp_path):
    proto = model([linear(), node("Relu", ["h"], ["y:0"], name="äct")], [value("x")], [value("y:0")], [const("w", W)])
    path, half, notes = convert(proto, tmp_path)
    assert [spec.name for spec in open_model(path).signature.outputs] == ["y:0"]
    assert half.graph.input[0].type.tensor_type.elem_type == FLOAT
    assert half.graph.output[0].type.tensor_type.elem_type == FLOAT
    assert dtypes(half)["w"] == FLOAT16
    assert len(casts(half)) == 2
    assert notes == ()
    np.testing.assert_allclose(run(path, {"x": X})["y:0"], np.maximum(X @ W, 0))


def test_keep_io_false_changes_the_signature(tmp_path):
    proto = model([linear(), node("Relu", ["h"], ["y"])], [value("x")], [value("y")], [const("w", W)])
    path, half, _ = convert(proto, tmp_path, Float16(keep_io=False))
    assert casts(half) == []
    spec = TensorSpec("x", "float32", ("n", 3))
    integer = TensorSpec("i", "int64", (1,))
    promised = Float16(keep_io=False).signature(Signature((spec, integer), (spec,)))
    assert [one.dtype for one in promised.inputs] == ["float16", "int64"]
    assert open_model(path).signature.inputs[0].dtype == "float16"
    assert open_model(path).signature.outputs[0].dtype == "float16"
    answer_ = run(path, {"x": X.astype(np.float16)})["y"]
    np.testing.assert_array_equal(answer_, np.maximum(X @ W, 0).astype(np.float16))


def test_mask_beyond_the_range_is_exact_even_in_a_row_masked_whole(tmp_path):
    lowest = float(np.finfo(np.float32).min)
    nodes = [
        node("Not", ["keep"], ["drop"]),
        node("Cast", ["drop"], ["dropped"], to=FLOAT),
        node("Mul", ["dropped", "lowest"], ["mask"], name="masking"),
        node("MatMul", ["x", "w"], ["scores"], name="scoring"),
        node("Add", ["scores", "mask"], ["masked"], name="adding"),
        node("Softmax", ["masked"], ["p"], axis=-1, name="soft"),
        node("MatMul", ["p", "w"], ["y"], name="mixing"),
    ]
    proto = model(nodes, [value("x"), value("keep", BOOL)], [value("y")], [const("w", W), const("lowest", lowest)])
    keep = np.array([[True, True, False], [False, False, False]])
    path, half, notes = convert(proto, tmp_path)
    scores = (X @ W).astype(np.float32)
    masked = np.where(keep, scores, np.float32(lowest))  # float32 absorbs the score: the row masked whole is uniform
    p = np.exp(masked - masked.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    for each in (path, rounded(path, tmp_path)):
        np.testing.assert_allclose(run(each, {"x": X, "keep": keep})["y"], p @ W, atol=2e-3)
    assert by_name(half, "soft").input[0] == "masked"
    assert dtypes(half)["lowest"] == FLOAT
    assert any("'lowest' reaches 3.4e+38" in note and "Add 'adding'" in note for note in notes)


def test_bound_beyond_the_range_becomes_infinity(tmp_path):
    top = float(np.finfo(np.float32).max)
    nodes = [linear(), node("Clip", ["h", "zero", "top"], ["y"], name="clip")]
    proto = model(nodes, [value("x")], [value("y")], [const("w", W), const("zero", 0.0), const("top", top)])
    path, half, notes = convert(proto, tmp_path)
    held = {t.name: numpy_helper.to_array(t) for t in half.graph.initializer}
    assert held["top"].dtype == np.float16
    assert np.isposinf(held["top"])
    assert notes == ()
    np.testing.assert_allclose(run(path, {"x": X})["y"], np.clip(X @ W, 0, top))


def test_tiny_epsilon_keeps_the_division_finite(tmp_path):
    nodes = [
        linear(),
        node("Mul", ["h", "h"], ["square"], name="square"),
        node("Add", ["square", "eps"], ["safe"], name="safe"),
        node("Sqrt", ["safe"], ["root"], name="root"),
        node("Div", ["h", "root"], ["y"], name="div"),
    ]
    proto = model(nodes, [value("x")], [value("y")], [const("w", W), const("eps", 1e-12)])
    path, half, notes = convert(proto, tmp_path)
    feeds = {"x": np.zeros((2, 3), np.float32)}
    feeds["x"][0] = [1e-3, 0, 0]
    h = feeds["x"] @ W
    expected = h / np.sqrt(h * h + np.float32(1e-12))
    np.testing.assert_allclose(run(rounded(path, tmp_path), feeds)["y"], expected, atol=2e-3)
    kept = next(note for note in notes if "'eps'" in note)
    for label in ("Mul 'square'", "Add 'safe'", "Sqrt 'root'"):
        assert label in kept or "more" in kept
    assert dtypes(half)["eps"] == FLOAT


def test_pow_stays_by_rule_and_else_by_search_with_its_maximum(tmp_path):
    nodes = [
        linear(),
        node("Pow", ["h", "two"], ["squared"], name="pow:300"),
        node("Mul", ["squared", "small"], ["scaled"], name="scale"),
        node("MatMul", ["scaled", "w"], ["y"], name="last"),
    ]
    weights = [const("w", np.eye(3)), const("two", 2.0), const("small", 1e-3)]
    proto = model(nodes, [value("x")], [value("y")], weights)
    feeds = {"x": np.full((1, 3), 300, np.float32)}
    expected = np.full((1, 3), 90.0, np.float32)
    path, _, notes = convert(proto, tmp_path)
    assert any("Pow 'pow:300'" in note and "squares" in note for note in notes)
    assert not np.isfinite(
        run(rounded(path, tmp_path), feeds)["y"]
    ).any()  # the rule alone can't know how large inputs are
    types = tuple(set(DEFAULT) - {"Pow"})
    path, _, notes = convert(proto, tmp_path, Float16(keep_types=types), feeds)
    assert "kept in fp32: Pow 'pow:300' (overflows: max 9e+04)" in notes
    assert "kept in fp32: Mul 'scale' (overflows: max 9e+04)" in notes
    np.testing.assert_allclose(run(rounded(path, tmp_path), feeds)["y"], expected, rtol=2e-3)


def test_search_judges_by_the_goldens_outputs_when_they_are_there(tmp_path):
    proto = model([linear(), node("Relu", ["h"], ["y"])], [value("x")], [value("y")], [const("w", W)])
    wrong = {"y": np.maximum(X @ W, 0) + np.float32(5)}
    with pytest.raises(Refused, match=r"drifts past what fp16 may cost|nothing in the model can become fp16"):
        convert(proto, tmp_path, None, {"x": X}, wrong)


def test_rounding_shows_what_onnx_runtime_hides(tmp_path):
    nodes = [node("Mul", ["x", "x"], ["square"]), node("Div", ["square", "x"], ["y"])]
    path, _, _ = convert(model(nodes, [value("x")], [value("y")]), tmp_path)
    feeds = {"x": np.full((1, 3), 7000, np.float32)}
    assert (run(path, feeds)["y"] == 7000).all()
    assert np.isposinf(run(rounded(path, tmp_path), feeds)["y"]).all()


def test_cast_to_float_becomes_what_its_consumers_need(tmp_path):
    nodes = [
        node("Cast", ["i"], ["f"], to=FLOAT, name="cast"),
        node("MatMul", ["f", "w"], ["y"], name="layer"),
    ]
    proto = model(nodes, [value("i", INT64)], [value("y")], [const("w", W)])
    path, half, _ = convert(proto, tmp_path)
    assert by_name(half, "cast").attribute[0].i == FLOAT16
    assert len(casts(half)) == 2
    feeds = {"i": np.array([[1, 2, 3], [4, 5, 6]])}
    np.testing.assert_allclose(run(path, feeds)["y"], feeds["i"] @ W, rtol=1e-3)


def test_cast_to_float_with_consumers_of_both_kinds_is_not_rounded_for_the_kept_one(tmp_path):
    nodes = [
        node("Cast", ["i"], ["f"], to=FLOAT, name="cast"),
        node("MatMul", ["f", "w"], ["y"], name="layer"),
        node("ReduceSum", ["f"], ["s"], name="sum", keepdims=0),
    ]
    proto = model(nodes, [value("i", INT64)], [value("y"), value("s", shape=())], [const("w", W * 0.01)])
    path, half, _ = convert(proto, tmp_path)
    assert not any(source == "f" for source, _, _ in casts(half))  # both casts read the integers
    feeds = {"i": np.array([[4097, 2, 3], [4, 5, 6]])}
    assert run(path, feeds)["s"] == 4117.0


def test_whole_numbers_stay_exact(tmp_path):
    nodes = [
        node("Cast", ["n"], ["f"], to=FLOAT),
        node("Mul", ["f", "scale"], ["scaled"], name="times"),
        node("Floor", ["scaled"], ["floor"], name="floor"),
        node("Cast", ["floor"], ["size"], to=INT64),
        node("MatMul", ["x", "w"], ["y"]),
    ]
    proto = model(
        nodes, [value("x"), value("n", INT64, (1,))], [value("y"), value("size", INT64, (1,))],
        [const("w", W), const("scale", [1.5])],
    )  # fmt: skip
    path, _, notes = convert(proto, tmp_path)
    assert run(path, {"x": X, "n": np.array([40001])})["size"] == 60001
    assert any("positions, lengths or sizes" in note for note in notes)


def test_resize_scales_stay_float32_constant_or_computed(tmp_path):
    nodes = [
        node("Div", ["a", "three"], ["ratio"], name="ratio"),
        node("Concat", ["ones", "ratio"], ["scales"], axis=0, name="scales"),
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("Resize", ["c", "", "scales"], ["r"], mode="nearest", name="computed"),
        node("Resize", ["r", "", "fixed"], ["y"], mode="linear", name="constant"),
    ]
    shape = (1, 1, 3, 3)
    weights = [const("w", np.full((1, 1, 1, 1), 2.0)), const("a", [4.0, 4.0]), const("three", 3.0),
               const("ones", [1.0, 1.0]), const("fixed", [1, 1, 2, 2])]  # fmt: skip
    proto = model(nodes, [value("x", shape=shape)], [value("y", shape=(1, 1, 8, 8))], weights)
    path, half, _ = convert(proto, tmp_path)
    assert dtypes(half)["fixed"] == FLOAT
    feeds = {"x": np.arange(9, dtype=np.float32).reshape(shape)}
    expected = run(save(proto, tmp_path / "fp32.onnx"), feeds)["y"]
    assert expected.shape == (1, 1, 8, 8)
    np.testing.assert_allclose(run(path, feeds)["y"], expected, rtol=1e-3)


def test_initializer_shared_by_a_kept_and_a_converted_node_exists_in_both(tmp_path):
    nodes = [
        linear(),
        node("Pow", ["x", "w"], ["p"], name="pow"),
        node("Add", ["h", "p"], ["y"], name="add"),
    ]
    w = np.array([[2.0, 1.0, 2.0]] * 3, np.float32)
    proto = model(nodes, [value("x", shape=(3, 3))], [value("y", shape=(3, 3))], [const("w", w)])
    path, half, _ = convert(proto, tmp_path)
    held = {t.name: t.data_type for t in half.graph.initializer}
    assert held == {"w": FLOAT, "w_fp16": FLOAT16}
    x = np.array([[300.0, 2.0, 3.0]] * 3, np.float32)
    feeds = {"x": x / 10}
    np.testing.assert_allclose(run(path, feeds)["y"], (x / 10) @ w + (x / 10) ** w, rtol=2e-3)


def branches(then_nodes, else_nodes, name="y", inner=()):
    shape = ("n", 3)
    then = helper.make_graph(then_nodes, "then", [], [value("t", shape=shape)], list(inner))
    other = helper.make_graph(else_nodes, "else", [], [value("e", shape=shape)])
    return node("If", ["c"], [name], then_branch=then, else_branch=other, name="if")


def test_initializer_captured_only_in_if_bodies_and_branches_that_disagree(tmp_path):
    choice = branches(
        [node("MatMul", ["x", "captured"], ["t"], name="t")],
        [node("Pow", ["x", "two"], ["e"], name="kept")],
        inner=[const("unused_inside", [1.0])],
    )
    weights = [const("captured", W), const("two", 2.0)]
    proto = model([choice], [value("x"), value("c", BOOL, ())], [value("y")], weights)
    path, half, _ = convert(proto, tmp_path)
    assert dtypes(half)["captured"] == FLOAT16
    assert dtypes(half)["two"] == FLOAT
    for chosen, expected in ((True, X @ W), (False, X**2)):
        np.testing.assert_allclose(run(path, {"x": X, "c": np.array(chosen)})["y"], expected, rtol=1e-3)
        again = run(rounded(path, tmp_path), {"x": X, "c": np.array(chosen)})["y"]
        np.testing.assert_allclose(again, expected, rtol=2e-3)


@pytest.mark.parametrize("kept", [(), ("loop",)])
def test_loop_state_is_of_one_dtype_throughout(tmp_path, kept):
    body = helper.make_graph(
        [
            node("Identity", ["going"], ["going_out"]),
            node("MatMul", ["state", "w"], ["product"], name="inside"),
            node("Identity", ["product"], ["scanned"]),
        ],
        "body",
        [value("i", INT64, ()), value("going", BOOL, ()), value("state", shape=(2, 3))],
        [value("going_out", BOOL, ()), value("product", shape=(2, 3)), value("scanned", shape=(2, 3))],
    )
    nodes = [
        node("Loop", ["trips", "", "x"], ["last", "all"], body=body, name="loop"),
        node("MatMul", ["last", "w"], ["z"], name="after"),
    ]
    outputs = [value("last", shape=(2, 3)), value("all", shape=(None, 2, 3)), value("z", shape=(2, 3))]
    weights = [const("w", W), const("trips", 2, np.int64)]
    proto = model(nodes, [value("x", shape=(2, 3))], outputs, weights)
    path, half, notes = convert(proto, tmp_path, Float16(keep=kept))
    inner = by_name(half, "loop").attribute[0].g
    wanted = FLOAT if kept else FLOAT16
    assert inner.input[2].type.tensor_type.elem_type == wanted
    assert inner.output[1].type.tensor_type.elem_type == wanted
    found = run(path, {"x": X})
    np.testing.assert_allclose(found["last"], X @ W @ W, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(found["all"][0], X @ W, rtol=2e-3)
    assert bool(notes) == bool(kept)


def test_output_used_inside_and_output_that_is_an_initializer(tmp_path):
    nodes = [linear(out="a"), node("MatMul", ["a", "w"], ["b"], name="second")]
    outputs = [value("a"), value("b"), value("w", shape=(3, 3))]
    path, half, _ = convert(model(nodes, [value("x")], outputs, [const("w", W)]), tmp_path)
    found = run(path, {"x": X})
    assert [output.name for output in half.graph.output] == ["a", "b", "w"]
    np.testing.assert_array_equal(found["w"], W)
    np.testing.assert_allclose(found["a"], X @ W)
    np.testing.assert_allclose(found["b"], X @ W @ W, rtol=1e-3)
    assert by_name(half, "second").input[0] == by_name(half, "layer").output[0]  # no way out and back


def test_output_that_is_also_an_input_and_names_with_a_colon(tmp_path):
    """One tensor goes in and out untouched and feeds a layer; the wire names, colons and all, stay."""
    nodes = [
        node("MatMul", ["in:0", "layer/w:0"], ["h:0"], name="fc:0"),
        node("Relu", ["h:0"], ["out:0"], name="act:0"),
        node("Neg", ["out:0"], ["n:0"], name="neg:0"),
    ]
    outputs = [value("in:0"), value("out:0"), value("n:0")]
    path, half, _ = convert(model(nodes, [value("in:0")], outputs, [const("layer/w:0", W)]), tmp_path)
    assert [one.name for one in (*half.graph.input, *half.graph.output)] == ["in:0", "in:0", "out:0", "n:0"]
    assert dtypes(half)["layer/w:0"] == FLOAT16
    feed = np.array([[0.1, -2.0, 3.0]], np.float32)  # 0.1 isn't a float16
    found = run(path, {"in:0": feed})
    np.testing.assert_array_equal(found["in:0"], feed)
    np.testing.assert_allclose(found["out:0"], np.maximum(feed @ W, 0), rtol=2e-3)
    np.testing.assert_array_equal(found["n:0"], -found["out:0"])


def test_names_that_a_new_one_would_take(tmp_path):
    nodes = [linear(out="y_fp16"), node("Relu", ["y_fp16"], ["y"])]
    path, _, _ = convert(model(nodes, [value("x")], [value("y")], [const("w", W)]), tmp_path)
    np.testing.assert_allclose(run(path, {"x": X})["y"], np.maximum(X @ W, 0))


def test_constants_of_every_form(tmp_path):
    nodes = [
        node("Constant", [], ["c1"], value=const("", [1.0, 2.0, 3.0])),
        node("Constant", [], ["c2"], value_float=0.5),
        node("Constant", [], ["c3"], value_floats=[1.0, 0.25, 4.0]),
        node("Shape", ["x"], ["shape"]),
        node("ConstantOfShape", ["shape"], ["c4"], value=const("", [2.0])),
        node("ConstantOfShape", ["shape"], ["c5"]),
        linear(),
        *(node("Add", [f"s{i - 1}" if i > 1 else "h", f"c{i}"], [f"s{i}" if i < 5 else "y"]) for i in range(1, 6)),
    ]
    path, half, _ = convert(model(nodes, [value("x")], [value("y")], [const("w", W)]), tmp_path)
    assert len(casts(half)) == 2
    expected = X @ W + [1, 2, 3] + np.float32(0.5) + [1, 0.25, 4] + 2
    np.testing.assert_allclose(run(path, {"x": X})["y"], expected, rtol=1e-3)


def test_constant_node_shared_by_both_kinds(tmp_path):
    nodes = [
        node("Constant", [], ["c"], value=const("", [2.0, 1.0, 2.0]), name="const"),
        node("Pow", ["x", "c"], ["p"]),
        linear(),
        node("Mul", ["h", "c"], ["m"]),
        node("Add", ["m", "p"], ["y"]),
    ]
    path, half, _ = convert(model(nodes, [value("x")], [value("y")], [const("w", W)]), tmp_path)
    assert sum(one.op_type == "Constant" for one in half.graph.node) == 2
    expected = (X @ W) * [2, 1, 2] + X ** np.array([2, 1, 2])
    np.testing.assert_allclose(run(path, {"x": X})["y"], expected, rtol=1e-3)


def test_what_lies_between_kept_nodes_is_not_rounded(tmp_path):
    nodes = [
        node("Exp", ["x"], ["e"], name="exp"),
        node("Reshape", ["e", "flat"], ["r"], name="reshape"),
        node("ReduceMean", ["r"], ["m"], name="mean", keepdims=1),
        node("MatMul", ["x", "w"], ["h"]),
        node("Add", ["h", "m"], ["y"]),
    ]
    weights = [const("w", W), const("flat", [-1], np.int64)]
    path, half, _ = convert(model(nodes, [value("x")], [value("y")], weights), tmp_path)
    assert by_name(half, "mean").input[0] == "r"
    assert by_name(half, "reshape").input[0] == "e"
    assert dtypes(half)["r"] == FLOAT
    np.testing.assert_allclose(run(path, {"x": X})["y"], X @ W + np.exp(X).mean(), rtol=1e-3)


def test_quantised_patterns_stay(tmp_path):
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("MatMul", ["d", "w"], ["h"], name="inside"),
        node("QuantizeLinear", ["h", "s", "z"], ["hq"]),
        node("DequantizeLinear", ["hq", "s", "z"], ["hd"]),
        node("Identity", ["hd"], ["moved"]),
        node("MatMul", ["x", "w2"], ["plain"], name="outside"),
        node("Add", ["plain", "moved"], ["y"], name="add"),
    ]
    weights = [const("s", 0.05), const("z", 128, np.uint8), const("w", W), const("w2", W)]
    path, half, notes = convert(model(nodes, [value("x")], [value("y")], weights), tmp_path)
    held = dtypes(half)
    assert (held["s"], held["w"], held["w2"]) == (FLOAT, FLOAT, FLOAT16)
    assert any("MatMul 'inside'" in note and "quantised pattern" in note for note in notes)
    expected = run(tmp_path / "model.onnx", {"x": X})["y"]
    np.testing.assert_allclose(run(path, {"x": X})["y"], expected, rtol=2e-3, atol=2e-3)


def test_operators_of_other_domains_stay_with_casts_around(tmp_path):
    nodes = [
        linear(),
        node("Scaler", ["h"], ["s"], domain="ai.onnx.ml", offset=[1.0], scale=[3.0], name="scaler"),
        node("MatMul", ["s", "w"], ["g"]),
        node("QuickGelu", ["g"], ["q"], domain="com.microsoft", alpha=1.0, name="gelu"),
        node("MatMul", ["q", "w"], ["y"]),
    ]
    domains = [("ai.onnx.ml", 3), ("com.microsoft", 1)]
    path, half, _ = convert(model(nodes, [value("x")], [value("y")], [const("w", W)], domains=domains), tmp_path)
    assert dtypes(half)["s"] == FLOAT
    assert dtypes(half)["w"] == FLOAT16
    g = ((X @ W - 1) * 3) @ W
    np.testing.assert_allclose(run(path, {"x": X})["y"], (g / (1 + np.exp(-g))) @ W, rtol=5e-3)


def test_float64_integers_and_random_nodes_are_untouched(tmp_path):
    nodes = [
        linear(),
        node("Cast", ["h"], ["wide"], to=DOUBLE),
        node("Mul", ["wide", "d"], ["y"]),
        node("RandomNormalLike", ["h"], ["noise"], name="noise", seed=1.0),
        node("Mul", ["noise", "zero"], ["nothing"]),
    ]
    outputs = [value("y", DOUBLE), value("nothing")]
    weights = [const("w", W), const("d", 3.0, np.float64), const("zero", 0.0)]
    path, half, notes = convert(model(nodes, [value("x")], outputs, weights), tmp_path)
    assert dtypes(half)["d"] == DOUBLE
    assert dtypes(half)["noise"] == FLOAT
    assert any("RandomNormalLike 'noise'" in note for note in notes)
    np.testing.assert_allclose(run(path, {"x": X})["y"], (X @ W).astype(np.float64) * 3, rtol=1e-3)


def test_range_and_slots_come_from_the_schema(tmp_path):
    found = schema_of("", "Resize", 19)
    assert found is not None
    scales, data = found.formal("inputs", 2), found.formal("inputs", 0)
    assert scales is not None
    assert data is not None
    assert "tensor(float16)" not in scales.allowed
    assert "tensor(float16)" in data.allowed
    nodes = [
        node("Range", ["start", "stop", "step"], ["r"], name="range"),
        node("Slice", ["r", "zero", "three"], ["first"]),
        linear(),
        node("Add", ["h", "first"], ["y"]),
    ]
    weights = [const("w", W), const("start", 4093.0), const("stop", 4099.0), const("step", 1.0),
               const("zero", [0], np.int64), const("three", [3], np.int64)]  # fmt: skip
    path, half, _ = convert(model(nodes, [value("x")], [value("y")], weights), tmp_path)
    assert dtypes(half)["start"] == FLOAT
    np.testing.assert_allclose(run(path, {"x": X})["y"], X @ W + [4093, 4094, 4095], rtol=1e-3)


def test_sequences_stay_and_what_is_taken_from_them_converts(tmp_path):
    nodes = [
        linear(),
        node("SequenceConstruct", ["h", "x"], ["s"]),
        node("SequenceAt", ["s", "zero"], ["first"]),
        node("MatMul", ["first", "w"], ["y"], name="after"),
    ]
    weights = [const("w", W), const("zero", 0, np.int64)]
    path, half, _ = convert(model(nodes, [value("x")], [value("y")], weights), tmp_path)
    assert dtypes(half)["w"] == FLOAT16
    np.testing.assert_allclose(run(path, {"x": X})["y"], X @ W @ W, rtol=1e-3, atol=1e-3)


def test_scan_state_and_scanned_values_agree(tmp_path):
    body = helper.make_graph(
        [node("Add", ["sum", "row"], ["next"], name="inside"), node("Identity", ["next"], ["each"])],
        "body",
        [value("sum", shape=(3,)), value("row", shape=(3,))],
        [value("next", shape=(3,)), value("each", shape=(3,))],
    )
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Scan", ["start", "h"], ["total", "all"], body=body, num_scan_inputs=1, name="scan"),
    ]
    outputs = [value("total", shape=(3,)), value("all", shape=(2, 3))]
    proto = model(nodes, [value("x", shape=(2, 3))], outputs, [const("w", W), const("start", np.zeros(3))])
    path, half, _ = convert(proto, tmp_path)
    assert {one.type.tensor_type.elem_type for one in by_name(half, "scan").attribute[0].g.input} == {FLOAT16}
    np.testing.assert_allclose(run(path, {"x": X})["all"], np.cumsum(X @ W, axis=0), rtol=1e-3)


def test_a_model_of_another_domain_alone_gets_the_import_its_casts_need(tmp_path):
    scaler = node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[1.0], scale=[3.0])
    proto = model([scaler], [value("x")], [value("y")], domains=[("ai.onnx.ml", 3)])
    del proto.opset_import[0]
    path, half, _ = convert(proto, tmp_path, Float16(keep_io=False))
    assert {one.domain: one.version for one in half.opset_import} == {"ai.onnx.ml": 3, "": 13}
    np.testing.assert_allclose(run(path, {"x": X.astype(np.float16)})["y"], (X - 1) * 3)


def test_local_functions_are_refused(tmp_path):
    proto = model([node("Twice", ["x"], ["y"], domain="own")], [value("x")], [value("y")], domains=[("own", 1)])
    inside = [node("Add", ["a", "a"], ["b"])]
    proto.functions.append(helper.make_function("own", "Twice", ["a"], ["b"], inside, [helper.make_opsetid("", 17)]))
    with pytest.raises(Refused, match="local functions") as caught:
        convert(proto, tmp_path)
    assert caught.value.hint == "inline them first"


def test_keep_by_name_and_an_unknown_name(tmp_path):
    nodes = [linear(), node("MatMul", ["h", "w2"], ["y"], name="second")]
    proto = model(nodes, [value("x")], [value("y")], [const("w", W), const("w2", W)])
    _, half, notes = convert(proto, tmp_path, Float16(keep=("layer",)))
    assert dtypes(half)["w"] == FLOAT
    assert dtypes(half)["w2"] == FLOAT16
    assert "kept in fp32 as asked: MatMul 'layer'" in notes
    with pytest.raises(Refused, match="no node 'layr'") as caught:
        convert(proto, tmp_path, Float16(keep=("layr",)))
    assert caught.value.hint == "did you mean 'layer'?"


def test_nothing_to_convert_is_refused(tmp_path):
    proto = model([node("Exp", ["x"], ["y"])], [value("x")], [value("y")])
    with pytest.raises(Refused, match="nothing in the model can become fp16"):
        convert(proto, tmp_path)
    scaler = [node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[1.0], scale=[3.0])]
    with pytest.raises(Refused, match="nothing in the model can become fp16"):
        convert(model(scaler, [value("x")], [value("y")], domains=[("ai.onnx.ml", 3)]), tmp_path)


def test_bfloat16_is_used_where_the_opset_has_it(tmp_path):
    nodes = [
        node("Conv", ["x", "k"], ["c"], name="conv"),
        node("Mul", ["c", "big"], ["m"], name="mul"),
        node("Relu", ["m"], ["y"], name="relu"),
    ]
    weights = [const("k", np.full((1, 1, 1, 1), 2.0)), const("big", 1e30)]
    shape = (1, 1, 2, 2)
    proto = model(nodes, [value("x", shape=shape)], [value("y", shape=shape)], weights)
    feeds = {"x": np.array([1.0, 2.0, -3.0, 0.1], np.float32).reshape(shape)}
    path, half, _ = convert(proto, tmp_path, BFloat16(), feeds)
    held = dtypes(half)
    assert held["k"] == FLOAT  # Conv takes bfloat16 from opset 22 on
    assert held["big"] == BFLOAT16  # in range, unlike float16
    expected = np.maximum(feeds["x"] * 2e30, 0)
    answered = run(rounded(path, tmp_path, ir.DataType.BFLOAT16), feeds)["y"]
    np.testing.assert_allclose(answered, expected, rtol=1e-2)
    old = model([node("Relu", ["x"], ["y"])], [value("x")], [value("y")], opset=11)
    with pytest.raises(Refused, match="bfloat16 needs opset 13, where Cast takes it; the model has 11") as caught:
        convert(old, tmp_path, BFloat16())
    assert caught.value.hint == "raise it first: opset = 13"
    conv = model([node("Conv", ["x", "k"], ["y"])], [value("x", shape=shape)], [value("y", shape=shape)], weights[:1])
    with pytest.raises(Refused, match="nothing in the model can become bf16") as caught:
        convert(conv, tmp_path, BFloat16())
    assert caught.value.hint == "use fp32 or raise the opset"


def test_step_prints_the_settings():
    step = Float16(keep=("a",), keep_types=(*DEFAULT, "Conv")).step()
    assert step.title == "Converting to fp16"
    assert dict(step.settings) == {
        "signature": "stays fp32",
        "kept in fp32": "a",
        "operators kept in fp32 too": "Conv",
        "search for nodes that drift": "yes",
    }
    assert BFloat16().step().title == "Converting to bf16"


@pytest.mark.parametrize(
    ("name", "share", "named"),
    [
        ("file_type", 0.52, "overflows: max 1.3e+05"),
        ("orientation", 0.62, "GlobalAveragePool"),
        ("ocr_recogniser", 0.52, "Pow 'p2o.Pow.0'"),
        ("ocr_detector", 0.53, "more nodes that drift"),
        ("silero_vad_ifless", 0.63, "Pow 'node_pow_1'"),
        ("surrogate_classifier", 0.6, None),
    ],
)
def test_real_models_pass_the_policy_or_name_what_is_kept(corpus: Path, tmp_path: Path, name, share, named):
    path = corpus / f"{name}.onnx"
    settings = SynthesisSettings(cases=2)
    answer(ReferenceJob(path, None, settings, (), True, "default-1", "fp32", tmp_path / "reference"))
    from packager import golden_store

    goldens = golden_store.read(tmp_path / "reference")
    folder = tmp_path / "work"
    folder.mkdir()
    made = Float16().run(ir.load(path), Context(path, folder, goldens))  # raises where the policy isn't kept
    target = tmp_path / "half.onnx"
    ir.save(made.model, target)
    assert target.stat().st_size < share * path.stat().st_size
    assert named is None or any(named in note for note in made.notes)
    session(target)
