"""Which waiting samples are given out now, and which go on elsewhere: between the manager, its policy and the tracker.

Decides the order in which samples are offered (suspects first, one to an instance; then the oldest batch) and what
instances may be asked at all. Where a sample goes is the balance policy's, what state it then is in the tracker's.
Refuses to know sockets, and what makes it be asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from penstock.observe.events import SamplesMoved
from penstock.rollout.balance import InstanceLoad
from penstock.rollout.balancing import Balancing
from penstock.rollout.batch import Batch, TrackedSample
from penstock.rollout.fleet import NO_VERSION, Fleet, Instance, State
from penstock.rollout.journal import placed_records
from penstock.rollout.outbox import Outbox
from penstock.rollout.starts import start_frames
from penstock.rollout.tracker import Tracker
from penstock.rollout.versions import Versions
from penstock.rollout.windows import Windows
from penstock.sample import turn_before

__all__ = ["Dispatching"]

LATELY_S = 0.1
"""What the policy knows of all instances is as good as new for so long: from one tick to the next."""

_Rows = dict[str, list[TrackedSample]]


@dataclass(frozen=True, slots=True)
class _Left:
    """A batch of which samples wait, since no instance had room for them."""

    coming: int
    """Instances that were."""
    shown: tuple[str, ...]
    """Those that were looked at; the same object for the same ones."""


class Dispatching:
    """`most_pending`: samples that an instance is sent beyond what it runs at once, where one is to be tried there.

    `batch`: one by its name, open or ended and not released.
    """

    def __init__(
        self,
        tracker: Tracker,
        fleet: Fleet,
        versions: Versions,
        balancing: Balancing,
        windows: Windows,
        outbox: Outbox,
        batch: Callable[[str], Batch | None],
        *,
        most_pending: int,
    ) -> None:
        self._tracker = tracker
        self._fleet = fleet
        self._versions = versions
        self._balancing = balancing
        self._windows = windows
        self._out = outbox
        self._batch = batch
        self._most_pending = most_pending
        self._left: dict[str, _Left] = {}
        """By batch, since all instances were looked at."""
        self._suspected = False
        """Suspects waited then; further ones come with a look at all."""
        self._shown: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Instances that the policy was shown together since then."""
        self._shown_in: dict[str, tuple[str, ...]] = {}
        """With whom each was shown last: what the policy knows of it holds beside those."""
        self._settled = False
        """Since `give` looked at everything, nothing has changed but what `fill` and `offer` have seen to."""
        self._looked_at = NO_VERSION, float("-inf")
        """For samples of which version all instances were looked at last, and when."""
        self._kept_of = ""
        """The batch of which the policy kept something for instances that were coming, last."""

    def give(self) -> None:
        """Gives waiting samples to instances, oldest batch first."""
        rows: _Rows = {}
        refused: dict[int, tuple[int, _Left]] = {}
        """Context, by version, of the least demanding lone sample that found no room."""
        self._versions.turn(self._out.now)
        self._suspected = False
        for told in (self._left, self._shown, self._shown_in):
            told.clear()
        for batch in self._tracker.waiting():
            # Turns of conversations are batches of one, and many.
            lone = _is_lone(batch)
            least, left = refused.get(batch.version, (math.inf, None))
            if lone and left is not None and batch.context_tokens >= least:
                self._left[batch.name] = left
                continue
            self._try_suspects(batch, rows)
            self._suspected |= bool(batch.suspects)
            if not batch.assignable:
                continue
            self._deal(batch, rows)
            if lone and batch.assignable:
                refused[batch.version] = batch.context_tokens, self._left[batch.name]
        self._start(rows)
        self._settled = True

    def look_at_all(self) -> None:
        """The next time, too, that a sample ends or a turn comes: more has changed than that."""
        self._settled = False

    def fill(self, instance: Instance) -> None:
        """Gives waiting samples to an instance on which some have ended. As `give`, but where that last left samples
        waiting nobody else is looked at: with hundreds of instances, each sample that ends would cost a look at all.

        It does where an instance was shown with others since than those that a batch was shown with (as where some
        have too little context for what waits longest), and where two batches wait for instances that are coming."""
        if not (self._settled and self._balancing.fills):
            self.give()
            return
        rows: _Rows = {}
        full = False
        for batch in self._tracker.waiting(instance.version):
            if not self._may_take(instance, batch):
                continue
            if batch.suspects:
                self._try_suspect(batch, self._balancing.load(instance), rows)
            if full or not batch.assignable:
                continue
            coming = self._knows(batch, instance)
            if coming is None:
                self._start(rows)
                self.give()
                return
            for _ in range(self._balancing.fill(batch, instance, coming)):
                self._place(batch, instance.id, rows)
            # It has no room for any further one.
            full = batch.assignable > 0 and not coming
            if full and not self._suspected:
                break
        self._start(rows)

    def offer(self, batch: Batch) -> None:
        """Gives a lone sample that has just come, the next turn of a conversation, to an instance. As `give`, but who
        has waited longer has found no room, and need not be looked at again."""
        if not (self._settled and self._balancing.fills and _is_lone(batch)):
            self.give()
            return
        rows: _Rows = {}
        near = self._fleet.by_id(self._near(batch))
        version, at = self._looked_at
        lately = version == batch.version and self._out.now - at < LATELY_S
        if lately and near is not None and self._may_take(near, batch) and self._balancing.stays(batch, near):
            self._place(batch, near.id, rows)
        else:
            self._deal(batch, rows)
        self._start(rows)

    def move(self, now: float) -> None:
        """Takes samples from where they are and gives them to instances where they end sooner, or lets them wait, if
        the policy says so.

        The oldest batch alone: it is what the trainer waits for.
        """
        batch = next(self._tracker.batches(), None)
        if batch is None:
            return
        given: _Rows = {}
        taken: dict[tuple[str, bool], list[TrackedSample]] = {}
        for move in self._balancing.moves(batch, self._loads(batch), now):
            if move.target:
                sample = self._tracker.hand_on(move.source, move.lease, move.target)
            else:
                sample = self._tracker.put_back(move.source, move.lease)
            if sample is not None:
                self._balancing.moved(sample)
                self._out.stop(self._fleet.peer_of(move.source), [move.lease])
                taken.setdefault((move.source, bool(move.target)), []).append(sample)
                if move.target:
                    given.setdefault(move.target, []).append(sample)
        for (source, elsewhere), samples in taken.items():
            tokens = sum(sample.length for sample in samples)
            cause = "they end sooner elsewhere" if elsewhere else "they wait, so that others end sooner"
            self.note_moved(source, len(samples), tokens, cause)
        self._start(given)
        if not all(elsewhere for _, elsewhere in taken):
            self.give()

    def note_moved(self, instance: str, samples: int, tokens: int, cause: str) -> None:
        """Samples of an instance wait again, or are elsewhere."""
        self._out.counts.samples_moved += samples
        self._out.counts.tokens_moved += tokens
        self._out.emit(
            SamplesMoved(ts=self._out.ts, instance=instance, samples=samples, tokens_kept=tokens, cause=cause)
        )

    # ---- within

    def _deal(self, batch: Batch, rows: _Rows) -> None:
        """Gives a batch's waiting samples to instances, as far as the policy finds room for them."""
        lone = _is_lone(batch)
        loads = self._loads(batch)
        near = self._near(batch) if lone else ""
        # Of a single sample nothing is kept for those that are coming.
        coming = 0 if lone else self._coming(batch)
        picks = self._balancing.assign(batch, loads, coming, near, self._windows.elapsed_s())
        for pick in picks:
            self._place(batch, loads[pick].instance, rows)
        names = tuple(load.instance for load in loads)
        shown = self._shown.setdefault(names, names)
        self._shown_in.update(dict.fromkeys(shown, shown))
        if batch.assignable:
            self._left[batch.name] = _Left(coming, shown)
        if loads:
            # Of none nothing is known that would hold for another turn.
            self._looked_at = batch.version, self._out.now
        if coming:
            self._kept_of = batch.name

    def _knows(self, batch: Batch, instance: Instance) -> int | None:
        """Instances that were coming when the policy was asked for a batch; None where what it knows of the batch or
        the instance, it knows from a look at others."""
        left = self._left.get(batch.name)
        if left is None or self._shown_in.get(instance.id) is not left.shown:
            return None
        return None if left.coming and batch.name != self._kept_of else left.coming

    def _try_suspects(self, batch: Batch, rows: _Rows) -> None:
        """Gives each instance one of the samples that may have killed another, where its trial begins soonest."""
        if batch.suspects:
            for load in sorted(self._loads(batch), key=lambda load: load.samples - load.max_running):
                self._try_suspect(batch, load, rows)

    def _try_suspect(self, batch: Batch, load: InstanceLoad, rows: _Rows) -> None:
        room = load.samples < load.max_running + self._most_pending
        if batch.suspects and room and self._tracker.may_try(load.instance):
            self._place(batch, load.instance, rows)

    def _place(self, batch: Batch, instance: str, rows: _Rows) -> None:
        sample = self._tracker.place(batch, instance)
        if sample is not None:
            rows.setdefault(instance, []).append(sample)

    def _start(self, rows: _Rows) -> None:
        for instance, samples in rows.items():
            peer = self._fleet.peer_of(instance)
            holder = self._fleet.get(peer)
            if self._out.journaling:
                self._out.records(placed_records(samples, holder.name if holder is not None else ""))
            for frame in start_frames(samples, self._out.agent_frame_bytes // 2):
                self._out.send(peer, frame)

    def _coming(self, batch: Batch) -> int:
        """Instances that load the batch's version for the first time of trying."""
        return sum(
            instance.state is State.LOADING and instance.target == batch.version and not instance.load_tries
            for instance in self._fleet
        )

    def _near(self, batch: Batch) -> str:
        """The instance that said the turn before a batch of one; empty where that is not known, or there was none."""
        before = turn_before(batch.name)
        said = self._batch(before.batch) if before is not None else None
        sample = said.ended_sample(before.prompt, before.replica) if said is not None and before is not None else None
        return sample.instance if sample is not None else ""

    def _loads(self, batch: Batch) -> list[InstanceLoad]:
        """Instances that hold the batch's version and have the context that any of its samples may come to need."""
        return [self._balancing.load(instance) for instance in self._fleet if self._may_take(instance, batch)]

    def _may_take(self, instance: Instance, batch: Batch) -> bool:
        return (
            instance.takes(batch.version, batch.context_tokens)
            and instance.knows(batch.top_token)
            and self._windows.may_generate(instance)
            and not instance.turning
        )


def _is_lone(batch: Batch) -> bool:
    """A single sample that waits: all of them are alike but for the context that they need."""
    return batch.samples == 1 == batch.assignable
