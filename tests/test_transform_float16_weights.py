"""Weights rounded to half precision in float32: right values, what stays, flat memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from packager.goldens import GoldenSet
from packager.transform import Context
from packager.transform_float16_weights import HalfWeights
from tests.builders import model, save, value

W = np.random.default_rng(1).normal(0, 1, (32, 16)).astype(np.float32)


def test_weights_become_steps_of_half_precision_and_the_rest_stays(tmp_path: Path):
    huge, small = np.full((32, 16), -3.4e38, np.float32), np.array([1e-12], np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(W * 3, "")),
        helper.make_node("MatMul", ["x", "c"], ["k"]),
        helper.make_node("Sum", ["m", "k", "e"], ["s"]),
        helper.make_node("MatMul", ["x", "h"], ["t"]),
    ]
    weights = [numpy_helper.from_array(array, name) for name, array in (("w", W), ("h", huge), ("e", small))]
    outputs = [value("s", shape=("n", 16)), value("t", shape=("n", 16))]
    path = save(model(nodes, [value("x", shape=("n", 32))], outputs, weights), tmp_path / "m.onnx")
    made = HalfWeights().run(ir.load(path), Context(path, tmp_path, GoldenSet(())))
    ir.save(made.model, tmp_path / "out.onnx")
    saved = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(saved)
    found = {one.name: numpy_helper.to_array(one) for one in saved.graph.initializer}
    np.testing.assert_array_equal(found["w"], W.astype(np.float16).astype(np.float32))
    assert found["w"].dtype == np.float32 and (found["w"] != W).any()
    np.testing.assert_array_equal(found["h"], huge)
    np.testing.assert_array_equal(found["e"], small)
    inside = next(numpy_helper.to_array(one.attribute[0].t) for one in saved.graph.node if one.op_type == "Constant")
    np.testing.assert_array_equal(inside, (W * 3).astype(np.float16).astype(np.float32))
    assert made.notes == ("2 constants were rounded to fp16", "not rounded, beyond float16: 'h'")
