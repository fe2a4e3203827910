"""Verifying a version where it lies: memory of the store that a puller has mapped, and does not copy."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections import deque
from concurrent.futures import Executor

from penstock.weights.manifest import Manifest
from penstock.weights.plan import check_tensor_bytes, tensor_offsets

__all__ = ["verify_in_place"]

MADV_POPULATE_READ = 22
"""Linux 5.14: maps the pages of a range at once; faults one by one cost half of the time that the checksums take."""
POPULATE_BYTES = 32 << 20
"""At once: the interpreter's lock is held meanwhile."""


async def verify_in_place(manifest: Manifest, stream: memoryview, threads: Executor, cores: int) -> None:
    """Takes the checksum of every tensor of `stream`, on `cores` threads. Raises WeightError naming a tensor."""
    starts = tensor_offsets(manifest.tensors)
    left = deque(sorted(range(len(manifest.tensors)), key=lambda number: -manifest.tensors[number].nbytes))

    def some() -> None:
        with contextlib.suppress(IndexError):
            while True:
                number = left.popleft()
                tensor, start = manifest.tensors[number], starts[number]
                _populate(stream, start, tensor.nbytes)
                check_tensor_bytes(manifest.version, tensor, stream[start : start + tensor.nbytes])

    loop = asyncio.get_running_loop()
    try:
        await asyncio.gather(*(loop.run_in_executor(threads, some) for _ in range(cores)))
    finally:
        # One tensor that does not verify, or a pull that is cut, ends the others' work.
        left.clear()


def _populate(stream: memoryview, start: int, nbytes: int) -> None:
    mapped = stream.obj
    if not isinstance(mapped, mmap.mmap):
        return
    begin = start - start % mmap.PAGESIZE
    # A kernel that knows no such advice maps the pages as they are read.
    with contextlib.suppress(OSError):
        for at in range(begin, start + nbytes, POPULATE_BYTES):
            mapped.madvise(MADV_POPULATE_READ, at, min(POPULATE_BYTES, start + nbytes - at))
