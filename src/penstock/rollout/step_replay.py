"""One way to run a step, worked out in advance: answers of given lengths, replayed on machines of known speeds.

The trainer takes complete groups alone; engines have `Limits` that change over the window, slower ones narrower limits
(`unequal`); when the window ends, what the reserved engines hold goes on elsewhere. Where engines differ in speed,
running samples go from slow ones to faster ones once nothing waits. A replay costs a few microseconds a sample. Which
ways are tried: `plan`.
Refuses to know instances, samples and clocks.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from penstock.rollout.curves import Speed, mean_progress
from penstock.rollout.unequal import Beside, compared

__all__ = [
    "NEARLY_ALL",
    "ONE_BY_ONE",
    "Engine",
    "Limits",
    "Plan",
    "Training",
    "first_ones",
    "limited",
    "rates",
    "replay",
]

SLIVER = 1e-3
"""Of a decode step, past the moment at which memory is full."""
WAITING = 8
"""Samples that may wait at an engine whose memory is full."""
NEARLY_ALL = 0.9
"""Share of the samples that are to be finished when the window ends: from then on the reserved engines leave the others
next to nothing, and all of them are levelled."""
LEVEL = 0.92
"""A sample moves to an engine whose pace is then less than this times that of the one it leaves."""
BUCKET = 64
"""Tokens between two entries in the table of what may be left of an answer."""


@dataclass(frozen=True, slots=True)
class Engine:
    speed: Speed
    places: int
    starts_s: float = 0.0
    """When it may begin."""
    memory: float = math.inf
    """Tokens of context that fit at once; when more are there, the last one in is put back and prefilled again."""
    reserve: float = 0.0
    """Tokens of it that are kept free for each sequence to grow when another is let in."""
    known: bool = True
    """The speed is its own, and not that of others like it."""
    price_per_h: float | None = None
    """Of its machine, in dollars; 0 where nobody here pays for it, None where that is not known."""
    machine: str = ""
    """The machine that it is on, and comes and goes with; empty where it is one by itself."""
    of_machine: int = 1
    """Instances that this machine has had lately, be they there at the moment or not."""


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
    ahead_token_s: float = 0.0
    """Of `token_s`, what needs no whole group, and is done while there is none."""
    ahead_samples: int = 1
    """Of so many samples at least, and at most of a micro-batch's."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many samples an engine may hold to be given one more, as a share of its places: `begin` when the step does,
    then step by step to `end` at the window's, by equal factors in equal times, and so it stays.

    Within the window nobody is taken off where more are held: an engine narrows as its samples end. When it ends, a
    remote engine keeps what is among the first ones that all have room for, and the others wait with what came from the
    reserved ones (`first_ones`): few prompts that are nearly whole run fast, and are what the trainer wants.
    """

    begin: float = 1.0
    end: float = 1.0

    def share(self, elapsed_s: float, window_s: float) -> float:
        """Of the places, at a time."""
        if elapsed_s >= window_s or self.begin == self.end:
            return self.end
        return self.begin * (self.end / self.begin) ** (max(0.0, elapsed_s) / window_s)

    def samples(self, places: int, elapsed_s: float, window_s: float) -> int:
        """Of an engine with so many places; at least 1."""
        return limited(places, self.share(elapsed_s, window_s))


def limited(places: int, share: float) -> int:
    """Samples that an engine may hold at a share of its places; at least 1."""
    return max(1, round(share * places))


@dataclass(frozen=True, slots=True)
class Plan:
    """All but limits and shares in seconds."""

    remote: Limits
    reserved: Limits
    window_s: float
    step_s: float = 0.0
    trainer_wait_s: float = 0.0
    remote_wait_s: float = 0.0
    finished: float = 0.0
    """Share of the samples that are finished when the window ends."""


ONE_BY_ONE = Plan(Limits(0.0, 0.0), Limits(0.0, 0.0), 0.0)
"""While a plan is being made: what is given late waits for a moment, what is given early can't be taken back."""


