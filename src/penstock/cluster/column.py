"""One field of a batch: a flat buffer, and offsets where rows differ in length.

Decides how values lie in memory and what a slice shares. Knows nothing of tensors' libraries (`convert` does) and
nothing of who carries the bytes. A column is never changed once made; slices and neighbours share its memory.
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.cluster.errors import BatchError

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Numeric kinds, by the names that NumPy and PyTorch share, with the size of one element."""
TEXT, BYTES, JSON = "text", "bytes", "json"
PLAIN_JSON = b"\xc1"
"""Begins a JSON row that MessagePack can't hold (integers over 64 bits, lone surrogates), and never one of its own."""
_ARRAY_KINDS = {"b": "int8", "B": "uint8", "h": "int16", "i": "int32", "q": "int64", "l": "int64", "f": "float32",
                "d": "float64"}  # fmt: skip


@dataclass(slots=True, eq=False)
class Column:
    """`rows` values of one kind.

    Regular columns have the `shape` of every row and no offsets. Ragged ones have `offsets`: rows + 1 numbers of
    elements (bytes for text, bytes and JSON), which may begin above 0; and, where rows have more than one dimension,
    `dims`: `ndim` lengths for each row.
    """

    kind: str
    data: memoryview
    rows: int
    shape: tuple[int, ...] | None = None
    offsets: memoryview | None = None
    dims: memoryview | None = None
    ndim: int = 1
    _root: Column | None = field(default=None, repr=False)
    _start: int = 0

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES.get(self.kind, 1)

    @property
    def nbytes(self) -> int:
        """Of values, offsets and lengths."""
        return sum(part.nbytes for part in (self.data, self.offsets, self.dims) if part is not None)

    def bounds(self, row: int) -> tuple[int, int]:
        """First and last (exclusive) byte of a row in `data`."""
        if self.offsets is None:
            size = math.prod(self.shape or ()) * self.item_bytes
            return row * size, (row + 1) * size
        base, size = self.offsets[0], self.item_bytes
        return (self.offsets[row] - base) * size, (self.offsets[row + 1] - base) * size

    def row_bytes(self, row: int) -> memoryview:
        """A row's memory, not copied."""
        start, stop = self.bounds(row)
        return self.data[start:stop]

    def row_shape(self, row: int) -> tuple[int, ...]:
        if self.shape is not None:
            return self.shape
        if self.dims is not None:
            return tuple(self.dims[row * self.ndim : (row + 1) * self.ndim])
        start, stop = self.bounds(row)
        return ((stop - start) // self.item_bytes,)

    def values(self) -> Iterator[Any]:
        """The rows of a text, bytes or JSON column, as Python values."""
        if self.kind not in _DECODERS:
            raise BatchError(f"a column of {self.kind} has rows of numbers; take them with to_tensors()")
        decode = _DECODERS[self.kind]
        return (decode(self.row_bytes(row)) for row in range(self.rows))

    def slice(self, start: int, stop: int) -> Column:
        """Rows `start` to `stop` (exclusive); shares memory. Slices that lie side by side join without copying."""
        first, last = (self.bounds(start)[0], self.bounds(stop - 1)[1]) if stop > start else (0, 0)
        root = self if self._root is None else self._root
        return Column(
            self.kind,
            self.data[first:last],
            stop - start,
            self.shape,
            None if self.offsets is None else self.offsets[start : stop + 1],
            None if self.dims is None else self.dims[start * self.ndim : stop * self.ndim],
            self.ndim,
            root,
            self._start + start,
        )

    def select(self, rows: Sequence[int]) -> Column:
        """Some rows in some order, copied."""
        return gathered(self, [self.row_bytes(row) for row in rows], [self.row_shape(row) for row in rows])

    def like(self, other: Column) -> bool:
        """Whether the two can be one column: the same kind, and rows of as many dimensions."""
        return self.kind == other.kind and len(self.row_form) == len(other.row_form)

    @property
    def row_form(self) -> tuple[int | None, ...]:
        """Lengths of a row's dimensions, None where rows differ."""
        return self.shape if self.shape is not None else (None,) * self.ndim


def gathered(like: Column, parts: Sequence[memoryview], shapes: Sequence[tuple[int, ...]]) -> Column:
    """A column of the kind of `like` from rows' bytes and shapes."""
    data = memoryview(b"".join(parts))
    if like.kind not in _DECODERS and like.shape is not None and all(shape == like.shape for shape in shapes):
        return Column(like.kind, data, len(parts), like.shape)
    ndim = len(like.row_form)
    return ragged(like.kind, data, [part.nbytes // like.item_bytes for part in parts], shapes if ndim > 1 else None)


def ragged(
    kind: str, data: memoryview, lengths: Iterable[int], shapes: Sequence[tuple[int, ...]] | None = None
) -> Column:
    """A ragged column over `data`, rows of `lengths` elements each; `shapes` where rows have several dimensions."""
    offsets = array("q", [0])
    total = 0
    for length in lengths:
        total += length
        offsets.append(total)
    dims, ndim = None, 1
    if shapes:
        ndim = len(shapes[0])
        dims = memoryview(array("q", [length for shape in shapes for length in shape]))
    return Column(
        kind, data.cast("B") if data.format != "B" else data, len(offsets) - 1, None, memoryview(offsets), dims, ndim
    )


def joined(columns: Sequence[Column], name: str) -> Column:
    """Columns one after another; without copying where they are neighbouring slices of one. Raises BatchError."""
    columns = [column for column in columns if column.rows] or list(columns[:1])
    first = columns[0]
    for other in columns[1:]:
        if not first.like(other):
            raise BatchError(
                f"column '{name}': rows of {first.kind} {first.row_form} and of {other.kind} {other.row_form} "
                "can't be in one batch"
            )
    if len(columns) == 1:
        return first
    root = first._root
    if root is not None and _neighbours(columns):
        return root.slice(first._start, first._start + sum(column.rows for column in columns))
    if all(column.offsets is None and column.shape == first.shape for column in columns):
        data = memoryview(b"".join(column.data for column in columns))
        return Column(first.kind, data, sum(column.rows for column in columns), first.shape)
    parts = [column.row_bytes(row) for column in columns for row in range(column.rows)]
    shapes = [column.row_shape(row) for column in columns for row in range(column.rows)]
    return gathered(Column(first.kind, first.data[:0], 0, None, ndim=len(first.row_form)), parts, shapes)


def _neighbours(columns: Sequence[Column]) -> bool:
    pairs = itertools.pairwise(columns)
    return all(b._root is a._root and b._start == a._start + a.rows for a, b in pairs)


def text_column(values: Iterable[str]) -> Column:
    """Strings, as UTF-8; lone surrogates survive."""
    return _of_rows(TEXT, [value.encode("utf-8", "surrogatepass") for value in values])


def bytes_column(values: Iterable[bytes | bytearray | memoryview]) -> Column:
    return _of_rows(BYTES, [bytes(value) for value in values])


def json_column(values: Iterable[Any], name: str = "") -> Column:
    """Any JSON values, NaN and integers of any size among them. Tuples come back as lists. Raises BatchError."""
    rows = []
    for number, value in enumerate(values):
        try:
            rows.append(_json_bytes(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise BatchError(
                f"column '{name}', row {number}: {type(value).__name__} is no JSON value: {error}"
            ) from None
    return _of_rows(JSON, rows)


def array_column(values: Sequence[array[Any]], kind: str = "") -> Column:
    """Ragged rows from the standard library's arrays, such as a sample's tokens. `kind` for an empty batch."""
    kinds = {_ARRAY_KINDS[value.typecode] for value in values} or {kind or "int64"}
    if len(kinds) > 1:
        raise BatchError(f"rows of one column have different kinds: {', '.join(sorted(kinds))}")
    data = memoryview(b"".join(memoryview(value).cast("B") for value in values))
    return ragged(kinds.pop(), data, [len(value) for value in values])


def _of_rows(kind: str, rows: Sequence[bytes]) -> Column:
    return ragged(kind, memoryview(b"".join(rows)), map(len, rows))


def _json_bytes(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value, enc_hook=_plain)
    except (OverflowError, UnicodeEncodeError):
        return PLAIN_JSON + json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    """NumPy's scalars and arrays, and tensors, as Python's own values."""
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError("it has no JSON form")


def _json_value(row: memoryview) -> Any:
    if row[:1] == PLAIN_JSON:
        return json.loads(bytes(row[1:]))
    return msgspec.msgpack.decode(row)


_DECODERS: dict[str, Callable[[memoryview], Any]] = {
    TEXT: lambda row: bytes(row).decode("utf-8", "surrogatepass"),
    BYTES: bytes,
    JSON: _json_value,
}
