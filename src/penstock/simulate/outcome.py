"""What a simulated run came to: steps, throughput, dollars, waiting. Decides how figures are added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from penstock.rollout.offload import StepTimes

__all__ = ["Asked", "Outcome", "Stay", "StepOutcome"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A number of remote machines that was asked for, and why."""

    wanted: int
    cause: str


@dataclass(frozen=True, slots=True)
class Stay:
    """A remote instance within one step, in seconds of the run; None: not within it."""

    node: str
    taken_at: float
    connected_at: float | None
    ready_at: float | None
    """It had the step's weights."""
    left_at: float | None
    preempted: bool


@dataclass(frozen=True)
class StepOutcome:
    number: int
    began_s: float
    times: StepTimes
    tokens: int
    """Prompts and answers."""
    paid_h: float
    """Machine-hours of remote ones."""
    dollars: float
    """Of all machines, while it lasted."""
    moves: int
    bound: Callable[[], float]
    causes: tuple[tuple[float, str], ...] = ()
    """Why the window stood as it did, whenever that changed."""
    trainer_spans: tuple[tuple[float, float], ...] = ()
    machine_spans: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    remote_waited_s: float = 0.0
    """Machine-seconds in which remote instances had the weights and nothing to do."""
    remote_ready_s: float = 0.0
    """Machine-seconds in which they had the weights."""

    @cached_property
    def bound_s(self) -> float:
        """No policy makes this step shorter on the machines that were there: see `bound`. Worked out when asked for."""
        return self.bound()


@dataclass
class Outcome:
    strategy: str
    profile: str
    steps: list[StepOutcome] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    """What stood in each step, and last what the step after them would have."""
    stays: list[tuple[Stay, ...]] = field(default_factory=list)
    """Remote instances of each step."""
    end_s: float = 0.0
    events: int = 0
    left_over: str = ""
    """How far the step came that had not ended, in words."""
    stuck: str = ""
    """Why that one can't end; empty where it may."""

    def close(self, now: float, events: int) -> None:
        self.end_s, self.events = now, events

    @property
    def wall_s(self) -> float:
        """Of the steps that ended."""
        return sum(step.times.step_s for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        return sum(step.tokens for step in self.steps) / self.wall_s if self.steps else 0.0

    @property
    def remote_wait_share(self) -> float:
        """Of the time in which remote instances had the weights."""
        ready_s = sum(step.remote_ready_s for step in self.steps)
        return sum(step.remote_waited_s for step in self.steps) / ready_s if ready_s > 0 else 0.0

    @property
    def dollars(self) -> float:
        return sum(step.dollars for step in self.steps)

    @property
    def tokens_per_dollar(self) -> float:
        """0 where nothing has a price."""
        dollars = self.dollars
        return sum(step.tokens for step in self.steps) / dollars if dollars else 0.0

    @property
    def mean_fleet(self) -> float:
        return sum(step.times.fleet * step.times.step_s for step in self.steps) / self.wall_s if self.steps else 0.0

    @property
    def mean_asked(self) -> float:
        """Remote instances asked for, whether or not there were so many."""
        total = sum(asked.wanted * step.times.step_s for asked, step in zip(self.asked, self.steps))
        return total / self.wall_s if self.steps else 0.0

    @property
    def trainer_wait_share(self) -> float:
        return sum(step.times.trainer_wait_s for step in self.steps) / self.wall_s if self.steps else 0.0

    @property
    def regret(self) -> float:
        """Mean share by which steps were longer than their bound."""
        return sum(step.times.step_s / step.bound_s - 1 for step in self.steps) / len(self.steps) if self.steps else 0.0
