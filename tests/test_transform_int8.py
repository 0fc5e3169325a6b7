"""int8: right values by the reference evaluator, no saturation with 7 bits, refusals that say what to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from packager.errors import GoldenError, Refused
from packager.golden_synth import synthesise
from packager.goldens import GoldenCase, GoldenSet
from packager.model import open_model
from packager.transform import Context
from packager.transform_int8 import Int8Dynamic, Int8Static
from packager.transform_quantiser import quantising
from packager.transforming import apply
from tests.builders import model, save, value

node = helper.make_node
RNG = np.random.default_rng(3)
W = RNG.normal(0, 1, (16, 8)).astype(np.float32)
V = RNG.normal(0, 1, (8, 4)).astype(np.float32)
X = RNG.uniform(-1, 1, (6, 16)).astype(np.float32)


def const(name, array, dtype=np.float32):
    return numpy_helper.from_array(np.asarray(array, dtype), name)


def run(path, feeds):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.add_session_config_entry("session.x64quantprecision", "1")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def network(opset=21, first="fc:0/a", constants=False):
    nodes = [
        node("MatMul", ["x", "w"], ["h:0"], name=first),
        node("Relu", ["h:0"], ["r"], name="act"),
        node("MatMul", ["r", "v"], ["y:0"], name="last"),
    ]
    weights = [const("w", W), const("v", V)]
    if constants:
        nodes = [node("Constant", [], [one.name], value=one) for one in weights] + nodes
        weights = []
    return model(nodes, [value("x", shape=("n", 16))], [value("y:0", shape=("n", 4))], weights, opset=opset, ir=10)


EXPECTED = np.maximum(X @ W, 0) @ V


def goldens(*arrays):
    return GoldenSet(tuple(GoldenCase(str(index), {"x": array}) for index, array in enumerate(arrays or (X,))))


def convert(proto, tmp_path, settings, cases=None, calibration=None):
    source, folder, target = save(proto, tmp_path / "model.onnx"), tmp_path / "work", tmp_path / "small.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    before = source.read_bytes()
    made = settings.run(
        ir.load(source), Context(source, folder, goldens() if cases is None else cases, None, calibration)
    )
    ir.save(made.model, target)
    onnx.checker.check_model(str(target), full_check=True)
    assert source.read_bytes() == before
    return target, onnx.load(target), made.notes


def cosine(one, other):
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


def operators(proto):
    return {one.op_type for one in proto.graph.node}


def by_dtype(proto, dtype):
    return [numpy_helper.to_array(one) for one in proto.graph.initializer if one.data_type == dtype]


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("reduce_range", [None, False])
def test_dynamic_equals_the_reference_evaluator(tmp_path, reduce_range, constants):
    settings = Int8Dynamic(reduce_range=reduce_range)
    path, small, notes = convert(network(constants=constants), tmp_path, settings)
    assert {"MatMulInteger", "DynamicQuantizeLinear"} <= operators(small)
    assert notes == ("quantised operators: MatMulInteger 2",)
    assert [one.name for one in (*small.graph.input, *small.graph.output)] == ["x", "y:0"]
    assert not small.metadata_props
    answered = run(path, {"x": X})
    independent = ReferenceEvaluator(str(path)).run(None, {"x": X})[0]
    np.testing.assert_allclose(answered, independent, rtol=1e-3, atol=np.abs(EXPECTED).max() * 1e-2)
    assert cosine(answered, EXPECTED) > 0.999
    largest = max(int(np.abs(array.astype(np.int32)).max()) for array in by_dtype(small, onnx.TensorProto.INT8))
    assert largest <= 64 if reduce_range is None else largest > 120


def saturating(activations, weights):
    """What vpmaddubsw makes of u8 [K] x s8 [K, N]: sums of neighbouring products saturate at 16 bits."""
    products = activations.astype(np.int32)[:, None] * weights.astype(np.int32)
    pairs = np.clip(products[0::2] + products[1::2], -32768, 32767)
    return pairs.sum(axis=0)


def test_seven_bits_do_not_saturate_where_eight_do(tmp_path):
    weights = {}
    proto = model([node("MatMul", ["x", "w"], ["y"], name="fc")], [value("x", shape=("n", 16))],
                  [value("y", shape=("n", 8))], [const("w", np.ones((16, 8)))], ir=10)  # fmt: skip
    for reduced in (None, False):
        _, small, _ = convert(proto, tmp_path, Int8Dynamic(reduce_range=reduced))
        weights[reduced] = max(by_dtype(small, onnx.TensorProto.INT8), key=np.size)
    full = np.full(16, 255, np.uint8)
    exact = {key: full.astype(np.int32) @ array.astype(np.int32) for key, array in weights.items()}
    np.testing.assert_array_equal(saturating(full, weights[None]), exact[None])
    assert (saturating(full, weights[False]) != exact[False]).all()


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
@pytest.mark.parametrize("scheme", ["qdq", "symmetric", "npu16"])
def test_static_schemes_and_methods(tmp_path, scheme, method, capsys):
    path, small, notes = convert(network(), tmp_path, Int8Static(scheme=scheme, method=method))
    assert {"QuantizeLinear", "DequantizeLinear"} <= operators(small)
    assert "MatMulInteger" not in operators(small)
    assert notes[0].startswith("quantised operators: DequantizeLinear")
    answered = run(path, {"x": X})
    independent = ReferenceEvaluator(str(path)).run(None, {"x": X})[0]
    np.testing.assert_allclose(answered, independent, atol=np.abs(EXPECTED).max() * 1.5e-2)
    assert cosine(answered, EXPECTED) > (0.97 if method == "entropy" else 0.995)
    zeros = {one.name: numpy_helper.to_array(one) for one in small.graph.initializer if "zero_point" in one.name}
    activation = {"qdq": np.uint8, "symmetric": np.int8, "npu16": np.uint16}[scheme]
    assert zeros["x_zero_point"].dtype == activation
    if scheme == "symmetric":
        assert all((array == 0).all() for array in zeros.values())
        assert not by_dtype(small, onnx.TensorProto.INT32), "GPUs dequantise no int32: biases stay float"
    if scheme == "qdq":
        assert max(np.abs(a.astype(np.int32)).max() for a in by_dtype(small, onnx.TensorProto.INT8)) <= 64
    assert capsys.readouterr() == ("", "")


def test_scales_are_per_channel_unless_told_otherwise(tmp_path):
    _, small, _ = convert(network(), tmp_path, Int8Static())
    assert max(array.size for array in by_dtype(small, 1)) == 8
    _, small, _ = convert(network(), tmp_path, Int8Static(per_channel=False))
    assert max(array.size for array in by_dtype(small, 1)) == 1


def test_calibration_from_a_folder(tmp_path):
    (tmp_path / "calibration").mkdir()
    np.savez(tmp_path / "calibration" / "a.npz", x=X * 10)
    settings, files = Int8Static(calibration="a digest"), tmp_path / "calibration"
    _, wide, _ = convert(network(), tmp_path, settings, GoldenSet(()), files)
    _, narrow, _ = convert(network(), tmp_path, Int8Static())
    scale = [next(float(numpy_helper.to_array(one)) for one in proto.graph.initializer if one.name == "x_scale")
             for proto in (wide, narrow)]  # fmt: skip
    assert scale[0] == pytest.approx(10 * scale[1], rel=1e-3)
    np.savez(tmp_path / "calibration" / "a.npz", other=X)
    with pytest.raises(GoldenError):
        convert(network(), tmp_path, settings, GoldenSet(()), files)
    with pytest.raises(Refused, match="the files it was calibrated with aren't here"):
        convert(network(), tmp_path, settings)
    with pytest.raises(Refused, match="nothing to calibrate with"):
        convert(network(), tmp_path, Int8Static(), GoldenSet(()))


@pytest.mark.parametrize("method", ["entropy", "percentile"])
def test_histograms_take_cases_of_several_shapes_and_tensors_of_one_value(tmp_path, method):
    """The quantiser itself refuses both: it stacks the cases, and can't cut a range like [2, 2] into bins."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="fc"),
        node("Mul", ["two", "h"], ["y"], name="twice"),
        node("Add", ["two", "two"], ["z"], name="four"),
    ]
    outputs = [value("y", shape=("n", 8)), value("z", shape=(1,))]
    proto = model(nodes, [value("x", shape=("n", 16))], outputs, [const("w", W), const("two", [2.0])], ir=10)
    path, _, notes = convert(proto, tmp_path, Int8Static(method=method, search=False), goldens(X, X[:3], X * 0.5))
    assert len(notes) == 1
    assert cosine(run(path, {"x": X}), 2 * (X @ W)) > 0.97


