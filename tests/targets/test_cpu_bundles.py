"""The CPU service's bundles: precisions, formats, the same bytes twice, faults that are caught, what a partner does."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import packager
from packager import parity
from packager.engine import Verified
from packager.results import TargetResult
from packager.room import kind_named
from packager.targets.cpu.infer import Session, cpu_level
from packager.targets.cpu.serving import running
from tests.builders import FLOAT, model, save, value
from tests.sealing import reseal

SIZE = 60_000
"""Bytes that a packed bundle may have beyond its packed model and goldens."""


def build(path: Path, out: Path, options: str = "", **more) -> TargetResult:
    """Build one target of kind cpu, with options as a manifest has them."""
    manifest = out.parent / "packager.toml"
    manifest.write_text(f'[model]\npath = "{path}"\n[targets.cpu]\n{options}\n')
    return packager.build(manifest=manifest, out=out, cache=False, **more).targets[0]


def passed(path: Path, out: Path, options: str = "") -> Path:
    result = build(path, out, options)
    assert result.status == "passed", result.message
    assert result.verdict is not None and (result.verdict.level, result.verdict.runtime) == ("runtime", "ONNX Runtime")
    return out / str(result.bundle)


def settings(bundle: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((bundle / "service.json").read_text())
    return found


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """``score = Relu(x @ w)``, with a weight large enough to be quantised."""
    weights = numpy_helper.from_array(np.sin(np.arange(256 * 128, dtype=np.float32)).reshape(256, 128), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["score"])]
    proto = model(nodes, [value("x", FLOAT, ["n", 256])], [value("score", FLOAT, ["n", 128])], [weights])
    return save(proto, tmp_path / "dense.onnx")


@pytest.mark.parametrize("precision", ["fp16", "int8-static", "int8-dynamic", "int8-weights", "int4-weights"])
def test_every_precision_is_served(dense: Path, tmp_path: Path, precision: str):
    built = passed(
        dense, tmp_path / "dist", f'precision = "{precision}"\n[tolerance.int4]\ncosine = 0.99\nscaled = 0.2'
    )
    operators = {node.op_type for node in onnx.load(built / "model.onnx").graph.node}
    assert ("MatMulNBits" in operators) == precision.endswith("-weights")
    assert settings(built)["quantized"] == (precision in ("int8-static", "int8-dynamic"))
    if precision == "int8-dynamic":
        assert "a row answers differently in a batch" in str(settings(built)["batching"]), (
            "ranges are of the whole batch"
        )


@pytest.mark.parametrize("level", ["portable", "own"])
@pytest.mark.parametrize("form", ["onnx", "ort"])
def test_a_graph_optimised_ahead_answers_alike(corpus: Path, tmp_path: Path, form: str, level: str):
    wanted = cpu_level() if level == "own" else level
    if not wanted:
        pytest.fail("this machine's CPU tells no x86-64 level; drop the case on other architectures")
    path = corpus / "orientation.onnx"
    built = passed(path, tmp_path / "dist", f'format = "{form}"\noptimize_for = "{wanted}"')
    assert {file.name for file in built.glob("model.*")} == {f"model.{form}"}
    if form == "onnx":
        kinds = {(node.domain, node.op_type) for node in onnx.load(built / "model.onnx").graph.node}
        assert ("com.microsoft", "FusedConv") in kinds or ("com.microsoft.nchwc", "Conv") in kinds
        assert any(domain == "com.microsoft.nchwc" for domain, _ in kinds) == (level == "own")


def test_the_runtimes_own_format_is_always_optimised(dense: Path, tmp_path: Path):
    built = passed(dense, tmp_path / "dist", 'format = "ort"')
    assert settings(built)["optimize_for"] == "portable"
    assert (built / "model.ort").read_bytes()[4:8] == b"ORTM"


@pytest.mark.parametrize("options", ["", 'format = "ort"', 'optimize_for = "portable"'])
def test_the_same_input_gives_the_same_bytes(dense: Path, tmp_path: Path, options: str):
    digests = []
    for name in ("one", "two"):
        result = build(dense, tmp_path / name, options, verify=False)
        folder = tmp_path / name / str(result.bundle)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "verdict.json")
        digests.append({path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in files})
    assert digests[0] == digests[1]


def test_external_data_and_pinned_shapes(tmp_path: Path):
    weights = numpy_helper.from_array(np.ones((64, 8), np.float32), "w")
    proto = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [value("x", FLOAT, ["n", 64])],
                  [value("y", FLOAT, ["n", 8])], [weights])  # fmt: skip
    onnx.save(proto, tmp_path / "big.onnx", save_as_external_data=True, location="big.bin", size_threshold=0)
    for number, options in enumerate(("shapes = { n = 2 }", 'optimize_for = "portable"', 'format = "ort"')):
        built = passed(tmp_path / "big.onnx", tmp_path / f"dist{number}", options)
        rows = 2
        np.testing.assert_array_equal(
            Session(built).run({"x": np.ones((rows, 64), np.float32)})["y"], np.full((2, 8), 64)
        )
    assert "fixed at 2" in str(settings(tmp_path / "dist0/big-0.0.0-cpu")["batching"])


def test_a_real_model_from_end_to_end_and_its_size(corpus: Path, tmp_path: Path):
    built = passed(corpus / "orientation.onnx", tmp_path / "dist")
    assert settings(built)["max_batch"] == 8
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in sorted(built.rglob("*")):
            if path.is_file() and path.name not in ("model.onnx", "golden.safetensors"):
                archive.add(path, path.relative_to(built))
    assert len(packed.getvalue()) < SIZE
    assert packager.verify(built).exit_code == 0


# Faults


def said(report: Verified) -> str:
    """Why a bundle didn't pass."""
    if report.error is not None:
        return report.error.message
    return "; ".join(report.verdict.failures if report.verdict else ())


