"""Batches of which not every sample has ended, in the order in which they came.

Decides which of them are looked at: a further turn of a conversation is a batch of its own, so that there may be
thousands, of which hardly any has samples waiting. Refuses to know samples, instances and why a batch goes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator

from penstock.rollout.batch import Batch

__all__ = ["OpenBatches"]

LISTED = 64
"""Batches that may be looked at in vain for samples that wait, beside as many as have some."""
HANDED = 64
"""Removed batches whose progress is not handed down yet, beside as many as are open."""


class OpenBatches:
    """`newest_age`: of the batch that was taken up last."""

    def __init__(self) -> None:
        self.newest_age = 0
        self._batches: dict[str, Batch] = {}
        self._by_age: dict[int, Batch] = {}
        self._may_wait: list[int] = []
        """Ages of every batch with samples that wait, and of some without, be they gone."""
        self._sorted = True
        self._handed: list[tuple[float, float]] = []
        """(submitted, progress) of removed batches, still to be handed down."""

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, name: str) -> bool:
        return name in self._batches

    def __iter__(self) -> Iterator[Batch]:
        """Oldest first."""
        return iter(self._batches.values())

    def get(self, name: str) -> Batch | None:
        return self._batches.get(name)

    def add(self, batch: Batch) -> None:
        self.newest_age += 1
        batch.age, batch.listed = self.newest_age, False
        self._batches[batch.name] = self._by_age[batch.age] = batch
        self.may_wait(batch)

    def remove(self, name: str) -> Batch:
        """What it made of progress counts for the batches behind it, which had to wait for it."""
        removed = self._batches.pop(name)
        del self._by_age[removed.age]
        self._handed.append((removed.submitted_at, removed.progress_at))
        if len(self._handed) > HANDED + len(self._batches):
            self._hand_down()
        return removed

    def since(self, age: int) -> Iterator[Batch]:
        """Those that were taken up after one of such an age, newest first."""
        for batch in reversed(self._batches.values()):
            if batch.age <= age:
                return
            yield batch

    # ---- which of them wait

    def may_wait(self, batch: Batch) -> None:
        """Samples of it wait, or did a moment ago."""
        if not batch.listed:
            batch.listed = True
            self._sorted &= not self._may_wait or self._may_wait[-1] < batch.age
            self._may_wait.append(batch.age)

    def waiting(self) -> Iterator[Batch]:
        """Those with samples that wait, oldest first."""
        if not self._sorted:
            self._may_wait, self._sorted = sorted(self._may_wait), True
        ages, found = self._may_wait, 0
        for index in range(len(ages)):
            batch = self._by_age.get(ages[index])
            if batch is not None and batch.waiting:
                found += 1
                yield batch
        if len(ages) > 2 * found + LISTED and ages is self._may_wait:
            self._prune()

    def _prune(self) -> None:
        """Into another list: somebody may be going through this one."""
        before, self._may_wait = self._may_wait, []
        for age in before:
            if (batch := self._by_age.get(age)) is not None:
                batch.listed = batch.waiting > 0
                if batch.listed:
                    self._may_wait.append(age)

    # ---- progress

    def progress_at(self, batch: Batch) -> float:
        """When an open batch, or one before it that it had to wait for, got a token or ended a sample last."""
        if self._handed:
            self._hand_down()
        return batch.progress_at

    def _hand_down(self) -> None:
        """Many at a time, for each goes to every batch behind."""
        self._handed.sort()
        times = [submitted_at for submitted_at, _ in self._handed]
        latest = list(itertools.accumulate((progress_at for _, progress_at in self._handed), max))
        for batch in self:
            before = bisect_right(times, batch.submitted_at)
            if before:
                batch.progress_at = max(batch.progress_at, latest[before - 1])
        self._handed.clear()
