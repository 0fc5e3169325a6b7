"""Linear layers and tables in int8 by own code: the numbers of ONNX Runtime's quantiser, exact integers, bodies too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import QuantType, quantize_dynamic

from packager.transform_int8_linear import CHUNK, quantise_layers, to_int8, weight_scale
from tests.builders import INT64, model, save, value

node = helper.make_node
RNG = np.random.default_rng(11)
W = RNG.normal(0, 1, (24, 8)).astype(np.float32)
B = RNG.normal(0, 1, 8).astype(np.float32)
X = RNG.uniform(-1, 2, (5, 24)).astype(np.float32)


def const(name, array, dtype=np.float32):
    return numpy_helper.from_array(np.asarray(array, dtype), name)


def convert(proto, tmp_path: Path, exclude=(), *, per_channel=True, reduce_range=True):
    source, target = save(proto, tmp_path / "m.onnx"), tmp_path / "small.onnx"
    made = ir.load(source)
    count = quantise_layers(made, exclude, per_channel=per_channel, reduce_range=reduce_range)
    ir.save(made, target)
    onnx.checker.check_model(str(target), full_check=True)
    return target, onnx.load(target), count


def run(path: Path, feeds, outputs=None):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(outputs, feeds)


def layer(op_type="MatMul", weight=W, **attributes):
    inputs = ["x", "w", *(["b"] if op_type == "Gemm" else [])]
    weights = [const("w", weight), *([const("b", B)] if op_type == "Gemm" else [])]
    nodes = [node(op_type, inputs, ["y:0"], name="fc:0", **attributes)]
    return model(nodes, [value("x", shape=("n", 24))], [value("y:0", shape=("n", 8))], weights)


def initializers(proto):
    return {one.name: numpy_helper.to_array(one) for one in proto.graph.initializer}


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("reduce_range", [True, False])
def test_the_numbers_are_those_of_the_quantiser_of_onnx_runtime(tmp_path, per_channel, reduce_range):
    weight = W.copy()
    weight[:, 2] = 0  # a scale can't be zero
    path, small, _ = convert(layer(weight=weight), tmp_path, per_channel=per_channel, reduce_range=reduce_range)
    theirs = tmp_path / "theirs.onnx"
    quantize_dynamic(tmp_path / "m.onnx", theirs, per_channel=per_channel, reduce_range=reduce_range,
                     weight_type=QuantType.QInt8)  # fmt: skip
    mine, other = initializers(small), initializers(onnx.load(theirs))
    np.testing.assert_array_equal(mine["w_quantized"], other["w_quantized"])
    np.testing.assert_array_equal(mine["w_scale"], other["w_scale"])
    np.testing.assert_array_equal(run(path, {"x": X})[0], run(theirs, {"x": X})[0])
    theirs_made = sorted(one.op_type for one in onnx.load(theirs).graph.node)
    assert sorted(one.op_type for one in small.graph.node) == theirs_made


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm_becomes_integer_either_way_round_with_its_bias(tmp_path, transposed):
    proto = layer("Gemm", W.T if transposed else W, transB=transposed)
    path, small, count = convert(proto, tmp_path)
    assert count == 1 and "Gemm" not in {one.op_type for one in small.graph.node}
    assert "w" not in initializers(small)
    np.testing.assert_allclose(run(path, {"x": X})[0], X @ W + B, atol=0.05 * np.abs(X @ W).max())
    scaled, _, count = convert(layer("Gemm", W, alpha=2.0), tmp_path)
    assert count == 0
    np.testing.assert_allclose(run(scaled, {"x": X})[0], 2 * (X @ W) + B, rtol=1e-5)


def test_what_is_read_twice_is_measured_and_stored_once(tmp_path):
    nodes = [node("MatMul", ["x", "w"], ["a"], name="one"), node("MatMul", ["x", "w"], ["b"], name="two")]
    proto = model(nodes, [value("x", shape=("n", 24))], [value("a", shape=("n", 8)), value("b", shape=("n", 8))],
                  [const("w", W)])  # fmt: skip
    path, small, count = convert(proto, tmp_path)
    assert count == 2
    assert [one.op_type for one in small.graph.node].count("DynamicQuantizeLinear") == 1
    assert [name for name, array in initializers(small).items() if array.dtype == np.int8 and array.ndim == 2] == [
        "w_quantized"
    ]
    one, two = run(path, {"x": X})
    np.testing.assert_array_equal(one, two)
    _, kept, _ = convert(proto, tmp_path, ("two",))
    assert {"w", "w_quantized"} <= set(initializers(kept))


def test_a_layer_in_the_bodies_of_an_if_with_a_captured_weight(tmp_path):
    """ONNX Runtime's quantiser leaves bodies alone; here ``w`` is an initializer that only they use."""
    branches = {}
    for name, sign in (("then_branch", "Identity"), ("else_branch", "Neg")):
        inner = [
            node("MatMul", ["x", "w"], [f"{name}_m"], name=f"{name}_fc"),
            node(sign, [f"{name}_m"], [f"{name}_y"], name=f"{name}_end"),
        ]
        branches[name] = helper.make_graph(inner, name, [], [value(f"{name}_y", shape=("n", 8))])
    proto = model([node("If", ["c"], ["y"], name="if", **branches)],
                  [value("x", shape=("n", 24)), value("c", TensorProto.BOOL, ())], [value("y", shape=("n", 8))],
                  [const("w", W)])  # fmt: skip
    path, small, count = convert(proto, tmp_path)
    assert count == 2
    assert "w" not in initializers(small)
    for taken, factor in ((True, 1), (False, -1)):
        found = run(path, {"x": X, "c": np.array(taken)})[0]
        np.testing.assert_allclose(found, factor * (X @ W), atol=0.05 * np.abs(X @ W).max())


