"""The wire format of Protocol Buffers, as far as it is needed to write messages.

A message is the concatenation of its fields, and a field is its number and the type of its value,
followed by the value: an integer, or bytes with their length before them
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Iterable

_VARINT = 0
_LENGTH_DELIMITED = 2


def varint(number: int) -> bytes:
    """Return an integer that is not negative, seven bits in a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def delimited(data: bytes) -> bytes:
    """Return bytes with their length before them."""
    return varint(len(data)) + data


def integer_field(field: int, number: int) -> bytes:
    """Return a field that holds an integer, a member of an enumeration or a truth value."""
    return varint(field << 3 | _VARINT) + varint(number)


def bytes_field(field: int, data: bytes) -> bytes:
    """Return a field that holds bytes, such as another message."""
    return varint(field << 3 | _LENGTH_DELIMITED) + delimited(data)


def text_field(field: int, text: str) -> bytes:
    """Return a field that holds text."""
    return bytes_field(field, text.encode())


def integers_field(field: int, numbers: Iterable[int]) -> bytes:
    """Return a repeated field that holds integers; it is empty where there are none."""
    packed = b"".join(map(varint, numbers))
    return bytes_field(field, packed) if packed else b""