@dataclass(slots=True)
class _Running:
    """One engine in a replay. Sequences are (step count at the end, group, prompt and full length)."""

    engine: Engine
    remote: bool
    at_s: float
    limits: Limits
    window_s: float
    beside: Beside
    steps: float = 0.0
    context: float = 0.0
    ends: list[tuple[float, int, float, int]] = field(default_factory=list)
    let_in: int = 0
    """Sequences so far, which is the last number in `ends`."""
    pending: deque[tuple[float, int, float]] = field(default_factory=deque)
    """(tokens left, group, prompt and full length) of those that memory has no room for."""

    def due(self) -> float:
        """When its next sequence ends, or its memory is full."""
        count = len(self.ends)
        steps = max(0.0, self.ends[0][0] - self.steps)
        if count > 1 and self.context + steps * count > self.engine.memory:
            steps = max(0.0, (self.engine.memory - self.context) / count) + SLIVER
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
    def held(self) -> int:
        return len(self.ends) + len(self.pending)

    def takes(self) -> bool:
        """Whether it would be given one that waits."""
        if len(self.pending) >= WAITING:
            return False
        return self.held < self.limit()

    def limit(self) -> int:
        """Samples that it may hold now."""
        return self.beside.samples(self.limits.samples(self.engine.places, self.at_s, self.window_s))

    @property
    def load(self) -> float:
        """What it holds, for its speed."""
        return self.beside.load(self.held)

    def pace_s(self, more: int = 0) -> float:
        """Seconds of a decode step, with so many more sequences like its own."""
        count = len(self.ends)
        return self.engine.speed.step_s(count + more, self.context * (count + more) / max(1, count))

    def give(self, left: float, group: int, full: float) -> None:
        """`full`: context at its end."""
        self.pending.append((left, group, full))
        self.settle()

    def settle(self) -> None:
        """Puts back what does not fit, and lets in what does."""
        while len(self.ends) > 1 and self.context > self.engine.memory:
            # An engine puts back the last one in.
            last = max(self.ends, key=lambda end: end[3])
            self.ends.remove(last)
            heapq.heapify(self.ends)
            left = last[0] - self.steps
            self.context -= last[2] - left
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
        return self.context + sequence[2] - sequence[0] + self.engine.reserve * (count + 1) <= self.engine.memory

    def take_youngest(self) -> tuple[float, int, float]:
        """Takes away the running sequence that has come least far, of which most is to be expected."""
        youngest = min(self.ends, key=lambda end: end[2] - end[0])
        self.ends.remove(youngest)
        heapq.heapify(self.ends)
        left = max(0.0, youngest[0] - self.steps)
        self.context = max(0.0, self.context - youngest[2] + left) if self.ends else 0.0
        return left, youngest[1], youngest[2]

    def rows(self) -> list[tuple[float, int, float]]:
        """What it holds, as (tokens left, group, prompt and full length)."""
        return [(max(0.0, end - self.steps), group, full) for end, group, full, _ in self.ends] + list(self.pending)

    def keep(self, groups: Container[int]) -> None:
        """Has nothing but these groups' any more."""
        self.ends = [end for end in self.ends if end[1] in groups]
        heapq.heapify(self.ends)
        self.pending = deque(row for row in self.pending if row[1] in groups)
        self.context = sum(full - max(0.0, end - self.steps) for end, _, full, _ in self.ends)


def replay(
    groups: Sequence[Sequence[int]],
    prompt_tokens: float,
    remote: Sequence[Engine],
    reserved: Sequence[Engine],
    training: Training,
    limits: tuple[Limits, Limits],
    window_s: float,
) -> Plan:
    """The step that a choice leads to. `groups`: lengths of answers, by prompt. `limits`: remote, reserved.

    The reserved engines generate until `window_s`, or to the end where there is no remote engine.
    """
    return _Replay(groups, prompt_tokens, remote, reserved, limits, window_s if remote else math.inf).run(training)