def resealed(bundle: Path, name: str, old: str, new: str) -> None:
    """Change a file and what the seal says of it."""
    file = bundle / name
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    reseal(bundle)


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("infer.py", "dict(zip(self._names, values, strict=True))",
         "{name: array * 1.5 for name, array in zip(self._names, values)}", "another than in process|differently"),
        ("service/batching.py", "array[end - size : end]", "array[:size]", "differently to parallel requests"),
        ("service/web.py", "status, headers = 400, {}", "status, headers = 500, {}", "status 500, not 400"),
        ("service/run.py", "    await asyncio.to_thread(batcher.close)\n    return 0", "    return 3", "with status 3"),
        ("service/protocol.py", "if offset != len(rest):", "if False:", "binary data left over: status 200, not 400"),
        ("serve.py", "status: int = serve(model, settings)", "return 1", "the service doesn't start"),
    ],
)  # fmt: skip
def test_a_service_that_misbehaves_is_caught(dense: Path, tmp_path: Path, name: str, old: str, new: str, told: str):
    result = build(dense, tmp_path / "dist", verify=False)
    bundle = tmp_path / "dist" / str(result.bundle)
    resealed(bundle, name, old, new)
    report = packager.verify(bundle)
    assert report.exit_code == 6
    assert re.search(told, said(report))


def test_a_tampered_file_is_named(dense: Path, tmp_path: Path):
    bundle = passed(dense, tmp_path / "dist")
    with (bundle / "service/web.py").open("a") as file:
        file.write("\n")
    report = packager.verify(bundle)
    assert report.exit_code != 0 and "service/web.py" in said(report)


# What a partner does


