"""What every codec promises, and the entropy coder that they share."""

from __future__ import annotations

import struct
import threading
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import MissingExtra, WeightError

Bytes = bytes | bytearray | memoryview
Column = npt.NDArray[np.uint8]

STORED, PACKED = 0, 1
COLUMN_HEADER = struct.Struct("<BII")
"""How a column is coded, its bytes on the wire, its bytes decoded."""
SAMPLE_BYTES = 64 * 1024
WORTH_PACKING = 0.97
"""A column whose sample does not shrink below this share is stored as it is: mantissas are noise."""


class Codec(Protocol):
    """One way of coding chunks. Stateless, so that one object serves all threads."""

    @property
    def name(self) -> str:
        """As manifests say it."""
        ...

    @property
    def needs_base(self) -> bool:
        """Whether a chunk is a difference to the same range of another version."""
        ...

    @property
    def quantizes(self) -> str:
        """The scheme by which a version is quantized before its chunks are coded; empty for none."""
        ...

    def encode(self, new: Bytes, base: Bytes | None, dtype: str) -> bytes:
        """The bytes for the wire of `new`, whole elements of `dtype` (a name of the safetensors format).

        `base` has the same range of the base version, where one is needed.
        """
        ...

    def decode(self, data: Bytes, base: Bytes | None, into: memoryview, dtype: str) -> None:
        """Fills `into` with the chunk's bytes, which have the length that the manifest promises. Where a base is needed
        and `base` is None, `into` holds it already, and is changed in place.

        Raises WeightError for data that is not of this codec; `into` may then hold anything. Never writes or
        allocates beyond what `into` and `data` have the size for.
        """
        ...


_own = threading.local()
"""Of a thread: its decompressor, which is made anew in as long as a small column takes to decompress."""


@cache
def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtra("zstandard", "engine", "compressed model weights") from error
    return zstandard


def _packer() -> Any:
    """Entropy coding and hardly anything else: Zstandard's fast strategy with a match finder too small to find any.

    Columns of weights have skewed bytes and no repetitions, so looking for matches costs most of the time and
    yields nothing, and a match that is found by chance codes worse than its literals.
    """
    zstandard = _zstd()
    return zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(
            compression_level=1,
            strategy=zstandard.STRATEGY_FAST,
            hash_log=6,
            chain_log=6,
            min_match=7,
            window_log=17,
            target_length=0,
            write_content_size=True,
        )
    )


def _unpacker() -> Any:
    try:
        return _own.unpacker
    except AttributeError:
        _own.unpacker = _zstd().ZstdDecompressor()
        return _own.unpacker


def pack(column: Column) -> list[Bytes]:
    """A column of bytes behind its header, entropy-coded where that makes it smaller."""
    raw = np.ascontiguousarray(column).data
    if len(raw) and _is_worth_packing(column):
        packed = _packer().compress(raw)
        if len(packed) < len(raw):
            return [COLUMN_HEADER.pack(PACKED, len(packed), len(raw)), packed]
    return [COLUMN_HEADER.pack(STORED, len(raw), len(raw)), raw]


def _is_worth_packing(column: Column) -> bool:
    if len(column) <= 2 * SAMPLE_BYTES:
        return True
    middle = len(column) // 2
    sample = np.ascontiguousarray(column[middle : middle + SAMPLE_BYTES]).data
    return len(_packer().compress(sample)) < WORTH_PACKING * SAMPLE_BYTES


class Columns:
    """Reads packed columns one after the other, and believes none of their sizes."""

    def __init__(self, data: Bytes, at: int = 0) -> None:
        self._data = memoryview(data).cast("B")
        self._at = at

    def take(self, most: int, exactly: bool = False) -> Column:
        """The next column, of at most (or exactly) `most` bytes. Raises WeightError."""
        header = self._slice(COLUMN_HEADER.size)
        kind, nbytes, raw_nbytes = COLUMN_HEADER.unpack(header)
        if raw_nbytes > most or (exactly and raw_nbytes != most):
            raise WeightError(f"a column of encoded weights has {raw_nbytes} bytes where {most} are possible")
        body = self._slice(nbytes)
        if kind == STORED and nbytes == raw_nbytes:
            return np.frombuffer(body, np.uint8)
        if kind != PACKED:
            raise WeightError(f"a column of encoded weights is of the unknown kind {kind} or of a wrong size")
        zstandard = _zstd()
        try:
            if zstandard.frame_content_size(body) != raw_nbytes:
                raise WeightError("a column of encoded weights announces another size than its content")
            raw = _unpacker().decompress(body, max_output_size=raw_nbytes)
        except zstandard.ZstdError as error:
            raise WeightError(f"a column of encoded weights can't be decompressed: {error}") from error
        if len(raw) != raw_nbytes:
            raise WeightError(f"a column of encoded weights has {len(raw)} bytes, not {raw_nbytes}")
        return np.frombuffer(raw, np.uint8)

    def end(self) -> None:
        """Raises WeightError where bytes are left."""
        if self._at != len(self._data):
            raise WeightError(f"{len(self._data) - self._at} bytes are left behind a chunk of encoded weights")

    def _slice(self, nbytes: int) -> memoryview:
        if self._at + nbytes > len(self._data):
            raise WeightError(
                f"a chunk of encoded weights ends after {len(self._data)} bytes, in the middle of a column"
            )
        found = self._data[self._at : self._at + nbytes]
        self._at += nbytes
        return found
