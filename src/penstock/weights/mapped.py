"""Memory of another process that a puller sees and does not copy: mapping its pages, and verifying a version there."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from penstock.weights.manifest import Manifest
from penstock.weights.plan import check_tensor_bytes, tensor_offsets
from penstock.weights.transport import Seen

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MappedFile", "verify_in_place"]

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

    def seen(self, when_left: Callable[[], None]) -> Seen:
        """A view of all of it. `when_left` is called once nothing refers to it any more, nor to a part of it."""
        # What exports the bytes to the view and all its parts is this array, and theirs alone.
        array = self._array()
        weakref.finalize(array, when_left).atexit = False
        return Seen(array.data, self._touch)

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


async def verify_in_place(manifest: Manifest, seen: Seen, threads: Executor, cores: int) -> None:
    """Takes the checksum of every tensor of what is seen, on `cores` threads. Raises WeightError naming a tensor."""
    starts = tensor_offsets(manifest.tensors)
    left = deque(sorted(range(len(manifest.tensors)), key=lambda number: -manifest.tensors[number].nbytes))

    def some() -> None:
        with contextlib.suppress(IndexError):
            while True:
                number = left.popleft()
                tensor, start = manifest.tensors[number], starts[number]
                seen.touch(start, tensor.nbytes)
                check_tensor_bytes(manifest.version, tensor, seen.stream[start : start + tensor.nbytes])

    loop = asyncio.get_running_loop()
    try:
        await asyncio.gather(*(loop.run_in_executor(threads, some) for _ in range(cores)))
    finally:
        # One tensor that does not verify, or a pull that is cut, ends the others' work.
        left.clear()
