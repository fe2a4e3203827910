"""What this machine has for whole weight versions: memory, large and page-aligned, and cores."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.weights.transport import Lender


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


class Recycled:
    """Buffers for one version after the other, each given out again once nothing refers to it any more.

    A model's worth of fresh pages costs more than the bytes of a difference that are written to them. Holds on to
    `most` buffers. They are of `lender`'s memory where one is given and has any, and then not given out again while
    others on this machine look at them.
    """

    def __init__(self, most: int = 2, lender: Lender | None = None) -> None:
        self._most = most
        self._lender = lender
        self._held: list[mmap.mmap] = []

    def spare(self, nbytes: int) -> memoryview | None:
        """One that was given out before, where nothing refers to it any more; its content is anything."""
        for mapped in self._held:
            if len(mapped) == nbytes and _is_free(mapped):
                view = memoryview(mapped)
                if self._lender is None or self._lender.claim(view):
                    return view
                view.release()
        return None

    def buffer(self, nbytes: int) -> memoryview:
        """A writable buffer of `nbytes`, whose content is anything."""
        if (spare := self.spare(nbytes)) is not None:
            return spare
        self._held = [mapped for mapped in self._held if not _is_free(mapped)]
        buffer = (self._lender.buffer(nbytes) if self._lender is not None else None) or host_buffer(nbytes)
        if isinstance(buffer.obj, mmap.mmap) and len(self._held) < self._most:
            self._held.append(buffer.obj)
        return buffer

    def clear(self) -> None:
        """Gives all of them up; those in use live on as long as they are."""
        self._held.clear()


def _is_free(mapped: mmap.mmap) -> bool:
    """Whether no view of it is left: memory that is referred to can't be resized, even to the size that it has."""
    try:
        mapped.resize(len(mapped))
    except (BufferError, SystemError, ValueError, OSError, TypeError):
        return False
    return True


def usable_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
