"""One block in a file: a header (magic, pool, key, length, CRC-32 of the payload, CRC-32 of the header) and the payload.

What a block holds follows from its key, so that a read is verified in full.
"""

import hashlib
import struct
import zlib
from mmap import mmap
from typing import NamedTuple

from kvbench.engine import Key

MAGIC = b"kvb1"
_FIELDS = struct.Struct("<4sHqII")
_CHECK = struct.Struct("<I")
HEADER = _FIELDS.size + _CHECK.size


class Record(NamedTuple):
    """Where a block lies: its header at `offset`, then `length` bytes with the checksum `check`."""

    pool: int
    key: Key
    offset: int
    length: int
    check: int


def content(pool: int, key: Key, length: int) -> bytes:
    """What the block holds: `length` bytes that follow from its name."""
    seed = hashlib.blake2b(struct.pack("<Hq", pool, key)).digest()
    return (seed * (length // len(seed) + 1))[:length]


def encode(pool: int, key: Key, payload: bytes) -> bytes:
    fields = _FIELDS.pack(MAGIC, pool, key, len(payload), zlib.crc32(payload))
    return fields + _CHECK.pack(zlib.crc32(fields)) + payload


def decode(data: bytes, pool: int, key: Key) -> bytes | None:
    """The payload of a whole record of that block; None where anything in it is not as it was written."""
    payload = data[HEADER:]
    return payload if data == encode(pool, key, payload) else None


def records(data: mmap) -> tuple[list[Record], int, int]:
    """(the records of a file, where the last whole one ends, stretches that were damaged). Reads headers only: after a damaged
    one the next is sought."""
    found: list[Record] = []
    at = end = damaged = 0
    while at + HEADER <= len(data):
        fields = data[at : at + _FIELDS.size]
        magic, pool, key, length, check = _FIELDS.unpack(fields)
        if magic == MAGIC and _CHECK.unpack_from(data, at + _FIELDS.size)[0] == zlib.crc32(fields):
            if at + HEADER + length > len(data):
                break
            found.append(Record(pool, key, at, length, check))
            at = end = at + HEADER + length
            continue
        following = data.find(MAGIC, at + 1)
        if following < 0:
            break
        damaged += at == end
        at = following
    return found, end, damaged
