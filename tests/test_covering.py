"""Coverage of targets: it says what a plan and a build then do, of the same nodes and in the same words."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import packager
from packager.coverage import Coverage, objections
from packager.covering import RULES
from packager.engine import Planned
from packager.errors import ModelError, UsageError
from packager.room import kinds
from tests.builders import FLOAT, INT64, model, relu, save, value

FIXED = [2, 3, 3]


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape), name)


def odd(path: Path) -> Path:
    """A determinant, which some targets haven't, between operators that all have."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="project"),
        helper.make_node("Det", ["h"], ["d"], name="odd one"),
        helper.make_node("Relu", ["d"], ["y"], name="act"),
    ]
    return save(model(nodes, [value("x", FLOAT, FIXED)], [value("y", FLOAT, [2])], [weight("w", 3, 3)]), path)


def newer(path: Path) -> Path:
    """TensorScatter, which came with operator set 24 and has no older form."""
    nodes = [
        helper.make_node("Abs", ["x"], ["h"], name="size"),
        helper.make_node("TensorScatter", ["h", "update", "at"], ["y"], name="scatter"),
    ]
    inputs = [value("x", FLOAT, [1, 4, 2]), value("update", FLOAT, [1, 1, 2]), value("at", INT64, [1])]
    return save(model(nodes, inputs, [value("y", FLOAT, [1, 4, 2])], opset=24, ir=11), path)


def older(path: Path) -> Path:
    """A Softmax of operator set 11 over two axes: rewritten for some, fine for all."""
    nodes = [
        helper.make_node("Softmax", ["x"], ["s"], name="soft", axis=1),
        helper.make_node("Neg", ["s"], ["y"], name="minus"),
    ]
    return save(model(nodes, [value("x", FLOAT, FIXED)], [value("y", FLOAT, FIXED)], opset=11, ir=6), path)


def agrees(coverage: Coverage, planned: Planned) -> None:
    """What the plan refuses, coverage refuses, in the same words and for the same nodes; what it plans, only the
    toolchain can refuse."""
    assert coverage.target == planned.target
    if planned.error is None:
        assert not coverage.refusal or len(coverage.judges) == 2, (coverage.target, coverage.refusal)
        return
    assert (coverage.refusal, coverage.hint) == (planned.error.message, planned.error.hint or "")
    assert coverage.judges == (RULES,)
    refused = {(each.node, each.reason) for each in objections(coverage.nodes, "refused")}
    assert refused == {(each.node, each.reason) for each in planned.error.nodes}
    others = {node.state for node in coverage.nodes} - {"refused"}
    assert refused or others == {"unjudged"}, "nobody looked at the nodes"


def compared(path: Path) -> dict[str, Coverage]:
    """Coverage by kind, held against the plans."""
    found = packager.cover(path, targets=["all"]).targets
    assert [each.target for each in found] == list(kinds())
    for coverage, planned in zip(found, packager.plan(path, targets=list(kinds())), strict=True):
        agrees(coverage, planned)
    return {each.kind: each for each in found}


def told(coverage: Coverage, *states: str) -> list[tuple[str, str]]:
    """Nodes in these states, with their reasons."""
    return [(node.node, node.reason) for node in coverage.nodes if node.state in states]


def test_a_node_that_some_have_not_is_refused_by_them_alone(tmp_path: Path) -> None:
    found = compared(odd(tmp_path / "m.onnx"))
    refused = {kind: told(each, "refused") for kind, each in found.items() if told(each, "refused")}
    assert refused == {
        "openvino": [("Det 'odd one'", "OpenVINO has no conversion rule for it")],
        "tensorrt": [("Det 'odd one'", "it has no importer for the operator")],
    }
    assert told(found["ios"], "fallback") == [("Det 'odd one'", "the provider has no Det")]
    for kind in ("cpu", "web", "triton"):
        assert found[kind].counts()["supported"] == 3 and found[kind].verdict == "builds"
    assert len(found["tensorrt"].judges) == 2, "its plan takes the model, its parser doesn't"


def test_a_node_that_can_not_be_lowered_is_refused_by_its_transform(tmp_path: Path) -> None:
    found = compared(newer(tmp_path / "m.onnx"))
    for kind in ("npu", "triton"):
        assert told(found[kind], "refused") == [("TensorScatter 'scatter'", "the operator begins at 24")]
        assert told(found[kind], "unjudged") == [("Abs 'size'", "")] and found[kind].hint.endswith("operator set 21")
    assert found["web"].verdict == found["cpu"].verdict == "builds"


def test_what_is_rewritten_is_told_by_transforms_and_by_rooms(tmp_path: Path) -> None:
    found = compared(older(tmp_path / "m.onnx"))
    assert not any(each.refusal for each in found.values())
    (soft,) = told(found["openvino"], "rewritten")
    assert soft[0] == "Softmax 'soft'" and "takes over one axis only" in soft[1]


def test_free_dims_refuse_a_model_before_its_nodes_are_looked_at(tmp_path: Path) -> None:
    found = compared(relu(tmp_path / "m.onnx"))
    assert found["npu"].counts()["unjudged"] == 1 and "fixed shapes" in found["npu"].verdict
    assert "shapes = { n = " in found["npu"].hint


@pytest.mark.parametrize("name", ["surrogate_classifier", "silero_vad_16k"])
def test_coverage_agrees_with_the_plan_on_real_models(name: str, corpus: Path) -> None:
    found = compared(corpus / f"{name}.onnx")
    assert found["cpu"].verdict.startswith("builds") and not told(found["cpu"], "refused", "unjudged")
    nodes = [node for node in packager.inspect(corpus / f"{name}.onnx").structure.walk() if node.op_type != "Constant"]
    assert len(found["cpu"].nodes) == len(nodes)


def test_a_toolchain_that_is_absent_is_told_and_the_rest_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "openvino":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (found,) = packager.cover(older(tmp_path / "m.onnx"), targets=["openvino"]).targets
    ((what, how),) = found.missing
    assert "openvino" in what and how == "pip install 'packager[openvino]'"
    assert found.judges == (RULES,) and found.verdict.startswith("plans") and not found.refusal
    assert found.counts()["supported"] == 1 and found.counts()["rewritten"] == 1


def test_a_third_partys_room_is_covered_by_its_plan(tiny: str, tmp_path: Path) -> None:
    path = relu(tmp_path / "m.onnx")
    (found,) = packager.cover(path, targets=[tiny]).targets
    assert found.counts()["supported"] == 1 and found.verdict == "builds" and found.judges == (RULES,)
    manifest = tmp_path / "packager.toml"
    manifest.write_text('[model]\npath = "m.onnx"\n[targets.tiny]\nfault = "refuse"\n[targets.other]\nkind = "tiny"\n')
    refused, other = packager.cover(manifest=manifest, targets=["all"]).targets
    assert refused.refusal == "tiny can't take node Relu 'act'" and refused.hint == "choose another target"
    assert refused.counts()["unjudged"] == 1, "the error doesn't say as data which node it means"
    assert other.verdict == "builds"


def test_a_model_that_is_refused_for_all_is_no_coverage(tmp_path: Path) -> None:
    path = odd(tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelError, match="not a whole ONNX model"):
        packager.cover(path, targets=["all"])
    with pytest.raises(UsageError, match="unknown target or kind 'nowhere'"):
        packager.cover(odd(path), targets=["nowhere"])
