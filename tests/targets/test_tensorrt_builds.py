"""Whole builds of TensorRT bundles by TensorRT for RTX, of real models, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import packager
from packager import parity
from packager.results import TargetResult
from packager.targets.tensorrt import fit
from tests.builders import FLOAT, model, save, value
from tests.transform_models import array, floats


def manifest(folder: Path, model: Path, *lines: str) -> Path:
    path = folder / "packager.toml"
    path.write_text("\n".join([f'[model]\npath = "{model.as_posix()}"', "[targets.tensorrt]", *lines]))
    return path


def build(folder: Path, model: Path, *lines: str) -> tuple[TargetResult, Path]:
    made = packager.build(manifest=manifest(folder, model, *lines), out=folder / "dist")
    (result,) = made.targets
    return result, folder / "dist" / str(result.bundle)


@pytest.fixture(scope="module")
def orientation(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetResult, Path]:
    """The real text-orientation classifier, from the command line's defaults."""
    folder = tmp_path_factory.mktemp("orientation")
    source = Path(__file__).parents[2] / ".corpus/orientation.onnx"
    if not source.is_file():
        pytest.fail("the real models are absent; run `python examples/fetch.py .corpus` (make test does)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKAGER_CACHE_DIR", str(folder / "cache"))
        (result,) = packager.build(source, targets=["tensorrt"], out=folder / "dist").targets
        (again,) = packager.build(source, targets=["tensorrt"], out=folder / "dist").targets
    assert again.cached and again.archive_sha256 == result.archive_sha256, "a cache hit gives the same archive"
    return result, folder / "dist" / str(result.bundle)


def test_a_real_model_gets_an_engine_with_a_dynamic_profile(orientation: tuple[TargetResult, Path]):
    result, folder = orientation
    assert result.status == "passed" and result.archive is not None
    assert (folder / fit.ENGINE).stat().st_size > 1_000_000
    facts = json.loads((folder / fit.SIDECAR).read_text())
    (profile,) = facts["profiles"]
    assert profile["name"] == "x" and [shape[0] for shape in profile["shapes"]] == [1, 2, 3]
    assert [each["dims"] for each in facts["bindings"]] == [[-1, 3, -1, -1], [-1, 2]]
    assert facts["tf32"] is False


def test_levels_of_engine_and_onnx_file_are_both_stated(orientation: tuple[TargetResult, Path]):
    result, folder = orientation
    verdict = json.loads((folder / "verdict.json").read_text())
    assert result.verdict is not None and result.verdict.level == verdict["level"] == "structural"
    assert verdict["runtime"]["engine"].startswith("structural: parsed and built by TensorRT for RTX 1.7")
    assert verdict["runtime"]["model.onnx"].startswith("proxy: executed on CPU by ONNX Runtime")
    assert "model.engine's bytes may differ" in verdict["runtime"]["reproducible"]
    assert "no CUDA device 0 is here" in verdict["level_reason"]
    assert "has not run on a GPU yet" in (folder / "README.md").read_text()


def test_a_minimum_above_the_engines_level_fails(tmp_path: Path, orientation: tuple[TargetResult, Path]):
    node = helper.make_node("Relu", ["x"], ["y"])
    path = save(model([node], [value("x")], [value("y")]), tmp_path / "m.onnx")
    result, _ = build(tmp_path, path, 'min_level = "proxy"')
    assert result.exit_code == 6 and "only at level structural, but min_level is proxy" in result.message


