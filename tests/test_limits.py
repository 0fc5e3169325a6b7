"""Refusals that rooms make alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from packager.errors import Refused
from packager.goldens import GoldenCase, GoldenSet
from packager.graph import Dim
from packager.limits import check_operators, check_precision, check_shapes, check_versions
from packager.model import Signature, TensorSpec, open_model
from packager.room import Limits, PlanRequest, RoomOptions, TargetFacts
from packager.shapes import pin_shapes

X = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
Y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])


def saved(folder: Path, nodes: list[onnx.NodeProto], *, opsets: dict[str, int], ir: int = 9) -> Path:
    graph = helper.make_graph(nodes, "g", [X], [Y])
    listed = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    onnx.save(helper.make_model(graph, opset_imports=listed, ir_version=ir), folder / "m.onnx")
    return folder / "m.onnx"


def facts(**limits: object) -> TargetFacts:
    return TargetFacts(
        kind="k", title="Kind", summary="", level="runtime", precisions=["fp32"], limits=Limits.model_validate(limits)
    )


def request(path: Path, known: TargetFacts) -> PlanRequest:
    return PlanRequest("t", "k", "m", "1", open_model(path), GoldenSet(()), "fp32", (), RoomOptions(), known)


def test_a_precision_no_bundle_has() -> None:
    check_precision(facts(), "fp32")
    with pytest.raises(Refused, match="Kind bundles have no precision 'int3'") as caught:
        check_precision(facts(), "int3")
    assert caught.value.hint == "choose one of fp32"


def test_every_version_beyond_the_limits_is_named(tmp_path: Path) -> None:
    relu = [helper.make_node("Relu", ["x"], ["y"], "r")]
    path = saved(tmp_path, relu, opsets={"": 17, "ai.onnx.ml": 4, "free": 9})
    opened = open_model(path)
    check_versions(opened, Limits(opset={"ai.onnx": 17, "ai.onnx.ml": 4}, ir=9), "It")
    with pytest.raises(Refused) as caught:
        check_versions(opened, Limits(opset={"ai.onnx": 16, "ai.onnx.ml": 3}, ir=8), "It")
    assert caught.value.message.splitlines()[1:] == [
        "  opset 17 of ai.onnx, It reads up to 16",
        "  opset 4 of ai.onnx.ml, It reads up to 3",
        "  ONNX IR version 9, It reads up to 8",
    ]


def test_refused_operators_and_domains_are_named_by_node(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "first"),
        helper.make_node("Scaler", ["a"], ["b"], "second", domain="ai.onnx.ml"),
        helper.make_node("Own", ["b"], ["y"], "third", domain="mine"),
    ]
    path = saved(tmp_path, nodes, opsets={"": 17, "ai.onnx.ml": 3, "mine": 1})
    check_operators(request(path, facts()), "It")
    known = facts(refused_operators={"Relu": "it is slow", "ai.onnx.ml.Scaler": "it is old"}, refused_domains=["mine"])
    with pytest.raises(Refused) as caught:
        check_operators(request(path, known), "It")
    assert caught.value.message.splitlines() == [
        "It can't run the model:",
        "  node Relu 'first': it is slow",
        "  node ai.onnx.ml.Scaler 'second': it is old",
        "  node mine.Own 'third': operators of mine are unknown there",
    ]


def test_refused_attributes_are_named_by_node_where_it_has_them(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("LeakyRelu", ["x"], ["a"], "plain"),
        helper.make_node("LeakyRelu", ["a"], ["y"], "steep", alpha=0.5),
    ]
    path = saved(tmp_path, nodes, opsets={"": 17})
    with pytest.raises(Refused) as caught:
        check_operators(request(path, facts(refused_attributes={"LeakyRelu.alpha": "it has one slope"})), "It")
    assert caught.value.message.splitlines()[1:] == ["  node LeakyRelu 'steep': it has one slope"]


def test_domains_that_are_not_listed_are_refused_but_for_the_models_own_functions(tmp_path: Path) -> None:
    inside = [helper.make_node("Odd", ["a"], ["b"], "inner", domain="theirs")]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("theirs", 1), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", "Call", ["a"], ["b"], inside, opsets)
    graph = helper.make_graph([helper.make_node("Call", ["x"], ["y"], "outer", domain="own")], "g", [X], [Y])
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=[function]), tmp_path / "m.onnx")
    with pytest.raises(Refused) as caught:
        check_operators(request(tmp_path / "m.onnx", facts(domains=["ai.onnx", "ai.onnx.ml"])), "It")
    assert caught.value.message.splitlines()[1:] == [
        "  node theirs.Odd 'inner': only operators of ai.onnx, ai.onnx.ml are known there"
    ]


def test_a_plan_repeats_what_was_asked(tmp_path: Path) -> None:
    asked = request(saved(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], opsets={"": 17}), facts())
    plan = asked.plan(asked.model.signature, (), ("note",))
    assert (plan.target, plan.kind, plan.name, plan.version, plan.precision) == ("t", "k", "m", "1", "fp32")
    assert (plan.opset, plan.model_digest, plan.options) == (17, asked.model.digest, "{}")
    assert (plan.notes, plan.signature) == (("note",), asked.model.signature)


def test_free_dims_are_refused_with_the_line_that_pins_them() -> None:
    dims: tuple[Dim, ...] = ("rows", 3, None)
    signature = Signature((TensorSpec("x", "float32", dims), TensorSpec("n", "int64", ("rows",))), ())
    cases = GoldenSet((GoldenCase("one", {"x": np.zeros((4, 3, 7), np.float32), "n": np.zeros(4, np.int64)}),))
    check_shapes(facts(), "phone", signature, cases)
    known = facts(fixed_shapes=True)
    with pytest.raises(Refused) as caught:
        check_shapes(known, "phone", signature, cases)
    assert caught.value.message == (
        "Kind bundles are compiled for fixed shapes, and input 'x' is float32[rows, 3, ?]; input 'n' is int64[rows]"
    )
    assert caught.value.hint == 'add to [targets.phone]: shapes = { rows = 4, "x:2" = 7 }'
    pinned = pin_shapes(signature, (("rows", 4), ("x:2", 7)))
    check_shapes(known, "phone", pinned, cases)
    empty = GoldenSet((GoldenCase("none", {"x": np.zeros((0, 3, 7), np.float32), "n": np.zeros(0, np.int64)}),))
    with pytest.raises(Refused) as caught:
        check_shapes(known, "phone", signature, empty)
    assert "rows = 1," in str(caught.value.hint), "no runtime compiles for a size of 0"


def test_an_input_without_a_rank_can_not_be_pinned() -> None:
    signature = Signature((TensorSpec("x", "float32", None),), ())
    with pytest.raises(Refused) as caught:
        check_shapes(facts(fixed_shapes=True), "phone", signature, GoldenSet(()))
    assert caught.value.hint == "declare the shape of x when exporting the model"
