"""What machines cost, and how many can be paid for.

Decides nothing but that: spend is summed up over every machine from the moment it is asked for until its release is
confirmed, and of the budget what machines still cost after they are told to go is put aside. Knows no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from penstock.rollout.provision_types import Machine, ProvisionConfig

__all__ = ["Purse"]

HOUR_S = 3600.0
START_UPS = 2.0
"""A machine is asked for only where the budget pays it for so many of its start-up times."""


class Purse:
    """`spent`: dollars, by this manager and those before it."""

    def __init__(self, config: ProvisionConfig, spent: float = 0.0) -> None:
        self._config = config
        self.spent = spent

    def charge(self, machine: Machine, seconds: float) -> None:
        cost = machine.price_per_h * seconds / HOUR_S
        machine.cost += cost
        self.spent += cost

    def words(self) -> str:
        """The account, for people."""
        config = self._config
        bounds = [f"{self.spent:.2f} of {config.budget:g} dollars are spent"] if config.budget < math.inf else []
        if config.budget_per_h < math.inf:
            bounds.append(f"at most {config.budget_per_h:g} dollars an hour are to be")
        return " and ".join(bounds)

    def pays(self, working: float, leaving: float) -> bool:
        """Whether machines that cost so much an hour can go on, while others, about to go, cost so much."""
        config = self._config
        tail_h = config.tail_s / HOUR_S
        within_hour = working <= config.budget_per_h * (1 + 1e-9)
        return within_hour and self.spent + (working + leaving) * tail_h <= config.budget

    def keeps(self, machines: Sequence[Machine]) -> int:
        """How many of the machines that count can be kept, if the dearest are given up first."""
        working = sorted((machine.price_per_h for machine in machines if machine.counts), reverse=True)
        leaving = sum(machine.price_per_h for machine in machines if not machine.counts)
        while working and not self.pays(sum(working), leaving):
            leaving += working.pop(0)
        return len(working)

    def affords(self, machines: Iterable[Machine], price_per_h: float, start_s: float) -> int:
        """How many further machines at this price, those that are there having what they were asked for with."""
        config = self._config
        if price_per_h <= 0:
            return config.ceiling
        there = list(machines)
        everyone = sum(machine.price_per_h for machine in there)
        by_hour = (config.budget_per_h - everyone) / price_per_h
        tail_h, starts_h = config.tail_s / HOUR_S, START_UPS * start_s / HOUR_S
        promised = sum(max(0.0, machine.price_per_h * starts_h - machine.cost) for machine in there if machine.counts)
        by_run = (config.budget - self.spent - everyone * tail_h - promised) / (price_per_h * (tail_h + starts_h))
        return max(0, math.floor(min(by_hour + 1e-9, by_run, config.ceiling)))
