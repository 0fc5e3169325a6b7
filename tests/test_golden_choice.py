"""Synthesised cases are added where the first leave much idle: what they reach, and where nothing is added."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

from packager import golden_store
from packager.golden_choice import has_choices
from packager.goldens import GoldenCase
from packager.model import open_model
from packager.reference import Reference, ReferenceJob, SynthesisSettings, answer
from tests.builders import INT64, model, relu, save, value

node = helper.make_node
RNG = np.random.default_rng(5)
WEIGHTS = {16: RNG.standard_normal((16, 3)).astype(np.float32), 32: RNG.standard_normal((32, 3)).astype(np.float32)}
BIAS = np.array([0.5, -1.5, 2.5], np.float32)


def two_rates(path: Path) -> Path:
    """A frame of 16 samples at 16 kHz goes one way, one of 32 samples at any other rate goes another."""
    branches = {}
    for name, length in (("then_branch", 16), ("else_branch", 32)):
        weights = numpy_helper.from_array(WEIGHTS[length], f"w{length}")
        nodes = [node("MatMul", ["x", f"w{length}"], [f"m{length}"], f"layer{length}")]
        if length == 32:
            nodes.append(node("Add", ["m32", "bias"], ["y32"], "bias32"))
        output = f"{'y' if length == 32 else 'm'}{length}"
        held = [weights, *([numpy_helper.from_array(BIAS, "bias")] if length == 32 else [])]
        branches[name] = helper.make_graph(nodes, name, [], [value(output, shape=[1, 3])], held)
    nodes = [node("Equal", ["sr", "wide"], ["is_wide"], "equal"), node("If", ["is_wide"], ["y"], "if", **branches)]
    wide = numpy_helper.from_array(np.array(16000, np.int64), "wide")
    inputs = [value("x", shape=[1, "samples"]), value("sr", INT64, [])]
    return save(model(nodes, inputs, [value("y", shape=[1, 3])], [wide]), path)


def far_threshold(path: Path) -> Path:
    """What passes a threshold of 5 goes through three layers."""
    square = {f"w{at}": RNG.standard_normal((4, 4)).astype(np.float32) for at in range(3)}
    held = [numpy_helper.from_array(array, name) for name, array in square.items()]
    held.append(numpy_helper.from_array(np.full(4, 5, np.float32), "five"))
    nodes = [node("Sub", ["x", "five"], ["s"]), node("Relu", ["s"], ["h0"])]
    nodes += [node("MatMul", [f"h{at}", f"w{at}"], ["y" if at == 2 else f"h{at + 1}"]) for at in range(3)]
    return save(model(nodes, [value("x", shape=["n", 4])], [value("y", shape=["n", 4])], held), path)


def answered(path: Path, *, thorough: bool = False, **synthesis: object) -> tuple[Reference, tuple[GoldenCase, ...]]:
    settings = SynthesisSettings(**synthesis)  # type: ignore[arg-type]
    job = ReferenceJob(
        path, None, settings, (), False, "default-1", "fp32", path.parent / "answered", thorough=thorough
    )  # fmt: skip
    made = answer(job)
    return made, golden_store.read(job.out).cases


def rate(case: GoldenCase) -> int:
    return int(case.inputs["sr"])


def test_a_branch_that_no_case_takes_gets_one_with_the_sizes_it_needs(tmp_path: Path):
    made, cases = answered(two_rates(tmp_path / "m.onnx"))
    assert made.cases == len(cases) == 4
    assert [case.name for case in cases] == [f"synthesised-{at}" for at in range(4)]
    assert {rate(case) for case in cases[:3]} == {16000}
    last = cases[3]
    x = last.inputs["x"].astype(np.float32)
    assert (rate(last), x.shape) == (8000, (1, 32))
    assert last.source == "synthesised, seed 0, chosen: 'sr' = 8000"
    np.testing.assert_allclose(last.outputs["y"].astype(np.float32), x @ WEIGHTS[32] + BIAS, rtol=1e-4, atol=1e-5)


def test_the_same_cases_are_chosen_again(tmp_path: Path):
    _, one = answered(two_rates(tmp_path / "m.onnx"))
    _, other = answered(tmp_path / "m.onnx")
    for mine, again in zip(one, other, strict=True):
        assert all(np.array_equal(mine.inputs[name], again.inputs[name]) for name in mine.inputs)


def test_what_the_user_fixed_stays(tmp_path: Path):
    _, cases = answered(two_rates(tmp_path / "m.onnx"), ranges=(("sr", (16000.0, 16000.0)),), dims=(("samples", 16),))
    assert {rate(case) for case in cases} == {16000}
    assert {case.inputs["x"].shape for case in cases} == {(1, 16)}


def test_larger_inputs_reach_what_is_behind_a_threshold(tmp_path: Path):
    path = far_threshold(tmp_path / "m.onnx")
    _, usual = answered(path)
    assert len(usual) == 3, "a build looks for more only where there is something to choose"
    assert not has_choices(open_model(path))
    assert not any(case.outputs["y"].any() for case in usual)
    _, cases = answered(path, thorough=True)
    assert len(cases) == 4
    np.testing.assert_array_equal(cases[3].inputs["x"], 8 * usual[0].inputs["x"])
    assert cases[3].outputs["y"].any()


@pytest.mark.parametrize("thorough", [False, True])
def test_nothing_is_added_where_the_first_cases_catch_enough(tmp_path: Path, thorough: bool):
    _, cases = answered(relu(tmp_path / "m.onnx"), thorough=thorough)
    assert len(cases) == 3
