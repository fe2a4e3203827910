"""Prices that change within a step: `bound`'s argument with two phases, found by a small search.

Early in a step there are more machines than what is due soon can use well, and late in it fewer and fewer answers are
left, so a machine's second is not worth the same throughout. Put a price of 1 on a second of a remote machine until
`turn_s` and of `late` after that, and of `reserved` on one of a reserved machine whenever it is. A second in which
sequence i is decoded costs `early * w_i` until `turn_s`, with `early` at most 1, and w_i after that. Wherever a token
is decoded, it pays at least `(sqrt(price * c) + sqrt(base * w))^2` of that place (see `bound`), so at least the least
of these over the places that there are. A group that is complete C seconds after generating could begin has been
decoded for no longer than

- C, if that is before the turn: it pays as the places before the turn ask for, with w_i throughout;
- else what there is before the turn, and what C is longer than that after it.

Where a part of training waits for the sample alone, that part of w_i is bounded by the sample's own C in the same way:
one that ends before the turn, in a group that does not, is decoded before it at `early` times its group's part and all
of its own.

So machines are paid at least the lesser of the two, less `w * C`; and the sum of `w * C` over groups is bounded by the
trainer, as in `bound`. This holds at any prices. Hence whatever a search comes to is a bound, and a poor search only a
low one.

**Sums.** What a token pays is concave in its context: the least over places of `price * c + base * w + 2 sqrt(price *
base * w * c)`, with c linear. So the trapezoidal rule is never above the integral.

Decides which prices are tried; refuses to know policies. The search is on a part of the groups, with a rule that is
exact enough; what counts is what all groups pay at the prices that it ends with, by the trapezoidal rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

__all__ = ["Cost", "Demands", "Supply", "dealt", "longer_s", "prefilled_tokens"]

SIMPSON = (1 / 6, 4 / 6, 1 / 6)
TRAPEZOIDS = tuple((0.5 if end in (0, 8) else 1.0) / 8 for end in range(9))
ROUNDS = (0.5, 0.5, 0.25, 0.25, 0.12, 0.12, 0.06)
"""Step of a price's logarithm in each round through all of them."""
LATE, EARLY, TURN = 0.7, 0.45, 0.65
"""Where the search begins; the turn as a share of the step."""
CLIMBS = 3
HALVINGS = 30


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a decode step, of the fastest machine in each respect."""

    base: float
    sequence: float
    context: float
    """Of a token that was drawn."""
    prefill: float
    prompt: float
    """Of a prompt's token in the context; less than `context` where it is in memory for others, too."""
    shared: bool = False
    """A prompt is prefilled once for all that run with it."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a machine's second (a remote one's before the turn is 1), and of a second until a group is complete, for each
    second of training on it."""

    price: float
    reserved: float
    late: float
    early: float
    turn_s: float


@dataclass(frozen=True, slots=True)
class Supply:
    """What there is to pay from in a step of so many seconds."""

    remote: Callable[[float, float], float]
    """(step, until): instance-seconds of remote machines before `until` that can be of use."""
    reserved: Callable[[float], float]
    begun: Callable[[float], float]
    """Seconds until a group is complete, times its training: sum over all groups at most."""
    begins_s: float
    """Until the first machine can generate."""

    def worth(self, at: Prices, step_s: float) -> float:
        early, remote = self.remote(step_s, at.turn_s), self.remote(step_s, math.inf)
        machines = early + at.late * (remote - early) + at.reserved * self.reserved(step_s)
        return machines + at.price * self.begun(step_s)


class Demands:
    """What groups of samples pay at least."""

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[int, int]]],
        train_s: Sequence[float],
        remote: Cost,
        reserved: Cost,
        rule: Sequence[float],
        ahead: float = 0.0,
    ) -> None:
        """`groups`: (tokens of the prompt, tokens of the answer) of each sample; `train_s`: seconds of training on
        each group, of which a share of `ahead` needs no whole one; `rule`: weights of points at equal distances in an
        answer."""
        self.ahead = ahead
        self.groups, self.train_s, self.remote, self.reserved, self.rule = groups, train_s, remote, reserved, rule
        once = remote.shared or reserved.shared
        self.prefilled = sum(prefilled_tokens([prompt for prompt, _ in group], once) for group in groups)
        self._samples = [self._rooted(group, part_s) for group, part_s in zip(groups, train_s)]

    def paid(self, at: Prices, early_s: float) -> float:
        """`early_s`: seconds in which generating is possible before the turn."""
        late, own, early = math.sqrt(at.late), math.sqrt(at.reserved), math.sqrt(at.early)
        first, third = math.sqrt(self.remote.base * at.price), math.sqrt(self.reserved.base * at.price)
        saved = (1 - at.early) * at.price * early_s
        total = 0.0
        for samples in self._samples:
            soon = later = 0.0
            for tokens, (own_s, group_s), points in samples:
                weight = math.sqrt(own_s + group_s)
                remote, reserved = first * weight, third * weight
                early_remote, early_reserved = early * remote, early * reserved
                if own_s:
                    between = math.sqrt(own_s + at.early * group_s)
                    mid_remote, mid_reserved = first * between, third * between
                sum_soon = sum_later = sum_mid = 0.0
                for share, root, own_root in points:
                    mine, other = root + remote, own * own_root + reserved
                    if other < mine:
                        mine = other
                    sum_soon += share * mine * mine
                    mine, other, after = root + early_remote, own * own_root + early_reserved, late * root + remote
                    if other < mine:
                        mine = other
                    if after < mine:
                        mine = after
                    sum_later += share * mine * mine
                    if own_s:
                        mine, other = root + mid_remote, own * own_root + mid_reserved
                        if other < mine:
                            mine = other
                        sum_mid += share * mine * mine
                soon += tokens * sum_soon
                behind = tokens * sum_later + saved * (own_s + group_s)
                if own_s:
                    behind = min(behind, tokens * sum_mid + saved * group_s)
                later += behind
            total += soon if soon < later else later
        prefill = min(self.remote.prefill * min(1.0, at.late), at.reserved * self.reserved.prefill)
        return total + self.prefilled * prefill

    def _rooted(
        self, group: Sequence[tuple[int, int]], train_s: float
    ) -> list[tuple[int, tuple[float, float], list[tuple[float, float, float]]]]:
        """Of each sample: tokens, its weights as `dealt`, and (share, root of a token's cost remotely, on a reserved
        machine) at each point."""
        pieces = len(self.rule) - 1
        found = []
        for prompt, tokens in group:
            drawn = [tokens * end / pieces for end in range(pieces + 1)]
            roots, own_roots = (
                [math.sqrt(cost.sequence + cost.prompt * prompt + cost.context * so_far) for so_far in drawn]
                for cost in (self.remote, self.reserved)
            )
            sum_of_roots = tokens * sum(share * root for share, root in zip(self.rule, roots))
            found.append((tokens, sum_of_roots, list(zip(self.rule, roots, own_roots))))
        weights = dealt(
            train_s, self.ahead, [prompt + tokens for prompt, tokens in group], [value for _, value, _ in found]
        )
        return [(tokens, own, points) for (tokens, _, points), own in zip(found, weights)]


