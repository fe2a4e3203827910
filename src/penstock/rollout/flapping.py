"""Agents that come and go too quickly: decides how long one waits, after its hello, before it gets weights and work.

Each join costs a pull of the weights and a prefill for each sample, and a machine that keeps dying gives nothing back.
An agent that was lost soon after it came counts as one quick end; the first few are free, and each one more doubles
the wait. What left in good order does not count: that was somebody's decision. Refuses to know why it ended.
Pure: names and `now` in, seconds out.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["FlapConfig", "Flapping"]

NAMES_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class FlapConfig:
    quick_s: float = 60.0
    """Lost sooner than this after its hello is a quick end."""
    free: int = 2
    """Quick ends without a wait: accidents happen, and a restarted network takes everyone down once or twice."""
    first_s: float = 2.0
    """The first wait; doubled with each further quick end."""
    most_s: float = 60.0
    """The longest wait; 0 lets everyone in at once."""
    forget_s: float = 600.0
    """After so long without a quick end all of them are forgotten."""


@dataclass(slots=True)
class _Record:
    quick_ends: int
    last_end: float


class Flapping:
    """Quick ends by name. At most `NAMES_REMEMBERED` names, the one heard of least recently goes first."""

    def __init__(self, config: FlapConfig) -> None:
        self._config = config
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def quick_ends(self, name: str, now: float) -> int:
        """How many still count."""
        record = self._records.get(name)
        if record is None:
            return 0
        if now - record.last_end > self._config.forget_s:
            del self._records[name]
            return 0
        return record.quick_ends

    def hold_off_s(self, name: str, now: float) -> float:
        """Seconds that an agent of this name waits for work from now on."""
        over = self.quick_ends(name, now) - self._config.free
        if over <= 0:
            return 0.0
        # Bounded before the power is taken: a name may flap for weeks.
        return min(self._config.first_s * 2.0 ** min(over - 1, 64), self._config.most_s)

    def lost(self, name: str, came_at: float, held_off_s: float, now: float) -> None:
        """One that came at `came_at` was lost; the time that it was made to wait is not part of its life.

        Several of one name that are lost together, as when their machine dies, are one quick end.
        """
        if now - came_at - held_off_s >= self._config.quick_s:
            return
        ends = self.quick_ends(name, now)
        record = self._records.pop(name, None) or _Record(0, float("-inf"))
        if came_at >= record.last_end:
            record.quick_ends = ends + 1
        record.last_end = now
        self._records[name] = record
        if len(self._records) > NAMES_REMEMBERED:
            self._records.popitem(last=False)
