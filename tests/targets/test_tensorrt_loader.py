"""What ships with an engine: the loader that refuses one which doesn't fit, and TensorRT proper over a recorded fake.

The fake (``tests/fakes``) stands for TensorRT's and CUDA's Python API: an "engine" is the ONNX file, ONNX Runtime
computes. Nothing here has run on a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import packager
from packager.errors import Refused, ToolchainMissing
from packager.host import this_host
from packager.results import TargetResult
from packager.targets.tensorrt import fit, library
from packager.targets.tensorrt.fit import Machine, misfits
from packager.targets.tensorrt.options import Options
from tests.builders import FLOAT, INT64, model, save, value
from tests.transform_models import array

FAKES = Path(__file__).parents[1] / "fakes"
RTX = {
    "recipe": False, "builder": "rtx", "library": "TensorRT for RTX", "version": "1.7.1.116",
    "compute_capabilities": ["8.0", "8.6", "8.9", "12.0"], "later_too": True,
    "systems": ["Linux", "Windows"], "machines": ["x86_64", "AMD64"],
}  # fmt: skip
PROPER = RTX | {
    "builder": "tensorrt", "library": "TensorRT", "version": "11.4.0", "compute_capabilities": ["9.0"],
    "later_too": False, "systems": ["Linux"],
}  # fmt: skip
HERE = Machine("1.7.1.116", "8.9", "Linux", "x86_64")


# Whether an engine fits, by sidecars


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "12.0", "12.1", "13.0"])
@pytest.mark.parametrize(("system", "machine"), [("Linux", "x86_64"), ("Windows", "AMD64")])
def test_an_engine_for_rtx_fits_every_gpu_it_is_for(capability: str, system: str, machine: str):
    assert misfits(RTX, Machine("1.7.1.116", capability, system, machine)) == []


@pytest.mark.parametrize(
    ("sidecar", "machine", "words"),
    [
        (RTX, Machine("1.7.2.3", "8.9", "Linux", "x86_64"), "built by TensorRT for RTX 1.7.1.116 and runs in no other"),
        (RTX, Machine("1.8.0.1", "8.9", "Linux", "x86_64"), "1.8.0.1 is here"),
        (RTX, Machine("1.7.1.116", "7.5", "Linux", "x86_64"), "the GPU here has 7.5"),
        (RTX, Machine("1.7.1.116", "9.0", "Linux", "x86_64"), "8.0, 8.6, 8.9, 12.0 and later; the GPU here has 9.0"),
        (RTX, Machine("1.7.1.116", "8.9", "Darwin", "x86_64"), "for Linux and Windows; this is Darwin"),
        (RTX, Machine("1.7.1.116", "8.9", "Linux", "aarch64"), "this machine is aarch64"),
        (RTX | {"compute_capabilities": ["7.5"], "later_too": False}, HERE, "capability 7.5; the GPU here has 8.9"),
        (PROPER, Machine("11.4.0", "8.9", "Linux", "x86_64"), "for compute capability 9.0; the GPU here has 8.9"),
        (PROPER, Machine("11.4.0", "12.0", "Linux", "x86_64"), "the GPU here has 12.0"),
        (PROPER, Machine("10.9.0", "9.0", "Linux", "x86_64"), "built by TensorRT 11.4.0"),
        (PROPER, Machine("11.4.0", "9.0", "Windows", "x86_64"), "for Linux; this is Windows"),
        (RTX, Machine("1.7.1.116", "", "Linux", "x86_64", ("no CUDA device 0 is here",)), "no CUDA device 0 is here"),
        (RTX | {"recipe": True}, HERE, "no engine yet: run `python build.py`"),
    ],
)
def test_an_engine_that_doesnt_fit_is_refused_with_the_reason(sidecar: dict, machine: Machine, words: str):
    (found,) = misfits(sidecar, machine)
    assert words in found


def test_every_reason_is_told_at_once():
    assert len(misfits(PROPER, Machine("10.0.0", "8.6", "Windows", "arm64"))) == 4


# TensorRT proper over the recorded fake


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with the fake of TensorRT 11.4 and one GPU of compute capability 9.0, here and in child processes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), str(Path(__file__).parents[2])]))
    monkeypatch.setenv("FAKE_GPU", "9.0")
    monkeypatch.setattr(sys, "path", [str(FAKES), *sys.path])
    importlib.invalidate_caches()
    forget()
    yield monkeypatch
    forget()


def forget() -> None:
    """Let the next import of TensorRT and CUDA look again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorrt", "cuda")]:
        del sys.modules[name]


