"""What int8 can't bear stays in float: found by leaving nodes out, named with what they cost, bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from packager.errors import Refused
from packager.goldens import GoldenCase, GoldenSet
from packager.parity import OutputRule, Tolerance
from packager.transform import Context
from packager.transform_int8 import Int8Dynamic, Int8Static
from packager.transform_int8_search import MAX_FLOAT_SHARE
from tests.builders import model, save, value

node = helper.make_node
RNG = np.random.default_rng(7)
WIDE = RNG.normal(0, 0.1, (64, 64)).astype(np.float32)
LAST = RNG.normal(0, 1, (64, 8)).astype(np.float32)
OUTLIER = np.ones(64, np.float32)
OUTLIER[5] = 3000
LAST[5] /= 3000
X = RNG.uniform(-1, 1, (6, 64)).astype(np.float32)


def const(name, array):
    return numpy_helper.from_array(np.asarray(array, np.float32), name)


def sensitive(wide: int = 2):
    """Layers that bear int8, then one whose input has a channel 3000 times larger than what counts."""
    nodes = [node("MatMul", [f"h{index}" if index else "x", "w"], [f"h{index + 1}"], name=f"wide{index}")
             for index in range(wide)]  # fmt: skip
    nodes += [
        node("Mul", [f"h{wide}" if wide else "x", "outlier"], ["s"], name="stretch"),
        node("MatMul", ["s", "v"], ["y"], name="last:0"),
    ]
    weights = [const("w", WIDE), const("outlier", OUTLIER), const("v", LAST)]
    return model(nodes, [value("x", shape=("n", 64))], [value("y", shape=("n", 8))], weights[0 if wide else 1 :])


def convert(proto, tmp_path: Path, settings, rules=None):
    source, folder = save(proto, tmp_path / "m.onnx"), tmp_path / "work"
    folder.mkdir(exist_ok=True)
    goldens = GoldenSet((GoldenCase("0", {"x": X}),))
    return settings.run(ir.load(source), Context(source, folder, goldens, rules))


@pytest.mark.parametrize("settings", [Int8Dynamic(), Int8Static()])
def test_the_node_that_costs_most_stays_in_float_and_is_named(tmp_path, settings):
    made = convert(sensitive(), tmp_path, settings)
    assert made.notes[0].startswith("quantised operators: ")
    assert made.notes[1].startswith("kept in float: MatMul 'last:0' (int8 costs ")
    assert "stay in float, so that the outputs hold" in made.notes[-1]
    ir.save(made.model, tmp_path / "small.onnx")
    onnx.checker.check_model(str(tmp_path / "small.onnx"), full_check=True)
    found = {one.name: one for one in onnx.load(tmp_path / "small.onnx").graph.node}
    assert found["last:0"].op_type == "MatMul" and list(found["last:0"].input)[1] == "v"
    again = convert(sensitive(), tmp_path, settings)
    ir.save(again.model, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "small.onnx").read_bytes()


@pytest.mark.parametrize("settings", [Int8Dynamic(), Int8Static()])
def test_without_search_it_is_left_to_the_verdict(tmp_path, settings):
    made = convert(sensitive(), tmp_path, type(settings)(search=False))
    assert len(made.notes) == 1


@pytest.mark.parametrize("settings", [Int8Dynamic(), Int8Static()])
def test_where_too_much_would_stay_in_float_it_is_refused_by_node(tmp_path, settings):
    """With the sensitive layer as the only one, keeping it leaves more float than fp16 would take."""
    assert MAX_FLOAT_SHARE < 1
    with pytest.raises(Refused, match=r"drifts past what int8-.* may cost .*cosine") as caught:
        convert(sensitive(wide=0), tmp_path, settings)
    assert "'last:0'" in caught.value.message
    assert "`keep`" in (caught.value.hint or "")


def test_the_rules_that_judge_the_bundle_judge_the_search(tmp_path):
    loose = {"y": OutputRule(Tolerance(scaled=10.0))}
    assert len(convert(sensitive(), tmp_path, Int8Dynamic(), loose).notes) == 1
    with pytest.raises(Refused, match="over 1e-09"):
        convert(sensitive(), tmp_path, Int8Dynamic(), {"y": OutputRule(Tolerance(scaled=1e-9))})
