"""Small models for synthesis, opened, run and fed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from packager.golden_formats import check_case
from packager.golden_synth import synthesise
from packager.goldens import GoldenSet
from packager.model import Model, open_model
from tests import builders
from tests.builders import FLOAT, value

DOUBLE, UINT8 = TensorProto.DOUBLE, TensorProto.UINT8


def node(op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, domain=domain, **attributes)


def table(name: str, rows: int, width: int = 4) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones((rows, width), np.float32), name)


def numbers(name: str, *items: int, shape: tuple[int, ...] | None = None) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(items, np.int64).reshape(shape or (len(items),)), name)


def built(folder: Path, nodes, inputs, outputs=None, initializers=(), **options) -> Model:
    """An opened model; without outputs, the last node's first is a float tensor of unknown rank."""
    outputs = outputs or [value(nodes[-1].output[0], FLOAT, None)]
    return open_model(builders.save(builders.model(nodes, inputs, outputs, initializers, **options), folder / "m.onnx"))


def run(model: Model, goldens: GoldenSet) -> list[list[np.ndarray]]:
    """Run every case in ONNX Runtime without optimisation."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
    return [session.run(None, dict(case.inputs)) for case in goldens.cases]


def drawn(model: Model, name: str, **options) -> list[Any]:
    goldens = synthesise(model, **options)
    for case in goldens.cases:
        check_case(case, model.signature, case.name)
    return [case.inputs[name] for case in goldens.cases]
