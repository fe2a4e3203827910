"""What samples wait for, in words: decides when waiting is announced and when it is over.

Every wait has a name here and a deadline in its batch. Refuses to end anything: the manager does, with the cause that
is worded here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from penstock.observe.events import Event, WaitingForInstances, WaitingOver
from penstock.rollout.batch import Batch
from penstock.rollout.fleet import Fleet, State
from penstock.rollout.tracker import Tracker
from penstock.rollout.versions import Versions

__all__ = ["Waiting"]


class Waiting:
    """Watches for samples that no instance could take. `announce_s`: patience while instances still load."""

    def __init__(
        self,
        tracker: Tracker,
        fleet: Fleet,
        versions: Versions,
        emit: Callable[[Event], None],
        announce_s: float,
        wall_offset_s: float,
    ) -> None:
        self._tracker = tracker
        self._fleet = fleet
        self._versions = versions
        self._emit = emit
        self._announce_s = announce_s
        self._wall_offset_s = wall_offset_s
        self._since: float | None = None
        self._announced = False
        self._due_at = float("-inf")
        """Before then no deadline is over: progress puts each of them off."""
        self.waiting_for = ""
        """Empty, or what waiting samples wait for."""
        self.waits = 0
        """Waits announced so far."""
        self.waited_s = 0.0
        """In announced waits that are over."""

    def look(self, now: float) -> None:
        """To be called whenever instances or batches have changed, and with the time."""
        starved = self._starved()
        if starved is None:
            self._over(now)
            return
        self.waiting_for = self.need(starved)
        if self._since is None:
            self._since = now
        patience_s = self._announce_s if self._fleet.count(State.LOADING) else 0.0
        if not self._announced and now - self._since >= patience_s:
            self._announced = True
            self.waits += 1
            self._emit(
                WaitingForInstances(ts=now + self._wall_offset_s, waiting_for=self.waiting_for, samples=starved.waiting)
            )

    def _starved(self) -> Batch | None:
        able: dict[int, int] = {}
        """The largest context, by version, for which an instance is there."""
        for batch in self._tracker.waiting():
            if batch.context_tokens > able.get(batch.version, -1):
                if not self._able(batch):
                    return batch
                able[batch.version] = batch.context_tokens
        return None

    def due(self, at: float) -> None:
        """A batch was submitted, or claimed, that has until then to make progress."""
        self._due_at = min(self._due_at, at)

    def overdue(self, now: float, excused: Callable[[Batch], bool] = lambda batch: False) -> tuple[Batch, str] | None:
        """The oldest batch without progress for longer than its deadline, and the cause; an excused one has none.

        Batches are worked on in order, so a later one is not late while an earlier one makes progress.
        """
        if now < self._due_at:
            return None
        due_at, progress_at = float("inf"), float("-inf")
        for batch in self._tracker.batches():
            progress_at = max(progress_at, self._tracker.progress_at(batch))
            due_at = min(due_at, progress_at + batch.deadline_s)
            waited_s = now - progress_at
            if waited_s > batch.deadline_s and not excused(batch):
                missing = "; ".join(self._missing(batch)) or "nothing that the manager knows of"
                return batch, (
                    f"batch {batch.name} made no progress for {waited_s:.1f} s "
                    f"(deadline_s = {batch.deadline_s:g}): {missing}"
                )
        self._due_at = due_at
        return None

    def need(self, batch: Batch) -> str:
        """What the waiting samples of a batch lack where no instance could take them."""
        if batch.version not in self._versions:
            return f"weight version {batch.version} to be published (the latest is {self._versions.latest})"
        fleet = self._fleet
        parts = [f"{n} {state.value}" for state in State if state is not State.READY and (n := fleet.count(state))]
        contexts = Counter(i.max_context_tokens for i in fleet.ready_for(batch.version, 0))
        parts += [f"{n} ready with a context of {tokens}" for tokens, n in sorted(contexts.items())]
        if others := fleet.count(State.READY) - contexts.total():
            parts.append(f"{others} ready with another version")
        context = f" and a context of {batch.context_tokens} tokens" if contexts else ""
        need = f"an instance with weight version {batch.version}{context} ({', '.join(parts) or 'none has joined yet'})"
        gone = fleet.last_gone
        if gone is not None and not len(fleet):
            need += f"; the last one, {gone.id}, left because: {gone.cause}"
        return need

    def _able(self, batch: Batch) -> bool:
        """Whether an instance is there for samples of the batch, be it full."""
        return self._fleet.any_ready_for(batch.version, batch.context_tokens)

    def _missing(self, batch: Batch) -> Iterator[str]:
        """What an unfinished batch lacks."""
        if batch.placed:
            holders = [
                instance.id
                for instance in self._fleet
                if any(sample.batch is batch for sample in self._tracker.samples_of(instance.id))
            ]
            yield f"{batch.placed} samples are with {', '.join(holders)}, without a token from there"
        if batch.waiting:
            tried = f", {len(batch.suspects)} of them for a trial of their own" if batch.suspects else ""
            room = f"room on an instance{tried}"
            yield f"{batch.waiting} samples wait for {room if self._able(batch) else self.need(batch)}"

    def _over(self, now: float) -> None:
        if self._announced and self._since is not None:
            self.waited_s += now - self._since
            self._emit(WaitingOver(ts=now + self._wall_offset_s, waited_s=now - self._since))
        self._since, self._announced, self.waiting_for = None, False, ""
