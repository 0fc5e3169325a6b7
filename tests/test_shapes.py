"""Pinned shapes: what ``shapes = { batch = 1 }`` makes of a signature, and what it refuses."""

from __future__ import annotations

import pytest

from packager.errors import Refused
from packager.model import Signature, TensorSpec
from packager.shapes import pin_shapes

SIGNATURE = Signature(
    (
        TensorSpec("x", "float32", ("batch", 3, None, "width")),
        TensorSpec("mask", "int64", ("batch", None)),
        TensorSpec("any", "float32", None),
    ),
    (
        TensorSpec("y", "float32", ("batch", None)),
        TensorSpec("z", "float32", ("own", 2)),
        TensorSpec("r", "bool", None),
    ),
)


def dims(*shapes: tuple[str, int]) -> list[tuple[object, ...] | None]:
    pinned = pin_shapes(SIGNATURE, shapes)
    return [spec.dims for spec in (*pinned.inputs, *pinned.outputs)]


def test_nothing_pinned_is_the_signature_itself():
    assert pin_shapes(SIGNATURE, ()) == SIGNATURE


def test_a_symbol_is_pinned_wherever_it_stands():
    assert dims(("batch", 4)) == [(4, 3, None, "width"), (4, None), None, (4, None), ("own", 2), None]


def test_a_dim_without_a_name_is_pinned_by_its_place_in_one_input():
    assert dims(("x:2", 7)) == [("batch", 3, 7, "width"), ("batch", None), None, ("batch", None), ("own", 2), None]
    assert dims(("mask:1", 5), ("batch", 1))[1] == (1, 5)


def test_names_and_dtypes_stay():
    pinned = pin_shapes(SIGNATURE, (("batch", 1), ("width", 9), ("x:2", 2), ("mask:1", 3)))
    assert [(spec.name, spec.dtype) for spec in (*pinned.inputs, *pinned.outputs)] == [
        (spec.name, spec.dtype) for spec in (*SIGNATURE.inputs, *SIGNATURE.outputs)
    ]
    assert pinned.symbols() == ()


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(size: int):
    with pytest.raises(Refused, match=f"'batch' is pinned to {size}"):
        dims(("batch", size))


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("bacth", "did you mean 'batch'? free dims: batch, width, x:2, mask:1"),
        ("Batch", "did you mean 'batch'?"),
        ("x:1", "did you mean 'x:2'?"),  # a fixed dim
        ("x:0", "x:2"),  # it has a name
        ("own", "free dims"),  # of an output only
        ("any:0", "free dims"),  # of unknown rank
        ("zzz", "free dims: batch"),
    ],
)
def test_what_is_no_free_dim_is_refused_with_those_there_are(key: str, hint: str):
    with pytest.raises(Refused, match=f"no input has a free dim '{key}'") as caught:
        dims((key, 2))
    assert hint in str(caught.value.hint)
    assert ("did you mean" in str(caught.value.hint)) or key in ("own", "any:0", "zzz")


def test_where_every_dim_is_fixed_the_hint_says_so():
    with pytest.raises(Refused) as caught:
        pin_shapes(Signature((TensorSpec("x", "float32", (1, 3)),), ()), (("n", 1),))
    assert caught.value.hint == "free dims: none, every dim is fixed"
