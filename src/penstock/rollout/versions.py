"""Which weight version each instance should hold: decides what to load and when, and refuses to know how.

Three rules. Never a swap under running samples: a step's samples are drawn with the step's version. Versions that
samples wait for come first, oldest batch first, so that a late step is not starved by a newer one; an instance whose
context is too small for a batch is not kept for it. Where nothing waits, the latest, so that it is there before the
next step asks.
"""

from __future__ import annotations

from penstock.rollout.fleet import NO_VERSION, Fleet, Instance, State
from penstock.rollout.tracker import Tracker
from penstock.wire import LoadWeights

__all__ = ["Versions"]

VERSIONS_REMEMBERED = 16


class Versions:
    """Published versions, and who is to load which."""

    def __init__(self, tracker: Tracker, fleet: Fleet) -> None:
        self._tracker = tracker
        self._fleet = fleet
        self._sources: dict[int, str] = {}
        self.latest = NO_VERSION
        """Published last; -1 before the first."""

    def __contains__(self, version: int) -> bool:
        return version in self._sources

    def publish(self, version: int, source: str) -> None:
        """`version` can be pulled from `source`. The newest few are remembered, and those of open batches."""
        self._sources.pop(version, None)
        self._sources[version] = source
        self.latest = version
        needed = {batch.version for batch in self._tracker.batches()}
        for old in list(self._sources)[:-VERSIONS_REMEMBERED]:
            if old not in needed:
                del self._sources[old]

    def forget(self, cause: str, now: float) -> None:
        """A trainer that is gone takes its versions with it: another one's mean other weights, whatever the number."""
        self._sources.clear()
        self.latest = NO_VERSION
        self._fleet.forget_versions(cause, now)

    def wanted(self, instance: Instance) -> int:
        """What an instance should hold now; -1 for as it is."""
        if self._tracker.leases_of(instance.id):
            return NO_VERSION
        # An instance's context is not known for sure before it has loaded a model.
        room = instance.max_context_tokens if instance.version != NO_VERSION else None
        waited_for = [
            batch.version
            for batch in self._tracker.batches()
            if batch.waiting and batch.version in self._sources and (room is None or room >= batch.context_tokens)
        ]
        if instance.version in waited_for:
            return NO_VERSION
        return waited_for[0] if waited_for else self.latest

    def orders(self, now: float) -> list[tuple[Instance, LoadWeights]]:
        """Loads to begin now, failed ones that are due again included. The fleet takes note of them."""
        orders = []
        for instance in self._fleet:
            if not instance.name or instance.state is State.DRAINING or instance.held_off(now):
                continue
            wanted = self.wanted(instance)
            if wanted == NO_VERSION or (wanted == instance.version and instance.state is State.READY):
                continue
            under_way = instance.state is State.LOADING and instance.target == wanted
            if under_way and (instance.retry_at is None or now < instance.retry_at):
                continue
            self._fleet.told_to_load(instance, wanted, now, f"weight version {wanted}")
            orders.append((instance, LoadWeights(version=wanted, source=self._sources[wanted])))
        return orders