class _Replay:
    """One replay: engines, what waits, and when something is due at each engine."""

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        prompt_tokens: float,
        remote: Sequence[Engine],
        reserved: Sequence[Engine],
        limits: tuple[Limits, Limits],
        window_s: float,
    ) -> None:
        self._groups, self._prompt_tokens, self._limits, self._window_s = groups, prompt_tokens, limits, window_s
        self._open = window_s > 0
        self._waiting = deque(
            (float(length), group, prompt_tokens + length) for group, row in enumerate(groups) for length in row
        )
        self._moved: deque[tuple[float, int, float]] = deque()
        context = _typical_context(groups, prompt_tokens)
        self._engines = _beside(remote, True, limits[0], window_s, context)
        if self._open:
            self._engines += _beside(reserved, False, limits[1], window_s, context)
        self._unequal = any(engine.beside.slower > 1 for engine in self._engines)
        self._now = 0.0
        self._events: list[tuple[float, int]] = []
        self._due_s = [math.inf] * len(self._engines)
        """Of each engine; other events of it are void."""
        self._paces_s = [0.0] * len(self._engines)
        """Of each engine from which samples could be moved, when something happened there last."""

    def run(self, training: Training) -> Plan:
        groups, window_s, events = self._groups, self._window_s, self._events
        missing = [len(row) for row in groups]
        complete: list[tuple[float, int]] = []
        ended: list[tuple[float, int, float]] = []
        samples = len(self._waiting)
        # A prompt to each in turn, as replicas are kept together.
        self._deal(self._waiting, together=True)
        self._fill_all()
        last_s, finished = 0.0, 1.0 if self._open else 0.0
        while events:
            now, index = events[0]
            if self._open and now >= window_s:
                finished = 1 - sum(missing) / samples
                self._end_window()
                continue
            heapq.heappop(events)
            if self._due_s[index] != now:
                continue
            self._now = now
            engine = self._engines[index]
            engine.advance(now)
            if engine.ends[0][0] - engine.steps > 2 * SLIVER:
                # Its memory is full.
                self._fill(index)
                continue
            end, group, full, _ = heapq.heappop(engine.ends)
            engine.steps = end
            engine.context = max(0.0, engine.context - full) if engine.ends else 0.0
            missing[group] -= 1
            last_s = now
            ended.append((now, group, full))
            if not missing[group]:
                tokens = sum(groups[group]) + self._prompt_tokens * len(groups[group])
                complete.append((now, int(tokens)))
            self._fill(index)
        window_s = min(window_s, last_s)
        if training.ahead_token_s > 0:
            step_s, wait_s = _trained_ahead(ended, [len(row) for row in groups], training, window_s)
        else:
            step_s, wait_s = _trained(complete, len(groups[0]), training, window_s)
        return Plan(*self._limits, window_s, step_s, wait_s, max(0.0, step_s - last_s), finished)

    def _end_window(self) -> None:
        """What the reserved engines hold, and what remote ones do that comes late, is dealt to the remote ones."""
        self._open, self._now = False, self._window_s
        for engine in self._engines:
            engine.advance(self._window_s)
        self._moved.extend(_handed_over(self._groups, self._prompt_tokens, self._engines))
        self._engines = [engine for engine in self._engines if engine.remote]
        self._paces_s = [0.0] * len(self._engines)
        self._events.clear()
        self._deal(self._moved)
        self._fill_all()

    def _deal(self, rows: deque[tuple[float, int, float]], together: bool = False) -> None:
        """Each next one to the engine with the fewest for its speed, or each next prompt."""
        takers = [(engine.load, index) for index, engine in enumerate(self._engines) if engine.takes()]
        heapq.heapify(takers)
        while rows and takers:
            _, index = heapq.heappop(takers)
            engine, prompt = self._engines[index], rows[0][1]
            while rows and rows[0][1] == prompt and engine.takes():
                engine.give(*rows.popleft())
                if not together:
                    break
            if engine.takes():
                heapq.heappush(takers, (engine.load, index))

    def _fill_all(self) -> None:
        for index in range(len(self._engines)):
            self._top_up(index)
        for index in sorted(range(len(self._engines)), key=lambda index: self._engines[index].beside.slower):
            self._level(index)

    def _fill(self, index: int) -> None:
        """Something happened at an engine: it may have room."""
        self._top_up(index)
        self._level(index)

    def _top_up(self, index: int) -> None:
        engine, moved, waiting = self._engines[index], self._moved, self._waiting
        engine.settle()
        while moved and engine.takes():
            engine.give(*moved.popleft())
        while not moved and waiting and engine.takes():
            engine.give(*waiting.popleft())
        self._expect(index)

    def _level(self, index: int) -> None:
        """Samples run on at an engine that is faster than theirs, as they are moved near a step's end."""
        engine = self._engines[index]
        if not self._unequal or self._moved or self._waiting or self._open or engine.at_s > self._now:
            return
        while not engine.pending:
            slowest_s = max(self._paces_s)
            other = self._paces_s.index(slowest_s)
            source = self._engines[other]
            if other == index or engine.pace_s(1) > LEVEL * slowest_s or source.at_s > self._now:
                break
            source.advance(self._now)
            engine.give(*source.take_youngest())
            self._expect(other)
            self._expect(index)

    def _expect(self, index: int) -> None:
        """When something is due at an engine."""
        engine = self._engines[index]
        due_s = self._due_s[index] = engine.due() if engine.ends else math.inf
        if engine.ends:
            heapq.heappush(self._events, (due_s, index))
        if self._unequal:
            self._paces_s[index] = engine.pace_s() if engine.ends and not engine.pending else 0.0


def _beside(engines: Sequence[Engine], remote: bool, limits: Limits, window_s: float, context: float) -> list[_Running]:
    """Engines of one kind, each beside the fastest of them."""
    known = _compared(engines, context)
    return [
        _Running(engine, remote, engine.starts_s, limits, window_s, beside) for engine, beside in zip(engines, known)
    ]


def _compared(engines: Sequence[Engine], context: float) -> list[Beside]:
    """Those of which nothing is known yet pass for the fastest, and nobody is compared with them."""
    known = iter(compared([(one.speed, one.places, one.memory) for one in engines if one.known], context))
    return [next(known) if engine.known else Beside() for engine in engines]


