"""How many remote machines to ask for: the number with the cheapest step, at today's prices, with preemptions and
start-up time counted in. One with several instances comes and goes as a whole; an instance that joined by hand counts
as a machine. The number moves only where that pays and has paid for several steps in a row, and turns back only
where staying has cost the more the oftener it has turned.

Steps with other numbers are replayed where somebody can (`Predictor`), and as that takes a while for each number, it is
done bit by bit: whoever drives this has frames to answer meanwhile.

No constant of any model or machine is in it, and it knows no socket, cloud or clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from penstock.rollout.offload import StepTimes
from penstock.rollout.other_fleets import Predictor

__all__ = ["FleetSize", "FleetSizeConfig"]

SMOOTH = 0.3
"""Weight of the newest step in a running mean."""
MEMORY_H = 1.0
"""Losses, and the machine-hours that they fell into, fade by e in so long: steps may be far shorter than machines'
lives, and what one of them lost says little."""
FIRST_H = 1.0
"""Machine-hours without a loss that the rate begins with; they fade too. Else a loss in the first minute would be one
every minute."""
FIRST_FACTOR = 2
"""Before a step with another number can be replayed, no more than so many times the number is asked for: a long answer
takes as long with many machines as with few, which is not to be seen from how much work there was."""
MOST_TURNS = 4
"""That are counted."""
FORGOTTEN_STEPS = 64
"""After which a turn counts no more: prices and answers change, and what was chance then may not be."""
KEPT = 0.9
"""Of what earlier steps would have saved, with each further one."""


@dataclass(frozen=True, slots=True)
class FleetSizeConfig:
    """Bounds and prices. Dollars an hour."""

    floor: int = 0
    ceiling: int = 64
    budget_per_h: float = math.inf
    """For remote machines."""
    reserved_price: float = 0.0
    machine_price: float = 0.0
    hour_worth: float = 0.0
    """What an hour less is worth, beside what the machines cost in it: 0 minds the dollars alone."""
    start_s: float = 0.0
    """From asking for a machine to its first token."""
    patience: int = 2
    """Steps in a row that must ask for a change in one direction."""
    worth: float = 0.01
    """Least saving, as a share of a step's cost, for which the number changes."""
    indifference: float = 0.04
    """Of numbers whose step costs so little more than the cheapest, the fastest is wanted."""
    first: int = 4
    """Asked for before anything is known."""


class _NotReplayed(Exception):
    """A step with so many machines has to be replayed first: that is `bits`."""

    def __init__(self, machines: int, bits: Generator[None, None, float | None]) -> None:
        super().__init__(f"a step with {machines} machines is not replayed yet")
        self.machines, self.bits = machines, bits


