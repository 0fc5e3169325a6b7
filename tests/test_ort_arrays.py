"""Dtypes that numpy lacks go through ONNX Runtime and come back with their values."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from packager.goldens import dtype_name, numpy_dtype
from packager.ort_arrays import BITS, run

VALUES = [1, 0, 1, 0, 1]


def session(source: int, target: int) -> ort.InferenceSession:
    """A model of one Cast, and a float32 input that is handed through."""
    version = 25 if TensorProto.INT2 in (source, target) or TensorProto.UINT2 in (source, target) else 24
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=target), helper.make_node("Identity", ["f"], ["g"])],
        "g",
        [helper.make_tensor_value_info("x", source, [5]), helper.make_tensor_value_info("f", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", target, [5]), helper.make_tensor_value_info("g", TensorProto.FLOAT, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=12)
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", [name for name in BITS if name != "float8e8m0"])
def test_every_dtype_goes_in_and_comes_out(name: str):
    dtype, kind = numpy_dtype(name), TensorProto.DataType.Value(name.upper())
    other = np.array([2.5, -3], np.float32)
    negative = -1 if not name.startswith("u") else 1
    values = np.array(VALUES) * np.array([1, 1, negative, 1, negative])
    y, g = run(session(TensorProto.FLOAT, kind), ["y", "g"], {"x": values.astype(np.float32), "f": other})
    assert dtype_name(y) == name and y.astype(np.float32).tolist() == values.tolist()
    assert g.tolist() == [2.5, -3]
    (back,) = run(session(kind, TensorProto.FLOAT), ["y"], {"x": values.astype(dtype), "f": other})
    assert back.dtype == np.float32 and back.tolist() == values.tolist()


@pytest.mark.parametrize("dtype", [TensorProto.BFLOAT16, TensorProto.INT4])
def test_scalars_stay_scalars(dtype: int):
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Cast", ["f"], ["y"], to=dtype),
        ],
        "g",
        [helper.make_tensor_value_info("x", dtype, [])],
        [helper.make_tensor_value_info("y", dtype, [])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)
    runs = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = run(runs, ["y"], {"x": np.array(3, numpy_dtype(TensorProto.DataType.Name(dtype).lower()))})
    assert y.shape == () and float(y) == 3


def test_powers_of_two_come_as_float8e8m0():
    (y,) = run(
        session(TensorProto.FLOAT, TensorProto.FLOAT8E8M0),
        ["y"],
        {"x": np.array([1, 2, 4, 8, 0.5], np.float32), "f": np.zeros(2, np.float32)},
    )
    assert dtype_name(y) == "float8e8m0" and y.astype(np.float32).tolist() == [1, 2, 4, 8, 0.5]
