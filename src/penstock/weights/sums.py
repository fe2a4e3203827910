"""Verifying tensors while their chunks still come.

A tensor's checksum goes on, piece by piece, as far as all before is there: bytes are read while they are still in the
processor's cache, and hardly anything is left to be done when the last chunk has come. Knows of no sockets and starts
no threads; whoever brings a chunk does the work.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING

from penstock.errors import MissingExtra, WeightError
from penstock.weights.manifest import Manifest
from penstock.weights.plan import does_not_verify, tensor_offsets

if TYPE_CHECKING:
    from xxhash import xxh3_64

__all__ = ["TensorSums"]


def _new_sum() -> xxh3_64:
    try:
        from xxhash import xxh3_64
    except ImportError as error:
        raise MissingExtra("xxhash", "engine", "the checksum of model weights") from error
    return xxh3_64()


class _Sum:
    """Of one tensor: how far it has come."""

    def __init__(self, at: int, following: int) -> None:
        self.value = _new_sum()
        self.at = at
        """The byte of the stream that it goes on with."""
        self.following = following
        """The chunk in which that is."""
        self.busy = False


class TensorSums:
    """Checksums of the tensors of a checked `manifest`, whose bytes come into `stream`. Any thread may call."""

    def __init__(self, manifest: Manifest, stream: memoryview) -> None:
        self._manifest = manifest
        self._stream = stream
        self._offsets = tensor_offsets(manifest.tensors)
        self._there = [0] * len(manifest.chunks)
        """How many of a chunk's first bytes are in their place."""
        self._tensors_of: list[range] = []
        firsts, ends = [0] * len(manifest.tensors), [0] * len(manifest.tensors)
        first = 0
        for index, chunk in enumerate(manifest.chunks):
            end = chunk.offset + chunk.raw_nbytes
            while self._offsets[first + 1] <= chunk.offset:
                first += 1
            last = first
            while last < len(manifest.tensors) and self._offsets[last] < end:
                firsts[last] = firsts[last] if ends[last] else index
                ends[last] = index + 1
                last += 1
            self._tensors_of.append(range(first, last))
        self._chunks_of = [range(begin, end) for begin, end in zip(firsts, ends)]
        self._sums = [self._new(tensor) for tensor in range(len(manifest.tensors))]
        self._lock = Lock()
        self._found: dict[int, int] = {}
        self._heard: Callable[[int, int], None] | None = None
        for tensor, entry in enumerate(manifest.tensors):
            if not entry.nbytes:
                self._go_on(tensor)  # No byte stands for it.

    def has(self, chunk: int) -> bool:
        return self._there[chunk] == self._manifest.chunks[chunk].raw_nbytes

    def came(self, chunk: int, nbytes: int | None = None) -> None:
        """Its first `nbytes`, or all, are in their place; goes on with the checksums that waited for them."""
        entry = self._manifest.chunks[chunk]
        nbytes = entry.raw_nbytes if nbytes is None else nbytes
        with self._lock:
            before = self._there[chunk]
            if before >= nbytes:
                return
            self._there[chunk] = nbytes
        # The tensors of these bytes: of those that begin with the first, the last one has it.
        first = bisect_right(self._offsets, entry.offset + before) - 1
        for tensor in range(first, bisect_left(self._offsets, entry.offset + nbytes)):
            self._go_on(tensor)

    def tell(self, heard: Callable[[int, int], None]) -> None:
        """Tells `heard` of each tensor that verifies, where it begins and how long it is; also of those that did."""
        with self._lock:
            self._heard, found = heard, list(self._found)
        for tensor in found:
            self._say(tensor)

    def _say(self, tensor: int) -> None:
        entry = self._manifest.tensors[tensor]
        if self._heard is not None and self._found.get(tensor) == entry.xxh3:
            self._heard(self._offsets[tensor], entry.nbytes)

    def lost(self, chunk: int) -> None:
        """It is not to be relied on, and comes again; checksums in which it was or may be begin anew."""
        with self._lock:
            if not self._there[chunk]:
                return
            self._there[chunk] = 0
            for tensor in self._tensors_of[chunk]:
                if self._manifest.tensors[tensor].nbytes:
                    self._sums[tensor] = self._new(tensor)
                    self._found.pop(tensor, None)

    def wrong(self) -> list[int]:
        """Tensors that are whole, and not as they should be."""
        return [tensor for tensor, found in self._found.items() if found != self._manifest.tensors[tensor].xxh3]

    def chunks_of(self, tensors: Iterable[int]) -> list[int]:
        return sorted({chunk for tensor in tensors for chunk in self._chunks_of[tensor]})

    def check(self) -> None:
        """Raises WeightError, naming the tensor, where not every one is whole and as it should be."""
        for number, tensor in enumerate(self._manifest.tensors):
            found = self._found.get(number)
            if found is None:
                raise WeightError(f"tensor {tensor.name} of weight version {self._manifest.version} is not whole")
            if found != tensor.xxh3:
                raise does_not_verify(self._manifest.version, tensor, found)

    def _new(self, tensor: int) -> _Sum:
        return _Sum(self._offsets[tensor], self._chunks_of[tensor].start)

    def _go_on(self, tensor: int) -> None:
        """As far as bytes are there, unless another thread is at it: that one goes on with these too."""
        sum_, end = self._sums[tensor], self._offsets[tensor + 1]
        with self._lock:
            if sum_.busy:
                return
            sum_.busy = True
        while True:
            with self._lock:
                if sum_.at == end:
                    if self._sums[tensor] is not sum_:
                        return
                    self._found[tensor] = sum_.value.intdigest()
                    break
                chunk = self._manifest.chunks[sum_.following]
                there = min(chunk.offset + self._there[sum_.following], end)
                if there <= sum_.at:
                    sum_.busy = False
                    return
            sum_.value.update(self._stream[sum_.at : there])
            sum_.at = there
            if there == chunk.offset + chunk.raw_nbytes:
                sum_.following += 1
        self._say(tensor)
