"""Rows that influence each other are told from rows that don't, by running them alone and together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from packager.golden_synth import synthesise
from packager.goldens import GoldenCase, GoldenSet
from packager.model import open_model
from packager.rows import fixed_batch, objection
from tests.builders import FLOAT, model, relu, save, value


def unary(path: Path, nodes: list[onnx.NodeProto], out: list[int | str | None], *more: onnx.TensorProto) -> Path:
    return save(model(nodes, [value("x", FLOAT, ["n", 3])], [value("y", FLOAT, out)], more), path)


def objection_to(path: Path, precision: str = "fp32") -> str:
    found: str = objection(path, synthesise(open_model(path)), precision)
    return found


def test_rows_that_influence_each_other_are_found(tmp_path: Path):
    free: list[int | str | None] = ["n", 3]
    assert objection_to(relu(tmp_path / "relu.onnx")) == ""
    mean = [helper.make_node("ReduceMean", ["x"], ["m"], axes=[0]), helper.make_node("Sub", ["x", "m"], ["y"])]
    assert "answers differently in a batch of 2" in objection_to(unary(tmp_path / "mean.onnx", mean, free))
    total = [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=1)]
    lost = objection_to(unary(tmp_path / "sum.onnx", total, ["n", 1]))
    assert "output 'y' has 1 rows for a batch of 2" in lost
    sums = [helper.make_node("CumSum", ["x", "zero"], ["y"])]
    zero = numpy_helper.from_array(np.array(0, np.int64), "zero")
    assert "answers differently" in objection_to(unary(tmp_path / "cumsum.onnx", sums, free, zero))
    two = numpy_helper.from_array(np.array([2, 3], np.int64), "two")
    forced = [helper.make_node("Reshape", ["x", "two"], ["y"])]
    assert "doesn't run" in objection_to(unary(tmp_path / "reshape.onnx", forced, free, two))


def test_quantisation_by_the_whole_batch_is_no_rounding(tmp_path: Path):
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    path = unary(tmp_path / "m.onnx", nodes, ["n", 3])
    small, large = np.array([[0.1, 0.2, 0.31]], np.float32), np.array([[100, 50, 3]], np.float32)
    goldens = GoldenSet((GoldenCase("a", {"x": small}), GoldenCase("b", {"x": large})))
    assert "answers differently" in objection(path, goldens, "int8-dynamic")


def test_goldens_without_rows_prove_nothing(tmp_path: Path):
    empty = GoldenSet((GoldenCase("none", {"x": np.zeros((0, 3), np.float32)}),))
    assert "golden case 'none' have [0] rows" in objection(relu(tmp_path / "m.onnx"), empty, "fp32")


def test_a_signature_can_rule_batching_out_by_itself(tmp_path: Path):
    def told(shape: list[int | str | None]) -> str:
        return fixed_batch(open_model(relu(tmp_path / "m.onnx", shape=shape)).signature)

    assert told(["n", 3]) == told([None, 3]) == ""
    assert told([8, 3]) == "the first dim of input 'x' is fixed at 8"
    assert told([]) == "input 'x' is a scalar"
