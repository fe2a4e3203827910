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