def target(folder: Path, *lines: str, nodes: list | None = None) -> Path:
    """A manifest with a target of builder tensorrt, for ``y = relu(x @ w)``."""
    nodes = nodes or [
        helper.make_node("MatMul", ["in/0:1", "w"], ["h"], name="mm"),
        helper.make_node("Relu", ["h"], ["out/0:1"], name="act"),
    ]
    weights = array("w", np.random.default_rng(1).standard_normal((3, 2)).astype(np.float32))
    made = model(nodes, [value("in/0:1", FLOAT, ["n", 3])], [value("out/0:1", FLOAT, ["n", 2])], [weights])
    save(made, folder / "m.onnx")
    text = ['[model]\npath = "m.onnx"\n[targets.gpu]\nkind = "tensorrt"\nbuilder = "tensorrt"', *lines]
    (folder / "packager.toml").write_text("\n".join(text))
    return folder / "packager.toml"


def level(result: TargetResult) -> str | None:
    return None if result.verdict is None else result.verdict.level


def test_without_library_or_gpu_the_target_says_what_is_missing(tmp_path: Path):
    made = packager.build(manifest=target(tmp_path), out=tmp_path / "dist")
    (result,) = made.targets
    assert result.status == "missing" and made.exit_code == 4
    assert "TensorRT can't be imported here" in result.message and "no CUDA device 0 is here" in result.message
    assert result.hint is not None and "allow_recipe = true" in result.hint


def test_auto_takes_rtx_where_tensorrt_proper_cant_build():
    assert library.choose(Options()).builder == "rtx"


def test_auto_takes_tensorrt_proper_where_it_and_a_gpu_are(faked: pytest.MonkeyPatch):
    assert library.choose(Options()) == library.Chosen("tensorrt", "11.4.0", "9.0")
    faked.setenv("FAKE_GPU", "")
    assert library.choose(Options()).builder == "rtx"
    with pytest.raises(ToolchainMissing, match="no CUDA device 0 is here"):
        library.choose(Options(builder="tensorrt"))


def test_a_recipe_is_never_counted_as_verified(tmp_path: Path):
    path = target(tmp_path, "allow_recipe = true")
    made = packager.build(manifest=path, out=tmp_path / "dist")
    (result,) = made.targets
    assert (result.status, level(result), result.archive, made.exit_code) == ("recipe", "none", None, 0)
    assert "built on the GPU machine" in result.message
    folder = tmp_path / "dist" / str(result.bundle)
    assert not (folder / fit.ENGINE).exists() and json.loads((folder / fit.SIDECAR).read_text())["recipe"] is True
    assert json.loads((folder / "verdict.json").read_text())["status"] == "recipe"
    assert "Nothing of it has run on a GPU yet" in (folder / "README.md").read_text()
    again = packager.verify(folder)
    assert again.exit_code == 6 and again.verdict is not None and again.verdict.status == "recipe"
    assert "skipped" in (tmp_path / "dist/junit.xml").read_text()
    path.write_text(path.read_text() + '\nmin_level = "structural"\n')
    assert packager.build(manifest=path, out=tmp_path / "dist").exit_code == 6


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of a bundle, in a fresh interpreter that knows nothing of packager but the fakes."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(FAKES), **environment},
    )  # fmt: skip


def test_a_recipe_becomes_an_engine_on_the_gpu_machine_and_its_verdict_comes_back(tmp_path: Path):
    """The way of a recipe: made here, built and checked there, and the verdict taken here."""
    path = target(tmp_path, "allow_recipe = true", 'ep_context = "beside"')
    (result,) = packager.build(manifest=path, out=tmp_path / "dist").targets
    folder = tmp_path / "dist" / str(result.bundle)
    assert not (folder / "model_ctx.onnx").exists()
    there = tmp_path / "gpu machine"
    shutil.copytree(folder, there)
    early = run(there, "verify.py", "--out", "../early.json", FAKE_GPU="9.0")
    assert early.returncode == 2 and "has no engine yet" in early.stderr
    built = run(there, "build.py", FAKE_GPU="9.0")
    assert built.returncode == 0, built.stderr
    assert (there / "built/timing.cache").read_bytes() == b"tactics"
    facts = json.loads((there / "built/engine.json").read_text())
    assert (facts["compute_capabilities"], facts["version"], facts["recipe"]) == (["9.0"], "11.4.0", False)
    (node,) = onnx.load(there / "built/model_ctx.onnx").graph.node
    found = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    assert found["source"] == b"TensorrtExecutionProvider" and found["hardware_architecture"] == b"90"
    checked = run(there, "verify.py", "--out", "../sent.json", FAKE_GPU="9.0")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert run(there, "verify.py", "--out", "../other.json", FAKE_GPU="8.9").returncode == 2
    taken = packager.verify(folder, imported=tmp_path / "sent.json")
    assert taken.exit_code == 0 and taken.verdict is not None
    assert (taken.verdict.status, taken.verdict.level, taken.verdict.version) == ("passed", "runtime", "11.4.0")
    assert json.loads((folder / "verdict.json").read_text())["runtime"]["engine"] == "built on this machine by build.py"


