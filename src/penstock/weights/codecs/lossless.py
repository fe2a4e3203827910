"""Full weights, made smaller without loss: the bits of each float are sorted into planes, each coded on its own.

The exponents of a trained model's weights take few values (about 2.6 bits of entropy in bfloat16); signs and
mantissas are noise. So the exponents become one plane of bytes, entropy-coded, and the rest is stored as it is, as
ZipNN (arXiv 2411.05239) and DFloat11 (arXiv 2504.11651) found. Exact for every bit pattern.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.weights.codecs.base import Bytes, Column, Columns, pack

__all__ = ["LosslessCodec"]

BLOCK = 64 * 1024
"""Elements sorted at once: they and their planes stay in a core's cache."""
WIDTHS = {"F16": 2, "I16": 2, "U16": 2, "F64": 8, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
"""Of dtypes whose planes are simply their bytes. Those of one byte are one plane."""


class LosslessCodec:
    name = "lossless"
    needs_base = False
    quantizes = ""

    def encode(self, new: Bytes, base: Bytes | None, dtype: str) -> bytes:
        return b"".join(piece for plane in split_planes(new, dtype) for piece in pack(plane))

    def decode(self, data: Bytes, base: Bytes | None, into: memoryview, dtype: str) -> None:
        columns = Columns(data)
        elements = len(into) // _width(dtype)
        planes = [columns.take(elements * width, exactly=True) for width in _plane_widths(dtype)]
        columns.end()
        join_planes(planes, into, dtype)


def split_planes(data: Bytes, dtype: str) -> list[Column]:
    """The planes of `data`, most skewed first."""
    if dtype == "BF16":
        return _split_bf16(np.frombuffer(data, np.uint16))
    if dtype == "F32":
        return _split_f32(np.frombuffer(data, np.uint32))
    width = _width(dtype)
    bytes_NW = np.frombuffer(data, np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(bytes_NW[:, place]) for place in reversed(range(width))]


def join_planes(planes: Sequence[Column], into: memoryview, dtype: str) -> None:
    """The inverse of `split_planes`."""
    if dtype == "BF16":
        _join_bf16(planes, np.frombuffer(into, np.uint16))
    elif dtype == "F32":
        _join_f32(planes, np.frombuffer(into, np.uint32))
    else:
        width = _width(dtype)
        bytes_NW = np.frombuffer(into, np.uint8).reshape(-1, width)
        for place, plane in zip(reversed(range(width)), planes, strict=True):
            bytes_NW[:, place] = plane


def _width(dtype: str) -> int:
    if dtype in ("BF16", "F32"):
        return 2 if dtype == "BF16" else 4
    return WIDTHS.get(dtype, 1)


def _plane_widths(dtype: str) -> list[int]:
    """Bytes an element in each plane."""
    return [1, 3] if dtype == "F32" else [1] * _width(dtype)


# bfloat16: sign 1, exponent 8, mantissa 7. Planes: the exponent; the sign above the mantissa.


def _split_bf16(values: npt.NDArray[np.uint16]) -> list[Column]:
    exponents, rest = np.empty(len(values), np.uint8), np.empty(len(values), np.uint8)
    one, other = np.empty(BLOCK, np.uint16), np.empty(BLOCK, np.uint16)
    for at in range(0, len(values), BLOCK):
        block = values[at : at + BLOCK]
        a, b = one[: len(block)], other[: len(block)]
        np.right_shift(block, 7, out=a)
        np.copyto(exponents[at : at + BLOCK], a, casting="unsafe")
        np.right_shift(block, 8, out=a)
        np.bitwise_and(a, 0x80, out=a)
        np.bitwise_and(block, 0x7F, out=b)
        np.bitwise_or(a, b, out=a)
        np.copyto(rest[at : at + BLOCK], a, casting="unsafe")
    return [exponents, rest]


def _join_bf16(planes: Sequence[Column], values: npt.NDArray[np.uint16]) -> None:
    exponents, rest = planes
    one, other = np.empty(BLOCK, np.uint16), np.empty(BLOCK, np.uint16)
    for at in range(0, len(values), BLOCK):
        block = values[at : at + BLOCK]
        a, b = one[: len(block)], other[: len(block)]
        np.copyto(block, exponents[at : at + BLOCK])
        np.left_shift(block, 7, out=block)
        np.copyto(a, rest[at : at + BLOCK])
        np.bitwise_and(a, 0x7F, out=b)
        np.bitwise_or(block, b, out=block)
        np.bitwise_and(a, 0x80, out=a)
        np.left_shift(a, 8, out=a)
        np.bitwise_or(block, a, out=block)


# float32: sign 1, exponent 8, mantissa 23. Planes: the exponent; sign and mantissa as three bytes.


def _split_f32(values: npt.NDArray[np.uint32]) -> list[Column]:
    exponents, rest = np.empty(len(values), np.uint8), np.empty((len(values), 3), np.uint8)
    for at in range(0, len(values), BLOCK):
        block = values[at : at + BLOCK]
        exponents[at : at + BLOCK] = (block >> 23).astype(np.uint8)
        low = (block & 0x7FFFFF) | ((block >> 8) & 0x800000)
        rest[at : at + BLOCK] = low.view(np.uint8).reshape(-1, 4)[:, :3]
    return [exponents, rest.reshape(-1)]


def _join_f32(planes: Sequence[Column], values: npt.NDArray[np.uint32]) -> None:
    exponents, rest_N3 = planes[0], planes[1].reshape(-1, 3)
    four = np.zeros((BLOCK, 4), np.uint8)
    for at in range(0, len(values), BLOCK):
        block = values[at : at + BLOCK]
        part = four[: len(block)]
        part[:, :3] = rest_N3[at : at + BLOCK]
        low = part.view(np.uint32).reshape(-1)
        block[:] = (low & 0x7FFFFF) | ((low & 0x800000) << 8) | (exponents[at : at + BLOCK].astype(np.uint32) << 23)
