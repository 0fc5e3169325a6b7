"""A target's dialect: transforms that run before the room plans, what they cost, and the ladder of `auto`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import packager
from packager import child, dialect, transform_registry
from packager.dialect import passes_for, passes_text, steps_of
from packager.errors import GoldenError, InternalError, Refused
from packager.goldens import GoldenCase, GoldenSet
from packager.model import open_model
from packager.precisions import Conversion
from packager.report import table
from packager.results import Report, TargetResult
from packager.room import Dialect, Kind, kind_named
from packager.transform_registry import load_pass
from tests import builders


def dense(path: Path, opset: int = 17, scale: float = 1.0) -> Path:
    """``y = Relu(x @ w + b)`` with 64 inputs and 32 outputs."""
    random = np.random.default_rng(0)
    weight = numpy_helper.from_array((random.standard_normal((64, 32)) * scale).astype(np.float32), "w")
    bias = numpy_helper.from_array(random.standard_normal(32).astype(np.float32), "b")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="mul"),
        helper.make_node("Add", ["m", "b"], ["a"], name="add"),
        helper.make_node("Relu", ["a"], ["y"], name="act"),
    ]
    values = [builders.value("x", shape=("n", 64))], [builders.value("y", shape=("n", 32))]
    return builders.save(builders.model(nodes, *values, [weight, bias], opset=opset), path)


def build(model: Path, out: Path, precision: str, more: str = "") -> tuple[Report, TargetResult]:
    manifest = model.with_name("packager.toml")
    manifest.write_text(f'[model]\npath = "{model.name}"\n{more}[targets.tiny]\nprecision = "{precision}"\n')
    report = packager.build(manifest=manifest, out=out)
    return report, report.targets[0]


@pytest.mark.parametrize(("precision", "low", "high"), [("fp16", 1e-5, 1e-1), ("int8-dynamic", 1e-3, 3.0)])
def test_what_the_precision_cost_and_what_the_runtime_cost_are_told_apart(
    tiny: str, tmp_path: Path, precision: str, low: float, high: float
):
    report, result = build(dense(tmp_path / "m.onnx"), tmp_path / "dist", precision)
    verdict = result.verdict
    assert result.status == "passed" and verdict is not None
    assert verdict.transform is not None and verdict.target is not None and verdict.max_abs is not None
    assert verdict.transform.max_abs is not None and low < verdict.transform.max_abs < high
    assert verdict.target.max_abs is not None and verdict.target.max_abs < verdict.transform.max_abs
    assert verdict.max_abs == pytest.approx(verdict.transform.max_abs + verdict.target.max_abs, rel=0.9)
    bundle = tmp_path / f"dist/{result.bundle}"
    document = json.loads((bundle / "verdict.json").read_text())
    parities = document["parities"]
    assert parities["transformed model against reference"]["max_abs"] == verdict.transform.max_abs
    assert parities["bundle against transformed model"]["max_abs"] == verdict.target.max_abs
    seal = json.loads((bundle / "bundle.json").read_text())
    assert [each["name"] for each in seal["plan"]["transforms"]] == [precision]
    assert seal["model"]["digest"] == open_model(tmp_path / "m.onnx").digest, (
        "the user's model, not the transformed one"
    )
    assert "of it, the precision" in (bundle / "README.md").read_text()
    assert "the transformed model against the reference: max abs" in table(report)
    again = packager.verify(bundle)
    assert again.verdict is not None and again.verdict.transform == verdict.transform
    assert again.verdict.target == (verdict.target if precision == "int8-dynamic" else None), "int8's answers go along"


def test_the_shipped_model_is_the_transformed_one_and_smaller(tiny: str, tmp_path: Path):
    path = dense(tmp_path / "m.onnx")
    _, result = build(path, tmp_path / "dist", "fp16")
    shipped = tmp_path / f"dist/{result.bundle}/model.onnx"
    assert shipped.stat().st_size < 0.7 * path.stat().st_size
    assert {tensor.dtype for tensor in open_model(shipped).structure.tensors() if tensor.elements > 1} == {"float16"}


def test_an_unchanged_transform_comes_from_the_cache(tiny: str, tmp_path: Path):
    path = dense(tmp_path / "m.onnx")
    build(path, tmp_path / "one", "fp16")
    assert build(path, tmp_path / "two", "fp16")[1].cached


@pytest.mark.parametrize("scaled", [1.0, 1e-9])
def test_targets_with_the_same_dialect_share_the_work_and_its_refusal(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaled: float
):
    called, whole = list[str](), child.call

    def counted(*given: Any, what: str, **more: Any) -> Any:
        called.append(what)
        return whole(*given, what=what, **more)

    monkeypatch.setattr(child, "call", counted)
    dense(tmp_path / "m.onnx")
    targets = "".join(f'[targets.{name}]\nkind = "tiny"\nprecision = "fp16"\n' for name in ("one", "two", "three"))
    (tmp_path / "packager.toml").write_text(f'[model]\npath = "m.onnx"\n[tolerance.fp16]\nscaled = {scaled}\n{targets}')
    report = packager.build(manifest=tmp_path / "packager.toml", out=tmp_path / "dist", cache=False, jobs=3)
    assert called.count("transforming the model") == 1
    assert len({(result.status, result.message) for result in report.targets}) == 1
    assert (report.exit_code == 0) == (scaled == 1.0)
    if report.exit_code == 0:
        digests = [json.loads((tmp_path / f"dist/{each.bundle}/bundle.json").read_text()) for each in report.targets]
        assert len({str(each["plan"]["transforms"]) for each in digests}) == 1


def test_a_conversion_that_loses_too_much_fails_before_anything_is_built(tiny: str, tmp_path: Path):
    more = "[tolerance.fp16]\nscaled = 1e-9\n"
    report, result = build(dense(tmp_path / "m.onnx"), tmp_path / "dist", "fp16", more)
    assert report.exit_code in (3, 6)
    assert "fp16" in result.message and "1e-09" in result.message
    assert "MatMul 'mul'" in result.message
    assert not (tmp_path / "dist/m-0.0.0-tiny").exists()


def test_an_overflow_is_kept_in_fp32_and_named(tiny: str, tmp_path: Path):
    """300 squared is beyond 65504: half precision would give infinity."""
    two = numpy_helper.from_array(np.float32(2), "two")
    same = numpy_helper.from_array(np.eye(4, dtype=np.float32), "same")
    nodes = [
        helper.make_node("MatMul", ["x", "same"], ["m"], name="mul"),
        helper.make_node("Pow", ["m", "two"], ["p"], name="square"),
        helper.make_node("Sqrt", ["p"], ["y"], name="root"),
    ]
    values = [builders.value("x", shape=("n", 4))], [builders.value("y", shape=("n", 4))]
    path = builders.save(builders.model(nodes, *values, [two, same]), tmp_path / "m.onnx")
    np.savez(tmp_path / "g.npz", x=np.array([[300, 250, 1, -300]], np.float32))
    _, result = build(path, tmp_path / "dist", "fp16", '[golden]\npath = "g.npz"\n')
    assert result.status == "passed", result.message
    assert "square" in " ".join(result.notes)


def test_auto_takes_the_smallest_that_passes_and_reports_the_ladder(tiny: str, tmp_path: Path):
    _, small = build(dense(tmp_path / "m.onnx"), tmp_path / "one", "auto")
    assert small.status == "passed" and small.precision == "int8-dynamic"
    assert small.notes[0] == "auto took int8-dynamic"
    builders.relu(tmp_path / "relu.onnx")
    _, other = build(tmp_path / "relu.onnx", tmp_path / "two", "auto")
    assert other.status == "passed" and other.precision == "fp16"
    assert other.notes[0].startswith("auto took fp16; int8-dynamic: there is nothing to quantise")


def test_auto_that_finds_nothing_names_every_rung(tiny: str, tmp_path: Path):
    path = dense(tmp_path / "m.onnx")
    manifest = tmp_path / "packager.toml"
    manifest.write_text('[model]\npath = "m.onnx"\n[targets.tiny]\nprecision = "auto"\nfault = "nan"\n')
    report = packager.build(manifest=manifest, out=tmp_path / "dist")
    assert path.exists() and report.exit_code == 6
    message = report.targets[0].message
    assert all(f"\n  {rung}: " in message for rung in ("int8-dynamic", "fp16", "fp32"))


def test_plan_shows_the_transforms_first_and_every_rung_of_auto(tiny: str, tmp_path: Path):
    dense(tmp_path / "m.onnx")
    manifest = tmp_path / "packager.toml"
    manifest.write_text('[model]\npath = "m.onnx"\n[targets.tiny]\nprecision = "auto"\n')
    planned = packager.plan(manifest=manifest)
    assert [item.plan.precision for item in planned if item.plan] == ["int8-dynamic", "fp16", "fp32"]
    fp16 = planned[1].plan
    assert fp16 is not None and len(fp16.steps) == 2 and fp16.steps[1].title == "Copying the model"


def kind_with(tiny: str, **dialect: object) -> Kind:
    kind = kind_named(tiny)
    facts = kind.facts.model_copy(update={"dialect": Dialect.model_validate(dialect)})
    return Kind(kind.name, facts, kind.folder, kind.module, kind.templates)


def test_passes_follow_the_facts_and_the_model(tiny: str, tmp_path: Path):
    model = open_model(dense(tmp_path / "m.onnx", opset=12))
    assert passes_for(kind_with(tiny), model, "fp32", ()) == ()
    pinned = passes_for(kind_with(tiny, pin=True, clean=True), model, "fp32", (("n", 2),))
    assert [each.name for each in pinned] == ["fold", "pin-shapes", "fold", "clean"]
    assert pinned[1].signature(model.signature).inputs[0].dims == (2, 64)
    raised = passes_for(kind_with(tiny, minimum_opset={"fp32": 13}), model, "fp32", ())
    assert [each.name for each in raised] == ["set-versions"]
    assert '"opsets": [["", 13]]' in passes_text(raised) and len(steps_of(raised)) == 1
    assert passes_for(kind_with(tiny, minimum_opset={"fp32": 12}), model, "fp32", ()) == ()
    lower = kind_with(tiny, lower=True, maximum_opset={"fp16": 11})
    assert '"opsets": [["", 11]]' in passes_text(passes_for(lower, model, "fp16", ()))
    assert passes_for(lower, model, "fp32", ()) == (), "only for the precision that is named"


def test_a_room_that_names_an_unknown_pass_is_at_fault(tiny: str, tmp_path: Path):
    model = open_model(dense(tmp_path / "m.onnx"))
    with pytest.raises(InternalError, match="no pass is named 'fp17'"):
        passes_for(kind_with(tiny, precisions={"fp32": [{"name": "fp17"}]}), model, "fp32", ())


@pytest.mark.parametrize("precision", ["fp16", "int8-dynamic", "int8-static"])
def test_the_manifest_names_what_stays_in_float(tiny: str, tmp_path: Path, precision: str):
    dense(tmp_path / "m.onnx")
    manifest = tmp_path / "packager.toml"
    text = f'[model]\npath = "m.onnx"\n[targets.tiny]\nprecision = "{precision}"\n'
    manifest.write_text(text + 'keep = ["mul"]\nkeep_operators = ["Relu"]\n')
    planned = packager.plan(manifest=manifest)[0]
    if precision == "fp16":
        assert planned.plan is not None
        assert dict(planned.plan.steps[0].settings)["kept in fp32"] == "mul"
        assert "kept in fp32 as asked: MatMul 'mul'" in planned.plan.notes
    elif precision == "int8-dynamic":
        assert planned.error is not None and "nothing to quantise" in planned.error.message
    else:
        assert planned.plan is not None
        settings = dict(planned.plan.steps[0].settings)
        assert (settings["excluded"], settings["excluded operators"]) == ("mul", "Relu")
    manifest.write_text(text + 'keep = ["mull"]\n')
    planned = packager.plan(manifest=manifest)[0]
    assert planned.error is not None and "no node 'mull'" in planned.error.message
    assert planned.error.hint == "did you mean 'mul'?"


def test_what_can_not_be_kept_is_refused_and_calibration_is_a_setting(tiny: str, tmp_path: Path):
    model, kind = (
        open_model(dense(tmp_path / "m.onnx")),
        kind_with(tiny, precisions={"fp16": [{"name": "fp16-weights"}]}),
    )
    with pytest.raises(Refused, match="fp16 leaves no node out for this kind, so `keep` can't be done"):
        passes_for(kind, model, "fp16", (), Conversion(keep=("mul",)))
    made = passes_for(kind_named(tiny), model, "int8-static", (), Conversion(calibration="percentile"))
    assert dict(made[-1].step().settings)["range"] == "percentile"


OWN = '''
from dataclasses import dataclass
from typing import Literal

from packager.room import Step
from packager.transform import Outcome


@dataclass(frozen=True)
class Mark:
    """Names the producer."""

    text: str = "marked"
    name: Literal["tiny/mark"] = "tiny/mark"

    def step(self):
        return Step("Marking", (("text", self.text),))

    def signature(self, before):
        return before

    def run(self, model, context):
        model.producer_name = self.text
        return Outcome(model, ("marked",))
'''


def test_a_room_may_bring_a_pass_of_its_own(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It runs before the precision's passes and travels as JSON, by its name; the room says where it is."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/marking.py").write_text(OWN)
    kind = kind_with(tiny, own={"tiny/mark": "marking:Mark"}, precisions={"fp32": [{"name": "fold"}]})
    kind = Kind(kind.name, kind.facts, kind.folder, "elsewhere", kind.templates)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(transform_registry, "kinds", lambda: {tiny: kind})
    chosen = passes_for(kind, open_model(dense(tmp_path / "m.onnx")), "fp32", ())
    assert [each.name for each in chosen] == ["tiny/mark", "fold"]
    assert json.loads(passes_text(chosen))[0] == {"name": "tiny/mark", "text": "marked"}
    assert [load_pass(each) for each in json.loads(passes_text(chosen))] == list(chosen)
    with pytest.raises(ValueError, match="no pass is named 'tiny/other'"):
        load_pass({"name": "tiny/other"})


def test_golden_cases_of_other_sizes_than_the_pinned_ones_stay_out_of_it(tiny: str, tmp_path: Path):
    """fp16 searches for nodes that drift by running golden cases: those that the pinned model takes."""
    path = dense(tmp_path / "m.onnx")
    np.savez(tmp_path / "g1.npz", x=np.ones((1, 64), np.float32))
    np.savez(tmp_path / "g2.npz", x=np.ones((2, 64), np.float32))
    made = fitting(tmp_path, path, (("n", 2),))
    assert [case.inputs["x"].shape for case in made.cases] == [(2, 64)]
    with pytest.raises(GoldenError, match="no golden case has the sizes"):
        fitting(tmp_path, path, (("n", 3),))


def fitting(folder: Path, path: Path, shapes: tuple[tuple[str, int], ...]) -> GoldenSet:
    cases = tuple(GoldenCase(name, {"x": np.load(folder / f"{name}.npz")["x"]}, {}, "file") for name in ("g1", "g2"))
    pin = load_pass({"name": "pin-shapes", "shapes": shapes})
    return dialect._fitting(dialect.TransformJob(path, (pin,), folder, folder), GoldenSet(cases))


def test_calibration_data_is_named_by_its_digest_and_changes_what_is_built(tiny: str, tmp_path: Path):
    """The manifest says where it is, relative to itself; the bundle says its digest, and no path of this machine."""
    dense(tmp_path / "m.onnx")
    (tmp_path / "samples").mkdir()
    manifest = tmp_path / "packager.toml"
    text = f'[model]\npath = "m.onnx"\n[targets.{tiny}]\nprecision = "int8-static"\n'
    manifest.write_text(text + 'calibration_data = "samples"\n', encoding="utf-8")
    digests = []
    for factor in (3, 4):  # of what the goldens hold
        x = np.random.default_rng(0).standard_normal((64, 64)) * factor
        np.savez(tmp_path / "samples/a.npz", x=x.astype(np.float32))
        (result,) = packager.build(manifest=manifest, out=tmp_path / "dist", verify=False).targets
        assert result.bundle is not None, result.message
        sealed = (tmp_path / "dist" / result.bundle / "bundle.json").read_text(encoding="utf-8")
        assert "samples" not in sealed
        (settings,) = [each for each in json.loads(sealed)["plan"]["transforms"] if each["name"] == "int8-static"]
        digests.append((settings["calibration"], result.bundle_digest))
    assert len(set(digests)) == 2 and all(len(digest) == 64 for digest, _ in digests)
    manifest.write_text(text + 'calibration_data = "none"\n', encoding="utf-8")
    (planned,) = packager.plan(manifest=manifest)
    assert planned.error is not None and planned.error.hint == "calibration_data is relative to the manifest"
    manifest.write_text(text.replace("int8-static", "fp16") + 'calibration_data = "samples"\n', encoding="utf-8")
    (planned,) = packager.plan(manifest=manifest)
    assert planned.error is not None and "fp16 isn't calibrated" in planned.error.message
