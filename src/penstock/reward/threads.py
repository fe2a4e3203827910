"""Threads for synchronous reward functions, so that one that waits does not stop the loop.

The edge of `roster`, as `processes` is. A thread can't be killed: one that is past its time limit is given up, and
another takes its place. When `threads` of them are given up and still busy, the pool stops with a RewardError instead
of starving without a word.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from penstock.errors import RewardError
from penstock.reward.faults import FaultLog
from penstock.reward.roster import QueueFull, Roster
from penstock.sample import Sample, Unscored

__all__ = ["VerifierThreads"]

MAX_WAITING = 65_536


class VerifierThreads:
    """Calls `function(sample)` on daemon threads. Lives on the asyncio loop of its first call."""

    def __init__(
        self,
        function: Callable[[Sample], Any],
        threads: int,
        timeout_s: float,
        max_waiting: int = MAX_WAITING,
        faults: FaultLog | None = None,
    ) -> None:
        """`faults` gets what the function raises."""
        self._function = function
        self._faults = FaultLog(None) if faults is None else faults
        self._threads = threads
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._roster = Roster(timeout_s, max_waiting)
        self._inboxes: dict[int, queue.SimpleQueue[tuple[int, Sample] | None]] = {}
        self._waiters: dict[int, tuple[asyncio.Future[Any], Sample]] = {}
        self._done: deque[tuple[int, int, Any]] = deque()
        self._notified = False
        self._given_up: set[int] = set()
        self._numbers = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failure: RewardError | None = None
        self._closed = False

    async def call(self, sample: Sample) -> Any:
        """What the function returned, or Unscored where it raised or took too long. Raises RewardError."""
        if self._closed:
            raise RewardError("the scorer is closed")
        if self._failure is not None:
            raise self._failure
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for _ in range(self._threads):
                self._start_thread()
        number = next(self._numbers)
        try:
            self._roster.submit(number)
        except QueueFull:
            raise RewardError(f"more than {self._max_waiting} samples wait for the reward function") from None
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiters[number] = (future, sample)
        self._assign()
        try:
            return await future
        finally:
            # A call that runs goes on, for its time limit at most; its result is dropped.
            if self._waiters.pop(number, None) is not None:
                self._roster.withdraw(number)

    def close(self) -> None:
        """Idle threads end; busy ones end after their call, or with the program."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for inbox in self._inboxes.values():
            inbox.put(None)
        for future, _ in self._waiters.values():
            if not future.done():
                future.set_result(Unscored("the scorer was closed before the sample was scored"))

    def _start_thread(self) -> None:
        number = next(self._numbers)
        inbox: queue.SimpleQueue[tuple[int, Sample] | None] = queue.SimpleQueue()
        self._inboxes[number] = inbox
        name = f"penstock-reward-{number}"
        threading.Thread(target=self._work, args=(number, inbox), name=name, daemon=True).start()
        self._roster.worker_ready(number)

    def _work(self, worker: int, inbox: queue.SimpleQueue[tuple[int, Sample] | None]) -> None:
        while (task := inbox.get()) is not None:
            job, sample = task
            result: Any
            try:
                result = self._function(sample)
            except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:  # noqa: BLE001
                # Whatever a reward function raises is its sample's cause, and no reason for the thread to end.
                result = Unscored(self._faults.cause(error, sample))
            self._done.append((worker, job, result))
            if not self._notified:
                self._notified = True
                if not self._notify():
                    return

    def _notify(self) -> bool:
        """Wakes the loop once for all results at hand. False where the loop is gone, and nobody waits."""
        assert self._loop is not None, "threads start with the loop"
        try:
            self._loop.call_soon_threadsafe(self._collect)
        except RuntimeError:  # the loop was closed while the function ran
            return False
        return True

    def _collect(self) -> None:
        self._notified = False  # first, so that a result that comes while this runs wakes the loop again
        while self._done:
            worker, job, result = self._done.popleft()
            if worker in self._given_up:
                self._given_up.remove(worker)
                self._inboxes.pop(worker).put(None)
                _discard(result)
            elif self._roster.finish(worker, job):
                self._resolve(job, result)
        self._assign()

    def _assign(self) -> None:
        if self._closed or self._failure is not None:
            return
        loop = asyncio.get_running_loop()
        for worker, job in self._roster.assign(loop.time()):
            self._inboxes[worker].put((job, self._waiters[job][1]))
        deadline = self._roster.next_deadline()
        if deadline is not None and self._timer is None:
            self._timer = loop.call_at(deadline, self._end_overdue)

    def _end_overdue(self) -> None:
        self._timer = None
        for worker, job in self._roster.overdue(asyncio.get_running_loop().time()):
            self._resolve(job, Unscored(f"the reward function took longer than {self._timeout_s:g} s"))
            self._give_up(worker)
        self._assign()

    def _give_up(self, worker: int) -> None:
        """The thread goes on for as long as its function does; another takes its place, up to a limit."""
        self._given_up.add(worker)
        if len(self._given_up) < self._threads:
            self._start_thread()
            return
        self._failure = RewardError(
            f"{len(self._given_up)} calls of the reward function never returned and hold their threads; "
            "set reward.mode='process', where such calls are killed"
        )
        for future, _ in self._waiters.values():
            if not future.done():
                future.set_exception(self._failure)
        self._waiters.clear()

    def _resolve(self, job: int, result: Any) -> None:
        waiter = self._waiters.pop(job, None)
        if waiter is not None and not waiter[0].done():
            waiter[0].set_result(result)
        else:
            _discard(result)


def _discard(result: Any) -> None:
    """A coroutine that nobody will await is closed, so that Python doesn't complain of it much later."""
    if inspect.iscoroutine(result):
        result.close()