class FleetSize:
    """How many remote machines to ask for.

    With W instance-seconds of generating in a step, R reserved engines and T seconds of training, machines with n
    instances make a step of max(T, (W + R T) / (R + n)) seconds and a fixed rest, or of max(T, W / (R + n)) where
    reserved engines generate beside training; a machine that lives L seconds between preemptions is of use for the
    share L / (L + start). The number with the lowest cost of a step is wanted.
    """

    def __init__(self, config: FleetSizeConfig, reserved_engines: int) -> None:
        if not 0 <= config.floor <= config.ceiling or config.patience < 1:
            raise ValueError(f"floor {config.floor}, ceiling {config.ceiling}, patience {config.patience}")
        self.config = config
        self.reserved_engines = reserved_engines
        self.work_s: float | None = None
        """Instance-seconds of generating a step."""
        self.train_s = 0.0
        self.rest_s = 0.0
        self.beside = False
        """Reserved engines generate while the trainer trains, as far as the last step tells."""
        self._losses = 0.0
        self._machine_h = FIRST_H
        self._predictor: Predictor | None = None
        self._predicted: dict[int, float | None] = {}
        self.unpaid = 0
        """Instances that are there at no cost to the budget, each as a machine: nobody here has asked for them."""
        self.per_machine = 1.0
        """Instances on one that was asked for, on the mean."""
        self.wanted = max(self._floor, min(config.ceiling, self._affordable, config.first))
        self.cause = "nothing is known yet"
        self._asked = 0
        """Steps in a row that asked for a change in one direction, with its sign."""
        self._saving = 0.0
        """What another number would have saved lately, as shares of a step, with the sign of its direction."""
        self._before = self.wanted
        """The number before the last change."""
        self._went = 0
        """Direction of the last change."""
        self._turns = 0.0
        """Changes against the one before, less those that went on; they are forgotten little by little."""
        self._decided = False
        """The first larger number that is known to be better is taken at once."""

    def ended(self, times: StepTimes, predictor: Predictor | None = None, beside: bool = False) -> int:
        """Learns from a step as `learn_step`, and returns the number wanted from here on.

        `predictor` gives the seconds of a step with so many machines, if it can; else the two sides are taken to share
        the work without loss.
        """
        self.learn_step(times, beside)
        bits = self.deciding(predictor)
        while True:
            try:
                next(bits)
            except StopIteration as end:
                return int(end.value)

    def deciding(self, predictor: Predictor | None) -> Generator[None, None, int]:
        """The number wanted after the steps learned from, bit by bit; it holds once this is exhausted."""
        self._predictor, self._predicted = predictor, {}
        while self.work_s is not None:
            try:
                return self._decide()
            except _NotReplayed as asked:
                self._predicted[asked.machines] = yield from asked.bits
        return self.wanted

    def learn_step(self, times: StepTimes, beside: bool = False) -> None:
        """Takes in how a step went. `beside`: the window was no time that the trainer gave up."""
        if times.step_s <= 0:
            return
        self.beside = beside
        work_s = times.remote_busy_s + self.reserved_engines * times.window_s
        own_s = times.train_s + times.trainer_wait_s + (0.0 if beside else times.window_s)
        rest_s = max(0.0, times.step_s - own_s)
        step_h = times.step_s / 3600
        kept = math.exp(-step_h / MEMORY_H)
        # A loss may be booked a step late, when none is left: it counts for the hours before it all the same.
        self._losses = kept * self._losses + times.preemptions
        self._machine_h = kept * self._machine_h + (times.fleet if times.machines is None else times.machines) * step_h
        if self.work_s is None:
            self.work_s, self.train_s, self.rest_s = work_s, times.train_s, rest_s
        else:
            self.work_s += SMOOTH * (work_s - self.work_s)
            self.train_s += SMOOTH * (times.train_s - self.train_s)
            self.rest_s += SMOOTH * (rest_s - self.rest_s)

    def step_s(self, machines: int) -> float:
        """A step with so many, as far as is known; of numbers that the last decision looked at."""
        if self.work_s is None:
            raise ValueError("no step has ended yet")
        useful = machines * self.useful_share
        whole = int(useful + 1e-9)
        below = self._replayed(whole)
        above = self._replayed(whole + 1) if below is not None and useful - whole > 1e-9 else None
        if below is not None:
            return below if above is None else below + (useful - whole) * (above - below)
        engines = self.reserved_engines + self._instances(useful)
        turned_s = 0.0 if self.beside else self.reserved_engines * self.train_s
        split_s = (self.work_s + turned_s) / engines if engines > 0 else math.inf
        return max(self.train_s, split_s) + self.rest_s

    def _instances(self, machines: float) -> float:
        """On so many machines, of which those that joined by hand come first."""
        return min(machines, self.unpaid) + self.per_machine * max(0.0, machines - self.unpaid)

    def _replayed(self, machines: int) -> float | None:
        """None where nobody can say."""
        if self._predictor is not None and machines not in self._predicted:
            raise _NotReplayed(machines, self._predictor.seconds(machines))
        return self._predicted.get(machines)

    def step_cost(self, machines: int) -> float:
        """Dollars, the worth of time included."""
        config = self.config
        hourly = config.reserved_price + config.hour_worth + sum(self._prices(machines))
        if hourly <= 0 and config.machine_price <= 0:
            # Where nothing costs anything, time alone counts.
            hourly = 1.0
        return hourly * self.step_s(machines) / 3600

    def _prices(self, machines: int) -> Sequence[float]:
        """Dollars an hour of each; those that stay first."""
        if self._predictor is None:
            return [self.config.machine_price] * machines
        usual = self.config.machine_price
        return [usual if price is None else price for price in self._predictor.prices(machines)]

    def learn(
        self,
        *,
        start_s: float | None = None,
        machine_price: float | None = None,
        unpaid: int | None = None,
        per_machine: float | None = None,
    ) -> None:
        """Start-up time and price as they were seen lately, in place of the configured ones; how many instances nobody
        here has asked for, and how many there are on a machine."""
        self.unpaid = self.unpaid if unpaid is None else unpaid
        self.per_machine = self.per_machine if per_machine is None else per_machine
        now = self.config
        self.config = replace(
            now,
            start_s=now.start_s if start_s is None else start_s,
            machine_price=now.machine_price if machine_price is None else machine_price,
        )

    @property
    def preemptions_per_h(self) -> float:
        """Of one machine, lately."""
        return self._losses / self._machine_h if self._machine_h > 0 else 0.0

    @property
    def useful_share(self) -> float:
        """Of a machine's paid time in which it may work."""
        return 1 / (1 + self.preemptions_per_h * self.config.start_s / 3600)

    @property
    def _affordable(self) -> int:
        prices = self._prices(self.config.ceiling)
        # Some that cost nothing may have come since those were known.
        free = max(self.unpaid, prices.count(0.0))
        # Three at 0.2 dollars are 0.6, whatever a sum of floats says.
        most = self.config.budget_per_h * (1 + 1e-9)
        return free + sum(total <= most for total in itertools.accumulate(price for price in prices if price > 0))

    @property
    def _floor(self) -> int:
        """What can't be paid for is not had, whatever the floor."""
        return min(self.config.floor, self._affordable)

    def _best(self, least: int, most: int) -> int:
        """The cheapest number, found downhill from the one wanted. The cost has one valley but for noise, and another
        one at the fewest where machines are dear for what they do. From there, that of before is beyond a hill."""
        at = self._downhill(max(least, min(most, self.wanted)), least, most)
        for other in (least, max(least, min(most, self._before))):
            if self.step_cost(other) < self.step_cost(at) * (1 - self.config.indifference):
                at = self._downhill(other, least, most)
        limit = self.step_cost(at) * (1 + self.config.indifference)
        lowest = max(least, at - 2)
        while lowest > least and self.step_cost(lowest) <= limit:
            # As cheap, and perhaps as fast.
            lowest -= 1
        near = [n for n in range(lowest, min(most, at + 3) + 1) if self.step_cost(n) <= limit]
        return min(near, key=lambda n: (self.step_s(n), n))

    def _downhill(self, at: int, least: int, most: int) -> int:
        for stride in (4, 2, 1):
            moved = True
            while moved:
                moved = False
                for other in (at + stride, at - stride):
                    if least <= other <= most and self.step_cost(other) < self.step_cost(at) * (1 - 1e-9):
                        at, moved = other, True
                        break
        return at

    def _decide(self) -> int:
        """Changes nothing before all that it asks for is replayed."""
        config = self.config
        most = min(config.ceiling, self._affordable)
        if not self._decided and self._predictor is None:
            most = min(most, max(self._floor, FIRST_FACTOR * max(1, self.wanted)))
        best = self._best(self._floor, most)
        bounded = max(self._floor, min(most, self.wanted))
        direction = (best > bounded) - (best < bounded)
        saving = self.step_cost(bounded) - self.step_cost(best)
        faster = self.step_s(bounded) / self.step_s(best) - 1
        if bounded < self.wanted:
            # What can't be paid for is not wanted, however long it was.
            mean = fmean(self._prices(self.wanted))
            self.cause = (
                f"{self.wanted} to {bounded}: {config.budget_per_h:g} dollars an hour pay for no more at {mean:.2f} "
                "each, on the mean"
            )
            self._went_to(bounded)
        elif bounded > self.wanted:
            self.cause = f"{self.wanted} to {bounded}: as many as there shall be at least are paid for now"
            self._went_to(bounded)
        self._turns = max(0.0, self._turns - 1 / FORGOTTEN_STEPS)
        cost = self.step_cost(bounded)
        # Machines that cost nothing, beside reserved ones without a price, make steps that cost nothing.
        gain = max(saving / cost if cost > 0 else 0.0, faster)
        asks = direction if gain > config.worth else 0
        self._saving = KEPT * self._saving + asks * gain
        if not asks:
            self._asked = 0
            if not self._decided:
                self.cause = f"{self.wanted}: no other number is better by more than {config.worth:.0%}"
            return self.wanted
        self._asked = self._asked + direction if self._asked * direction > 0 else direction
        if abs(self._asked) < config.patience and (self._decided or direction < 0):
            return self.wanted
        least = config.worth * config.patience * 2 ** (self._turns + 1)
        if direction * self._went < 0 and self._saving * direction < least:
            return self.wanted
        before = self.wanted
        self._went_to(best)
        money = f"a step costs {_dollars(abs(saving))} dollars {'less' if saving >= 0 else 'more'}"
        self.cause = f"{before} to {best}: {money} and is {abs(faster):.1%} {'faster' if faster >= 0 else 'slower'}"
        return self.wanted

    def _went_to(self, number: int) -> None:
        direction = 1 if number > self.wanted else -1
        change = 1 if direction * self._went < 0 else -1
        self._turns = max(0.0, min(MOST_TURNS, self._turns + change))
        self._went, self._decided, self._before = direction, True, self.wanted
        self.wanted, self._asked, self._saving = number, 0, 0.0


def _dollars(amount: float) -> str:
    return f"{amount:.2f}" if amount >= 0.1 else f"{amount:.1g}"
