"""Work split in time: how long the trainer's own engines generate.

`Offload` decides, again and again while the reserved engines generate, whether they should hand over and turn to
training. The window comes from a `Plan`: the last step's answers, replayed on the machines that are there with learned
speeds (see `plan`). What the plan gets wrong, seen as the trainer waiting more or less than planned, is made up for in
the steps after, remembered for each fleet size. With no remote instance they generate to the end; with plenty the
window goes to what the trainer could not use anyway. Before anything is known, they generate until a good part of the
samples is finished; where no plan can be made at all (the balance policy learns no speeds), the length of that first
window follows the two waits, step by step, as RLBoost's Algorithm 1 has it.

`FixedWindow` is the length that a user gives.

It has no constant of any model or machine, and knows no socket, cloud or clock. How many remote machines are worth
having is `fleet_size`'s.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

from penstock.rollout.facts import Facts, as_long_as, thinned
from penstock.rollout.other_fleets import OtherFleets
from penstock.rollout.plan import search
from penstock.rollout.step_replay import NEARLY_ALL, Plan

__all__ = ["FixedWindow", "Learned", "Offload", "StepTimes", "Window", "WindowView"]

CORRECTION = 0.3
"""Share of the last step's surprise that the next one makes up for: lengths differ from step to step by as much."""
REMOTE_COUNTS = 0.25
"""A second that remote instances wait more than planned, against one of the trainer's: they are the cheaper ones."""
MOST_CORRECTION = 0.2
"""Of the training time: more than that is not an error of the plan but a change of the fleet within the step."""
STEADY = 0.05
"""Of its instances, by which a step's fleet may be off its rounded mean, on the mean over time: a step in which more
came or went was several fleets', and its waits say nothing about that number."""
NEAR = 0.25
"""About a planned window's end, as a share of it, what is finished decides as much as time: behind the plan, the
trainer would starve; ahead of it, it could train."""
UNKNOWN = 0.4
"""Share of finished samples at which the first step's window ends, where nothing is known, not even the number of
reserved engines."""
SHORT = 0.65
"""Else it goes by the reserved engines' part of all engines, to this power: with the part itself the others would have
left what they do in the same time again. But a window that is short by a second costs more than one that is long by
it, since the trainer's machines then wait for the few: up to all engines over the remote ones as much. Of powers 0.5,
0.65, 0.8 and 1, simulated for first steps of three shipped models with 2 to 8 machines, this one is best on the mean.
"""
DAMPING = 2.0
"""Without a plan the window grows by the difference of the two waits over this: eta in RLBoost's Algorithm 1. A second
more on one side is about a second less on the other, so that half the difference settles it."""
STEPS = 4
"""Of which a plan takes the answers: a step's own are off by some per cent, and what grows does so by less."""


@dataclass(frozen=True, slots=True)
class WindowView:
    """A step while the reserved engines generate."""

    elapsed_s: float
    """Since the step began."""
    fleet: int
    """Remote instances that work on the step, or are about to."""
    finished: float
    """Share of the step's samples."""
    reserved: int = 0
    """Engines that generate in the window; 0 where that is not known."""
    loading: int = 0
    """Of the fleet, those that do not have the version yet."""


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
    fleet_off: float = 0.0
    """Remote instances by which the fleet was off its rounded mean, up or down, mean over the step."""
    machines: float | None = None
    """Remote machines that were asked for, mean over the step; None: as many as there were remote instances."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The window of a fleet size is another one than before a step, and why."""

    fleet: int
    before_s: float
    window_s: float
    cause: str


@dataclass
class FixedWindow:
    """So many seconds in each step that has a remote instance, whatever is measured."""

    seconds: float
    learned: Learned | None = None

    def review(self, view: WindowView) -> Window:
        if view.fleet == 0:
            return Window(True, "no remote instance")
        return Window(view.elapsed_s < self.seconds, f"{self.seconds:g} s, as configured")

    def length_s(self, fleet: int) -> float | None:
        return self.seconds if fleet else None

    def ended(self, times: StepTimes) -> None:
        pass

    def predictor(self) -> None:
        """No step is replayed."""


