"""What is learned about machines and answers: each instance's speed, and how long answers get.

`StepCurve` is an instance's throughput against batch size and context, learned from its own reports. One decode step
with B sequences that hold K tokens of context takes

    step_s = base + B * per_sequence + K * per_context

so throughput is B / step_s: it grows with B until the terms with B outweigh the base. Prefill is a fourth term. The
four are found by least squares over reports with forgetting, each kept at or above zero; no model's and no machine's
constant is written here. Where an instance has said too little, the fleet's curve stands in.

`AnswerLengths` remembers the lengths of answers that finished lately and says what may be left of one that has come so
far. `drain_s` puts both together: how long an instance takes to finish what it holds.

Refuses to know samples, instances and their states: numbers in, numbers out.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["AnswerLengths", "Speed", "StepCurve", "drain_s", "mean_progress"]

FORGET = 0.98
"""Weight of what was known before one more report: a memory of about fifty, so that a throttled card is noticed."""
ENOUGH_REPORTS = 8
"""Before that, a curve of its own is more noise than knowledge."""
SWEEPS = 40
"""Of coordinate descent over four unknowns; it starts at the last solution, and stands long before."""
RIDGE = 1e-6
"""Keeps a term that never varied where it is instead of anywhere."""
LENGTHS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds: a decode step of B sequences with K tokens of context, and prefill."""

    base_s: float
    sequence_s: float
    context_s: float
    prefill_s: float = 0.0

    def step_s(self, running: float, context: float) -> float:
        return self.base_s + running * self.sequence_s + context * self.context_s

    def tokens_per_s(self, running: float, mean_context: float) -> float:
        """Output tokens a second with so many sequences of so much context each."""
        return running / self.step_s(running, running * mean_context) if running > 0 else 0.0

    def steps_in(self, wall_s: float, running: float, context: float) -> float:
        """Decode steps in `wall_s`, while each step adds a token of context to every sequence."""
        first = self.step_s(running, context)
        growth = self.context_s * running
        if growth * wall_s < 1e-9 * first * first:
            return wall_s / first
        # first * k + growth / 2 * k^2 = wall_s
        return ((first * first + 2 * growth * wall_s) ** 0.5 - first) / growth

    def wall_s(self, steps: float, running: float, context: float) -> float:
        """The reverse of `steps_in`."""
        return steps * (self.step_s(running, context) + self.context_s * running * steps / 2)


class StepCurve:
    """One instance's `Speed`, learned."""

    def __init__(self) -> None:
        self.reports = 0
        self._moments = [[0.0] * 4 for _ in range(4)]
        self._answers = [0.0] * 4
        self._found = [0.0] * 4
        self._fresh = True

    def report(self, wall_s: float, running: float, context: float, tokens: int, prefilled: int = 0) -> None:
        """Over `wall_s` in which it was never idle: mean sequences running, mean sum of their context, what it did."""
        if wall_s <= 0 or running <= 0 or tokens <= 0:
            return
        steps = tokens / running
        # Divided by the wall time: every report counts alike, and the residual is a share of it.
        row = [steps / wall_s, tokens / wall_s, steps * context / wall_s, prefilled / wall_s]
        for one in range(4):
            self._answers[one] = FORGET * self._answers[one] + row[one]
            for other in range(4):
                self._moments[one][other] = FORGET * self._moments[one][other] + row[one] * row[other]
        self.reports += 1
        self._fresh = False

    @property
    def speed(self) -> Speed | None:
        """None until enough was reported."""
        if self.reports < ENOUGH_REPORTS:
            return None
        if not self._fresh:
            self._solve()
            self._fresh = True
        base, sequence, context, prefill = self._found
        return Speed(base, sequence, context, prefill) if base + sequence > 0 else None

    def _solve(self) -> None:
        """Least squares with every unknown at or above 0: exact on the set of positive ones."""
        positive = [k for k in range(4) if self._moments[k][k] > 0]
        solution: dict[int, float] = {}
        while positive:
            solution = _solved(self._moments, self._answers, positive)
            worst = min(positive, key=lambda k: solution[k] * self._moments[k][k] ** 0.5)
            if solution[worst] >= 0:
                break
            positive.remove(worst)
        self._found = [solution.get(k, 0.0) if k in positive else 0.0 for k in range(4)]


