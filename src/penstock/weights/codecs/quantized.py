"""How chunks of quantized weights travel: entropy-coded, or as the difference to the base version's own codes.

What a chunk has here is the quantized result already: codes, scales, and tensors that stay as they are. So these codecs
are as exact as those that they are made of, and what a receiver verifies is what it serves. The rounding is in
`quantize`, which tensors it is done to in `penstock.weights.quantization`.
"""

from __future__ import annotations

from penstock.weights.codecs.base import Bytes, Codec

__all__ = ["QuantizedCodec"]


class QuantizedCodec:
    """`chunks` codes what `scheme` left of the weights."""

    def __init__(self, name: str, scheme: str, chunks: Codec) -> None:
        self.name = name
        self.quantizes = scheme
        self.needs_base = chunks.needs_base
        self._chunks = chunks

    def encode(self, new: Bytes, base: Bytes | None, dtype: str) -> bytes:
        return self._chunks.encode(new, base, dtype)

    def decode(self, data: Bytes, base: Bytes | None, into: memoryview, dtype: str) -> None:
        self._chunks.decode(data, base, into, dtype)
