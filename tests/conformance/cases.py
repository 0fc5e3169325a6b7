"""The node cases that onnx generates, each in a folder of its own: model, inputs and the outputs that onnx expects."""

from __future__ import annotations

import importlib.metadata
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

MODEL, INPUTS, EXPECTED = "model.onnx", "inputs/test_data_set_0", "expected"
RTOL, ATOL = 1e-3, 1e-7
"""Every node case of onnx has these (``onnx.backend.test.case.test_case``)."""

BFLOAT16_RTOL = 2**-6
"""Two units in the last place, as onnx's own runner allows (``onnx.backend.test.runner``)."""


@dataclass(frozen=True)
class Case:
    """One case, by name, and its folder."""

    name: str
    folder: Path

    @property
    def model(self) -> Path:
        """The model."""
        return self.folder / MODEL

    @property
    def inputs(self) -> Path:
        """Its inputs, as ONNX's own test data."""
        return self.folder / INPUTS


def all_cases(root: Path) -> list[Case]:
    """Every case by name, generated into a folder of ``root`` that is named by onnx's version, unless it is there."""
    folder = root / f"onnx-{importlib.metadata.version('onnx')}"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as name:
            made = Path(name) / "cases"
            _generate(made)
            made.rename(folder)
    return [Case(path.name, path) for path in sorted(folder.iterdir())]


def _generate(folder: Path) -> None:
    from onnx.backend.test.case.node import collect_testcases

    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # casts that overflow and logarithms of 0 are what some cases are about
        collected = collect_testcases(None)
    for case in collected:
        if (case.rtol, case.atol) != (RTOL, ATOL):
            raise ValueError(f"{case.name} has tolerances of its own: {case.rtol}, {case.atol}")
        ((inputs, outputs),) = case.data_sets
        place = Case(case.name, folder / case.name)
        place.inputs.mkdir(parents=True)
        (place.folder / EXPECTED).mkdir()
        place.model.write_bytes(case.model.SerializeToString())
        for number, (value, info) in enumerate(zip(inputs, case.model.graph.input, strict=True)):
            (place.inputs / f"input_{number}.pb").write_bytes(_stored(value, info))
        for number, (value, info) in enumerate(zip(outputs, case.model.graph.output, strict=True)):
            (place.folder / EXPECTED / f"output_{number}.pb").write_bytes(_stored(value, info))


def _stored(value: Any, info: onnx.ValueInfoProto) -> bytes:
    if isinstance(value, (onnx.TensorProto, onnx.SequenceProto, onnx.OptionalProto)):
        return bytes(value.SerializeToString())
    makers = {"sequence_type": numpy_helper.from_list, "optional_type": numpy_helper.from_optional}
    make = makers.get(info.type.WhichOneof("value"), numpy_helper.from_array)
    return bytes(make(value, info.name).SerializeToString())


def operators(case: Case) -> tuple[str, ...]:
    """What the case's graph is made of, sorted."""
    graph = onnx.load(case.model).graph
    return tuple(sorted({f"{node.domain}.{node.op_type}".lstrip(".") for node in graph.node}))


def expected(folder: Path) -> dict[str, np.ndarray]:
    """The tensors among the outputs that onnx expects of the case in ``folder``."""
    found = {}
    for number, info in enumerate(onnx.load(folder / MODEL).graph.output):
        if info.type.HasField("tensor_type"):
            proto = onnx.TensorProto.FromString((folder / EXPECTED / f"output_{number}.pb").read_bytes())
            found[info.name] = np.asarray(numpy_helper.to_array(proto))
    return found


def differences(wanted: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]) -> list[str]:
    """How answers differ from what is expected by onnx's own rule, one sentence an output of ``wanted``.

    Floats are held to the tolerances of the case, all else to equality.
    """
    told = {name: _difference(array, np.asarray(got[name])) for name, array in wanted.items()}
    return [f"output '{name}': {text}" for name, text in told.items() if text]


def _difference(wanted: np.ndarray, got: np.ndarray) -> str:
    if got.shape != wanted.shape:
        return f"shape {list(got.shape)}, expected {list(wanted.shape)}"
    if wanted.dtype.kind in "OUS":
        same = [str(one) == str(other) for one, other in zip(got.ravel(), wanted.ravel(), strict=True)]
        return "" if all(same) else "other strings"
    if got.dtype != wanted.dtype:
        return f"{got.dtype}, expected {wanted.dtype}"
    if wanted.dtype.kind in "biu":
        wrong = got != wanted
    else:
        rtol = BFLOAT16_RTOL if wanted.dtype.name == "bfloat16" else RTOL
        wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
        with np.errstate(all="ignore"):
            wrong = ~np.isclose(got.astype(wide), wanted.astype(wide), rtol=rtol, atol=ATOL, equal_nan=True)
    if not wrong.any():
        return ""
    place = tuple(int(index) for index in np.argwhere(wrong)[0])
    first = f"first at {list(place)}: {got[place]}, expected {wanted[place]}"
    return f"{int(wrong.sum())} of {wrong.size} values differ, {first}"
