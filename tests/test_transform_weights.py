"""Weight-only quantisation: packing, kernels, the fallback, and the loss against float32."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from packager.errors import Refused
from packager.goldens import GoldenSet
from packager.transform import Context
from packager.transform_weights import WeightOnly, packed, quantise
from tests.builders import model, save, value

node = helper.make_node
RNG = np.random.default_rng(7)
K, N = 96, 40
W = RNG.normal(0, 0.1, (K, N)).astype(np.float32)
X = RNG.normal(0, 1, (5, K)).astype(np.float32)


def const(name, array):
    return numpy_helper.from_array(np.asarray(array, np.float32), name)


def run(path, feeds):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # Optimised, ONNX Runtime fuses DequantizeLinear and MatMul into MatMulNBits with activations rounded to int8.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def layer(op_type="MatMul", weight=W, opset=21, **attributes):
    inputs = ["x", "w"] if op_type == "MatMul" else ["x", "w", "b"]
    weights = [const("w", weight)] + ([const("b", np.arange(N) * 0.1)] if op_type == "Gemm" else [])
    nodes = [node(op_type, inputs, ["y"], name="fc:0/x", **attributes)]
    x, y = value("x", shape=("n", weight.shape[1 if attributes.get("transB") else 0])), value("y", shape=("n", N))
    return model(nodes, [x], [y], weights, opset=opset, ir=10)


def convert(proto, tmp_path, **settings):
    source, target = save(proto, tmp_path / "model.onnx"), tmp_path / "small.onnx"
    made = WeightOnly(min_elements=1000, **settings).run(ir.load(source), Context(source, tmp_path, GoldenSet(())))
    ir.save(made.model, target)
    onnx.checker.check_model(str(target), full_check=True)
    return target, onnx.load(target), made.notes


def restored(bits=8):
    """The weight the integers stand for, [K, N]."""
    return quantise(W.T, bits, 32, symmetric=True).restored(K).T


def cosine(one, other):
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize(("bits", "least"), [(4, 0.994), (8, 0.99998)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("fallback", [True, False])
def test_values_are_those_of_the_integers_and_near_float32(tmp_path, bits, least, symmetric, fallback):
    path, small, notes = convert(layer(), tmp_path, bits=bits, symmetric=symmetric, fallback=fallback)
    stored = quantise(W.T, bits, 32, symmetric=symmetric).restored(K)
    answered = run(path, {"x": X})
    np.testing.assert_allclose(answered, X @ stored.T, rtol=1e-4, atol=1e-5)
    assert cosine(answered, X @ W) > least
    operators = [one.op_type for one in small.graph.node]
    assert operators == (["DequantizeLinear", "MatMul"] if fallback else ["MatMulNBits"])
    assert notes == ()
    assert path.stat().st_size < (tmp_path / "model.onnx").stat().st_size * (0.36 if bits == 4 else 0.6)
    if fallback:
        independent = ReferenceEvaluator(str(path)).run(None, {"x": X})[0]
        np.testing.assert_allclose(answered, independent, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_weight_is_off_by_half_a_step_at_most(bits, symmetric):
    blocks = quantise(W.T, bits, 32, symmetric=symmetric)
    off = np.abs(blocks.restored(K) - W.T).reshape(N, -1, 32)
    limit = blocks.scales * (0.5 if symmetric else 1.0)  # a zero point is rounded too
    assert (off.max(axis=2) <= limit * 1.001).all()


def test_a_block_of_zeros_and_one_sided_blocks_stay_exact_at_zero():
    weight = np.zeros((1, 64), np.float32)
    weight[0, 32:] = np.linspace(0, 1.5, 32)
    for symmetric in (True, False):
        stored = quantise(weight, 4, 32, symmetric=symmetric).restored(64)
        assert (stored[0, :33] == 0).all()
        assert stored[0, 63] == pytest.approx(1.5)


def test_packing_puts_the_first_value_in_the_low_half():
    np.testing.assert_array_equal(packed(np.array([[1, 2, 15]], np.uint8), 4), [[0x21, 0x0F]])
    np.testing.assert_array_equal(packed(np.array([[1, 2, 15]], np.uint8), 8), [[1, 2, 15]])


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_gemm_with_a_bias_either_way_round(tmp_path, transposed, fallback):
    weight = W.T if transposed else W
    path, small, _ = convert(layer("Gemm", weight, transB=int(transposed)), tmp_path, bits=8, fallback=fallback)
    np.testing.assert_allclose(run(path, {"x": X}), X @ restored() + np.arange(N) * 0.1, atol=1e-5)
    assert {one.name for one in small.graph.initializer} >= {"b"}
    assert "w" not in {one.name for one in small.graph.initializer}


def test_gemm_with_scaling_gets_the_fallback_and_a_note(tmp_path):
    path, small, notes = convert(layer("Gemm", alpha=2.0), tmp_path, bits=8)
    assert [one.op_type for one in small.graph.node] == ["DequantizeLinear", "Gemm"]
    assert notes == ("Gemm 'fc:0/x': DequantizeLinear by block (MatMulNBits can't compute its scaling)",)
    np.testing.assert_allclose(run(path, {"x": X}), 2 * (X @ restored()) + np.arange(N) * 0.1, atol=1e-5)


def test_inputs_that_are_not_whole_blocks(tmp_path):
    weight = W[:90]
    x = X[:, :90]
    path, _, notes = convert(layer(weight=weight), tmp_path, bits=8)
    stored = quantise(weight.T, 8, 32, symmetric=True).restored(90)
    np.testing.assert_allclose(run(path, {"x": x}), x @ stored.T, atol=1e-5)
    assert notes == ()
    path, small, notes = convert(layer(weight=weight), tmp_path, bits=4, fallback=True)
    assert "90 isn't whole blocks" in notes[0]
    assert small.graph.initializer[0].data_type == onnx.TensorProto.INT8
    stored = quantise(weight.T, 8, 90, symmetric=True).restored(90)
    np.testing.assert_allclose(run(path, {"x": x}), x @ stored.T, atol=1e-5)


def test_before_opset_21_the_fallback_is_by_channel(tmp_path):
    path, small, notes = convert(layer(opset=17), tmp_path, bits=4, fallback=True)
    assert notes == ("MatMul 'fc:0/x': DequantizeLinear int8 by channel (blocks need opset 21)",)
    assert list(small.graph.initializer[1].dims) == [N]
    stored = quantise(W.T, 8, K, symmetric=True).restored(K)
    np.testing.assert_allclose(run(path, {"x": X}), X @ stored.T, atol=1e-5)
    with pytest.raises(Refused, match="needs opset 13, the model has 11"):
        convert(layer(opset=11), tmp_path, bits=4, fallback=True)


def test_a_weight_shared_with_another_node_stays_for_it(tmp_path):
    nodes = [
        node("MatMul", ["x", "w"], ["y"], name="fc"),
        node("Gather", ["w", "first"], ["row"], name="embedding"),
        node("MatMul", ["x", "w"], ["again"], name="tied"),
    ]
    weights = [const("w", W), numpy_helper.from_array(np.array([0]), "first")]
    outputs = [value("y", shape=("n", N)), value("row", shape=(1, N)), value("again", shape=("n", N))]
    path, small, _ = convert(model(nodes, [value("x", shape=("n", K))], outputs, weights), tmp_path, bits=8)
    assert "w" in {one.name for one in small.graph.initializer}
    np.testing.assert_allclose(run(path, {"x": X}), X @ restored(), atol=1e-5)


def test_constant_nodes_and_layers_in_if_bodies_count_too(tmp_path):
    then = helper.make_graph([node("MatMul", ["x", "w"], ["t"], name="inner")], "t", [], [value("t", shape=("n", N))])
    other = helper.make_graph([node("Neg", ["h"], ["e"])], "e", [], [value("e", shape=("n", N))])
    nodes = [
        node("Constant", [], ["c"], value=const("", W)),
        node("MatMul", ["x", "c"], ["h"], name="outer"),
        node("If", ["flag"], ["y"], then_branch=then, else_branch=other),
    ]
    inputs = [value("x", shape=("n", K)), value("flag", onnx.TensorProto.BOOL, ())]
    path, _, _ = convert(model(nodes, inputs, [value("y", shape=("n", N))], [const("w", W)]), tmp_path, bits=8)
    for flag, sign in ((True, 1), (False, -1)):
        np.testing.assert_allclose(run(path, {"x": X, "flag": np.array(flag)}), sign * (X @ restored()), atol=1e-5)
    assert path.stat().st_size < 0.8 * (tmp_path / "model.onnx").stat().st_size


def test_refusals_and_settings(tmp_path):
    with pytest.raises(Refused, match="no MatMul or Gemm has a constant"):
        convert(layer(), tmp_path, exclude=("fc:0/x",))
    with pytest.raises(Refused, match="no layer 'fc'"):
        convert(layer(), tmp_path, exclude=("fc",))
    with pytest.raises(Refused, match="block = 33"):
        convert(layer(), tmp_path, block=33)
    step = WeightOnly(bits=4, symmetric=False, exclude=("a",)).step()
    assert step.title == "Quantising weights of large linear layers to int4"
    assert dict(step.settings)["zero point"] == "by block"
    assert dict(step.settings)["excluded"] == "a"


def test_bytes_are_the_same_every_time(tmp_path):
    (tmp_path / "again").mkdir()
    one = convert(layer(), tmp_path)[0].read_bytes()
    assert convert(layer(), tmp_path / "again")[0].read_bytes() == one
