"""What a run's event log keeps of its instances' work and its answers' lengths, for `penstock simulate fit`.

Decides how that is summed up: per instance, one row for each power of two of the batch size, at most every `EVERY_S`
seconds and when a batch ends; per batch, quantiles of lengths. Memory and log grow with instances and batches, never
with tokens. Refuses to draw conclusions: those are the fit's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.observe.events import AnswersEnded, Event, InstanceWorked, Work
from penstock.rollout.balance import Report
from penstock.rollout.batch import Batch, TrackedSample
from penstock.sample import is_turn

__all__ = ["EVERY_S", "QUANTILES", "WorkLog"]

EVERY_S = 30.0
"""Between two events of one instance, within a batch."""
QUANTILES = 20
BATCHES = 16
"""Open at once of which lengths are gathered."""


@dataclass(slots=True)
class _Sums:
    wall_s: float = 0.0
    steps: float = 0.0
    tokens: int = 0
    context_steps: float = 0.0
    prefilled: int = 0
    most_context: float = 0.0
    full: bool = False

    def work(self) -> Work:
        return Work(
            wall_s=round(self.wall_s, 6),
            steps=round(self.steps, 3),
            tokens=self.tokens,
            context_steps=round(self.context_steps, 1),
            prefilled=self.prefilled,
            most_context=int(self.most_context),
            full=self.full,
        )


@dataclass(slots=True)
class _Instance:
    name: str
    reserved: bool
    max_running: int
    since: float
    sums: dict[int, _Sums] = field(default_factory=dict)
    """By the power of two that the batch size was nearest to."""


class WorkLog:
    """Sums up; `emit` takes the events, `ts` says now in seconds since 1970."""

    def __init__(self, emit: Callable[[Event], None], ts: Callable[[], float]) -> None:
        self._emit = emit
        self._ts = ts
        self._instances: dict[str, _Instance] = {}
        self._lengths: dict[str, dict[int, list[int]]] = {}

    def worked(self, report: Report, name: str, reserved: bool, max_running: int) -> None:
        """One report of work without idling."""
        ts = self._ts()
        held = self._instances.get(report.instance)
        if held is None:
            held = self._instances[report.instance] = _Instance(name, reserved, max_running, ts)
        held.max_running = max_running
        sums = held.sums.setdefault(round(math.log2(max(1.0, report.running))), _Sums())
        steps = report.tokens / report.running
        sums.wall_s += report.wall_s
        sums.steps += steps
        sums.tokens += report.tokens
        sums.context_steps += steps * report.context_tokens
        sums.prefilled += report.prefilled
        sums.most_context = max(sums.most_context, report.context_tokens)
        sums.full |= report.pending > 0
        if ts - held.since >= EVERY_S:
            self._tell(report.instance)

    def finished(self, sample: TrackedSample) -> None:
        """An answer came to its end. Further turns of conversations are not told of: they are thousands of batches."""
        if is_turn(sample.batch.name):
            return
        groups = self._lengths.setdefault(sample.batch.name, {})
        groups.setdefault(sample.prompt, []).append(sample.length)
        if len(self._lengths) > BATCHES:
            # One that was cancelled never ends.
            del self._lengths[next(iter(self._lengths))]

    def batch_ended(self, batch: Batch) -> None:
        """All of its samples are accounted for; not told of a further turn."""
        for instance in list(self._instances):
            self._tell(instance)
        groups = self._lengths.pop(batch.name, {})
        if groups:
            prompt_tokens = sum(len(batch.prompt_bytes(prompt)) // 4 for prompt in groups) / len(groups)
            rows = list(groups.values())
            lengths = sorted(length for row in rows for length in row)
            self._emit(
                AnswersEnded(
                    ts=self._ts(),
                    batch=batch.name,
                    prompts=len(rows),
                    samples=len(lengths),
                    prompt_tokens=prompt_tokens,
                    quantiles=[_quantile(lengths, k / QUANTILES) for k in range(QUANTILES + 1)],
                    prompt_share=prompt_share(rows),
                )
            )

    def gone(self, instance: str) -> None:
        self._tell(instance)
        self._instances.pop(instance, None)

    def _tell(self, instance: str) -> None:
        held = self._instances.get(instance)
        if held is None or not held.sums:
            return
        held.since = ts = self._ts()
        work = [held.sums[size].work() for size in sorted(held.sums)]
        held.sums.clear()
        self._emit(
            InstanceWorked(
                ts=ts,
                instance=instance,
                name=held.name,
                reserved=held.reserved,
                max_running=held.max_running,
                work=work,
            )
        )


def prompt_share(groups: Sequence[Sequence[int]]) -> float:
    """Share of the variance of log-lengths that lies between prompts, from a one-way analysis of variance.

    With n groups, k members each (their mean number) and mean squares B between and W within, the prompts' variance
    is (B - W) / k, held at 0 or above. 0 where there is nothing to tell it from.
    """
    rows = [[math.log(max(1, length)) for length in group] for group in groups if group]
    total = sum(len(row) for row in rows)
    if len(rows) < 2 or total <= len(rows):
        return 0.0
    grand = sum(sum(row) for row in rows) / total
    means = [sum(row) / len(row) for row in rows]
    within = sum((x - mean) ** 2 for row, mean in zip(rows, means) for x in row) / (total - len(rows))
    between = sum(len(row) * (mean - grand) ** 2 for row, mean in zip(rows, means)) / (len(rows) - 1)
    of_prompts = max(0.0, (between - within) / (total / len(rows)))
    return of_prompts / (of_prompts + within) if of_prompts + within > 0 else 0.0


def _quantile(ordered: Sequence[int], share: float) -> float:
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
