"""Open dimensions fit together within a case, vary between cases, and can be pinned."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from packager.errors import UsageError
from packager.golden_synth import candidates, synthesise
from packager.model import open_model
from tests import builders
from tests.builders import FLOAT, value
from tests.golden_models import built, node, numbers, run


def test_symbols_have_one_size_per_case_and_named_lengths_differ(tmp_path):
    inputs = [value("a", FLOAT, ("batch", "src")), value("b", FLOAT, ("batch", "tgt")), value("c", FLOAT, ("tgt", 2))]
    nodes = [node("Identity", [name], [f"{name}_out"]) for name in "abc"]
    model = built(tmp_path, nodes, inputs, [value(f"{name}_out", FLOAT, None) for name in "abc"])
    shapes = [{name: array.shape for name, array in case.inputs.items()} for case in synthesise(model).cases]
    assert shapes == [
        {"a": (1, 8), "b": (1, 12), "c": (12, 2)},
        {"a": (2, 12), "b": (2, 16), "c": (16, 2)},
        {"a": (3, 16), "b": (3, 20), "c": (20, 2)},
    ]


def test_unnamed_dimensions_share_the_batch_and_can_be_pinned(tmp_path):
    inputs = [value("x", FLOAT, (None, None)), value("state", FLOAT, (2, None, 8)), value("q", FLOAT, ("?", "?"))]
    nodes = [node("Identity", [name.name], [f"{name.name}_out"]) for name in inputs]
    model = built(tmp_path, nodes, inputs, [value(f"{name.name}_out", FLOAT, None) for name in inputs])
    last = {name: array.shape for name, array in synthesise(model).cases[2].inputs.items()}
    assert last == {"x": (3, 16), "state": (2, 3, 8), "q": (3, 16)}
    pinned = synthesise(model, dims={"x:0": 4, "x:1": 5}).cases[1].inputs
    assert (pinned["x"].shape, pinned["state"].shape, pinned["q"].shape) == ((4, 5), (2, 4, 8), (4, 12))


def test_a_symbol_that_is_a_sum_is_computed(tmp_path):
    inputs = [value("past", FLOAT, ("batch", "past_len")), value("x", FLOAT, ("batch", "past_len + 1"))]
    model = built(tmp_path, [node("Concat", ["past", "x"], ["y"], axis=1)], inputs)
    for case in synthesise(model).cases:
        assert case.inputs["x"].shape[1] == case.inputs["past"].shape[1] + 1
    case = synthesise(model, dims={"past_len": 4}).cases[0]
    assert case.inputs["x"].shape == (1, 5)


@pytest.mark.parametrize("dims", [{"sequence": 3}, {"n": 0}, {"x:1": 4}])
def test_pinning_what_is_not_open_is_a_usage_error(tmp_path, dims):
    model = open_model(builders.relu(tmp_path / "m.onnx"))
    with pytest.raises(UsageError, match=r"dims: .*'(sequence|n|x:1)'"):
        synthesise(model, dims=dims)


def test_candidates_repeat_what_is_pinned_and_try_a_batch_of_one(tmp_path):
    model = open_model(builders.relu(tmp_path / "m.onnx", shape=("batch", "time", "width")))
    tried = list(candidates(model, dims={"width": 4}))
    assert tried[0] == {"width": 4, "batch": 1}
    assert all(one["width"] == 4 for one in tried)
    assert {one.get("time") for one in tried} >= {16, 64, 256, 512, 640}
    assert {one.get("batch") for one in tried} == {None, 1}
    assert len(tried) == len({tuple(sorted(one.items())) for one in tried}) < 64
    assert all("batch" not in one or one["batch"] == 2 for one in candidates(model, dims={"batch": 2}))
    fixed = open_model(builders.relu(tmp_path / "f.onnx", shape=(1, 3)))
    assert list(candidates(fixed)) == []


@pytest.mark.parametrize(("dims", "reshaped"), [(("n", "t"), (-1, 128)), (("n", 3, "h", "w"), (-1, 3, 48, 320))])
def test_a_size_the_graph_only_shows_when_run_is_among_the_candidates(tmp_path, dims, reshaped):
    nodes = [node("Reshape", ["x", "shape"], ["r"]), node("Add", ["r", "x"], ["y"])]
    model = built(tmp_path, nodes, [value("x", FLOAT, dims)], None, [numbers("shape", *reshaped)])

    def runs(one: Mapping[str, int]) -> bool:
        try:
            run(model, synthesise(model, dims=one))
        except Exception:  # noqa: BLE001
            return False
        return True

    assert not runs({})
    assert any(runs(one) for one in itertools.islice(candidates(model), 8))
