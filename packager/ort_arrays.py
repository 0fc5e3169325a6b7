"""Arrays in and out of ONNX Runtime that its Python interface has no numpy dtype for.

numpy itself ends at float16 and int8. For bfloat16, 8-bit floats and integers of 2 and 4 bits there are dtypes of the
package ml_dtypes, which ONNX Runtime doesn't know: it refuses them, or answers with their bits as ``uint8``. They go in
and come out as bits here; small integers are packed as ``TensorProto`` packs them, the first in the lowest bits.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from packager.goldens import Array, dtype_name, numpy_dtype

if TYPE_CHECKING:
    import onnxruntime as ort

BITS = {
    "bfloat16": 16, "float8e4m3fn": 8, "float8e4m3fnuz": 8, "float8e5m2": 8, "float8e5m2fnuz": 8, "float8e8m0": 8,
    "int4": 4, "uint4": 4, "int2": 2, "uint2": 2,
}  # fmt: skip
"""Bits of one element, by dtype."""


def run(session: ort.InferenceSession, outputs: Sequence[str], feeds: Mapping[str, Array]) -> list[Any]:
    """What ``session`` answers: an array for a tensor, with the dtype it is declared with.

    Raises:
        Exception: ONNX Runtime's own, which are not public.
    """
    given = {name: _inward(array) for name, array in feeds.items()}
    declared = {each.name: each.type for each in session.get_outputs()}
    dtypes = [_special(declared[name]) for name in outputs]
    if not any(dtypes):
        return list(session.run(list(outputs), given))
    import onnxruntime as ort

    values = {name: _value(ort, each) for name, each in given.items()}
    answers = session.run_with_ort_values(list(outputs), values)
    return [_outward(value, dtype) for value, dtype in zip(answers, dtypes, strict=True)]


def _special(declared: str) -> str:
    """The dtype of an output that numpy has none for, from its type in ONNX Runtime's words; else empty."""
    match = re.fullmatch(r"tensor\((\w+)\)", declared)
    return match[1] if match and match[1] in BITS else ""


def _inward(array: Array) -> Any:  # noqa: ANN401 - an array or an OrtValue
    import onnx
    import onnxruntime as ort

    name = dtype_name(array)
    if name not in BITS:
        return array
    raw = np.array(array, order="C")
    if BITS[name] < 8:
        # The runtime reads as many bytes as the packed elements take; the buffer has one for each.
        packed = np.zeros(raw.shape, np.uint8)
        bits = _packed(raw, BITS[name])
        packed.reshape(-1)[: bits.size] = bits
        raw = packed
    kind = onnx.TensorProto.DataType.Value(name.upper())
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw.view(np.uint16 if BITS[name] == 16 else np.uint8), kind)


def _value(ort: Any, given: Any) -> Any:  # noqa: ANN401 - the module, and an array or an OrtValue
    return given if isinstance(given, ort.OrtValue) else ort.OrtValue.ortvalue_from_numpy(given)


def _outward(value: Any, name: str) -> Any:  # noqa: ANN401 - an OrtValue
    if not name:
        return value.numpy() if value.is_tensor() else None
    data = np.frombuffer(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()), np.uint8)
    shape = tuple(value.shape())
    if BITS[name] < 8:
        return (
            _unpacked(data, BITS[name], int(np.prod(shape)), name.startswith("i"))
            .astype(numpy_dtype(name))
            .reshape(shape)
        )
    return data.view(numpy_dtype(name)).reshape(shape)


def _packed(array: Array, bits: int) -> Array:
    """Small integers, several to a byte."""
    flat = array.astype(np.int8).reshape(-1).view(np.uint8) & ((1 << bits) - 1)
    per = 8 // bits
    rows = np.pad(flat, (0, -flat.size % per)).reshape(-1, per)
    shifts = np.arange(per, dtype=np.uint8) * np.uint8(bits)
    return np.asarray(np.bitwise_or.reduce(rows << shifts, axis=1), np.uint8)


def _unpacked(data: Array, bits: int, count: int, signed: bool) -> Array:
    """The first ``count`` of small integers packed several to a byte."""
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    flat = ((data[:, None].astype(np.uint8) >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)[:count].astype(np.int8)
    return np.asarray(np.where(flat >= 1 << (bits - 1), flat - (1 << bits), flat) if signed else flat)
