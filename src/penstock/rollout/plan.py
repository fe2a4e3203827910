"""A step worked out in advance: how wide to run and how long the reserved engines generate, found by replay.

The trainer can only take complete groups, so two things trade against each other. Wide batches have the most tokens a
second, and finish their first groups late: the trainer starves early, and the remote machines idle at the end. Narrow
ones finish groups one after another, and waste the machines. What is best depends on speeds, lengths and training, and
all three are learned. So the last step's answers are replayed on the machines that are there, with learned speeds, for
a handful of choices, and the one with the shortest step is taken.

Decides nothing but the `Plan`; refuses to know instances, samples and clocks. One replay costs a few microseconds a
sample.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from penstock.rollout.curves import Speed

__all__ = ["WIDTHS", "Engine", "Plan", "Training", "best_plan", "replay", "search"]

WIDTHS = (0.06, 0.09, 0.13, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)
"""Shares of an engine's places; neighbours differ by about the square root of two, and the optimum is flat."""
WINDOWS = (0.0, 0.1, 0.2, 0.3, 0.45, 0.65, 0.9)
"""First looked at, as shares of the training time."""
GROWTH = 256
"""Tokens that an engine keeps free for each running sequence when it lets another in, about as SGLang and vLLM do."""
SLIVER = 1e-3
"""Of a decode step, past the moment at which memory is full."""
WAITING = 8
"""Samples that may wait at an engine whose memory is full."""
IDLE_COUNTS = 0.1
"""A second in which remote machines idle at the end, against one of the step: of plans about as long, the one that
keeps them busy is the less wide, and a wide one loses more where lengths turn out otherwise."""
ELSEWHERE = (0.13, 0.25, 1.0)
"""Widths looked at whatever was best before."""
PACES = (0.55, 0.65, 0.8, 0.95)
"""Paces looked at, as shares of the decode step of an engine that is full."""
PACED_WIDTHS = (0.35, 0.5)
"""Widths looked at with a pace: a wide start costs little while answers are short, and the pace narrows it."""
FINER = (0.05, -0.05, 0.025, -0.025)
"""Then around the best."""


@dataclass(frozen=True, slots=True)
class Engine:
    speed: Speed
    places: int
    starts_s: float = 0.0
    """When it may begin."""
    memory: float = math.inf
    """Tokens of context that fit at once; when more are there, the last one in is put back and prefilled again."""


@dataclass(frozen=True, slots=True)
class Training:
    """As measured in the last steps."""

    token_s: float
    """Seconds for a token of a complete group, prompt and answer."""
    micro_batch_samples: int = 1
    switch_s: float = 0.0
    """From generating to training."""
    rest_s: float = 0.0
    """After the last micro-batch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`width`: share of its places that an engine fills with fresh samples. All else in seconds."""

    width: float
    window_s: float
    step_s: float = 0.0
    trainer_wait_s: float = 0.0
    remote_wait_s: float = 0.0
    finished: float = 0.0
    """Share of the samples that are finished when the window ends."""
    pace_s: float = math.inf
    """Longest decode step: what would make it longer waits, those of the prompts with the most to come first."""


@dataclass(slots=True)
class _Running:
    """One engine in a replay. Sequences are (step count at the end, group, prompt and full length)."""

    engine: Engine
    remote: bool
    at_s: float
    steps: float = 0.0
    context: float = 0.0
    ends: list[tuple[float, int, float, int]] = field(default_factory=list)
    let_in: int = 0
    """Sequences so far, which is the last number in `ends`."""
    pending: deque[tuple[float, int, float]] = field(default_factory=deque)
    """(tokens left, group, prompt and full length) of those that memory has no room for."""
    fresh_room: int = 0
    pace_s: float = math.inf
    parked: list[tuple[float, int, float]] = field(default_factory=list)
    """Taken off to keep its pace, and not yet waiting with the others."""
    rank: Sequence[float] = ()
    """Of groups, where there is a pace: what is of the last ones is taken off first."""

    def most(self, count: int) -> float:
        return most_context(self.engine.speed, self.pace_s, self.engine.memory, count)

    def due(self) -> float:
        """When its next sequence ends, or its memory is full."""
        count = len(self.ends)
        steps = max(0.0, self.ends[0][0] - self.steps)
        if count > 1 and self.context + steps * count > self.most(count):
            steps = max(0.0, (self.most(count) - self.context) / count) + SLIVER
        return self.at_s + self.engine.speed.wall_s(steps, count, self.context)

    def advance(self, now: float) -> None:
        if now > self.at_s:
            if self.ends:
                count = len(self.ends)
                steps = min(
                    self.engine.speed.steps_in(now - self.at_s, count, self.context), self.ends[0][0] - self.steps
                )
                self.steps += steps
                self.context += steps * count
            self.at_s = now

    @property
    def may_have(self) -> int:
        """Fresh sequences are given to it up to so many in all."""
        return min(self.fresh_room, len(self.ends) + WAITING) if self.pending else self.fresh_room

    @property
    def held(self) -> int:
        return len(self.ends) + len(self.pending)

    def give(self, left: float, group: int, full: float) -> None:
        """`full`: context at its end."""
        self.pending.append((left, group, full))
        self.settle()

    def settle(self) -> None:
        """Puts back what does not fit, and lets in what does."""
        while len(self.ends) > 1 and self.context > self.most(len(self.ends)):
            # An engine puts back the last one in.
            last = max(self.ends, key=lambda end: (self.rank[end[1]] if self.rank else 0, end[3]))
            self.ends.remove(last)
            heapq.heapify(self.ends)
            left = last[0] - self.steps
            self.context -= last[2] - left
            if self.rank:
                self.parked.append((left, last[1], last[2]))
            else:
                self.pending.appendleft((left, last[1], last[2]))
        while self.pending and self._fits(self.pending[0]):
            left, group, full = self.pending.popleft()
            has = full - left
            self.at_s += has * self.engine.speed.prefill_s
            self.context += has
            heapq.heappush(self.ends, (self.steps + left, group, full, self.let_in))
            self.let_in += 1

    def _fits(self, sequence: tuple[float, int, float]) -> bool:
        count = len(self.ends)
        if not count:
            return True
        if count >= self.engine.places:
            return False
        return self.context + sequence[2] - sequence[0] + GROWTH * (count + 1) <= self.most(count + 1)

    def takes(self, sequence: tuple[float, int, float]) -> bool:
        """Whether it would be given one that waits."""
        if self.rank:
            return not self.pending and self._fits(sequence)
        return self.held < self.engine.places and len(self.pending) < WAITING


