"""Whole iOS builds without a Swift toolchain: rewrites, coverage, the Core ML package, and tampering."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import packager
from packager.bundle import open_bundle
from packager.errors import VerificationError
from packager.results import TargetResult
from packager.room import kind_named
from packager.targets.ios.mil_program import SPEC, WEIGHTS, read_program
from packager.targets.ios.mlcheck import check_mlpackage
from packager.targets.ios.mlpackage import PACKAGE
from tests.builders import FLOAT, INT64, STRING, model, save, value
from tests.sealing import reseal


@pytest.fixture(autouse=True)
def no_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKAGER_SWIFT", "")


def built(path: Path, out: Path, settings: str = "", golden: str = "") -> TargetResult:
    """Build by a manifest beside the model."""
    manifest = path.with_name("packager.toml")
    manifest.write_text(f'[model]\npath = "{path.name}"\n{golden}[targets.phone]\nkind = "ios"\n{settings}')
    return packager.build(manifest=manifest, out=out, cache=False).targets[0]


def folder_of(result: TargetResult, out: Path) -> Path:
    assert result.bundle is not None, result.message
    return out / result.bundle


def verdict_of(folder: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((folder / "verdict.json").read_text())
    return document


def refused_operators(path: Path) -> Path:
    """A small CNN of operators that the provider refuses but for what they are rewritten to."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"], name="norm"),
        helper.make_node("HardSwish", ["n"], ["h"], name="swish"),
        helper.make_node("HardSigmoid", ["h"], ["g"], name="gate"),
        helper.make_node("Neg", ["g"], ["neg"], name="neg"),
        helper.make_node("Abs", ["neg"], ["abs"], name="abs"),
        helper.make_node("Min", ["abs", "h"], ["low"], name="low"),
        helper.make_node("Flatten", ["low"], ["f"], name="flat"),
        helper.make_node("Gather", ["low", "first"], ["row"], name="row", axis=2),
        helper.make_node("Gemm", ["f", "k"], ["y"], name="head"),
    ]
    constants = [
        weight("w", 4, 3, 3, 3), weight("s", 4), weight("b", 4), weight("m", 4),
        numpy_helper.from_array(np.array([0.5, 1, 2, 3], np.float32), "v"), weight("k", 4 * 8 * 8, 5),
        numpy_helper.from_array(np.array(-1, np.int64), "first"),
    ]  # fmt: skip
    inputs, outputs = [value("x", shape=["batch", 3, 8, 8])], [
        value("y", shape=["batch", 5]), value("row", shape=["batch", 4, 8])]  # fmt: skip
    return save(model(nodes, inputs, outputs, constants, opset=17), path)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetResult, Path]:
    """One build of :func:`refused_operators` at a batch of one, for tests that only look."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("fitted")
        patch.setenv("PACKAGER_SWIFT", "")
        patch.setenv("PACKAGER_CACHE_DIR", str(folder / "cache"))
        result = built(refused_operators(folder / "cnn.onnx"), folder / "dist", "shapes = { batch = 1 }\n")
        return result, folder_of(result, folder / "dist")


def test_refused_operators_are_rewritten_exactly_and_then_all_is_taken(fitted: tuple[TargetResult, Path]):
    result, folder = fitted
    assert result.status == "passed" and result.verdict is not None and result.verdict.level == "proxy"
    document = json.loads((folder / "coverage.json").read_text())
    assert document["before"]["states"] == {"supported": 0, "fallback": 10} and document["before"]["nodes"] == 10
    assert document["after"]["left"] == [] and document["after"]["parts"] == 1
    reasons = {node["operator"]: node["reason"] for node in document["before"]["left"]}
    assert reasons["Flatten"] == "the provider has no Flatten"
    assert reasons["Conv"] == "'x' has free dims [batch, 3, 8, 8]"
    (note,) = [note for note in result.notes if note.startswith("rewritten for Core ML")]
    for name in ("BatchNormalization", "HardSwish", "HardSigmoid", "Neg", "Abs", "Min", "Flatten", "Gather"):
        assert f"1 {name}" in note


def test_the_package_has_its_parts(fitted: tuple[TargetResult, Path]):
    _, folder = fitted
    for path in (
        "Package.swift",
        "Cnn.podspec",
        "Sources/Cnn/CnnModel.swift",
        "Sources/Cnn/Resources/model.onnx",
        "Sources/Cnn/Resources/PrivacyInfo.xcprivacy",
        "Sources/CnnSample/Sample.swift",
        "Tests/CnnTests/CnnTests.swift",
        "golden/golden.json",
        f"{PACKAGE}/Manifest.json",
        f"{PACKAGE}/{SPEC}",
        f"{PACKAGE}/{WEIGHTS}",
    ):
        assert (folder / path).is_file(), path
    manifest = (folder / "Package.swift").read_text()
    assert 'exact: "1.24.2"' in manifest and '.iOS("15.1")' in manifest
    roles = {file.path: file.role for file in open_bundle(folder).files}
    assert roles["Sources/Cnn/Resources/model.onnx"] == "model" and roles["Package.swift"] == "package description"
    readme = (folder / "README.md").read_text()
    assert "xcodebuild test -scheme Cnn-Package" in readme and "`MLComputeUnits` = `ALL`" in readme


def test_the_core_ml_packages_operations_were_carried_out(fitted: tuple[TargetResult, Path]):
    _, folder = fitted
    runtime = verdict_of(folder)["runtime"]
    assert isinstance(runtime, dict)
    assert "operations of" in runtime["core_ml_package"] and "carried out one by one" in runtime["core_ml_package"]
    program = read_program(folder / PACKAGE)
    assert [feature.name for feature in program.inputs] == ["x"]
    assert [(feature.dtype, feature.dims) for feature in program.inputs] == [("float32", (1, 3, 8, 8))]


def sealed_again(folder: Path, target: Path) -> Path:
    """A copy that may be changed."""
    shutil.copytree(folder, target)
    return target


def test_a_changed_scale_in_the_core_ml_package_is_caught(fitted: tuple[TargetResult, Path], tmp_path: Path):
    copy = sealed_again(fitted[1], tmp_path / "copy")
    weights = copy / PACKAGE / WEIGHTS
    data = bytearray(weights.read_bytes())
    numbers = np.frombuffer(data, dtype="<f4", count=4, offset=len(data) - 16).copy()
    data[-16:] = (numbers * 4 + 1).tobytes()
    weights.write_bytes(data)
    with pytest.raises(VerificationError, match="operations don't give the goldens") as caught:
        check_mlpackage(copy)
    assert "output" in caught.value.message


def changed_spec(folder: Path, change) -> None:
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString((folder / PACKAGE / SPEC).read_bytes())
    change(spec)
    (folder / PACKAGE / SPEC).write_bytes(spec.SerializeToString())


def test_another_shape_dtype_or_order_of_features_is_caught(fitted: tuple[TargetResult, Path], tmp_path: Path):
    def batch(spec) -> None:
        spec.description.input[0].type.multiArrayType.shape[0] = 2

    def half(spec) -> None:
        spec.description.input[0].type.multiArrayType.dataType = 65552

    def order(spec) -> None:
        (block,) = next(iter(spec.mlProgram.functions.values())).block_specializations.values()
        outputs = list(spec.description.output)[::-1]
        names = list(block.outputs)[::-1]
        del spec.description.output[:], block.outputs[:]
        spec.description.output.extend(outputs)
        block.outputs.extend(names)

    for name, change, why in (("b", batch, "has shape"), ("h", half, "float16"), ("o", order, "outputs are")):
        copy = sealed_again(fitted[1], tmp_path / name)
        changed_spec(copy, change)
        with pytest.raises(VerificationError, match=why):
            check_mlpackage(copy)


def test_an_operation_without_a_translation_makes_it_structural(fitted: tuple[TargetResult, Path], tmp_path: Path):
    def unknown(spec) -> None:
        (block,) = next(iter(spec.mlProgram.functions.values())).block_specializations.values()
        next(each for each in block.operations if each.type == "conv").type = "conv_of_tomorrow"

    copy = sealed_again(fitted[1], tmp_path / "copy")
    changed_spec(copy, unknown)
    ((_, told),) = check_mlpackage(copy)
    assert told.startswith("structural") and "conv_of_tomorrow" in told


def test_numbers_that_core_ml_can_not_take_make_it_structural(tmp_path: Path):
    table = numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(6, 2), "t")
    nodes = [
        helper.make_node("Mod", ["ids", "six"], ["place"], name="place"),
        helper.make_node("Gather", ["t", "place"], ["y"], name="look"),
    ]
    constants = [table, numpy_helper.from_array(np.array(6, np.int64), "six")]
    path = save(model(nodes, [value("ids", INT64, [2])], [value("y", FLOAT, [2, 2])], constants), tmp_path / "m.onnx")
    np.savez(tmp_path / "g.npz", ids=np.array([7, 2**40 + 1], np.int64))
    result = built(path, tmp_path / "dist", golden='[golden]\npath = "g.npz"\n')
    assert result.status == "passed", result.message
    runtime = verdict_of(folder_of(result, tmp_path / "dist"))["runtime"]
    assert isinstance(runtime, dict)
    assert runtime["core_ml_package"].startswith("structural") and "beyond 32 bits" in runtime["core_ml_package"]


def test_a_cut_weight_file_is_caught(fitted: tuple[TargetResult, Path], tmp_path: Path):
    copy = sealed_again(fitted[1], tmp_path / "copy")
    weights = copy / PACKAGE / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(VerificationError, match="can't be read"):
        check_mlpackage(copy)


def test_a_corrupted_model_is_caught(fitted: tuple[TargetResult, Path], tmp_path: Path):
    """By the seal; and, sealed again, by its answers."""
    copy = sealed_again(fitted[1], tmp_path / "copy")
    path = copy / "Sources/Cnn/Resources/model.onnx"
    proto = onnx.load(path)
    head = next(each for each in proto.graph.initializer if each.name == "k")
    head.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(head) * np.float32(1.5), "k"))
    path.write_bytes(proto.SerializeToString())
    damaged = packager.verify(copy)
    assert damaged.error is not None and damaged.exit_code == 6 and "model.onnx" in damaged.error.message
    reseal(copy)
    wrong = packager.verify(copy)
    assert wrong.exit_code == 6 and wrong.verdict is not None and "output 'y'" in " ".join(wrong.verdict.failures)


def test_two_builds_give_the_same_bytes(tmp_path: Path):
    path = refused_operators(tmp_path / "cnn.onnx")
    manifest = tmp_path / "packager.toml"
    manifest.write_text('[model]\npath = "cnn.onnx"\n[targets.ios]\nshapes = { batch = 1 }\n')
    archives = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        done = subprocess.run(
            [sys.executable, "-m", "packager.cli", "build", "-m", str(manifest), "-o", str(out), "--no-cache",
             "--no-verify"],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        archives.append(json.loads((out / "cnn-0.0.0-ios/bundle.json").read_text())["files"])
    assert path.exists() and archives[0] == archives[1]


def test_half_precision_stays_half_in_both_models(tmp_path: Path):
    result = built(
        refused_operators(tmp_path / "cnn.onnx"), tmp_path / "dist", 'precision = "fp16"\nshapes = { batch = 1 }\n'
    )
    folder = folder_of(result, tmp_path / "dist")
    assert result.status == "passed", result.message
    dtypes = {array.dtype.name for array in read_program(folder / PACKAGE).constants.values()}
    assert "float16" in dtypes
    after = json.loads((folder / "coverage.json").read_text())["after"]
    assert after["left"] == [] and after["parts"] == 1
    runtime = verdict_of(folder)["runtime"]
    assert isinstance(runtime, dict) and "carried out" in runtime["core_ml_package"]


def test_a_conversion_with_another_interface_makes_no_core_ml_package_and_it_is_said(tmp_path: Path):
    total = helper.make_node("ReduceSum", ["x", "axes"], ["y"], name="total", keepdims=1)  # its axes are an input
    inputs = [value("x", FLOAT, [3, 2, 2]), value("axes", INT64, [1])]
    path = save(model([total], inputs, [value("y", FLOAT, [3, 2, 1])]), tmp_path / "sum.onnx")
    np.savez(tmp_path / "0.npz", x=np.arange(12, dtype=np.float32).reshape(3, 2, 2), axes=np.array([-1]))
    result = built(path, tmp_path / "dist", golden='[golden]\npath = "0.npz"\n')
    folder = folder_of(result, tmp_path / "dist")
    assert result.status == "passed", result.message
    assert not (folder / PACKAGE).exists()
    told = json.loads((folder / "coverage.json").read_text())["core ml package"]
    assert told["reason"] == "onnx2coreml converts it wrongly: output 'y': has shape [1, 1, 1], the tensor [3, 2, 1]"


def test_free_shapes_make_no_core_ml_package_and_it_is_said(tmp_path: Path):
    result = built(refused_operators(tmp_path / "cnn.onnx"), tmp_path / "dist")
    folder = folder_of(result, tmp_path / "dist")
    assert not (folder / PACKAGE).exists()
    told = json.loads((folder / "coverage.json").read_text())["core ml package"]
    assert told["made"] is False and "free dims" in told["reason"]
    runtime = verdict_of(folder)["runtime"]
    assert isinstance(runtime, dict) and runtime["core_ml_package"].startswith("none: its inputs have free dims")
    assert any("shapes = { batch = 1 }" in note for note in result.notes)


def test_what_does_not_convert_makes_no_core_ml_package_and_the_reason_is_said(tmp_path: Path):
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Relu", ["i"], ["o"])]
    inputs = [value("x", STRING, [2]), value("i", FLOAT, [2])]
    path = save(model(nodes, inputs, [value("y", STRING, [2]), value("o", FLOAT, [2])]), tmp_path / "m.onnx")
    result = built(path, tmp_path / "dist")
    folder = folder_of(result, tmp_path / "dist")
    assert result.status == "passed" and not (folder / PACKAGE).exists()
    assert json.loads((folder / "coverage.json").read_text())["core ml package"]["reason"]


def test_a_reciprocal_loses_core_mls_epsilon(tmp_path: Path):
    """The provider and the converter would both add 1e-4 to x; a division adds nothing."""
    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("Reciprocal", ["e"], ["y"], name="inverse")]
    path = save(model(nodes, [value("x", FLOAT, [2, 3])], [value("y", FLOAT, [2, 3])]), tmp_path / "m.onnx")
    result = built(path, tmp_path / "dist")
    assert result.status == "passed", result.message
    assert "rewritten for Core ML: 1 Reciprocal" in result.notes
    runtime = verdict_of(folder_of(result, tmp_path / "dist"))["runtime"]
    assert isinstance(runtime, dict) and "carried out" in runtime["core_ml_package"]


def test_whole_numbers_cross_as_32_bits(tmp_path: Path):
    """Core ML has no int64: the feature is int32, and the check says where a number wouldn't fit."""
    table = numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(6, 2), "t")
    nodes = [helper.make_node("Gather", ["t", "ids"], ["y"], name="look")]
    path = save(model(nodes, [value("ids", INT64, [3])], [value("y", FLOAT, [3, 2])], [table]), tmp_path / "m.onnx")
    folder = folder_of(built(path, tmp_path / "dist"), tmp_path / "dist")
    program = read_program(folder / PACKAGE)
    assert program.inputs[0].dtype == "int32"


