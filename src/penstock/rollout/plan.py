"""A step worked out in advance: how wide to run and how long the reserved engines generate, found by replay.

The trainer can only take complete groups, so two things trade against each other. Wide batches have the most tokens a
second, and finish their first groups late: the trainer starves early, and the remote machines idle at the end. Narrow
ones finish groups one after another, and waste the machines. So an engine begins wide, while contexts are short and a
wide batch costs little, and is given nothing more until it has narrowed: its `Limits` change over the window, remote
and reserved engines apart. What is best depends on speeds, lengths and training, and all three are learned. So the
last steps' answers are replayed on the machines that are there, with learned speeds, for about a hundred choices, and
the one with the shortest step is taken.

Decides nothing but the `Plan`; refuses to know instances, samples and clocks. One replay costs a few microseconds a
sample.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Container, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from penstock.rollout.curves import Speed

__all__ = [
    "ONE_BY_ONE",
    "Engine",
    "Limits",
    "Plan",
    "Training",
    "best_plan",
    "first_ones",
    "limited",
    "replay",
    "search",
]

WIDTHS = (0.06, 0.09, 0.13, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)
"""Shares of an engine's places that reserved engines alone look at; the optimum is flat."""
REMOTE = ((1.0, 1.0), (0.5, 0.25), (0.25, 0.25), (0.25, 0.09), (0.13, 0.13))
"""Limits of the remote engines looked at first, begin and end."""
RESERVED = ((1.0, 0.03), (0.35, 1.0), (1.0, 1.0))
"""Of the reserved ones: to let in all at first and then nobody, so that they narrow; or the other way round."""
WINDOWS = (0.1, 0.2, 0.3, 0.45, 0.65, 0.9, 1.2)
"""First looked at, as shares of the training time."""
TRIES = 60
"""Choices after that: random steps from the best one so far, which get shorter."""
WIDE = 0.5
"""The first of them, as a logarithm of each limit."""
FAR = 0.06
"""And in the window, as a share of the training time."""
LEAST = 0.01
"""Lowest limit: one at a time."""
SLIVER = 1e-3
"""Of a decode step, past the moment at which memory is full."""
WAITING = 8
"""Samples that may wait at an engine whose memory is full."""
IDLE_COUNTS = 0.1
"""A second in which remote machines idle at the end, against one of the step: of plans about as long, the one that
keeps them busy is the less wide, and a wide one loses more where lengths turn out otherwise."""
CHANCES = 4
"""Replays of a choice."""
HOPELESS = 1.01
"""A choice that is so much worse than the best one in its first replays is not replayed again (racing, Maron and Moore,
1993)."""
THOUGHT = 0.02
"""Share of a step that a plan about the last one may cost: in steps of a second, machines that generate need the
processor more."""
REPLAY_S = 1e-5
"""Of a processor, for each sample in a replay, about."""
FEWEST = 3
"""Choices that are looked at however short steps are."""
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
        return self.limits.samples(self.engine.places, self.at_s, self.window_s)

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
    if not remote:
        window_s = math.inf
    waiting = deque(
        (float(length), group, prompt_tokens + length) for group, row in enumerate(groups) for length in row
    )
    moved: deque[tuple[float, int, float]] = deque()
    engines = [_Running(engine, True, engine.starts_s, limits[0], window_s) for engine in remote]
    if window_s > 0:
        engines += [_Running(engine, False, engine.starts_s, limits[1], window_s) for engine in reserved]
    missing = [len(row) for row in groups]
    complete: list[tuple[float, int]] = []
    events: list[tuple[float, int]] = []

    def fill(index: int) -> None:
        engine = engines[index]
        engine.settle()
        while moved and engine.takes():
            engine.give(*moved.popleft())
        while not moved and waiting and engine.takes():
            engine.give(*waiting.popleft())
        if engine.ends:
            heapq.heappush(events, (engine.due(), index))

    # A prompt to each in turn, as replicas are kept together.
    while waiting and any(engine.takes() for engine in engines):
        for engine in engines:
            prompt = waiting[0][1] if waiting else -1
            while waiting and waiting[0][1] == prompt and engine.takes():
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
            for engine in engines:
                engine.advance(window_s)
            moved.extend(_handed_over(groups, prompt_tokens, engines))
            engines = [engine for engine in engines if engine.remote]
            events.clear()
            while moved and any(engine.takes() for engine in engines):
                for engine in engines:
                    if moved and engine.takes():
                        engine.give(*moved.popleft())
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
    step_s, wait_s = _trained(complete, len(groups[0]), training, window_s)
    return Plan(*limits, window_s, step_s, wait_s, max(0.0, step_s - last_s), finished)


def best_plan(
    groups: Sequence[Sequence[int]],
    prompt_tokens: float,
    remote: Sequence[Engine],
    reserved: Sequence[Engine],
    training: Training,
    near: Plan | None = None,
    earlier: Sequence[Sequence[int]] = (),
) -> Plan:
    """The choice with the shortest step; of about equal ones the one that leaves the remote machines the least idle.

    `near`: the last plan, around which to look. Without one, everything is looked at. `earlier`: prompts of the steps
    before the one of `groups`, like its own.
    """
    found = deque(search(groups, prompt_tokens, remote, reserved, training, near, earlier), maxlen=1).pop()
    if found is None:
        raise ValueError("nothing to plan: there are no answers")
    return found


