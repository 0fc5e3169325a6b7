"""Every precision of three kinds out of one manifest, as a user builds them: what the precision cost, and the runtime.

And conversions that are broken on purpose: each is caught, and the node at fault is named.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

import packager
from packager.host import this_host
from packager.results import Report, TargetResult
from tests import builders

KINDS = ("web", "openvino", "triton")
PRECISIONS = ("fp32", "fp16", "int8-dynamic", "int8-static", "auto")
node = helper.make_node


def const(name: str, array: object, dtype: type = np.float32) -> object:
    return numpy_helper.from_array(np.asarray(array, dtype), name)


def network(path: Path) -> Path:
    """Two layers with a Relu between, 64 -> 48 -> 10: large enough to lose something at every precision."""
    random = np.random.default_rng(5)
    nodes = [
        node("MatMul", ["x", "w"], ["m"], name="first"),
        node("Add", ["m", "b"], ["a"], name="shift"),
        node("Relu", ["a"], ["r"], name="act"),
        node("MatMul", ["r", "v"], ["y"], name="last"),
    ]
    weights = [
        const("w", random.normal(0, 0.2, (64, 48))),
        const("b", random.normal(0, 0.2, 48)),
        const("v", random.normal(0, 0.2, (48, 10))),
    ]
    values = [builders.value("x", shape=("n", 64))], [builders.value("y", shape=("n", 10))]
    return builders.save(builders.model(nodes, *values, weights), path)


def manifest(folder: Path, *targets: str, more: str = "") -> Path:
    """A manifest beside the model ``m.onnx`` with these target tables."""
    path = folder / "packager.toml"
    path.write_text(f'[model]\npath = "m.onnx"\n{more}\n' + "\n".join(targets))
    return path


def target(kind: str, precision: str, more: str = "") -> str:
    return f'[targets.{kind}-{precision}]\nkind = "{kind}"\nprecision = "{precision}"\n{more}\n'


def test_one_manifest_gives_three_kinds_at_every_precision_with_both_parities(tmp_path: Path):
    network(tmp_path / "m.onnx")
    tables = [target(kind, precision) for kind in KINDS for precision in PRECISIONS]
    report = packager.build(manifest=manifest(tmp_path, *tables), out=tmp_path / "dist")
    assert [result.message for result in report.targets if result.status != "passed"] == []
    assert len(report.targets) == len(KINDS) * len(PRECISIONS)
    for result in report.targets:
        check_parities(tmp_path / "dist" / str(result.bundle), result)
    took = {result.target: result.precision for result in report.targets if result.target.endswith("-auto")}
    assert took == {f"{kind}-auto": "int8-static" for kind in KINDS}


def check_parities(bundle: Path, result: TargetResult) -> None:
    """The verdict in the bundle tells the precision's cost from the runtime's, and on which CPU it was found."""
    document = json.loads((bundle / "verdict.json").read_text())
    assert document["host"]["features"] == list(this_host().features)
    assert result.verdict is not None
    if result.precision == "fp32":
        assert result.verdict.transform is None
        return
    parities = document["parities"]
    precision, runtime = (
        parities["transformed model against reference"]["max_abs"],
        parities["bundle against transformed model"]["max_abs"],
    )
    low, high = (1e-6, 1e-2) if result.precision == "fp16" else (1e-3, 0.5)
    assert low < precision < high, f"{result.target}: the precision cost {precision}"
    assert runtime is not None and runtime < high
    total = document["outputs"][0]["max_abs"]["value"] if "outputs" in document else result.verdict.max_abs
    assert total is not None and total <= (precision + runtime) * 1.001 + 1e-6
