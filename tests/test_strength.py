"""Golden cases are scored by small wrong models: what they catch, what they miss, and which nodes nobody exercises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import packager
from packager import golden_store
from packager.errors import GoldenError
from packager.goldens import Array, GoldenCase, GoldenSet
from packager.model import open_model
from packager.mutants import NEAR, find_mutants
from packager.policy import rules_for
from packager.reference import OrtSession
from packager.strength import StrengthJob, measure, sampled
from tests.builders import BOOL, model, save, value

node = helper.make_node


def constant(name: str, array: Array) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def two_layers(path: Path) -> Path:
    """y = Relu(x @ w + b) @ v: the first layer's second unit is dead unless x is negative."""
    rng = np.random.default_rng(0)
    w = np.array([[1.0, -1.0], [2.0, -2.0]], np.float32)
    constants = [constant("w", w), constant("b", np.array([0.5, 0.0], np.float32)),
                 constant("v", rng.standard_normal((2, 3)).astype(np.float32))]  # fmt: skip
    nodes = [node("MatMul", ["x", "w"], ["h"], "first"), node("Add", ["h", "b"], ["s"], "bias"),
             node("Relu", ["s"], ["r"], "act"), node("MatMul", ["r", "v"], ["y"], "second")]  # fmt: skip
    return save(model(nodes, [value("x", shape=["n", 2])], [value("y", shape=["n", 3])], constants), path)


def goldens(path: Path, folder: Path, *inputs: dict[str, Array]) -> Path:
    opened = open_model(path)
    session = OrtSession(path, quantized=False)
    names = [spec.name for spec in opened.signature.outputs]
    cases = [GoldenCase(str(number), feeds, session.run(feeds, names, "")) for number, feeds in enumerate(inputs)]
    rules = rules_for("default-1", "fp32", opened)
    golden_store.write(folder, GoldenSet(tuple(cases)), rules, policy="default-1", precision="fp32", excluded={})
    return folder


def test_each_kind_of_change_is_made(tmp_path: Path) -> None:
    found = [mutant.text for mutant in find_mutants(onnx.load(two_layers(tmp_path / "m.onnx")))]
    assert found == [
        "node MatMul 'first': 'w' scaled by 1.1",
        "node MatMul 'first': channels 0 and 1 of 'w' swapped",
        "node Add 'bias': computed as Sub",
        "node Add 'bias': 'b' scaled by 1.1",
        "node Add 'bias': 'b' zeroed",
        "node Relu 'act': computed as Identity",
        "node MatMul 'second': 'v' scaled by 1.1",
        "node MatMul 'second': channels 0 and 1 of 'v' swapped",
    ]


def test_a_mutant_changes_one_thing_in_a_copy(tmp_path: Path) -> None:
    whole = onnx.load(two_layers(tmp_path / "m.onnx"))
    changes = {}
    for mutant in find_mutants(whole):
        copy = onnx.ModelProto()
        copy.CopyFrom(whole)
        mutant.apply(copy)
        changes[mutant.change] = copy
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in changes["'w' scaled by 1.1"].graph.initializer}
    np.testing.assert_allclose(held["w"], np.array([[1.1, -1.1], [2.2, -2.2]], np.float32))
    np.testing.assert_array_equal(held["b"], [0.5, 0])
    swapped = numpy_helper.to_array(changes["channels 0 and 1 of 'w' swapped"].graph.initializer[0])
    np.testing.assert_array_equal(swapped, [[2, -2], [1, -1]])
    assert numpy_helper.to_array(changes["'b' zeroed"].graph.initializer[1]).tolist() == [0, 0]
    assert [each.op_type for each in changes["computed as Identity"].graph.node][2] == "Identity"
    assert [each.op_type for each in whole.graph.node] == ["MatMul", "Add", "Relu", "MatMul"]


def test_cases_that_exercise_everything_catch_everything(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "m.onnx")
    x = np.array([[0.3, 0.4], [-0.5, 0.1], [-1.0, -2.0]], np.float32)
    found = measure(StrengthJob(path, goldens(path, tmp_path / "g", {"x": x}), 64))
    assert (found.mutants, found.caught, found.share) == (8, 8, 1.0)
    assert (found.missed, found.insensitive, found.idle) == ((), (), ())
    assert found.text == "8 of 8 small faults would be caught"


