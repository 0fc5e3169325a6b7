"""A case that doesn't fit the model exactly is refused, in words that say how to correct it."""

from __future__ import annotations

import numpy as np
import pytest

from packager.errors import GoldenError
from packager.golden_formats import check_case, read_goldens
from packager.goldens import GoldenCase
from packager.model import Signature, TensorSpec
from tests.golden_builders import (
    SIGNATURE,
    X,
    Y,
    assert_one_case,
    npz,
    proto,
    refused,
    signature,
)


def test_unknown_names_are_refused_with_a_suggestion(tmp_path):
    error = refused(npz(tmp_path / "a.npz", x=X, yy=Y))
    assert "no input or output 'yy' (did you mean 'y'?)" in error.message
    error = refused(npz(tmp_path / "b.npz", **{"in/z": X}))
    assert "b.npz: the model has no input 'z'" in error.message
    assert error.hint == "the model's inputs are 'x'"


def test_missing_inputs_are_refused(tmp_path):
    two = Signature((*SIGNATURE.inputs, TensorSpec("mask", "int64", ("n",))), SIGNATURE.outputs)
    assert "input 'mask' is missing" in refused(npz(tmp_path / "a.npz", x=X), two).message


def test_some_outputs_are_not_enough(tmp_path):
    two = Signature(SIGNATURE.inputs, (*SIGNATURE.outputs, TensorSpec("z", "float32", ("n",))))
    path = npz(tmp_path / "a.npz", x=X, y=Y)
    error = refused(path, two)
    assert "output 'z' is missing" in error.message
    assert "give all of them, or none" in str(error.hint)
    assert_one_case(read_goldens(path, two, exclude=frozenset({"z"})))


def test_excluded_outputs_are_dropped(tmp_path):
    two = Signature(SIGNATURE.inputs, (*SIGNATURE.outputs, TensorSpec("z", "float32", ("n",))))
    path = npz(tmp_path / "a.npz", x=X, y=Y, z=np.array([1.0]))
    case = assert_one_case(read_goldens(path, two, exclude=frozenset({"z"})))
    assert list(case.outputs) == ["y"]


def test_outputs_that_are_no_tensors_are_not_expected_and_not_taken(tmp_path):
    with_map = Signature(SIGNATURE.inputs, (*SIGNATURE.outputs, TensorSpec("m", "sequence(map)", None, "sequence")))
    assert_one_case(read_goldens(npz(tmp_path / "a.npz", x=X, y=Y), with_map))
    error = refused(npz(tmp_path / "b.npz", x=X, y=Y, m=Y), with_map)
    assert "output 'm' is a sequence(map), which goldens can't carry" in error.message


def test_a_model_with_sequence_inputs_has_no_goldens(tmp_path):
    taking = Signature((TensorSpec("s", "sequence(float32)", None, "sequence"),), SIGNATURE.outputs)
    assert "input 's' is a sequence(float32)" in refused(npz(tmp_path / "a.npz", y=Y), taking).message


@pytest.mark.parametrize(
    ("array", "dtype", "hint"),
    [
        (X.astype(np.float64), "float32", "x.astype(np.float32)"),
        (X.astype(np.int32), "int64", "x.astype(np.int64)"),
        (X.astype(np.float16), "float32", "x.astype(np.float32)"),
        (X, "bfloat16", "import ml_dtypes; x = x.astype(ml_dtypes.bfloat16)"),
        (X, "bool", "x.astype(np.bool_)"),
        (X, "string", "x.astype(str)"),
    ],
)
def test_another_dtype_is_refused_with_the_line_that_converts(tmp_path, array, dtype, hint):
    error = refused(npz(tmp_path / "a.npz", x=array), signature(dtype))
    assert f"a.npz: input 'x' is {array.dtype.name}, the model says {dtype}" in error.message
    assert hint in str(error.hint)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (X[0], "has rank 1 and shape [3], the model says rank 2: [n, 3]"),
        (X[:, :2], "axis 1 has size 2, the model says 3"),
    ],
)
def test_another_shape_is_refused(tmp_path, array, words):
    assert words in refused(npz(tmp_path / "a.npz", x=array)).message


