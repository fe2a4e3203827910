"""Memory of versions that a store has collected, used again for those to come: fresh pages cost far more than a copy.

Decides which memory may be written to; a lender says whether somebody still looks at it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from penstock.weights.memory import host_buffer
from penstock.weights.transport import Lender

__all__ = ["Spares"]

MOST = 2
"""One for the next version, and one that slow readers still look at."""


class Spares:
    """May be called from any thread. What it lets go of lives on for as long as a puller looks at it."""

    def __init__(self, lenders: Iterable[Lender]) -> None:
        self._lenders: Sequence[Lender] = tuple(lenders)
        self._makers = [lender for lender in self._lenders if lender.makes_memory]
        self._lock = threading.Lock()
        self._held: list[memoryview] = []

    def put(self, stream: memoryview) -> None:
        """Memory of a version that nobody can ask for any more."""
        with self._lock:
            self._held = [*self._held, stream][-MOST:]

    def buffer(self, nbytes: int) -> memoryview:
        """Memory to write a version of `nbytes` to, used or fresh; a lender's own where one has any."""
        with self._lock:
            # A model does not change its size: memory of another is of no more use.
            self._held = [spare for spare in self._held if spare.nbytes == nbytes]
            made = self._claimed([spare for spare in self._held if self._is_made(spare)])
        # Before a spare that is no lender's: that there was none of its memory once says nothing of today.
        for maker in self._makers if made is None else ():
            if (made := maker.buffer(nbytes)) is not None:
                break
        with self._lock:
            if made is None:
                made = self._claimed(self._held)
            else:
                # What stood in for it would never be asked for again.
                self._held = [spare for spare in self._held if self._is_made(spare)]
        return host_buffer(nbytes) if made is None else made

    def _is_made(self, spare: memoryview) -> bool:
        """Whether it is of the memory that a lender makes."""
        return any(maker.place(spare) for maker in self._makers)

    def _claimed(self, spares: Sequence[memoryview]) -> memoryview | None:
        """The first that nobody looks at, for the caller to write to; the lock is held."""
        for spare in spares:
            if all(lender.claim(spare) for lender in self._lenders):
                self._held = [other for other in self._held if other is not spare]
                return spare
        return None