def test_the_self_check_says_why_an_engine_doesnt_run_here(orientation: tuple[TargetResult, Path], tmp_path: Path):
    _, folder = orientation
    command = [sys.executable, "verify.py", "--out", str(tmp_path / "verdict.json")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no CUDA device 0 is here" in done.stderr
    assert not (tmp_path / "verdict.json").exists()


def test_a_verdict_of_a_gpu_machine_is_taken(orientation: tuple[TargetResult, Path], tmp_path: Path):
    """Written as the self-check would write it where the engine fits."""
    _, folder = orientation
    golden = parity.read_golden(folder / "golden")
    results = [parity.compare_case(case.name, case.outputs, case.outputs, golden.rules) for case in golden.cases]
    seal = json.loads((folder / "verdict.json").read_text())["bundle_digest"]
    runtime = {"name": "TensorRT for RTX", "version": "1.7.1.116", "device": "CUDA device 0, compute capability 8.9"}
    policy = {"name": golden.policy, "precision": golden.precision}
    document = parity.verdict_document(
        results, level="runtime", runtime=runtime, host={}, policy=policy, bundle_digest=seal
    )
    (tmp_path / "sent.json").write_text(parity.verdict_text(document))
    before = (folder / "verdict.json").read_text()
    taken = packager.verify(folder, imported=tmp_path / "sent.json")
    assert taken.exit_code == 0 and taken.verdict is not None and taken.verdict.level == "runtime"
    assert json.loads((folder / "verdict.json").read_text())["imported"] is True
    (folder / "verdict.json").write_text(before)


def test_a_damaged_engine_is_noticed(orientation: tuple[TargetResult, Path]):
    _, folder = orientation
    engine = (folder / fit.ENGINE).read_bytes()
    (folder / fit.ENGINE).write_bytes(engine[:-1] + b"?")
    found = packager.verify(folder)
    (folder / fit.ENGINE).write_bytes(engine)
    assert found.exit_code == 6 and found.error is not None and "model.engine" in found.error.message
    assert packager.verify(folder).exit_code == 0


def test_polygraphys_data_script_gives_the_golden_inputs(orientation: tuple[TargetResult, Path]):
    _, folder = orientation
    code = "import polygraphy_data as p; print([[(k, v.shape) for k, v in feed.items()] for feed in p.load_data()])"
    command = [sys.executable, "-B", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[('x', (1, 3, 64, 96))], [('x', (2, 3, 96, 64))], [('x', (3, 3, 128, 160))]]"


def test_an_engine_is_rebuilt_beside_the_bundle(orientation: tuple[TargetResult, Path], tmp_path: Path):
    """What a machine with another release of the library does; the sealed files stay."""
    _, folder = orientation
    done = subprocess.run([sys.executable, "-B", "build.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    home = folder / fit.BUILT
    sizes = [(place / fit.ENGINE).stat().st_size for place in (home, folder)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01), (
        "engines of one model differ by a few bytes from build to build"
    )
    again = packager.verify(folder)
    for file in home.iterdir():
        file.unlink()
    home.rmdir()
    assert again.exit_code == 0 and any(
        "built/model.engine is not part of the bundle" in each for each in again.warnings
    )


def test_a_text_encoder_with_two_dynamic_axes(tmp_path: Path, corpus: Path):
    """Its weights are int8 behind a Cast and a Mul, which TensorRT refuses: they become DequantizeLinear."""
    result, folder = build(tmp_path, corpus / "text_encoder.onnx", "[targets.tensorrt.profiles]", "batch = [1, 8, 32]")
    assert result.status == "passed", result.message
    facts = json.loads((folder / fit.SIDECAR).read_text())
    assert [each["name"] for each in facts["profiles"]] == ["input_ids", "attention_mask", "token_type_ids"]
    assert all(each["shapes"] == [[1, 8], [8, 12], [32, 16]] for each in facts["profiles"])
    operators = [node.op_type for node in onnx.load(folder / "model.onnx").graph.node]
    assert operators.count("DequantizeLinear") == 38 and (folder / fit.ENGINE).stat().st_size > 20_000_000
    assert any("sizes that golden cases show of sequence;" in note for note in result.notes)


def test_sizes_are_those_that_run_and_not_the_first_guess(tmp_path: Path, corpus: Path):
    """A text recogniser takes images 48 high only, which the reference finds out: one size is no range."""
    result, _ = build(tmp_path, corpus / "ocr_recogniser.onnx")
    assert result.status == "refused" and "no range is known for 'x:2'" in result.message
    assert result.hint is not None and '"x:2" = [48, 48, 48]' in result.hint


def test_a_real_model_of_byte_quantisation_is_refused_by_node(tmp_path: Path, corpus: Path):
    result, _ = build(tmp_path, corpus / "french_forms.onnx")
    assert result.status == "refused" and result.exit_code == 3
    assert "DequantizeLinear '/embedding/Gather_output_0_DequantizeLinear'" in result.message
    assert "'/decoder/Transpose_output_0_DequantizeLinear'" in result.message


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8-static", "int8-weights", "fp8"])
def test_precisions_are_changes_to_the_onnx_file(tmp_path: Path, precision: str):
    nodes = [
        helper.make_node("Conv", ["image:0", "k"], ["c"], name="conv/1:0", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["m"], name="mm"),
        helper.make_node("Add", ["m", "b"], ["score/0"]),
    ]
    constants = [array("k", floats(64, 3, 3, 3)), array("w", floats(64, 320, seed=1)), array("b", floats(320, seed=2))]
    proto = model(nodes, [value("image:0", FLOAT, ["n", 3, 8, 8])], [value("score/0", FLOAT, ["n", 320])], constants)
    result, folder = build(tmp_path, save(proto, tmp_path / "m.onnx"), f'precision = "{precision}"')
    assert result.status == "passed", result.message
    made = onnx.load(folder / "model.onnx")
    dtypes = {tensor.data_type for tensor in made.graph.initializer}
    operators = {node.op_type for node in made.graph.node}
    facts = json.loads((folder / fit.SIDECAR).read_text())
    assert facts["compute_capabilities"][0] == ("8.9" if precision == "fp8" else "8.0") and facts["later_too"]
    halves = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}
    if precision in halves:
        assert halves[precision] in dtypes
    elif precision == "fp8":
        assert "DequantizeLinear" in operators and onnx.TensorProto.FLOAT8E4M3FN in dtypes
    else:
        assert "DequantizeLinear" in operators and onnx.TensorProto.INT8 in dtypes
        assert onnx.TensorProto.UINT8 not in dtypes
    zeros = [tensor for tensor in made.graph.initializer if "zero_point" in tensor.name]
    assert all(not onnx.numpy_helper.to_array(tensor).any() for tensor in zeros)
    assert facts["precision"] == precision
    assert result.verdict is not None and result.verdict.transform is not None, "both parities are there"
    stood_in = "in float32 with every result rounded to bfloat16" in result.verdict.level_reason
    assert stood_in is (precision == "bf16")
    assert ("has no\nbfloat16 there" in (folder / "README.md").read_text()) is stood_in


def test_goldens_are_answered_exactly_by_the_onnx_file(orientation: tuple[TargetResult, Path]):
    _, folder = orientation
    from packager.targets.tensorrt.infer import Model

    golden = parity.read_golden(folder / "golden")
    found = Model(folder, through="onnxruntime").run(dict(golden.cases[0].inputs))
    (name,) = found
    assert np.allclose(found[name], golden.cases[0].outputs[name], atol=1e-6)
