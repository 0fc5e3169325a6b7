"""The web room from end to end: what is built answers rightly in a browser or doesn't pass."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

import packager
from packager.cli import _run
from packager.results import Report, TargetResult
from tests.builders import FLOAT, model, relu, save, value
from tests.sealing import reseal
from tests.targets.test_web import needs_browser
from tests.targets.test_web_pages import opened

MODELS = ["orientation", "file_type", "traffic_decoder", "french_forms"]
"""A CNN, an encoder of integers, trees in double precision, and int8 with a GRU."""


def build(path: Path, out: Path, **more) -> tuple[Report, TargetResult]:
    report = packager.build(path, targets=["web"], out=out, cache=False, **more)
    return report, report.targets[0]


@needs_browser
@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_passes_or_is_refused_with_the_reason(corpus: Path, tmp_path: Path, name: str):
    report, result = build(corpus / f"{name}.onnx", tmp_path / "dist")
    if result.status != "passed":
        assert (result.status, result.exit_code) == ("refused", 3), result.message
        assert "output" in result.message or "operator set" in result.message
        return
    assert report.exit_code == 0 and result.verdict is not None
    verdict = result.verdict
    assert (verdict.level, verdict.device, verdict.cases) == ("runtime", "1 and 2 threads", 3)
    assert verdict.runtime == "onnxruntime-web 1.30.0 in Chromium" and int(verdict.version.split(".")[0]) > 100
    document = json.loads((tmp_path / f"dist/{name}-0.0.0-web/verdict.json").read_text())
    digest = hashlib.sha256((tmp_path / f"dist/{name}-0.0.0-web/model.onnx").read_bytes()).hexdigest()
    assert document["runtime"]["served model.onnx"] == f"sha256:{digest}"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of ``y = x @ w`` whose weights can be told apart in ``model.onnx``."""
    folder = tmp_path_factory.mktemp("dense")
    weights = np.array([[0.7311, -1.25], [2.5, 0.125], [-0.875, 1.75]], np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="project")]
    proto = model(nodes, [value("x")], [value("y", FLOAT, ["n", 2])], [numpy_helper.from_array(weights, "w")])
    _, result = build(save(proto, folder / "dense.onnx"), folder / "dist")
    assert result.status == "passed", result.message
    return folder / "dist/dense-0.0.0-web"


@pytest.fixture
def bundle(dense: Path, tmp_path: Path) -> Path:
    """A copy of it to harm."""
    return Path(shutil.copytree(dense, tmp_path / "bundle"))


def change_a_weight(bundle: Path) -> list[str]:
    path = bundle / "model.onnx"
    old, new = np.float32(0.7311).tobytes(), np.float32(0.7411).tobytes()
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return ["model.onnx"]


def html_for_wasm(bundle: Path) -> list[str]:
    (bundle / "runtime/ort-wasm-simd-threaded.wasm").write_text("<!doctype html><title>Home</title>")
    return ["runtime/ort-wasm-simd-threaded.wasm"]


def another_model(bundle: Path) -> list[str]:
    weights = numpy_helper.from_array(np.ones((3, 2), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="project")]
    save(model(nodes, [value("x")], [value("y", FLOAT, ["n", 2])], [weights]), bundle / "model.onnx")
    return ["model.onnx"]


def no_glue(bundle: Path) -> list[str]:
    (bundle / "runtime/ort-wasm-simd-threaded.js").unlink()
    return ["runtime/ort-wasm-simd-threaded.js"]


HARM: list[Callable[[Path], list[str]]] = [change_a_weight, html_for_wasm, another_model, no_glue]


@needs_browser
@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
def test_what_was_changed_is_named(bundle: Path, harm: Callable[[Path], list[str]]):
    (changed,) = harm(bundle)
    result = packager.verify(bundle)
    assert result.exit_code == 6 and result.error is not None
    assert f"{changed} (" in result.error.message


@needs_browser
@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
def test_what_was_changed_is_named_under_a_new_seal_too(bundle: Path, harm: Callable[[Path], list[str]]):
    changed = harm(bundle)
    reseal(bundle)
    result = packager.verify(bundle)
    assert result.exit_code == 6 and result.error is not None
    assert changed[0] in result.error.message, "the loader names the file"


@needs_browser
def test_a_changed_weight_whose_digest_was_forged_fails_by_its_answers(bundle: Path):
    before = hashlib.sha256((bundle / "model.onnx").read_bytes()).hexdigest()
    change_a_weight(bundle)
    loader = bundle / "dense.js"
    after = hashlib.sha256((bundle / "model.onnx").read_bytes()).hexdigest()
    loader.write_text(loader.read_text().replace(before, after))
    reseal(bundle)
    result = packager.verify(bundle)
    assert result.exit_code == 6 and result.error is None
    assert result.verdict is not None and "output 'y': max abs" in result.verdict.failures[0]


@needs_browser
@pytest.mark.parametrize("precision", ["fp16", "int8-dynamic"])
def test_a_smaller_precision_passes_and_says_what_it_cost(corpus: Path, tmp_path: Path, precision: str):
    manifest = tmp_path / "packager.toml"
    (tmp_path / "m.onnx").write_bytes((corpus / "file_type.onnx").read_bytes())
    manifest.write_text(f'[model]\npath = "m.onnx"\n[targets.web]\nprecision = "{precision}"\n')
    report = packager.build(manifest=manifest, out=tmp_path / "dist", cache=False)
    (result,) = report.targets
    assert result.status == "passed", result.message
    assert result.verdict is not None and result.verdict.transform is not None
    small = (tmp_path / "dist/m-0.0.0-web/model.onnx").stat().st_size
    assert small < 0.6 * (tmp_path / "m.onnx").stat().st_size


@needs_browser
def test_a_model_just_above_the_limit_is_lowered_and_it_is_said(tmp_path: Path):
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="act")]
    path = save(model(nodes, [value("x")], [value("y")], opset=27, ir=13), tmp_path / "new.onnx")
    _, result = build(path, tmp_path / "dist")
    assert result.status == "passed", result.message
    document = json.loads((tmp_path / "dist/new-0.0.0-web/bundle.json").read_text())
    assert any("26" in str(step["settings"]) for step in document["plan"]["steps"])


@needs_browser
def test_a_verdict_saved_from_the_page_is_taken_back_by_this_bundle_only(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """As a partner does it: the page is opened, the button pressed, the file saved and sent."""
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    said = opened(bundle.parent, "bundle/verify/", {}, downloads)
    assert said.startswith("passed: 3 cases"), said
    saved = downloads / "selfcheck.json"
    assert _run(["verify", str(bundle), "--import", str(saved)]) == 0
    assert "passed at level runtime, 3 cases" in capsys.readouterr().out
    written = json.loads((bundle / "verdict.json").read_text())
    assert written["imported"] is True and "user_agent" in written["host"]
    assert written["runtime"]["name"].startswith("onnxruntime-web 1.30.0 in ")
    other = relu(tmp_path / "dense.onnx")
    _, result = build(other, tmp_path / "dist")
    assert result.status == "passed"
    refused = packager.verify(tmp_path / "dist/dense-0.0.0-web", imported=saved)
    assert refused.exit_code == 6 and refused.error is not None
    assert "a verdict of another bundle" in refused.error.message
