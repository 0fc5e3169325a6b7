"""Values look like what the input is for: masks, codes, pictures, signals, features, text."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

from packager.golden_synth import synthesise
from packager.model import open_model
from tests import builders
from tests.builders import BOOL, FLOAT, INT32, INT64, STRING, value
from tests.golden_models import DOUBLE, UINT8, built, drawn, node, numbers, run


@pytest.mark.parametrize(
    ("dtype", "name"), [(INT64, "attention_mask"), (FLOAT, "src_mask"), (BOOL, "mask"), (INT64, "valid")]
)
def test_masks_begin_with_ones_in_every_row(tmp_path, dtype, name):
    nodes = [
        node("Cast", [name], ["b"], to=BOOL), node("Where", ["b", "one", "zero"], ["w"]),
        node("Cast", ["w"], ["y"], to=FLOAT),
    ]  # fmt: skip
    model = built(
        tmp_path, nodes, [value(name, dtype, ("batch", "seq"))], None, [numbers("one", 1), numbers("zero", 0)]
    )
    masks = drawn(model, name, cases=6)
    for mask in masks:
        as_int = mask.astype(int)
        assert set(as_int.ravel()) <= {0, 1}
        assert (np.diff(as_int, axis=-1) <= 0).all()
        assert (as_int[:, 0] == 1).all()
        assert (as_int[0] == 1).all()
    assert any((mask.astype(int) == 0).any() for mask in masks)


def test_inputs_named_as_lengths_fit_the_other_inputs(tmp_path):
    nodes = [node("Identity", ["x"], ["y"]), node("Mul", ["input_lengths", "input_lengths"], ["z"])]
    inputs = [value("x", FLOAT, ("batch", "time")), value("input_lengths", INT64, ("batch",))]
    model = built(tmp_path, nodes, inputs, [value("y", FLOAT, None), value("z", INT64, None)])
    for case in synthesise(model).cases:
        assert case.inputs["input_lengths"].max() == case.inputs["x"].shape[1]
        assert case.inputs["input_lengths"].min() >= 1


def test_a_code_is_one_that_the_graph_compares_with(tmp_path):
    nodes = [
        node("Equal", ["sr", "known"], ["is"]), node("Cast", ["is"], ["f"], to=FLOAT), node("Mul", ["x", "f"], ["y"])
    ]  # fmt: skip
    inputs = [value("x", FLOAT, ("n", 3)), value("sr", INT64, ())]
    model = built(tmp_path, nodes, inputs, None, [numbers("known", 8000, shape=())])
    assert [int(array) for array in drawn(model, "sr")] == [8000, 8000, 8000]


def test_a_sample_rate_compared_with_nothing_is_a_usual_one(tmp_path):
    inputs = [value("x", FLOAT, ("n", 3)), value("sample_rate", INT64, ())]
    nodes = [node("Identity", ["x"], ["y"])]
    assert [int(array) for array in drawn(built(tmp_path, nodes, inputs), "sample_rate")] == [16000] * 3


def test_values_compared_with_a_list_are_drawn_from_it(tmp_path):
    nodes = [node("Equal", ["codes", "known"], ["e"]), node("Cast", ["e"], ["y"], to=FLOAT)]
    known = numbers("known", 3, 17, 40, 99)
    model = built(tmp_path, nodes, [value("codes", INT64, ("n", 30, 1))], None, [known])
    assert set(np.concatenate([array.ravel() for array in drawn(model, "codes")])) == {3, 17, 40, 99}


def test_integers_are_small_and_large_and_do_not_overflow(tmp_path):
    nodes = [node("Add", ["a", "b"], ["sum"]), node("Mul", ["c", "c"], ["square"])]
    inputs = [value("a", INT32, ("n", 20)), value("b", INT32, ("n", 20)), value("c", INT32, ("n", 20))]
    model = built(tmp_path, nodes, inputs, [value("sum", INT32, None), value("square", INT32, None)])
    goldens = synthesise(model)
    for case, (total, square) in zip(goldens.cases, run(model, goldens), strict=True):
        wide = {name: array.astype(object) for name, array in case.inputs.items()}
        assert (total == wide["a"] + wide["b"]).all()
        assert (square == wide["c"] * wide["c"]).all()
        magnitudes = np.abs(case.inputs["a"].astype(np.int64))
        assert magnitudes.max() > 2**24
        assert (magnitudes <= 8).mean() > 0.5
        assert np.abs(case.inputs["c"]).max() > 100


@pytest.mark.parametrize("dtype", [INT64, FLOAT])
def test_divisors_are_never_zero(tmp_path, dtype):
    inputs = [value("x", dtype, ("n", 40)), value("by", dtype, ("n", 40))]
    model = built(tmp_path, [node("Div", ["x", "by"], ["y"])], inputs, [value("y", dtype, None)])
    for array in drawn(model, "by"):
        assert (array > 0).all()


@pytest.mark.parametrize("op", ["Log", "Sqrt", "Acos", "Asin", "Acosh", "Atanh", "Reciprocal"])
def test_floats_stay_in_the_domain_of_the_function(tmp_path, op):
    nodes = [node("Squeeze", ["x"], ["s"]), node(op, ["s"], ["y"])]
    model = built(tmp_path, nodes, [value("x", FLOAT, ("n", 7))])
    for (result,) in run(model, synthesise(model)):
        assert np.isfinite(result).all()


@pytest.mark.parametrize(("dims", "axes"), [(("n", 3, None, None), (2, 3)), (("n", "h", "w", 1), (1, 2))])
def test_images_are_pictures_of_a_size_that_strides_divide(tmp_path, dims, axes):
    model = open_model(builders.relu(tmp_path / "m.onnx", shape=dims))
    images = drawn(model, "x")
    assert all(image.shape[axis] % 32 == 0 for image in images for axis in axes)
    assert len({tuple(image.shape[axis] for axis in axes) for image in images}) == 3
    assert (images[0].min() >= 0, images[0].max() <= 1) == (True, True)
    assert -1 <= images[1].min() < 0 < images[1].max() <= 1
    # A picture's neighbours are alike: far smoother than noise, and still not flat.
    step = np.abs(np.diff(images[0], axis=axes[1])).mean()
    assert 0 < step < images[0].std()


def test_byte_images_use_the_range_of_bytes(tmp_path):
    for dims in ((1, 64, 64, 3), ("h", "w", 3)):
        inputs = [value("x", UINT8, dims)]
        model = built(tmp_path, [node("Cast", ["x"], ["y"], to=FLOAT)], inputs)
        (image, *_) = drawn(model, "x")
        assert image.dtype == np.uint8
        assert image.max() > 150 > image.min()


def test_signals_are_smoother_than_noise_and_soft_by_turns(tmp_path):
    weights = numpy_helper.from_array(np.ones((2, 1, 3), np.float32), "w")
    nodes = [node("Unsqueeze", ["x", "one"], ["u"]), node("Conv", ["u", "w"], ["y"])]
    model = built(tmp_path, nodes, [value("x", FLOAT, ("batch", "samples"))], None, [weights, numbers("one", 1)])
    signal = drawn(model, "x", dims={"samples": 4000})[2]
    assert np.abs(np.diff(signal, axis=-1)).mean() < signal.std() / 2
    loudness = signal.std(axis=-1)
    assert loudness[0] > 1.5 * loudness[1] > 2 * loudness[2]


def test_features_follow_the_scaler_and_the_trees(tmp_path):
    ml = [("ai.onnx.ml", 3)]
    scaler = node("Scaler", ["x"], ["y"], "ai.onnx.ml", offset=[100.0, -5.0], scale=[0.1, 2.0])
    (folder := tmp_path / "scaler").mkdir()
    model = built(folder, [scaler], [value("x", FLOAT, ("n", 2))], domains=ml)
    features = drawn(model, "x", dims={"n": 400})[0]
    np.testing.assert_allclose(features.mean(axis=0), [100, -5], atol=2)
    np.testing.assert_allclose(features.std(axis=0), [10, 0.5], rtol=0.2)
    tree = node(
        "TreeEnsembleRegressor", ["x"], ["y"], "ai.onnx.ml", n_targets=1, nodes_treeids=[0, 0, 0],
        nodes_nodeids=[0, 1, 2], nodes_featureids=[1, 0, 0], nodes_values=[1000.0, 0.0, 0.0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
        target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0], target_weights=[1.0, 2.0],
    )  # fmt: skip
    model = built(tmp_path, [tree], [value("x", FLOAT, ("n", 2))], domains=ml)
    answers = {float(item) for (result,) in run(model, synthesise(model, dims={"n": 20})) for item in result.ravel()}
    assert answers == {1.0, 2.0}


def test_categories_are_known_ones_where_others_are_errors(tmp_path):
    ml = [("ai.onnx.ml", 3)]
    for zeros, closed in ((0, True), (1, False)):
        encoder = node("OneHotEncoder", ["x"], ["y"], "ai.onnx.ml", cats_strings=["red", "green"], zeros=zeros)
        model = built(tmp_path, [encoder], [value("x", STRING, ("n", 6))], domains=ml)
        words = {word for array in drawn(model, "x") for word in array.ravel().tolist()}
        assert {"red", "green"} <= words
        assert (words == {"red", "green"}) is closed
        run(model, synthesise(model))


def test_text_includes_empty_and_foreign_strings(tmp_path):
    model = built(tmp_path, [node("Identity", ["x"], ["y"])], [value("x", STRING, (3,))], [value("y", STRING, (3,))])
    words = {word for array in drawn(model, "x") for word in array.tolist()}
    assert "" in words
    assert any(not word.isascii() for word in words)
    run(model, synthesise(model))


def test_features_of_double_precision_are_normal(tmp_path):
    model = built(tmp_path, [node("Abs", ["x"], ["y"])], [value("x", DOUBLE, ("n", 500))], [value("y", DOUBLE, None)])
    features = drawn(model, "x")[2]
    assert features.dtype == np.float64
    assert abs(features.mean()) < 0.2
    assert 0.8 < features.std() < 1.2