@pytest.mark.parametrize("settings", [Int8Dynamic, Int8Static])
def test_excluded_by_name_and_by_type(tmp_path, settings):
    _, small, _ = convert(network(), tmp_path, settings(exclude=("fc:0/a",)))
    floats = {one.name for one in small.graph.initializer if one.data_type == 1}
    assert "w" in floats
    assert "v" not in floats
    with pytest.raises(Refused, match="no node 'fc:0/b'") as caught:
        convert(network(), tmp_path, settings(exclude=("fc:0/b",)))
    assert caught.value.hint == "did you mean 'fc:0/a'?"
    types = ("MatMul", "Relu")
    with pytest.raises(Refused, match="nothing to quantise"):
        convert(network(), tmp_path, settings(exclude_types=types))


@pytest.mark.parametrize("settings", [Int8Dynamic(), Int8Static(), Int8Static(scheme="npu16")])
def test_a_model_without_floats_is_refused(tmp_path, settings):
    both = node("And", ["a", "b"], ["y"], name="both")
    inputs = [value(name, onnx.TensorProto.BOOL, (2,)) for name in "ab"]
    proto = model([both], inputs, [value("y", onnx.TensorProto.BOOL, (2,))], opset=21, ir=10)
    cases = GoldenSet((GoldenCase("0", {name: np.array([True, False]) for name in "ab"}),))
    with pytest.raises(Refused, match="there is nothing to quantise: no tensor of the model is float32"):
        convert(proto, tmp_path, settings, cases)


