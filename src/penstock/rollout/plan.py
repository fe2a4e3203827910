"""A step worked out in advance: how wide to run and how long the reserved engines generate, found by replay.

The trainer can only take complete groups, so two things trade against each other. Wide batches have the most tokens a
second, and finish their first groups late: the trainer starves early, and the remote machines idle at the end. Narrow
ones finish groups one after another, and waste the machines. So an engine begins wide, while contexts are short and a
wide batch costs little, and is given nothing more until it has narrowed: its `Limits` change over the window, remote
and reserved engines apart. What is best depends on speeds, lengths and training, and all three are learned. So the
last steps' answers are replayed on the machines that are there, with learned speeds, for about a hundred choices, and
the one with the shortest step is taken.

Decides nothing but the `Plan`; refuses to know instances, samples and clocks. One way of running is `step_replay`.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from penstock.rollout.step_replay import Engine, Limits, Plan, Training, replay

__all__ = ["best_plan", "search"]

WIDTHS = (0.06, 0.09, 0.13, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)
"""Shares of an engine's places that reserved engines alone look at; the optimum is flat."""
REMOTE = ((1.0, 1.0), (0.5, 0.25), (0.25, 0.25), (0.25, 0.09), (0.13, 0.13))
"""Limits of the remote engines looked at first, begin and end."""
RESERVED = ((1.0, 0.03), (0.35, 1.0), (1.0, 1.0))
"""Of the reserved ones: to let in all at first and then nobody, so that they narrow; or the other way round."""
LEAST = 0.01
"""Lowest limit: one at a time."""
TO_THE_END = ((Limits(), Limits()), (Limits(0.0, 0.0), Limits()))
"""Limits looked at where the reserved engines generate until all is there. Remote ones that are slower for each
sequence may then better have next to none: a long answer that began there would end last."""
LATE = (0.6, 0.75, 0.9)
"""Windows looked at with all that the reserved engines take, as shares of all the generating."""
WINDOWS = (0.1, 0.2, 0.3, 0.45, 0.65, 0.9, 1.2)
"""First looked at, as shares of the training time."""
LONGER = 1.6
"""Factor between longer ones, up to all of the generating: where answers take longer than training on them, few remote
machines are no reason for fast engines of one's own to stop."""
TRIES = 60
"""Choices after that: random steps from the best one so far, which get shorter."""
WIDE = 0.5
"""The first of them, as a logarithm of each limit."""
FAR = 0.06
"""And in the window, as a share of the training time, or of the window where that is longer."""
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
CLEARLY = 0.01
"""Share of a step by which some choices must be better: lower limits for engines that are alone, and reserved ones that
take all they can in long windows. What a replay does not have, the moves that level equal engines at the end, is
worth as much, and samples that had to wait may turn out to be the longest."""
FEWEST = 3
"""Choices that are looked at however short steps are."""


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
    usual_s = WINDOWS[-1] * train_s
    """Longer windows are for steps whose generating outlasts their training."""
    rows = [*groups, *earlier]
    samples = sum(len(row) for row in groups)
    # A step is no shorter than its training, however short the last one was.
    most = THOUGHT * max(near.step_s, train_s) / (REPLAY_S * samples) if near is not None else math.inf
    chances = _chances(rows, len(groups), CHANCES if most >= CHANCES * len(REMOTE) * 2 else 1)
    best: Plan | None = None
    best_of: list[Plan] = []
    """Its replays."""
    replays = 0
    whole_s = 0.0
    """Until all is generated where the reserved engines go on to the end."""

    def looked(
        limits: tuple[Limits, Limits], window_s: float, others: Sequence[Engine] = remote, gain: float = 0.0
    ) -> Generator[Plan | None, None, Plan]:
        nonlocal best, best_of, replays, whole_s
        if best is not None and replays >= max(FEWEST * len(chances), most):
            return best
        plans: list[Plan] = []
        for chance in chances:
            replays += 1
            plans.append(replay(chance, prompt_tokens, others, reserved, training, limits, max(0.0, window_s)))
            plan = _mean(plans)
            if others and window_s == math.inf and not whole_s:
                whole_s = plan.window_s
            if best is not None and _loss_s(plan) > HOPELESS * _loss_s(_mean(best_of[: len(plans)])):
                break
            if len(plans) < len(chances):
                yield best
        else:
            if best is None or _loss_s(plan) < (1 - gain) * _loss_s(best):
                best, best_of = plan, plans
        yield best
        assert best is not None
        return best

    if not remote:
        for width in reversed(WIDTHS):
            yield from looked((Limits(width, width), Limits(width, width)), 0.0, gain=CLEARLY)
        return
    if near is None:
        found = yield from looked((Limits(), Limits()), 0.0)
        windows_s = [share * train_s for share in WINDOWS]
        if reserved:
            for limits in TO_THE_END:
                found = yield from looked(limits, math.inf)
            windows_s += _longer(usual_s, whole_s)
        for begin, end in REMOTE:
            for window_s in windows_s:
                found = yield from looked((Limits(begin, end), Limits(*RESERVED[0])), window_s)
            if whole_s > usual_s:
                for share in LATE:
                    found = yield from looked((Limits(begin, end), Limits()), share * whole_s, gain=CLEARLY)
    else:
        found = yield from looked((near.remote, near.reserved), near.window_s)
        for share in (0.15, -0.15):
            found = yield from looked(
                (found.remote, found.reserved), found.window_s + share * max(train_s, found.window_s)
            )
        if reserved:
            # From a valley of short windows single steps don't lead to that of long ones.
            for limits in TO_THE_END:
                found = yield from looked(limits, math.inf)
            for window_s in _longer(max(found.window_s, usual_s), whole_s):
                found = yield from looked((found.remote, found.reserved), window_s)
        # Each shape has a valley of its own; lengths and fleets decide which is deepest.
        window_s = found.window_s
        for pair in REMOTE:
            for part in (1.0, 0.85):
                found = yield from looked((Limits(*pair), Limits(*RESERVED[0])), part * window_s)
                if window_s > usual_s:
                    found = yield from looked((Limits(*pair), Limits()), part * window_s, gain=CLEARLY)
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
        window_s = found.window_s + source.gauss(0, reach * FAR) * max(train_s, found.window_s)
        found = yield from looked(_changed((found.remote, found.reserved), factors), window_s)


def _longer(than_s: float, most_s: float) -> list[float]:
    """Windows between those two, the longer one among them."""
    found = []
    while most_s > LONGER * than_s:
        found.append(most_s)
        most_s /= LONGER
    return found[::-1]


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

    def side(old: Limits, begin: float, end: float) -> Limits:
        if begin == end == 1.0:
            # Next to nothing stays next to nothing.
            return old
        return Limits(*(min(1.0, max(LEAST, share)) for share in (old.begin * begin, old.end * end)))

    return side(limits[0], *factors[:2]), side(limits[1], *factors[2:])


def _loss_s(plan: Plan) -> float:
    return plan.step_s + IDLE_COUNTS * plan.remote_wait_s
