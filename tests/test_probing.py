"""Models that answer their goldens and fail at other sizes: named with node, constant and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from packager.errors import ModelError
from packager.golden_synth import synthesise
from packager.hazards import Hazard, find_hazards
from packager.model import open_model
from packager.probing import check_declared, probe, resized, sizes_of
from packager.reference import OrtSession
from tests.builders import BOOL, INT64, model, save, value

node = helper.make_node


def constant(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def sizes(name: str, *numbers: int) -> onnx.TensorProto:
    return constant(name, np.array(numbers, np.int64))


def probed(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    shape: Sequence[int | str | None],
    out: Sequence[int | str | None] | None,
    *constants: onnx.TensorProto,
    dims: dict[str, int] | None = None,
    pinned: frozenset[str] = frozenset(),
    count: int = 1,
) -> list[Hazard]:
    """Hazards of the model x -> y, whose ``count`` golden cases have the sizes ``dims``."""
    proto = model(nodes, [value("x", shape=shape)], [value("y", shape=out)], constants)
    opened = open_model(save(proto, path / "m.onnx"))
    session = OrtSession(opened.path, quantized=False)

    def run(feeds):
        return session.run(feeds, ["y"], "case")

    cases = synthesise(opened, cases=count, dims=dims or {}).cases
    return probe(opened, run, [(case.inputs, run(case.inputs)) for case in cases], pinned)


def test_a_model_that_keeps_its_word_has_no_hazard(tmp_path: Path) -> None:
    nodes = [node("Reshape", ["x", "s"], ["a"]), node("Softmax", ["a"], ["y"])]
    assert probed(tmp_path, nodes, ["batch", "length", 4], ["batch", None], sizes("s", 0, -1)) == []


def test_a_baked_batch_is_named_with_its_constant_and_the_remedy(tmp_path: Path) -> None:
    nodes = [node("Relu", ["x"], ["r"]), node("Reshape", ["r", "s"], ["y"], "reshape")]
    (found,) = probed(tmp_path, nodes, ["batch", 4], ["batch", 2, 2], sizes("s", 1, 2, 2), dims={"batch": 1})
    assert found.code == "baked-size"
    assert found.message == (
        "'batch' is declared open and runs at 1, not at 2 and 3: "
        "node Reshape 'reshape' takes the fixed sizes [1, 2, 2] from 's'"
    )
    assert found.hint is not None and "shapes = { batch = 1 }" in found.hint


def test_a_tile_that_broadcasts_silently_at_batch_1_is_named(tmp_path: Path) -> None:
    nodes = [node("Tile", ["w", "r"], ["t"], "tile"), node("Add", ["x", "t"], ["y"], "add")]
    constants = constant("w", np.ones((1, 2, 2), np.float32)), sizes("r", 8, 1, 1)
    baked, other = probed(tmp_path, nodes, ["batch", 2, 2], ["batch", 2, 2], *constants, dims={"batch": 1})
    assert "node Tile 'tile' takes the fixed sizes [8, 1, 1] from 'r'" in baked.message
    assert (other.code, other.message) == (
        "other-size", "output 'y' declares 'batch' at axis 0, which is 8 where the inputs have 1: node Add 'add'",
    )  # fmt: skip


def test_a_baked_expand_behind_a_constant_node_is_named(tmp_path: Path) -> None:
    held = node("Constant", [], ["s"], value=sizes("", 8, 4))
    nodes = [held, node("Expand", ["w", "s"], ["e"], "grow"), node("Add", ["x", "e"], ["y"])]
    found = probed(
        tmp_path, nodes, ["batch", 4], [None, 4], constant("w", np.ones((1, 4), np.float32)), dims={"batch": 1}
    )
    assert [hazard.code for hazard in found] == ["baked-size"]
    assert "node Expand 'grow' takes the fixed sizes [8, 4] from 's'" in found[0].message


def test_a_node_that_fails_without_a_baked_constant_is_named_with_the_reason(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "w"], ["y"], "bias")]
    weight = constant("w", np.ones((3, 4), np.float32))
    found = probed(tmp_path, nodes, ["batch", 4], [None, 4], weight, dims={"batch": 3})
    assert [hazard.code for hazard in found] == ["baked-size", "batch-lost"]
    assert "runs at 3, not at 2: node Add 'bias' fails:" in found[0].message


def test_a_table_of_positions_may_end(tmp_path: Path) -> None:
    """At twice the length it fails as it should, at half of it it runs."""
    nodes = [
        node("Shape", ["x"], ["n"], start=1, end=2),
        node("Squeeze", ["n"], ["end"]),
        node("Range", ["zero", "end", "one"], ["i"]),
        node("Gather", ["table", "i"], ["p"], "positions"),
        node("Add", ["x", "p"], ["y"]),
    ]
    zero, one = constant("zero", np.array(0, np.int64)), constant("one", np.array(1, np.int64))
    table = constant("table", np.ones(16, np.float32))
    assert (
        probed(tmp_path, nodes, ["batch", "length"], ["batch", "length"], zero, one, table, dims={"length": 16}) == []
    )


def test_a_length_that_is_baked_is_named(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "w"], ["y"], "bias")]
    found = probed(tmp_path, nodes, [1, "length"], [1, "length"], constant("w", np.ones(8, np.float32)))
    assert [hazard.code for hazard in found] == ["baked-size"]
    assert "'length' is declared open and runs at 8, not at 16 and 4" in found[0].message
    assert probed(tmp_path, nodes, [1, "length"], [1, "length"], constant("w", np.ones(8, np.float32)),
                  pinned=frozenset({"length"})) == []  # fmt: skip


def test_an_output_without_the_batch_is_named_unless_it_says_so(tmp_path: Path) -> None:
    nodes = [node("ReduceMean", ["x"], ["y"], "mean", axes=[0])]
    (found,) = probed(tmp_path, nodes, ["batch", 4], [None, 4])
    assert (found.code, found.message) == (
        "batch-lost", "output 'y' has 1 rows whatever the batch, and declares [?, 4]: node ReduceMean 'mean'",
    )  # fmt: skip
    assert probed(tmp_path, nodes, ["batch", 4], [1, 4]) == []


@pytest.mark.parametrize(("dims", "count"), [({}, 3), ({"batch": 2}, 1), ({"batch": 1}, 2)])
@pytest.mark.parametrize(
    "mixing",
    [
        [node("Softmax", ["x"], ["y"], "softmax", axis=0)],
        [node("ReduceMean", ["x"], ["m"], axes=[0]), node("Sub", ["x", "m"], ["y"], "centre")],
    ],
)
def test_a_node_that_works_across_the_batch_is_named(
    tmp_path: Path, dims: dict[str, int], count: int, mixing: list[onnx.NodeProto]
) -> None:
    (found,) = probed(tmp_path, mixing, ["batch", 4], ["batch", 4], dims=dims, count=count)
    assert found.code == "mixed-rows"
    assert found.message.startswith("output 'y' of a row changes with the other rows of its batch, by ")
    assert found.message.endswith(f"a node before {mixing[-1].op_type} '{mixing[-1].name}' works across the batch")


@pytest.mark.parametrize("out", [["batch", 4], [None, None]])
def test_rows_that_stand_alone_are_no_hazard(tmp_path: Path, out: list[int | str | None]) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Softmax", ["a"], ["y"], axis=-1)]
    weights = constant("w", np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32))
    assert probed(tmp_path, nodes, ["batch", 4], out, weights, count=3) == []


def test_a_pinned_batch_may_mix_its_rows(tmp_path: Path) -> None:
    nodes = [node("Softmax", ["x"], ["y"], axis=0)]
    assert probed(tmp_path, nodes, ["batch", 4], ["batch", 4], dims={"batch": 3}, pinned=frozenset({"batch"})) == []


def test_a_batch_that_moved_to_another_axis_is_not_lost(tmp_path: Path) -> None:
    nodes = [node("Transpose", ["x"], ["y"], perm=[1, 0])]
    assert probed(tmp_path, nodes, ["batch", 4], [None, None]) == []


@pytest.mark.parametrize("out", [["batch", 5], ["batch", 4, 1], []])
def test_an_output_that_contradicts_its_shape_refuses_the_model(tmp_path: Path, out: list[int | str]) -> None:
    proto = model([node("Relu", ["x"], ["y"], "act")], [value("x", shape=["batch", 4])], [value("y", shape=out)])
    opened = open_model(save(proto, tmp_path / "m.onnx"))
    with pytest.raises(ModelError, match=r"output 'y' is declared .*, but the model gives \[1, 4\]: node Relu 'act'"):
        check_declared(opened, {"y": np.zeros((1, 4), np.float32)})


def test_inputs_are_cut_and_repeated(tmp_path: Path) -> None:
    proto = model([node("Relu", ["x"], ["y"])], [value("x", shape=["batch", "length"])], [value("y", shape=None)])
    opened = open_model(save(proto, tmp_path / "m.onnx"))
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert sizes_of(opened, feeds) == {"batch": 2, "length": 3}
    np.testing.assert_array_equal(resized(opened, feeds, {"batch": 3})["x"], [[0, 1, 2], [3, 4, 5], [0, 1, 2]])
    np.testing.assert_array_equal(resized(opened, feeds, {"batch": 1, "length": 2})["x"], [[0, 1]])


def test_what_tracing_and_training_leave_is_named(tmp_path: Path) -> None:
    def branch(name: str) -> onnx.GraphProto:
        return helper.make_graph([node("Identity", ["x"], [name])], name, [], [value(name, shape=["batch", 4])])

    nodes = [
        node("If", ["yes"], ["a"], "choose", then_branch=branch("one"), else_branch=branch("two")),
        node("Dropout", ["a", "", "yes"], ["y"], "drop"),
        node("Identity", ["x"], ["z"], "same"),
    ]
    ends = [value(name, shape=["batch", 4]) for name in ("x", "y", "z")]
    proto = model(nodes, ends[:1], ends[1:], [constant("yes", np.array(True))])
    opened = open_model(save(proto, tmp_path / "m.onnx"))
    found = {hazard.code: hazard.message for hazard in find_hazards(opened.structure)}
    assert found["frozen-branch"] == "node If 'choose' always takes its then branch: the condition is a constant"
    assert found["training-mode"] == "node Dropout 'drop' is in training mode"
    assert found["output-is-input"] == "output 'z' is input 'x' as it came: node Identity 'same'"
    live = [value("x", shape=["batch", 4]), value("yes", BOOL, [])]
    proto = model(nodes[:2], live, [value("y", shape=["batch", 4])])
    assert find_hazards(open_model(save(proto, tmp_path / "m.onnx")).structure) == []


def test_integer_constants_that_are_no_sizes_are_left_alone(tmp_path: Path) -> None:
    nodes = [node("Gather", ["x", "i"], ["y"], axis=1)]
    proto = model(nodes, [value("x", INT64, ["batch", 4])], [value("y", INT64, ["batch", 2])], [sizes("i", 1, 2)])
    assert find_hazards(open_model(save(proto, tmp_path / "m.onnx")).structure) == []
