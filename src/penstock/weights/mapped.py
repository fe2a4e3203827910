"""Memory of another process that a puller sees and does not copy: mapping its pages, and verifying a version there."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from penstock.weights.manifest import Manifest
from penstock.weights.plan import check_tensor_bytes, tensor_offsets
from penstock.weights.protocol import LinkLost
from penstock.weights.transport import Seen

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MappedFile", "verify_in_place"]

PAUSE_S, PAUSE_SHARE = (0.002, 0.05), 0.125
"""Before a tensor that is still written is tried again: least and most, and as a share of the time waited for it."""
PACE = 4
"""Checksums are so many times as fast as the decoding that they wait for, which has as many cores; at least."""
MADV_POPULATE_READ = 22
"""Linux 5.14: maps the pages of a range at once; faults one by one cost half of the time that the checksums take."""


class MappedFile:
    """A file's first `nbytes`, mapped to be read; the mapping outlives the descriptor, and lasts as long as any view.

    Pages are mapped once, by `Seen.touch`: 4 KiB each where the system has no larger ones for files, they cost three
    times as much as their checksums, so that a file is worth being kept mapped for what is written to it next. Needs
    numpy. Raises OSError or ValueError where the file can't be mapped.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        self._mapped = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._address: int = self._array().ctypes.data
        self._touched: set[tuple[int, int]] = set()
        said = os.fstat(file)
        self._file = said.st_dev, said.st_ino

    def __len__(self) -> int:
        return len(self._mapped)

    def is_of(self, file: int) -> bool:
        """Whether `file` is the same one: while it is mapped, no other has its number."""
        said = os.fstat(file)
        return (said.st_dev, said.st_ino) == self._file

    def seen(self, hold: Callable[[int, int], bool], when_left: Callable[[], None]) -> Seen:
        """A view of all of it. `when_left` is called once nothing refers to it any more, nor to a part of it."""
        # What exports the bytes to the view and all its parts is this array, and theirs alone.
        array = self._array()
        weakref.finalize(array, when_left).atexit = False
        return Seen(array.data, hold, self._touch)

    def _array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        import numpy

        return numpy.frombuffer(self._mapped, numpy.uint8)

    def _touch(self, start: int, nbytes: int) -> None:
        if (start, nbytes) in self._touched or not nbytes:
            return
        begin = start - start % mmap.PAGESIZE
        # Not by the mapping's own call, which keeps the interpreter's lock. A kernel that knows no such advice maps the
        # pages as they are read.
        _madvise()(self._address + begin, start + nbytes - begin, MADV_POPULATE_READ)
        self._touched.add((start, nbytes))


def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


async def verify_in_place(
    manifest: Manifest, seen: Seen, threads: Executor, cores: int, lent: Event | None = None
) -> None:
    """Takes the checksum of every tensor of what is seen, on `cores` threads.

    With `lent`, each is waited for and held before it is read; once that is set, none is written to any more. Raises
    WeightError naming a tensor; LinkLost where one is written to nevertheless.
    """
    starts = tensor_offsets(manifest.tensors)
    order: Iterable[int] = range(len(manifest.tensors))
    if lent is None:
        order = sorted(order, key=lambda number: -manifest.tensors[number].nbytes)
    left = deque(order)
    turn = Lock()

    def some() -> None:
        with contextlib.suppress(IndexError):
            while True:
                number = left.popleft()
                tensor, start = manifest.tensors[number], starts[number]
                if lent is not None:
                    # They come one after the other: more than one thread would wait in vain.
                    with turn:
                        _wait_for(seen, start, tensor.nbytes, lent)
                seen.touch(start, tensor.nbytes)
                check_tensor_bytes(manifest.version, tensor, seen.stream[start : start + tensor.nbytes])

    loop = asyncio.get_running_loop()
    count = cores if lent is None else -(-cores // PACE)
    try:
        await asyncio.gather(*(loop.run_in_executor(threads, some) for _ in range(count)))
    finally:
        # One tensor that does not verify, or a pull that is cut, ends the others' work.
        left.clear()
        if lent is not None:
            lent.set()


def _wait_for(seen: Seen, start: int, nbytes: int, lent: Event) -> None:
    """Until these bytes are held."""
    began = time.monotonic()
    while True:
        none_is_written = lent.is_set()
        if seen.hold(start, nbytes):
            return
        if none_is_written:
            raise LinkLost("it has taken its memory for another version")
        # Waiting for the event would cost as much again, and spare no more than one pause.
        time.sleep(min(max(PAUSE_S[0], PAUSE_SHARE * (time.monotonic() - began)), PAUSE_S[1]))
