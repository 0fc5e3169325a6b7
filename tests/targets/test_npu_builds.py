"""The NPU from end to end: quantised, compiled by QNN and run in its emulator, harmed, and a real model."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import packager
from packager.parity import Tolerance, read_golden
from packager.render import c_string
from packager.results import Report, TargetResult
from packager.targets.npu import infer
from tests.builders import BOOL, FLOAT, INT32, INT64, model, save, value
from tests.sealing import reseal

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(5)
PIXELS = RNG.uniform(-1, 1, (3, 1, 2, 6, 6)).astype(np.float32)
X, CLASS, SCORE = "pixels 'of' \"x\"", "名前\nclass", "sco\\re"


def weights(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(RNG.normal(size=shape).astype(np.float32), name)


def network(folder: Path, rows: int | str = 1) -> Path:
    """A convolution with batch normalisation, a float and an integer output, and names that are hard to write."""
    nodes = [
        helper.make_node("Conv", [X, "w"], ["a"], name="conv"),
        helper.make_node("BatchNormalization", ["a", "s", "b", "m", "v"], ["n"], name="norm"),
        helper.make_node("HardSwish", ["n"], ["h"], name="swish"),
        helper.make_node("GlobalAveragePool", ["h"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flat"),
        helper.make_node("MatMul", ["f", "d"], ["l"], name="dense"),
        helper.make_node("Softmax", ["l"], [SCORE], name="softmax"),
        helper.make_node("ArgMax", ["l"], [CLASS], name="best", axis=1),
    ]
    shape = numpy_helper.from_array
    statistics = [shape(np.abs(RNG.normal(size=4)).astype(np.float32) + 0.5, name) for name in "sbmv"]
    held = [weights("w", 4, 2, 3, 3), *statistics, weights("d", 4, 3)]
    outputs = [value(SCORE, FLOAT, [rows, 3]), value(CLASS, INT64, [rows, 1])]
    path = save(model(nodes, [value(X, FLOAT, [rows, 2, 6, 6])], outputs, held), folder / "net.onnx")
    (folder / "goldens").mkdir(exist_ok=True)
    for number, pixels in enumerate(PIXELS):
        np.savez(folder / f"goldens/{number}.npz", **{X: pixels})
    return path


def build(
    folder: Path, target: str = "", path: str = "net.onnx", golden: str | None = "goldens"
) -> tuple[Report, TargetResult]:
    """Build ``path`` for a target of kind npu with these settings; output goes to ``folder/dist``."""
    text = f'[model]\npath = "{path}"\n' + (f'[golden]\npath = "{golden}"\n' if golden else "")
    (folder / "packager.toml").write_text(f"{text}[targets.npu]\n{target}\n", encoding="utf-8")
    report = packager.build(manifest=folder / "packager.toml", out=folder / "dist", cache=False)
    return report, report.targets[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetResult]:
    folder = tmp_path_factory.mktemp("net")
    network(folder)
    before = sorted(Path().iterdir())
    _, result = build(folder, "soc_model = 52")
    assert sorted(Path().iterdir()) == before, "QNN left files in the working directory"
    assert result.status == "passed", result.message
    return folder / "dist/net-0.0.0-npu", result


@pytest.fixture
def bundle(made: tuple[Path, TargetResult], tmp_path: Path) -> Path:
    """A copy of it to harm."""
    return Path(shutil.copytree(made[0], tmp_path / "bundle"))


def test_a_network_is_compiled_and_run_in_the_emulator(made: tuple[Path, TargetResult]):
    folder, result = made
    verdict = result.verdict
    assert verdict is not None and verdict.level == "emulated" and "emulator" in verdict.level_reason
    assert (verdict.runtime, verdict.device) == ("QNN", "HTP v73 emulator")
    assert verdict.transform is not None and (verdict.transform.cosine or 0) > 0.999, "fp32 to QDQ"
    assert verdict.target is not None and (verdict.target.cosine or 0) > 0.999, "QDQ to NPU"
    parities = json.loads((folder / "verdict.json").read_text())["parities"]
    assert set(parities) == {"transformed model against reference", "bundle against transformed model"}
    golden = read_golden(folder / "golden")
    assert {rule.tolerance for rule in golden.transformed_rules.values()} == {Tolerance(scaled=3e-2, cosine=0.999)}
    assert all(set(case.transformed) == set(case.outputs) for case in golden.cases)
    sealed = json.loads((folder / "bundle.json").read_text())
    roles = {entry["path"]: entry["role"] for entry in sealed["files"]}
    assert roles["model.onnx"] == "model" and roles["model_qnn.bin"] == "context binary"
    assert roles["model.qdq.onnx"] == "fallback model" and "file" not in roles.values()
    assert not [name for name in roles if name.endswith((".so", ".dll"))], "Qualcomm's libraries are not ours to ship"
    coverage = json.loads((folder / "coverage.json").read_text())
    assert coverage["left"] == [] and coverage["parts"] == 1
    assert coverage["npu"]["Conv2d"] == 1 and "Batchnorm" not in coverage["npu"]


def test_what_ships_is_what_was_compiled(made: tuple[Path, TargetResult]):
    folder, _ = made
    (node,) = onnx.load(folder / "model.onnx").graph.node
    held = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert node.op_type == "EPContext" and held["ep_cache_context"] == b"model_qnn.bin" and held["embed_mode"] == 0
    operators = {each.op_type for each in onnx.load(folder / "model.qdq.onnx").graph.node}
    assert {"Conv", "QuantizeLinear", "DequantizeLinear"} <= operators


def test_loaders_in_other_languages_have_names_and_settings(made: tuple[Path, TargetResult]):
    folder, _ = made
    cpp = (folder / "cpp/main.cpp").read_text()
    assert c_string(X) in cpp and c_string(CLASS) in cpp and c_string(SCORE) in cpp
    assert '{"soc_model", "52"}' in cpp and '{"htp_arch", "73"}' in cpp and "zeros<float>({1, 2, 6, 6})" in cpp
    assert cpp.isascii() and 'session.disable_cpu_ep_fallback", "1"' in cpp
    kotlin = (folder / "android/NpuModel.kt").read_text()
    assert '"soc_model" to "52",' in kotlin and "com.qualcomm.qti:onnxruntime-android-qnn" in kotlin
    assert "project(npu_model" in (folder / "cpp/CMakeLists.txt").read_text()


def test_a_partner_runs_and_checks_it_without_packager(bundle: Path):
    np.savez(bundle.parent / "in.npz", **{X: PIXELS[0]})
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    code = (
        "import sys; sys.modules['packager'] = None; import runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=bundle.parent, env={**environment, "PYTHONPATH": str(bundle)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    ran = run("bundle/infer.py", "in.npz")
    assert ran.returncode == 0, ran.stderr
    assert "float32[1, 3]" in ran.stdout and "int64[1, 1]" in ran.stdout
    checked = run("bundle/verify.py", "--out", "said.json")
    assert checked.returncode == 0, checked.stderr
    said = json.loads((bundle.parent / "said.json").read_text())
    assert said["level"] == "emulated" and "no NPU was found" in said["level_reason"]
    assert {path.name for path in bundle.parent.iterdir()} <= {"bundle", "in.npz", "said.json", "cache"}


def test_the_fallback_model_answers_on_a_cpu(made: tuple[Path, TargetResult]):
    feeds = {X: PIXELS[1]}
    npu, cpu = infer.Model(made[0]), infer.Model(made[0], device="cpu")
    one, other = npu.run(feeds), cpu.run(feeds)
    np.testing.assert_allclose(one[SCORE], other[SCORE], atol=1e-2)  # the NPU rounds in its own way
    np.testing.assert_array_equal(one[CLASS], other[CLASS])
    assert (cpu.info["name"], cpu.info["device"]) == ("ONNX Runtime", "CPU")
    with pytest.raises(ValueError, match="device 'gpu' is unknown"):
        infer.Model(made[0], device="gpu")
    with pytest.raises(ValueError, match=r"float32\[1, 2, 6, 6\]"):
        npu.run({X: PIXELS[0][0]})


def test_a_tampered_binary_is_never_given_to_qnn(bundle: Path):
    data = bytearray((bundle / "model_qnn.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / "model_qnn.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"model_qnn\.bin was changed since it was sealed"):
        infer.Model(bundle)
    found = packager.verify(bundle)
    assert found.exit_code == 6 and found.error is not None
    assert "model_qnn.bin (context binary) was changed: its SHA-256 is not the sealed one" in found.error.message
    (bundle / "model_qnn.bin").unlink()
    with pytest.raises(ValueError, match=r"model_qnn\.bin is missing"):
        infer.Model(bundle)


def test_a_forged_binary_fails_and_takes_nothing_along(bundle: Path):
    """Sealed anew, so that QNN really gets it: it may refuse or crash, in a process of its own."""
    (bundle / "model_qnn.bin").write_bytes(b"\x00" * 4096)
    reseal(bundle)
    found = packager.verify(bundle)
    assert found.exit_code in (5, 6) and found.error is not None
    assert found.error.message


def test_two_processes_compile_the_same_bytes(made: tuple[Path, TargetResult], tmp_path: Path):
    for path in ("net.onnx", "goldens"):
        source = made[0].parents[1] / path
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / path)
    _, again = build(tmp_path, "soc_model = 52")
    assert again.bundle_digest == made[1].bundle_digest


def test_a_free_batch_is_refused_with_the_line_to_add(tmp_path: Path):
    network(tmp_path, "batch")
    _, result = build(tmp_path)
    assert (result.exit_code, result.status) == (3, "refused")
    assert "compiled for fixed shapes" in result.message and result.hint is not None
    assert result.hint == "add to [targets.npu]: shapes = { batch = 1 }"
    _, result = build(tmp_path, result.hint.partition(": ")[2] + "\nhtp_arch = 68\nprecision = 'int8-a8w8'")
    assert result.status == "passed", result.message
    assert result.verdict is not None and result.verdict.device == "HTP v68 emulator"


def odd(folder: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="project"),
        helper.make_node("Asinh", ["h"], ["k"], name="odd one"),
        helper.make_node("Relu", ["k"], ["y"], name="act"),
    ]
    held = [weights("w", 3, 4)]
    save(model(nodes, [value("x", FLOAT, [2, 3])], [value("y", FLOAT, [2, 4])], held), folder / "net.onnx")


def test_a_node_the_npu_does_not_take_is_named_or_falls_back(tmp_path: Path):
    odd(tmp_path)
    _, result = build(tmp_path, golden=None)
    assert (result.exit_code, result.status) == (5, "error")
    assert "node Asinh 'odd one': Operators of type `Asinh` are not supported" in result.message
    assert result.hint is not None and "allow_fallback = true" in result.hint
    _, result = build(tmp_path, "allow_fallback = true", golden=None)
    assert result.status == "passed", result.message
    folder = tmp_path / "dist/net-0.0.0-npu"
    coverage = json.loads((folder / "coverage.json").read_text())
    assert [entry["node"] for entry in coverage["left"]] == ["Asinh 'odd one'"] and coverage["parts"] == 2
    assert "disable_cpu_ep_fallback" not in (folder / "cpp/main.cpp").read_text()


def test_coverage_is_what_the_compiler_says(tmp_path: Path):
    odd(tmp_path)
    _, built = build(tmp_path, golden=None)
    (found,) = packager.cover(tmp_path / "net.onnx", targets=["npu"]).targets
    assert (found.refusal, found.hint) == (built.message, built.hint)
    assert [(node.node, node.reason) for node in found.nodes if node.state == "refused"] == [
        ("Asinh 'odd one'", "Operators of type `Asinh` are not supported by QNN EP")
    ]
    manifest = '[model]\npath = "net.onnx"\n[targets.npu]\nallow_fallback = true\n'
    (tmp_path / "packager.toml").write_text(manifest)
    (found,) = packager.cover(manifest=tmp_path / "packager.toml", targets=["npu"]).targets
    assert found.verdict == "builds, 1 node not on the accelerator" and "onnxruntime-qnn" in found.judges[1]


def test_where_qnn_takes_no_node_each_is_named_with_its_reason(tmp_path: Path):
    best = helper.make_node("ArgMin", ["x"], ["y"], name="last one", axis=1, select_last_index=1)
    save(model([best], [value("x", FLOAT, [1, 3])], [value("y", INT64, [1, 1])]), tmp_path / "net.onnx")
    _, result = build(tmp_path, golden=None)
    assert (result.exit_code, result.status) == (5, "error")
    assert result.message == (
        "QNN took no node of the model, so there is no context binary\n"
        "  node ArgMin 'last one': QNN ArgMax/ArgMin only support select_last_index=0"
    )


def test_inputs_of_other_dtypes_and_scalars(tmp_path: Path):
    nodes = [
        helper.make_node("Cast", ["count"], ["c"], to=FLOAT), helper.make_node("Cast", ["flag"], ["f"], to=FLOAT),
        helper.make_node("Cast", ["id"], ["i"], to=FLOAT), helper.make_node("Add", ["c", "f"], ["cf"]),
        helper.make_node("Add", ["cf", "i"], ["cfi"]), helper.make_node("Add", ["cfi", "s"], ["y"]),
    ]  # fmt: skip
    inputs = [value("count", INT32, [2]), value("flag", BOOL, [2]), value("id", INT64, [2]), value("s", FLOAT, [])]
    save(model(nodes, inputs, [value("y", FLOAT, [2])]), tmp_path / "net.onnx")
    given = {"count": np.array([1, 7], np.int32), "flag": np.array([True, False]), "id": np.array([0, 3], np.int64)}
    np.savez(tmp_path / "g.npz", **{**given, "s": np.float32(-2.5)})  # type: ignore[arg-type]
    _, result = build(tmp_path, golden="g.npz")
    assert result.status == "passed", result.message
    answered = infer.Model(tmp_path / "dist/net-0.0.0-npu").run({**given, "s": np.array(-2.5, np.float32)})
    np.testing.assert_allclose(answered["y"], [-0.5, 7.5], atol=0.01)


def test_without_cases_of_the_pinned_size_there_is_no_calibration(tmp_path: Path):
    network(tmp_path, "batch")
    _, result = build(tmp_path, "shapes = { batch = 2 }")
    assert (result.exit_code, result.status) == (3, "refused")
    assert "no golden case has the sizes that `shapes` pins" in result.message
    assert result.hint is not None and "give golden cases" in result.hint
    (tmp_path / "packager.toml").write_text('[model]\npath = "net.onnx"\n[golden]\npath = "none"\n[targets.npu]\n')
    with pytest.raises(packager.errors.PackagerError, match="none") as caught:
        packager.build(manifest=tmp_path / "packager.toml", out=tmp_path / "dist", cache=False)
    assert caught.value.exit_code in (2, 3)


def test_without_qnn_the_way_to_get_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    network(tmp_path)
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "onnxruntime-qnn":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    _, result = build(tmp_path)
    assert (result.exit_code, result.status) == (4, "missing")
    assert "onnxruntime-qnn>=2.7,<3" in result.message and result.hint == "pip install 'packager[npu]'"


def test_a_real_classifier_keeps_its_answers(tmp_path: Path, corpus: Path):
    """The example's own manifest, with its drawn lines of text."""
    shutil.copytree(
        ROOT / "examples/orientation", tmp_path / "example", ignore=shutil.ignore_patterns("dist", "*.onnx")
    )
    shutil.copy(corpus / "orientation.onnx", tmp_path / "example")
    manifest = tmp_path / "example/packager.toml"
    assert tomllib.loads(manifest.read_text())["targets"]["npu"]["shapes"] == {"x:0": 1, "x:2": 48, "x:3": 192}
    report = packager.build(manifest=manifest, targets=["npu"], out=tmp_path / "dist", cache=False)
    (result,) = report.targets
    assert report.exit_code == 0 and result.verdict is not None, result.message
    assert result.verdict.level == "emulated"
    assert (result.verdict.cosine or 0) > 0.9999 and result.verdict.target is not None
    coverage = json.loads((tmp_path / "dist/orientation-2.0.0-npu/coverage.json").read_text())
    assert coverage["left"] == [] and coverage["npu"]["Conv2d"] > 40
