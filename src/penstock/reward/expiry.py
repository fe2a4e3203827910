"""Time-outs of many tasks by one timer: a task that is past its time is cancelled, and can ask whether that was why.

`asyncio.timeout` sets a timer for each use, and nearly all of them are taken down unused. Here tasks with the same
time-out stand in one lane, in the order in which they end, so that a lane needs one timer, set anew about once in its
time-out. Decides nothing but who is late; what that means is the caller's.
"""

from __future__ import annotations

import asyncio

__all__ = ["Expiry"]


class _Lane:
    __slots__ = ("ends_at", "timer")

    def __init__(self) -> None:
        self.ends_at: dict[asyncio.Task[object], float] = {}
        """Who is under way, earliest end first."""
        self.timer: asyncio.TimerHandle | None = None


class Expiry:
    """Time-outs on one event loop. A task is in it at most once: `begin`, then `end` in any case.

    As with `asyncio.timeout`, a cancellation from elsewhere at the same time stays one: `was_late` takes the time-out's
    own back and says whether nothing else is left.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lanes: dict[float, _Lane] = {}
        self._late: set[asyncio.Task[object]] = set()

    def begin(self, task: asyncio.Task[object], timeout_s: float) -> None:
        """From now on `task` is cancelled once `timeout_s` seconds have passed."""
        lane = self._lanes.get(timeout_s)
        if lane is None:
            lane = self._lanes[timeout_s] = _Lane()
        ends_at = lane.ends_at[task] = self._loop.time() + timeout_s
        if lane.timer is None:
            lane.timer = self._loop.call_at(ends_at, self._look, timeout_s)

    def end(self, task: asyncio.Task[object], timeout_s: float) -> None:
        """`task` has left what was timed."""
        lane = self._lanes.get(timeout_s)
        if lane is not None:
            lane.ends_at.pop(task, None)
        if self._late and task in self._late:  # nobody asked: what was timed has swallowed the cancellation
            self._late.discard(task)
            task.uncancel()

    def was_late(self, task: asyncio.Task[object], cancelling: int) -> bool:
        """Whether a cancellation of `task` was its time-out alone; `cancelling` is what it had at `begin`."""
        if task not in self._late:
            return False
        self._late.discard(task)
        return task.uncancel() <= cancelling

    def close(self) -> None:
        """Cancels the timers."""
        for lane in self._lanes.values():
            if lane.timer is not None:
                lane.timer.cancel()
        self._lanes.clear()

    def _look(self, timeout_s: float) -> None:
        lane = self._lanes[timeout_s]
        now, lane.timer = self._loop.time(), None
        while lane.ends_at:
            task = next(iter(lane.ends_at))
            ends_at = lane.ends_at[task]
            if ends_at > now:
                lane.timer = self._loop.call_at(ends_at, self._look, timeout_s)
                return
            del lane.ends_at[task]
            self._late.add(task)
            task.cancel()
        del self._lanes[timeout_s]