def dealt(train_s: float, ahead: float, tokens: Sequence[int], roots: Sequence[float]) -> list[tuple[float, float]]:
    """What a group's weight of `train_s` comes to for its samples: (for the sample's own end, for the group's).

    A share of `ahead` is each sample's own, by its `tokens`; the rest is dealt as the squares of what their sums of
    roots are, where the sum of roots is greatest."""
    total, squares = sum(tokens), sum(value * value for value in roots)
    return [
        (
            ahead * train_s * count / max(1, total),
            (1 - ahead) * train_s * value * value / squares if squares > 0 else 0.0,
        )
        for count, value in zip(tokens, roots)
    ]


def prefilled_tokens(prompts: Sequence[int], once: bool) -> int:
    """Tokens of one group's prompt that have to be computed; `once`: for all of its samples."""
    return max(prompts, default=0) if once else sum(prompts)


def longer_s(coarse: Demands, whole: Demands, supply: Supply, low_s: float, price: float, reserved: float) -> float:
    """A bound above one of `low_s` seconds, or that.

    `coarse`: a part of the groups, with which prices are looked for. `price`, `reserved`: those of `low_s`, where they
    do not change.
    """
    part = sum(coarse.train_s) / sum(whole.train_s)
    at = Prices(1.6 * price, reserved, LATE, EARLY, TURN * low_s)
    for _ in range(CLIMBS):

        def missing(tried: Prices, step_s: float = low_s) -> float:
            paid = coarse.paid(tried, max(0.0, tried.turn_s - supply.begins_s))
            return paid / part - supply.worth(tried, step_s)

        at = _climbed(at, missing)
        paid = whole.paid(at, max(0.0, at.turn_s - supply.begins_s))
        longer = _until_paid(low_s, lambda step_s, at=at, paid=paid: paid - supply.worth(at, step_s))  # type: ignore[misc]
        if longer < 1.001 * low_s:
            return longer
        low_s = longer
    return low_s


def _climbed(at: Prices, height: Callable[[Prices], float]) -> Prices:
    """Coordinates in turn, and two lines on which prices go together."""
    moves: tuple[Callable[[Prices, float], Prices], ...] = (
        lambda at, by: replace(at, price=at.price * by),
        lambda at, by: replace(at, late=at.late * by),
        lambda at, by: replace(at, early=min(1.0, at.early * by)),
        lambda at, by: replace(at, turn_s=at.turn_s * by**0.25),
        lambda at, by: replace(at, reserved=at.reserved * by**0.25),
        lambda at, by: replace(at, price=at.price * by, late=at.late / by, early=min(1.0, at.early / by**2)),
        lambda at, by: replace(at, price=at.price * by, early=min(1.0, at.early / by)),
    )
    best = height(at)
    for step in ROUNDS:
        for move in moves:
            for by in (math.exp(step), math.exp(-step)):
                tried = move(at, by)
                if tried != at and (found := height(tried)) > best:
                    at, best = tried, found
                    break
    return at


def _until_paid(low_s: float, missing: Callable[[float], float]) -> float:
    """The longest step of which something cannot be paid; `missing` falls with the time."""
    if missing(low_s) <= 0:
        return low_s
    high_s = 1.05 * low_s
    while missing(high_s) > 0:
        low_s, high_s = high_s, 1.5 * high_s
        if high_s > 1e9:
            return low_s
    for _ in range(HALVINGS):
        middle = (low_s + high_s) / 2
        low_s, high_s = (middle, high_s) if missing(middle) > 0 else (low_s, middle)
    return low_s