@dataclass
class Offload:
    """The window, decided in seconds."""

    corrections: dict[int, float] = field(default_factory=dict)
    """By fleet size: seconds by which the window that fitted was longer than planned."""
    plans: dict[int, Plan] = field(default_factory=dict)
    """By fleet size: what was planned last, where the next one begins to look."""
    seconds: dict[int, float] = field(default_factory=dict)
    """By fleet size: the window that fitted, where no plan was to be had."""
    learned: Learned | None = None
    """What the last step changed."""
    facts: Facts | None = None
    _steps: list[Sequence[Sequence[int]]] = field(default_factory=list)
    """Lengths of the last steps' answers, by prompt."""

    def plan(self, facts: Facts) -> Plan:
        """The step on these machines. To be asked at the start of a step, and again when machines come or go."""
        for _ in self.planning(facts):
            pass
        return self.plans[len(facts.remote)]

    def planning(self, facts: Facts, ahead: bool = False) -> Generator[None, None, Plan | None]:
        """The same bit by bit, for those who may not stand still: done, and in `plans`, when it is exhausted.

        `ahead`: of a step that has not begun. The one before is still judged by its own plan, so this one is returned
        alone, and the answers are for `remember` once they are final.
        """
        steps = self._with(facts.groups)
        if not ahead:
            self._steps = steps
        whole, facts = facts, thinned(facts)
        # Where a step is thinned there are as many fewer prompts of each.
        apart = -(-len(whole.groups) // len(facts.groups))
        earlier = [as_long_as(step, whole.groups)[::apart] for step in steps[:-1]]
        facts = self.facts = replace(facts, earlier=[row for step in earlier for row in step])
        fleet = len(facts.remote)
        near = self.plans.get(fleet)
        best = near
        for found in search(
            facts.groups, facts.prompt_tokens, facts.remote, facts.reserved, facts.training, near, facts.earlier
        ):
            best = found
            yield
        if best is not None and not ahead:
            self.plans[fleet] = best
        return best

    def review(self, view: WindowView) -> Window:
        """Whether the reserved engines go on."""
        if view.fleet == 0:
            return Window(True, "no remote instance")
        plan = self.nearest(view.fleet)
        if plan is None and not self.seconds:
            if view.loading == view.fleet:
                return Window(True, "nothing is known yet, and no remote instance has the version")
            share = (view.reserved / (view.reserved + view.fleet)) ** SHORT if view.reserved else UNKNOWN
            return Window(view.finished < share, f"nothing is known yet: until {share:.0%} are finished")
        window_s = self.window_s(view.fleet)
        generate = view.elapsed_s < window_s
        if plan is not None and plan.finished > 0 and abs(view.elapsed_s - window_s) < NEAR * window_s:
            generate = view.elapsed_s / window_s + view.finished / plan.finished < 2
        if plan is not None and view.loading == view.fleet:
            # Nobody goes on with what is handed over now: no more of it than was planned.
            generate = generate or view.finished < plan.finished
        words = f"{window_s:.3g} s for {view.fleet} instances"
        if plan is not None:
            words += f" (planned {plan.window_s:.3g} s, corrected by {self.correction(view.fleet):+.2g} s)"
        return Window(generate, words)

    def keeps(self, followed: Plan | None, elapsed_s: float, fleet: int) -> bool:
        """Whether a step that follows a plan goes on with its limits although so many instances are there now: then
        the window alone is another one. Engines are full of what these limits let in, and a plan that begins with
        others does not fit them."""
        if followed is None or fleet == 0 or followed is self.plans.get(0):
            # Engines that are alone have limits for a step without a window.
            return False
        return elapsed_s > 0 < followed.step_s

    def length_s(self, fleet: int) -> float | None:
        """The window of a fleet size; None where there is none: to the end of the step, or not known yet."""
        return self.window_s(fleet) if fleet and (self.nearest(fleet) is not None or self.seconds) else None

    def nearest(self, fleet: int) -> Plan | None:
        """The plan of a fleet size; until there is one, the nearest size's."""
        known = [size for size in self.plans if size and fleet] or [size for size in self.plans if size == fleet]
        return self.plans[min(known, key=lambda size: abs(size - fleet))] if known else None

    def window_s(self, fleet: int) -> float:
        """What is planned for a fleet size, corrected by what was seen; without plans, what fitted the nearest size."""
        plan = self.nearest(fleet)
        if plan is None:
            return self.seconds[min(self.seconds, key=lambda known: abs(known - fleet))]
        return max(0.0, plan.window_s + self.correction(fleet)) if plan.window_s > 0 else 0.0

    def correction(self, fleet: int) -> float:
        """For a fleet size that was never seen, the nearest one's."""
        if not self.corrections:
            return 0.0
        return self.corrections[min(self.corrections, key=lambda known: abs(known - fleet))]

    def ended(self, times: StepTimes) -> None:
        """Learns from a step; `learned` says what."""
        self.learned = None
        fleet = round(times.fleet)
        plan = self.plans.get(fleet)
        if fleet == 0 or times.preemptions:
            # A machine lost within the step says nothing about the plan.
            return
        if times.fleet_off > STEADY * fleet and (plan is not None or self.seconds):
            return
        if plan is None and (self.plans or not (times.remote_busy_s or times.remote_wait_s)):
            # Between two sizes: machines came within the step. Or none of them had the version before it was over.
            return
        if plan is None:
            before_s = self.window_s(fleet) if self.seconds else times.window_s
            fitted_s = max(0.0, before_s + (times.trainer_wait_s - times.remote_wait_s) / DAMPING)
            if fitted_s != before_s or not self.seconds:
                # What changes nothing must not become the nearest size to others.
                self.seconds[fleet] = fitted_s
            self._note(fleet, before_s, times, 0.0, 0.0)
            return
        before_s = self.window_s(fleet)
        # A window to the end does not wait for them: they may have been given next to nothing.
        early_s = max(0.0, times.remote_wait_s - plan.remote_wait_s) if plan.finished < NEARLY_ALL else 0.0
        late_s = times.trainer_wait_s - plan.trainer_wait_s - REMOTE_COUNTS * early_s
        bound = MOST_CORRECTION * times.train_s
        self.corrections[fleet] = max(-bound, min(bound, self.correction(fleet) + CORRECTION * late_s / 2))
        self._note(fleet, before_s, times, plan.trainer_wait_s, plan.remote_wait_s)

    def _note(self, fleet: int, before_s: float, times: StepTimes, trainer_s: float, remote_s: float) -> None:
        window_s = self.window_s(fleet)
        if window_s != before_s:
            cause = (
                f"the trainer waited {times.trainer_wait_s:.3g} s ({trainer_s:.3g} s planned), remote instances "
                f"{times.remote_wait_s:.3g} s ({remote_s:.3g} s planned), with {fleet} of them"
            )
            self.learned = Learned(fleet, before_s, window_s, cause)

    def remember(self, groups: Sequence[Sequence[int]]) -> None:
        """Answers of the last step, by which this one was planned ahead."""
        self._steps = self._with(groups)

    def _with(self, groups: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
        """The last steps' answers, with those of the very last one."""
        steps = self._steps
        if steps and [len(row) for row in steps[-1]] != [len(row) for row in groups]:
            steps = []
        return steps if steps and steps[-1] == groups else [*steps, groups][-STEPS:]

    def predictor(self) -> OtherFleets | None:
        """For steps with other numbers of machines. It goes by what is known now, whatever is learned while it is
        asked; None before anything is known."""
        facts = self.facts
        if facts is None or not (facts.remote or facts.reserved):
            return None
        return OtherFleets.of(facts, dict(self.plans))
