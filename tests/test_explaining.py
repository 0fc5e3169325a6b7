"""`packager explain`: drift by node, of the transform and of the target, apart from each other."""

from __future__ import annotations

from pathlib import Path

import pytest

import packager
from packager.cli import _run
from packager.errors import GoldenError, Refused
from tests import builders
from tests.test_dialect import build, dense


def test_both_drifts_are_ranked_by_node(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = dense(tmp_path / "m.onnx")
    _, result = build(path, tmp_path / "dist", "fp16")
    bundle = tmp_path / f"dist/{result.bundle}"
    found = packager.explain(bundle, path)
    assert {drift.tensor for drift in found.transform} == {"m", "a", "y"}
    assert all(drift.scaled is not None and 0 < drift.scaled < 1e-2 for drift in found.transform)
    assert {"m", "a"} <= {drift.tensor for drift in found.target}
    assert all(drift.scaled is None or drift.scaled < 1e-2 for drift in found.target)
    assert len(packager.explain(bundle, path, most=1).transform) == 1
    assert _run(["explain", str(bundle), "--model", str(path)]) == 0
    said = capsys.readouterr().out
    assert "what transforms cost" in said and "MatMul 'mul'" in said


def test_without_transforms_only_the_target_can_drift(tiny: str, tmp_path: Path):
    path = dense(tmp_path / "m.onnx")
    _, result = build(path, tmp_path / "dist", "fp32")
    found = packager.explain(tmp_path / f"dist/{result.bundle}", path)
    assert found.transform == () and "not transformed" in found.notes[0]
    assert all((drift.max_abs or 0.0) < 1e-4 for drift in found.target)


def test_another_model_and_an_unknown_case_are_refused(tiny: str, tmp_path: Path):
    path = dense(tmp_path / "m.onnx")
    _, result = build(path, tmp_path / "dist", "fp32")
    bundle = tmp_path / f"dist/{result.bundle}"
    with pytest.raises(Refused, match="not the model"):
        packager.explain(bundle, builders.relu(tmp_path / "other.onnx"))
    with pytest.raises(GoldenError, match="no golden case 'x'"):
        packager.explain(bundle, path, case="x")
