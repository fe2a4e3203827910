"""Numbers of eight bits for a matrix's rows: int8 and fp8 (e4m3), one float32 scale for each output channel.

Decides how a row is rounded and what becomes of values that eight bits have no room for. Knows nothing of versions,
chunks or wires. Symmetric, the scale the row's largest magnitude over the largest code, rounded up, so that no finite
value is ever clipped; rounded down at the top of float32, where the largest code would stand for an infinity. The
bounds hold there too: the row's largest magnitude is off by less than scale * 2**-14.

With x a weight, x' = code * scale in exact arithmetic:

- int8: |x - x'| <= scale / 2. Codes -127 to 127.
- fp8: |x - x'| <= |x| / 16 where |x| >= scale * 2**-6, and <= scale * (2**-10 + 2**-30) below. Source: "FP8 Formats
  for Deep Learning" (arXiv 2209.05433), e4m3 without infinities, largest value 448; to nearest, ties to even.

A row of zeros has the scale 1 and codes 0. A row with a NaN or an infinity has the scale NaN and codes 0: all of it
decodes to NaN, since eight bits can't say which part was sound, and a broken model must not come out as a whole one.
-0.0 stays -0.0 in fp8 and becomes 0.0 in int8, which has no such number.

Multiplied in float32 (`dequantize_rows`), code * scale is off by |x'| * 2**-24 or 2**-150 more, whichever is larger.
Where it is then held in the model's own dtype (`as_dtype`), it is off by its rounding too: |x'| * 2**-8 or 2**-134 in
bfloat16, |x'| * 2**-11 or 2**-25 in float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from penstock.errors import WeightError

__all__ = ["QUANTIZABLE", "SCHEMES", "as_dtype", "as_float32", "dequantize_rows", "dequantized", "quantize_rows"]

SCHEMES = {"int8": "I8", "fp8": "F8_E4M3"}
"""Quantizations, and the dtype of their codes as safetensors names it."""
QUANTIZABLE = ("BF16", "F16", "F32")
LARGEST = {"int8": 127.0, "fp8": 448.0}
BLOCK_ELEMENTS = 32 * 1024
"""Rounded at once: what is made on the way stays in a core's cache."""

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