def test_the_self_check_says_when_it_ran_the_onnx_file(tmp_path: Path):
    (result,) = packager.build(manifest=target(tmp_path, "allow_recipe = true"), out=tmp_path / "dist").targets
    folder = tmp_path / "dist" / str(result.bundle)
    done = run(folder, "verify.py", "--out", "../onnx.json", TENSORRT_THROUGH="onnxruntime")
    assert done.returncode == 0, done.stderr
    document = json.loads((folder.parent / "onnx.json").read_text())
    assert document["level"] == "none" and "proxy for that file only" in document["level_reason"]
    taken = packager.verify(folder, imported=folder.parent / "onnx.json")
    assert taken.exit_code == 6 and taken.error is not None and "was not executed there" in taken.error.message


def test_tensorrt_proper_builds_and_runs_where_its_gpu_is(tmp_path: Path, faked: pytest.MonkeyPatch):
    (result,) = packager.build(manifest=target(tmp_path), out=tmp_path / "dist").targets
    assert (result.status, level(result)) == ("passed", "runtime") and result.verdict is not None
    assert result.verdict.runtime == "TensorRT"
    assert result.verdict.device == "CUDA device 0, compute capability 9.0"
    folder = tmp_path / "dist" / str(result.bundle)
    facts = json.loads((folder / fit.SIDECAR).read_text())
    assert (facts["version"], facts["compute_capabilities"], facts["later_too"]) == ("11.4.0", ["9.0"], False)
    assert facts["systems"] == [this_host().system]
    faked.setenv("FAKE_GPU", "8.9")
    other = packager.verify(folder)
    assert other.verdict is not None and other.verdict.level == "structural"
    assert "for compute capability 9.0; the GPU here has 8.9" in other.verdict.level_reason


def test_another_gpu_is_another_plan(tmp_path: Path, faked: pytest.MonkeyPatch):
    """Plans enter cache keys: an engine for one GPU must not be taken for another."""
    path = target(tmp_path)
    (one,) = packager.plan(manifest=path)
    faked.setenv("FAKE_GPU", "10.0")
    (other,) = packager.plan(manifest=path)
    assert one.plan != other.plan and one.plan is not None


def test_grid_sample_read_in_another_sense_is_refused(tmp_path: Path, faked: pytest.MonkeyPatch):
    """Releases up to 11.1 read ``linear`` of opset 20 as ``nearest`` (github.com/NVIDIA/TensorRT/issues/4646)."""
    faked.setenv("FAKE_GRID_SAMPLE", "nearest")
    node = helper.make_node("GridSample", ["x", "g"], ["y"], name="warp", mode="linear")
    inputs = [value("x", FLOAT, [1, 1, 4, 4]), value("g", FLOAT, [1, 2, 2, 2])]
    save(model([node], inputs, [value("y", FLOAT, [1, 1, 2, 2])], opset=20), tmp_path / "m.onnx")
    with pytest.raises(Refused, match=r"reads the modes of GridSample nodes as \['nearest'\]"):
        compiled(tmp_path / "m.onnx", grid_sample=["linear"])


def compiled(onnx: Path, **wanted: Any):
    """What the fake of TensorRT proper makes of a file."""
    from packager.targets.tensorrt import building

    defaults = {"builder": "tensorrt", "tf32": False, "optimization_level": 5, "profiles": [], "grid_sample": [],
                "wide_constants": [], "compute_capabilities": [], "compute_capabilities_named": False}  # fmt: skip
    plan = type("Plan", (), {"signature": packager.inspect(onnx).signature, "target": "gpu", "kind": "tensorrt"})
    return building._compile(onnx, {**defaults, **wanted}, plan)


def test_constants_beyond_32_bits_are_refused_for_old_releases(tmp_path: Path, faked: pytest.MonkeyPatch):
    from packager.targets.tensorrt.building import _wide_constants

    nodes = [helper.make_node("Add", ["x", "far"], ["h"]), helper.make_node("Add", ["h", "near"], ["y"])]
    constants = [array("far", np.array([2**40])), array("near", np.array([2**31 - 1]))]
    path = save(model(nodes, [value("x", INT64, [1])], [value("y", INT64, [1])], constants), tmp_path / "m.onnx")
    assert _wide_constants(path) == ["far"]
    data, _ = compiled(path, wide_constants=["far"])
    assert data.startswith(b"fake engine")
    faked.setenv("FAKE_TENSORRT", "8.6.1")
    sys.modules.pop("tensorrt")
    with pytest.raises(Refused, match=r"TensorRT 8\.6\.1 clamps 64-bit integers to 32 bits, .* far"):
        compiled(path, wide_constants=["far"])


# The Python loader


