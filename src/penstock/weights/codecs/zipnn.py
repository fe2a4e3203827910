"""Full weights without loss by the zipnn package (arXiv 2411.05239), where somebody has installed it.

Its entropy coder is faster than the one of `lossless`, for the same ratio. It is chosen by name alone, for two reasons:
it keeps the interpreter's lock while it works, and on bytes that are not of its making it does not raise but corrupts
memory. The second is why nothing reaches `decode` here that did not verify against the trainer's signed manifest, as
for every codec. It has no wheels, so no extra of this project brings it: `pip install zipnn` builds it.

A chunk is a byte that says by which it is coded, and then its bytes: dtypes that zipnn does not know are coded as
`lossless` codes them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from penstock.errors import WeightError
from penstock.weights.codecs.base import Bytes
from penstock.weights.codecs.lossless import LosslessCodec

__all__ = ["ZipnnCodec", "has_zipnn"]

PLANES, ZIPNN = 0, 1
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_lossless = LosslessCodec()


def has_zipnn() -> bool:
    """Whether the package is installed here."""
    return find_spec("zipnn") is not None


class ZipnnCodec:
    name = "zipnn"
    needs_base = False
    quantizes = ""

    def encode(self, new: Bytes, base: Bytes | None, dtype: str) -> bytes:
        if dtype not in DTYPES or not len(new):
            return bytes([PLANES]) + _lossless.encode(new, None, dtype)
        return bytes([ZIPNN]) + bytes(_coder(dtype).compress(bytearray(new)))

    def decode(self, data: Bytes, base: Bytes | None, into: memoryview, dtype: str) -> None:
        view = memoryview(data).cast("B")
        kind = view[0] if len(view) else None
        if kind == PLANES:
            _lossless.decode(view[1:], None, into, dtype)
            return
        if kind != ZIPNN or dtype not in DTYPES:
            raise WeightError(f"a chunk of {dtype} weights coded by zipnn is of the unknown kind {kind}")
        raw = _coder(dtype).decompress(bytes(view[1:]))
        if len(raw) != len(into):
            raise WeightError(f"a chunk coded by zipnn has {len(raw)} bytes, and {len(into)} were promised")
        into[:] = raw


@cache
def _package() -> Any:
    try:
        return import_module("zipnn")
    except ImportError as error:
        raise WeightError("weights coded by zipnn need the package; pip install zipnn") from error


def _coder(dtype: str) -> Any:
    """One for each call, since it keeps state; on one thread, as chunks are spread over threads already."""
    return _package().ZipNN(method="HUFFMAN", bytearray_dtype=DTYPES[dtype], threads=1)
