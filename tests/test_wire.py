"""The wire reader takes what protobuf writes and refuses everything else with an offset, never with a crash."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packager import wire


def encode(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@given(st.integers(0, 2**64 - 1))
def test_varints_round_trip(value: int):
    data = encode(value)
    assert wire.varint(data, 0, len(data)) == (value, len(data))


@given(st.integers(-(2**63), 2**63 - 1))
def test_signed_is_twos_complement(value: int):
    assert wire.signed(value & 0xFFFFFFFFFFFFFFFF) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_walked_or_refused(data: bytes):
    try:
        for number, _, a, b in wire.fields(data, 0, len(data)):
            assert number > 0 and a >= 0 and b <= len(data)
    except wire.WireError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80", "inside a number"),
        (b"\xff" * 11, "longer than 10 bytes"),
        (b"\x0a\x05ab", "runs past the end"),
        (b"\x0b", "unknown wire type 3"),
        (b"\x02\x00", "field number 0"),
        (b"\x09abc", "8 bytes"),
    ],
)
def test_broken_messages_say_where(data: bytes, words: str):
    with pytest.raises(wire.WireError, match=words):
        list(wire.fields(data, 0, len(data)))


def test_packed_and_single_values_read_alike():
    packed = encode(1) + encode(300)
    assert wire.integers(packed, wire.BYTES, 0, len(packed)) == [1, 300]
    assert wire.integers(b"", wire.VARINT, 300, 0) == [300]


def test_floats_must_be_whole():
    with pytest.raises(wire.WireError):
        wire.floats(b"abc", wire.BYTES, 0, 3)


def test_text_must_be_utf8():
    with pytest.raises(wire.WireError, match="UTF-8"):
        wire.text(b"\xff", 0, 1)