def most_context(speed: Speed, pace_s: float, memory: float, count: float) -> float:
    """Tokens of context with which a decode step of so many sequences keeps the pace, and fits."""
    if math.isinf(pace_s) or speed.context_s <= 0:
        return memory
    return min(memory, max(0.0, (pace_s - speed.base_s - count * speed.sequence_s) / speed.context_s))


def replay(
    groups: Sequence[Sequence[int]],
    prompt_tokens: float,
    remote: Sequence[Engine],
    reserved: Sequence[Engine],
    training: Training,
    width: float,
    window_s: float,
    pace_s: float = math.inf,
) -> Plan:
    """The step that a choice leads to. `groups`: lengths of answers, by prompt.

    The reserved engines generate until `window_s`, or to the end where there is no remote engine.
    """
    if not remote:
        window_s = float("inf")
    waiting = deque(
        (float(length), group, prompt_tokens + length) for group, row in enumerate(groups) for length in row
    )
    # Those of the group with the least in all first.
    rank = [float(sum(row)) for row in groups]
    paced = not math.isinf(pace_s)
    moved: list[tuple[float, tuple[float, int, float]]] = []
    engines = [_Running(engine, True, engine.starts_s) for engine in remote]
    if window_s > 0:
        engines += [_Running(engine, False, engine.starts_s) for engine in reserved]
    for engine in engines:
        engine.fresh_room = max(1, round(width * engine.engine.places))
        engine.pace_s, engine.rank = pace_s, rank if paced else ()
    missing = [len(row) for row in groups]
    complete: list[tuple[float, int]] = []
    events: list[tuple[float, int]] = []

    def wait(rows: list[tuple[float, int, float]]) -> None:
        for row in rows:
            heapq.heappush(moved, (rank[row[1]], row))

    def fill(index: int) -> None:
        engine = engines[index]
        engine.settle()
        while moved and engine.takes(moved[0][1]):
            engine.give(*heapq.heappop(moved)[1])
        while not moved and waiting and engine.held < engine.may_have and (not paced or engine.takes(waiting[0])):
            engine.give(*waiting.popleft())
        if engine.parked:
            wait(engine.parked)
            engine.parked.clear()
        if engine.ends:
            heapq.heappush(events, (engine.due(), index))

    # A prompt to each in turn, as replicas are kept together.
    while waiting and any(engine.held < engine.may_have for engine in engines):
        for engine in engines:
            prompt = waiting[0][1] if waiting else -1
            while waiting and waiting[0][1] == prompt and engine.held < engine.may_have:
                engine.give(*waiting.popleft())
    for index in range(len(engines)):
        fill(index)
    open_window = window_s > 0
    last_s = 0.0
    samples = len(waiting) + sum(engine.held for engine in engines)
    finished = 1.0 if open_window else 0.0
    while events:
        now, index = events[0]
        if open_window and now >= window_s:
            open_window = False
            finished = 1 - sum(missing) / samples
            wait(_hand_over([engine for engine in engines if not engine.remote], window_s))
            engines = [engine for engine in engines if engine.remote]
            events.clear()
            for engine in engines:
                engine.advance(window_s)
            while moved and any(engine.takes(moved[0][1]) for engine in engines):
                for engine in engines:
                    if moved and engine.takes(moved[0][1]):
                        engine.give(*heapq.heappop(moved)[1])
            for index in range(len(engines)):
                fill(index)
            continue
        heapq.heappop(events)
        engine = engines[index]
        engine.advance(now)
        if engine.ends[0][0] - engine.steps > 2 * SLIVER:
            # Its memory is full.
            fill(index)
            continue
        end, group, full, _ = heapq.heappop(engine.ends)
        engine.steps = end
        engine.context = max(0.0, engine.context - full) if engine.ends else 0.0
        missing[group] -= 1
        last_s = now
        if not missing[group]:
            tokens = sum(groups[group]) + prompt_tokens * len(groups[group])
            complete.append((now, int(tokens)))
        fill(index)
    window_s = min(window_s, last_s)
    plan = _trained(complete, len(groups[0]), training, width, window_s, last_s)
    return replace(plan, finished=finished, pace_s=pace_s)


