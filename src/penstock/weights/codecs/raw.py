"""Bytes as they are: where the link is faster than any codec."""

from __future__ import annotations

from penstock.errors import WeightError
from penstock.weights.codecs.base import Bytes

__all__ = ["RawCodec"]


class RawCodec:
    name = "raw"
    needs_base = False
    quantizes = ""

    def encode(self, new: Bytes, base: Bytes | None, dtype: str) -> bytes:
        return bytes(new)

    def decode(self, data: Bytes, base: Bytes | None, into: memoryview, dtype: str) -> None:
        if len(data) != len(into):
            raise WeightError(f"a raw chunk has {len(data)} bytes, and {len(into)} were promised")
        into[:] = memoryview(data).cast("B")
