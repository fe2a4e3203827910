"""The greatest of what was noted within a while: what a number, a price or a count has been lately.

Whoever follows the greatest of the last while, and not the newest, goes up at once and comes down late, so that what
swings within that while changes nothing.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Lately"]


class Lately:
    """Keeps only what may yet be the greatest: newer and smaller ones behind older and greater ones."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float]] = deque()

    def note(self, value: float, now: float) -> None:
        """To be called again and again while it holds."""
        while self._kept and self._kept[-1][1] <= value:
            self._kept.pop()
        self._kept.append((now, value))

    def most(self, since: float) -> float | None:
        """None where nothing was noted from then on. Later calls may not ask for what was before."""
        while self._kept and self._kept[0][0] < since:
            self._kept.popleft()
        return self._kept[0][1] if self._kept else None
