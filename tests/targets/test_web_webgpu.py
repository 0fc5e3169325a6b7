"""The WebGPU build beside the WASM one: smoke-run in software, told apart from the verdict."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from packager import golden_store
from packager.errors import VerificationError
from packager.goldens import GoldenCase, GoldenSet
from packager.parity import OutputRule, Tolerance
from packager.targets import web as room
from packager.targets.web import runtime, webgpu
from tests.builders import STRING, model, relu, save, value
from tests.targets.test_web import bundle, needs_browser, needs_node, plan_of, reseal, without_browser
from tests.targets.test_web_loader import in_node

RULES = {"y": OutputRule(Tolerance(max_abs=1e-3))}
X = np.array([[1, -2, 3]], np.float32)


def with_golden(folder: Path, path: Path, x: np.ndarray, y: np.ndarray) -> Path:
    case = GoldenCase("one", {"x": x}, {"y": y}, "made", "made")
    golden_store.write(folder / "golden", GoldenSet((case,)), RULES, policy="p", precision="fp32", excluded={})
    return reseal(folder, plan_of(path, webgpu=True))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with both builds and one golden case; never changed."""
    path = relu(tmp_path_factory.mktemp("both") / "m.onnx")
    return with_golden(bundle(path, webgpu=True), path, X, np.maximum(X, 0))


@needs_browser
def test_the_smoke_run_is_a_line_of_its_own(both: Path):
    with room.runner(both) as runner:
        outputs = runner.run({"x": X})
        info = runner.info
    assert outputs["y"].tolist() == [[1, 0, 3]]
    details = dict(info.details)
    assert re.match("case 'one' passed on a software adapter without the CPU, max abs 0$", details["webgpu"]) or (
        details["webgpu"].startswith("not run: This browser offers no WebGPU adapter")
    )
    assert (info.level, info.device) == ("runtime", "1 and 2 threads"), "the verdict is that of WASM"
    if "passed" in details["webgpu"]:
        assert {f"served webgpu/{name}" for name in runtime.WEBGPU.values()} <= set(details)


@needs_browser
def test_wrong_answers_on_webgpu_fail_the_bundle(both: Path, tmp_path: Path):
    """The golden case says otherwise than the model: the smoke run must notice before any case is run on WASM."""
    folder = Path(shutil.copytree(both, tmp_path / "bundle"))
    with_golden(folder, folder / "model.onnx", X, np.maximum(X, 0) + 1)
    words = "on WebGPU the bundle's answers are not its goldens: case 'one'"
    with pytest.raises(VerificationError, match=words), room.runner(folder):
        pass


@needs_browser
def test_a_missing_file_of_the_webgpu_build_fails_the_bundle(both: Path, tmp_path: Path):
    folder = Path(shutil.copytree(both, tmp_path / "bundle"))
    (folder / "webgpu/ort-wasm-simd-threaded.asyncify.wasm").unlink()
    reseal(folder, plan_of(folder / "model.onnx", webgpu=True))
    with pytest.raises(VerificationError, match=r"asyncify\.wasm: the server answered 404"), room.runner(folder):
        pass


@needs_browser
def test_a_model_that_needs_the_cpu_is_said_to(tmp_path: Path):
    nodes = [helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="UPPER")]
    path = save(model(nodes, [value("x", STRING, ["n"])], [value("y", STRING, ["n"])]), tmp_path / "m.onnx")
    texts = np.array(["a"], object)
    folder = with_golden(bundle(path, webgpu=True), path, texts, np.array(["A"], object))
    with room.runner(folder) as runner:
        assert runner.run({"x": texts})["y"].tolist() == ["A"]
        said = dict(runner.info.details)["webgpu"]
    assert said.startswith("not run: ") and ("StringNormalizer" in said or "adapter" in said), said


def test_without_a_browser_it_is_not_run(both: Path, monkeypatch: pytest.MonkeyPatch):
    with without_browser(monkeypatch), room.runner(both) as runner:
        assert dict(runner.info.details)["webgpu"] == "not run: there is no browser here"


def test_the_types_have_the_backend_only_where_it_ships(both: Path, tmp_path: Path):
    plain = bundle(relu(tmp_path / "m.onnx"))
    for folder, ships in ((both, True), (plain, False)):
        assert ('backend?: "wasm" | "webgpu"' in (folder / "m.d.ts").read_text()) == ships
        assert ("requestAdapter" in (folder / "m.js").read_text()) == ships
        assert webgpu.WEBGPU_FOLDER in {path.name for path in folder.iterdir()} or not ships
    assert "webgpu/ort.webgpu.min.js" in json.loads((both / "sri.json").read_text())


@needs_node
def test_where_there_is_no_gpu_the_loader_says_that_it_fell_back(both: Path, tmp_path: Path):
    got = in_node(both, tmp_path, """
const model = await load({ backend: "webgpu" });
const { y } = await model.run({ x: [1, -2, 3] });
tell([model.backend, model.fallback, [...y.data], (await load()).fallback]);
""")  # fmt: skip
    said = "This browser offers no WebGPU adapter here; WebAssembly computes instead."
    assert got == ["wasm", said, [1, 0, 3], ""]
