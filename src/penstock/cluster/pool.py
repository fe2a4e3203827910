"""A bounded pool of threads with a name, an owner and public counters.

Decides how many tasks may wait and what becomes of them at the end: none is lost without its future saying so. Tasks
of a pool never wait for others of the same pool (that could use up all threads): submitting from one's own thread is
refused, and a run has a second pool for rewards.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.cluster.errors import CallTimeout, ClusterError, PoolFull

T = TypeVar("T")
CLOSE_S = 10.0


@dataclass(frozen=True)
class PoolStats:
    """Counters since the pool began. `done` and `failed` are ended tasks; a cancelled one counts as failed."""

    queued: int
    running: int
    done: int
    failed: int
    wait_s: float
    """Time that started tasks spent in the queue, in all."""
    run_s: float
    """Time that ended tasks ran, in all."""


class SubmitPool:
    """`threads` daemon threads; at most `max_queued` tasks wait for one."""

    def __init__(
        self,
        name: str,
        threads: int,
        max_queued: int = 1024,
        submit_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Threads start with the first task. `submit_timeout_s`: how long `submit` waits for room."""
        if threads < 1 or max_queued < 1:
            raise ClusterError(f"pool {name}: {threads} threads and room for {max_queued}; both are at least 1")
        self.name = name
        self.threads = threads
        self._max_queued = max_queued
        self._submit_timeout_s = submit_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._tasks: deque[tuple[Future[Any], Callable[[], Any], float]] = deque()
        self._started: list[threading.Thread] = []
        self._idle = 0
        self._running = self._done = self._failed = 0
        self._wait_s = self._run_s = 0.0
        self._closed = False

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]:
        """Queues a call. Raises PoolFull where there is no room in time, ClusterError where the pool is closed."""
        if threading.current_thread() in self._started:
            raise ClusterError(f"a task of pool {self.name} submits to its own pool, which may deadlock; use another")
        future: Future[T] = Future()
        with self._lock:
            self._wait_for_room()
            self._tasks.append((future, lambda: function(*args), self._clock()))
            if len(self._tasks) > self._idle and len(self._started) < self.threads:
                thread = threading.Thread(target=self._run, name=f"{self.name}-{len(self._started)}", daemon=True)
                self._started.append(thread)
                thread.start()
            self._work.notify()
        return future

    def stats(self) -> PoolStats:
        """The counters, of one moment."""
        with self._lock:
            return PoolStats(len(self._tasks), self._running, self._done, self._failed, self._wait_s, self._run_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Takes no more tasks, cancels those that wait, joins the threads. Raises CallTimeout where a task goes on."""
        with self._lock:
            self._closed = True
            waiting, self._tasks = list(self._tasks), deque()
            self._failed += len(waiting)
            self._work.notify_all()
            self._room.notify_all()
            threads = list(self._started)
        for future, _, _ in waiting:
            future.set_exception(ClusterError(f"pool {self.name} was closed before the task began"))
        end = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if still := [thread.name for thread in threads if thread.is_alive()]:
            raise CallTimeout(f"pool {self.name}: still running after {timeout_s:g} s: {', '.join(still)}")

    def __enter__(self) -> SubmitPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait_for_room(self) -> None:
        def room() -> bool:
            return self._closed or len(self._tasks) < self._max_queued

        if not self._room.wait_for(room, self._submit_timeout_s):
            raise PoolFull(
                f"pool {self.name}: {self._max_queued} tasks wait and none began in {self._submit_timeout_s:g} s"
            )
        if self._closed:
            raise ClusterError(f"pool {self.name} is closed")

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                self._work.wait_for(lambda: self._tasks or self._closed)
                self._idle -= 1
                if not self._tasks:
                    return
                future, call, since = self._tasks.popleft()
                self._room.notify()
                begun = self._clock()
                self._running += 1
                self._wait_s += begun - since
            self._end(future, call, begun)
            del future, call

    def _end(self, future: Future[Any], call: Callable[[], Any], begun: float) -> None:
        """Runs a task. Counters are settled before its future is, so that who waited finds them exact."""
        result: Any = None
        error: BaseException | None = None
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as raised:  # noqa: BLE001  # belongs to whoever waits for the future
                error = raised
            cancelled = False
        else:
            cancelled = True
        ok = error is None and not cancelled
        with self._lock:
            self._running -= 1
            self._done += ok
            self._failed += not ok
            self._run_s += self._clock() - begun
        if not cancelled:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
