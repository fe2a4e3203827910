"""Where the next waiting samples go: decides per sample, never per group.

The first policy is the shortest queue: each sample goes to the instance with the fewest samples for each place it
has, as long as no more than `max_pending` would wait there; the rest wait at the manager, where they can still go
anywhere (delayed dispatch, as in RLBoost's Algorithm 2). Refuses to know what a sample is, how long it will get, and
which instances hold the right weights and have the context for it: it is shown only those.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["DispatchPolicy", "InstanceLoad", "ShortestQueue"]


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """One instance that may take work."""

    instance: str
    samples: int
    """Samples that are with it, running and pending."""
    max_running: int
    """Sequences that it decodes at once."""
    tokens_per_s: float = 0.0
    """As it reported last; 0 where it has not yet."""


class DispatchPolicy(Protocol):
    """Pure: what it is given decides what it answers."""

    def assign(self, waiting: int, loads: Sequence[InstanceLoad]) -> list[int]:
        """Indices into `loads` for the first waiting samples, in their order; those left out go on waiting."""
        ...


class ShortestQueue:
    """The instance with the fewest samples per place, ties to the earlier one; at most `max_pending` wait at each."""

    def __init__(self, max_pending: int) -> None:
        if max_pending < 0:
            raise ValueError(f"max_pending is {max_pending}; it must be 0 or more")
        self.max_pending = max_pending

    def assign(self, waiting: int, loads: Sequence[InstanceLoad]) -> list[int]:
        heap = [
            (load.samples / load.max_running, index, load.samples)
            for index, load in enumerate(loads)
            if load.samples < load.max_running + self.max_pending
        ]
        heapq.heapify(heap)
        picks: list[int] = []
        while heap and len(picks) < waiting:
            _, index, samples = heap[0]
            picks.append(index)
            samples += 1
            room = loads[index].max_running
            if samples < room + self.max_pending:
                heapq.heapreplace(heap, (samples / room, index, samples))
            else:
                heapq.heappop(heap)
        return picks
