"""Synthesised inputs fit the signature and depend on the seed only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from packager.errors import GoldenError, UsageError
from packager.golden_formats import check_case
from packager.golden_synth import candidates, synthesise
from packager.goldens import numpy_dtype
from packager.model import open_model
from tests import builders
from tests.builders import BOOL, FLOAT, INT32, INT64, STRING, value
from tests.golden_models import DOUBLE, UINT8, built, node, numbers, table

DIMS = st.lists(st.sampled_from([1, 2, 3, 5, None, "batch", "N", "seq", "h", "?", "seq + 1"]), max_size=4)


DTYPES = st.sampled_from(
    [FLOAT, DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, INT32, INT64, UINT8, TensorProto.INT8,
     TensorProto.UINT64, TensorProto.UINT16, BOOL, STRING, TensorProto.COMPLEX64, TensorProto.FLOAT8E5M2]
)  # fmt: skip


def test_cases_are_named_and_say_where_they_come_from(tmp_path):
    goldens = synthesise(open_model(builders.relu(tmp_path / "m.onnx")), seed=7, cases=5)
    assert [case.name for case in goldens.cases] == [f"synthesised-{number}" for number in range(5)]
    assert {case.source for case in goldens.cases} == {"synthesised, seed 7"}
    assert not any(case.outputs or case.outputs_from for case in goldens.cases)
    assert [case.inputs["x"].shape[0] for case in goldens.cases] == [1, 2, 3, 1, 2]


def test_the_seed_decides_every_value(tmp_path):
    model = open_model(builders.relu(tmp_path / "m.onnx", shape=("n", "t")))
    assert synthesise(model, seed=1).digest() == synthesise(model, seed=1).digest()
    assert synthesise(model, seed=1).digest() != synthesise(model, seed=2).digest()
    first, second = synthesise(model, cases=1), synthesise(model, cases=2)
    np.testing.assert_array_equal(first.cases[0].inputs["x"], second.cases[0].inputs["x"])


def test_two_processes_with_different_hash_seeds_agree(tmp_path):
    ids = [value("ids", INT64, ("batch", "seq")), value("mask", INT64, ("batch", "seq")), value("s", STRING, (4,))]
    nodes = [
        node("Gather", ["table", "ids"], ["rows"]), node("Cast", ["mask"], ["m"], to=FLOAT),
        node("Identity", ["s"], ["t"]), node("Unsqueeze", ["m", "one"], ["m3"]), node("Mul", ["rows", "m3"], ["y"]),
    ]  # fmt: skip
    outputs = [value("y", FLOAT, None), value("t", STRING, (4,))]
    model = built(tmp_path, nodes, ids, outputs, [table("table", 11), numbers("one", -1)])
    code = (
        "import sys, pathlib; from packager.model import open_model; from packager.golden_synth import *; "
        "m = open_model(pathlib.Path(sys.argv[1])); print(synthesise(m, seed=3).digest(), list(candidates(m)))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code, str(model.path)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "4321")
    ]  # fmt: skip
    assert printed[0] == printed[1]
    assert synthesise(model, seed=3).digest() in printed[0]


def test_no_cases_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot synthesise 0"):
        synthesise(open_model(builders.relu(tmp_path / "m.onnx")), cases=0)


def test_ranges_replace_what_the_graph_suggests(tmp_path):
    inputs = [value("ids", INT64, ("n", 50)), value("x", FLOAT, ("n", 50))]
    nodes = [node("Gather", ["table", "ids"], ["y"]), node("Identity", ["x"], ["z"])]
    outputs = [value("y", FLOAT, None), value("z", FLOAT, None)]
    model = built(tmp_path, nodes, inputs, outputs, [table("table", 9)])
    case = synthesise(model, ranges={"ids": (2, 4), "x": (10.0, 11.0)}).cases[2]
    assert set(case.inputs["ids"].ravel()) == {2, 3, 4}
    assert (case.inputs["x"].min() >= 10, case.inputs["x"].max() <= 11) == (True, True)


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ({"xs": (0, 1)}, r"no input 'xs' \(did you mean 'x'\?\)"), ({"x": (1, 0)}, "is not a range"),
        ({"x": (0, float("nan"))}, "is not a range"), ({"i": (0.2, 0.8)}, "not a range of uint8"),
        ({"i": (-1, 5)}, "not a range of uint8"), ({"i": (0, 256)}, "not a range of uint8"),
        ({"s": (0, 1)}, "'s' is string"),
    ],
)  # fmt: skip
def test_ranges_that_make_no_sense_are_usage_errors(tmp_path, ranges, words):
    inputs = [value("x", FLOAT, (2,)), value("i", UINT8, (2,)), value("s", STRING, (2,))]
    nodes = [node("Identity", [name], [f"{name}o"]) for name in "xis"]
    outputs = [value("xo", FLOAT, (2,)), value("io", UINT8, (2,)), value("so", STRING, (2,))]
    with pytest.raises(UsageError, match=words):
        synthesise(built(tmp_path, nodes, inputs, outputs), ranges=ranges)


def test_what_cannot_be_synthesised_asks_for_goldens(tmp_path):
    sequence = helper.make_tensor_sequence_value_info("x", FLOAT, None)
    for given_input, words in (
        (value("x", FLOAT, None), "input 'x' has no declared rank"),
        (sequence, r"input 'x' is a sequence\(float32\[...\]\), which can't be synthesised"),
        (value("x", FLOAT, (1 << 20, 1 << 20)), "would have 1099511627776 elements"),
    ):
        model = built(tmp_path, [node("Identity", ["x"], ["y"])], [given_input])
        with pytest.raises(GoldenError, match=words) as caught:
            synthesise(model)
        assert "give golden cases" in str(caught.value.hint)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    specs=st.lists(
        st.tuples(DTYPES, DIMS, st.sampled_from(["", "_mask", "_lengths", "_scale"])), min_size=1, max_size=4
    ),
    seed=st.integers(0, 2**63 - 1),
)
def test_whatever_the_signature_inputs_fit_it(tmp_path, specs, seed):
    inputs = [value(f"x{number}{name}", dtype, dims) for number, (dtype, dims, name) in enumerate(specs)]
    nodes = [node("Identity", [one.name], [f"y{number}"]) for number, one in enumerate(inputs)]
    outputs = [value(f"y{number}", dtype, None) for number, (dtype, _, _) in enumerate(specs)]
    model = built(tmp_path, nodes, inputs, outputs)
    goldens = synthesise(model, seed=seed)
    assert len(goldens.cases) == 3
    for case in goldens.cases:
        check_case(case, model.signature, case.name)
        for spec in model.signature.inputs:
            assert case.inputs[spec.name].dtype == numpy_dtype(spec.dtype)
            assert case.inputs[spec.name].flags.c_contiguous
    for dims in candidates(model):
        shapes = synthesise(model, cases=1, dims=dims, seed=seed).cases[0].inputs
        assert set(shapes) == {spec.name for spec in model.signature.inputs}
        break