def quantize_rows(data: memoryview, dtype: str, columns: int, scheme: str, codes: Codes, scales: Floats) -> None:
    """Fills `codes` [rows * columns] and `scales` [rows] from rows of `columns` elements of `dtype`.

    Raises WeightError for a dtype that is no float of `QUANTIZABLE`.
    """
    raw = _integers(data, dtype).reshape(-1, columns)
    into = codes.reshape(-1, columns)
    rows = max(1, BLOCK_ELEMENTS // columns)
    for at in range(0, len(raw), rows):
        part = slice(at, at + rows)
        values = _widened(raw[part], dtype)
        scales[part] = _scales(values, LARGEST[scheme])
        with np.errstate(invalid="ignore"):
            if scheme == "int8":
                into[part] = _int8(values, scales[part])
            else:
                into[part] = _fp8(values, scales[part])


def dequantize_rows(codes: memoryview, scales: Floats, columns: int, scheme: str) -> Floats:
    """code * scale as float32 [rows, columns]."""
    if scheme == "int8":
        return np.frombuffer(codes, np.int8).reshape(-1, columns) * scales[:, None]
    return _fp8_values()[np.frombuffer(codes, np.uint8).reshape(-1, columns)] * scales[:, None]


def dequantized(codes: memoryview, scales: Floats, columns: int, scheme: str, dtype: str) -> Iterator[memoryview]:
    """The bytes of code * scale as floats of `dtype`, some rows at a time. Raises WeightError as `quantize_rows`."""
    rows = max(1, BLOCK_ELEMENTS // max(1, columns))
    for at in range(0, len(scales), rows):
        part = codes[at * columns : (at + rows) * columns]
        yield as_dtype(dequantize_rows(part, scales[at : at + rows], columns, scheme), dtype)


def as_dtype(values: Floats, dtype: str) -> memoryview:
    """The bytes of `values` as floats of `dtype`, each rounded to nearest, ties to even."""
    _check(dtype)
    if dtype == "F32":
        return np.ascontiguousarray(values).data.cast("B")
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values.astype(np.float16)).data.cast("B")
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + ((bits >> np.uint32(16) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    broken = np.isnan(values)
    if broken.any():
        rounded[broken] = 0x7FC0
    return rounded.data.cast("B")


def as_float32(data: memoryview, dtype: str) -> Floats:
    """The values of floats of any of `QUANTIZABLE`, which float32 holds exactly."""
    return _widened(_integers(data, dtype), dtype)


def _check(dtype: str) -> None:
    if dtype not in QUANTIZABLE:
        raise WeightError(f"weights of dtype {dtype} can't be quantized; expected one of {', '.join(QUANTIZABLE)}")


def _integers(data: memoryview, dtype: str) -> npt.NDArray[np.unsignedinteger]:
    _check(dtype)
    return np.frombuffer(data, np.uint32 if dtype == "F32" else np.uint16)


def _widened(raw: npt.NDArray[np.unsignedinteger], dtype: str) -> Floats:
    if dtype == "BF16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(np.float32) if dtype == "F32" else raw.view(np.float16).astype(np.float32)


def _scales(values: Floats, largest: float) -> Floats:
    """[rows]; NaN where a row has something that is not finite."""
    with np.errstate(invalid="ignore"):
        peaks = np.maximum(values.max(axis=1), -values.min(axis=1))
    finite = np.isfinite(peaks)
    peaks[~finite] = 1
    scales: Floats = (peaks.astype(np.float64) / largest).astype(np.float32)
    short = scales.astype(np.float64) * largest < peaks
    scales[short] = np.nextafter(scales[short], np.float32(np.inf))
    with np.errstate(over="ignore"):
        over = np.isinf(scales * np.float32(largest))
    scales[over] = np.nextafter(scales[over], np.float32(0))
    scales[peaks == 0] = 1
    scales[~finite] = np.nan
    return scales


def _int8(values: Floats, scales: Floats) -> Codes:
    # In double precision, where no quotient of two float32 is rounded across the middle between two codes.
    quotients = values / scales.astype(np.float64)[:, None]
    np.rint(quotients, out=quotients)
    np.nan_to_num(quotients, copy=False)
    return quotients.astype(np.int8).view(np.uint8)


def _fp8(values: Floats, scales: Floats) -> Codes:
    quotients: Floats = values / scales[:, None]
    broken = np.isnan(scales)
    if broken.any():
        quotients[broken] = 0
    # The sign is the value's own: a quotient may underflow.
    bits = quotients.view(np.uint32)
    magnitudes = bits & np.uint32(0x7FFFFFFF)
    # Normal numbers: the mantissa is cut to 3 bits, to nearest even, and the bias goes from 127 to 7.
    normal = ((magnitudes + np.uint32(0x7FFFF) + ((magnitudes >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - (
        np.uint32(120) << np.uint32(3)
    )
    # Below 2**-6 codes are multiples of 2**-9; 8 of them is the smallest normal number, with the code 8.
    steps = np.rint(magnitudes.view(np.float32) * np.float32(512))
    small = magnitudes < np.uint32(0x3C800000)
    codes = np.where(small, np.where(small, steps, 0).astype(np.uint32), np.minimum(normal, np.uint32(0x7E)))
    return (codes | (bits >> np.uint32(24) & np.uint32(0x80))).astype(np.uint8)


@cache
def _fp8_values() -> Floats:
    """The value of each code."""
    codes = np.arange(256)
    exponents, mantissas = (codes >> 3) & 15, codes & 7
    values = np.where(exponents > 0, (1 + mantissas / 8) * 2.0 ** (exponents - 7.0), mantissas * 2.0**-9)
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)
