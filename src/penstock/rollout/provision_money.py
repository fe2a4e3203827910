"""What machines cost, and how many can be paid for.

Decides nothing but that: spend is summed up over every machine from the moment it is asked for until its release is
confirmed, and of the budget what machines still cost after they are told to go is put aside. A further machine is taken
to cost what the dearest one did lately: by the configured price, or a mean, it would be asked for and given up again
and again where the true one is above what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from penstock.rollout.lately import Lately
from penstock.rollout.provision_types import Machine, ProvisionConfig
from penstock.rollout.releases import first_to_go

__all__ = ["Purse"]

HOUR_S = 3600.0
START_UPS = 2.0
"""A machine is asked for only where the budget pays it for so many of its start-up times."""
LATELY_S = HOUR_S
"""For so long a price that was listed is reckoned with. Then one machine may find out whether it still holds."""


class Purse:
    """`spent`: dollars, by this manager and those before it."""

    def __init__(self, config: ProvisionConfig, spent: float = 0.0) -> None:
        self._config = config
        self.spent = spent
        self._listed = Lately()

    def listed(self, machine: Machine, price_per_h: float, now: float) -> None:
        """The provisioner tells a machine's price. `now`: all are charged up to then; the first price that is told was
        the machine's from the beginning,
        or from where an earlier manager's account ends."""
        if not machine.priced and machine.unbilled_since is None:
            since = machine.asked_at if machine.billed_since is None else machine.billed_since
            more = max(0.0, price_per_h - machine.price_per_h) * (now - since) / HOUR_S
            machine.cost += more
            self.spent += more
        machine.price_per_h, machine.priced = price_per_h, True
        self._listed.note(price_per_h, now)

    def price_per_h(self, now: float) -> float | None:
        """Of a further machine. None where nobody has told one."""
        seen = self._listed.most(now - LATELY_S)
        return self._config.price_per_h or None if seen is None else seen

    @property
    def bounded(self) -> bool:
        """There is a budget."""
        return min(self._config.budget, self._config.budget_per_h) < math.inf

    def found(self, machine: Machine, now: float) -> None:
        """It is there, so it has been since an earlier manager's account had it. `now`: all are charged up to then."""
        since, machine.unbilled_since = machine.unbilled_since, None
        if since is not None:
            machine.billed_since = since
            self.charge(machine, max(0.0, now - since))

    def charge(self, machine: Machine, seconds: float) -> None:
        """Not for one that may be gone since long: a list, or its instance, has to show it first."""
        if machine.unbilled_since is not None:
            return
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
        """How many of the machines that count can be kept, those that can't go yet among them."""
        counting = [machine for machine in machines if machine.counts]
        working = sum(machine.price_per_h for machine in counting)
        leaving = sum(machine.price_per_h for machine in machines) - working
        kept = len(counting)
        for machine in first_to_go(machine for machine in counting if machine.may_go):
            if self.pays(working, leaving):
                break
            kept, working, leaving = kept - 1, working - machine.price_per_h, leaving + machine.price_per_h
        return kept

    def keeps_too(self, machine: Machine, machines: Sequence[Machine]) -> bool:
        """One that was about to go can be paid for, too, with those that count."""
        working = sum(other.price_per_h for other in machines if other.counts) + machine.price_per_h
        return self.pays(working, sum(other.price_per_h for other in machines) - working)

    def affords(self, machines: Iterable[Machine], start_s: float, now: float) -> int:
        """How many further machines, those that are there having what they were asked for with. Where there is a budget
        and no price is known, one is to show it before any other is asked for."""
        config, price_per_h = self._config, self.price_per_h(now)
        there = list(machines)
        if not self.bounded or (price_per_h is not None and price_per_h <= 0):
            return config.ceiling
        if price_per_h is None:
            return int(not there and self.spent < config.budget)
        everyone = sum(machine.price_per_h for machine in there)
        by_hour = (config.budget_per_h - everyone) / price_per_h
        tail_h, starts_h = config.tail_s / HOUR_S, START_UPS * start_s / HOUR_S
        promised = sum(max(0.0, machine.price_per_h * starts_h - machine.cost) for machine in there if machine.counts)
        by_run = (config.budget - self.spent - everyone * tail_h - promised) / (price_per_h * (tail_h + starts_h))
        return max(0, math.floor(min(by_hour + 1e-9, by_run, config.ceiling)))

    def short(self, number: int, counting: int, paid: int, now: float) -> str:
        """Why there are fewer machines than wanted, for people."""
        wanted = f"{number} machines are wanted and {counting} there"
        price_per_h = self.price_per_h(now)
        if price_per_h is None:
            return (
                f"{wanted}; there is a budget and no price is known: fleet.price_per_h gives none and neither does the "
                "provisioner's list, so one machine is asked for to show it"
            )
        return (
            f"{wanted}; the budget pays for {paid} more at {price_per_h:g} dollars an hour, start-up and release "
            f"included: {self.words()}"
        )