def best_plan(
    groups: Sequence[Sequence[int]],
    prompt_tokens: float,
    remote: Sequence[Engine],
    reserved: Sequence[Engine],
    training: Training,
    near: Plan | None = None,
) -> Plan:
    """The choice with the shortest step; of about equal ones the one that leaves the remote machines the least idle.

    `near`: the last plan, around which to look. Without one, everything is looked at.
    """
    return deque(search(groups, prompt_tokens, remote, reserved, training, near), maxlen=1).pop()


def search(
    groups: Sequence[Sequence[int]],
    prompt_tokens: float,
    remote: Sequence[Engine],
    reserved: Sequence[Engine],
    training: Training,
    near: Plan | None = None,
) -> Iterator[Plan]:
    """`best_plan`, one replay at a time: the best so far after each. Whoever may not stand still does others' work
    in between."""
    train_s = training.token_s * sum(sum(row) + prompt_tokens * len(row) for row in groups)
    longest = prompt_tokens + max(max(row) for row in groups)
    full_s = max((_full_s(engine, longest) for engine in (*remote, *reserved)), default=0.0)
    best: Plan | None = None

    def looked(width: float, window_s: float, pace_s: float = math.inf) -> Plan:
        nonlocal best
        plan = replay(groups, prompt_tokens, remote, reserved, training, width, max(0.0, window_s), pace_s)
        if best is None or _loss_s(plan) < _loss_s(best):
            best = plan
        return best

    if not remote:
        for width in WIDTHS:
            yield looked(width, 0.0)
        return
    if near is None:
        found = looked(WIDTHS[-1], 0.0)
        yield found
        for width in WIDTHS[::2]:
            for share in WINDOWS:
                found = looked(width, share * train_s)
                yield found
        window_s = found.window_s
        for pace in PACES:
            for width in PACED_WIDTHS:
                for part in (1.0, 0.85):
                    found = looked(width, part * window_s, pace * full_s)
                    yield found
    else:
        found = looked(near.width, near.window_s, near.pace_s)
        yield found
        for share in (0.15, -0.15):
            found = looked(found.width, found.window_s + share * train_s, found.pace_s)
            yield found
        # Wide and narrow each have a valley of their own; lengths and fleets decide which is deeper.
        window_s = found.window_s
        for width in ELSEWHERE:
            for part in (1.0, 0.85):
                found = looked(width, part * window_s)
                yield found
        for pace in PACES:
            found = looked(PACED_WIDTHS[-1], window_s, pace * full_s)
            yield found
    at = min(range(len(WIDTHS)), key=lambda k: abs(WIDTHS[k] - found.width))
    for width in WIDTHS[max(0, at - 1) : at + 2]:
        found = looked(width, found.window_s, found.pace_s)
        yield found
    if not math.isinf(found.pace_s):
        for pace in (1.1, 0.9):
            found = looked(found.width, found.window_s, pace * found.pace_s)
            yield found
    for share in FINER:
        found = looked(found.width, found.window_s + share * train_s, found.pace_s)
        yield found


def _full_s(engine: Engine, longest: float) -> float:
    """A decode step of an engine that is full of answers half way through."""
    count = min(float(engine.places), 2 * engine.memory / longest)
    return engine.speed.step_s(count, count * longest / 2)


def _loss_s(plan: Plan) -> float:
    return plan.step_s + IDLE_COUNTS * plan.remote_wait_s


def _hand_over(reserved: Sequence[_Running], now: float) -> list[tuple[float, int, float]]:
    """What the reserved engines hold."""
    rows = []
    for engine in reserved:
        engine.advance(now)
        rows += [(max(0.0, end - engine.steps), group, full) for end, group, full, _ in engine.ends]
        rows += engine.pending
    return rows


def _trained(
    complete: Sequence[tuple[float, int]],
    per_group: int,
    training: Training,
    width: float,
    window_s: float,
    last_s: float,
) -> Plan:
    """The trainer's side: micro-batches of at least so many samples, begun once they are complete."""
    needed = -(-training.micro_batch_samples // per_group)
    clock = window_s + (training.switch_s if window_s > 0 else 0.0)
    wait_s = 0.0
    for first in range(0, len(complete), needed):
        part = complete[first : first + needed]
        there_s = part[-1][0]
        wait_s += max(0.0, there_s - clock)
        clock = max(clock, there_s) + training.token_s * sum(tokens for _, tokens in part)
    step_s = clock + training.rest_s
    return Plan(width, window_s, step_s, wait_s, max(0.0, step_s - last_s))
