"""Which machines go when there are more than are wanted, or more than can be paid for.

Decides only the order. What a machine does for its money counts first: its price times how much slower it is than the
fastest one. Of those that are as good as the best, the idle ones go, since what runs on others has to end elsewhere.
The manager and the simulator ask the same function; neither's machines are known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

__all__ = ["Rated", "first_to_go"]

AS_GOOD = 1.1
"""Times the least that work costs on any of them: for less than that nothing is interrupted."""


class Rated(Protocol):
    """A machine that may be given up."""

    @property
    def number(self) -> int:
        """The later it was asked for, the greater."""
        ...

    @property
    def price_per_h(self) -> float:
        """0 where none is known."""
        ...

    @property
    def slower(self) -> float:
        """Times as long as the fastest one's its decode step takes; 1 where that is not known."""
        ...

    @property
    def samples(self) -> int:
        """On it now."""
        ...


Machine = TypeVar("Machine", bound=Rated)


def first_to_go(machines: Iterable[Machine]) -> list[Machine]:
    """All of them, the first one to be given up first."""
    there = list(machines)
    priced = any(machine.price_per_h > 0 for machine in there)

    def work_costs(machine: Machine) -> float:
        return machine.slower * (machine.price_per_h if priced else 1.0)

    dear = AS_GOOD * min(map(work_costs, there), default=0.0)

    def order(machine: Machine) -> tuple[float, bool, float, int, int]:
        costs = work_costs(machine)
        too_dear = -costs if costs > dear else 0.0
        return too_dear, machine.samples > 0, -costs, machine.samples, -machine.number

    return sorted(there, key=order)
