"""Which machines go when there are more than are wanted, or more than can be paid for.

Decides only the order. What a machine does for its money counts first: its price over what it does in a time. Of those
that are as good for it, the idle ones go, since what runs on others has to end elsewhere. The manager and the simulator
ask the same function, and so does who predicts a step with fewer machines; nobody's machines are known here.

What the reserved machines cost is not in it. That decides how many are worth having; where one too many is there, a
further second of work is worth about what it costs on the dearest that stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

__all__ = ["AS_GOOD", "Rated", "first_to_go", "work_costs"]

AS_GOOD = 1.1
"""Times what work costs, within which two machines are as good: for less than that nothing is interrupted."""
LEAST_RATE = 0.01
"""What is given nothing to do at all counts for so much, so that of two such ones the far dearer goes first."""


class Rated(Protocol):
    """A machine that may be given up."""

    @property
    def number(self) -> int:
        """The later it was asked for, the greater."""
        ...

    @property
    def known_price(self) -> float | None:
        """Dollars an hour; 0 for one that costs nothing, None where nobody has told."""
        ...

    @property
    def rate(self) -> float:
        """What it does in a time, beside the fastest instance: 1 where that is not known, 0 where it is given none."""
        ...

    @property
    def samples(self) -> int:
        """On it now."""
        ...


Machine = TypeVar("Machine", bound=Rated)


def first_to_go(machines: Iterable[Machine]) -> list[Machine]:
    """All of them, the first one to be given up first."""
    there = list(machines)
    costs = work_costs(there)
    as_good: dict[int, int] = {}
    """Place among those that differ by more than chance, by index: 0 for the best ones."""
    place, least = 0, 0.0
    for k in sorted(range(len(there)), key=lambda k: costs[k]):
        if costs[k] > AS_GOOD * least:
            place, least = place + 1, costs[k]
        as_good[k] = place

    def order(k: int) -> tuple[int, bool, float, int, int]:
        machine = there[k]
        return -as_good[k], machine.samples > 0, -costs[k], machine.samples, -machine.number

    return [there[k] for k in sorted(range(len(there)), key=order)]


def work_costs(machines: Sequence[Rated]) -> list[float]:
    """Of each machine, what the same work costs on it, times the least; 0 where it is free. One whose price nobody has
    told costs as much as those that cost something, on the mean."""
    # What is free says nothing of what others cost.
    known = [price for machine in machines if (price := machine.known_price)]
    usual = sum(known) / len(known) if known else 1.0
    costs = [
        (usual if machine.known_price is None else machine.known_price) / max(machine.rate, LEAST_RATE)
        for machine in machines
    ]
    least = min((cost for cost in costs if cost > 0), default=1.0)
    return [cost / least for cost in costs]
