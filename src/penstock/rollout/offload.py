"""Work split in time: how long the trainer's own engines generate, and how many remote instances are worth having.

`Offload` decides, again and again while the reserved engines generate, whether they should hand over and turn to
training. The window comes from a `Plan`: the last step's answers, replayed on the machines that are there with learned
speeds (see `plan`). What the plan gets wrong, seen as the trainer waiting more or less than planned, is made up for in
the steps after, remembered for each fleet size. With no remote instance they generate to the end; with plenty the
window goes to what the trainer could not use anyway. Before anything is known, they generate until a good part of the
samples is finished.

`FleetSize` decides how many remote instances to ask for: the number with the cheapest step, at today's prices, with
preemptions and start-up time counted in. It moves only where that pays and has paid for several steps in a row.

Neither has a constant of any model or machine, and neither knows a socket, a cloud or a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from penstock.rollout.plan import Engine, Plan, Training, best_plan

__all__ = ["Facts", "FleetSize", "FleetSizeConfig", "Offload", "StepTimes", "Window", "WindowView"]

CORRECTION = 0.3
"""Share of the last step's surprise that the next one makes up for: lengths differ from step to step by as much."""
REMOTE_COUNTS = 0.25
"""A second that remote instances wait more than planned, against one of the trainer's: they are the cheaper ones."""
MOST_CORRECTION = 0.2
"""Of the training time: more than that is not an error of the plan but a change of the fleet within the step."""
UNKNOWN = 0.4
"""Share of finished samples at which the first step's window ends: enough to train on while the rest comes in."""
SMOOTH = 0.3
"""Weight of the newest step in a running mean."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a plan is made from; all of it measured or learned."""

    groups: Sequence[Sequence[int]]
    """Lengths of the last step's answers, by prompt."""
    prompt_tokens: float
    """Mean."""
    remote: Sequence[Engine]
    reserved: Sequence[Engine]
    training: Training


@dataclass(frozen=True, slots=True)
class WindowView:
    """A step while the reserved engines generate."""

    elapsed_s: float
    """Since the step began."""
    fleet: int
    """Remote instances that work on the step, or are about to."""
    finished: float
    """Share of the step's samples."""


@dataclass(frozen=True, slots=True)
class Window:
    """The decision: go on generating or hand over, and why."""

    generate: bool
    cause: str


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How a step went."""

    fleet: float
    """Remote instances, mean over the step."""
    step_s: float
    window_s: float
    """The reserved engines generated so long."""
    train_s: float
    """The trainer was busy so long."""
    trainer_wait_s: float
    """It was ready and had nothing complete to train on."""
    remote_wait_s: float
    """Remote instances had nothing to do, mean over those there."""
    remote_busy_s: float = 0.0
    """Instance-seconds of remote generating."""
    preemptions: int = 0


@dataclass
class Offload:
    """The window, decided in seconds."""

    corrections: dict[int, float] = field(default_factory=dict)
    """By fleet size: seconds by which the window that fitted was longer than planned."""
    plans: dict[int, Plan] = field(default_factory=dict)
    """By fleet size: what was planned last, where the next one begins to look."""
    facts: Facts | None = None

    def plan(self, facts: Facts) -> Plan:
        """The step on these machines. To be asked at the start of a step, and again when machines come or go."""
        self.facts = facts
        fleet = len(facts.remote)
        near = self.plans.get(fleet)
        plan = best_plan(facts.groups, facts.prompt_tokens, facts.remote, facts.reserved, facts.training, near)
        self.plans[fleet] = plan
        return plan

    def review(self, view: WindowView) -> Window:
        """Whether the reserved engines go on."""
        if view.fleet == 0:
            return Window(True, "no remote instance")
        plan = self.plans.get(view.fleet)
        if plan is None:
            return Window(view.finished < UNKNOWN, f"nothing is known yet: until {UNKNOWN:.0%} are finished")
        window_s = self.window_s(view.fleet)
        return Window(view.elapsed_s < window_s, f"{window_s:.0f} s for {view.fleet} instances")

    def window_s(self, fleet: int) -> float:
        """What is planned for a fleet size, corrected by what was seen."""
        plan = self.plans[fleet]
        return max(0.0, plan.window_s + self.correction(fleet)) if plan.window_s > 0 else 0.0

    def correction(self, fleet: int) -> float:
        """For a fleet size that was never seen, the nearest one's."""
        if not self.corrections:
            return 0.0
        return self.corrections[min(self.corrections, key=lambda known: abs(known - fleet))]

    def ended(self, times: StepTimes) -> None:
        """Learns from a step."""
        fleet = round(times.fleet)
        plan = self.plans.get(fleet)
        if fleet == 0 or plan is None or times.preemptions:
            # A machine lost within the step says nothing about the plan.
            return
        early_s = max(0.0, times.remote_wait_s - plan.remote_wait_s)
        late_s = times.trainer_wait_s - plan.trainer_wait_s - REMOTE_COUNTS * early_s
        bound = MOST_CORRECTION * times.train_s
        self.corrections[fleet] = max(-bound, min(bound, self.correction(fleet) + CORRECTION * late_s / 2))

    def predict(self, instances: int) -> float | None:
        """Seconds of a step with so many remote instances like those there are; None before anything is known."""
        if self.facts is None or not (self.facts.remote or self.facts.reserved):
            return None
        like = (self.facts.remote or self.facts.reserved)[0]
        remote = [replace(like)] * instances
        facts = self.facts
        near = self.plans.get(instances)
        return best_plan(facts.groups, facts.prompt_tokens, remote, facts.reserved, facts.training, near).step_s