def test_a_model_with_external_weights_is_one_file(tmp_path: Path):
    path = refused_operators(tmp_path / "plain.onnx")
    onnx.save(onnx.load(path), tmp_path / "cnn.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    folder = folder_of(built(tmp_path / "cnn.onnx", tmp_path / "dist", "shapes = { batch = 1 }\n"), tmp_path / "dist")
    assert [path.name for path in (folder / "Sources/Cnn/Resources").iterdir() if path.suffix == ".onnx"]
    assert not packager.inspect(folder / "Sources/Cnn/Resources/model.onnx").external


def test_a_real_model(corpus: Path, tmp_path: Path):
    """The text-orientation classifier: a batch of one line makes all of it Core ML's, in one partition."""
    shutil.copyfile(corpus / "orientation.onnx", tmp_path / "orientation.onnx")
    settings = 'shapes = { "x:0" = 1, "x:2" = 48, "x:3" = 192 }\nmin_coverage = 1.0\n'
    result = built(tmp_path / "orientation.onnx", tmp_path / "dist", settings)
    assert result.status == "passed", result.message
    document = json.loads((folder_of(result, tmp_path / "dist") / "coverage.json").read_text())
    after = document["after"]
    assert after["left"] == [] and after["states"]["supported"] == after["nodes"] > 200 and after["parts"] == 1
    assert document["before"]["states"]["supported"] < 30
    assert document["core ml package"] == {"made": True, "reason": "", "names": {"x": "x", **_output(document)}}
    assert kind_named("ios").facts.level == "emulated"


def _output(document: dict[str, dict[str, dict[str, str]]]) -> dict[str, str]:
    names = dict(document["core ml package"]["names"])
    names.pop("x")
    assert len(names) == 1
    return names
