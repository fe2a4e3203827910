"""Batch: the columns that travel between a controller and its workers.

Decides how columns are laid out as a header and a few large buffers, so that whoever carries them copies once or not
at all. Refuses to know the carrier: Ray takes the buffers out of band (pickle protocol 5), local groups lay them in
shared memory. A batch is never changed once made; slices, chunks and neighbours share its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.cluster.column import JSON, Column, joined, json_column, ragged
from penstock.cluster.columns import Columns, Run
from penstock.cluster.errors import BatchError
from penstock.errors import MissingExtra

SMALL_BYTES = 64 * 1024
"""Buffers below this are packed into one: thousands of small columns cost one buffer, a large one is never copied."""
_NOWHERE = (-1, 0, 0)


class _Part(msgspec.Struct, array_like=True):
    """Where a column, or a run of them, lies: (buffer, first byte, bytes) of its values, offsets and lengths."""

    names: list[str]
    kind: str
    rows: int
    shape: tuple[int, ...] | None
    ndim: int
    data: tuple[int, int, int]
    offsets: tuple[int, int, int]
    dims: tuple[int, int, int]


class _Header(msgspec.Struct, array_like=True):
    parts: list[_Part]
    meta: bytes


class Home(NamedTuple):
    """What a carrier put somewhere, and the first of the rows there that a batch is made of."""

    store: Any
    start: int


class Batch:
    """Named columns of the same number of rows, and `meta`: one JSON value for all rows."""

    __slots__ = ("_columns", "_home", "_meta", "_rows")

    def __init__(self, columns: Mapping[str, Column], meta: Mapping[str, Any] | None = None, rows: int = 0) -> None:
        """`rows` counts only where there is no column. Raises BatchError where columns differ in rows."""
        self._columns = Columns.of(columns)
        self._meta = dict(meta or {})
        counts = self._columns.row_counts()
        if len(counts) > 1:
            told = ", ".join(f"{name} {column.rows}" for name, column in list(self._columns.items())[:8])
            raise BatchError(f"columns of one batch have different numbers of rows: {told}")
        self._rows = counts.pop() if counts else rows
        self._home: Home | None = None

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        columns = ", ".join(f"{name}: {column.kind}{list(column.row_form)}" for name, column in self._columns.items())
        return f"Batch({self._rows} rows; {columns})"

    @property
    def columns(self) -> Mapping[str, Column]:
        return self._columns

    @property
    def meta(self) -> dict[str, Any]:
        return self._meta

    @property
    def nbytes(self) -> int:
        return self._columns.nbytes

    def column(self, name: str) -> Column:
        """Raises BatchError that lists the columns there are."""
        if name not in self._columns:
            raise BatchError(f"the batch has no column '{name}'; it has: {', '.join(self._columns) or 'none'}")
        return self._columns[name]

    def values(self, name: str) -> list[Any]:
        """A text, bytes or JSON column as Python values."""
        return list(self.column(name).values())

    @property
    def home(self) -> Home | None:
        """Where a carrier already holds these rows, so that it sends a reference instead."""
        return self._home

    def stored(self, store: Any) -> Batch:
        """This batch, as one that a carrier holds whole in `store`; so are its slices."""
        held = Batch(self._columns, self._meta, self._rows)
        held._home = Home(store, 0)
        return held

    def only(self, *names: str) -> Batch:
        """Some of the columns, shared."""
        return Batch({name: self.column(name) for name in names}, self._meta, self._rows)

    def union(self, other: Batch) -> Batch:
        """Columns of both, shared; those of `other` win. Raises BatchError where rows differ."""
        return Batch({**self._columns, **other._columns}, {**self._meta, **other._meta}, self._rows)

    def slice(self, start: int, stop: int) -> Batch:
        """Rows `start` to `stop` (exclusive), shared."""
        if not 0 <= start <= stop <= self._rows:
            raise BatchError(f"rows {start} to {stop} of a batch of {self._rows}")
        columns: Mapping[str, Column] = self._columns
        if (start, stop) != (0, self._rows):
            # All rows are what workers get of one argument for all; thousands of small columns then stay a run.
            columns = {name: column.slice(start, stop) for name, column in columns.items()}
        part = Batch(columns, self._meta, stop - start)
        if self._home is not None:
            part._home = Home(self._home.store, self._home.start + start)
        return part

    def chunks(self, count: int) -> list[Batch]:
        """`count` parts of the same number of rows, shared. Raises BatchError where rows don't divide."""
        if count < 1 or self._rows % count:
            raise BatchError(f"{self._rows} rows don't divide into {count} chunks; pad them, or slice")
        size = self._rows // count
        return [self.slice(size * k, size * (k + 1)) for k in range(count)]

    def select(self, rows: Sequence[int]) -> Batch:
        """Some rows in some order: shared where they are consecutive, else copied."""
        rows = list(rows)
        if wrong := [row for row in rows if not 0 <= row < self._rows]:
            raise BatchError(f"row {wrong[0]} of a batch of {self._rows}")
        if rows and rows == list(range(rows[0], rows[0] + len(rows))):
            return self.slice(rows[0], rows[0] + len(rows))
        return Batch({name: column.select(rows) for name, column in self._columns.items()}, self._meta, len(rows))

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Rows of all, in order; without copying where they are neighbouring slices of one batch. The first's meta.

        Raises BatchError where columns differ in name or kind.
        """
        if not batches:
            raise BatchError("there are no batches to join")
        first = batches[0]
        for other in batches[1:]:
            if differing := first._columns.keys() ^ other._columns.keys():
                raise BatchError(f"not in all batches to be joined: column {', '.join(sorted(differing))}")
        columns = {name: joined([batch._columns[name] for batch in batches], name) for name in first._columns}
        return Batch(columns, first._meta, sum(len(batch) for batch in batches))

    def pieces(self) -> tuple[bytes, list[memoryview]]:
        """A header and buffers that `of_pieces` reads; large buffers are views of this batch, small ones are packed."""
        packed: list[memoryview] = []
        packed_bytes = 0
        buffers: list[memoryview] = []
        parts = []

        def place(view: memoryview | None) -> tuple[int, int, int]:
            nonlocal packed_bytes
            if view is None:
                return _NOWHERE
            size = view.nbytes
            if size >= SMALL_BYTES:
                buffers.append(_flat(view))
                return (len(buffers), 0, size)
            at = packed_bytes
            packed.append(_flat(view))
            if gap := -size % 16:
                packed.append(_PADDING[:gap])
            packed_bytes += size + gap
            return (0, at, size)

        for part in self._columns.parts:
            if isinstance(part, Run):
                data = place(part.data)
                parts.append(_Part(list(part.names), part.kind, part.rows, part.shape, 1, data, _NOWHERE, _NOWHERE))
                continue
            name, column = part
            data, offsets, dims = place(column.data), place(column.offsets), place(column.dims)
            parts.append(_Part([name], column.kind, column.rows, column.shape, column.ndim, data, offsets, dims))
        header = _Header(parts, _encode_meta(self._meta))
        rows = self._rows.to_bytes(8, "little")
        return rows + msgspec.msgpack.encode(header), [memoryview(bytearray().join(packed)), *buffers]

    @staticmethod
    def of_pieces(header: bytes | memoryview, buffers: Sequence[Any]) -> Batch:
        """The batch over the buffers' memory. Raises BatchError where it is no header of a batch."""
        view = memoryview(header)
        try:
            read = msgspec.msgpack.decode(view[8:], type=_Header)
        except msgspec.DecodeError as error:
            raise BatchError(f"no header of a batch: {error}") from None
        views = [_flat(memoryview(buffer)) for buffer in buffers]

        def found(place: tuple[int, int, int]) -> memoryview | None:
            if tuple(place) == _NOWHERE:
                return None
            buffer, at, size = place
            if not (0 <= buffer < len(views) and at >= 0 and 0 <= size <= views[buffer].nbytes - at):
                raise BatchError(f"a batch's header points outside its buffers: {place}")
            return views[buffer][at : at + size]

        def numbers(place: tuple[int, int, int]) -> memoryview | None:
            part = found(place)
            return None if part is None else part.cast("q")

        columns: list[Run | tuple[str, Column]] = []
        for part in read.parts:
            data = found(part.data)
            if data is None or not part.names:
                raise BatchError(f"columns {', '.join(part.names[:8]) or 'without names'} have no values")
            if len(part.names) > 1:
                columns.append(Run(part.names, part.kind, part.rows, part.shape or (), data))
                continue
            offsets, dims = numbers(part.offsets), numbers(part.dims)
            columns.append((part.names[0], Column(part.kind, data, part.rows, part.shape, offsets, dims, part.ndim)))
        return Batch(Columns(columns), _decode_meta(read.meta), int.from_bytes(view[:8], "little"))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Buffers go out of band under protocol 5: arrays of bytes, which pickle hands over without copying."""
        header, buffers = self.pieces()
        if protocol < 5:
            return _restored, (header, [bytes(buffer) for buffer in buffers])
        try:
            import numpy
        except ImportError:
            raise MissingExtra("numpy", "ray", "pickling a batch without copying it") from None
        return _restored, (header, [numpy.frombuffer(buffer, numpy.uint8) for buffer in buffers])

    def __eq__(self, other: object) -> bool:
        """The same columns with the same rows, bit for bit, and the same meta, however they lie in memory."""
        if not isinstance(other, Batch):
            return NotImplemented
        same = len(self) == len(other) and self._columns.keys() == other._columns.keys()
        return (
            same
            and _encode_meta(self._meta) == _encode_meta(other._meta)
            and all(_same(column, other._columns[name]) for name, column in self._columns.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Batch]:
        """One batch of one row after another, shared."""
        return (self.slice(row, row + 1) for row in range(self._rows))


_PADDING = memoryview(bytes(16))


def _restored(header: bytes, buffers: Sequence[Any]) -> Batch:
    return Batch.of_pieces(header, buffers)


def _flat(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _same(one: Column, two: Column) -> bool:
    if one.kind != two.kind or one.rows != two.rows:
        return False
    if one.offsets is None and two.offsets is None:
        return one.shape == two.shape and one.data == two.data
    return all(
        one.row_shape(row) == two.row_shape(row) and one.row_bytes(row) == two.row_bytes(row) for row in range(one.rows)
    )


def _encode_meta(meta: Mapping[str, Any]) -> bytes:
    return bytes(json_column([meta], "meta").data)


def _decode_meta(data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = next(ragged(JSON, memoryview(data), [len(data)]).values())
    return value