@dataclass(frozen=True, slots=True)
class FleetSizeConfig:
    """Bounds and prices. Dollars an hour."""

    floor: int = 0
    ceiling: int = 64
    budget_per_h: float = math.inf
    """For remote instances."""
    reserved_price: float = 0.0
    instance_price: float = 0.0
    hour_worth: float = 0.0
    """What an hour less is worth, beside what the machines cost in it: 0 minds the dollars alone."""
    start_s: float = 0.0
    """From asking for an instance to its first token."""
    patience: int = 2
    """Steps in a row that must ask for a change in one direction."""
    worth: float = 0.01
    """Least saving, as a share of a step's cost, for which the number changes."""
    indifference: float = 0.02
    """Of numbers whose step costs so little more than the cheapest, the fastest is wanted."""
    first: int = 4
    """Asked for before anything is known."""


class FleetSize:
    """How many remote instances to ask for.

    With W instance-seconds of generating in a step, R reserved engines and T seconds of training, n remote instances
    make a step of max(T, (W + R T) / (R + n)) seconds and a fixed rest; an instance that lives L seconds between
    preemptions is of use for the share L / (L + start). The number with the lowest cost of a step is wanted.
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
        self.preemptions_per_h = 0.0
        """Of one instance."""
        self.wanted = max(config.floor, min(config.ceiling, self._affordable, config.first))
        self.cause = "nothing is known yet"
        self._asked = 0
        self._decided = False
        """The first larger number that is known to be better is taken at once."""
        self._predict: Callable[[int], float | None] | None = None
        self._predicted: dict[int, float] = {}

    def ended(self, times: StepTimes, predict: Callable[[int], float | None] | None = None) -> int:
        """Learns from a step, and returns the number wanted from here on.

        `predict` gives the seconds of a step with so many instances, if it can; else the two sides are taken to share
        the work without loss.
        """
        if times.step_s <= 0:
            return self.wanted
        self._predict = predict
        self._predicted = {}
        work_s = times.remote_busy_s + self.reserved_engines * times.window_s
        rest_s = max(0.0, times.step_s - times.window_s - times.train_s - times.trainer_wait_s)
        rate = 3600 * times.preemptions / (times.fleet * times.step_s) if times.fleet > 0 else self.preemptions_per_h
        if self.work_s is None:
            self.work_s, self.train_s, self.rest_s = work_s, times.train_s, rest_s
            self.preemptions_per_h = rate
        else:
            self.work_s += SMOOTH * (work_s - self.work_s)
            self.train_s += SMOOTH * (times.train_s - self.train_s)
            self.rest_s += SMOOTH * (rest_s - self.rest_s)
            self.preemptions_per_h += SMOOTH * (rate - self.preemptions_per_h)
        return self._decide()

    def step_s(self, instances: int) -> float:
        """A step with so many, as far as is known."""
        if self.work_s is None:
            raise ValueError("no step has ended yet")
        predicted = self._predicted.get(instances)
        if predicted is None and self._predict is not None:
            predicted = self._predict(instances)
            if predicted is not None:
                self._predicted[instances] = predicted
        if predicted is not None:
            return predicted
        useful = instances * self.useful_share
        engines = self.reserved_engines + useful
        split_s = (self.work_s + self.reserved_engines * self.train_s) / engines if engines > 0 else math.inf
        return max(self.train_s, split_s) + self.rest_s

    def step_cost(self, instances: int) -> float:
        """Dollars, the worth of time included."""
        config = self.config
        hourly = config.reserved_price + config.hour_worth + instances * config.instance_price
        return hourly * self.step_s(instances) / 3600

    @property
    def useful_share(self) -> float:
        """Of an instance's paid time in which it may work."""
        return 1 / (1 + self.preemptions_per_h * self.config.start_s / 3600)

    @property
    def _affordable(self) -> int:
        price = self.config.instance_price
        return self.config.ceiling if price <= 0 else int(min(1e9, self.config.budget_per_h / price))

    def _best(self, least: int, most: int) -> int:
        """The cheapest number, found downhill from the one wanted: the cost has one valley but for noise."""
        at = max(least, min(most, self.wanted))
        for stride in (4, 2, 1):
            moved = True
            while moved:
                moved = False
                for other in (at + stride, at - stride):
                    if least <= other <= most and self.step_cost(other) < self.step_cost(at) * (1 - 1e-9):
                        at, moved = other, True
                        break
        limit = self.step_cost(at) * (1 + self.config.indifference)
        near = [n for n in range(max(least, at - 2), min(most, at + 3) + 1) if self.step_cost(n) <= limit]
        return min(near, key=lambda n: (self.step_s(n), n))

    def _decide(self) -> int:
        config = self.config
        most = max(config.floor, min(config.ceiling, self._affordable))
        best = self._best(config.floor, most)
        direction = (best > self.wanted) - (best < self.wanted)
        bounded = max(config.floor, min(most, self.wanted))
        saving = self.step_cost(bounded) - self.step_cost(best)
        faster = self.step_s(bounded) / self.step_s(best) - 1
        if direction == 0 or max(saving / self.step_cost(bounded), faster) <= config.worth:
            self._asked = 0
            return self.wanted
        self._asked = self._asked + direction if self._asked * direction > 0 else direction
        if abs(self._asked) < config.patience and (self._decided or direction < 0):
            return self.wanted
        self._decided = True
        before, self.wanted, self._asked = self.wanted, best, 0
        self.cause = f"{before} to {best}: a step costs {saving:.2f} dollars less and is {faster:.1%} faster"
        return self.wanted
