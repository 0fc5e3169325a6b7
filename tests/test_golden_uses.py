"""Values that select, shape or bound are in range wherever the graph uses them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from packager.golden_formats import check_case
from packager.golden_synth import synthesise
from packager.model import open_model
from tests import builders
from tests.builders import BOOL, FLOAT, INT32, INT64, value
from tests.golden_models import built, drawn, node, numbers, run, table

SHAPES = {
    "Reshape": [node("Reshape", ["x", "k"], ["y"])],
    "Expand": [node("Expand", ["x", "k"], ["y"])],
    "Tile": [node("Tile", ["x", "k"], ["y"])],
    "ConstantOfShape": [node("ConstantOfShape", ["k"], ["c"]), node("ReduceSum", ["c"], ["s"]),
                        node("Add", ["x", "s"], ["y"])],
    "Slice": [node("Slice", ["x", "zero", "k"], ["y"])],
}  # fmt: skip


def test_ids_stay_within_the_smallest_table_they_reach(tmp_path):
    nodes = [
        node("Cast", ["ids"], ["c"], to=INT64), node("Unsqueeze", ["c", "axis"], ["u"]),
        node("Squeeze", ["u", "axis"], ["s"]), node("Gather", ["big", "s"], ["b"]),
        node("Gather", ["small", "s"], ["r"]),
        node("Add", ["b", "r"], ["y"]),
    ]  # fmt: skip
    constants = [table("big", 50), table("small", 5), numbers("axis", 0)]
    model = built(tmp_path, nodes, [value("ids", INT32, ("n", "t"))], None, constants)
    ids = drawn(model, "ids", cases=6)
    assert set(np.concatenate([array.ravel() for array in ids])) == {0, 1, 2, 3, 4}
    run(model, synthesise(model, cases=6))


def test_ids_follow_constants_and_quantised_and_transposed_tables(tmp_path):
    quantised = numpy_helper.from_array(np.ones((4, 9), np.int8), "q")
    scale = numpy_helper.from_array(np.float32(0.1), "scale")
    nodes = [
        node("Constant", [], ["two"], value_int=2), node("Add", ["ids", "two"], ["moved"]),
        node("DequantizeLinear", ["q", "scale"], ["d"]), node("Transpose", ["d"], ["t"], perm=[1, 0]),
        node("Gather", ["t", "moved"], ["y"], axis=0),
    ]  # fmt: skip
    model = built(tmp_path, nodes, [value("ids", INT64, ("n", 40))], None, [quantised, scale])
    ids = np.concatenate([array.ravel() for array in drawn(model, "ids")])
    assert (ids.min(), ids.max()) == (0, 6)
    run(model, synthesise(model))


def test_ids_are_followed_into_branches_loops_and_functions(tmp_path):
    then = helper.make_graph([node("Gather", ["table", "ids"], ["t"])], "then", [], [value("t", FLOAT, None)])
    other = helper.make_graph([node("Gather", ["table", "ids"], ["e"])], "else", [], [value("e", FLOAT, None)])
    body = helper.make_graph(
        [node("Identity", ["c_in"], ["c_out"]), node("Gather", ["table", "j"], ["row"]),
         node("Identity", ["j"], ["j2"])],
        "body", [value("i", INT64, ()), value("c_in", BOOL, ()), value("j", INT64, (2,))],
        [value("c_out", BOOL, ()), value("j2", INT64, (2,)), value("row", FLOAT, (2, 4))],
    )  # fmt: skip
    nodes = [
        node("If", ["flag"], ["a"], then_branch=then, else_branch=other),
        node("Loop", ["trips", "go", "carried"], ["last", "rows"], body=body),
        node("Pick", ["table", "called"], ["p"], "local"),
    ]
    inputs = [
        value("flag", BOOL, ()), value("ids", INT64, (30,)), value("trips", INT64, ()), value("go", BOOL, ()),
        value("carried", INT64, (2,)), value("called", INT64, (30,)),
    ]  # fmt: skip
    outputs = [value("a", FLOAT, None), value("rows", FLOAT, None), value("p", FLOAT, None)]
    proto = builders.model(nodes, inputs, outputs, [table("table", 3)], domains=[("local", 1)])
    proto.functions.append(
        helper.make_function(
            "local", "Pick", ["data", "at"], ["out"], [node("Gather", ["data", "at"], ["out"])],
            [helper.make_opsetid("", 17)],
        )
    )  # fmt: skip
    model = open_model(builders.save(proto, tmp_path / "m.onnx"))
    goldens = synthesise(model, cases=6)
    for name in ("ids", "carried", "called"):
        found = np.concatenate([case.inputs[name].ravel() for case in goldens.cases])
        assert set(found) == {0, 1, 2}, name
    assert all(1 <= int(case.inputs["trips"]) <= 4 and case.inputs["go"] for case in goldens.cases)
    assert {bool(case.inputs["flag"]) for case in goldens.cases} == {True, False}
    run(model, goldens)


def test_an_index_into_an_open_axis_stays_within_the_case(tmp_path):
    model = built(
        tmp_path,
        [node("Gather", ["x", "at"], ["y"], axis=1)],
        [value("x", FLOAT, ("batch", "time", 2)), value("at", INT64, (100,))],
    )
    for case in synthesise(model).cases:
        assert case.inputs["at"].max() == case.inputs["x"].shape[1] - 1
    run(model, synthesise(model))


def test_the_tables_of_a_fused_embedding_bound_its_ids(tmp_path):
    names = ["ids", "types", "words", "places", "kinds", "gamma", "beta", "", "at"]
    fused = node("EmbedLayerNormalization", names, ["y", ""], "com.microsoft")
    inputs = [value(name, INT32, ("batch", 7)) for name in ("ids", "types", "at")]
    ones = [numpy_helper.from_array(np.ones(4, np.float32), name) for name in ("gamma", "beta")]
    tables = [table("words", 20), table("places", 9), table("kinds", 2)]
    model = built(tmp_path, [fused], inputs, None, [*tables, *ones], domains=[("com.microsoft", 1)])
    for name, rows in (("ids", 20), ("types", 2), ("at", 9)):
        ids = np.concatenate([array.ravel() for array in drawn(model, name, cases=9)])
        assert (ids.min(), ids.max()) == (0, rows - 1)
    run(model, synthesise(model))


def test_scattering_never_writes_a_place_twice(tmp_path):
    nodes = [
        node("ScatterND", ["data", "at", "rows"], ["a"]), node("ScatterElements", ["data", "el", "vals"], ["y"], axis=1)
    ]  # fmt: skip
    inputs = [
        value("data", FLOAT, (6, 5)), value("at", INT64, (4, 1)), value("rows", FLOAT, (4, 5)),
        value("el", INT64, (6, 3)), value("vals", FLOAT, (6, 3)),
    ]  # fmt: skip
    model = built(tmp_path, nodes, inputs, [value("a", FLOAT, None), value("y", FLOAT, None)])
    for case in synthesise(model).cases:
        assert len(set(case.inputs["at"].ravel())) == 4
        assert all(len(set(row)) == 3 for row in case.inputs["el"])
    run(model, synthesise(model))


def test_one_minus_an_input_makes_it_a_mask(tmp_path):
    one = numpy_helper.from_array(np.float32(1), "one")
    nodes = [node("Cast", ["keep"], ["f"], to=FLOAT), node("Sub", ["one", "f"], ["y"])]
    model = built(tmp_path, nodes, [value("keep", INT64, ("batch", "seq"))], None, [one])
    assert set(np.concatenate([array.ravel() for array in drawn(model, "keep", cases=6)])) == {0, 1}


def test_sequence_lengths_fit_the_sequence(tmp_path):
    model = built(
        tmp_path,
        [node("ReverseSequence", ["x", "lens"], ["y"], time_axis=1, batch_axis=0)],
        [value("x", FLOAT, ("batch", "time", 2)), value("lens", INT64, ("batch",))],
    )
    for case in synthesise(model).cases:
        time = case.inputs["x"].shape[1]
        assert int(case.inputs["lens"][0]) == time
        assert set(case.inputs["lens"].tolist()) <= set(range(1, time + 1))
    run(model, synthesise(model))


@pytest.mark.parametrize("op", SHAPES)
def test_inputs_that_are_shapes_run(tmp_path, op):
    rank = 2
    inputs = [value("x", FLOAT, ("n", 6)), value("k", INT64, (rank,))]
    model = built(tmp_path, SHAPES[op], inputs, None, [numbers("zero", 0, 0)], opset=13)
    results = run(model, synthesise(model, cases=6))
    assert all(result[0].size > 0 for result in results)


def test_scalars_that_are_lengths_run(tmp_path):
    nodes = [
        node("Range", ["start", "limit", "delta"], ["r"]), node("TopK", ["x", "k"], ["top", "at"]),
        node("Pad", ["x", "pads"], ["p"]), node("OneHot", ["which", "depth", "offon"], ["h"]),
    ]  # fmt: skip
    inputs = [
        *(value(name, INT64, ()) for name in ("start", "limit", "delta")), value("k", INT64, (1,)),
        value("x", FLOAT, ("n", 6)), value("pads", INT64, (4,)), value("which", INT64, (5,)),
        value("depth", INT64, (1,)),
    ]  # fmt: skip
    outputs = [value("r", INT64, None), value("top", FLOAT, None), value("p", FLOAT, None), value("h", INT64, None)]
    model = built(tmp_path, nodes, inputs, outputs, [numbers("offon", 0, 1)])
    for result in run(model, synthesise(model, cases=6)):
        assert result[0].size > 0
        assert result[1].shape[1] >= 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    shift=st.integers(-3, 3),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([INT32, INT64]),
)
def test_whatever_the_tables_indices_are_in_range(tmp_path, rows, shift, seed, dtype):
    assume(min(rows) > abs(shift))
    nodes = [node("Cast", ["ids"], ["wide"], to=INT64), node("Add", ["wide", "shift"], ["moved"])]
    nodes += [node("Gather", [f"t{number}", "moved"], [f"y{number}"]) for number in range(len(rows))]
    outputs = [value(f"y{number}", FLOAT, None) for number in range(len(rows))]
    constants = [numbers("shift", shift), *(table(f"t{number}", count) for number, count in enumerate(rows))]
    model = built(tmp_path, nodes, [value("ids", dtype, ("n", "t"))], outputs, constants)
    goldens = synthesise(model, seed=seed)
    for case in goldens.cases:
        check_case(case, model.signature, case.name)
        assert case.inputs["ids"].min() >= max(0, -shift)
        assert case.inputs["ids"].max() + shift < min(rows)
    run(model, goldens)


def test_axes_differ_and_parts_add_up(tmp_path):
    nodes = [
        node("Unsqueeze", ["x", "axes"], ["u"]), node("Slice", ["x", "starts", "ends", "along"], ["s"]),
        node("Split", ["x", "parts"], ["a", "b"], axis=1),
    ]  # fmt: skip
    inputs = [value("x", FLOAT, ("n", 7)), *(value(name, INT64, (2,)) for name in ("axes", "starts", "ends", "along"))]
    inputs.append(value("parts", INT64, (2,)))
    outputs = [value(name, FLOAT, None) for name in ("u", "s", "a", "b")]
    model = built(tmp_path, nodes, inputs, outputs, opset=18)
    for case, (_, sliced, first, second) in zip(synthesise(model).cases, run(model, synthesise(model)), strict=True):
        assert (case.inputs["parts"].tolist(), first.shape[1], second.shape[1]) == ([3, 4], 3, 4)
        assert sliced.size > 0


def test_labels_of_a_loss_are_classes(tmp_path):
    inputs = [value("scores", FLOAT, ("batch", 5, 9)), value("labels", INT64, ("batch", 9))]
    model = built(tmp_path, [node("SoftmaxCrossEntropyLoss", ["scores", "labels"], ["y"])], inputs)
    labels = np.concatenate([array.ravel() for array in drawn(model, "labels")])
    assert set(labels.tolist()) == {0, 1, 2, 3, 4}
    run(model, synthesise(model))
