"""The Open Inference Protocol's tensors: JSON, and the binary extension, to numpy arrays and back.

What a request may get wrong raises :class:`Malformed` with a sentence for the sender; nothing here trusts a length, a
type or a number that came from outside. Source: KServe's *Open Inference Protocol* (``/v2`` REST and gRPC) and
Triton's *Binary Tensor Data Extension*, whose request has a JSON header of ``Inference-Header-Content-Length`` bytes
with the tensors' bytes (little-endian, C order) after it.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

HEADER = "Inference-Header-Content-Length"
DATATYPES = {
    "float32": "FP32", "float64": "FP64", "float16": "FP16", "int8": "INT8", "int16": "INT16", "int32": "INT32",
    "int64": "INT64", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "bool": "BOOL",
    "string": "BYTES",
}  # fmt: skip
"""dtype names of ``bundle.json`` to those of the protocol."""
DTYPES = {theirs: ours for ours, theirs in DATATYPES.items()}
MOST_DIMS = 32
"""Dims a tensor may have here; numpy stops at 64."""


class Malformed(ValueError):
    """A request that can't be understood; the message is for its sender."""


@dataclass(frozen=True)
class Request:
    """One inference request: arrays by input name, and what is wanted back.

    ``outputs`` is empty where all are wanted. ``binary`` has the outputs that are wanted as bytes.
    """

    id: str
    inputs: Mapping[str, Array]
    outputs: tuple[str, ...] = ()
    binary: frozenset[str] = frozenset()


def read_request(body: bytes, header_length: str | None, names: Sequence[str]) -> Request:
    """Understand the body of an ``infer`` request.

    Args:
        body: all of it.
        header_length: value of the header ``Inference-Header-Content-Length``, where it was sent.
        names: the model's outputs.

    Raises:
        Malformed: it isn't a request.
    """
    length = _header_length(header_length, len(body))
    document = _object(_parsed(body[:length]), "the request")
    rest = memoryview(body)[length:]
    inputs: dict[str, Array] = {}
    offset = 0
    for entry in _list(document.get("inputs"), "inputs"):
        name = _text(_object(entry, "an input").get("name"), "the name of an input")
        if name in inputs:
            raise Malformed(f"input {name!a} is given twice")
        datatype = _text(entry.get("datatype"), f"the datatype of input {name!a}")
        shape = read_shape(entry.get("shape"), name)
        size = _object(entry.get("parameters", {}), f"the parameters of input {name!a}").get("binary_data_size")
        if size is None:
            inputs[name] = from_values(name, datatype, shape, entry.get("data"))
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(rest) - offset:
            raise Malformed(f"input {name!a} has a binary_data_size of {size!a}, {len(rest) - offset} bytes are left")
        if "data" in entry:
            raise Malformed(f"input {name!a} has both data and binary data")
        inputs[name] = from_bytes(name, datatype, shape, rest[offset : offset + size])
        offset += size
    if offset != len(rest):
        raise Malformed(f"{len(rest) - offset} bytes of binary data belong to no input")
    return _wanted(document, inputs, names)


def _wanted(document: Mapping[str, Any], inputs: Mapping[str, Array], names: Sequence[str]) -> Request:
    whole = _object(document.get("parameters", {}), "the parameters").get("binary_data_output", False)
    if not isinstance(whole, bool):
        raise Malformed("binary_data_output is true or false")
    outputs: dict[str, bool] = {}
    for entry in _list(document.get("outputs", []), "outputs"):
        name = _text(_object(entry, "an output").get("name"), "the name of an output")
        parameters = _object(entry.get("parameters", {}), f"the parameters of output {name!a}")
        binary = parameters.get("binary_data", whole)
        if not isinstance(binary, bool):
            raise Malformed(f"binary_data of output {name!a} is true or false")
        outputs[name] = binary
    check_outputs(outputs, names)
    asked = outputs or dict.fromkeys(names, whole)
    identity = _text(document.get("id", ""), "the id")
    return Request(identity, inputs, tuple(outputs), frozenset(name for name, binary in asked.items() if binary))