def _solved(moments: Sequence[Sequence[float]], answers: Sequence[float], chosen: Sequence[int]) -> dict[int, float]:
    """Normal equations over the chosen unknowns, scaled to a unit diagonal, by Gaussian elimination."""
    scale = [moments[k][k] ** 0.5 for k in chosen]
    rows = [
        [moments[one][other] / (scale[i] * scale[j]) + (RIDGE if i == j else 0.0) for j, other in enumerate(chosen)]
        + [answers[one] / scale[i]]
        for i, one in enumerate(chosen)
    ]
    size = len(chosen)
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda r: abs(rows[r][pivot]))
        rows[pivot], rows[best] = rows[best], rows[pivot]
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[below][column] -= factor * rows[pivot][column]
    values = [0.0] * size
    for k in reversed(range(size)):
        left = rows[k][size] - sum(rows[k][j] * values[j] for j in range(k + 1, size))
        values[k] = left / rows[k][k]
    return {unknown: values[k] / scale[k] for k, unknown in enumerate(chosen)}


class AnswerLengths:
    """Lengths of the answers that finished last, cut ones included, as what the next ones will be like."""

    def __init__(self, kept: int = LENGTHS_KEPT) -> None:
        self._recent: deque[int] = deque(maxlen=kept)
        self._sorted: list[int] = []
        self._sums: list[int] = []
        self._mean_progress = 0.0
        self._stale = False
        self._open: dict[int, list[int]] = {}
        self.groups: list[list[int]] = []
        """Lengths of the last whole batch, by prompt, in the order of prompts."""

    def __len__(self) -> int:
        return len(self._recent)

    def finished(self, tokens: int, prompt: int = 0) -> None:
        """`prompt`: of the open batch; -1 of none."""
        self._recent.append(tokens)
        if prompt >= 0:
            self._open.setdefault(prompt, []).append(tokens)
        self._stale = True

    def refresh(self) -> None:
        """Sorts what came in. Until then answers count as before: short ones finish first, and a step's first half
        of them would pass for all."""
        if self._open:
            self.groups = [self._open[prompt] for prompt in sorted(self._open)]
            self._open = {}
        if self._stale:
            self._sorted = sorted(self._recent)
            self._sums = [0]
            for length in self._sorted:
                self._sums.append(self._sums[-1] + length)
            self._mean_progress = mean_progress(self._sorted)
            self._stale = False

    @property
    def known(self) -> bool:
        return bool(self._sorted)

    def ended(self, prompt: int) -> int:
        """Answers to a prompt of the open batch that came to their end."""
        return len(self._open.get(prompt, ()))

    @property
    def mean_progress(self) -> float:
        """Of all that are remembered."""
        return self._mean_progress

    def left(self, so_far: int) -> float:
        """Expected tokens that an answer of `so_far` tokens has still to come; 0 where nothing is known."""
        above = bisect.bisect_right(self._sorted, so_far)
        count = len(self._sorted) - above
        if not count:
            # Longer than any seen: as much again as the longest ones overshoot, at least a token.
            return max(1.0, 0.05 * so_far) if self._sorted else 0.0
        return (self._sums[-1] - self._sums[above]) / count - so_far

    def left_at(self, so_far: int, quantile: float) -> float:
        """The same at a quantile in 0..1 of the answers that got at least so far."""
        above = bisect.bisect_right(self._sorted, so_far)
        count = len(self._sorted) - above
        if not count:
            return max(1.0, 0.05 * so_far) if self._sorted else 0.0
        return self._sorted[above + min(count - 1, int(quantile * count))] - so_far


def mean_progress(lengths: Sequence[int]) -> float:
    """Tokens that a running answer has, averaged over the time that all of them run: E[n^2] / 2 E[n]."""
    return sum(length * length for length in lengths) / (2 * max(1, sum(lengths)))


def drain_s(
    speed: Speed,
    places: int,
    held: Sequence[tuple[float, float]],
    prefill_tokens: float = 0.0,
) -> float:
    """Seconds until an instance has finished what it holds.

    `held`: (tokens still to come, tokens of context now) of each sequence, the running ones first; no more than
    `places` run at once. Exact for the curve, given the lengths: batches shrink and contexts grow.
    """
    if not held:
        return 0.0
    clock = steps = 0.0
    context = 0.0
    ends: list[tuple[float, float]] = []
    waiting = deque(held[places:])
    for left, has in held[:places]:
        heapq.heappush(ends, (left, left + has))
        context += has
    while ends:
        until, final_context = heapq.heappop(ends)
        running = len(ends) + 1
        if until > steps:
            clock += speed.wall_s(until - steps, running, context)
            context += running * (until - steps)
            steps = until
        context -= final_context
        if waiting:
            left, has = waiting.popleft()
            clock += has * speed.prefill_s
            heapq.heappush(ends, (steps + left, left + has))
            context += has
    return clock + prefill_tokens * speed.prefill_s
