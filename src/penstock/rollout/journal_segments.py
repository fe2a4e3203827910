"""One file of the journal: records with their lengths and checksums, after a header. Decides where a file ends.

    header   magic, checksum's kind, the file's number, sequence number of its first record, checksum of all that
    record   length, checksum of the payload keyed by the record's sequence number, payload

A record that is cut short, was never written whole, or belongs elsewhere fails its checksum, and the file ends before
it, whatever follows. A length of 0 is no record, since that is what a file system may leave where nothing arrived.

The checksum is xxh3-64 where `xxhash` is installed and crc32 where not (the rollout room needs the core packages
only); a file says which, so that one is read wherever both are known.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.errors import MissingExtra, StorageError

__all__ = ["CHECKSUMS", "Disk", "SegmentReader", "SegmentWriter"]

_MAGIC = b"penstckJ"
_HEADER = struct.Struct("<8sIIQQ")
_HEADER_SUM = struct.Struct("<Q")
_RECORD = struct.Struct("<IQ")
MAX_RECORD_BYTES = (1 << 32) - 1
BUFFER_BYTES = 1 << 20


def _crc32(data: bytes, key: int) -> int:
    return zlib.crc32(data, key & 0xFFFFFFFF)


def _xxh3() -> Callable[[bytes, int], int] | None:
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        return None
    return xxh3_64_intdigest


_CRC32_KIND, _XXH3_KIND = 1, 2
CHECKSUMS: dict[int, Callable[[bytes, int], int]] = {_CRC32_KIND: _crc32}
"""Kinds that can be written and read here; the last one is what is written."""
if (_found := _xxh3()) is not None:
    CHECKSUMS[_XXH3_KIND] = _found


class Disk:
    """The calls that a failing disk fails; tests put another in its place."""

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)


class SegmentWriter:
    """Appends to a file that it makes. All methods raise OSError."""

    def __init__(self, path: Path, number: int, first_sequence: int, disk: Disk) -> None:
        self.path = path
        self.sequence = first_sequence
        """Of the next record."""
        self.nbytes = 0
        self._disk = disk
        self._kind = max(CHECKSUMS)
        self._sum = CHECKSUMS[self._kind]
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        header = _HEADER.pack(_MAGIC, self._kind, number, first_sequence, 0)
        try:
            self._write(header + _HEADER_SUM.pack(_crc32(header, 0)))
        except OSError:
            self.close()
            raise

    def append(self, payloads: Iterable[bytes]) -> None:
        """Hands records to the operating system in one call: from then on they outlive this process."""
        parts: list[bytes] = []
        for payload in payloads:
            parts.append(_RECORD.pack(len(payload), self._sum(payload, self.sequence)))
            parts.append(payload)
            self.sequence += 1
        self._write(b"".join(parts))

    def sync(self) -> None:
        """Waits until the disk has what was appended."""
        self._disk.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = self._disk.write(self._descriptor, view)
            self.nbytes += written
            view = view[written:]


class SegmentReader:
    """Iterates over the payloads of a file, as far as they are whole. `end` is where the last whole one ends.

    Raises StorageError for a file without a sound header, MissingExtra where its checksum is not known here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = path.stat().st_size
        self.end = 0
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            given = file.read(_HEADER_SUM.size)
        if given != _HEADER_SUM.pack(_crc32(header, 0)) or len(header) < _HEADER.size:
            raise StorageError(f"{path} has no sound header")
        magic, kind, self.number, self.first_sequence, _ = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise StorageError(f"{path} is no file of a journal")
        if kind not in CHECKSUMS:
            raise MissingExtra("xxhash", "engine", f"reading the journal {path}")
        self._sum = CHECKSUMS[kind]
        self.end = _HEADER.size + _HEADER_SUM.size
        self.sequence = self.first_sequence
        """Of the next record."""

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb", buffering=BUFFER_BYTES) as file:
            file.seek(self.end)
            while (payload := self._next(file)) is not None:
                yield payload
                # Only now: whoever reads may have found that it does not fit, and then the file ends before it.
                self.end += _RECORD.size + len(payload)
                self.sequence += 1

    def _next(self, file: BinaryIO) -> bytes | None:
        head = file.read(_RECORD.size)
        if len(head) < _RECORD.size:
            return None
        length, checksum = _RECORD.unpack(head)
        if not 0 < length <= self.nbytes - self.end - _RECORD.size:
            return None
        payload = file.read(length)
        if len(payload) < length or self._sum(payload, self.sequence) != checksum:
            return None
        return payload
