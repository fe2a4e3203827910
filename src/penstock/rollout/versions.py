"""Which weight version each instance should hold: decides what to load and when, and refuses to know how.

Three rules. Never a swap under running samples: a step's samples are drawn with the step's version. Versions that
samples wait for come first, oldest batch first, so that a late step is not starved by a newer one; an instance whose
context is too small for a batch is not kept for it. Where nothing waits, the latest, so that it is there before the
next step asks.

The second rule has teeth: where nobody has the weights of the oldest samples that wait, nor is about to, one instance
is given no more work (`Instance.turning`) until it runs dry and can load them. Newer batches could else keep everybody
busy for longer than those samples have.

A version's number means something only together with its trainer. What two trainers say of their weights' content
(`digest`) decides whether a number of one is that of the other: a resumed run goes on with what instances hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.rollout.fleet import NO_VERSION, Fleet, Instance, State
from penstock.rollout.journal import Published
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
        self._digests: dict[int, str] = {}
        self._earlier: dict[int, str] = {}
        """Digests of an earlier trainer's versions, which this one has not published."""
        self.latest = NO_VERSION
        """Published last; -1 before the first."""
        self._turned: Instance | None = None
        self.reachable = True
        """Whether the trainer, and with it the place that weights come from, is there."""

    def __contains__(self, version: int) -> bool:
        return version in self._sources

    def published(self) -> Iterator[tuple[int, str, str]]:
        """(version, source, digest) of what may be loaded, the latest last."""
        for version, source in self._sources.items():
            yield version, source, self._digests.get(version, "")

    def publish(self, version: int, source: str, digest: str = "") -> bool:
        """`version` can be pulled from `source`. The newest few are remembered, and those of open batches.

        True where an earlier trainer had other weights under this number.
        """
        before = self._earlier.pop(version, None)
        self._sources.pop(version, None)
        self._sources[version] = source
        self._digests[version] = digest
        self.latest = version
        needed = {batch.version for batch in self._tracker.batches()}
        for old in list(self._sources)[:-VERSIONS_REMEMBERED]:
            if old not in needed:
                del self._sources[old]
                self._digests.pop(old, None)
        return before is not None and (not before or before != digest)

    def restore(self, published: Iterable[Published], earlier: dict[int, str]) -> None:
        """What was published before the manager started."""
        self._earlier |= earlier
        for told in published:
            self.publish(told.version, told.source, told.digest)

    def earlier(self) -> Iterator[tuple[int, str]]:
        """(version, digest) of earlier trainers' versions that the present one has not published."""
        return iter(self._earlier.items())

    def another_trainer(self) -> None:
        """What was published so far is an earlier trainer's, and can't be pulled any more."""
        self._earlier |= self._digests
        for old in list(self._earlier)[:-VERSIONS_REMEMBERED]:
            del self._earlier[old]
        self._sources.clear()
        self._digests.clear()
        self.latest = NO_VERSION

    def forget(self, cause: str, now: float) -> None:
        """A trainer that is gone takes its versions with it: another one's mean other weights, whatever the number."""
        self._sources.clear()
        self._digests.clear()
        self._earlier.clear()
        self.latest = NO_VERSION
        self._fleet.forget_versions(cause, now)

    def turn(self, now: float) -> None:
        """Chooses the instance that is to run dry for the oldest samples that wait, if there has to be one."""
        chosen, before = self._turning(now), self._turned
        if chosen is not before:
            if before is not None:
                before.turning = False
            if chosen is not None:
                chosen.turning = True
            self._turned = chosen

    def _turning(self, now: float) -> Instance | None:
        batch = next((batch for batch in self._tracker.waiting() if batch.version in self._sources), None)
        if batch is None or not self.reachable or self._fleet.any_ready_for(batch.version, batch.context_tokens):
            return None
        able = []
        for instance in self._fleet:
            joining = instance.state is State.JOINING and bool(instance.name) and not instance.held_off(now)
            if joining or (instance.state is State.LOADING and instance.target == batch.version):
                return None
            fits = instance.max_context_tokens >= batch.context_tokens and instance.knows(batch.top_token)
            if instance.state is State.READY and fits and not instance.cordoned:
                able.append(instance)
        return min(able, key=lambda one: (one.reserved, self._tracker.leases_of(one.id)), default=None)

    def wanted(self, instance: Instance) -> int:
        """What an instance should hold now; -1 for as it is."""
        if self._tracker.leases_of(instance.id):
            return NO_VERSION
        # An instance's context is not known for sure before it has loaded a model.
        room = instance.max_context_tokens if instance.version != NO_VERSION else None

        def waited_for(version: int | None = None) -> int:
            for batch in self._tracker.waiting(version):
                if batch.version in self._sources and (room is None or room >= batch.context_tokens):
                    return batch.version
            return NO_VERSION

        if not instance.turning and instance.version != NO_VERSION and waited_for(instance.version) != NO_VERSION:
            return NO_VERSION
        oldest = waited_for()
        return self.latest if oldest == NO_VERSION else oldest

    def orders(self, now: float) -> list[tuple[Instance, LoadWeights]]:
        """Loads to begin now, failed ones that are due again included. The fleet takes note of them."""
        orders: list[tuple[Instance, LoadWeights]] = []
        self.turn(now)
        if not self.reachable:
            return orders
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
