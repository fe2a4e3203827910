"""Whose turn it is to call a function: concurrency and rate for each key, highest priority first.

Decides who may go; `now` is passed in. Waiters hand in a `wake` and are woken with their turn already taken for them,
or to look again, since the limits have changed. Knows neither loops nor threads nor clocks, but takes a lock, since
callers come from all of them.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable, Hashable

from penstock.reward.pacer import Meter

__all__ = ["Turn", "Turns"]


class Turn:
    """One waiter. `granted` once its place is taken; `left` once it gave up."""

    __slots__ = ("granted", "key", "left", "number", "priority", "wake")

    def __init__(self, key: Hashable, priority: float, number: int, wake: Callable[[], object]) -> None:
        self.key = key
        self.priority = priority
        self.number = number
        self.wake = wake
        self.granted = False
        self.left = False

    def __lt__(self, other: Turn) -> bool:
        return (-self.priority, self.number) < (-other.priority, other.number)


class _Key:
    __slots__ = ("in_flight", "meter", "waiting")

    def __init__(self, meter: Meter | None) -> None:
        self.in_flight = 0
        self.meter = meter
        self.waiting: list[Turn] = []


class Turns:
    SWEEP = 256
    """Keys known before idle ones are first looked for; doubled with what is left, so that looking stays cheap."""

    def __init__(self, concurrency: int | None, requests_per_minute: float | None, burst: int | None) -> None:
        self.concurrency = concurrency
        self.requests_per_minute = requests_per_minute
        self.burst = burst
        self.limited = concurrency is not None or requests_per_minute is not None
        self.waiting = 0
        self._keys: dict[Hashable, _Key] = {}
        self._numbers = itertools.count()
        self._sweep_at = self.SWEEP
        self._lock = threading.Lock()

    def redeclare(
        self, concurrency: int | None, requests_per_minute: float | None, burst: int | None, now: float
    ) -> None:
        """Takes over other limits from now on. Who waits goes on waiting in its place; what was taken still counts."""
        with self._lock:
            self.concurrency, self.requests_per_minute, self.burst = concurrency, requests_per_minute, burst
            self.limited = concurrency is not None or requests_per_minute is not None
            for entry in self._keys.values():
                fresh = self._meter()
                if entry.meter is not None and fresh is not None:
                    entry.meter.redeclare(fresh.limit, fresh.burst)
                else:
                    entry.meter = fresh
                self._grant(entry, now)
                for turn in entry.waiting:
                    with contextlib.suppress(RuntimeError):  # its loop was closed
                        turn.wake()  # it is woken at another time now

    def __len__(self) -> int:
        """Keys known."""
        return len(self._keys)

    def _meter(self) -> Meter | None:
        rate = self.requests_per_minute
        return None if rate is None else Meter(rate, self.burst or max(1.0, rate / 600))

    def _entry(self, key: Hashable, now: float) -> _Key:
        entry = self._keys.get(key)
        if entry is None:
            if len(self._keys) >= self._sweep_at:
                self._forget_idle(now)
            entry = self._keys[key] = _Key(self._meter())
        return entry

    def _forget_idle(self, now: float) -> None:
        for key, entry in list(self._keys.items()):
            if not entry.in_flight and not entry.waiting and (entry.meter is None or entry.meter.idle(now)):
                del self._keys[key]
        self._sweep_at = max(self.SWEEP, 2 * len(self._keys))

    def _may(self, entry: _Key, now: float) -> bool:
        if self.concurrency is not None and entry.in_flight >= self.concurrency:
            return False
        return entry.meter is None or entry.meter.ready_at(now) <= now

    def _go(self, entry: _Key, now: float) -> None:
        entry.in_flight += 1
        if entry.meter is not None:
            entry.meter.take(now)

    def take(self, key: Hashable, now: float) -> bool:
        """Takes a turn if there is one and nobody waits for it."""
        with self._lock:
            entry = self._entry(key, now)
            if entry.waiting or not self._may(entry, now):
                return False
            self._go(entry, now)
            return True

    def wait(self, key: Hashable, now: float, priority: float, wake: Callable[[], object]) -> Turn:
        """Joins the queue of a key."""
        with self._lock:
            entry = self._entry(key, now)
            turn = Turn(key, priority, next(self._numbers), wake)
            heapq.heappush(entry.waiting, turn)
            self.waiting += 1
            self._grant(entry, now)
            return turn

    def leave(self, turn: Turn, now: float) -> None:
        """Gives up waiting; or gives the turn back, if it was granted in the meantime."""
        with self._lock:
            turn.left = True
            entry = self._keys[turn.key]
            if turn.granted:
                entry.in_flight -= 1
                self._grant(entry, now)
            else:
                entry.waiting.remove(turn)
                heapq.heapify(entry.waiting)
                self.waiting -= 1

    def give_back(self, key: Hashable, now: float) -> None:
        """A turn is over."""
        with self._lock:
            entry = self._keys[key]
            entry.in_flight -= 1
            if entry.waiting:
                self._grant(entry, now)

    def hold(self, key: Hashable, now: float, seconds: float) -> None:
        """The service behind this key asks to be left alone for so long."""
        with self._lock:
            entry = self._entry(key, now)
            if entry.meter is not None:
                entry.meter.refused(now, seconds)

    def look(self, key: Hashable, now: float) -> float:
        """Grants what has become possible by time alone; returns when to look again (infinity: only on an event)."""
        with self._lock:
            entry = self._keys[key]
            self._grant(entry, now)
            full = self.concurrency is not None and entry.in_flight >= self.concurrency
            if not entry.waiting or full or entry.meter is None:
                return float("inf")
            return entry.meter.ready_at(now)

    def _grant(self, entry: _Key, now: float) -> None:
        while entry.waiting and self._may(entry, now):
            turn = heapq.heappop(entry.waiting)
            self.waiting -= 1
            turn.granted = True
            self._go(entry, now)
            try:
                turn.wake()
            except RuntimeError:  # its loop was closed: nobody waits there any more
                turn.left = True
                entry.in_flight -= 1
