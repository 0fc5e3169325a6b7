"""Policies: sound data, overrides applied in order and told of, and which outputs are scores."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from onnx import NodeProto, TensorProto, helper

from packager import policy
from packager.errors import InternalError, ManifestError
from packager.manifest import Bounds
from packager.manifest import Tolerance as ManifestTolerance
from packager.model import Model, open_model
from packager.parity import OutputRule, Tolerance
from packager.policy import ToleranceOverride, policies, resolve
from packager.room import TargetFacts
from tests.builders import INT64, model, save, value


def opened(
    path: Path,
    nodes: list[NodeProto],
    shape: list[int | str | None] | None,
    opset: int = 17,
    dtype: int = TensorProto.FLOAT,
) -> Model:
    """A model of ``nodes`` from ``x`` to ``y``, the latter declared with ``shape`` and ``dtype``."""
    made = model(nodes, [value("x", shape=shape)], [value("y", dtype, shape)], opset=opset)
    return open_model(save(made, path / "m.onnx"))


def node(operator: str, source: str = "x", result: str = "y", **attributes: int) -> NodeProto:
    return helper.make_node(operator, [source], [result], **attributes)


def test_every_policy_judges_every_precision_by_something_that_always_applies():
    assert set(policies()["default-1"].precisions) == {"fp32", "fp16", "bf16", "int8", "fp8", "int4"}
    for each in policies().values():
        for bounds in each.precisions.values():
            tolerance = bounds.tolerance
            assert any(bound is not None for bound in (tolerance.max_abs, tolerance.scaled, tolerance.cosine))
            assert 0 <= bounds.rounding < 0.01


def test_fp32_is_judged_absolutely_and_by_magnitude():
    tolerance = policies()["default-1"].precisions["fp32"].tolerance
    assert (tolerance.max_abs, tolerance.scaled) == (1e-3, 1e-4)


def test_less_precision_never_means_a_tighter_scaled_bound():
    each = policies()["default-1"].precisions
    scaled = [each[precision].tolerance.scaled or 0 for precision in ("fp32", "fp16", "bf16", "int8", "fp8", "int4")]
    assert scaled == sorted(scaled)


def test_every_mistake_of_a_policy_file_is_listed():
    text = '["p"]\nsummary = "s"\n["p".fp32]\nmax_abs = -1\n["p".fp16]\natol = 1\n["p".int8]\ntop1 = 1\n["q"]\nx = 1\n'
    with pytest.raises(InternalError) as caught:
        policy.parse_policies(text, "file.toml")
    for part in ("file.toml", "p.fp32: max_abs", "p.fp16: unknown bound 'atol'", "p.int8: no bound", "q: needs"):
        assert part in caught.value.message


@pytest.mark.parametrize("text", ["", "x", "p = 3", '["p"]\nsummary = "s"\nfp32 = 3'])
def test_a_file_that_holds_no_policy_is_refused(text):
    with pytest.raises(InternalError):
        policy.parse_policies(text, "file.toml")


def test_without_overrides_the_policy_alone_speaks():
    found = resolve("default-1", "fp32", ["a", "b"])
    assert found.tolerances == {"a": Tolerance(1e-3, 1e-4), "b": Tolerance(1e-3, 1e-4)}
    assert (found.deviations, found.description) == ((), "default-1")


def test_later_overrides_win_and_untouched_bounds_stay():
    room = ToleranceOverride.of("target.toml", {"max_abs": 0.1, "scaled": 0.2})
    manifest = ToleranceOverride.of("packager.toml", {"max_abs": 0.01})
    found = resolve("default-1", "fp32", ["a"], room, manifest)
    assert found.tolerances["a"] == Tolerance(0.01, 0.2)
    assert found.description == "default-1, overridden: max_abs 0.01, scaled 0.2"


def test_what_is_said_of_one_output_beats_what_is_said_of_all():
    first = ToleranceOverride.of("one", {}, {"a": {"cosine": 0.9}})
    second = ToleranceOverride.of("two", {"cosine": 0.5, "top1": None})
    found = resolve("default-1", "fp32", ["a", "b"], first, second)
    assert (found.tolerances["a"].cosine, found.tolerances["b"].cosine) == (0.9, 0.5)
    assert found.description == "default-1, overridden: cosine 0.5; output 'a': cosine 0.9"


def test_saying_what_the_policy_says_is_no_deviation():
    same = ToleranceOverride.of("packager.toml", {"max_abs": 1e-3})
    assert resolve("default-1", "fp32", ["a"], same).description == "default-1"


def test_a_tolerance_for_an_unknown_output_is_a_mistake_with_a_suggestion():
    override = ToleranceOverride.of("packager.toml: [tolerance.fp32]", {}, {"scroes": {"max_abs": 1}})
    with pytest.raises(ManifestError, match="'scroes', which is no output") as caught:
        resolve("default-1", "fp32", ["scores", "boxes"], override)
    assert caught.value.message.startswith("packager.toml: [tolerance.fp32]")
    assert caught.value.hint == "did you mean 'scores'?"


@pytest.mark.parametrize(("bounds", "message"), [({"atol": 1.0}, "unknown bound"), ({"max_abs": -1.0}, "0 or more")])
def test_a_malformed_override_names_its_place(bounds, message):
    with pytest.raises(ManifestError, match=rf"^here: .*{message}"):
        ToleranceOverride.of("here", bounds)


@pytest.mark.parametrize(
    ("name", "precision", "hint"),
    [("defalt-1", "fp32", "default-1"), ("default-1", "fp4", "fp"), ("default-1", "xyz", "it has: fp32, fp16")],
)
def test_unknown_policies_and_precisions_get_a_hint(name, precision, hint):
    with pytest.raises(ManifestError) as caught:
        resolve(name, precision, ["a"])
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("operator", "shape", "opset", "axis"),
    [
        ({"op": "Softmax"}, ["n", 5, 9], 17, 2),
        ({"op": "LogSoftmax", "axis": 1}, ["n", 5, 9], 17, 1),
        ({"op": "Softmax", "axis": -2}, ["n", 5, 9], 17, 1),
        ({"op": "Softmax", "axis": 7}, ["n", 5, 9], 17, None),
        ({"op": "Softmax"}, ["n", 5], 11, 1),
        ({"op": "Softmax"}, ["n", 5, 1, 1], 11, 1),
        ({"op": "Softmax"}, ["n", 5, 9], 11, None),
        ({"op": "Softmax"}, None, 17, -1),
        ({"op": "Softmax"}, None, 11, None),
        ({"op": "Relu"}, ["n", 2], 17, 1),
        ({"op": "Relu"}, ["n", "classes"], 17, 1),
        ({"op": "Relu"}, ["n", 1], 17, None),
        ({"op": "Relu"}, ["n", 5, 9], 17, None),
        ({"op": "Relu"}, ["n"], 17, None),
        ({"op": "Relu"}, None, 17, None),
    ],
)
def test_score_axes_follow_the_graph(tmp_path, operator, shape, opset, axis):
    attributes = {name: number for name, number in operator.items() if name != "op"}
    made = opened(tmp_path, [node(operator["op"], **attributes)], shape, opset)
    assert policy.score_axes(made) == {"y": axis}


def test_a_softmax_is_seen_through_identity_and_cast(tmp_path):
    chain = [
        node("Softmax", "x", "a", axis=1),
        node("Identity", "a", "b"),
        node("Cast", "b", "y", to=TensorProto.FLOAT),
    ]
    assert policy.score_axes(opened(tmp_path, chain, ["n", 4, 6])) == {"y": 1}


def test_integers_are_no_scores(tmp_path):
    made = opened(tmp_path, [node("Cast", to=INT64)], ["n", 5], dtype=INT64)
    assert policy.score_axes(made) == {"y": None}


def test_a_softmax_of_another_domain_is_none_we_know(tmp_path):
    foreign = helper.make_node("Softmax", ["x"], ["y"], domain="com.example")
    assert policy.score_axes(opened(tmp_path, [foreign], ["n", 5, 9])) == {"y": None}


def test_rounding_is_excused_only_in_what_a_sigmoid_or_softmax_made(tmp_path):
    moved = [node("Sigmoid", "x", "a"), node("Transpose", "a", "y")]
    excused = policy.rules_for("default-1", "fp32", opened(tmp_path, moved, ["n", 4, 6]))
    assert excused == {"y": OutputRule(Tolerance(1e-3, 1e-4), None, 4.8e-7)}
    scaled = [node("Sigmoid", "x", "a"), node("Exp", "a", "y")]
    assert policy.rules_for("default-1", "fp32", opened(tmp_path, scaled, ["n", 4, 6]))["y"].rounding == 0.0


def test_excluded_outputs_get_no_rule(tmp_path):
    made = opened(tmp_path, [node("Relu")], ["n", 4])
    assert policy.rules_for("default-1", "fp32", made, excluded=frozenset({"y"})) == {}


NEAR = {"scaled": 0.03, "cosine": 0.999}


def runs_closely() -> TargetFacts:
    return TargetFacts(
        kind="k", title="K", summary="", level="runtime", precisions=["int8-static", "int8-rough"],
        run_tolerance={"int8-static": NEAR},
    )  # fmt: skip


def test_running_a_quantised_model_is_judged_apart_from_quantising_it(tmp_path):
    made, facts = opened(tmp_path, [node("Relu")], ["n", 4]), runs_closely()
    found = policy.judging("default-1", "int8", made, (), facts, ManifestTolerance(), "int8-static")
    assert found.rules["y"].tolerance == policies()["default-1"].precisions["int8"].tolerance
    assert found.transformed["y"] == OutputRule(Tolerance(scaled=0.03, cosine=0.999), 1)
    for precision in (None, "int8-rough"):
        assert policy.judging("default-1", "int8", made, (), facts, ManifestTolerance(), precision).transformed == {}


def test_who_accepts_more_accepts_it_of_the_runtime_too_and_who_asks_for_more_loosens_nothing(tmp_path):
    made = opened(tmp_path, [node("Relu")], ["n", 4])
    asked = ManifestTolerance(Bounds(scaled=0.3, cosine=0.9999), (("y", Bounds(top1=0.5)),))
    found = policy.judging("default-1", "int8", made, (), runs_closely(), asked, "int8-static")
    assert found.transformed["y"].tolerance == Tolerance(scaled=0.3, cosine=0.999)


def test_a_target_is_judged_by_policy_facts_and_manifest(tmp_path):
    made = opened(tmp_path, [node("Relu")], ["n", 4])
    facts = TargetFacts(
        kind="k", title="K", summary="", level="runtime", precisions=["fp16"],
        tolerance={"fp16": {"scaled": 0.04, "cosine": 0.9}},
    )  # fmt: skip
    asked = ManifestTolerance(Bounds(cosine=0.95), (("y", Bounds(max_abs=0.5)),))
    found = policy.judging("default-1", "fp16", made, (), facts, asked)
    assert found.rules["y"].score_axis == 1
    assert asdict(found.rules["y"].tolerance) == {"max_abs": 0.5, "scaled": 0.04, "cosine": 0.95, "top1": 0.99}
    assert found.description == "default-1, overridden: scaled 0.04, cosine 0.95; output 'y': max_abs 0.5"
    wrong = ManifestTolerance(Bounds(), (("z", Bounds(max_abs=0.5)),))
    with pytest.raises(ManifestError, match="'z', which is no output"):
        policy.judging("default-1", "fp16", made, (), facts, wrong)
    assert policy.judging("default-1", "fp16", made, (("y", "random"),), facts, ManifestTolerance()).rules == {}


def test_no_output_is_held_to_less_than_a_step_of_its_dtype(tmp_path):
    """Two honest answers in half precision are a step apart where one was rounded up and the other down."""
    nodes = [node("Identity")]
    scaled = {}
    for name, dtype in (("f32", TensorProto.FLOAT), ("f16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16)):
        made = model(nodes, [value("x", dtype, [2])], [value("y", dtype, [2])])
        scaled[name] = policy.rules_for("default-1", "fp32", open_model(save(made, tmp_path / name)))["y"].tolerance
    assert {name: each.scaled for name, each in scaled.items()} == {"f32": 1e-4, "f16": 2**-10, "bf16": 2**-7}
    asked = resolve("default-1", "fp32", ["y"], ToleranceOverride.of("here", {"scaled": 1e-6}))
    assert policy.rules(open_model(tmp_path / "f16"), asked)["y"].tolerance.scaled == 1e-6, "what was asked for holds"