def check_outputs(wanted: Sequence[str] | Mapping[str, object], names: Sequence[str]) -> None:
    """Refuse outputs that the model hasn't.

    Raises:
        Malformed: with those it has.
    """
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise Malformed(f"the model has no output {', '.join(map(ascii, unknown))}; its outputs are {list(names)!a}")


def write_response(
    model: tuple[str, str], request: Request, outputs: Mapping[str, Array]
) -> tuple[list[bytes], int | None]:
    """An answer's body in parts, and the length of its JSON header where bytes follow it.

    Floats that JSON has no numbers for are written as ``NaN``, ``Infinity`` and ``-Infinity``, as Triton does.
    """
    entries: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for name in request.outputs or outputs:
        array = outputs[name]
        entry: dict[str, Any] = {"name": name, "datatype": datatype_of(array), "shape": list(array.shape)}
        if name in request.binary:
            parts.append(to_bytes(array))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = array.ravel().tolist()
        entries.append(entry)
    document = {"model_name": model[0], "model_version": model[1], "outputs": entries}
    head = json.dumps({**document, "id": request.id} if request.id else document).encode()
    return [head, *parts], len(head) if parts else None


def read_shape(value: object, name: str) -> tuple[int, ...]:
    """A shape that makes sense.

    Raises:
        Malformed: it isn't a list of sizes.
    """
    sizes = list(value) if isinstance(value, (list, tuple)) else None
    if sizes is None or any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise Malformed(f"the shape of input {name!a} is a list of sizes, none below 0")
    if len(sizes) > MOST_DIMS or max(sizes, default=0) > 1 << 40:
        raise Malformed(f"the shape of input {name!a} is beyond what can be served")
    return tuple(sizes)


KINDS: dict[str, set[type]] = {
    "BOOL": {bool},
    "BYTES": {str},
    **{name: {int, float} for name in ("FP16", "FP32", "FP64")},
}
"""Types that JSON gives for a datatype; int for all others."""


def from_values(name: str, datatype: str, shape: tuple[int, ...], data: object) -> Array:
    """An array from the values of a JSON list, flat in C order or nested as the shape says.

    Raises:
        Malformed: types, number or nesting aren't those of datatype and shape, or a number is beyond the datatype.
    """
    if datatype not in DTYPES:
        raise Malformed(f"input {name!a} has datatype {datatype!a}; known are {', '.join(DTYPES)}")
    values = _flat(name, shape, data)
    kinds = set(map(type, values))
    if not kinds <= KINDS.get(datatype, {int}):
        wrong = ", ".join(sorted(kind.__name__ for kind in kinds - KINDS.get(datatype, {int})))
        raise Malformed(f"input {name!a} is {datatype}, but its data has {wrong}")
    try:
        if datatype == "BYTES":
            for value in values:
                value.encode("utf-8")
            return np.array(values, object).reshape(shape)
        if datatype in KINDS and datatype != "BOOL":
            return _floats(name, DTYPES[datatype], values).reshape(shape)
        return np.array(values, DTYPES[datatype]).reshape(shape)
    except UnicodeEncodeError as error:
        raise Malformed(f"input {name!a} has a text with half a surrogate pair") from error
    except (OverflowError, ValueError) as error:
        raise Malformed(
            f"input {name!a} has numbers beyond {datatype}, or a shape beyond what can be served"
        ) from error


def _floats(name: str, dtype: str, values: list[Any]) -> Array:
    wide = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        made = wide.astype(dtype)
    if bool(np.any(np.isinf(made) & np.isfinite(wide))):
        raise Malformed(f"input {name!a} has numbers beyond {DATATYPES[dtype]}")
    return made


