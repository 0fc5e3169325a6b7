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
from packager.cli import _run
from packager.host import this_host
from packager.results import TargetResult
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


def masked(path: Path) -> Path:
    """Attention scores with a mask of -3.4e38, as exporters write it: ``softmax(x + mask)``; a row may be masked."""
    nodes = [
        node("MatMul", ["x", "same"], ["scores"], name="scores"),
        node("Mul", ["hidden", "low"], ["penalty"], name="penalty"),
        node("Add", ["scores", "penalty"], ["shifted"], name="mask"),
        node("Softmax", ["shifted"], ["y"], name="attend", axis=-1),
    ]
    values = [builders.value("x", shape=("n", 4)), builders.value("hidden", shape=("n", 4))]
    weights = [const("same", np.eye(4)), const("low", np.finfo(np.float32).min)]
    return builders.save(builders.model(nodes, values, [builders.value("y", shape=("n", 4))], weights), path)


MASKED = {
    "x": np.array([[1, 2, 3, 4], [4, 3, 2, 1]], np.float32),
    "hidden": np.array([[0, 0, 1, 1], [1, 1, 1, 1]], np.float32),
}


def squared(path: Path) -> Path:
    """``sqrt(x ** 2)``; 300 squared is beyond float16's 65504."""
    nodes = [
        node("MatMul", ["x", "same"], ["m"], name="mul"),
        node("Pow", ["m", "two"], ["p"], name="square"),
        node("Sqrt", ["p"], ["y"], name="root"),
    ]
    values = [builders.value("x", shape=("n", 4))], [builders.value("y", shape=("n", 4))]
    weights = [const("two", 2), const("same", np.eye(4))]
    return builders.save(builders.model(nodes, *values, weights), path)


BROKEN = [
    (masked, MASKED, "fp32", "half", "Mul 'penalty'"),
    (squared, {"x": np.array([[300, 250, 1, -300]], np.float32)}, "fp32", "half", "Pow 'square'"),
    (
        network,
        {"x": np.linspace(-1, 1, 192, dtype=np.float32).reshape(3, 64)},
        "int8-static",
        "scale",
        "QuantizeLinear 'y_Q",
    ),
]


@pytest.mark.parametrize(("make", "feeds", "precision", "fault", "at_fault"), BROKEN)
def test_a_broken_conversion_is_caught_and_explained_by_node(
    tiny: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make,
    feeds,
    precision: str,
    fault: str,
    at_fault: str,
):
    """As a user meets it: the build fails, nothing is placed, verifying fails again, explaining names the node."""
    model = make(tmp_path / "m.onnx")
    np.savez(tmp_path / "g.npz", **feeds)
    table = target("tiny", precision, f'fault = "{fault}"')
    path, out = manifest(tmp_path, table, more='[golden]\npath = "g.npz"'), tmp_path / "dist"
    assert _run(["build", "-m", str(path), "-o", str(out)]) == 6
    rejected = out / "rejected" / f"m-0.0.0-tiny-{precision}"
    assert not (out / rejected.name).exists()
    document = json.loads((out / "report.json").read_text())["targets"][0]
    assert document["status"] == "failed"
    divergence = next(line for line in document["diagnosis"] if "first divergence" in line)
    assert at_fault in divergence
    capsys.readouterr()
    assert _run(["verify", str(rejected)]) == 6
    capsys.readouterr()
    assert _run(["explain", str(rejected), "--model", str(model), "--format", "json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert at_fault in explained["target"][0]["node"]


@pytest.mark.parametrize(
    ("make", "feeds", "node"), [(masked, MASKED, "Mul 'penalty'"), (*BROKEN[1][:2], "Pow 'square'")]
)
def test_the_shared_conversion_keeps_such_a_node_in_float_and_says_so(
    tiny: str, tmp_path: Path, make, feeds, node: str
):
    make(tmp_path / "m.onnx")
    np.savez(tmp_path / "g.npz", **feeds)
    path = manifest(tmp_path, target("tiny", "fp16"), more='[golden]\npath = "g.npz"')
    result = packager.build(manifest=path, out=tmp_path / "dist").targets[0]
    assert result.status == "passed", result.message
    assert any(note.startswith("kept in fp32") and node in note for note in result.notes)
