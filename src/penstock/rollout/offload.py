"""Work split in time: how long the trainer's own engines generate.

`Offload` decides, again and again while the reserved engines generate, whether they should hand over and turn to
training. The window comes from a `Plan`: the last step's answers, replayed on the machines that are there with learned
speeds (see `plan`). What the plan gets wrong, seen as the trainer waiting more or less than planned, is made up for in
the steps after, remembered for each fleet size. With no remote instance they generate to the end; with plenty the
window goes to what the trainer could not use anyway. Before anything is known, they generate until a good part of the
samples is finished.

It has no constant of any model or machine, and knows no socket, cloud or clock. How many remote instances are worth
having is `fleet_size`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.rollout.plan import Engine, Plan, Training, best_plan

__all__ = ["Facts", "Offload", "StepTimes", "Window", "WindowView"]

CORRECTION = 0.3
"""Share of the last step's surprise that the next one makes up for: lengths differ from step to step by as much."""
REMOTE_COUNTS = 0.25
"""A second that remote instances wait more than planned, against one of the trainer's: they are the cheaper ones."""
MOST_CORRECTION = 0.2
"""Of the training time: more than that is not an error of the plan but a change of the fleet within the step."""
UNKNOWN = 0.4
"""Share of finished samples at which the first step's window ends: enough to train on while the rest comes in."""


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
