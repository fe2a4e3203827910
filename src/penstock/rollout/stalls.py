"""Instances that say they live and do nothing: decides which have held work for too long without getting on with it.

An agent watches its own engine and stops beating where that is stuck (`instance.liveness`); this watches agents, whose
word is not enough. What counts is what the manager has: tokens that it accepted, and, since the prefill of a long
prompt gives none for a while, prefills that were reported. Refuses to know which samples they are.
"""

from __future__ import annotations

from penstock.rollout.fleet import Fleet, Instance, State
from penstock.rollout.tracker import Tracker

__all__ = ["Stalls"]

GAP_MOST_S = 5.0
"""More than this between two questions is this side's own pause: what came in meanwhile is still to be read."""

_Counted = tuple[int, int]


class Stalls:
    """`stall_s`: seconds for which a ready instance may hold work and give nothing."""

    def __init__(self, tracker: Tracker, fleet: Fleet, stall_s: float) -> None:
        self._tracker = tracker
        self._fleet = fleet
        self._stall_s = stall_s
        self._asked_at = float("inf")
        self._silent: dict[str, tuple[_Counted, float]] = {}
        """Of every instance at work: what was counted, and for how many seconds it has been that."""

    def overdue(self, now: float) -> list[tuple[Instance, str]]:
        """Instances to be given up, with the cause. To be asked often: time counts from question to question."""
        passed_s = max(0.0, min(now - self._asked_at, GAP_MOST_S))
        self._asked_at = now
        silent: dict[str, tuple[_Counted, float]] = {}
        found = []
        for instance in self._fleet:
            leases = self._tracker.leases_of(instance.id)
            if not leases or instance.state is not State.READY:
                continue
            counted = (instance.tokens_accepted, instance.beat.tokens_prefilled if instance.beat is not None else 0)
            before, silent_s = self._silent.get(instance.id, (None, 0.0))
            silent_s = silent_s + passed_s if before == counted else 0.0
            silent[instance.id] = counted, silent_s
            if silent_s > self._stall_s:
                cause = f"alive, with {leases} samples, and no token of them for {silent_s:.1f} s"
                found.append((instance, f"{cause} (stall_s = {self._stall_s:g})"))
        self._silent = silent
        return found
