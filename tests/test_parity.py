"""The comparator: what it must never pass, what it must always pass, and where the line between them lies."""

from __future__ import annotations

import ast
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from packager import parity
from packager.parity import Golden, OutputRule, StoredCase, Tolerance, compare_case, compare_output, judge

CALM = settings(deadline=None)
FP32 = Tolerance(max_abs=1e-3, scaled=1e-4)
LAX = Tolerance(max_abs=1e30, scaled=1e30, cosine=-1.0, top1=0.0)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
FLOATS = st.sampled_from([np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
EXACT = st.sampled_from([np.bool_, np.int8, np.uint8, np.int32, np.int64, np.uint64, ml_dtypes.int4])
COMPLEX = st.sampled_from([np.complex64, np.complex128])


def numbers(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float64, shape, elements=st.floats(-1, 1))


@st.composite
def arrays(draw: st.DrawFn, dtypes: st.SearchStrategy[type]) -> np.ndarray:
    dtype = draw(dtypes)
    values = draw(numbers(draw(SHAPES)))
    return values.astype(dtype) if dtype is not np.bool_ else values > 0


@st.composite
def floats_with_a_place(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    array = draw(arrays(st.sampled_from([np.float16, np.float32, np.float64, ml_dtypes.bfloat16])))
    assume(array.size)
    return array, draw(st.integers(0, array.size - 1))


def with_value(array: np.ndarray, place: int, value: float) -> np.ndarray:
    changed = array.copy()
    changed.reshape(-1)[place] = value
    return changed


def passes(expected: object, actual: object, tolerance: Tolerance = FP32, **more: object) -> bool:
    result = compare_output("y", np.asarray(expected), np.asarray(actual), tolerance, **more)  # type: ignore[arg-type]
    assert result.passed == (not result.reasons)
    return result.passed


def f32(values: object) -> np.ndarray:
    return np.array(values, np.float32)


def one(expected: np.ndarray, actual: np.ndarray, name: str = "case") -> parity.CaseResult:
    return compare_case(name, {"y": expected}, {"y": actual}, {"y": OutputRule(FP32)})


@CALM
@given(st.one_of(arrays(FLOATS), arrays(EXACT), arrays(COMPLEX)))
def test_identical_arrays_always_pass(array):
    strict = Tolerance(max_abs=0.0, scaled=0.0, cosine=1.0, top1=1.0)
    result = compare_output("y", array, array.copy(), strict)
    assert result.passed, result.reasons
    assert result.metrics is not None
    assert (result.metrics.compared > 0) == (array.size > 0)


@CALM
@given(st.lists(st.text(), max_size=4))
def test_strings_compare_exactly_whatever_array_holds_them(texts):
    expected = np.empty(len(texts), dtype=object)
    expected[:] = texts
    assert passes(expected, expected.copy())
    changed = expected.copy()
    for place, text in enumerate(texts):
        changed[place] = text + "x"
        assert not passes(expected, changed, LAX)


@CALM
@given(floats_with_a_place(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_one_sided_nan_or_infinity_never_passes(array_and_place, value):
    array, place = array_and_place
    odd = with_value(array, place, value)
    assert not passes(array, odd, LAX)
    assert not passes(odd, array, LAX)


def test_nan_and_infinity_pass_only_at_the_same_places_and_signs():
    both = np.array([1, math.nan, math.inf, -math.inf], np.float32)
    assert passes(both, both.copy())
    assert not passes(both, both[[0, 1, 3, 2]], LAX)
    assert not passes(both, both[[0, 2, 1, 3]], LAX)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_output_without_a_finite_value_is_not_compared_and_fails(value):
    array = np.full(3, value, np.float32)
    result = compare_output("y", array, array.copy(), LAX)
    assert not result.passed
    assert "nothing compared" in result.reasons[0]


@CALM
@given(arrays(FLOATS), SHAPES)
def test_another_shape_never_passes(array, shape):
    assume(shape != array.shape)
    assert not passes(array, np.zeros(shape, array.dtype), LAX)


def test_a_scalar_is_not_a_vector_of_one():
    result = compare_output("y", f32([1.0]), np.asarray(np.float32(1.0)), LAX)
    assert result.reasons == ("rank differs: expected [1], got []",)


@CALM
@given(arrays(FLOATS), st.one_of(FLOATS, EXACT, COMPLEX))
def test_another_dtype_never_passes(array, dtype):
    assume(np.dtype(dtype) != array.dtype)
    other = np.zeros(array.shape, dtype)
    assert not passes(array, other, LAX)
    assert not passes(other, array, LAX)


def test_zero_size_passes_as_an_output_and_fails_as_a_whole_case():
    empty = np.zeros((0, 7), np.float32)
    result = one(empty, empty.copy())
    assert result.outputs[0].passed
    assert result.outputs[0].metrics is not None
    assert result.outputs[0].metrics.compared == 0
    assert result.reasons == ("nothing compared",)


@CALM
@given(st.floats(1e-6, 1e6), st.floats(1.01, 100), st.integers(0, 11))
def test_a_difference_over_the_scaled_bound_fails_at_any_magnitude(magnitude, factor, place):
    expected = np.linspace(-1, 1, 12) * magnitude
    off = with_value(expected, place, expected[place] + 1e-4 * magnitude * factor)
    assert not passes(expected, off, Tolerance(scaled=1e-4))
    assert passes(expected, off, Tolerance(scaled=1e-4 * factor * 1.01))


@CALM
@given(st.floats(0.01, 0.98), st.integers(0, 11))
def test_a_difference_under_both_bounds_passes(share, place):
    expected = np.linspace(-1, 1, 12).astype(np.float32)
    assert passes(expected, with_value(expected, place, expected[place] + 1e-4 * share))


def test_outputs_of_a_millionth_are_not_passed_by_the_absolute_bound():
    expected = np.array([1e-6, -1e-6, 5e-7], np.float32)
    assert not passes(expected, np.zeros(3, np.float32))
    assert not passes(expected, expected * np.float32(1.001))
    assert passes(expected, expected * np.float32(1.00001))


def test_an_absolute_bound_is_no_tighter_than_float32_can_hold():
    expected = np.array([1e6, 2e6], np.float32)
    assert passes(expected, np.nextafter(expected, np.inf, dtype=np.float32))
    assert not passes(expected, expected + 100)


def test_nothing_but_zero_passes_where_zeros_are_expected():
    zeros = np.zeros(4, np.float32)
    assert not passes(zeros, f32([0, 0, 1e-7, 0]))
    assert passes(zeros, f32([0, 0, 1e-39, 0]), Tolerance(1e-3, 1e-4, 0.999))
    assert passes(zeros, -zeros)


def test_masked_logits_are_judged_apart_from_their_mask():
    expected = np.array([3.0, -2.0, 1.0, -1e9, -1e9], np.float32)
    wrong = np.array([-2.0, 3.0, 1.0, -1e9, -1e9], np.float32)
    assert passes(expected, expected.copy())
    for tolerance in (FP32, Tolerance(scaled=0.1), Tolerance(cosine=0.99)):
        assert not passes(expected, wrong, tolerance)
    assert not passes(expected, f32([3.0, -2.0, 1.0, -1e9, -2e9]))


def test_rounding_of_a_sigmoid_is_excused_only_while_the_signal_stands_out():
    expected = np.array([5e-5, 2e-5, 4e-5], np.float32)
    near = expected + np.float32(2e-7)
    assert not passes(expected, near)
    assert passes(expected, near, rounding=4.8e-7)
    tiny = np.array([4e-7, 1e-7], np.float32)
    assert not passes(tiny, np.zeros(2, np.float32), rounding=4.8e-7)


def test_a_tolerance_that_judges_nothing_fails_floats_and_not_integers():
    assert not passes(f32([1.0]), f32([1.0]), Tolerance())
    assert not passes(f32([1.0]), f32([1.0]), Tolerance(top1=1.0))
    assert passes(np.array([1]), np.array([1]), Tolerance())


def test_large_integers_are_told_apart_beyond_float_precision():
    expected = np.array([2**63 - 1, 2**53], np.int64)
    result = compare_output("y", expected, expected - np.array([0, 1]), LAX)
    assert not result.passed
    assert result.metrics is not None
    assert (result.metrics.mismatches, result.metrics.worst_index) == (1, (1,))


def test_complex_numbers_are_judged_by_their_parts():
    expected = np.array([1 + 1j, 2 - 1j], np.complex64)
    assert not passes(expected, expected.conj(), FP32)
    assert not passes(expected, np.array([1 + 1j, complex(2, math.nan)], np.complex64), LAX)


def test_extreme_doubles_overflow_into_a_failure_and_not_into_a_warning():
    expected = np.array([1.7e308, 1.0])
    assert not passes(expected, -expected, Tolerance(scaled=1e-4))
    assert not passes(np.array([5e-320, 0.0]), np.array([1e308, 1e-320]), Tolerance(scaled=1.0))


def test_metrics_are_those_of_their_definitions():
    expected, actual = np.array([[3.0, 4.0]], np.float32), np.array([[3.0, 4.5]], np.float32)
    found = compare_output("y", expected, actual, LAX, 1).metrics
    assert found is not None
    assert (found.max_abs, found.max_rel, found.scaled, found.worst_index) == (0.5, 0.125, 0.125, (0, 1))
    assert found.rmse == pytest.approx(math.sqrt(0.125))
    assert found.sqnr_db == pytest.approx(20.0)
    assert found.cosine == pytest.approx(27.0 / (5.0 * math.sqrt(29.25)))
    assert found.top1 == 1.0


def test_cosine_of_zero_vectors():
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    for expected, actual, cosine in ((zeros, zeros, 1.0), (zeros, ones, 0.0), (ones, zeros, 0.0)):
        metrics = compare_output("y", expected, actual, LAX).metrics
        assert metrics is not None
        assert metrics.cosine == cosine


def test_top1_counts_rows_and_forgives_ties():
    expected = np.array([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]], np.float32)
    swapped = np.array([[0.1, 0.9], [0.2, 0.8], [0.4, 0.6]], np.float32)
    tolerance = Tolerance(scaled=1.0, top1=0.6)
    assert passes(expected, swapped, tolerance, score_axis=-1)
    strict = compare_output("y", expected, swapped, Tolerance(max_abs=1.0, top1=0.7), -1)
    assert strict.reasons == ("top-1 agreement 0.6667 is under 0.7",)
    near = np.array([[0.5, 0.5001]], np.float32)
    assert passes(near, near[:, ::-1], Tolerance(scaled=1e-3, top1=1.0), score_axis=1)


def test_a_score_axis_that_does_not_exist_fails():
    assert not passes(np.ones(2, np.float32), np.ones(2, np.float32), score_axis=1)


def test_missing_extra_and_unruled_outputs_fail_and_excluded_ones_do_not():
    a = np.ones(2, np.float32)
    rules = {"y": OutputRule(FP32), "z": OutputRule(FP32)}
    assert not compare_case("c", {"y": a, "z": a}, {"y": a}, rules).passed
    assert not compare_case("c", {"y": a}, {"y": a, "z": a}, rules).passed
    assert not compare_case("c", {"y": a, "w": a}, {"y": a, "w": a}, rules).passed
    assert compare_case("c", {"y": a, "z": a}, {"y": a}, rules, frozenset({"z"})).passed
    assert compare_case("c", {"y": a}, {"y": a, "z": a}, rules, frozenset({"z"})).passed
    assert not compare_case("c", {"y": a}, {"y": a}, rules, frozenset({"y"})).passed


def test_a_bundle_must_be_near_the_transformed_model_too():
    reference, int8 = np.array([1.0, -4.0], np.float32), np.array([1.25, -4.0], np.float32)
    case = StoredCase("c", "", "", {}, {"y": reference}, {"y": int8})
    rules, near = {"y": OutputRule(Tolerance(scaled=0.1))}, {"y": OutputRule(Tolerance(scaled=0.01))}
    golden = Golden("p", "int8", rules, {}, (case,), near)
    found = golden.judge(case, {"y": int8})
    assert found.passed
    assert found.outputs[0].metrics is not None
    assert found.outputs[0].metrics.max_abs == 0.25, "against the reference"
    wrong = golden.judge(case, {"y": reference})
    assert not wrong.passed
    assert wrong.reasons == ("against the transformed model: output 'y': scaled error 0.0625 is over 0.01",)
    bare = StoredCase("c", "", "", {}, {"y": reference})
    assert Golden("p", "int8", rules, {}, (bare,)).judge(bare, {"y": reference}).passed


def test_no_cases_and_nothing_compared_fail():
    empty = np.zeros(0, np.float32)
    assert judge([]).reasons == ("there are no cases",)
    assert not judge([one(empty, empty)]).passed
    assert not judge([one(np.ones(1), np.ones(1)), parity.failed_case("b", "it crashed")]).passed
    assert judge([one(np.ones(1), np.ones(1))]).passed


@CALM
@given(st.permutations(range(5)), st.lists(st.sampled_from([0.0, 1e-5, 1e-5, 1.0]), min_size=5, max_size=5))
def test_the_order_of_cases_changes_nothing(order, errors):
    expected = np.array([1.0, 0.5])
    cases = [one(expected, expected + error, f"case {number}") for number, error in enumerate(errors)]
    plain, mixed = judge(cases), judge([cases[number] for number in order])
    assert replace(plain, reasons=()) == replace(mixed, reasons=())
    assert sorted(plain.reasons) == sorted(mixed.reasons)
    assert plain.max_abs is not None
    assert plain.max_abs.value == pytest.approx(max(errors))


@CALM
@given(st.sampled_from(["max_abs", "scaled", "cosine", "top1"]), st.sampled_from([math.nan, math.inf, -2.0, 10**400]))
def test_a_tolerance_must_be_a_sound_number(name, bound):
    with pytest.raises(ValueError, match=name):
        Tolerance.from_dict({name: bound})


@pytest.mark.parametrize("bounds", [{"max_abs": "1"}, {"max_abs": True}, {"max-abs": 1.0}, {"cosine": 1.5}])
def test_a_tolerance_of_another_kind_is_refused(bounds):
    with pytest.raises(ValueError, match=r"max_abs|cosine"):
        Tolerance.from_dict(bounds)


def test_a_tolerance_survives_its_json():
    tolerance = Tolerance(0.5, None, -0.25, 1.0)
    assert Tolerance.from_dict(json.loads(json.dumps(tolerance.to_dict()))) == tolerance


def document(results: list[parity.CaseResult], failures: tuple[str, ...] = ()) -> Any:
    """The verdict as a reader of its text sees it."""
    found = parity.verdict_document(
        results,
        level="runtime",
        runtime={"name": "rt"},
        host={"cores": 2},
        policy={"name": "default-1"},
        failures=failures,
        target="web",
    )
    return json.loads(parity.verdict_text(found), parse_constant=pytest.fail)


def test_the_verdict_is_strict_json_with_the_worst_of_every_metric():
    nan = np.array([math.nan, 1.0, 0.0])
    found = document([one(np.ones(2), np.ones(2), "good"), one(nan, np.array([math.nan, 1.0, 0.5]), "bad")])
    assert (found["status"], found["target"], found["schema"]) == ("failed", "web", "packager.verdict/1")
    assert found["worst"]["max_abs"] == {"case": "bad", "output": "y", "value": 0.5}
    metrics = found["cases"][1]["outputs"][0]["metrics"]
    assert metrics["max_rel"] == "inf"
    assert (metrics["nan_expected"], metrics["worst_index"], metrics["actual_shape"]) == (1, [2], [3])
    assert any("case 'bad'" in failure for failure in found["failures"])


def test_a_failure_beside_the_comparison_fails_the_verdict():
    good = [one(np.ones(2), np.ones(2))]
    assert document(good)["status"] == "passed"
    assert document(good, ("level proxy is under runtime",))["status"] == "failed"


def test_the_comparator_imports_only_what_a_partner_has():
    tree = ast.parse(Path(parity.__file__).read_text(encoding="utf-8"))
    names = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    names |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names - set(sys.stdlib_module_names) == {"numpy", "safetensors", "ml_dtypes"}
