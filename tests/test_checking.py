"""What onnx itself says of a model: told with the node, and nothing said of models that are well."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

import packager
from packager.checking import contradictions, objection, static_hazards
from packager.errors import ModelError
from packager.model import open_model
from tests.builders import FLOAT, INT64, model, relu, save, value


def node(operator: str, *names: str, name: str = "", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(operator, [names[0]], [names[1]], name=name, **attributes)


def hazards(folder: Path, *nodes: onnx.NodeProto, out: int = FLOAT, between: object = None, **options) -> list[str]:
    """What is told of a chain from x to y, both of [2, 3]."""
    proto = model(nodes, [value("x", FLOAT, [2, 3])], [value("y", out, [2, 3])], **options)
    if between is not None:
        proto.graph.value_info.append(value("h", FLOAT, between))  # type: ignore[arg-type]
    return [hazard.message for hazard in static_hazards(open_model(save(proto, folder / "m.onnx")))]


def test_a_stale_shape_between_nodes_is_named_with_its_node(tmp_path: Path) -> None:
    chain = (node("Relu", "x", "h", name="act"), node("Neg", "h", "y"))
    first, second = hazards(tmp_path, *chain, between=[2, 4])
    assert first == (
        "a declared shape or dtype contradicts what follows: node Relu 'act': Inferred shape and existing shape differ "
        "in dimension 1: (3) vs (4)"
    )
    assert "node Neg (unnamed, makes 'y'): Inferred shape" in second
    assert hazards(tmp_path, *chain, between=[2, 3]) == hazards(tmp_path, *chain, between=["n", 3]) == []


def test_a_dtype_that_contradicts_is_named_with_its_node(tmp_path: Path) -> None:
    (told,) = hazards(tmp_path, node("Relu", "x", "y", name="act"), out=INT64)
    assert "node Relu 'act': Inferred elem type differs from existing elem type: (1) vs (7)" in told


def test_an_attribute_that_the_schema_has_not_is_named_with_its_node(tmp_path: Path) -> None:
    (told,) = hazards(tmp_path, node("Relu", "x", "y", name="act", slope=1))
    assert told.startswith("the onnx checker objects: Unrecognized attribute: slope for operator Relu")
    assert "Name: act" in told


def test_what_every_runtime_takes_is_no_hazard(tmp_path: Path) -> None:
    proto = model([node("Relu", "x", "y")], [value("x", FLOAT, None)], [value("y", FLOAT, None)])
    path = save(proto, tmp_path / "m.onnx")
    assert "Field 'shape'" in objection(path) and static_hazards(open_model(path)) == []
    own = node("Foo", "x", "h", name="own", domain="com.example")
    assert hazards(tmp_path, own, node("Relu", "h", "y"), domains=[("com.example", 1)]) == []


def test_a_model_newer_than_the_installed_onnx_is_left_alone(tmp_path: Path) -> None:
    assert hazards(tmp_path, node("Relu", "x", "y", slope=1), opset=onnx.defs.onnx_opset_version() + 1) == []


def test_a_message_of_another_form_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise onnx.shape_inference.InferenceError("no\n such form")

    path = relu(tmp_path / "m.onnx")
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", fail)
    assert list(contradictions(path, open_model(path).structure)) == ["no such form"]


def test_a_manifest_may_refuse_such_models(tmp_path: Path) -> None:
    chain = (node("Relu", "x", "h", name="act"), node("Neg", "h", "y"))
    hazards(tmp_path, *chain, between=[2, 4])
    (tmp_path / "packager.toml").write_text(
        '[model]\npath = "m.onnx"\n[targets.web]\n[gates]\nhazards = "refuse"\n', encoding="utf-8"
    )
    with pytest.raises(ModelError, match=r"node Relu 'act': Inferred shape .*\[shape\]"):
        packager.build(manifest=tmp_path / "packager.toml", out=tmp_path / "dist", cache=False)


def test_real_models_raise_no_alarm(corpus: Path) -> None:
    paths = sorted(corpus.glob("*.onnx"))
    assert len(paths) > 10
    assert [hazard.message for path in paths for hazard in static_hazards(open_model(path))] == []
