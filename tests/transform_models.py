"""What the tests of transforms share: run passes over a model in a folder, compare both in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from packager.goldens import GoldenSet
from packager.transform import Context, Pass
from packager.transforming import Applied, apply
from tests import builders
from tests.builders import FLOAT, value


@dataclass(frozen=True)
class Made:
    """The source, what became of it, and its file read back."""

    source: Path
    applied: Applied
    proto: onnx.ModelProto

    def ops(self) -> list[str]:
        return [node.op_type for node in self.proto.graph.node]


def array(name: str, data) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(data), name)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def f32(data) -> np.ndarray:
    return np.array(data, np.float32)


def u8(data) -> np.ndarray:
    return np.array(data, np.uint8)


def model(folder: Path, nodes, inputs=None, outputs=None, initializers=(), **options) -> Path:
    """A saved model; by default float ``x`` [n, 3] in, and the last node's output, of unknown rank, out."""
    inputs = [value("x")] if inputs is None else inputs
    outputs = outputs or [value(nodes[-1].output[0], FLOAT, None)]
    return builders.save(builders.model(nodes, inputs, outputs, initializers, **options), folder / "m.onnx")


def transform(source: Path, folder: Path, *passes: Pass, **options) -> Made:
    """Apply passes; the result lies in a folder of its own."""
    out = folder / f"out-{len(list(folder.iterdir()))}"
    out.mkdir()
    applied = apply(passes, Context(source, folder, GoldenSet(())), out / "model.onnx", **options)
    return Made(source, applied, onnx.load(str(applied.path)))


def answer(path: Path, feeds: Mapping[str, np.ndarray]) -> list:
    """ONNX Runtime without optimisation and without prepacked weights, whose kernels sum in another order."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    answers: list = session.run(None, dict(feeds))
    return answers


def same(made: Made, **feeds: np.ndarray) -> list:
    """Assert that source and result answer bit for bit alike; gives the answers."""
    before, after = answer(made.source, feeds), answer(made.applied.path, feeds)
    assert len(before) == len(after) > 0
    for one, other in zip(before, after, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes()
    return after


def names(made: Made) -> tuple[Sequence[str], Sequence[str]]:
    return [item.name for item in made.proto.graph.input], [item.name for item in made.proto.graph.output]