def rates(engines: Sequence[Engine], others: int, prompt_tokens: float, groups: Sequence[Sequence[int]]) -> list[float]:
    """What each engine does in a time beside the fastest of them, in a step with such answers and so many others."""
    each = sum(map(len, groups)) / max(1, len(engines) + others)
    return [beside.rate(each) for beside in _compared(engines, _typical_context(groups, prompt_tokens))]


def _typical_context(groups: Sequence[Sequence[int]], prompt_tokens: float) -> float:
    return prompt_tokens + mean_progress([length for row in groups for length in row])


def _handed_over(
    groups: Sequence[Sequence[int]], prompt_tokens: float, engines: Sequence[_Running]
) -> list[tuple[float, int, float]]:
    """What waits when the window ends, in the order in which it will go out: what the reserved engines hold, and what
    the remote ones do that comes later than all they have room for.

    The order is that of what is expected to come of a prompt's unfinished answers, which is all that is known of them
    when it has to be decided.
    """
    lengths = sorted(length for row in groups for length in row)
    table, above, total = [], 0, sum(lengths)
    for tokens in range(0, lengths[-1] + BUCKET, BUCKET):
        while above < len(lengths) and lengths[above] <= tokens:
            total -= lengths[above]
            above += 1
        count = len(lengths) - above
        table.append(total / count - tokens if count else 1.0)
    left: dict[int, float] = {}
    rows = [(engine.remote, row) for engine in engines for row in engine.rows()]
    for _, (rest, group, full) in rows:
        so_far = min(len(table) - 1, int((full - prompt_tokens - rest) / BUCKET))
        left[group] = left.get(group, 0.0) + table[max(0, so_far)]
    room = sum(engine.limit() for engine in engines if engine.remote)
    stay = first_ones([left[row[1]] for _, row in rows], room)
    staying = {group for group in left if left[group] <= stay}
    for engine in engines:
        if engine.remote:
            engine.keep(staying)
    waiting = [row for remote, row in rows if not remote or left[row[1]] > stay]
    return sorted(waiting, key=lambda row: left[row[1]])


def first_ones(left: Sequence[float], room: int) -> float:
    """Up to how much of a prompt may be left for its samples to be among the first ones, for which there is room.
    `left`: of the prompt of each sample. `room`: at least 1."""
    return math.inf if room >= len(left) else sorted(left)[room - 1]


def _trained(
    complete: Sequence[tuple[float, int]], per_group: int, training: Training, window_s: float
) -> tuple[float, float]:
    """When the step ends, and how long the trainer waits: micro-batches of at least so many samples, begun once they
    are complete."""
    needed = -(-training.micro_batch_samples // per_group)
    clock = window_s + (training.switch_s if window_s > 0 else 0.0)
    wait_s = 0.0
    for first in range(0, len(complete), needed):
        part = complete[first : first + needed]
        there_s = part[-1][0]
        wait_s += max(0.0, there_s - clock)
        clock = max(clock, there_s) + training.token_s * sum(tokens for _, tokens in part)
    return clock + training.rest_s, wait_s


def _trained_ahead(
    ended: Sequence[tuple[float, int, float]], missing: list[int], training: Training, window_s: float
) -> tuple[float, float]:
    """The same where a part is done ahead: while too few groups are whole, of samples that are there, oldest first.

    `ended`: (time, group, prompt and full length) of each sample as it ends; `missing`: samples of each group.
    """
    needed = -(-training.micro_batch_samples // missing[0])
    clock = window_s + (training.switch_s if window_s > 0 else 0.0)
    wait_s, left, at = 0.0, len(missing), 0
    whole: deque[int] = deque()
    costs_s, undone = [0.0] * left, [0] * left
    """Of each group: training that is left, and samples of which nothing is done."""
    trained = [False] * left
    waiting: deque[tuple[int, float]] = deque()
    doable = 0
    while left:
        while at < len(ended) and ended[at][0] <= clock:
            _, group, full = ended[at]
            at += 1
            missing[group] -= 1
            costs_s[group] += full * training.token_s
            waiting.append((group, full))
            undone[group] += 1
            doable += 1
            if not missing[group]:
                whole.append(group)
        if len(whole) >= needed or (whole and at == len(ended)):
            for _ in range(min(needed, len(whole))):
                group = whole.popleft()
                trained[group] = True
                clock += costs_s[group]
                doable -= undone[group]
                left -= 1
        elif doable >= training.ahead_samples:
            done = 0
            while waiting and done < training.micro_batch_samples:
                group, full = waiting.popleft()
                if not trained[group]:
                    done += 1
                    undone[group] -= 1
                    costs_s[group] -= full * training.ahead_token_s
                    clock += full * training.ahead_token_s
            doable -= done
        else:
            wait_s += ended[at][0] - clock
            clock = ended[at][0]
    return clock + training.rest_s, wait_s