def search(
    groups: Sequence[Sequence[int]],
    prompt_tokens: float,
    remote: Sequence[Engine],
    reserved: Sequence[Engine],
    training: Training,
    near: Plan | None = None,
    earlier: Sequence[Sequence[int]] = (),
) -> Iterator[Plan | None]:
    """`best_plan`, one replay at a time: the best so far after each. Whoever may not stand still does others' work
    in between. A choice is replayed `CHANCES` times, for steps that might as well have been: what is best for the very
    answers of one step is worth less in the next."""
    train_s = training.token_s * sum(sum(row) + prompt_tokens * len(row) for row in groups)
    rows = [*groups, *earlier]
    samples = sum(len(row) for row in groups)
    # A step is no shorter than its training, however short the last one was.
    most = THOUGHT * max(near.step_s, train_s) / (REPLAY_S * samples) if near is not None else math.inf
    chances = _chances(rows, len(groups), CHANCES if most >= CHANCES * len(REMOTE) * 2 else 1)
    best: Plan | None = None
    best_of: list[Plan] = []
    """Its replays."""
    replays = 0

    def looked(
        limits: tuple[Limits, Limits], window_s: float, others: Sequence[Engine] = remote
    ) -> Generator[Plan | None, None, Plan]:
        nonlocal best, best_of, replays
        if best is not None and replays >= max(FEWEST * len(chances), most):
            return best
        plans: list[Plan] = []
        for chance in chances:
            replays += 1
            plans.append(replay(chance, prompt_tokens, others, reserved, training, limits, max(0.0, window_s)))
            plan = _mean(plans)
            if best is not None and _loss_s(plan) > HOPELESS * _loss_s(_mean(best_of[: len(plans)])):
                break
            if len(plans) < len(chances):
                yield best
        else:
            if best is None or _loss_s(plan) < _loss_s(best):
                best, best_of = plan, plans
        yield best
        assert best is not None
        return best

    if not remote:
        for width in WIDTHS:
            yield from looked((Limits(width, width), Limits(width, width)), 0.0)
        return
    if near is None:
        found = yield from looked((Limits(), Limits()), 0.0)
        for begin, end in REMOTE:
            for share in WINDOWS:
                found = yield from looked((Limits(begin, end), Limits(*RESERVED[0])), share * train_s)
    else:
        found = yield from looked((near.remote, near.reserved), near.window_s)
        for share in (0.15, -0.15):
            found = yield from looked((found.remote, found.reserved), found.window_s + share * train_s)
        # Each shape has a valley of its own; lengths and fleets decide which is deepest.
        window_s = found.window_s
        for pair in REMOTE:
            for part in (1.0, 0.85):
                found = yield from looked((Limits(*pair), Limits(*RESERVED[0])), part * window_s)
    if min(engine.starts_s for engine in remote) > found.window_s > 0:
        # Nobody could go on at the window's end: it may be better to wait for none of them.
        found = yield from looked((Limits(), Limits()), math.inf, [])
    for pair in RESERVED[1:]:
        found = yield from looked((found.remote, Limits(*pair)), found.window_s)
    # A narrower engine wants another window: one number at a time, the search would stay where it is.
    source = random.Random(0)
    for number in range(TRIES):
        reach = 1 - number / TRIES
        factors = [math.exp(source.gauss(0, reach * WIDE)) for _ in range(4)]
        if number % 2:
            which = source.randrange(4)
            factors = [factor if k == which else 1.0 for k, factor in enumerate(factors)]
        if number % 4 == 3:
            factors = [1.0] * 4
        window_s = found.window_s + source.gauss(0, reach * FAR) * train_s
        found = yield from looked(_changed((found.remote, found.reserved), factors), window_s)


def _mean(plans: Sequence[Plan]) -> Plan:
    """Of the same choice."""
    return replace(
        plans[0],
        window_s=statistics.fmean(plan.window_s for plan in plans),
        step_s=statistics.fmean(plan.step_s for plan in plans),
        trainer_wait_s=statistics.fmean(plan.trainer_wait_s for plan in plans),
        remote_wait_s=statistics.fmean(plan.remote_wait_s for plan in plans),
        finished=statistics.fmean(plan.finished for plan in plans),
    )


def _chances(rows: Sequence[Sequence[int]], prompts: int, count: int) -> list[list[Sequence[int]]]:
    """Steps that might as well have been: each of so many prompts, drawn so that all together hold each row about
    equally often (the balanced bootstrap of Davison, Hinkley and Schechtman, 1986)."""
    drawn = [row for row in rows for _ in range(-(-prompts * count // len(rows)))]
    random.Random(0).shuffle(drawn)
    return [drawn[k::count][:prompts] for k in range(count)]


def _changed(limits: tuple[Limits, Limits], factors: Sequence[float]) -> tuple[Limits, Limits]:
    """Each of the four numbers multiplied."""
    old = [limits[0].begin, limits[0].end, limits[1].begin, limits[1].end]
    shares = [min(1.0, max(LEAST, share * factor)) for share, factor in zip(old, factors)]
    return Limits(shares[0], shares[1]), Limits(shares[2], shares[3])


def _loss_s(plan: Plan) -> float:
    return plan.step_s + IDLE_COUNTS * plan.remote_wait_s


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