@pytest.fixture
def engine(tmp_path: Path, faked: pytest.MonkeyPatch) -> Any:
    """A loaded model with a shape tensor and two outputs, of which one is a copy of the shape."""
    nodes = [
        helper.make_node("Reshape", ["x", "shape_in"], ["y"]),
        helper.make_node("Identity", ["shape_in"], ["shape_out"]),
    ]
    inputs = [value("x", FLOAT, ["n", 4]), value("shape_in", INT64, [2])]
    outputs = [value("y", FLOAT, ["a", "b"]), value("shape_out", INT64, [2])]
    save(model(nodes, inputs, outputs), tmp_path / "m.onnx")
    (tmp_path / "packager.toml").write_text(
        '[model]\npath = "m.onnx"\n[golden]\npath = "g"\n[targets.gpu]\nkind = "tensorrt"\nbuilder = "tensorrt"\n'
        "[targets.gpu.values]\nshape_in = [[1, 1], [2, 2], [8, 8]]\n"
    )
    (tmp_path / "g").mkdir()
    for n in (1, 3):
        x = np.arange(4 * n, dtype=np.float32).reshape(n, 4)
        np.savez(tmp_path / f"g/{n}.npz", x=x, shape_in=np.array([2, 2 * n]))
    (result,) = packager.build(manifest=tmp_path / "packager.toml", out=tmp_path / "dist").targets
    assert (result.status, level(result)) == ("passed", "runtime"), result.message
    from packager.targets.tensorrt.infer import Model

    return Model(tmp_path / "dist" / str(result.bundle))


def test_the_loader_runs_shape_tensors_and_outputs_that_are_shapes(engine: Any):
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for shape in ([4, 2], [1, 8]):
        found = engine.run({"x": x, "shape_in": np.array(shape)})
        assert found["y"].tolist() == x.reshape(shape).tolist() and found["shape_out"].tolist() == shape


@pytest.mark.parametrize("rows", [0, 4])
def test_the_loader_refuses_sizes_beyond_the_profile(engine: Any, rows: int):
    with pytest.raises(ValueError, match=r"input 'x' has shape .* from \[1, 4\] to \[3, 4\]"):
        engine.run({"x": np.zeros((rows, 4), np.float32), "shape_in": np.array([rows, 4])})


def test_the_loader_refuses_a_foreign_engine_before_reading_it(tmp_path: Path, faked: pytest.MonkeyPatch):
    (result,) = packager.build(manifest=target(tmp_path), out=tmp_path / "dist").targets
    folder = tmp_path / "dist" / str(result.bundle)
    facts = json.loads((folder / fit.SIDECAR).read_text())
    (folder / fit.SIDECAR).write_text(json.dumps(facts | {"version": "10.0.1"}))
    (folder / fit.ENGINE).unlink()  # so that reading it would be another error
    from packager.targets.tensorrt.infer import Model

    with pytest.raises(fit.Misfit, match=r"built by TensorRT 10\.0\.1 and runs in no other release; 11\.4\.0 is here"):
        Model(folder)


def test_an_engine_that_fits_and_doesnt_load_fails_verification(tmp_path: Path, faked: pytest.MonkeyPatch):
    (result,) = packager.build(manifest=target(tmp_path), out=tmp_path / "dist").targets
    folder = tmp_path / "dist" / str(result.bundle)
    (folder / fit.ENGINE).write_bytes(b"another thing")
    from packager.errors import VerificationError
    from packager.targets.tensorrt.running import loaded

    with pytest.raises(VerificationError, match="magic tag does not match"), loaded(folder):
        pass


# The fake itself


def test_the_fakes_surface_is_that_of_the_real_bindings():
    """Held against TensorRT for RTX, whose classes are TensorRT's, and CUDA's package: no name but theirs."""
    real = importlib.import_module("tensorrt_rtx_bindings")
    spec = importlib.util.spec_from_file_location("recorded_fake", FAKES / "tensorrt/__init__.py")
    assert spec is not None and spec.loader is not None
    fake = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake)
    checked = 0
    for name, cls in vars(fake).items():
        if not isinstance(cls, type) or cls.__module__ != "recorded_fake" or name.startswith("_"):
            continue
        assert hasattr(real, name), name
        for member in vars(cls):
            if not member.startswith("_"):
                assert hasattr(getattr(real, name), member), f"{name}.{member}"
                checked += 1
    assert checked > 40
    forget()
    cuda, recorded = importlib.import_module("cuda.bindings.runtime"), FAKES / "cuda/bindings/runtime.py"
    for name in re.findall(r"^(?:def|class) (\w+)", recorded.read_text(), re.M):
        assert hasattr(cuda, name), name
    for name, number in (("cudaMemcpyHostToDevice", 1), ("cudaMemcpyDeviceToHost", 2)):
        assert getattr(cuda.cudaMemcpyKind, name) == number
    assert cuda.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor == 75
