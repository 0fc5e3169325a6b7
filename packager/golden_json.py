"""Golden cases in JSON: what Polygraphy saves, and what KServe's version 2 protocol sends.

Polygraphy (``polygraphy run --save-inputs`` and ``--save-outputs``, as of 0.53) writes arrays as base64 of
``np.save``: inputs are a list of feeds ``{name: {"array": ..., "polygraphy_class": "ndarray"}}`` (or one feed per
file), outputs a ``RunResults`` of ``{"lst": [[runner, [{"outputs": {name: {"values": array}}}]]]}``.

The Open Inference Protocol's tensors are ``{"name", "shape", "datatype", "data"}`` with flat or nested data. One
document may hold a request, a response, or both; so may each document of a list.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import numpy as np

from packager.errors import GoldenError
from packager.golden_files import Loose, npy_array
from packager.goldens import Array, numpy_dtype

MAX_JSON_BYTES = 512 << 20
"""Parsed JSON takes many times its size in memory; a case larger than this belongs in an ``.npz``."""

DATATYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16", "FP32": "float32", "FP64": "float64",
    "BF16": "bfloat16", "BYTES": "string",
}  # fmt: skip
"""The protocol's datatypes (BF16 is Triton's addition) to packager's dtypes."""

_EXPECTED = "expected Polygraphy's saved inputs or outputs, or a KServe v2 request or response"


def read_json(file: Path) -> list[Loose]:
    """Every case of a JSON file, in order.

    Raises:
        GoldenError: the file is too large, malformed, of no known format, or a tensor in it is.
    """
    document = _load(file)
    if isinstance(document, dict) and "lst" in document:
        return _run_results(file, document)
    parts = document if isinstance(document, list) else [document]
    if not parts:
        raise GoldenError(f"{file}: the list of cases is empty", _EXPECTED)
    return [_one(file, part) for part in parts]


def _load(file: Path) -> object:
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise GoldenError(f"{file}: {size} bytes of JSON, more than the {MAX_JSON_BYTES} allowed", "use .npz instead")
    if size == 0:
        raise GoldenError(f"{file}: the file is empty", "write the case again")
    try:
        return json.loads(file.read_bytes(), object_pairs_hook=lambda pairs: _unique(file, pairs))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        raise GoldenError(f"{file}: not JSON: {error}", "the file is cut or of another format") from error


