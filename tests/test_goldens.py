"""Golden cases: what their digest covers, and dtype names there and back."""

from __future__ import annotations

import numpy as np
import pytest

from packager.goldens import Array, GoldenCase, GoldenSet, dtype_name, numpy_dtype
from packager.graph import DTYPES

NO_ARRAYS = {"float6e2m3", "float6e3m2"}
"""Types of ONNX that no array library we use can hold."""


def digest(x: Array, y: Array | None = None, name: str = "x", case: str = "c", made_by: str = "reference") -> str:
    outputs = {} if y is None else {"y": y}
    return GoldenSet((GoldenCase(case, {name: x}, outputs, "where", made_by),)).digest()


def test_a_digest_covers_names_dtypes_shapes_and_values():
    x = np.arange(6, dtype=np.float32)
    seen = [
        digest(x), digest(x.reshape(2, 3)), digest(x.astype(np.float64)), digest(x.view(np.int32)), digest(-x),
        digest(x, name="x2"), digest(x, case="d"), digest(x, made_by="source"), digest(x, x), digest(x, x + 1),
        digest(x[:0]), digest(np.array(1.0, np.float32)), digest(np.array([1.0], np.float32)),
        digest(np.array(["a", "b"], object)), digest(np.array(["ab", ""], object)), GoldenSet(()).digest(),
        digest(np.array([0.0, -0.0], np.float32)), digest(np.array([0.0, 0.0], np.float32)),
    ]  # fmt: skip
    assert len(set(seen)) == len(seen)
    assert all(text.startswith("sha256:") and len(text) == 71 for text in seen)


def test_a_digest_does_not_depend_on_memory_layout_or_order_of_names():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert digest(x) == digest(np.asfortranarray(x)) == digest(np.repeat(x, 2, axis=1)[:, ::2])
    one = GoldenSet((GoldenCase("c", {"a": x, "b": x + 1}),))
    other = GoldenSet((GoldenCase("c", {"b": x + 1, "a": x}),))
    assert one.digest() == other.digest()


def test_a_digest_depends_on_the_order_of_cases():
    x = np.zeros(1, np.float32)
    first, second = GoldenCase("a", {"x": x}), GoldenCase("b", {"x": x})
    assert GoldenSet((first, second)).digest() != GoldenSet((second, first)).digest()


@pytest.mark.parametrize("name", sorted(set(DTYPES.values()) - NO_ARRAYS))
def test_each_dtype_name_goes_there_and_back(name: str):
    assert dtype_name(np.zeros(2, numpy_dtype(name))) == name


@pytest.mark.parametrize("name", [*sorted(NO_ARRAYS), "float33", "", "tensor(float)"])
def test_a_dtype_that_no_array_can_hold_is_a_key_error(name: str):
    with pytest.raises(KeyError):
        numpy_dtype(name)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([b"a"]), np.array(["a"], object)])
def test_texts_of_any_kind_are_strings(array: Array):
    assert dtype_name(array) == "string"
