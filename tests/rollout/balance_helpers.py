"""What tests of balance policies show them: rows of samples on an instance, reports of one of a known speed, steps with
other numbers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

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


@dataclass
class Replayed:
    """Steps with other numbers of machines, in so many bits each. `price`: of the k-th machine."""

    step_s: Callable[[int], float | None]
    bits: int = 3
    price: Callable[[int], float | None] = lambda k: None
    asked: list[int] = field(default_factory=list)

    def seconds(self, machines: int) -> Generator[None, None, float | None]:
        self.asked.append(machines)
        for _ in range(self.bits):
            yield
        return self.step_s(machines)

    def prices(self, machines: int) -> Sequence[float | None]:
        return [self.price(k) for k in range(machines)]
