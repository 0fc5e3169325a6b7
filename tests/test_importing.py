"""Verdicts from other machines are taken as far as they can be checked, and no further."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packager
from packager.cli import _run
from tests import builders


@pytest.fixture
def bundle(tiny: str, tmp_path: Path) -> Path:
    """A verified bundle; its own verdict.json stands for the one a partner sends back."""
    builders.relu(tmp_path / "relu.onnx")
    assert packager.build(tmp_path / "relu.onnx", targets=[tiny], out=tmp_path / "dist").exit_code == 0
    return tmp_path / "dist/relu-0.0.0-tiny"


def sent(bundle: Path, change: Callable[[dict[str, Any]], object] = lambda document: None) -> Path:
    document = json.loads((bundle / "verdict.json").read_text())
    document["runtime"]["device"] = "a phone"
    change(document)
    path = bundle.parent / "sent.json"
    path.write_text(json.dumps(document))
    return path


def test_a_partners_verdict_is_taken(bundle: Path, capsys: pytest.CaptureFixture[str]):
    path = sent(bundle)
    assert _run(["verify", str(bundle), "--import", str(path)]) == 0
    assert "passed at level runtime, 3 cases, max abs 0" in capsys.readouterr().out
    written = json.loads((bundle / "verdict.json").read_text())
    assert written["imported"] is True and written["runtime"]["device"] == "a phone"


def outputs(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["cases"][1]["outputs"][0]
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(bundle_digest="sha256:0"), "a verdict of another bundle"),
        (lambda d: d["cases"].pop(), "golden case 'synthesised-2' was not run"),
        (lambda d: d["cases"][0]["outputs"].clear(), "output 'y': was not compared"),
        (lambda d: d.update(status="failed"), "it says so itself"),
        (lambda d: outputs(d).update(passed=False), "output 'y': failed"),
        (lambda d: outputs(d)["metrics"].update(max_abs=0.9, scaled=0.5), "claims to have passed with scaled 0.5"),
        (lambda d: outputs(d)["metrics"].update(compared=0), "nothing was compared"),
        (lambda d: outputs(d)["metrics"].update(scaled="inf"), "malformed"),
        (lambda d: d.pop("cases"), "malformed"),
        (lambda d: d.update(level="divine"), "malformed"),
        (lambda d: d.update(level="none"), "was not executed there"),
        (lambda d: d.update(schema="x"), "not a verdict of schema"),
    ],
)
def test_a_forged_or_incomplete_verdict_is_refused(
    bundle: Path, change: Callable[[dict[str, Any]], object], words: str
):
    before = (bundle / "verdict.json").read_text()
    result = packager.verify(bundle, imported=sent(bundle, change))
    assert result.exit_code == 6 and result.error is not None and words in result.error.message
    assert (bundle / "verdict.json").read_text() == before


def test_a_verdict_for_a_damaged_bundle_is_refused(bundle: Path):
    path = sent(bundle)
    (bundle / "model.onnx").write_bytes(b"x")
    result = packager.verify(bundle, imported=path)
    assert result.exit_code == 6 and result.error is not None and "model.onnx" in result.error.message


def test_a_missing_file_and_several_bundles_are_usage(bundle: Path):
    assert packager.verify(bundle, imported=bundle / "absent.json").exit_code == 2
    assert _run(["verify", str(bundle), str(bundle), "--import", str(sent(bundle))]) == 2
