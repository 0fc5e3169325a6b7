"""Golden files in every format, and assertions on what is read from them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from onnx import numpy_helper

from packager.errors import GoldenError
from packager.golden_formats import read_goldens
from packager.goldens import GoldenCase, GoldenSet
from packager.model import Signature, TensorSpec

X = np.arange(6, dtype=np.float32).reshape(2, 3)


Y = X * 2


SIGNATURE = Signature((TensorSpec("x", "float32", ("n", 3)),), (TensorSpec("y", "float32", ("n", 3)),))


def signature(dtype: str, dims: tuple[int | str | None, ...] | None = ("n", 3)) -> Signature:
    return Signature((TensorSpec("x", dtype, dims),), (TensorSpec("y", dtype, dims),))


def npz(path: Path, **arrays: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **cast("dict[str, Any]", arrays))
    return path


def proto(path: Path, array: np.ndarray, name: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(numpy_helper.from_array(array, name).SerializeToString())


def saved(array: np.ndarray) -> dict[str, str]:
    """An array as Polygraphy writes it."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return {"array": base64.b64encode(stream.getvalue()).decode(), "polygraphy_class": "ndarray"}


def run_results(*iterations: dict[str, np.ndarray], runners: int = 1) -> dict[str, object]:
    """Outputs as ``polygraphy run --save-outputs`` writes them."""
    listed = [
        {
            "outputs": {k: {"values": saved(v), "polygraphy_class": "LazyArray"} for k, v in one.items()},
            "runtime": 0.1,
            "runner_name": "onnxrt",
            "polygraphy_class": "IterationResult",
        }
        for one in iterations
    ]
    return {"lst": [[f"onnxrt-{number}", listed] for number in range(runners)], "polygraphy_class": "RunResults"}


def tensor(name: str, array: np.ndarray, datatype: str = "FP32") -> dict[str, object]:
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array.reshape(-1).tolist()}


def write_json(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def refused(path: Path, sig: Signature = SIGNATURE, **options) -> GoldenError:
    with pytest.raises(GoldenError) as caught:
        read_goldens(path, sig, **options)
    assert caught.value.exit_code == 3
    return caught.value


def assert_one_case(goldens: GoldenSet, *, outputs: bool = True) -> GoldenCase:
    (case,) = goldens.cases
    np.testing.assert_array_equal(case.inputs["x"], X)
    assert case.inputs["x"].dtype == np.float32
    assert case.outputs_from == ("source" if outputs else "")
    if outputs:
        np.testing.assert_array_equal(case.outputs["y"], Y)
    else:
        assert not case.outputs
    return case
