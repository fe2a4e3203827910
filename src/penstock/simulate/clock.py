"""A virtual clock: what is due next, and when. Decides nothing but the order of events."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

__all__ = ["Clock"]


class Clock:
    """Runs callbacks in order of their time; those of one moment in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._due: list[float] = []
        """When those come that bring something about."""
        self._heap: list[tuple[float, int, Callable[[], None], bool]] = []
        self._numbers = itertools.count()

    @property
    def due_s(self) -> float:
        """When the next event comes that brings something about; infinity where none is to come."""
        return self._due[0] if self._due else math.inf

    def at(self, when_s: float, what: Callable[[], None], *, idle: bool = False) -> None:
        """A moment that has passed is now. `idle`: it may bring nothing about, however often it comes."""
        when_s = max(when_s, self.now)
        if not idle:
            heapq.heappush(self._due, when_s)
        heapq.heappush(self._heap, (when_s, next(self._numbers), what, idle))

    def after(self, delay_s: float, what: Callable[[], None], *, idle: bool = False) -> None:
        self.at(self.now + delay_s, what, idle=idle)

    def run(self, until: Callable[[], bool]) -> bool:
        """Until a condition holds after an event (True), or nothing is left to do (False)."""
        while self._heap:
            self.now, _, what, idle = heapq.heappop(self._heap)
            if not idle:
                # Both heaps go by time.
                heapq.heappop(self._due)
            self.events += 1
            what()
            if until():
                return True
        return False