def _unique(file: Path, pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise GoldenError(f"{file}: '{twice}' is given twice in one object", "keep one of them")
    return found


def _one(file: Path, part: object) -> Loose:
    if not isinstance(part, dict) or not part:
        raise GoldenError(f"{file}: not a golden file", _EXPECTED)
    if any(isinstance(part.get(key), list) for key in ("inputs", "outputs")):
        inputs = dict(_tensors(file, part["inputs"])) if isinstance(part.get("inputs"), list) else None
        outputs = dict(_tensors(file, part["outputs"])) if isinstance(part.get("outputs"), list) else {}
        return Loose(inputs, outputs)
    if all(isinstance(value, dict) and ("array" in value or "tensor" in value) for value in part.values()):
        return Loose({name: _saved_array(file, name, value) for name, value in part.items()}, {})
    raise GoldenError(f"{file}: not a golden file", _EXPECTED)


def _run_results(file: Path, document: Mapping[str, object]) -> list[Loose]:
    runs = document["lst"]
    if not isinstance(runs, list) or not all(isinstance(run, list) and len(run) == 2 for run in runs):
        raise GoldenError(f"{file}: not Polygraphy's RunResults", _EXPECTED)
    if len(runs) != 1:
        raise GoldenError(
            f"{file}: holds the outputs of {len(runs)} runners, and only one can be the golden",
            "save the outputs of one runner (`polygraphy run --onnxrt --save-outputs ...`)",
        )
    iterations = runs[0][1]
    if not isinstance(iterations, list):
        raise GoldenError(f"{file}: not Polygraphy's RunResults", _EXPECTED)
    found: list[Loose] = []
    for iteration in iterations:
        outputs = iteration.get("outputs") if isinstance(iteration, dict) else None
        if not isinstance(outputs, dict):
            raise GoldenError(f"{file}: iteration {len(found)} has no outputs", _EXPECTED)
        found.append(Loose(None, {name: _saved_array(file, name, value) for name, value in outputs.items()}))
    return found


def _saved_array(file: Path, name: str, value: object) -> Array:
    """An array as Polygraphy saves it; a LazyArray wraps it under ``values``."""
    where = f"{file}: array '{name}'"
    if isinstance(value, dict) and "values" in value:
        value = value["values"]
    if isinstance(value, dict) and "tensor" in value:
        raise GoldenError(
            f"{where} is a saved torch tensor, which would have to be unpickled", "save it as a numpy array"
        )
    data = value.get("array") if isinstance(value, dict) else None
    if not isinstance(data, str):
        raise GoldenError(f"{where} is not a saved array", _EXPECTED)
    try:
        payload = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise GoldenError(f"{where} is not base64: {error}", "save it again with Polygraphy") from error
    return npy_array(payload, where)


def _tensors(file: Path, listed: object) -> Iterator[tuple[str, Array]]:
    """The named tensors of a request or response; an output that only asks for a tensor (no data) is passed over."""
    seen: set[str] = set()
    for entry in cast("list[object]", listed):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise GoldenError(f"{file}: a tensor without a name", 'a tensor is {"name", "shape", "datatype", "data"}')
        name: str = entry["name"]
        parameters = entry.get("parameters")
        if isinstance(parameters, dict) and "binary_data_size" in parameters:
            raise GoldenError(f"{file}: tensor '{name}' has its data outside the JSON", "send it as JSON data")
        if "data" not in entry and "shape" not in entry:
            continue
        if name in seen:
            raise GoldenError(f"{file}: tensor '{name}' is given twice", "keep one of them")
        seen.add(name)
        yield name, _tensor(f"{file}: tensor '{name}'", entry)


def _tensor(where: str, entry: Mapping[str, object]) -> Array:
    datatype, shape = entry.get("datatype"), entry.get("shape")
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise GoldenError(f"{where} has datatype {datatype!r}", f"known datatypes: {', '.join(DATATYPES)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise GoldenError(f"{where} has no valid shape: {shape!r}", "a shape is a list of sizes")
    if "data" not in entry:
        raise GoldenError(f"{where} has no data", 'a tensor is {"name", "shape", "datatype", "data"}')
    data = entry["data"]
    flat = _flat(where, data if isinstance(data, list) else [data], tuple(shape))
    array = _typed(where, flat, DATATYPES[datatype])
    try:
        return array.reshape(shape)
    except (ValueError, OverflowError) as error:  # an empty one may declare any size; numpy has 64 dimensions
        raise GoldenError(f"{where} has a shape that no array can have: {error}") from error


def _flat(where: str, data: list[object], shape: tuple[int, ...]) -> list[object]:
    """Row-major elements of flat or nested data, whose nesting must be the shape's."""
    nested = len(shape) > 1 and any(isinstance(item, list) for item in data)
    if nested and len(data) == shape[0] and all(isinstance(item, list) for item in data):
        return [leaf for item in data for leaf in _flat(where, cast("list[object]", item), shape[1:])]
    count = 1
    for size in shape:
        count *= size
    empty = count == 0 and not any(item != [] for item in data)
    if empty:
        return []
    if nested or len(data) != count or any(isinstance(item, (list, dict)) for item in data):
        raise GoldenError(f"{where} has data that doesn't fill its shape {list(shape)} ({len(data)} elements)")
    return data


def _typed(where: str, flat: list[object], dtype: str) -> Array:
    kind = numpy_dtype(dtype)
    if dtype == "string":
        _check_types(where, flat, (str,), "text")
        array: Array = np.empty(len(flat), dtype=object)
        array[:] = np.array(flat, dtype=object)
        return array
    if dtype == "bool":
        _check_types(where, flat, (bool,), "true or false")
        return np.array(flat, dtype=kind)
    if kind.kind in "iu":
        _check_types(where, flat, (int,), "whole numbers")
        try:
            return np.array(flat, dtype=kind)
        except OverflowError as error:
            raise GoldenError(f"{where} has a value that {dtype} can't hold: {error}") from error
    _check_types(where, flat, (int, float), "numbers")
    try:
        wide = np.array(flat, dtype=np.float64)
    except OverflowError as error:
        raise GoldenError(f"{where} has a value that {dtype} can't hold: {error}") from error
    with np.errstate(over="ignore"):
        narrow = wide.astype(kind)
    if bool(np.any(np.isfinite(wide) & np.isinf(narrow.astype(np.float64)))):
        raise GoldenError(f"{where} has a value that {dtype} can't hold", "give values in the datatype's range")
    return narrow


def _check_types(where: str, flat: list[object], allowed: tuple[type, ...], what: str) -> None:
    for position, item in enumerate(flat):
        if type(item) not in allowed:
            raise GoldenError(f"{where} has {item!r} at element {position}", f"its datatype takes {what}")
