"""When an engine that died by accident is replaced, and when no longer. Pure: deaths and `now` go in."""

from __future__ import annotations

FIRST_WAIT_S = 1.0
"""Doubled with each death: what kills engines at once must not keep the machine busy starting them."""


class Restarts:
    """Allows `most` replacements in a run, each after a longer wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._deaths = 0
        self._due: list[float] = []

    def died(self, now: float) -> float | None:
        """Seconds until the replacement is due; None where there will be none."""
        if self._deaths >= self._most:
            return None
        wait_s = FIRST_WAIT_S * 2**self._deaths
        self._deaths += 1
        self._due.append(now + wait_s)
        return wait_s

    def due(self, now: float) -> bool:
        """Whether a replacement is to be started now; each is asked for once."""
        if self._due and now >= self._due[0]:
            del self._due[0]
            return True
        return False
