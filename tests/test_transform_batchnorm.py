"""Folding batch normalisation: the same answers, with fewer nodes, and nothing folded that others read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from packager.transform_batchnorm import FoldBatchNorm
from tests.builders import FLOAT, value
from tests.transform_models import Made, answer, array, f32, floats, model, names, transform

node = helper.make_node
FOLD = FoldBatchNorm()
X = floats(2, 3, 6, 6, seed=1)


def statistics(channels: int) -> list:
    values = (
        floats(channels, seed=2) + 2,
        floats(channels, seed=3),
        floats(channels, seed=4),
        np.abs(floats(channels)),
    )
    return [array(name, values) for name, values in zip(("scale", "bias", "mean", "var"), values, strict=True)]


def norm(before: str, after: str, **attributes):
    return node("BatchNormalization", [before, "scale", "bias", "mean", "var"], [after], name="norm", **attributes)


def made(folder: Path, nodes, weights, channels: int, x: str = "x", outputs=None) -> Made:
    inputs = [value(x, FLOAT, ["n", 3, 6, 6])]
    outputs = outputs or [value("y", FLOAT, None)]
    return transform(model(folder, nodes, inputs, outputs, [*weights, *statistics(channels)]), folder, FOLD)


def close(found: Made) -> None:
    before, after = answer(found.source, {"x": X}), answer(found.applied.path, {"x": X})
    assert len(before) == len(after) > 0
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_takes_it_in(tmp_path: Path, biased: bool):
    weights = [array("w", floats(4, 3, 3, 3)), array("b", floats(4, seed=9))]
    conv = node("Conv", ["x", "w", *(["b"] if biased else [])], ["h"], name="conv")
    found = made(tmp_path, [conv, norm("h", "y", epsilon=1e-3)], weights, 4)
    assert found.ops() == ["Conv"] and names(found) == (["x"], ["y"])
    close(found)


def test_what_it_computes_is_the_formula(tmp_path: Path):
    """One weight, worked out by hand: (2 x - 1) / sqrt(4 + 0) * 3 + 5 = 3 x + 3.5."""
    weights = [array("w", np.full((1, 1, 1, 1), 2, np.float32))]
    parts = {"scale": 3, "bias": 5, "mean": 1, "var": 4}
    nodes = [node("Conv", ["x", "w"], ["h"]), norm("h", "y", epsilon=0.0)]
    held = [*weights, *(array(name, f32([number])) for name, number in parts.items())]
    found = transform(model(tmp_path, nodes, [value("x", FLOAT, [1, 1, 1, 1])], None, held), tmp_path, FOLD)
    stored = {tensor.name: numpy_helper.to_array(tensor).ravel().tolist() for tensor in found.proto.graph.initializer}
    (conv,) = found.proto.graph.node
    assert (stored[conv.input[1]], stored[conv.input[2]]) == ([3.0], [3.5])


def test_a_transposed_convolution_takes_it_in(tmp_path: Path):
    nodes = [node("ConvTranspose", ["x", "w"], ["h"]), norm("h", "y")]
    found = made(tmp_path, nodes, [array("w", floats(3, 4, 2, 2))], 4)
    assert found.ops() == ["ConvTranspose"]
    close(found)


def test_grouped_convolutions(tmp_path: Path):
    found = made(
        tmp_path, [node("Conv", ["x", "w"], ["h"], group=3), norm("h", "y")], [array("w", floats(6, 1, 3, 3))], 6
    )
    assert found.ops() == ["Conv"]
    close(found)


def test_elsewhere_it_is_a_multiplication_and_an_addition(tmp_path: Path):
    found = made(tmp_path, [node("Relu", ["x"], ["h"]), norm("h", "y")], [], 3)
    assert found.ops() == ["Relu", "Mul", "Add"]
    close(found)
    found = made(tmp_path, [norm("x", "y")], [], 3)
    assert found.ops() == ["Mul", "Add"]
    close(found)


def test_a_convolution_that_others_read_keeps_its_weights(tmp_path: Path):
    nodes = [node("Conv", ["x", "w"], ["h"]), norm("h", "k"), node("Add", ["h", "k"], ["y"])]
    found = made(tmp_path, nodes, [array("w", floats(4, 3, 3, 3))], 4)
    assert found.ops() == ["Conv", "Mul", "Add", "Add"]
    close(found)
    outputs = [value("h", FLOAT, None), value("y", FLOAT, None)]
    found = made(tmp_path, [nodes[0], norm("h", "y")], [array("w", floats(4, 3, 3, 3))], 4, outputs=outputs)
    assert found.ops() == ["Conv", "Mul", "Add"] and names(found) == (["x"], ["h", "y"])
    close(found)


def test_two_convolutions_may_share_weights(tmp_path: Path):
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="one"), norm("a", "b"),
        node("Conv", ["x", "w"], ["c"], name="two"), node("Add", ["b", "c"], ["y"]),
    ]  # fmt: skip
    found = made(tmp_path, nodes, [array("w", floats(4, 3, 3, 3))], 4)
    assert found.ops() == ["Conv", "Conv", "Add"]
    close(found)


def test_statistics_that_callers_give_stay(tmp_path: Path):
    nodes = [norm("x", "y")]
    held = [tensor for tensor in statistics(3) if tensor.name != "mean"]
    inputs = [value("x", FLOAT, ["n", 3, 6, 6]), value("mean", FLOAT, [3])]
    found = transform(model(tmp_path, nodes, inputs, None, held), tmp_path, FOLD)
    assert found.ops() == ["BatchNormalization"]
    assert found.applied.notes == ("batch normalisation without constant statistics stays: BatchNormalization 'norm'",)


def test_training_stays(tmp_path: Path):
    learning = norm("h", "y", training_mode=1)
    learning.output.extend(["running_mean", "running_var"])
    found = made(tmp_path, [node("Relu", ["x"], ["h"]), learning], [], 3)
    assert found.ops() == ["Relu", "BatchNormalization"]


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1), (1, 4, 1, 1), (4, 1, 1)])
@pytest.mark.parametrize("first", [False, True])
def test_a_constant_factor_goes_into_the_weights_where_that_is_asked(
    tmp_path: Path, operator: str, shape: tuple[int, ...], first: bool
):
    weights = [
        array("w", floats(*((4, 3) if operator == "Conv" else (3, 4)), 3, 3)), array("b", floats(4, seed=9)),
        array("f", floats(*shape, seed=5) + 2),
    ]  # fmt: skip
    nodes = [node(operator, ["x", "w", "b"], ["h"]), node("Mul", ["f", "h"] if first else ["h", "f"], ["y"])]
    inputs, outputs = [value("x", FLOAT, ["n", 3, 6, 6])], [value("y", FLOAT, None)]
    found = transform(model(tmp_path, nodes, inputs, outputs, weights), tmp_path, FoldBatchNorm(scales=True))
    assert found.ops() == [operator] and names(found) == (["x"], ["y"])
    assert not {"w", "b", "f"} & {tensor.name for tensor in found.proto.graph.initializer}, "nothing unused stays"
    close(found)


@pytest.mark.parametrize(
    ("factor", "more"),
    [
        (floats(1, 1, 6, 1), []),  # along the height
        (floats(2, 1, 1, 1), []),  # along the batch
        (floats(1, 1, 4, 1, 1), []),  # a dim more
        (floats(1), [node("Relu", ["h"], ["z"])]),  # somebody else reads the convolution
    ],
)
def test_other_factors_stay(tmp_path: Path, factor: np.ndarray, more: list):
    nodes = [node("Conv", ["x", "w"], ["h"], pads=[1, 1, 1, 1]), node("Mul", ["h", "f"], ["y"]), *more]
    outputs = [value("y", FLOAT, None), *([value("z", FLOAT, None)] if more else [])]
    source = model(
        tmp_path,
        nodes,
        [value("x", FLOAT, ["n", 3, 6, 6])],
        outputs,
        [array("w", floats(4, 3, 3, 3)), array("f", factor)],
    )
    found = transform(source, tmp_path, FoldBatchNorm(scales=True))
    assert "Mul" in found.ops()
    close(found)


@pytest.mark.parametrize(
    "before",
    [
        node("Add", ["x", "b"], ["h"]),  # whose second input is a vector
        node("MatMul", ["x", "m"], ["h"]),
        node("Relu", ["x"], ["h"]),
        node("Conv", ["x", "x"], ["h"], pads=[3, 3, 3, 3]),  # whose weights are no constant
    ],
)
def test_factors_after_anything_else_stay(tmp_path: Path, before: onnx.NodeProto):
    weights = [array("b", floats(6)), array("m", floats(6, 6)), array("f", floats(1))]
    nodes = [before, node("Mul", ["h", "f"], ["y"])]
    x = value("x", FLOAT, [3, 3, 6, 6])
    source = model(tmp_path, nodes, [x], [value("y", FLOAT, None)], weights)
    found = transform(source, tmp_path, FoldBatchNorm(scales=True))
    assert found.ops() == [before.op_type, "Mul"]


def test_factors_stay_where_nobody_asks(tmp_path: Path):
    nodes = [node("Conv", ["x", "w"], ["h"]), node("Mul", ["h", "f"], ["y"])]
    source = model(
        tmp_path, nodes, [value("x", FLOAT, ["n", 3, 6, 6])], [value("y", FLOAT, None)],
        [array("w", floats(4, 3, 3, 3)), array("f", floats(1))],
    )  # fmt: skip
    assert transform(source, tmp_path, FOLD).ops() == ["Conv", "Mul"]
