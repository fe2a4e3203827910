"""Which worker scores which sample, and which one is overdue: the policy of both kinds of worker pool.

Decides only. Owns no process, thread or clock: workers and jobs are numbers, `now` is passed in, and decisions come
out as lists that the edge (`processes`, `threads`) carries out. A job is in exactly one place: waiting, running on
one worker, or gone. Its time limit starts when a worker gets it, not while it waits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

__all__ = ["Assignment", "QueueFull", "Roster"]


class QueueFull(Exception):
    """No more jobs may wait. Caught by the edge, which knows what to tell a person."""


class Assignment(NamedTuple):
    worker: int
    job: int


class Roster:
    """First come, first served; one job at a time for each worker."""

    def __init__(self, time_limit_s: float, max_waiting: int) -> None:
        self._time_limit_s = time_limit_s
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._idle: deque[int] = deque()
        self._running: dict[int, tuple[int, float]] = {}
        """Worker to its job and deadline."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, job: int) -> None:
        """Puts a job at the end of the queue. Raises QueueFull."""
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull
        self._waiting[job] = None

    def worker_ready(self, worker: int) -> None:
        """A worker that has no job may be given one from now on."""
        if worker in self._running or worker in self._idle:
            raise ValueError(f"worker {worker} is on the roster already")
        self._idle.append(worker)

    def assign(self, now: float) -> list[Assignment]:
        """Gives waiting jobs to idle workers; their time runs from `now`."""
        assigned = []
        while self._idle and self._waiting:
            job, _ = self._waiting.popitem(last=False)
            worker = self._idle.popleft()
            self._running[worker] = (job, now + self._time_limit_s)
            assigned.append(Assignment(worker, job))
        return assigned

    def finish(self, worker: int, job: int) -> bool:
        """The worker is done with the job and idle again. False where it doesn't have that job (a late answer)."""
        if self._running.get(worker, (None, 0.0))[0] != job:
            return False
        del self._running[worker]
        self._idle.append(worker)
        return True

    def overdue(self, now: float) -> list[Assignment]:
        """Takes jobs at or past their deadline, and the workers that hold them, off the roster."""
        late = [Assignment(worker, job) for worker, (job, deadline) in self._running.items() if deadline <= now]
        for worker, _ in late:
            del self._running[worker]
        return late

    def next_deadline(self) -> float | None:
        return min((deadline for _, deadline in self._running.values()), default=None)

    def lose(self, worker: int) -> int | None:
        """Takes a worker that died off the roster; returns the job it had."""
        if worker in self._running:
            return self._running.pop(worker)[0]
        if worker in self._idle:
            self._idle.remove(worker)
        return None

    def withdraw(self, job: int) -> bool:
        """Nobody waits for the job any more. False where it is not waiting for a worker (it has one, or is gone)."""
        if job not in self._waiting:
            return False
        del self._waiting[job]
        return True

    def worker_of(self, job: int) -> int | None:
        """The worker that runs the job."""
        return next((worker for worker, (running, _) in self._running.items() if running == job), None)