def test_a_dead_relu_and_a_zero_input_are_seen(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "m.onnx")
    dead = measure(StrengthJob(path, goldens(path, tmp_path / "g", {"x": np.full((1, 2), -9, np.float32)}), 64))
    assert "node Add 'bias': 'b' zeroed" in dead.missed
    zero = measure(StrengthJob(path, goldens(path, tmp_path / "z", {"x": np.zeros((1, 2), np.float32)}), 64))
    assert "node MatMul 'first'" in {f"node {name}" for name in zero.idle}
    assert zero.caught < 8


def test_a_second_case_counts_too(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "m.onnx")
    cases: list[dict[str, Array]] = [
        {"x": np.zeros((1, 2), np.float32)},
        {"x": np.array([[0.3, 0.4], [-1.0, -2.0]], np.float32)},
    ]
    assert measure(StrengthJob(path, goldens(path, tmp_path / "g", *cases), 64)).share == 1.0


def test_an_output_nothing_moves_is_named_and_branches_count(tmp_path: Path) -> None:
    def branch(name: str, factor: float) -> onnx.GraphProto:
        held = [constant(f"k{name}", np.array([factor], np.float32))]
        return helper.make_graph([node("Mul", ["x", f"k{name}"], [name], f"in_{name}")], name, [], [value(name)], held)

    nodes = [node("If", ["yes"], ["y"], then_branch=branch("one", 2), else_branch=branch("two", 3)),
             node("Greater", ["x", "far"], ["z"], "never")]  # fmt: skip
    far = constant("far", np.array([1e9], np.float32))
    proto = model(nodes, [value("x"), value("yes", BOOL, [])], [value("y"), value("z", BOOL)], [far])
    path = save(proto, tmp_path / "m.onnx")
    feeds = {"x": np.ones((2, 3), np.float32), "yes": np.array(True)}
    found = measure(StrengthJob(path, goldens(path, tmp_path / "g", feeds), 64))
    assert found.insensitive == ("z",)
    assert "Mul 'in_two'" in found.idle and "Mul 'in_one'" not in found.idle


def test_weights_in_attributes_are_changed(corpus: Path) -> None:
    names = {mutant.change for mutant in find_mutants(onnx.load(corpus / "traffic_decoder.onnx"))}
    assert names == {"leaf_weights scaled by 1.1", "nodes_splits scaled by 1.1"}


def test_a_model_without_anything_to_change_says_so(tmp_path: Path) -> None:
    proto = model([node("Abs", ["x"], ["y"])], [value("x")], [value("y")])
    path = save(proto, tmp_path / "m.onnx")
    found = measure(StrengthJob(path, goldens(path, tmp_path / "g", {"x": np.ones((1, 3), np.float32)}), 8))
    assert (found.share, found.text) == (None, "it has no weights or operators that can be changed a little")


def test_the_sample_is_spread_and_the_same_each_time(tmp_path: Path) -> None:
    found = find_mutants(onnx.load(two_layers(tmp_path / "m.onnx")))
    chosen = [mutant.text for mutant in sampled(found, 3)]
    assert chosen == [found[0].text, found[3].text, found[7].text]
    assert sampled(found, 99) == found


def test_near_operators_have_the_same_form() -> None:
    for name, other in NEAR.items():
        one, two = onnx.defs.get_schema(name), onnx.defs.get_schema(other)
        assert (len(one.inputs), len(one.outputs)) == (len(two.inputs), len(two.outputs)), name


def test_the_score_is_told_demanded_and_cached(tiny: str, tmp_path: Path) -> None:
    two_layers(tmp_path / "m.onnx")
    np.savez(tmp_path / "weak.npz", x=np.zeros((1, 2), np.float32))
    manifest = tmp_path / "packager.toml"
    text = f'[model]\npath = "m.onnx"\n[golden]\npath = "weak.npz"\n[targets.{tiny}]\n'
    manifest.write_text(text, encoding="utf-8")
    report = packager.build(manifest=manifest, out=tmp_path / "out")
    assert report.strength is not None and report.strength.share == 5 / 8
    assert packager.build(manifest=manifest, out=tmp_path / "out").strength == report.strength
    manifest.write_text(text + "[gates]\nmin_golden_strength = 0.9\n", encoding="utf-8")
    with pytest.raises(GoldenError, match=r"(?s)too weak, the manifest demands 0\.9: 5 of 8 small faults .*'first'"):
        packager.build(manifest=manifest, out=tmp_path / "demanded")