def _flat(name: str, shape: tuple[int, ...], data: object) -> list[Any]:
    if not isinstance(data, list):
        raise Malformed(f"input {name!a} has no data: a list of values is wanted")
    if len(shape) < 2 or not any(isinstance(each, list) for each in data):
        if len(data) != math.prod(shape):
            raise Malformed(f"input {name!a} has {len(data)} values, its shape {list(shape)} holds {math.prod(shape)}")
        return data
    level: list[Any] = [data]
    for size in shape:
        if any(not isinstance(each, list) or len(each) != size for each in level):
            raise Malformed(f"the lists of input {name!a} aren't nested as its shape {list(shape)} says")
        level = [value for each in level for value in each]
    return level


def from_bytes(name: str, datatype: str, shape: tuple[int, ...], raw: memoryview | bytes) -> Array:
    """An array from its bytes: little-endian in C order; texts each after their length in 4 bytes.

    Raises:
        Malformed: the number of bytes isn't that of datatype and shape, or they hold no bool or no UTF-8.
    """
    if datatype not in DTYPES:
        raise Malformed(f"input {name!a} has datatype {datatype!a}; known are {', '.join(DTYPES)}")
    count = math.prod(shape)
    if datatype == "BYTES":
        return _texts(name, count, bytes(raw)).reshape(shape)
    dtype = np.dtype(DTYPES[datatype]).newbyteorder("<")
    if len(raw) != count * dtype.itemsize:
        wanted = f"{datatype}{list(shape)} has {count * dtype.itemsize}"
        raise Malformed(f"input {name!a} comes with {len(raw)} bytes, {wanted}")
    if datatype == "BOOL" and count and np.frombuffer(raw, np.uint8).max() > 1:
        raise Malformed(f"input {name!a} is BOOL and has bytes other than 0 and 1")
    try:
        return np.require(np.frombuffer(raw, dtype), dtype.newbyteorder("="), "A").reshape(shape)
    except ValueError as error:  # sizes that multiply to 0 and that numpy can't hold
        raise Malformed(f"the shape of input {name!a} is beyond what can be served") from error


def _texts(name: str, count: int, raw: bytes) -> Array:
    found, offset = [], 0
    while offset < len(raw):
        if len(raw) - offset < 4:
            raise Malformed(f"input {name!a}: the bytes end inside the length of a text")
        (size,) = struct.unpack_from("<I", raw, offset)
        offset += 4
        if size > len(raw) - offset:
            raise Malformed(f"input {name!a}: a text of {size} bytes, {len(raw) - offset} are left")
        found.append(text_of(name, raw[offset : offset + size]))
        offset += size
    if len(found) != count:
        raise Malformed(f"input {name!a} has {len(found)} texts, its shape holds {count}")
    return np.array(found, object)


def text_of(name: str, raw: bytes) -> str:
    """A text of a BYTES tensor, which here is UTF-8.

    Raises:
        Malformed: it isn't.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"input {name!a} has bytes that are no UTF-8; the model takes texts") from error


def to_bytes(array: Array) -> bytes:
    """The bytes of :func:`from_bytes`."""
    if array.dtype == object:
        texts = [str(each).encode("utf-8", "surrogatepass") for each in array.ravel()]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def datatype_of(array: Array) -> str:
    """The protocol's name of an array's dtype."""
    return _datatype(array.dtype)


@functools.cache
def _datatype(dtype: np.dtype[Any]) -> str:
    return "BYTES" if dtype.hasobject else DATATYPES[dtype.name]  # numpy makes the name anew each time


def padded(head: bytes) -> bytes:
    """A JSON header with spaces after it, so that the bytes that follow are aligned and needn't be copied."""
    return head + b" " * (-len(head) % 16)


def _header_length(value: str | None, size: int) -> int:
    if value is None:
        return size
    if not value.isascii() or not value.isdigit() or len(value) > 18 or int(value) > size:
        raise Malformed(f"{HEADER} is {value!a}, and the body has {size} bytes")
    return int(value)


def _parsed(text: bytes) -> object:
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the request isn't JSON: {type(error).__name__}: {str(error)[:200]}") from error


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"{what} is no JSON object")
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed(f"the request has no list of {what}")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{what} is a text")
    return value
