"""What is compared in a simulation: a balance policy, a window, a fleet size, and how the machines are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.rollout.balance import BalancePolicy
from penstock.rollout.offload import StepTimes, Window, WindowView
from penstock.rollout.other_fleets import Predictor

__all__ = ["FixedSize", "SizePolicy", "Strategy", "WindowPolicy"]


class WindowPolicy(Protocol):
    """See `rollout.offload.Offload`."""

    def review(self, view: WindowView) -> Window: ...

    def ended(self, times: StepTimes) -> None: ...


class SizePolicy(Protocol):
    """See `rollout.fleet_size.FleetSize`."""

    wanted: int
    cause: str
    """Why this number."""

    def ended(self, times: StepTimes, predictor: Predictor | None = None, beside: bool = False) -> int: ...


@dataclass
class FixedSize:
    """Always the same number."""

    wanted: int
    cause: str = "fixed"

    def ended(self, times: StepTimes, predictor: Predictor | None = None, beside: bool = False) -> int:
        return self.wanted


@dataclass
class Strategy:
    """A way to run. Its policies learn, so one object stands for one run."""

    name: str
    balance: BalancePolicy
    window: WindowPolicy | None
    """None: the reserved machines never generate, unless there is nobody else."""
    size: SizePolicy
    streaming: bool = True
    """Micro-batches are trained on while others generate; False: after the last sample."""
    spot: bool = True
    """Remote machines follow the trace at the spot price; False: they stay, at the price on demand."""
    differences: bool = False
    """Machines pull as this package's agents do, what has changed where they hold the version before; False: each
    version whole."""
    looks_ahead: bool = False
    """While no group is whole, the trainer makes what passes need none (`Training.ahead_share`)."""
