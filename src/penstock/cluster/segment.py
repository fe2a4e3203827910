"""Shared memory without a name: anonymous files that the kernel frees with the last descriptor or mapping.

So nothing is left behind by whoever dies, SIGKILL included. A writer fills a segment once and passes its descriptor;
readers map it privately: they may write to what they see, and nobody else sees it.

Fresh pages cost far more than a copy, so a `SegmentPool` writes again to files that nobody looks at. What travels is a
descriptor with a shared lock (flock(2)), which belongs to the open file itself: the kernel holds it while the
descriptor is in a socket, open anywhere, or mapped anywhere, and drops it when the last of these is gone, be it that
the reader was killed. A file is written to again only after an exclusive lock was had.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Sequence

ALIGN_BYTES = 64
POOL_BYTES = 512 * 2**20
"""Of files kept for other messages, besides those larger than this alone, which are never kept. Two calls of 64 MB to
each of four workers fit, one of them still looked at."""
POOL_FILES = 64
_MAX_BUFFERS = 512
"""Of one system call, below IOV_MAX."""


class SegmentPool:
    """Files to write segments to. May be called from any thread; memory goes once it is closed or forgotten."""

    def __init__(self, most_bytes: int = POOL_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: list[_File] = []
        """The one used last at the end, those that are looked at among them."""
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Of all files that are kept."""
        with self._lock:
            return sum(file.size for file in self._kept)

    def take(self, size: int) -> tuple[_File, int]:
        """A file for `size` bytes, and a locked descriptor, to be read by, that keeps it from being given again."""
        with self._lock:
            # One of about that size, so that large ones are there for large messages; a shorter one grows.
            fitting = [file for file in self._kept if size <= 2 * file.size <= 4 * size]
            for file in sorted(fitting, key=lambda file: (file.size < size, abs(file.size - size))):
                if (lease := file.claimed()) is not None:
                    self._kept.remove(file)
                    self._keep(file, size)
                    return file, lease
        file = _File()
        lease = file.claimed()
        assert lease is not None, "nobody else has a file that was just made"
        with self._lock:
            self._keep(file, size)
        return file, lease

    def close(self) -> None:
        """Keeps nothing from now on; what is looked at lives as long as it is."""
        with self._lock:
            self._closed = True
            self._kept = []

    def _keep(self, file: _File, size: int) -> None:
        file.size = max(file.size, size)
        if self._closed or not _LEASES or file.size > self._most_bytes:
            return
        self._kept.append(file)
        while len(self._kept) > POOL_FILES or sum(kept.size for kept in self._kept) > self._most_bytes:
            self._kept.pop(0)


class _File:
    """An anonymous file. Closes its descriptor when it is forgotten."""

    def __init__(self) -> None:
        self.size = 0
        self.fd = -1
        self.fd = _anonymous_file()

    def claimed(self) -> int | None:
        """A descriptor of its own with a shared lock, if nobody else has one."""
        if not _LEASES:
            return os.dup(self.fd)
        lease = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lease, fcntl.LOCK_SH)
        except BlockingIOError:
            os.close(lease)
            return None
        except BaseException:
            os.close(lease)
            raise
        return lease

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Segment:
    """Buffers written to an anonymous file. Closes its descriptor when it is forgotten."""

    def __init__(self, buffers: Sequence[memoryview], pool: SegmentPool) -> None:
        """Writes the buffers one after another, each at a multiple of `ALIGN_BYTES`; `places` says where."""
        self.fd = -1
        self.places: list[tuple[int, int]] = []
        self.size = 0
        pieces: list[memoryview] = []
        for buffer in buffers:
            self.places.append((self.size, buffer.nbytes))
            gap = -buffer.nbytes % ALIGN_BYTES
            pieces += [buffer, _GAP[:gap]] if gap else [buffer]
            self.size += buffer.nbytes + gap
        file, self.fd = pool.take(self.size)
        _write_all(file.fd, [piece for piece in pieces if piece.nbytes])

    def views(self) -> list[memoryview]:
        """The buffers as they lie in the segment."""
        return views_of(self.fd, self.size, self.places)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def views_of(fd: int, size: int, places: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Maps a segment privately; the mapping lives as long as the views. Raises ValueError where it is too short."""
    if os.fstat(fd).st_size < size:
        raise ValueError(f"a shared segment is {os.fstat(fd).st_size} bytes long and should be {size}")
    if size == 0:
        return [memoryview(b"") for _ in places]
    whole = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY))
    return [whole[start : start + length] for start, length in places]


_GAP = memoryview(bytes(ALIGN_BYTES))
_LEASES = sys.platform == "linux" and os.path.isdir("/proc/self/fd")
"""Whether a file without a name can be opened a second time."""


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-batch", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="penstock-batch-") as file:  # has no name either
        return os.dup(file.fileno())


def _write_all(fd: int, pieces: list[memoryview]) -> None:
    at = 0
    while pieces:
        written = os.pwritev(fd, pieces[:_MAX_BUFFERS], at)
        at += written
        while pieces and written >= pieces[0].nbytes:
            written -= pieces.pop(0).nbytes
        if written:
            pieces[0] = pieces[0][written:]
