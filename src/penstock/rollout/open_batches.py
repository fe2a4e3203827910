"""Batches of which not every sample has ended, in the order in which they came.

Decides which of them are looked at: a further turn of a conversation is a batch of its own, so that there may be
thousands, of which hardly any has samples waiting. Refuses to know samples, instances and why a batch goes.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.rollout.batch import Batch

__all__ = ["OpenBatches"]

LISTED = 64
"""Batches that may be looked at in vain for samples that wait, beside as many as have some."""
HANDED = 64
"""Removed batches whose progress is not handed down yet, beside as many as are open."""


@dataclass(slots=True)
class _Line:
    """Batches of one weight version that may be waiting."""

    ages: list[int] = field(default_factory=list)
    """Of every batch with samples that wait, and of some without, be they gone."""
    in_order: bool = True


class OpenBatches:
    """`newest_age`: of the batch that was taken up last."""

    def __init__(self) -> None:
        self.newest_age = 0
        self._batches: dict[str, Batch] = {}
        self._by_age: dict[int, Batch] = {}
        self._lines: dict[int, _Line] = {}
        """By weight version: instances hold one, and need not look at what they can't take."""
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
            line = self._lines.setdefault(batch.version, _Line())
            line.in_order &= not line.ages or line.ages[-1] < batch.age
            line.ages.append(batch.age)

    def waiting(self, version: int | None = None) -> Iterator[Batch]:
        """Those with samples that wait, oldest first; of one version alone, or of all."""
        if version is not None:
            return self._waiting_of(version)
        return heapq.merge(*map(self._waiting_of, list(self._lines)), key=lambda batch: batch.age)

    def _waiting_of(self, version: int) -> Iterator[Batch]:
        line = self._lines.get(version)
        if line is None:
            return
        if not line.in_order:
            line.ages, line.in_order = sorted(line.ages), True
        ages, found = line.ages, 0
        for index in range(len(ages)):
            batch = self._by_age.get(ages[index])
            if batch is not None and batch.waiting:
                found += 1
                yield batch
        if (len(ages) > 2 * found + LISTED or not found) and ages is line.ages and self._lines.get(version) is line:
            self._prune(version)

    def _prune(self, version: int) -> None:
        """Into another list: somebody may be going through this one."""
        before = self._lines.pop(version)
        line = _Line(in_order=before.in_order)
        for age in before.ages:
            if (batch := self._by_age.get(age)) is not None:
                batch.listed = batch.waiting > 0
                if batch.listed:
                    line.ages.append(age)
        if line.ages:
            self._lines[version] = line

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
