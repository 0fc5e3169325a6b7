"""int8 on a CPU without VNNI: ONNX Runtime's own kernels for it, run on an emulated Haswell.

There the products of u8 and s8 are summed two by two in 16 bits, and saturate. What packager promises of int8 must hold
on such machines too: of its reference, of models quantised dynamically (whose weights keep 7 bits), and of QDQ models.
"""

from __future__ import annotations

import os
import platform
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from packager.golden_synth import synthesise
from packager.goldens import GoldenCase, GoldenSet
from packager.model import open_model
from packager.reference import OrtSession
from packager.transform import Context
from packager.transform_exact_int8 import ExactInt8
from packager.transform_int8 import Int8Dynamic, Int8Static
from packager.transforming import apply
from tests.builders import model, save, value

EXACT = "session.x64quantprecision=1"
QEMU = shutil.which("qemu-x86_64")
pytestmark = pytest.mark.skipif(
    QEMU is None or platform.machine() != "x86_64", reason="needs an x86-64 machine with qemu-x86_64 (qemu-user)"
)


def on_haswell(path: Path, feeds: dict[str, Any], work: Path, *settings: str) -> dict[str, Any]:
    """A model's outputs on an emulated Haswell: AVX2 and FMA, no AVX-512, no VNNI, no AMX."""
    np.savez(work / "feeds.npz", **feeds)
    program = [str(Path(sys.executable).resolve()), str(Path(__file__).with_name("old_cpu.py"))]
    places = os.pathsep.join(site.getsitepackages())
    subprocess.run(
        [str(QEMU), "-cpu", "Haswell", *program, str(path), str(work / "feeds.npz"), str(work / "out.npz"), *settings],
        check=True, capture_output=True, timeout=600,
        env={**os.environ, "PYTHONPATH": places, "OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Haswell"},
    )  # fmt: skip
    return dict(np.load(work / "out.npz"))


def extreme(path: Path) -> Path:
    """Sums of 64 products of 255 and 127: two of them exceed 16 bits."""
    weights = numpy_helper.from_array(np.full((64, 3), 127, np.int8), "w")
    nodes = [helper.make_node("MatMulInteger", ["x", "w"], ["y"])]
    inputs, outputs = [value("x", TensorProto.UINT8, [1, 64])], [value("y", TensorProto.INT32, [1, 3])]
    return save(model(nodes, inputs, outputs, [weights]), path)


def test_the_emulated_cpu_saturates_and_the_setting_of_the_reference_prevents_it(tmp_path: Path):
    path, feeds = extreme(tmp_path / "m.onnx"), {"x": np.full((1, 64), 255, np.uint8)}
    assert on_haswell(path, feeds, tmp_path)["y"].tolist() == [[32 * 32767] * 3], "each pair ends at 32767"
    assert on_haswell(path, feeds, tmp_path, EXACT)["y"].tolist() == [[64 * 255 * 127] * 3]
    assert OrtSession(path, quantized=True).run(feeds, ["y"], "")["y"].tolist() == [[64 * 255 * 127] * 3]


def test_unsigned_weights_are_exact_there_without_any_setting(tmp_path: Path):
    source, feeds = extreme(tmp_path / "m.onnx"), {"x": np.full((1, 64), 255, np.uint8)}
    (tmp_path / "out").mkdir()
    goldens = GoldenSet((GoldenCase("0", feeds),))
    made = apply((ExactInt8(),), Context(source, tmp_path, goldens), tmp_path / "out/m.onnx").path
    assert on_haswell(made, feeds, tmp_path)["y"].tolist() == [[64 * 255 * 127] * 3]


def test_dynamic_int8_is_exact_without_any_setting(tmp_path: Path):
    rng = np.random.default_rng(4)
    weights = numpy_helper.from_array(np.sign(rng.normal(0, 1, (128, 64))).astype(np.float32) * 3, "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="layer")]
    source = save(model(nodes, [value("x", shape=["n", 128])], [value("y", shape=["n", 64])], [weights]),
                  tmp_path / "m.onnx")  # fmt: skip
    feeds: dict[str, Any] = {"x": (np.abs(rng.normal(0, 1, (4, 128))) + 1).astype(np.float32)}
    (tmp_path / "out").mkdir()
    goldens = synthesise(open_model(source), cases=1)
    made = apply((Int8Dynamic(),), Context(source, tmp_path, goldens), tmp_path / "out/m.onnx").path
    assert "MatMulInteger" in {node.op_type for node in open_model(made).structure.walk()}
    expected: Any
    (expected,) = ReferenceEvaluator(str(made)).run(None, dict(feeds))
    np.testing.assert_allclose(on_haswell(made, feeds, tmp_path)["y"], expected, rtol=1e-6)


def test_a_real_model_in_static_int8_answers_there_as_it_does_here(tmp_path: Path, corpus: Path):
    source = corpus / "file_type.onnx"
    goldens = synthesise(open_model(source), cases=1)
    (tmp_path / "out").mkdir()
    made = apply((Int8Static(),), Context(source, tmp_path, goldens), tmp_path / "out/m.onnx").path
    feeds = dict(goldens.cases[0].inputs)
    here: Any = OrtSession(made, quantized=True).run(feeds, ["target_label"], "")["target_label"]
    there = on_haswell(made, feeds, tmp_path, EXACT)["target_label"]
    assert there.dtype == here.dtype
    assert float(np.max(np.abs(there - here))) < 1e-6
