"""How a step's time was used by the instances, seen from the manager: what `FleetSize` judges a fleet by.

Decides what counts as busy: an instance that has a sample. Sums seconds between two ticks; the trainer's own times come
with its report.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.rollout.offload import StepTimes
from penstock.rollout.provision_types import InstanceView
from penstock.wire import StepReport

__all__ = ["Use"]


class Use:
    """Instance-seconds since the last step's report."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._passed_s = self._remote_s = self._remote_busy_s = 0.0
        self._reserved_s = self._reserved_busy_s = self._machines_s = 0.0

    def pass_time(self, instances: Iterable[InstanceView], now: float, machines: int) -> None:
        """`instances` were as they are since the last call, on so many machines that were asked for."""
        seconds = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._passed_s += seconds
        self._machines_s += seconds * machines
        for instance in instances:
            if not instance.ready:
                continue
            busy_s = seconds if instance.samples else 0.0
            if instance.reserved:
                self._reserved_s += seconds
                self._reserved_busy_s += busy_s
            else:
                self._remote_s += seconds
                self._remote_busy_s += busy_s

    def step(self, report: StepReport, losses: int) -> StepTimes:
        """The step that ends with this report, and in which so many machines were lost. Begins the next one."""
        passed_s = max(self._passed_s, 1e-9)
        # One reserved engine's, as the policy has it: they all generate at once.
        window_s = report.step_s * self._reserved_busy_s / self._reserved_s if self._reserved_s else 0.0
        fleet = self._remote_s / passed_s
        idle_s = (self._remote_s - self._remote_busy_s) / fleet if fleet else 0.0
        times = StepTimes(
            fleet=fleet,
            step_s=report.step_s,
            window_s=window_s,
            train_s=report.train_s,
            trainer_wait_s=report.trainer_wait_s,
            remote_wait_s=idle_s * report.step_s / passed_s,
            remote_busy_s=self._remote_busy_s * report.step_s / passed_s,
            preemptions=losses,
            machines=self._machines_s / passed_s,
        )
        self._clear()
        return times
