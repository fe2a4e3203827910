"""Columns on the wire: little-endian flat buffers.

Type codes are those of `array`: "i" int32, "I" uint32, "Q" uint64, "f" float32, "B" uint8. All machines that
Penstock runs on are little-endian; `column_bytes` and `column` refuse to load elsewhere.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, cast

from penstock.errors import WireError

if sys.byteorder != "little":
    raise ImportError("penstock's wire format is little-endian and this machine is not")

_ITEM_BYTES = {code: array(code).itemsize for code in "iIQfB"}


def column(data: bytes, code: str, length: int | None = None) -> memoryview[Any]:
    """Views `data` as items of type `code` without copying; refuses a wrong size."""
    size = _ITEM_BYTES[code]
    if len(data) % size or (length is not None and len(data) != length * size):
        wanted = f"{length} items of {size} bytes" if length is not None else f"a multiple of {size} bytes"
        raise WireError(f"a column of type '{code}' holds {len(data)} bytes; expected {wanted}")
    return memoryview(data).cast(cast(Any, code))


def column_bytes(values: Iterable[int] | Iterable[float], code: str) -> bytes:
    """Packs `values` as a flat column of type `code`."""
    return array(code, values).tobytes()


def offsets(lengths: Iterable[int]) -> list[int]:
    """Start offsets of ragged rows, with the total at the end: lengths [2, 3] give [0, 2, 5]."""
    return list(accumulate(lengths, initial=0))
