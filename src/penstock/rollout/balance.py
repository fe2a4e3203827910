"""Where samples go inside a step, decided per sample and never per group.

A policy is asked two things. `assign`: which instance the next waiting samples go to; those it leaves out wait at the
manager, where they can still go anywhere (delayed dispatch, as in RLBoost's Algorithm 2). `moves`: which samples are
better off elsewhere than where they are. One that has `fill` is asked that, for one instance, where `assign` would look
at all of them for the few samples that have ended on it. It is told what instances report and how long answers got, and
may learn from that. The manager and the simulator ask and tell the same object; it owns no clock and no state of any
sample.

Refuses to know which instances hold the right weights and have the context: it is shown only those.

`ShortestQueue` is the simplest policy, and the base of `Balanced` (in `balanced.py`), which moves work too. A user's
own is a class with these methods, named by import path (`load_policy`).
"""

from __future__ import annotations

import heapq
import importlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.errors import ConfigError, PolicyError

__all__ = [
    "BalancePolicy",
    "InstanceLoad",
    "Move",
    "PlacedSample",
    "Queue",
    "Report",
    "ShortestQueue",
    "load_policy",
]


NEAR = 0.0625
"""Part of an instance's places by which turns of conversations may lift it over its share, to stay where they were."""
ROUNDING = 1e-9
"""Of a share that is a whole number but for floating point."""


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
    pending: int = 0
    """Samples that wait at it, as it reported last: more than `samples - max_running` where its memory is full."""
    reserved: bool = False
    """On one of the trainer's own devices; remote otherwise."""
    price_per_h: float | None = None
    """Of a remote one's machine, in dollars; 0 where the run does not pay for it, None where that is not known."""
    machine: str = ""
    """The machine that a remote one is on, and goes with, where the run has asked for it; else empty."""
    of_machine: int = 1
    """Instances that this machine has had lately, be they there at the moment or not."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Samples of one batch that wait: moved ones first, then fresh ones, prompt by prompt."""

    fresh: int
    first_fresh: int = 0
    """Number of the first fresh one, counted over the batch."""
    samples_per_prompt: int = 1
    moved: int = 0
    coming: int = 0
    """Instances that are loading the batch's weights, or are about to take part for another reason."""
    near: int = -1
    """Index of the instance that said a lone sample's last turn, and may have all of it in its cache; -1: none."""
    elapsed_s: float | None = None
    """Since the step began; None outside of one for which there may be a plan."""
    finished: int = 0
    """Samples of the batch that have ended."""
    prompt_tokens: float = 0.0
    """Of the batch's prompts, on the mean; 0 where that is not known."""

    @property
    def waiting(self) -> int:
        return self.moved + self.fresh

    def prompt_of(self, position: int) -> int:
        """Row of the prompt of the sample that waits at a position; -1 for a moved one."""
        if position < self.moved:
            return -1
        return (self.first_fresh + position - self.moved) // self.samples_per_prompt


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample that is with an instance."""

    lease: int
    output_tokens: int
    context_tokens: int
    """Prompt and output."""
    running: bool
    """False: it waits there for a place."""
    moves: int = 0
    """Times it was moved by choice while it ran."""
    prompt: int = -1
    """Row of its prompt in its batch."""
    shifts: int = 0
    """Times it was moved by choice while it waited for a place."""


@dataclass(frozen=True, slots=True)
class Move:
    """Take a sample from where it is and give it to another instance, with its tokens as prefix."""

    source: str
    lease: int
    target: str
    """Empty: it waits at the manager until there is room for it again."""


@dataclass(frozen=True, slots=True)
class Report:
    """What an instance did between two heartbeats without being idle."""

    instance: str
    wall_s: float
    running: float
    """Mean over the time."""
    context_tokens: float
    """Sum over the running ones, mean over the time."""
    tokens: int
    prefilled: int
    pending: int = 0
    """Samples that waited because its memory was full: places were free, and nobody was let in."""


class BalancePolicy(Protocol):
    """Pure: what it is given, and was told before, decides what it answers."""

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        """Indices into `loads` for the first waiting samples, in their order; those left out go on waiting."""
        ...

    def order(self, output_tokens: Sequence[int], prompts: Sequence[int]) -> list[int]:
        """In which order moved samples that wait go out, as indices; each has so many tokens, and a prompt's row."""
        ...

    def moves(
        self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        """Samples to move now. Asked a few times a second at most; each of them is moved at most once an answer.

        `waiting`: samples that wait at the manager. `placed` lists the samples of one instance, and costs as much.
        """
        ...

    def report(self, report: Report) -> None:
        """An instance's work since its last heartbeat."""
        ...

    def finished(self, prompt: int, output_tokens: int) -> None:
        """An answer to a batch's prompt, named by its row, came to its end; -1: a further turn of a conversation."""
        ...

    def batch_ended(self) -> None:
        """All samples of a batch are accounted for. Further turns are not told of one by one."""
        ...

    def gone(self, instance: str) -> None:
        """An instance is gone for good."""
        ...


@dataclass
class ShortestQueue:
    """The instance with the fewest samples per place, ties to the earlier one; at most `max_pending` wait at each.

    Which instance gets how many is decided by queues alone; which samples those are, by prompt: replicas of one prompt
    go to one instance as far as the numbers leave room for it, so that its prefill is shared and balance costs nothing.
    A further turn of a conversation stays where the last one was said, while that instance has a place free and is
    nearly level with the others.
    """

    max_pending: int
    affinity: bool = True
    _all_held: tuple[float, float] = field(default=(0.0, 1.0), init=False, repr=False)
    """Samples on all instances after the last `assign`, and their weights."""
    _all_with_coming: tuple[float, float] = field(default=(0.0, 1.0), init=False, repr=False)
    """The same when last there were some coming: with handicaps, and with the weights of those."""

    def __post_init__(self) -> None:
        if self.max_pending < 0:
            raise ValueError(f"max_pending is {self.max_pending}; it must be 0 or more")

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        if queue.near >= 0 and queue.waiting == 1 and self._level(queue.near, loads):
            return [queue.near]
        picks = self._spread(queue, loads)
        if not self.affinity or queue.samples_per_prompt == 1 or len(picks) - queue.moved < 2:
            return picks
        if not self.together(queue, len(picks), loads):
            return picks
        return picks[: queue.moved] + _together(queue, picks[queue.moved :], queue.moved)

    def fill(self, queue: Queue, load: InstanceLoad) -> int:
        """How many of the first waiting samples go to an instance on which some have ended since the last `assign`,
        which left samples waiting: nobody else had room then. Where `near` is 0 it is the one that said a lone sample's
        last turn, and 0 has all of them looked at. Not asked where `assign` is overridden and this is not.
        """
        if queue.near >= 0:
            return int(self._takes_turn(load, *self._all_held))
        (room,) = self._rooms_of([load])
        moved = max(0, min(queue.moved, room - load.samples))
        if queue.coming:
            (weight,), (handicap,) = self._weights_of([load]), self._handicaps_of([load])
            held, weights = self._all_with_coming
            room = min(room, _share((held + queue.fresh) / weights, weight, handicap))
        return math.ceil(moved + max(0, min(queue.fresh, room - load.samples - moved)))

    def order(self, output_tokens: Sequence[int], prompts: Sequence[int]) -> list[int]:
        return list(range(len(output_tokens)))

    def moves(
        self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        return []

    def report(self, report: Report) -> None:
        pass

    def finished(self, prompt: int, output_tokens: int) -> None:
        pass

    def batch_ended(self) -> None:
        pass

    def gone(self, instance: str) -> None:
        pass

    def room(self, load: InstanceLoad) -> int:
        """Samples that an instance may hold."""
        if load.pending:
            # Its memory is full before its places are: what it runs is what it can.
            return load.samples - load.pending + self.max_pending
        return load.max_running + self.max_pending

    def together(self, queue: Queue, going: int, loads: Sequence[InstanceLoad]) -> bool:
        """Whether replicas are worth keeping together, where so many of those that wait go out."""
        return True

    def weight(self, load: InstanceLoad) -> float:
        """Samples of an equal load: a machine with twice as much is given twice as many."""
        return load.max_running

    def handicap(self, load: InstanceLoad) -> float:
        """Samples that an instance counts as holding beside those it has, when others are dealt."""
        return 0.0

    def _level(self, index: int, loads: Sequence[InstanceLoad]) -> bool:
        """Whether one more on an instance starts at once, and leaves it within `NEAR` of its share of all there is."""
        self._all_held = sum(load.samples for load in loads), sum(self._weights_of(loads))
        return self._takes_turn(loads[index], *self._all_held)

    def _takes_turn(self, load: InstanceLoad, held: float, weights: float) -> bool:
        if weights <= 0 or load.pending or load.samples >= min(load.max_running, self.room(load)):
            return False
        share = (1 + held) * self.weight(load) / weights
        return load.samples + 1 <= share + max(1.0, NEAR * load.max_running)

    def _weights_of(self, loads: Sequence[InstanceLoad]) -> list[float]:
        weights = [self.weight(load) for load in loads]
        if not _are_numbers(weights) or not all(0 < weight < math.inf for weight in weights):
            raise PolicyError(f"{type(self).__qualname__}.weight gave {weights}; each must be above 0, and finite")
        return weights

    def _rooms_of(self, loads: Sequence[InstanceLoad]) -> list[int]:
        rooms = [self.room(load) for load in loads]
        if not _are_numbers(rooms):
            raise PolicyError(f"{type(self).__qualname__}.room gave {rooms}; each must be a number")
        return rooms

    def _handicaps_of(self, loads: Sequence[InstanceLoad]) -> list[float]:
        handicaps = [self.handicap(load) for load in loads]
        if not _are_numbers(handicaps) or not all(map(math.isfinite, handicaps)):
            raise PolicyError(f"{type(self).__qualname__}.handicap gave {handicaps}; each must be a finite number")
        return handicaps

    def _spread(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        moved, fresh = queue.moved, queue.fresh
        held = [load.samples for load in loads]
        weights, rooms, handicaps = self._weights_of(loads), self._rooms_of(loads), self._handicaps_of(loads)
        picks = _deal(moved, held, weights, rooms, handicaps) if moved else []
        if len(picks) == moved:
            if queue.coming and loads:
                level, total = _with_coming(held, weights, handicaps, queue)
                rooms = list(map(min, rooms, map(_share, itertools.repeat(level / total), weights, handicaps)))
            picks += _deal(fresh, held, weights, rooms, handicaps)
            if queue.coming and loads:
                self._all_with_coming = level - (fresh + moved - len(picks)), total
        self._all_held = sum(held), sum(weights)
        return picks


def _are_numbers(values: Sequence[float]) -> bool:
    try:
        return not math.isnan(sum(values))
    except TypeError:
        return False


def _with_coming(
    held: Sequence[int], weights: Sequence[float], handicaps: Sequence[float], queue: Queue
) -> tuple[float, float]:
    """Samples, held and fresh, with the handicaps; and the weights, with those of who is coming, like the best. Once
    these are there, all come to the one for the other.

    Without that the first instance to hold a version takes a small batch whole, and the others find nothing. Who has
    been coming for so long may well take as long again. By then the rest of the batch, at the pace of what has ended,
    is `rest` and not all: that is what there will be to share, and where as much has ended as is left, nothing.
    """
    all_of_it = sum(held) + queue.fresh
    here, coming = len(weights), queue.coming
    rest = 1 - (here + coming) * queue.finished / max(1, here * all_of_it + coming * queue.finished)
    others = coming * max(0.0, rest) * max(weights)
    some = list(range(here))
    while True:
        # With their handicaps all come to the same for their weight; who would have less than nothing has nothing.
        level = all_of_it + sum(handicaps[k] for k in some)
        total = sum(weights[k] for k in some) + others
        fewer = [k for k in some if level * weights[k] > handicaps[k] * total]
        if len(fewer) == len(some):
            return level, total or 1.0
        some = fewer


def _share(level: float, weight: float, handicap: float) -> int:
    """Samples with which an instance comes to a level, and one at least; none where its handicap alone does."""
    share = level * weight - handicap
    return max(1, math.ceil(share * (1 - ROUNDING))) if share > 0 else 0


def load_policy(path: str, **options: object) -> BalancePolicy:
    """A policy by import path, `package.module:Class`, made with `options`; also from the folder that one is in.

    Raises ConfigError where there is no such module or class, it won't take the options, or it lacks a method.
    """
    module_name, _, name = path.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        # Last, so that nothing here hides an installed package.
        sys.path.append(here)
    try:
        made: BalancePolicy = getattr(importlib.import_module(module_name), name)(**options)
    # A user's module may raise anything while it is imported; whatever it is, the policy can't be used.
    except Exception as error:
        raise ConfigError(f"no balance policy at {path!r}: {error}; write package.module:Class") from error
    methods = [method for method in dir(BalancePolicy) if not method.startswith("_")]
    missing = [method for method in methods if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"the balance policy {path!r} has no {', '.join(missing)}")
    return made


def _together(queue: Queue, picks: list[int], offset: int) -> list[int]:
    """The same picks, dealt so that samples of one prompt meet: each instance gets exactly as many as before."""
    left: dict[int, int] = {}
    for pick in picks:
        left[pick] = left.get(pick, 0) + 1
    order = _most_first(left)
    dealt: list[int] = []
    position = 0
    while position < len(picks):
        prompt = queue.prompt_of(offset + position)
        end = position + 1
        while end < len(picks) and queue.prompt_of(offset + end) == prompt:
            end += 1
        need = end - position
        while need:
            count, index = heapq.heappop(order)
            taken = min(need, -count)
            dealt += [index] * taken
            need -= taken
            if -count > taken:
                heapq.heappush(order, (count + taken, index))
        position = end
    return dealt


def _most_first(left: dict[int, int]) -> list[tuple[int, int]]:
    """A heap of (minus the count, index): the instance with the most to come first."""
    order = [(-count, index) for index, count in left.items()]
    heapq.heapify(order)
    return order


def _deal(
    waiting: int, held: list[int], weights: Sequence[float], rooms: Sequence[int], handicaps: Sequence[float]
) -> list[int]:
    """Indices of instances, each next sample to the one with the fewest for its weight; counts them into `held`."""

    def level(k: int) -> tuple[float, int]:
        return (held[k] + handicaps[k]) / weights[k], k

    heap = [level(k) for k in range(len(held)) if held[k] < rooms[k]]
    heapq.heapify(heap)
    picks: list[int] = []
    while heap and len(picks) < waiting:
        index = heap[0][1]
        picks.append(index)
        held[index] += 1
        if held[index] < rooms[index]:
            heapq.heapreplace(heap, level(index))
        else:
            heapq.heappop(heap)
    return picks
