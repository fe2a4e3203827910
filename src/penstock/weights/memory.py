"""What this machine has for whole weight versions: memory, large and page-aligned, and cores."""

from __future__ import annotations

import gc
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import WeightError

if TYPE_CHECKING:
    from penstock.weights.transport import Lender

GROUPS, GROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
MOUNTS = Path("/proc/self/mountinfo")
BESIDE_BYTES = 64 << 20
"""That is to be left beside a version, or as much as itself where it is smaller: for chunks on their way to it."""

_ACCOUNTS = (
    ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""Of cgroups v2 and v1: limit, usage, and what of that can be taken back, as `memory.stat` names it."""


class NoMemory(WeightError):
    """There is no memory for a version."""


def check_room(nbytes: int) -> None:
    """Raises NoMemory where so much is not left. The system would hand it out all the same, and kill whoever fills
    it."""
    left = memory_left()
    if nbytes + min(nbytes, BESIDE_BYTES) > left:
        raise NoMemory(f"a version of {nbytes >> 20} MiB has no room in the {int(left) >> 20} MiB that are left here")


def host_buffer(nbytes: int) -> memoryview:
    """A writable buffer of `nbytes` zero bytes. Raises NoMemory where this machine, or its container, lacks them.

    Private anonymous pages, huge ones where the system has them: filling fresh memory costs mostly page faults, and
    2 MiB pages have 512 times fewer of them.
    """
    if nbytes == 0:
        return memoryview(bytearray())
    check_room(nbytes)
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
        """One that was given out before, where nothing refers to it any more; its content is anything. Instead of one
        that is not the lender's, one that is, if it has any by now."""
        spare = self._given_before(nbytes)
        if spare is None or self._lender is None:
            return spare
        if self._is_lent(spare):
            # What stood in for it would never be asked for again.
            self._held = [mapped for mapped in self._held if self._is_made(mapped) or not _is_free(mapped)]
            return spare
        # That it had no memory once says nothing of today.
        lent = self._lender.buffer(nbytes)
        if lent is None:
            return spare
        spare.release()
        return self._holding(lent)

    def buffer(self, nbytes: int) -> memoryview:
        """A writable buffer of `nbytes`, whose content is anything."""
        # Of another size it is of no more use, and would count as memory that is not left.
        self._held = [mapped for mapped in self._held if len(mapped) == nbytes or not _is_free(mapped)]
        spare = self.spare(nbytes)
        if spare is None and self.littered:
            gc.collect()
            spare = self.spare(nbytes)
            self.littered = spare is None
        if spare is not None:
            return spare
        lent = self._lender.buffer(nbytes) if self._lender is not None else None
        return self._holding(host_buffer(nbytes) if lent is None else lent)

    def _given_before(self, nbytes: int) -> memoryview | None:
        """One to which nothing refers, the lender's first."""
        other = None
        for mapped in self._held:
            if len(mapped) == nbytes and _is_free(mapped):
                view = memoryview(mapped)
                if self._lender is None or (self._is_lent(view) and self._lender.claim(view)):
                    return view
                if other is None and not self._is_lent(view):
                    other = view
                else:
                    view.release()
        return other

    def _is_lent(self, view: memoryview) -> bool:
        return self._lender is not None and bool(self._lender.place(view))

    def _is_made(self, mapped: mmap.mmap) -> bool:
        with memoryview(mapped) as view:
            return self._is_lent(view)

    def _holding(self, buffer: memoryview) -> memoryview:
        """A new one, in place of those that are free."""
        self._held = [mapped for mapped in self._held if not _is_free(mapped)]
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


def lies_in_memory(folder: Path) -> bool:
    """Whether what is written there takes memory and no disk, as far as the system says. Raises OSError where there is
    no such folder."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    # ID parent MAJOR:MINOR root place options... - TYPE source options (proc(5))
    return any(mount[2] == number and mount[mount.index("-") + 1] in ("tmpfs", "ramfs") for mount in mounts)


def usable_cores() -> int:
    """That this process may run on, and for which its container has processor time: more threads share no more of it,
    and only take each other's turns and caches."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota(GROUPS, GROUP_ROOT))))


def _quota(groups: Path, root: Path) -> float:
    """Cores' worth of processor time by the least quota on the way to this process's cgroup; infinite without one.

    Of cgroups v2 (`cpu.max`) or v1 (`cpu.cfs_quota_us`).
    """
    return min(map(_quota_of, _own_groups("cpu", groups, root)), default=math.inf)


def _own_groups(controller: str, groups: Path, root: Path) -> Iterator[Path]:
    """The folders of this process's cgroups, v2 or v1, from its own up to the root.

    Within a container `groups` may name a path of the host's, which is not to be seen there; its own limits then stand
    at the root.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            yield group
            if group == top:
                break
            group = group.parent


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


def memory_left() -> float:
    """Bytes that this process can still fill: what the machine has, or the limits of its container leave, whichever is
    less. Infinite where the system says nothing of it."""
    return min(_available(Path("/proc/meminfo")), _allowed(GROUPS, GROUP_ROOT))


def _available(meminfo: Path) -> float:
    try:
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    return math.inf


def _allowed(groups: Path, root: Path) -> float:
    """Bytes that the cgroups on the way to this process's own leave it."""
    return min(map(_left_of, _own_groups("memory", groups, root)), default=math.inf)


def _left_of(group: Path) -> float:
    """Its limit less what it holds and the system can't take back; infinite where it has no limit. Of v2 or v1."""
    for limit, usage, reclaimable in _ACCOUNTS:
        try:
            most, used = (int((group / name).read_text()) for name in (limit, usage))
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return max(0, most - used + sum(int(stat.get(name, 0)) for name in reclaimable))
        except (OSError, ValueError):
            continue
    return math.inf
