"""Records of a journal file: JSON and raw bytes behind a prefix with lengths and checksums. Knows nothing of what they mean.

::

    prefix: magic "RLJ1", JSON bytes, payload bytes, CRC32 of JSON and payload, CRC32 of the prefix so far    (24 bytes, little-endian)
    JSON, UTF-8
    payload: arrays one after another, little-endian, as many and as long as the JSON says

A file that ends within a record was cut by a kill in the middle of a write: its last record never was. Wrong bytes before the end are
damage, and nothing behind them is used.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

MAGIC = b"RLJ1"
_LENGTHS = struct.Struct("<4sIQI")
_CHECK = struct.Struct("<I")
PREFIX_BYTES = _LENGTHS.size + _CHECK.size

Array = npt.NDArray[Any]


class DamagedError(ValueError):
    """Raised when a record is not what was written; caught by the reader of the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One record."""

    content: Mapping[str, Any]
    payload: bytes = b""

    @property
    def kind(self) -> str:
        """Which record it is."""
        return str(self.content.get("kind"))


def encode(content: Mapping[str, Any], arrays: Sequence[Array] = ()) -> list[bytes]:
    """The pieces of a record, to be written one after another.

    Args:
        content: JSON-able.
        arrays: of numbers; copied.
    """
    text = json.dumps(content, separators=(",", ":")).encode()
    payload = b"".join(np.ascontiguousarray(a, dtype=a.dtype.newbyteorder("<")).data.cast("B") for a in arrays if a.size)
    lengths = _LENGTHS.pack(MAGIC, len(text), len(payload), zlib.crc32(payload, zlib.crc32(text)))
    return [lengths + _CHECK.pack(zlib.crc32(lengths)) + text, payload]


def read(file: BinaryIO) -> Iterator[Frame]:
    """The records of a file up to its last whole one.

    Raises:
        DamagedError: bytes before the end are wrong; what was yielded before is right.
        OSError: the disk does not answer.
    """
    while True:
        place = file.tell()
        prefix = file.read(PREFIX_BYTES)
        if len(prefix) < PREFIX_BYTES:
            return
        magic, text_bytes, payload_bytes, checksum = _LENGTHS.unpack(prefix[: _LENGTHS.size])
        if magic != MAGIC or _CHECK.unpack(prefix[_LENGTHS.size :])[0] != zlib.crc32(prefix[: _LENGTHS.size]):
            raise DamagedError(f"byte {place}: no record begins here")
        text, payload = file.read(text_bytes), file.read(payload_bytes)
        if len(text) < text_bytes or len(payload) < payload_bytes:
            return
        if checksum != zlib.crc32(payload, zlib.crc32(text)):
            raise DamagedError(f"byte {place}: the record's checksum is wrong")
        yield Frame(content=json.loads(text), payload=payload)


def read_file(path: Path) -> Iterator[Frame]:
    """:func:`read` of a file by its path."""
    with path.open("rb") as file:
        yield from read(file)


class Arrays:
    """Takes a payload's arrays one after another, without copying; what is taken can only be read."""

    def __init__(self, payload: bytes) -> None:
        """Start at its beginning."""
        self._payload = payload
        self._offset = 0

    def take(self, dtype: type[np.generic], count: int) -> Array:
        """The next ``count`` numbers.

        Raises:
            DamagedError: fewer are left.
        """
        wanted = np.dtype(dtype).newbyteorder("<")
        end = self._offset + count * wanted.itemsize
        if count < 0 or end > len(self._payload):
            raise DamagedError(f"{count} numbers are declared, {len(self._payload) - self._offset} bytes are left")
        found = np.frombuffer(self._payload, dtype=wanted, count=count, offset=self._offset)
        self._offset = end
        return found

    def done(self) -> None:
        """All was taken.

        Raises:
            DamagedError: some was not.
        """
        if self._offset != len(self._payload):
            raise DamagedError(f"{len(self._payload) - self._offset} bytes are left over")
