"""The base of the next difference, copied ahead to where the next version will be staged.

A difference changes one weight in a hundred. Copying the base is most of what applying it costs, and moves three times
the model's bytes through the machine's memory; so it is done between two versions, when nobody waits, and the
difference is then applied in place.

    nothing -> waiting for memory -> copying (the first `nbytes` are there) -> whole
        any of them -> taken, or dropped

and what holds:

- Memory is written to only while nobody else refers to it (`Recycled.spare`); until it is taken this has its one view.
- The first `nbytes` are those of the base, which is never changed. `take` ends the copying before it says how many
  they are, says so for that very base alone, and says it once: whoever has taken the memory may leave it half-changed,
  by a pull that failed or was cut for a newer version, and then it is memory like any other.
- Nothing rests on the copy being right. Every tensor's checksum is verified; what does not verify is applied once
  more, to a copy made then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Ahead"]

PIECE_BYTES = 4 << 20
"""Copied at once. Whoever takes the memory waits for no more than that."""
LOOK_S = 0.2
"""Between two looks for memory that has become free: an engine may keep the version before for a while."""


class Ahead:
    """`begin` once a version serves, `take` when the next one comes. All of it is called by one thread.

    `spare` gives memory of so many bytes that nobody refers to, or None for as long as there is none.
    """

    def __init__(self, spare: Callable[[int], memoryview | None]) -> None:
        self._spare = spare
        self._base: memoryview | None = None
        self._buffer: memoryview | None = None
        self._nbytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, base: memoryview) -> None:
        """Copies `base` on a thread, at half of its speed, so that what else runs here has the memory's other half."""
        self.drop()
        self._base = base
        self._thread = threading.Thread(target=self._copy, args=(base,), name="weight-ahead", daemon=True)
        self._thread.start()

    def take(self, base: memoryview | None) -> tuple[memoryview, int] | None:
        """The memory, and how many of its first bytes are those of `base`; None where it has none."""
        self._end()
        buffer, nbytes = self._buffer, self._nbytes if base is not None and base is self._base else 0
        self.drop()
        return None if buffer is None else (buffer, nbytes)

    def drop(self) -> None:
        """Gives memory and base up."""
        self._end()
        self._base = self._buffer = None
        self._nbytes = 0

    def wait(self, timeout_s: float) -> bool:
        """Whether all of the base is there, within that time."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._base is not None and self._nbytes == len(self._base)

    def _end(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join()
            self._stop.clear()

    def _copy(self, base: memoryview) -> None:
        import numpy as np

        while (buffer := self._spare(len(base))) is None:
            if self._stop.wait(LOOK_S):
                return
        self._buffer = buffer
        # NumPy's copy lets other threads run meanwhile.
        into, source = np.frombuffer(buffer, np.uint8), np.frombuffer(base, np.uint8)
        pause_s = 0.0
        while self._nbytes < len(base) and not self._stop.wait(pause_s):
            began = time.perf_counter()
            part = slice(self._nbytes, self._nbytes + PIECE_BYTES)
            into[part] = source[part]
            self._nbytes = min(part.stop, len(base))
            pause_s = time.perf_counter() - began
