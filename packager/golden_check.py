"""The fit between a golden case and the model: exact names, exact dtypes, shapes that agree with each other.

A golden that almost fits is the start of a silent wrong answer (a float64 array quietly narrowed, an output quietly
not compared), so nothing is converted here beyond how an array is *stored*: byte order, memory layout, numpy's
unicode arrays, and the raw bytes that ``np.save`` makes of bfloat16 and float8.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from packager.errors import GoldenError
from packager.goldens import Array, GoldenCase, dtype_name, numpy_dtype
from packager.graph import Dim, format_dims
from packager.model import Signature, TensorSpec

Sizes = dict[str, tuple[int, str]]
"""Symbolic dims seen so far in a case: the size, and the place that set it."""


def check_case(
    case: GoldenCase,
    signature: Signature,
    where: str,
    allow_nan: bool = False,
    exclude: frozenset[str] = frozenset(),
) -> None:
    """Check one case against the signature.

    Inputs must be exactly the model's inputs. Outputs must be none at all, or every tensor output but those in
    ``exclude`` (which may be there and aren't looked at); sequences, maps and optionals are never expected.
    Dtypes and ranks match exactly, fixed dims too, and a symbolic dim has one size in the whole case. Infinities are
    allowed; a NaN is not, unless ``allow_nan``, because nothing can be told from comparing with it.

    Args:
        case: arrays as :mod:`packager.goldens` describes them.
        signature: what the model takes and gives.
        where: how messages name the case, usually its file.
        allow_nan: accept NaN in inputs and outputs.
        exclude: outputs that aren't compared.

    Raises:
        GoldenError: the first thing that doesn't fit, with the tensor named.
    """
    inputs = {spec.name: spec for spec in signature.inputs}
    for spec in signature.inputs:
        if spec.kind != "tensor":
            raise GoldenError(
                f"{where}: input '{spec.name}' is a {spec.dtype}, which goldens can't carry",
                "export the model with tensor inputs only",
            )
    _check_names(where, "input", case.inputs, inputs.values(), inputs)
    sizes: Sizes = {}
    for name, spec in inputs.items():
        _check_tensor(f"{where}: input '{name}'", spec, case.inputs[name], sizes, allow_nan)
    if not case.outputs:
        return
    outputs = {spec.name: spec for spec in signature.outputs if spec.kind == "tensor" and spec.name not in exclude}
    given = {name: array for name, array in case.outputs.items() if name not in exclude}
    _check_names(where, "output", given, signature.outputs, outputs)
    for name, spec in outputs.items():
        _check_tensor(f"{where}: output '{name}'", spec, given[name], sizes, allow_nan)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing where no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""


def symbol(dim: Dim) -> str | None:
    """A dimension's symbol; ``None`` for a size, and for names by which exporters say that they know none.

    Paddle2ONNX writes ``?`` on every open axis; as a symbol it would claim that batch and height are equal.
    """
    return dim if isinstance(dim, str) and dim.strip(" ?-") and dim != "None" else None


def quoted(names: Iterable[str]) -> str:
    """``'a', 'b'`` in the given order, at most ten of them; ``none`` for none."""
    listed = list(names)
    shown = ", ".join(f"'{name}'" for name in listed[:10])
    return (shown + (f" and {len(listed) - 10} more" if len(listed) > 10 else "")) or "none"


def stored_as(array: Array, spec: TensorSpec) -> Array:
    """The array as packager holds it, values untouched: native byte order, C order, strings as object arrays.

    ``np.save`` writes bfloat16 and float8 as raw bytes (``V2``, ``V1``), which say nothing of their type; such an
    array is taken to be of the signature's dtype where that is one of ml_dtypes' and of the same size.
    """
    if array.dtype.kind == "V" and array.dtype.names is None:
        try:
            expected = numpy_dtype(spec.dtype)
        except KeyError:
            return array
        registered = expected.isbuiltin == 2  # numpy's own dtypes give 1
        if registered and expected.itemsize == array.dtype.itemsize:
            return np.asarray(array, order="C").view(expected)
    if array.dtype.kind == "S":
        texts: Array = np.empty(array.shape, dtype=object)
        texts.reshape(-1)[:] = [bytes(item).decode("utf-8") for item in array.reshape(-1).tolist()]
        return texts
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind in "iufc" and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.asarray(array, order="C")


def _check_names(
    where: str, kind: str, given: Mapping[str, Array], known: Iterable[TensorSpec], expected: Mapping[str, TensorSpec]
) -> None:
    kinds = {spec.name: spec for spec in known}
    listing = f"the model's {kind}s are {quoted(expected)}"
    for name in given:
        if name in expected:
            continue
        if name in kinds and kinds[name].kind != "tensor":
            raise GoldenError(
                f"{where}: {kind} '{name}' is a {kinds[name].dtype}, which goldens can't carry", "leave it out"
            )
        raise GoldenError(f"{where}: the model has no {kind} '{name}'{did_you_mean(name, expected)}", listing)
    missing = [name for name in expected if name not in given]
    if missing:
        what = f"{kind} {quoted(missing)} is missing" if len(missing) == 1 else f"{kind}s {quoted(missing)} are missing"
        hint = listing if kind == "input" else f"{listing}; give all of them, or none"
        raise GoldenError(f"{where}: {what}", hint)


def _check_tensor(place: str, spec: TensorSpec, array: Array, sizes: Sizes, allow_nan: bool) -> None:
    if not isinstance(array, np.ndarray):
        raise GoldenError(f"{place} is a {type(array).__name__}, not an array")
    found = dtype_name(array)
    if found != spec.dtype:
        raise GoldenError(f"{place} is {found}, the model says {spec.dtype}", _conversion(spec.dtype))
    if found == "string" and not all(isinstance(item, str) for item in array.reshape(-1).tolist()):
        raise GoldenError(f"{place} holds something that isn't text", "give an array of str")
    if spec.dims is not None:
        _check_shape(place, spec.dims, array.shape, sizes)
    if not allow_nan and found not in ("string", "bool") and (count := _nan_count(array)):
        raise GoldenError(
            f"{place} has {count} NaN of {array.size} values: nothing can be told from comparing with NaN",
            "correct the case, or allow NaN if the model gives it on purpose",
        )


def _check_shape(place: str, dims: tuple[Dim, ...], shape: tuple[int, ...], sizes: Sizes) -> None:
    if len(shape) != len(dims):
        raise GoldenError(
            f"{place} has rank {len(shape)} and shape {list(shape)}, "
            f"the model says rank {len(dims)}: {format_dims(dims)}",
            "a batch axis is added with `x[np.newaxis]` and removed with `x[0]`",
        )
    for axis, (size, dim) in enumerate(zip(shape, dims, strict=True)):
        # Some exporters write -1 for a size that isn't known.
        if isinstance(dim, int) and dim >= 0 and size != dim:
            raise GoldenError(
                f"{place} axis {axis} has size {size}, the model says {dim} "
                f"({list(shape)} against {format_dims(dims)})",
                "give an array of the declared shape",
            )
        if (name := symbol(dim)) is not None:
            _, _, tensor = place.rpartition(": ")
            before, setter = sizes.setdefault(name, (size, f"{tensor} axis {axis}"))
            if before != size:
                raise GoldenError(
                    f"{place} axis {axis}: dimension '{name}' is {size} here but {before} in {setter}",
                    "a symbolic dimension has one size in a case; correct the arrays, or the names in the model",
                )


def _nan_count(array: Array) -> int:
    if array.dtype.kind in "iub":
        return 0
    try:
        return int(np.count_nonzero(np.isnan(array)))
    except TypeError:  # ml_dtypes' integers have no isnan, and no NaN either
        return 0


def _conversion(dtype: str) -> str:
    if dtype == "string":
        return "convert it where it is saved: `x = x.astype(str)`"
    try:
        kind = numpy_dtype(dtype)
    except KeyError:
        return f"no array can hold {dtype}; change the model's signature"
    if dtype == kind.name and kind.kind in "iufcb" and hasattr(np, "bool_" if dtype == "bool" else dtype):
        spelled = "np.bool_" if dtype == "bool" else f"np.{dtype}"
        return f"convert it where it is saved: `x = x.astype({spelled})`"
    return f"convert it where it is saved: `import ml_dtypes; x = x.astype(ml_dtypes.{kind.name})`"
