"""A bfloat16 model on a runtime without bfloat16: what stands in for it computes what it would."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from packager.errors import BuildError
from packager.float16_rounding import computes_in_bfloat16, runnable
from packager.goldens import GoldenSet
from packager.model import open_model
from packager.transform import Context
from packager.transform_float16 import BFloat16
from packager.transforming import apply
from tests.builders import FLOAT, model, save, value
from tests.transform_models import answer, floats

BF16 = ml_dtypes.bfloat16


def rounded(data: np.ndarray) -> np.ndarray:
    return data.astype(BF16).astype(np.float32)


def half_network(folder: Path, operator: str = "MatMul") -> Path:
    """``y = relu(x @ w)`` in bfloat16, float32 outside."""
    weight = floats(16, 8).astype(BF16)
    nodes = [
        helper.make_node("Cast", ["x"], ["low"], to=TensorProto.BFLOAT16),
        helper.make_node(operator, ["low", "w"], ["p"], name="product"),
        helper.make_node("Relu", ["p"], ["r"]),
        helper.make_node("Cast", ["r"], ["y"], to=TensorProto.FLOAT),
    ]
    held = helper.make_tensor("w", TensorProto.BFLOAT16, weight.shape, weight.tobytes(), raw=True)
    made = model(nodes, [value("x", FLOAT, ["n", 16])], [value("y", FLOAT, ["n", 8])], [held], opset=22, ir=10)
    return save(made, folder / "m.onnx")


def test_a_float_model_is_run_as_it_is(tmp_path: Path):
    node = helper.make_node("Relu", ["x"], ["y"])
    opened = open_model(save(model([node], [value("x")], [value("y")]), tmp_path / "m.onnx"))
    assert not computes_in_bfloat16(opened) and runnable(opened, tmp_path / "nowhere") == opened.path


def test_a_stand_in_rounds_every_result_to_bfloat16(tmp_path: Path):
    opened = open_model(half_network(tmp_path))
    (tmp_path / "there").mkdir()
    x = floats(5, 16, seed=1)
    expected = np.maximum(rounded(rounded(x) @ floats(16, 8).astype(BF16).astype(np.float32)), 0)
    found = answer(runnable(opened, tmp_path / "there"), {"x": x})[0]
    assert found.tolist() == expected.tolist()
    assert np.abs(found - np.maximum(x @ floats(16, 8), 0)).max() > 1e-3, "rounding to 8 bits shows"


def test_onnx_runtime_indeed_has_no_such_kernels(tmp_path: Path):
    """The reason for standing in; if this fails, a release runs bfloat16 by itself."""
    with pytest.raises(Exception, match="Could not find an implementation for MatMul"):
        ort.InferenceSession(half_network(tmp_path), providers=["CPUExecutionProvider"])


def test_a_converted_model_is_held_to_load_by_its_stand_in(tmp_path: Path):
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], name="dense")]
    held = onnx.numpy_helper.from_array(floats(16, 300), "w")
    proto = model(nodes, [value("x", FLOAT, ["n", 16])], [value("y", FLOAT, ["n", 300])], [held], opset=22, ir=10)
    (tmp_path / "out").mkdir()
    context = Context(save(proto, tmp_path / "m.onnx"), tmp_path, GoldenSet(()))
    made = apply((BFloat16(search=False),), context, tmp_path / "out/m.onnx")
    assert computes_in_bfloat16(open_model(made.path))


def test_a_stand_in_that_doesnt_load_is_told(tmp_path: Path):
    """A product of 16 columns and 5 rows, behind a dtype that hides it from ONNX Runtime."""
    source = half_network(tmp_path)
    proto = onnx.load(source)
    proto.graph.initializer[0].dims[:] = [8, 16]
    save(proto, source)
    (tmp_path / "out").mkdir()
    with pytest.raises(BuildError, match="doesn't load"):
        apply((), Context(source, tmp_path, GoldenSet(())), tmp_path / "out/m.onnx")
