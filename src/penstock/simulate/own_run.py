"""Whether a fitted profile explains the run that it was fitted on: the run's own machines, simulated.

Residuals say how well each row of work is explained; this says what all of it comes to. Decides how a run is told as a
trace; refuses to mend a profile that is off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.rollout.balanced import Balanced
from penstock.rollout.offload import FixedWindow, Offload
from penstock.simulate.fit import Fitted
from penstock.simulate.observed import Observed
from penstock.simulate.profiles import Profile
from penstock.simulate.strategy import FixedSize, Strategy
from penstock.simulate.traces import Change, Trace
from penstock.simulate.world import simulate

__all__ = ["OFF", "OwnRun", "own_run"]

OFF = 0.1
"""A prediction of the own run that is off by more explains nothing else."""
SEEDS = 3
MOST_STEPS = 30
"""Simulated: enough for a mean."""
RESERVED = "reserved"


@dataclass(frozen=True, slots=True)
class OwnRun:
    """Mean seconds of a step."""

    predicted_s: float
    measured_s: float

    @property
    def off(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def words(self) -> str:
        told = f"simulated, its own run takes {self.predicted_s:.3g} s a step; it took {self.measured_s:.3g} s"
        if abs(self.off) <= OFF:
            return f"{told} ({self.off:+.1%})"
        return f"WARNING: {told} ({self.off:+.0%}): this profile does not explain its run; don't rely on it"


def own_run(seen: Observed, fitted: Fitted) -> OwnRun | None:
    """`seen`: one run, whose machines and steps are simulated with the profile. None where its log has no machines."""
    rollout = seen.config["rollout"]
    window = rollout.get("window", "off")
    taking_turns = window != "off" and bool(seen.reserved)
    profile = _profile(fitted.profile, taking_turns)
    trace = _trace(seen, fitted, taking_turns)
    if not trace.changes and not taking_turns:
        return None
    measured = [metrics["step_s"] for metrics in seen.steps][:MOST_STEPS]
    steps, total_s = len(measured), 0.0
    for seed in range(SEEDS):
        strategy = Strategy(
            "own run",
            Balanced(profile.max_pending_per_instance),
            (Offload() if window == "auto" else FixedWindow(float(window))) if taking_turns else None,
            FixedSize(len(trace.changes)),
            differences=True,
        )
        total_s += simulate(profile, trace, strategy, steps=steps, seed=seed).wall_s
    return OwnRun(total_s / steps / SEEDS, sum(measured) / steps)


def _profile(profile: Profile, taking_turns: bool) -> Profile:
    """Without turns, engines of the trainer's machine are instances like any other."""
    if taking_turns:
        return profile
    as_they_came = {
        "reserved_instances": 0,
        "reserved_beside": False,
        "kinds": {**profile.kinds, RESERVED: profile.reserved},
    }
    return profile.model_copy(update=as_they_came)


def _trace(seen: Observed, fitted: Fitted, taking_turns: bool) -> Trace:
    """Instances by when they were ready and gone; those there before the first step are there at its beginning."""
    kinds = {name: kind for kind, names in fitted.members.items() for name in names}
    began = seen.step_ends[0] - seen.steps[0]["step_s"]
    there: dict[str, int] = {}
    """By name: how often it has come."""
    changes: list[Change] = []
    ready: set[str] = set()
    for ts, name, is_there in seen.changes:
        if name not in kinds or (name in seen.reserved and taking_turns) or is_there == (name in ready):
            continue
        (ready.add if is_there else ready.discard)(name)
        there[name] = there.get(name, 0) + is_there
        changes.append(Change(max(0.0, ts - began), f"{kinds[name]}:{name}.{there[name]}", is_there))
    last = seen.step_ends[-1] - began
    # What leaves when the run ends would leave a simulation that takes longer alone.
    return Trace(tuple(change for change in changes if change.at_s < last), math.inf)