@pytest.mark.parametrize("settings", [Int8Dynamic(), Int8Static()])
def test_a_model_of_another_domain_only_is_refused(tmp_path, settings):
    scaler = node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[0.0], scale=[2.0])
    graph = helper.make_graph([scaler], "g", [value("x", shape=(1, 2))], [value("y", shape=(1, 2))])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)], ir_version=10)
    with pytest.raises(Refused, match=r"no operator of ai\.onnx is in the model"):
        convert(proto, tmp_path, settings, GoldenSet((GoldenCase("0", {"x": np.ones((1, 2), np.float32)}),)))


def test_whatever_the_quantiser_raises_is_a_refusal():
    with pytest.raises(Refused, match=r"quantiser failed: .*Load model from") as caught, quantising("do"):
        ort.InferenceSession(str(Path("no such model.onnx")))  # raises an exception of ONNX Runtime's own
    assert caught.value.hint == "do"


@pytest.mark.parametrize("settings", [Int8Dynamic(), Int8Static()])
def test_a_quantised_model_is_left_as_it_is(tmp_path, settings):
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
        node("DequantizeLinear", ["q", "s", "z"], ["d"], name="dq"),
        node("MatMul", ["d", "w"], ["y"], name="fc"),
    ]
    weights = [const("s", 0.05), const("z", 128, np.uint8), const("w", W)]
    proto = model(nodes, [value("x", shape=("n", 16))], [value("y", shape=("n", 8))], weights, ir=10)
    path, small, notes = convert(proto, tmp_path, settings)
    assert notes == ("left as it is: the model is quantised already (QuantizeLinear 'q')",)
    assert [one.op_type for one in small.graph.node] == ["QuantizeLinear", "DequantizeLinear", "MatMul"]
    np.testing.assert_array_equal(run(path, {"x": X}), run(tmp_path / "model.onnx", {"x": X}))


