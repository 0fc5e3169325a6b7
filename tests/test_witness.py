"""Where ONNX Runtime and ONNX's own evaluator disagree, the output and its node are named; small models only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from packager import witness
from packager.goldens import GoldenCase
from packager.model import open_model
from packager.policy import rules_for
from packager.reference import OrtSession, ReferenceJob, SynthesisSettings, answer
from tests import builders

RNG = np.random.default_rng(0)


def resize(path: Path, mode: str) -> Path:
    """Four samples in a row made 2.4, so 2: with aligned corners the standard scales by 1.4/3, ONNX Runtime by 1/3."""
    node = helper.make_node(
        "Resize", ["x", "", "scales"], ["y"], name="shrink", mode=mode, coordinate_transformation_mode="align_corners"
    )
    scales = helper.make_tensor("scales", TensorProto.FLOAT, [4], [1.0, 1.0, 0.6, 0.6])
    made = builders.model(
        [node], [builders.value("x", shape=[1, 1, 2, 4])], [builders.value("y", shape=[1, 1, 1, 2])], [scales], opset=19
    )
    return builders.save(made, path)


def job(model: Path, out: Path) -> ReferenceJob:
    return ReferenceJob(model, None, SynthesisSettings(2), (), False, "default-1", "fp32", out)


def test_a_disagreement_is_a_hazard_that_names_output_and_node(tmp_path: Path):
    found = answer(job(resize(tmp_path / "m.onnx", "linear"), tmp_path / "out")).hazards
    (hazard,) = [each for each in found if each.code == witness.CODE]
    assert "on output 'y', made by node Resize 'shrink', in golden case" in hazard.message
    assert "scaled error" in hazard.message and hazard.hint is not None


def test_agreement_is_no_hazard(tmp_path: Path):
    assert answer(job(builders.relu(tmp_path / "m.onnx"), tmp_path / "out")).hazards == ()


@pytest.mark.parametrize("limit", ["MAX_BYTES", "MAX_NODES", "MAX_ELEMENTS"])
def test_larger_models_are_not_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str):
    path = resize(tmp_path / "m.onnx", "linear")
    model, session = open_model(path), OrtSession(path, quantized=False)
    feeds = {"x": np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4)}
    answered = [(GoldenCase("c", feeds), session.run(feeds, ["y"], "c"))]
    rules = rules_for("default-1", "fp32", model)
    assert len(witness.disputes(model, path, answered, rules, 0.0)) == 1
    assert witness.disputes(model, path, answered, rules, 2 * witness.MAX_REFERENCE_SECONDS) == []
    monkeypatch.setattr(witness, limit, 0)
    assert witness.disputes(model, path, answered, rules, 0.0) == []
