"""What this machine has for whole weight versions: memory, large and page-aligned, and cores."""

from __future__ import annotations

import mmap
import os


def host_buffer(nbytes: int) -> memoryview:
    """A writable buffer of `nbytes` zero bytes.

    Private anonymous pages, huge ones where the system has them: filling fresh memory costs mostly page faults, and
    2 MiB pages have 512 times fewer of them.
    """
    if nbytes == 0:
        return memoryview(bytearray())
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)


def usable_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