def test_weights_stored_as_bytes_are_unpacked_first(tmp_path):
    stored = RNG.integers(-127, 128, (16, 8)).astype(np.int8)
    scale = RNG.uniform(0.001, 0.01, (1, 8)).astype(np.float32)
    nodes = [
        node("Cast", ["stored"], ["wide"], to=1),
        node("Mul", ["wide", "scale"], ["w"]),
        node("MatMul", ["x", "w"], ["y"], name="fc"),
    ]
    weights = [const("stored", stored, np.int8), const("scale", scale)]
    proto = model(nodes, [value("x", shape=("n", 16))], [value("y", shape=("n", 8))], weights, ir=10)
    path, small, _ = convert(proto, tmp_path, Int8Dynamic(reduce_range=False))
    assert "MatMulInteger" in operators(small)
    assert cosine(run(path, {"x": X}), X @ (stored * scale)) > 0.9999


def test_an_opset_too_low_is_refused_with_the_one_needed(tmp_path):
    for settings, opset, least in (
        (Int8Dynamic(), 10, 11), (Int8Static(), 12, 13), (Int8Static(scheme="npu16"), 17, 21),
    ):  # fmt: skip
        with pytest.raises(Refused, match=f"needs opset {least}, the model has {opset}") as caught:
            convert(network(opset=opset), tmp_path, settings)
        assert caught.value.hint == f"raise it first: opset = {least}"


def test_nameless_nodes_and_logging_are_as_before(tmp_path):
    before = logging.root.manager.disable
    _, small, _ = convert(network(first=""), tmp_path, Int8Dynamic())
    assert "MatMulInteger" in operators(small)
    assert logging.root.manager.disable == before


@pytest.mark.parametrize("settings", [Int8Dynamic(), Int8Static()])
def test_bytes_are_the_same_every_time(tmp_path, settings):
    one = convert(network(), tmp_path / "a" if (tmp_path / "a").mkdir() is None else tmp_path, settings)[0]
    (tmp_path / "b").mkdir()
    assert convert(network(), tmp_path / "b", settings)[0].read_bytes() == one.read_bytes()


def test_steps_print_the_settings():
    assert dict(Int8Dynamic(exclude=("a",)).step().settings) == {
        "scales": "per channel", "bits of a weight": "7", "excluded": "a", "search for nodes that drift": "yes",
    }  # fmt: skip
    settings = dict(Int8Static(scheme="npu16", exclude_types=("Conv",)).step().settings)
    assert settings["activations"] == "uint16"
    assert settings["weight dtype"] == "int8"
    assert settings["excluded operators"] == "Conv"
    assert dict(Int8Static(scheme="symmetric").step().settings)["bits of a weight"] == "8"


@pytest.mark.parametrize("chosen", [Int8Dynamic(), Int8Static()])
def test_unknown_dims_of_inputs_and_outputs_stay_unknown(
    tmp_path: Path, corpus: Path, chosen: Int8Dynamic | Int8Static
):
    """Shape inference gives an unnamed dim a name (unk__0); the signature must not change by that."""
    source = corpus / "surrogate_regressor.onnx"
    goldens = synthesise(open_model(source))
    (tmp_path / "work").mkdir()
    (tmp_path / "out").mkdir()
    made = apply([chosen], Context(source, tmp_path / "work", goldens), tmp_path / "out/model.onnx")
    assert made.signature == open_model(source).signature


def test_bodies_of_branches_stay_sorted(tmp_path: Path, corpus: Path):
    """The quantiser appends what it adds to a branch; the onnx checker wants nodes after what they read."""
    source = corpus / "silero_vad_16k.onnx"
    (tmp_path / "work").mkdir()
    (tmp_path / "out").mkdir()
    out = tmp_path / "out/model.onnx"
    apply([Int8Dynamic()], Context(source, tmp_path / "work", GoldenSet(())), out)
    onnx.checker.check_model(str(out))


