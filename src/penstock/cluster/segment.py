"""Shared memory without a name: anonymous files that the kernel frees with the last descriptor or mapping.

So nothing is left behind by whoever dies, SIGKILL included. A writer fills a segment once and passes its descriptor;
readers map it privately: they may write to what they see, and nobody else sees it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

ALIGN_BYTES = 64
_MAX_BUFFERS = 512
"""Of one system call, below IOV_MAX."""


class Segment:
    """An anonymous file that buffers were written to. Closes its descriptor when it is forgotten."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
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
        self.fd = _anonymous_file()
        _write_all(self.fd, [piece for piece in pieces if piece.nbytes])

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


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-batch", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="penstock-batch-") as file:  # has no name either
        return os.dup(file.fileno())


def _write_all(fd: int, pieces: list[memoryview]) -> None:
    while pieces:
        written = os.writev(fd, pieces[:_MAX_BUFFERS])
        while pieces and written >= pieces[0].nbytes:
            written -= pieces.pop(0).nbytes
        if written:
            pieces[0] = pieces[0][written:]
