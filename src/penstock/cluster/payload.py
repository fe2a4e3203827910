"""What crosses between processes of one machine: msgpack for small things, shared memory for large ones, no pickle.

Decides the form of each value: plain values as msgpack (tuples arrive as lists, dataclasses as dicts); batches, tensors
and NumPy arrays as a header and buffers, which lie in one segment of the message or, where a batch was put before, in
that one. Knows nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.cluster.batch import Batch
from penstock.cluster.errors import ClusterError
from penstock.cluster.segment import Segment, SegmentPool, views_of

INLINE_BYTES = 128 * 1024
"""Below this, in all, buffers travel in the frame itself. A call of four workers on two cores takes 0.36 ms so and
0.42 ms by a segment at 64 KB, 0.42 and 0.37 ms at 128 KB, 3.9 and 1.2 ms at 1 MB."""
_BATCH, _TENSOR, _ARRAY = 1, 2, 3


class _Body(msgspec.Struct, array_like=True):
    tree: bytes
    """The value in msgpack; buffers of large things are numbers there."""
    inline: list[bytes]
    segments: list[tuple[int, list[tuple[int, int]]]]
    """(size, places of buffers), one for each descriptor that goes along."""


class _Large(msgspec.Struct, array_like=True):
    header: bytes
    buffers: list[int]
    rows: tuple[int, int] | None = None
    """First and last (exclusive) row, where the buffers hold more than is meant."""


class Packed(NamedTuple):
    """A value ready to be sent, any number of times; its segments live at least as long."""

    body: bytes
    segments: Sequence[Segment]

    @property
    def fds(self) -> list[int]:
        return [segment.fd for segment in self.segments]


class Stored(NamedTuple):
    """A batch that lies in a segment: what `put` makes."""

    header: bytes
    segment: Segment


def put(batch: Batch, pool: SegmentPool) -> Batch:
    """The batch in shared memory, written once; it and its slices go by reference."""
    header, buffers = batch.pieces()
    segment = Segment(buffers, pool)
    return Batch.of_pieces(header, segment.views()).stored(Stored(header, segment))


def pack(value: Any, pool: SegmentPool) -> Packed:
    """Raises ClusterError for a value that can't cross."""
    return _Packing(pool).pack(value)


def unpack(body: bytes | memoryview, fds: Sequence[int]) -> Any:
    """The value; large things in it are views of the segments, which the caller may close afterwards."""
    try:
        read = msgspec.msgpack.decode(body, type=_Body)
    except msgspec.DecodeError as error:
        raise ClusterError(f"a message that is none: {error}") from None
    if len(fds) != len(read.segments):
        raise ClusterError(f"a message of {len(read.segments)} segments came with {len(fds)} descriptors")
    buffers = [memoryview(data) for data in read.inline]
    for fd, (size, places) in zip(fds, read.segments):
        buffers += views_of(fd, size, places)

    def restored(code: int, data: memoryview) -> Any:
        large = msgspec.msgpack.decode(data, type=_Large)
        batch = Batch.of_pieces(large.header, [buffers[number] for number in large.buffers])
        if code == _BATCH:
            return batch if large.rows is None else batch.slice(*large.rows)
        from penstock.cluster.convert import to_tensors

        tensor = to_tensors(batch)["x"][0]
        return tensor if code == _TENSOR else tensor.numpy()

    return msgspec.msgpack.decode(read.tree, ext_hook=restored)


class _Packing:
    """One message being put together. Buffers are numbered: the message's own, then those of each stored batch."""

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._own: list[memoryview] = []
        self._stored: dict[int, tuple[int, Stored]] = {}

    def pack(self, value: Any) -> Packed:
        try:
            # Twice where batches were put before: their buffers' numbers follow the message's own.
            tree = msgspec.msgpack.encode(value, enc_hook=self._crossing)
            if self._stored:
                self._base, self._own = len(self._own), []
                tree = msgspec.msgpack.encode(value, enc_hook=self._crossing)
        except (TypeError, OverflowError, ValueError, RecursionError) as error:
            raise ClusterError(f"an argument or answer can't cross to another process: {error}") from None
        stored = [held for _, held in self._stored.values()]
        segments = [held.segment for held in stored]
        inline: list[bytes] = []
        if sum(buffer.nbytes for buffer in self._own) < INLINE_BYTES:
            inline = [bytes(buffer) for buffer in self._own]
        elif self._own:
            segments = [Segment(self._own, self._pool), *segments]
        places = [(segment.size, segment.places) for segment in segments]
        return Packed(msgspec.msgpack.encode(_Body(tree, inline, places)), segments)

    _base = 0

    def _crossing(self, value: Any) -> Any:
        if isinstance(value, Batch):
            return msgspec.msgpack.Ext(_BATCH, msgspec.msgpack.encode(self._batch(value)))
        module = type(value).__module__.partition(".")[0]
        if module == "torch" and hasattr(value, "is_nested"):
            return self._tensor(_TENSOR, value.detach())
        if module == "numpy":
            if getattr(value, "ndim", 0) == 0 or value.dtype.hasobject:
                return value.tolist()
            import torch

            return self._tensor(_ARRAY, torch.from_numpy(value if value.flags.writeable else value.copy()))
        raise TypeError(f"{type(value).__name__} is neither plain data nor a Batch, tensor or array")

    def _tensor(self, code: int, value: Any) -> Any:
        from penstock.cluster.convert import from_tensors

        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(self._batch(from_tensors({"x": value.unsqueeze(0)}))))

    def _batch(self, batch: Batch) -> _Large:
        home = batch.home
        if home is not None and isinstance(home.store, Stored):
            held = home.store
            first = self._stored.get(id(held), (self._held_buffers(), held))[0]
            self._stored[id(held)] = (first, held)
            numbers = [self._base + first + k for k in range(len(held.segment.places))]
            return _Large(held.header, numbers, (home.start, home.start + len(batch)))
        header, buffers = batch.pieces()
        numbers = list(range(len(self._own), len(self._own) + len(buffers)))
        self._own += buffers
        return _Large(header, numbers)

    def _held_buffers(self) -> int:
        return sum(len(held.segment.places) for _, held in self._stored.values())
