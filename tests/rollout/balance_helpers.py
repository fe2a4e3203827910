"""What tests of balance policies show them: rows of samples on an instance, and reports of one of a known speed."""

from __future__ import annotations

from penstock.rollout.balance import PlacedSample, Report
from penstock.rollout.curves import Speed


def rows(
    first: int, count: int, tokens: int = 50, running: bool = True, moves: int = 0, shifts: int = 0
) -> list[PlacedSample]:
    """Samples of prompts of 64 tokens, with leases from `first` on."""
    return [PlacedSample(first + k, tokens, 64 + tokens, running, moves, -1, shifts) for k in range(count)]


def report_of(instance: str, speed: Speed, k: int, steps: int) -> Report:
    """The k-th of some reports with batches, contexts and prefills of many sizes."""
    running, context, prefilled = 1 + k * 7 % 40, 1000.0 * (1 + k * 13 % 50), 1000 * (k % 3)
    wall_s = steps * speed.step_s(running, context) + prefilled * speed.prefill_s
    return Report(instance, wall_s, running, context, steps * running, prefilled)
