"""All of a chunk's changes applied in one loop, compiled by Numba where that is installed (`penstock[fast]`).

NumPy takes some thirty passes for the same, each of which asks for the interpreter's lock. One compiled call asks for
it once, and leaves the processor's cache to the weights. Compiled on a thread when first wanted, in some seconds, once
on a machine where Numba has a folder for its cache; until then, and without Numba, NumPy does the work. The format,
and what is refused of it, is that of `delta`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

__all__ = ["Apply", "applier", "compiled"]

Apply = Callable[..., bool]
"""Of tokens, low bits of gaps (empty where `low_bits` is 0), `low_bits`, packed signs, narrow and wide sizes: adds the
steps to the last argument. False for columns that do not fit together; some of them may then have been added.
All are aligned and unsigned, `wide` and the values of one width."""

log = logging.getLogger(__name__)

_lock = threading.Lock()
_threads: dict[int, threading.Thread] = {}
_ready: dict[int, Apply] = {}


def applier(width: int) -> Apply | None:
    """For elements of so many bytes; None where it is not to be had, or not yet."""
    apply = _ready.get(width)
    if apply is None and _has_numba():
        with _lock:
            if width not in _threads:
                _threads[width] = threading.Thread(target=_make, args=(width,), name="weight-compile")
                _threads[width].start()
    return apply


def compiled(width: int) -> Apply | None:
    """As `applier`, once it is compiled."""
    applier(width)
    if width in _threads:
        _threads[width].join()
    return _ready.get(width)


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def _make(width: int) -> None:
    try:
        _ready[width] = _compile(width)
    except Exception as error:  # noqa: BLE001  Numba's own are of many kinds, and NumPy does the work as well.
        log.warning("differences are applied by NumPy, since Numba does not compile: %s", error)


def _compile(width: int) -> Apply:
    import numba

    def column(kind: Any, readonly: bool = True) -> Any:
        return numba.types.Array(kind, 1, "C", readonly=readonly)

    byte, wide = numba.uint8, getattr(numba, f"uint{8 * width}")
    columns = (column(byte), column(byte), numba.int64, column(byte), column(byte), column(wide))
    signature = numba.boolean(*columns, column(wide, readonly=False))
    try:
        return numba.njit(signature, nogil=True, cache=True)(_apply)
    except RuntimeError:
        # No folder can be written to.
        return numba.njit(signature, nogil=True)(_apply)


def _apply(tokens, low, low_bits, signs, narrow, wide, values):  # type: ignore[no-untyped-def]  # Numba's language.
    # All numbers are unsigned: they wrap as bits do, and Numba looks for no negative indices.
    zero, one, three, seven = np.uint64(0), np.uint64(1), np.uint64(3), np.uint64(7)
    escape, shift = np.uint64(255), np.uint64(low_bits)
    elements, count = np.uint64(len(values)), np.uint64(len(narrow))
    at, gap, change, far = zero, zero, zero, zero
    for token in tokens:
        gap += np.uint64(token)
        if np.uint64(token) == escape:
            continue
        if change >= count:
            return False
        if shift > zero:
            gap = (gap << shift) + np.uint64(low[change])
        at += gap
        if at >= elements:
            return False
        size = np.uint64(narrow[change])
        if size == escape:
            if far >= np.uint64(len(wide)):
                return False
            size = np.uint64(wide[far])
            far += one
        # -x is ~x + 1, and a mask of ones is -1.
        minus = zero - ((np.uint64(signs[change >> three]) >> (seven - (change & seven))) & one)
        values[at] += ((size + one) ^ minus) - minus
        gap = zero
        change += one
        at += one
    # A last token of 255 leaves a gap that leads nowhere.
    return change == count and far == np.uint64(len(wide)) and gap == zero