def test_a_symbol_has_one_size_in_a_case(tmp_path):
    error = refused(npz(tmp_path / "a.npz", x=X, y=Y[:1]))
    assert "output 'y' axis 0: dimension 'n' is 1 here but 2 in input 'x' axis 0" in error.message


def test_names_that_say_nothing_are_no_symbols(tmp_path):
    unnamed = signature("float32", ("?", "?"))
    assert_one_case(read_goldens(npz(tmp_path / "a.npz", x=X, y=Y), unnamed))


def test_any_shape_fits_an_unknown_rank_or_size(tmp_path):
    path = npz(tmp_path / "a.npz", x=X, y=Y)
    for dims in (None, (None, None), (-1, 3)):
        assert_one_case(read_goldens(path, signature("float32", dims)))


def test_nan_is_refused_unless_allowed_and_infinity_is_not_a_nan(tmp_path):
    broken = Y.copy()
    broken[0, 0] = np.nan
    path = npz(tmp_path / "a.npz", x=X, y=broken)
    assert "a.npz: output 'y' has 1 NaN of 6 values" in refused(path).message
    assert np.isnan(read_goldens(path, SIGNATURE, allow_nan=True).cases[0].outputs["y"][0, 0])
    assert "input 'x' has 1 NaN" in refused(npz(tmp_path / "b.npz", x=broken)).message
    infinite = read_goldens(npz(tmp_path / "c.npz", x=X, y=np.full_like(Y, np.inf)), SIGNATURE)
    assert infinite.cases[0].outputs["y"].tolist() == np.full_like(Y, np.inf).tolist()


def test_strings_become_object_arrays_of_text(tmp_path):
    words = np.array([["a", "", "日本"]])
    encoded = np.char.encode(words, "utf-8")
    npz(tmp_path / "a.npz", x=words)
    npz(tmp_path / "b.npz", x=encoded)
    proto(tmp_path / "set" / "input_0.pb", words.astype(object), "x")
    for case in read_goldens(tmp_path, signature("string")).cases:
        assert case.inputs["x"].dtype == object
        assert case.inputs["x"].tolist() == [["a", "", "日本"]]
    error = refused(npz(tmp_path / "c.npz", x=np.array([[b"\xff"] * 3])), signature("string"))
    assert "aren't UTF-8" in error.message


def test_byte_and_memory_order_are_made_packagers_own(tmp_path):
    npz(tmp_path / "a.npz", x=X.astype(">f4"))
    npz(tmp_path / "b.npz", x=np.asfortranarray(X))
    for case in read_goldens(tmp_path, SIGNATURE).cases:
        assert case.inputs["x"].dtype.isnative
        assert case.inputs["x"].flags.c_contiguous
        np.testing.assert_array_equal(case.inputs["x"], X)


def test_captured_outputs_are_checked_by_the_same_rules():
    case = GoldenCase("c", {"x": X}, {"y": Y})
    check_case(case, SIGNATURE, "the reference")
    with pytest.raises(GoldenError, match="the reference: output 'y' is float64"):
        check_case(GoldenCase("c", {"x": X}, {"y": Y.astype(float)}), SIGNATURE, "the reference", False, frozenset())
    nothing = GoldenCase("c", {"x": X}, {"y": None})  # type: ignore[dict-item]
    with pytest.raises(GoldenError, match="output 'y' is a NoneType"):
        check_case(nothing, SIGNATURE, "the reference")


def test_text_outputs_must_hold_text():
    case = GoldenCase("c", {"x": np.array([[b"a", 1, None]], dtype=object)})
    with pytest.raises(GoldenError, match="input 'x' holds something that isn't text"):
        check_case(case, signature("string"), "here")