@pytest.mark.parametrize(("scheme", "dtype"), [("npu8", onnx.TensorProto.UINT8), ("npu16", onnx.TensorProto.UINT16)])
def test_an_accelerator_gets_a_scale_for_every_tensor(tmp_path: Path, scheme: Literal["npu8", "npu16"], dtype: int):
    """HardSwish and Neg are no business of a CPU's quantiser; here nothing is left in float."""
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="conv"),
        node("HardSwish", ["a"], ["b"], name="swish"),
        node("Neg", ["b"], ["y"], name="neg"),
    ]
    random = np.random.default_rng(11)  # of its own, so that the values don't hang on which tests ran before
    weights = np.stack([random.normal(0, size, (2, 3, 3)) for size in (0.1, 1, 10)])
    spec = [value("x", shape=(1, 2, 5, 5))], [value("y", shape=(1, 3, 3, 3))]
    path = save(model(nodes, *spec, [const("w", weights)], opset=21, ir=10), tmp_path / "m.onnx")
    cases = synthesise(open_model(path))
    (tmp_path / "out").mkdir()
    made = apply([Int8Static(scheme=scheme)], Context(path, tmp_path, cases), tmp_path / "out/m.onnx")
    proto = onnx.load(made.path)
    producer = {name: each.op_type for each in proto.graph.node for name in each.output}
    for each in proto.graph.node:
        if each.op_type in ("Conv", "HardSwish", "Neg"):
            assert {producer[name] for name in each.input} == {"DequantizeLinear"}, each.name
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    zeros = [stored[each.input[2]] for each in proto.graph.node if each.op_type == "QuantizeLinear"]
    assert {tensor.data_type for tensor in zeros} == {dtype}
    scales = next(stored[each.input[1]] for each in proto.graph.node if each.input[0] == "w_quantized")
    assert list(scales.dims) == [3], "a scale per channel"
    feeds = dict(cases.cases[0].inputs)
    expected, answered = run(path, feeds), run(made.path, feeds)
    # Of 8 bits: half a step of 1/255 in each of four tensors, whose ranges are up to twice the largest output's.
    steps = 8 if scheme == "npu8" else 2
    assert np.abs(answered - expected).max() <= steps / 255 * np.abs(expected).max()


def test_a_node_with_an_infinite_constant_stays_in_float(tmp_path: Path):
    nodes = [node("MatMul", ["x", "w"], ["h"], name="fc"), node("Max", ["h", "floor"], ["y"], name="max")]
    held = [const("w", W), const("floor", -np.inf)]
    spec = [value("x", shape=(6, 16))], [value("y", shape=(6, 8))]
    path = save(model(nodes, *spec, held, opset=21, ir=10), tmp_path / "m.onnx")
    (tmp_path / "out").mkdir()
    made = apply([Int8Static(scheme="npu16")], Context(path, tmp_path, goldens(X)), tmp_path / "out/m.onnx")
    largest = next(each for each in onnx.load(made.path).graph.node if each.name == "max")
    assert "floor" in largest.input, "and no scale is made of infinity"
    np.testing.assert_allclose(run(made.path, {"x": X}), X @ W, atol=0.02 * np.abs(X @ W).max())


def test_cases_that_a_pinned_model_does_not_take_do_not_calibrate(tmp_path: Path):
    proto = network()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 6
    path = save(proto, tmp_path / "m.onnx")
    (tmp_path / "out").mkdir()
    cases = goldens(np.ones((2, 16), np.float32), X)
    made = apply([Int8Static()], Context(path, tmp_path, cases), tmp_path / "out/m.onnx")
    np.testing.assert_allclose(run(made.path, {"x": X}), EXPECTED, atol=0.05 * np.abs(EXPECTED).max())
    with pytest.raises(Refused, match="nothing to calibrate with"):
        apply([Int8Static()], Context(path, tmp_path, goldens(np.ones((2, 16), np.float32))), tmp_path / "out/n.onnx")
