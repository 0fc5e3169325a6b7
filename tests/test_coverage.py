"""Coverage as a notion: what is said of nodes, laid over a model's nodes, grouped, counted and found by comparing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from onnx import helper

from packager.coverage import (
    Coverage,
    Covered,
    changes,
    document,
    grouped,
    laid_over,
    objections,
    relabelled,
    rows_of,
)
from packager.errors import Objection
from packager.graph import Structure, read_structure
from tests.builders import FLOAT, model, value

ROWS = (Covered("Relu 'a'", "Relu"), Covered("Det 'b'", "Det"), Covered("Relu 'c'", "Relu"))
FOUND = Coverage("edge", "some", "fp32", ROWS, ("rules",))


def structure(*nodes: object, opset: int = 17) -> Structure:
    made = model(list(nodes), [value("x", FLOAT, [2])], [value("y", FLOAT, [2])], opset=opset)
    data = made.SerializeToString()
    return read_structure(data, len(data))


def node(operator: str, taken: str, made: str, name: str = "", **attributes: object) -> object:
    return helper.make_node(operator, [taken], [made], name=name, **attributes)


def test_constants_are_no_nodes_to_be_covered() -> None:
    held = helper.make_node("Constant", [], ["c"], name="held", value_float=1.0)
    assert rows_of(structure(held, node("Relu", "x", "y", "act")), "unjudged") == (
        Covered("Relu 'act'", "Relu", "unjudged"),
    )


def test_of_several_remarks_the_weightiest_is_kept_and_what_a_rewrite_made_is_a_row_of_its_own() -> None:
    remarks = [
        Covered("Det 'b'", "Det", "rewritten", "becomes Other"),
        Covered("Det 'b'", "Other", "refused", "has no form", "leave it out"),
        Covered("Det 'b'", "Other", "fallback", "too late"),
        Covered("Mul 'made'", "Mul", "fallback", "of rank 6"),
    ]
    assert laid_over(ROWS, remarks) == (
        ROWS[0],
        Covered("Det 'b'", "Det", "refused", "has no form", "leave it out"),
        ROWS[2],
        remarks[3],
    )


def test_groups_are_by_what_is_said_worst_first_and_names_and_sizes_are_alike() -> None:
    groups = grouped([
        Covered("A 'a'", "A"),
        Covered("B 'b'", "B", "unjudged"),
        Covered("A '1'", "A", "fallback", "'x' has free dims [n, 3]", "pin"),
        Covered("A '2'", "A", "fallback", "'z' has free dims [?]", "pin"),
        Covered("B '3'", "B", "fallback", "'x' has free dims [n, 3]", "pin"),
        Covered("C '4'", "C", "refused", "none"),
        Covered("A '5'", "A", "fallback", "it computes in int64", "pin"),
    ])  # fmt: skip
    assert [(group.state, group.reason, group.alike, group.operators) for group in groups] == [
        ("refused", "none", False, (("C", 1),)),
        ("fallback", "'x' has free dims [n, 3]", True, (("A", 2), ("B", 1))),
        ("fallback", "it computes in int64", False, (("A", 1),)),
    ]
    assert groups[1].nodes == ("A '1'", "A '2'", "B '3'")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "builds"),
        ({"missing": (("Python package x", "pip install x"),)}, "plans; its toolchain isn't here to be asked"),
        ({"refusal": "no room for it:\n  node"}, "refused: no room for it"),
        ({"nodes": (replace(ROWS[0], state="fallback"), ROWS[1])}, "builds, 1 node not on the accelerator"),
        (
            {"nodes": (replace(ROWS[0], state="refused"), replace(ROWS[1], state="refused")), "refusal": "two"},
            "refused: 2 nodes",
        ),
    ],
)
def test_the_verdict_says_it_in_one_line(changed: dict[str, object], words: str) -> None:
    assert replace(FOUND, **changed).verdict == words  # type: ignore[arg-type]


def test_the_document_of_a_bundle_counts_and_lists_what_is_left() -> None:
    left = Covered("Det 'b'", "Det", "fallback", "none", "leave it out")
    assert document([*ROWS[:1], left], 3, 2) == {
        "schema": "packager.coverage/1",
        "nodes": 3,
        "parts": 2,
        "states": {"supported": 2, "fallback": 1},
        "left": [{"node": "Det 'b'", "operator": "Det", "state": "fallback", "reason": "none", "hint": "leave it out"}],
    }
    assert objections([*ROWS, left], "fallback") == [Objection("Det 'b'", "none")]


def test_changes_are_found_by_name_or_by_output() -> None:
    before = structure(
        node("Relu", "x", "a", "kept"),
        node("Gelu", "a", "b", "expanded"),
        node("Neg", "b", "c"),
        node("Softmax", "c", "d", "moved"),
        node("Identity", "d", "e", "dropped"),
        node("ReduceMean", "e", "y", "lowered"),
    )
    after = structure(
        node("Relu", "x", "a2", "kept"),
        node("Erf", "a2", "b1", "new"),
        node("Mul", "b1", "b", "made"),
        node("Abs", "b", "c"),
        node("Softmax", "c", "e", "moved"),
        node("ReduceMean", "e", "y", "lowered", axes=[0]),
    )
    assert [(each.node, each.state, each.reason) for each in changes(before, after, "Lowering")] == [
        ("Gelu 'expanded'", "rewritten", "becomes Mul (Lowering)"),
        ("Neg (unnamed, makes 'c')", "rewritten", "becomes Abs (Lowering)"),
        ("Identity 'dropped'", "rewritten", "computed ahead, merged into another node or left out (Lowering)"),
        ("ReduceMean 'lowered'", "rewritten", "takes the form of another operator set (Lowering)"),
    ]
    assert changes(before, before, "nothing") == ()
    remarks = [Covered("Mul 'made'", "Mul", "fallback"), Covered("Erf 'new'", "Erf", "fallback")]
    assert [each.node for each in relabelled(remarks, before, after)] == ["Gelu 'expanded'", "Erf 'new'"]