ALONE = """
import os, runpy, sys
sys.modules["packager"] = None  # the import system's own "not found"
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_partner_checks_library_and_service_without_packager(dense: Path, tmp_path: Path):
    bundle = passed(dense, tmp_path / "dist")

    def check(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", ALONE, str(bundle / script), *arguments], cwd=tmp_path, capture_output=True,
            text=True, check=False, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        )  # fmt: skip

    done = check("verify.py")
    assert done.returncode == 0, done.stdout + done.stderr
    with running(bundle) as service:
        for url in (service.http, service.grpc):
            done = check("verify.py", SERVICE_URL=url)
            assert done.returncode == 0, done.stdout + done.stderr
            assert json.loads((tmp_path / "selfcheck.json").read_text())["runtime"]["device"] == url
    assert check("verify.py", SERVICE_URL=service.http).returncode == 2
    np.savez(tmp_path / "input.npz", x=np.ones((1, 256), np.float32))
    assert "score: float32[1, 128]" in check("infer.py", str(tmp_path / "input.npz")).stdout
    done = check("tune.py", "--seconds", "0.01", "--largest", "2")
    assert "SERVICE_THREADS=" in done.stdout and "SERVICE_MAX_BATCH=" in done.stdout, done.stderr


def test_settings_that_make_no_sense_are_said_before_anything_is_served(dense: Path, tmp_path: Path):
    result = build(dense, tmp_path / "dist", "max_batch = 0", verify=False)
    bundle = tmp_path / "dist" / str(result.bundle)
    for arguments, status, told in (
        (["--max-batch", "4"], 1, "can't be merged: the manifest says max_batch = 0"),
        (["--http-port", "x"], 2, "invalid int value"),
        (["--host", "256.0.0.1"], 1, "can't be listened on"),
    ):
        done = subprocess.run(
            [sys.executable, str(bundle / "serve.py"), *arguments], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        assert (done.returncode, told in done.stderr) == (status, True), done.stderr
        assert "Traceback" not in done.stderr
    (bundle / "service.json").unlink()
    with pytest.raises(ValueError, match=r"service\.json can't be read"):
        Session(bundle)


def test_the_unit_and_the_manifests_are_what_their_tools_read(dense: Path, tmp_path: Path):
    result = build(dense, tmp_path / "dist", verify=False)
    bundle = tmp_path / "dist" / str(result.bundle)
    docker = (bundle / "Dockerfile").read_text()
    assert "USER 10001" in docker and "ENTRYPOINT [" in docker and "sh -c" not in docker
    manifest = (bundle / "kubernetes.yaml").read_text()
    assert "runAsNonRoot: true" in manifest and "{{" not in manifest and "name: score-dense\n" in manifest
    wanted = {line.partition("==")[0] for line in (bundle / "constraints.txt").read_text().splitlines()}
    assert set(kind_named("cpu").facts.requires.python) <= wanted
    tool = shutil.which("systemd-analyze")
    if tool:
        unit = tmp_path / "score-dense.service"
        here = (bundle / "score-dense.service").read_text().replace("/opt/score-dense/venv/bin/python", sys.executable)
        unit.write_text(here.replace("/opt/score-dense", str(bundle)))
        done = subprocess.run([tool, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
        assert "score-dense" not in done.stderr, done.stderr


HEADERS = Path(os.environ.get("PACKAGER_RUNTIME_DIR", "")) / "onnxruntime-headers/usr/include/onnxruntime"
"""Where ``get_headers.sh`` puts them."""


def onnxruntime_root(folder: Path) -> Path:
    """A folder as a release archive of ONNX Runtime unpacks to: C headers, and the library of the installed wheel."""
    import onnxruntime

    places = [HEADERS, Path("/usr/include/onnxruntime")]
    headers = next((each for each in places if (each / "onnxruntime_c_api.h").is_file()), None)
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"), None)
    if headers is None or library is None or not shutil.which("cmake") or not shutil.which("c++"):
        pytest.skip("needs cmake, a C++ compiler, ONNX Runtime's C headers (make headers) and a wheel with its library")
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(headers, target_is_directory=True)
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / "lib" / name).symlink_to(library)
    return folder


def test_the_cpp_program_compiles_without_a_warning_and_gives_the_golden_outputs(corpus: Path, tmp_path: Path):
    root = onnxruntime_root(tmp_path / "ort")
    result = build(corpus / "orientation.onnx", tmp_path / "dist", 'shapes = { "x:0" = 1, "x:2" = 48, "x:3" = 192 }')
    assert result.status == "passed", result.message
    bundle = tmp_path / "dist" / str(result.bundle)
    made = tmp_path / "made"
    flags = "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"
    for command in (
        ["cmake", "-S", str(bundle / "cpp"), "-B", str(made), f"-DONNXRUNTIME_ROOT={root}", flags],
        ["cmake", "--build", str(made)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    case = parity.read_golden(bundle / "golden").cases[0]
    (inputs,), (wanted,) = case.inputs.values(), case.outputs.values()
    (tmp_path / "x.bin").write_bytes(inputs.tobytes())
    command = [str(made / "predict"), str(bundle / "model.onnx"), str(tmp_path / "x.bin")]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(root / "lib")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = np.array([float(line.split(" ")[1]) for line in done.stdout.splitlines()], np.float32)
    expected = np.array(wanted, np.float32).ravel()
    assert found.shape == expected.shape and float(np.abs(found - expected).max()) < 1e-5
    (tmp_path / "x.bin").write_bytes(inputs.tobytes()[:-1])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1 and "are wanted" in done.stderr
