"""What the trainer is owed: its batches, from their submission to their release, and its weight versions.

Decides what becomes of a batch whose trainer is away, who may have it afterwards, and what of it is sent again. States
of a batch:

    open --all its samples have ended--> held --released--> forgotten
      '---- cancelled, overdue, nobody came back for it: forgotten at once

and, beside that, claimed or unclaimed: it is unclaimed from the moment that its trainer is lost (or that the manager
starts with what a journal told it) until a trainer submits it again. Unclaimed batches are worked on as any other, for
`grace_s`. Who may claim one is decided by what it asks for and not by who asks: the same name, the same content, and
the same weights under the same version number. So the trainer that lost its connection and the one that resumes a run
come through one door, and each says which samples it has (`SubmitBatch.taken_*`): it is sent the others, once.

Refuses to know instances, and where samples go.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from penstock.errors import RolloutError, WireError
from penstock.observe.events import (
    CANCELLED,
    BatchEnded,
    BatchSubmitted,
    BatchTakenUp,
    FrameRefused,
    ManagerRecovered,
    SampleFailed,
)
from penstock.rollout.batch import Batch, TrackedSample, content_digest, finished_frame
from penstock.rollout.fleet import Fleet
from penstock.rollout.journal import Ended, Published, Removed, Submitted, Trainer
from penstock.rollout.journal_replay import Recovered
from penstock.rollout.outbox import TRAINER, Outbox
from penstock.rollout.tracker import Tracker
from penstock.rollout.versions import Versions
from penstock.sample import is_turn
from penstock.wire import (
    BatchDone,
    BatchFailed,
    CancelBatch,
    ReleaseBatch,
    SubmitBatch,
    TrainerHello,
    VersionPublished,
)

__all__ = ["TrainerSide"]

BATCHES_REMEMBERED = 64
"""Ended batches shown to people until the trainer releases them."""
BATCHES_HELD = 16
"""Batches that have ended and whose samples are kept until the trainer releases them; it has two at a time."""
TURNS_HELD = 1 << 16
"""The same for batches of one sample: turns of conversations, which are released with the batch that they belong to."""
FINISHED_BYTES = 8 * 1024 * 1024
"""Tokens and log-probabilities of one FinishedFrame before another one is begun."""


class TrainerSide:
    """Frames of the trainer in, its samples out. `grace_s`: how long batches outlive their trainer's connection.

    `frame_bytes`: of the largest frame to the trainer. What changes for instances is told to `rearrange`, and
    a batch that has come to `arrived`.
    """

    def __init__(
        self,
        tracker: Tracker,
        fleet: Fleet,
        versions: Versions,
        outbox: Outbox,
        rearrange: Callable[[], None],
        arrived: Callable[[Batch], None],
        *,
        grace_s: float,
        frame_bytes: int,
    ) -> None:
        self._tracker = tracker
        self._fleet = fleet
        self._versions = versions
        self._out = outbox
        self._rearrange = rearrange
        self._arrived = arrived
        self._grace_s = grace_s
        self._finished_bytes = min(FINISHED_BYTES, frame_bytes // 2)
        self.counts = outbox.counts
        self.session = ""
        self.ended_batches: dict[str, dict[str, int]] = {}
        """Batches that ended lately, with their samples by state."""
        self.held: dict[str, Batch] = {}
        """Batches of which every sample has ended, and that are not released."""
        self._unclaimed: dict[str, float] = {}
        """Until when each is kept."""
        self._away_since: float | None = None

    # ---- coming and going

    def restore(self, recovered: Recovered) -> None:
        """What a journal told; to be called before anybody connects. No trainer is there yet, as if it were lost."""
        out = self._out
        self.session = recovered.session
        self._versions.restore(recovered.versions, recovered.earlier)
        for batch in recovered.batches:
            batch.submitted_at = batch.progress_at = out.now
            if batch.ended:
                self.held[batch.name] = batch
            else:
                self._tracker.take_up(batch)
        self._away()
        if recovered.cut_bytes:
            kept = f"; set aside as *.damaged: {', '.join(recovered.set_aside)}" if recovered.set_aside else ""
            left_out = f"{recovered.cut_bytes} bytes of the journal belong to no whole state and are left out"
            out.warn(left_out + kept, "journal")
        if recovered.batches or recovered.accepted:
            out.emit(
                ManagerRecovered(
                    ts=out.ts,
                    batches=len(recovered.batches),
                    samples=recovered.samples,
                    finished=recovered.finished,
                    tokens=recovered.tokens,
                    cut_bytes=recovered.cut_bytes,
                    accepted=dict(recovered.accepted),
                )
            )

    def connected(self) -> None:
        """A trainer is there; it hears of what happened before it came, as far as that was kept."""
        self.ended_batches.clear()
        self._out.trainer_connected = self._versions.reachable = True
        self._away_since = None
        self._out.catch_up()

    def lost(self, cause: str) -> None:
        """Its batches are kept for a while, and instances keep the weights that they hold."""
        out = self._out
        out.trainer_connected = False
        kept = f"; its batches are kept for {self._grace_s:g} s" if self._grace_s else ""
        out.warn(f"the trainer is gone: {cause}{kept}")
        self._away()
        if not self._grace_s:
            self.tick(out.now)

    def hello(self, frame: TrainerHello) -> None:
        """One that comes back keeps what it names; another one may claim batches by submitting them again."""
        if frame.session and frame.session == self.session:
            for name in list(self._unclaimed):
                if name in frame.open_batches:
                    self._unclaimed[name] = float("inf")
                else:
                    self._drop(name, "its trainer has done with it")
        else:
            self.session = frame.session
            self._versions.another_trainer()
            self._out.record(Trainer(session=frame.session))
        self._rearrange()

    def tick(self, now: float) -> None:
        """Ends what nobody has come back for."""
        for name in [name for name, until in self._unclaimed.items() if now >= until]:
            self.counts.batches_cancelled += 1
            self._drop(name, f"no trainer came back for it within {self._grace_s:g} s" if self._grace_s else "")
        if self._away_since is not None and now >= self._away_since + self._grace_s:
            self._away_since = None
            self._versions.forget("the trainer is gone, and its weights with it", now)
            self._rearrange()

    def batch(self, name: str) -> Batch | None:
        """An open or held one."""
        return self._tracker.batch(name) or self.held.get(name)

    def unclaimed(self, batch: Batch) -> bool:
        """Its trainer is away, so that its deadline does not run."""
        return batch.name in self._unclaimed

    def every_batch(self) -> Iterator[Batch]:
        """Open and held ones."""
        yield from self.held.values()
        yield from self._tracker.batches()

    # ---- frames of the trainer

    def submit(self, frame: SubmitBatch, agent_frame_bytes: int) -> None:
        if frame.batch in self._unclaimed and self._claim(frame):
            return
        try:
            batch = self._tracker.add_batch(frame, self._out.now, agent_frame_bytes)
        except RolloutError as error:
            # The batch that is open under this name must not look failed to its owner.
            self._out.warn(str(error))
            return
        except WireError as error:
            self.refuse(str(error))
            self._out.send(TRAINER, BatchFailed(batch=frame.batch, cause=str(error), deadline=False))
            return
        self._forget_held(batch.name)
        self.ended_batches.pop(batch.name, None)
        self._out.record(Submitted(frame=batch.frame))
        if not is_turn(batch.name):
            self._out.emit(
                BatchSubmitted(ts=self._out.ts, batch=batch.name, version=batch.version, samples=batch.samples),
            )
        self._settle(batch, frame)
        self._arrived(batch)

    def publish(self, frame: VersionPublished) -> None:
        if not 0 <= frame.version < 2**32 or not frame.source:
            self.refuse(f"published weight version {frame.version} at {frame.source!r}")
            return
        if self._versions.publish(frame.version, frame.source, frame.digest):
            cause = f"weight version {frame.version} is another one now"
            for batch in [b for b in self.every_batch() if b.version == frame.version and b.name in self._unclaimed]:
                self._drop(batch.name, cause)
            self._fleet.forget_versions(cause, self._out.now, frame.version)
        self._out.record(Published(version=frame.version, source=frame.source, digest=frame.digest))
        self._rearrange()

    def cancel(self, frame: CancelBatch) -> None:
        batch = self._tracker.batch(frame.batch)
        if batch is None:
            self._out.warn(f"asked to cancel batch {frame.batch!r}, which is not open")
            return
        self.end(batch, f"{CANCELLED}{frame.cause}")
        self.counts.batches_cancelled += 1
        self._rearrange()

    def release(self, frame: ReleaseBatch) -> None:
        held = self._forget_held(frame.batch)
        if self.ended_batches.pop(frame.batch, None) is None and not held:
            state = "still open; cancel it first" if self._tracker.batch(frame.batch) else "not known"
            self._out.warn(f"asked to release batch {frame.batch!r}, which is {state}")

    def refuse(self, cause: str) -> None:
        self.counts.frames_refused += 1
        self._out.emit(FrameRefused(ts=self._out.ts, peer=TRAINER, cause=cause))

    # ---- samples out

    def deliver(self, samples: list[TrackedSample]) -> bool:
        """Sends samples that have just ended. True where batches ended with them."""
        ended = False
        for rows in _by_batch(samples):
            batch = rows[0].batch
            batch.progress_at = self._out.now
            self._record_ends(batch, rows)
            for sample in rows:
                if sample.cause:
                    self._out.emit(SampleFailed(ts=self._out.ts, sample=str(sample.id), cause=sample.cause))
            self._send(batch, rows)
            if batch.ended:
                ended = True
                self._hold(batch)
        return ended

    def end(self, batch: Batch, cause: str) -> None:
        """Gives an open batch up: forgets its samples, stops those that run, and remembers the counts."""
        self._close(batch, cause)
        self._out.record(Removed(batch=batch.name))
        _clear(batch)

    def fail(self, batch: Batch, cause: str, deadline: bool) -> None:
        """Ends an open batch and tells its trainer why."""
        self.end(batch, cause)
        self._out.send(TRAINER, BatchFailed(batch=batch.name, cause=cause, deadline=deadline))

    def cancel_all(self, cause: str) -> None:
        for batch in list(self._tracker.batches()):
            self.counts.batches_cancelled += 1
            self.fail(batch, cause, deadline=False)
        self._rearrange()

    # ---- within

    def _away(self) -> None:
        self._away_since = self._out.now
        self._versions.reachable = False
        self._unclaimed |= {batch.name: self._out.now + self._grace_s for batch in self.every_batch()}

    def _claim(self, frame: SubmitBatch) -> bool:
        """Whether an unclaimed batch is what is asked for; the trainer then gets what it lacks. Else it is dropped."""
        batch = self._tracker.batch(frame.batch) or self.held[frame.batch]
        if batch.digest != content_digest(frame) or frame.version not in self._versions:
            self._drop(batch.name, "another one was submitted under its name")
            return False
        try:
            batch.taken(frame)
        except WireError as error:
            self.refuse(str(error))
            self._drop(batch.name, str(error))
            self._out.send(TRAINER, BatchFailed(batch=frame.batch, cause=str(error), deadline=False))
            return True
        del self._unclaimed[batch.name]
        batch.deadline_s, batch.progress_at = frame.deadline_s, self._out.now
        tokens, finished = batch.tokens, len(batch.held)
        if self.held.pop(batch.name, None) is not None:
            self._tracker.take_up(batch)
        self._out.emit(
            BatchTakenUp(
                ts=self._out.ts,
                batch=batch.name,
                version=batch.version,
                samples=batch.samples,
                finished=finished,
                tokens=tokens,
            )
        )
        self._settle(batch, frame)
        self._rearrange()
        return True

    def _settle(self, batch: Batch, frame: SubmitBatch) -> None:
        """Sends what the trainer lacks of a batch, and goes on with the rest."""
        claimed = self._tracker.claim(batch, batch.taken(frame))
        for instance, leases in claimed.stop.items():
            self._out.stop(self._fleet.peer_of(instance), leases)
        if claimed.send:
            self._send(batch, claimed.send)
        if batch.ended:
            self._hold(batch)

    def _send(self, batch: Batch, samples: list[TrackedSample]) -> None:
        # Who claims a batch says what it has; until then nothing of it is sent, or it would come twice.
        if self._out.trainer_connected and batch.name not in self._unclaimed:
            for part in _parts(samples, self._finished_bytes):
                self._out.send(TRAINER, finished_frame(batch, part))

    def _record_ends(self, batch: Batch, samples: list[TrackedSample]) -> None:
        if self._out.journaling:
            self._out.record(
                Ended(
                    batch=batch.name,
                    samples=array("I", [sample.index for sample in samples]).tobytes(),
                    finishes=bytes([sample.finish for sample in samples]),
                    causes={row: sample.cause for row, sample in enumerate(samples) if sample.cause},
                )
            )

    def _hold(self, batch: Batch) -> None:
        """Every sample of it has ended: the trainer is told, and may ask for them again until it releases it."""
        self.counts.batches_done += 1
        self._close(batch, "")
        self.held[batch.name] = batch
        self._bound_held(batch)
        if batch.name not in self._unclaimed:
            done = BatchDone(batch=batch.name, samples=batch.finished, failed=batch.failed, tokens=batch.tokens)
            self._out.send(TRAINER, done)

    def _bound_held(self, batch: Batch) -> None:
        """Of a trainer that never releases anything the oldest are forgotten; turns never push out whole batches."""
        if batch.samples == 1 and len(self.held) <= TURNS_HELD:
            return
        alike = [name for name, held in self.held.items() if (held.samples == 1) == (batch.samples == 1)]
        for name in alike[: -TURNS_HELD if batch.samples == 1 else -BATCHES_HELD]:
            self._forget_held(name)

    def _close(self, batch: Batch, cause: str) -> None:
        counts = self._tracker.state_counts(batch)
        for instance, leases in self._tracker.remove_batch(batch.name).items():
            self._out.stop(self._fleet.peer_of(instance), leases)
        if cause:
            self._unclaimed.pop(batch.name, None)
        self.ended_batches[batch.name] = counts
        while len(self.ended_batches) > BATCHES_REMEMBERED:
            del self.ended_batches[next(iter(self.ended_batches))]
        if is_turn(batch.name) and not cause and not batch.failed:
            # There are thousands of them, and nothing happened.
            return
        self._out.emit(
            BatchEnded(
                ts=self._out.ts,
                batch=batch.name,
                samples=batch.finished,
                failed=batch.failed,
                tokens=batch.tokens,
                cause=cause,
            )
        )

    def _drop(self, name: str, cause: str) -> None:
        """Forgets an unclaimed batch, be it open or held."""
        self._unclaimed.pop(name, None)
        batch = self._tracker.batch(name)
        if batch is not None:
            self.end(batch, cause or "the trainer is gone")
            self._rearrange()
        else:
            self._forget_held(name)

    def _forget_held(self, name: str) -> bool:
        batch = self.held.pop(name, None)
        self._unclaimed.pop(name, None)
        if batch is None:
            return False
        self._out.record(Removed(batch=name))
        _clear(batch)
        return True


def _clear(batch: Batch) -> None:
    """Lets its samples go at once: each knows its batch, and the batch them."""
    batch.held.clear()
    batch.elsewhere.clear()
    batch.moved.clear()
    batch.suspects.clear()


def _by_batch(samples: Iterable[TrackedSample]) -> Iterable[list[TrackedSample]]:
    found: dict[str, list[TrackedSample]] = {}
    for sample in samples:
        found.setdefault(sample.batch.name, []).append(sample)
    return found.values()


def _parts(samples: list[TrackedSample], limit_bytes: int) -> Iterator[list[TrackedSample]]:
    """Cuts finished samples into frames of a bounded size."""
    part: list[TrackedSample] = []
    size = 0
    for sample in samples:
        if part and size + 8 * sample.length > limit_bytes:
            yield part
            part, size = [], 0
        part.append(sample)
        size += 8 * sample.length
    yield part
