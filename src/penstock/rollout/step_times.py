"""How a step's time was spent, added up while it goes on: the window, the trainer, and the remote instances.

Decides nothing. Told at every change, and a few times a second, what was true since it was last told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.rollout.offload import StepTimes

__all__ = ["StepAccount"]


@dataclass(slots=True)
class StepAccount:
    """Seconds of one step so far."""

    began_s: float
    at_s: float
    window_s: float = 0.0
    """Reserved engines generated."""
    trained_s: float = 0.0
    """The trainer had the devices."""
    wait_s: float = 0.0
    """Nobody had them: there was nothing to train on."""
    preemptions: int = 0
    fleets_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by number of remote instances, those that load weights included."""
    busy_s: float = 0.0
    """Instance-seconds of remote ones with work."""
    idle_s: float = 0.0
    """Instance-seconds of remote ones that held the weights and had none."""
    seen: set[str] = field(default_factory=set)
    """Remote instances that held the weights at some time."""

    def pass_time(
        self, now: float, *, window: bool, training: bool, waiting: bool, fleet: int, idle: Collection[str], busy: int
    ) -> None:
        """What was true from the last call until now. `idle`: remote instances with the weights and without work."""
        passed_s = max(0.0, now - self.at_s)
        self.at_s = now
        self.window_s += passed_s * window
        self.trained_s += passed_s * training
        self.wait_s += passed_s * waiting
        self.fleets_s[fleet] += passed_s
        self.busy_s += passed_s * busy
        self.idle_s += passed_s * len(idle)
        self.seen.update(idle)

    def times(self, train_s: float) -> StepTimes:
        """The step as it was; `train_s` as its trainer says."""
        step_s = max(self.at_s - self.began_s, 1e-9)
        fleet = sum(count * there_s for count, there_s in self.fleets_s.items()) / step_s
        off_s = sum(abs(count - round(fleet)) * there_s for count, there_s in self.fleets_s.items())
        return StepTimes(
            fleet=fleet,
            fleet_off=off_s / step_s,
            step_s=step_s,
            window_s=self.window_s,
            train_s=train_s,
            trainer_wait_s=self.wait_s,
            remote_wait_s=self.idle_s / max(1, len(self.seen)),
            remote_busy_s=self.busy_s,
            preemptions=self.preemptions,
        )
