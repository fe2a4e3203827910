"""Threads that run sync calls which have a deadline: a caller can leave, the thread can't be stopped.

A call takes an idle thread or starts one, so nested calls never wait for each other. Decides only who runs; a thread
whose caller left is `abandoned` until its function returns, and past `MOST_ABANDONED` of them no more calls are taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.errors import RewardError

__all__ = ["MOST_ABANDONED", "Helpers", "TooLate"]

MOST_ABANDONED = 64
IDLE_S = 10.0
"""A thread with nothing to do for so long ends."""


class TooLate(Exception):
    """The function had not returned when its time was up."""


class _Work:
    __slots__ = ("abandoned", "context", "done", "error", "finished", "function", "value")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.context = contextvars.copy_context()
        self.done = threading.Lock()
        self.done.acquire()
        self.value: Any = None
        self.error: BaseException | None = None
        self.abandoned = False
        self.finished = False


class _Helper(threading.Thread):
    def __init__(self, owner: Helpers) -> None:
        super().__init__(daemon=True, name="penstock-helper")
        self.owner = owner
        self.work: _Work | None = None
        self.ready = threading.Lock()
        self.ready.acquire()

    def run(self) -> None:
        while self.ready.acquire(timeout=IDLE_S) or not self.owner.retire(self):
            work, self.work = self.work, None
            if work is None:
                continue
            try:
                work.value = work.context.run(work.function)
            except BaseException as error:  # noqa: BLE001 - carried to the caller, who raises it
                work.error = error
            self.owner.idle(self, work)
            work.done.release()
            del work


class Helpers:
    """All helper threads of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Helper] = []
        self.abandoned = 0

    def idle(self, helper: _Helper, work: _Work) -> None:
        """A helper has finished its work."""
        with self._lock:
            self._idle.append(helper)
            work.finished = True
            if work.abandoned:
                self.abandoned -= 1

    def retire(self, helper: _Helper) -> bool:
        """Whether a helper that found nothing to do may end; False where it has just been given work."""
        with self._lock:
            if helper in self._idle:
                self._idle.remove(helper)
                return True
            return False

    def begin(self, function: Callable[[], Any]) -> _Work:
        """Starts a function in a thread, with the caller's context variables.

        Raises:
            RewardError: too many earlier calls are still going on unheard.
        """
        if self.abandoned >= MOST_ABANDONED:
            raise RewardError(
                f"{self.abandoned} calls that nobody waits for any more still run in threads, which can't be stopped; "
                'run a function that can hang in processes: [reward] mode = "process"'
            )
        return self._start(function)

    def _start(self, function: Callable[[], Any]) -> _Work:
        work = _Work(function)
        with self._lock:
            helper = self._idle.pop() if self._idle else None
        if helper is None:
            helper = _Helper(self)
            helper.work = work
            helper.ready.release()
            helper.start()
        else:
            helper.work = work
            helper.ready.release()
        return work

    def leave(self, work: _Work) -> bool:
        """Nobody waits for it any more; whether it goes on unheard."""
        with self._lock:
            late = not work.finished
            if late and not work.abandoned:
                work.abandoned = True
                self.abandoned += 1
        return late

    def call(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """Runs a function in a thread and waits for it.

        Raises:
            TooLate: it had not returned after `timeout_s`; it goes on unheard.
            RewardError: too many earlier calls are still going on unheard.
        """
        work = self.begin(function)
        # Between the time-out and leaving it may have finished after all.
        if not work.done.acquire(timeout=max(0.0, timeout_s)) and self.leave(work):
            raise TooLate
        if work.error is not None:
            raise work.error
        return work.value

    async def call_async(self, function: Callable[[], Any]) -> Any:
        """Runs a function in a thread and awaits it; a caller that is cancelled leaves it, and it goes on unheard.

        Raises:
            RewardError: too many earlier calls are still going on unheard.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def end(value: Any, error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result((value, error))

        def run() -> None:
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:  # noqa: BLE001 - carried to the caller, who raises it
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(end, value, error)

        work = self.begin(run)
        try:
            value, error = await ended
        finally:
            self.leave(work)
        if error is not None:
            raise error
        return value

    def race(
        self,
        first: Callable[[], Any],
        second: Callable[[], Callable[[], Any] | None],
        after_s: float,
        timeout_s: float,
    ) -> Any:
        """Runs a function and, if it takes longer than `after_s`, what `second()` gives beside it; the first success
        counts. The one that lost goes on unheard.

        Raises:
            TooLate, RewardError: as `call`.
        """
        ends: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def end_of(function: Callable[[], Any]) -> Callable[[], None]:
            def run() -> None:
                try:
                    ends.put((function(), None))
                except BaseException as error:  # noqa: BLE001 - carried to the caller, who raises it
                    ends.put((None, error))

            return run

        ends_at = time.monotonic() + timeout_s
        works = [self.begin(end_of(first))]
        try:
            try:
                value, error = ends.get(timeout=max(0.0, min(after_s, timeout_s)))
            except queue.Empty:
                if after_s < timeout_s and self.abandoned < MOST_ABANDONED and (other := second()) is not None:
                    works.append(self._start(end_of(other)))
                value, error = self._next(ends, ends_at)
                if error is not None and len(works) == 2:
                    value, error = self._next(ends, ends_at)
            if error is not None:
                raise error
            return value
        finally:
            for work in works:
                self.leave(work)

    @staticmethod
    def _next(ends: queue.SimpleQueue[tuple[Any, BaseException | None]], ends_at: float) -> Any:
        left_s = ends_at - time.monotonic()
        try:
            return ends.get(timeout=max(0.0, left_s)) if left_s < threading.TIMEOUT_MAX else ends.get()
        except queue.Empty:
            raise TooLate from None


HELPERS = Helpers()
