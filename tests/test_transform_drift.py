"""Two models side by side: the first node that differs, the worst, and what can't be compared."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from packager.errors import ModelError
from packager.transform_drift import drift, first_diverging, gains, worst_first
from tests.builders import INT64, model, save, value

node = helper.make_node
X = np.arange(6, dtype=np.float32).reshape(2, 3) + 1


def const(name, array, dtype=np.float32):
    return numpy_helper.from_array(np.asarray(array, dtype), name)


def chain(path, scale=2.0, offset=1.0, shift=0):
    nodes = [
        node("Mul", ["x", "scale"], ["m:0"], name="times"),
        node("Add", ["m:0", "offset"], ["a"], name="plus"),
        node("Cast", ["a"], ["i"], to=INT64, name="cast"),
        node("Add", ["i", "shift"], ["j"], name="shift"),
        node("Neg", ["a"], ["y"], name="neg"),
    ]
    weights = [const("scale", scale), const("offset", offset), const("shift", shift, np.int64)]
    return save(model(nodes, [value("x")], [value("y"), value("j", INT64)], weights), path)


def test_equal_models_do_not_drift(tmp_path):
    found = drift(chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx"), {"x": X})
    assert [each.tensor for each in found] == ["m:0", "a", "i", "j", "y"]
    assert [each.node for each in found][:2] == ["Mul 'times'", "Add 'plus'"]
    assert all(each.max_abs == 0 for each in found if each.op_type in ("Mul", "Neg"))
    assert first_diverging(found) is None
    assert found[0].reference_max == 12


def test_the_node_that_differs_is_named_and_what_follows_inherits(tmp_path):
    found = drift(chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx", offset=3.0), {"x": X})
    first = first_diverging(found)
    assert first is not None
    assert first.node == "Add 'plus'"
    assert first.max_abs == 2
    assert first.scaled == pytest.approx(2 / 13)
    assert str(first) == "Add 'plus': off by 0.15 of its magnitude"
    assert worst_first(found)[0].node in ("Add 'plus'", "Cast 'cast'")
    assert gains(found)["y"] == 0
    assert gains(found)["m:0"] == 0


def test_integers_differ_exactly(tmp_path):
    found = drift(chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx", shift=1), {"x": X})
    first = first_diverging(found)
    assert first is not None
    assert first.node == "Add 'shift'"
    assert first.differs
    assert first.differs in str(first)


def test_what_is_no_longer_finite_comes_first(tmp_path):
    found = drift(chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx", scale=np.inf), {"x": X})
    first = first_diverging(found)
    assert first is not None
    assert (first.node, first.inf, first.nan) == ("Mul 'times'", 6, 0)
    assert "infinite" in str(first)
    assert worst_first(found)[0].node == "Mul 'times'"


def test_another_shape_is_said(tmp_path):
    one = save(model([node("Flatten", ["x"], ["y"], axis=1, name="flat")], [value("x")], [value("y", shape=None)]),
               tmp_path / "a.onnx")  # fmt: skip
    other = save(model([node("Flatten", ["x"], ["y"], axis=0, name="flat")], [value("x")], [value("y", shape=None)]),
                 tmp_path / "b.onnx")  # fmt: skip
    first = first_diverging(drift(one, other, {"x": X}))
    assert first is not None
    assert "shape differs" in first.differs
    assert first.severity == float("inf")


def test_half_precision_is_compared_by_value_and_feeds_are_cast(tmp_path):
    half = model([node("Mul", ["x", "scale"], ["y"], name="times")], [value("x", TensorProto.FLOAT16)],
                 [value("y", TensorProto.FLOAT16)], [const("scale", 2.0, np.float16)])  # fmt: skip
    full = model([node("Mul", ["x", "scale"], ["y"], name="times")], [value("x")], [value("y")], [const("scale", 2.0)])
    feeds = {"x": np.full((1, 3), 1.0001, np.float32)}
    found = drift(save(full, tmp_path / "a.onnx"), save(half, tmp_path / "b.onnx"), feeds)
    assert len(found) == 1
    assert found[0].max_abs == pytest.approx(2e-4, rel=1e-2)
    assert not found[0].differs


@pytest.mark.parametrize("limits", [{"max_chunk": 1}, {"chunk_bytes": 1}])
def test_small_chunks_give_the_same(tmp_path, limits):
    one, other = chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx", offset=3.0)
    assert drift(one, other, {"x": X}, **limits) == drift(one, other, {"x": X})


def test_external_data_is_found_from_another_folder(tmp_path, monkeypatch):
    weight = np.arange(300, dtype=np.float32).reshape(3, 100)
    proto = model([node("MatMul", ["x", "w"], ["y"], name="layer")], [value("x")], [value("y", shape=("n", 100))],
                  [const("w", weight)])  # fmt: skip
    inline = save(proto, tmp_path / "inline.onnx")
    (tmp_path / "elsewhere").mkdir()
    ir.save(ir.load(inline), tmp_path / "elsewhere" / "m.onnx", external_data="m.data")
    monkeypatch.chdir(tmp_path)
    assert onnx.load("elsewhere/m.onnx", load_external_data=False).graph.initializer[0].data_location == 1
    found = drift(inline, tmp_path / "elsewhere" / "m.onnx", {"x": X})
    assert [each.max_abs for each in found] == [0.0]


def test_a_model_that_does_not_load_is_an_error(tmp_path):
    bad = save(model([node("NoSuchOperator", ["x"], ["y"])], [value("x")], [value("y")]), tmp_path / "b.onnx")
    with pytest.raises(ModelError, match="can't load"):
        drift(bad, bad, {"x": X})
    one = chain(tmp_path / "a.onnx")
    with pytest.raises(ModelError, match="can't run"):
        drift(one, one, {"x": X.astype(np.float32)[0, 0]})
