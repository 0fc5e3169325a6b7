"""Ways to spoil files that were right: their bytes, their JSON, their archives."""

from __future__ import annotations

import copy
import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

ODD_JSON: tuple[object, ...] = (
    None, True, 0, -1, 2**64, 10**400, 1e308, float("inf"), float("nan"), "", "\ud800", "../../up", "/etc/passwd", "\0",
    "n" * 5000, [], {}, [[]], {"name": []}, [0] * 100, "inf",
)  # fmt: skip
DEEP = 100_000
BOMB = 5 << 28
"""Bytes that a bomb unpacks to: more than a command may take."""


@st.composite
def spoilt(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with one to eight flipped, pieces doubled or dropped, or the end cut off."""
    made = bytearray(data)
    for _ in range(draw(st.integers(1, 8))):
        if not made:
            break
        at = draw(st.integers(0, len(made) - 1))
        size = draw(st.sampled_from((1, 1, 4, 64)))
        how = draw(st.sampled_from(("set", "set", "flip", "drop", "double", "cut", "fill")))
        if how == "set":
            made[at] = draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF, 0x2D, 0x39)))
        elif how == "flip":
            made[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "drop":
            del made[at : at + size]
        elif how == "double":
            made[at:at] = made[at : at + size]
        elif how == "fill":
            made[at : at + size] = b"\xff" * len(made[at : at + size])
        elif draw(st.integers(0, 3)) == 0:
            del made[at:]
    return bytes(made)


@st.composite
def spoilt_json(draw: st.DrawFn, data: bytes) -> bytes:
    """The document with one or two values replaced, dropped or doubled; or nested far too deep."""
    document = copy.deepcopy(json.loads(data))
    for _ in range(draw(st.integers(1, 2))):
        places = list(_places(document))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(("replace", "replace", "replace", "drop", "deep")))
        if how == "drop":
            del holder[key]
        elif how == "replace":
            holder[key] = copy.deepcopy(draw(st.sampled_from(ODD_JSON)))
        else:
            holder[key] = "@deep@"
    text = json.dumps(document)
    deep = draw(st.sampled_from(("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "0" + "}" * DEEP, "9" * DEEP)))
    return text.replace('"@deep@"', deep).encode("utf-8", "surrogatepass")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from _places(inner)


def _header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.USTAR_FORMAT if size < 8 << 30 else tarfile.GNU_FORMAT)


def _zeros(size: int, *before: bytes) -> bytes:
    """A gzip stream of some bytes and then ``size`` zeros: members, of which it may have any number, of 16 MiB each."""
    return gzip.compress(b"".join(before), 1, mtime=0) + gzip.compress(bytes(1 << 24), 9, mtime=0) * (size >> 24)


def bomb_in_a_header() -> bytes:
    """A tar archive whose extended header is gigabytes of zeros."""
    return _zeros(BOMB, _header("b/x", BOMB, tarfile.XHDTYPE))


def bomb_in_a_name() -> bytes:
    """A tar archive with a file name of gigabytes."""
    return _zeros(BOMB, _header("b/x", BOMB, tarfile.GNUTYPE_LONGNAME))


def bomb_in_a_file() -> bytes:
    """A tar archive of a few megabytes that unpacks to gigabytes."""
    return _zeros(BOMB, _header("b/bundle.json", BOMB))


def sparse_bomb() -> bytes:
    """A tar archive with a sparse file of a terabyte."""
    info = bytearray(_header("b/bundle.json", 0, tarfile.GNUTYPE_SPARSE))
    info[386 + 12 * 8 + 1 : 386 + 12 * 8 + 13] = b"%011o\0" % (1 << 32)
    info[148:156] = b"        "
    info[148:156] = b"%06o\0 " % sum(info)
    return _zeros(0, bytes(info), bytes(1024))


def zip_bomb() -> bytes:
    """A zip archive that unpacks to gigabytes."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made,
        made.open(zipfile.ZipInfo("b/bundle.json"), "w", force_zip64=True) as member,
    ):
        block = bytes(1 << 20)
        for _ in range(BOMB >> 20):
            member.write(block)
    return packed.getvalue()


BOMBS: dict[str, Callable[[], bytes]] = {
    "header.tar.gz": bomb_in_a_header,
    "name.tar.gz": bomb_in_a_name,
    "file.tar.gz": bomb_in_a_file,
    "sparse.tar.gz": sparse_bomb,
    "deflated.zip": zip_bomb,
}
"""File names to what makes them."""