def test_rows_of_a_table_are_within_half_a_step_of_their_own_scale(tmp_path):
    table = (RNG.normal(0, 1, (200, 32)) * RNG.uniform(0.01, 10, (200, 1))).astype(np.float32)
    nodes = [node("Gather", ["table", "i"], ["y"], name="embed:0")]
    proto = model(nodes, [value("i", INT64, ("n",))], [value("y", shape=("n", 32))], [const("table", table)])
    path, small, count = convert(proto, tmp_path)
    assert count == 1 and "table" not in initializers(small)
    picked = np.array([3, 0, 199, -1], np.int64)
    off = np.abs(run(path, {"i": picked})[0] - table[picked])
    assert (off <= np.abs(table[picked]).max(axis=1, keepdims=True) / 127 * 0.501).all()
    assert path.stat().st_size < 0.4 * (tmp_path / "m.onnx").stat().st_size


def test_integers_are_exact_on_any_cpu(tmp_path):
    """What ONNX Runtime multiplies here, the reference evaluator, and a CPU without VNNI that saturates: all equal."""
    path, small, _ = convert(layer(weight=np.sign(W) * 3), tmp_path)
    whole = next(one for one in small.graph.node if one.op_type == "MatMulInteger")
    measured = next(one for one in small.graph.node if one.op_type == "DynamicQuantizeLinear")
    small.graph.output.extend(
        [
            helper.make_tensor_value_info(whole.output[0], TensorProto.INT32, None),
            helper.make_tensor_value_info(measured.output[0], TensorProto.UINT8, None),
            helper.make_tensor_value_info(measured.output[2], TensorProto.UINT8, None),
        ]
    )
    save(small, path)
    feeds = {"x": np.abs(X) + 1}
    here, independent = run(path, feeds), ReferenceEvaluator(str(path)).run(None, feeds)
    for one, other in zip(here[1:], independent[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(here[0], independent[0], rtol=1e-6)
    weight, zero = initializers(small)["w_quantized"].astype(np.int32), int(here[3])
    pairs = here[2].astype(np.int32)[:, :, None] * weight
    saturated = np.clip(pairs[:, 0::2] + pairs[:, 1::2], -32768, 32767).sum(axis=1) - zero * weight.sum(axis=0)
    np.testing.assert_array_equal(saturated, here[1])


def test_large_weights_are_worked_on_in_pieces(monkeypatch):
    monkeypatch.setattr("packager.transform_int8_linear.CHUNK", 16)
    assert CHUNK > 16
    scale = weight_scale(W, 64, per_channel=True)
    np.testing.assert_array_equal(scale, (np.abs(W).max(axis=0).astype(np.float64) / 64).astype(np.float32))
    np.testing.assert_array_equal(to_int8(W, scale), np.rint(W / scale))
