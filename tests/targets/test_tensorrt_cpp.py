"""The C++ loader of a bundle, compiled by CMake against stub headers (``tests/fakes/stubs``) and run.

The stubs have the signatures of TensorRT 10 and later; their engine gives its first input back. So what is shown is
that the loader compiles, refuses what doesn't fit and handles tensors, not that a GPU computes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from packager.render import render
from packager.room import kind_named
from packager.targets.tensorrt import fit
from packager.targets.tensorrt.building import CPP
from tests.targets.test_tensorrt import built, relu

STUBS = Path(__file__).parents[1] / "fakes/stubs"
HOSTILE = 'in/0:1 "x\\n\n??/'

needs_a_compiler = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a C++ compiler"
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a real engine for ``out = relu(in/0:1)``, between 1 and 3 rows."""
    folder = tmp_path_factory.mktemp("cpp")
    return built(relu(folder, ["n", 3]), folder / "bundle")[1]


@pytest.fixture(scope="module")
def program(bundle: Path) -> Path:
    """The loader's program, configured and built by the bundle's own CMakeLists.txt."""
    sdk = bundle.parent / "sdk"
    (sdk / "lib").mkdir(parents=True)
    shutil.copytree(STUBS, sdk / "include")
    (sdk / "empty.c").write_text("")
    for name in ("tensorrt_rtx", "cudart"):  # everything of the stubs is in their headers
        subprocess.run(["cc", "-shared", "-o", sdk / f"lib/lib{name}.so", sdk / "empty.c"], check=True)
    out = bundle.parent / "build"
    arguments = [f"-DTENSORRT_ROOT={sdk}", f"-DCUDA_ROOT={sdk}", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"]
    configure = ["cmake", "-S", str(bundle / "cpp"), "-B", str(out), *arguments]
    for command in (configure, ["cmake", "--build", str(out)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return out / "run_engine"


def run(program: Path, *arguments: str, gpu: str = "8.9") -> subprocess.CompletedProcess[str]:
    major, _, minor = gpu.partition(".")
    environment = {**os.environ, "STUB_MAJOR": major, "STUB_MINOR": minor}
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=environment)


@needs_a_compiler
def test_the_loader_runs_on_a_machine_that_fits(bundle: Path, program: Path, tmp_path: Path):
    np.arange(6, dtype="<f4").tofile(tmp_path / "in.raw")
    done = run(program, str(bundle / fit.ENGINE), f"in/0:1={tmp_path / 'in.raw'}:2x3")
    assert done.returncode == 0, done.stderr
    assert "out: 2 3 (24 bytes)" in done.stdout


@needs_a_compiler
@pytest.mark.parametrize("gpu", ["7.5", "9.0"])
def test_the_loader_refuses_a_gpu_the_engine_isnt_for_before_reading_it(program: Path, gpu: str):
    done = run(program, "no such file", gpu=gpu)
    assert done.returncode == 3
    assert f"compute capability 8.0, 8.6, 8.9, 12.0 and later; the GPU here has {gpu}" in done.stderr


@needs_a_compiler
def test_the_loader_refuses_sizes_beyond_the_profile(bundle: Path, program: Path, tmp_path: Path):
    np.zeros(12, "<f4").tofile(tmp_path / "in.raw")
    done = run(program, str(bundle / fit.ENGINE), f"in/0:1={tmp_path / 'in.raw'}:4x3")
    assert done.returncode == 1 and "has shape [4, 3], the engine was built for [1, 3] to [3, 3]" in done.stderr


@needs_a_compiler
@pytest.mark.parametrize("builder", ["rtx", "tensorrt"])
def test_the_loader_of_another_release_refuses_and_hostile_names_stay_text(tmp_path: Path, bundle: Path, builder: str):
    """Compiled as for each builder, with names that would end a C++ string."""
    kind, facts = kind_named("tensorrt"), json.loads((bundle / fit.SIDECAR).read_text())
    profile = [{"name": HOSTILE, "shapes": [[1, 3]] * 3, "values": None}]
    facts |= {"builder": builder, "version": "1.7.0.5", "profiles": profile}
    spec = {"name": HOSTILE, "dtype": "float32", "dims": [1, 3]}
    for name in CPP:
        values = {"name": "m", "signature": {"inputs": [spec], "outputs": [spec]}, "sidecar": facts}
        (tmp_path / name).write_text(render(kind, f"tensorrt/cpp/{name}.j2", **values))
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", str(STUBS)]
    sources = [str(tmp_path / "engine.cpp"), str(tmp_path / "main.cpp")]
    done = subprocess.run(
        ["c++", *flags, *sources, "-o", tmp_path / "program"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    refused = run(tmp_path / "program", "no such file")
    assert refused.returncode == 3
    assert "built by TensorRT for RTX 1.7.0.5 and runs in no other release; 1.7.1.116 is here" in refused.stderr
