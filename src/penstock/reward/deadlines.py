"""Deadlines of many jobs, the earliest first; those of jobs that are over are dropped when they are most of them."""

from __future__ import annotations

import heapq
import math

from penstock.reward.jobs import RESOLVED, Job

__all__ = ["Deadlines"]


class Deadlines:
    """A heap that doesn't grow with jobs that are over. Knows jobs by `deadline`, `number` and `state` alone."""

    KEPT = 64
    """Entries of jobs that are over which are never worth tidying up."""

    __slots__ = ("_heap", "_over")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._over = 0

    def add(self, job: Job) -> None:
        if job.deadline < math.inf:
            heapq.heappush(self._heap, (job.deadline, job.number, job))

    def over(self, job: Job) -> None:
        """A job that was added is over, and not because `take_passed` gave it out."""
        if job.deadline == math.inf:
            return
        self._over += 1
        if self._over > self.KEPT and 4 * self._over > 3 * len(self._heap):
            over = RESOLVED
            self._heap = [entry for entry in self._heap if entry[2].state is not over]
            heapq.heapify(self._heap)
            self._over = 0

    def take_passed(self, now: float) -> list[Job]:
        """Jobs that are not over and whose deadline has passed, each once."""
        passed: list[Job] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            job = heapq.heappop(heap)[2]
            if job.state is RESOLVED:
                self._over -= 1
            else:
                passed.append(job)
        return passed

    def next_at(self) -> float:
        """The earliest deadline, or one of a job that is over; infinity where there is none."""
        return self._heap[0][0] if self._heap else math.inf
