"""How sure a strike is: decides how many in a row set a sample aside, on days when machines die by themselves.

Three machines that die under one sample are its doing where machines live; where they die all the time it is chance,
and with thousands of samples somebody meets it three times. What tells the two apart is machines that die with nobody
to blame: every sample of theirs had got on since it came, or their engine was broken, or none had a strike before,
which whoever kills machines has from its second one on. A few of those are an ordinary day, and change nothing.
Pure: deaths and `now` in, a number out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

__all__ = ["DEATHS_KEPT", "Blame"]

MEMORY_S = 60.0
"""For which a death with nobody to blame is remembered."""
ORDINARY = 4
"""So many of them in that time make one strike more be asked for; fewer, none."""

DEATHS_KEPT = 64
"""More of them change nothing: a sample is set aside at its twelfth loss whoever else dies."""


class Blame:
    """`max_strikes`: on an ordinary day."""

    def __init__(self, max_strikes: int) -> None:
        self._max_strikes = max_strikes
        self._nobodys: deque[float] = deque(maxlen=DEATHS_KEPT)

    def died_by_itself(self, now: float) -> None:
        """A machine was lost, and no sample of it is a suspect, or none was one before."""
        self._nobodys.append(now)

    def found_one(self) -> None:
        """A sample is a suspect for the second time: its first machine may not have died by itself."""
        if self._nobodys:
            self._nobodys.pop()

    def restore(self, deaths: Iterable[float]) -> None:
        """Those that an earlier manager had seen, on this one's clock."""
        self._nobodys.extend(deaths)

    def deaths(self) -> Iterator[float]:
        """What is remembered, for who comes after."""
        return iter(self._nobodys)

    def strikes_needed(self, now: float) -> int:
        while self._nobodys and now - self._nobodys[0] > MEMORY_S:
            self._nobodys.popleft()
        return self._max_strikes + len(self._nobodys) // ORDINARY
