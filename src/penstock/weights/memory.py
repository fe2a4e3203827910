"""What this machine has for whole weight versions: memory, large and page-aligned, and cores."""

from __future__ import annotations

import gc
import math
import mmap
import os
from pathlib import Path
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
        self.littered = False
        """A pull was cut: it leaves a task group and its error, which refer to each other and to what was staged."""

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
        spare = self.spare(nbytes)
        if spare is None and self.littered:
            gc.collect()
            spare = self.spare(nbytes)
            self.littered = spare is None
        if spare is not None:
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
    """That this process may run on, and for which its container has processor time: more threads share no more of it,
    and only take each other's turns and caches."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))))


def _quota(groups: Path, root: Path) -> float:
    """Cores' worth of processor time by the least quota on the way to this process's cgroup; infinite without one.

    Of cgroups v2 (`cpu.max`) or v1 (`cpu.cfs_quota_us`). Within a container `groups` may name a path of the host's,
    which is not to be seen there; its own quota then stands at the root.
    """
    found = math.inf
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            found = min(found, _quota_of(group))
            if group == top:
                break
            group = group.parent
    return found


def _quota_of(group: Path) -> float:
    """Cores; infinite where nothing is said of them. v1 says -1 for that, v2 "max"."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota_us, period_us = " ".join((group / name).read_text() for name in names).split()
            if int(quota_us) > 0:
                return int(quota_us) / int(period_us)
        except (OSError, ValueError):
            continue
    return math.inf
