"""Protocol-buffer wire format, read in place.

An ONNX file is one protobuf message whose bulk is weights. The official parser copies all of it; the model reader
(:mod:`packager.graph`) needs only the structure, so it walks the file through a memory map with these few functions
and steps over tensor payloads without touching their pages.

Source: protobuf encoding reference, "Message Structure" (wire types 0, 1, 2 and 5; groups are obsolete).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from mmap import mmap

Buffer = bytes | mmap

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """The bytes are not a protobuf message; the text says at which offset reading stopped."""


def varint(data: Buffer, position: int, end: int) -> tuple[int, int]:
    """Read one base-128 varint at ``position``; returns (unsigned value, next position).

    Raises:
        WireError: the bytes end inside it, or it is longer than 10 bytes.
    """
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
        if shift > 63:
            raise WireError(f"a number at offset {position} is longer than 10 bytes")
    raise WireError(f"the bytes end at offset {end}, inside a number")


def fields(data: Buffer, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Walk the fields of the message in ``data[start:end]``.

    Yields (field number, wire type, a, b): for a varint, ``a`` is its unsigned value; for the others, the payload is
    ``data[a:b]``, not read.

    Raises:
        WireError: the bytes are cut or are not a message.
    """
    position = start
    while position < end:
        key, position = varint(data, position, end)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise WireError(f"field number 0 before offset {position}")
        if kind == VARINT:
            value, position = varint(data, position, end)
            yield number, kind, value, position
            continue
        if kind == BYTES:
            size, position = varint(data, position, end)
        elif kind == FIXED64:
            size = 8
        elif kind == FIXED32:
            size = 4
        else:
            raise WireError(f"unknown wire type {kind} before offset {position}")
        if size > end - position:
            raise WireError(f"a field of {size} bytes at offset {position} runs past the end at {end}")
        yield number, kind, position, position + size
        position += size


def signed(value: int) -> int:
    """The int64 that an unsigned 64-bit varint stands for (two's complement)."""
    return value - (1 << 64) if value >= 1 << 63 else value


def text(data: Buffer, start: int, end: int) -> str:
    """The UTF-8 string in ``data[start:end]``.

    Raises:
        WireError: it is not UTF-8.
    """
    try:
        return bytes(data[start:end]).decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"a text at offset {start} is not UTF-8") from error


def integers(data: Buffer, kind: int, a: int, b: int) -> list[int]:
    """Values of a repeated int64 field occurrence, packed or not."""
    if kind == VARINT:
        return [signed(a)]
    values = []
    position = a
    while position < b:
        value, position = varint(data, position, b)
        values.append(signed(value))
    return values


def floats(data: Buffer, kind: int, a: int, b: int) -> list[float]:
    """Values of a repeated float field occurrence, packed or not.

    Raises:
        WireError: the payload is not a whole number of floats.
    """
    if kind not in (FIXED32, BYTES) or (b - a) % 4:
        raise WireError(f"float values at offset {a} are malformed")
    return list(struct.unpack(f"<{(b - a) // 4}f", data[a:b]))
