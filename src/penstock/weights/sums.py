"""Verifying tensors while their chunks still come.

A tensor's checksum goes on, chunk by chunk, as far as all before is there: bytes are read while they are still in the
processor's cache, and hardly anything is left to be done when the last chunk has come. Knows of no sockets and starts
no threads; whoever brings a chunk does the work.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    def __init__(self, following: int) -> None:
        self.value = _new_sum()
        self.following = following
        """The chunk that it goes on with."""
        self.busy = False


class TensorSums:
    """Checksums of the tensors of a checked `manifest`, whose bytes come into `stream`. Any thread may call."""

    def __init__(self, manifest: Manifest, stream: memoryview) -> None:
        self._manifest = manifest
        self._stream = stream
        self._offsets = tensor_offsets(manifest.tensors)
        self._there = bytearray(len(manifest.chunks))
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
        self._sums = [_Sum(chunks.start) for chunks in self._chunks_of]
        self._lock = Lock()
        self._found: dict[int, int] = {}
        for tensor, chunks in enumerate(self._chunks_of):
            if not chunks:
                self._go_on(tensor)  # Without bytes, no chunk stands for it.

    def has(self, chunk: int) -> bool:
        return bool(self._there[chunk])

    def came(self, chunk: int) -> None:
        """Its bytes are in their place; goes on with the checksums that waited for it."""
        with self._lock:
            if self._there[chunk]:
                return
            self._there[chunk] = 1
        for tensor in self._tensors_of[chunk]:
            self._go_on(tensor)

    def lost(self, chunk: int) -> None:
        """It is not to be relied on, and comes again; checksums in which it was or may be begin anew."""
        with self._lock:
            if not self._there[chunk]:
                return
            self._there[chunk] = 0
            for tensor in self._tensors_of[chunk]:
                self._sums[tensor] = _Sum(self._chunks_of[tensor].start)
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

    def _go_on(self, tensor: int) -> None:
        """As far as the chunks reach, unless another thread is at it: that one goes on with this chunk too."""
        sum_, end = self._sums[tensor], self._chunks_of[tensor].stop
        with self._lock:
            if sum_.busy:
                return
            sum_.busy = True
        while True:
            with self._lock:
                if sum_.following == end:
                    if self._sums[tensor] is sum_:
                        self._found[tensor] = sum_.value.intdigest()
                    return
                if not self._there[sum_.following]:
                    sum_.busy = False
                    return
            chunk = self._manifest.chunks[sum_.following]
            start = max(chunk.offset, self._offsets[tensor])
            sum_.value.update(self._stream[start : min(chunk.offset + chunk.raw_nbytes, self._offsets[tensor + 1])])
            sum_.following += 1
