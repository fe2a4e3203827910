"""The rollout manager: joins tracker, fleet and dispatch policy, and is as pure as they are.

Frames and `now` go in, frames and events come out (`Decisions`). It decides which weights an instance loads and
when, which instances get work, when a batch is done, and when waiting becomes an error. It refuses to know sockets,
clocks and encodings: the service, the tests, the benchmark and the simulator drive the same object.

Peers are named by whoever holds the sockets; the trainer is `TRAINER`. `now` is in seconds on any clock that never
goes back; `wall_offset_s` turns it into seconds since 1970 for events.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.errors import RolloutError, WireError
from penstock.observe.events import (
    BatchEnded,
    BatchSubmitted,
    Event,
    FrameRefused,
    RowsRefused,
    SampleFailed,
    SamplesMoved,
    Warned,
    encode_event,
)
from penstock.rollout.balance import DispatchPolicy, InstanceLoad, ShortestQueue
from penstock.rollout.batch import Batch, TrackedSample, finished_frame
from penstock.rollout.fleet import Fleet, FleetConfig, Instance, State
from penstock.rollout.starts import start_frames
from penstock.rollout.tracker import Tracker
from penstock.rollout.versions import Versions
from penstock.rollout.waiting import Waiting
from penstock.wire import (
    MAX_FRAME_BYTES,
    AgentHello,
    BatchDone,
    BatchFailed,
    CancelBatch,
    Drain,
    EventFrame,
    FleetStatus,
    FrameFromManager,
    FrameToManager,
    Goodbye,
    Heartbeat,
    LoadFailed,
    ReleaseBatch,
    StopFrame,
    SubmitBatch,
    TokenFrame,
    TrainerHello,
    VersionPublished,
    VersionReady,
    Welcome,
    column_bytes,
)

__all__ = ["TRAINER", "Decisions", "Manager", "ManagerConfig"]

TRAINER = "trainer"
"""The trainer's peer name; no agent has it."""
EVENTS_KEPT = 10_000
"""Events kept for a trainer that is not there yet; older ones are dropped and counted."""
CAUSES_TOLD = 20
"""Causes of refused rows told apart at one tick; the rest are counted as one."""
BATCHES_REMEMBERED = 64
"""Ended batches shown to people until the trainer releases them."""
FINISHED_BYTES = 8 * 1024 * 1024
"""Tokens and log-probabilities of one FinishedFrame before another one is begun."""


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    fleet: FleetConfig = field(default_factory=FleetConfig)
    frame_steps: int = 8
    """Decode steps that an engine gathers in one token frame."""
    max_pending_per_instance: int = 16
    """Samples sent to an instance beyond what it can run at once."""
    max_context_tokens: int = 0
    """Context that the run wants, for instances that have no wish of their own; 0 leaves it to them."""
    max_frame_bytes: int = MAX_FRAME_BYTES
    """Larger frames are refused; agents are told, and hold to it. They are sent at most the protocol's default."""
    status_s: float = 0.5
    """Between two FleetStatus frames."""
    announce_wait_s: float = 3.0
    """Waiting while instances still load is announced after so long; with none there, at once."""
    max_strikes: int = 3
    """A sample that is lost with its instance so often, without a new token in between, is set aside as failed."""


@dataclass(slots=True)
class Decisions:
    """What is to be done now, in order."""

    frames: list[tuple[str, FrameFromManager]] = field(default_factory=list)
    """(peer, frame)"""
    events: list[Event] = field(default_factory=list)
    """Also on their way to the trainer, as EventFrame."""
    close: list[tuple[str, str]] = field(default_factory=list)
    """(peer, cause): connections to end, after their frames are sent."""


@dataclass(slots=True)
class Counts:
    """Totals since the start, for operators."""

    frames_refused: int = 0
    rows_refused: int = 0
    samples_moved: int = 0
    tokens_moved: int = 0
    batches_done: int = 0
    batches_failed: int = 0
    batches_cancelled: int = 0
    events_dropped: int = 0


class Manager:
    """All decisions of the rollout side of a run."""

    def __init__(self, config: ManagerConfig, policy: DispatchPolicy | None = None, wall_offset_s: float = 0.0) -> None:
        self.config = config
        self.policy: DispatchPolicy = policy or ShortestQueue(config.max_pending_per_instance)
        self.tracker = Tracker(config.max_strikes)
        self.fleet = Fleet(config.fleet, self._emit, wall_offset_s)
        self.counts = Counts()
        self.wall_offset_s = wall_offset_s
        self.trainer_connected = False
        self.versions = Versions(self.tracker, self.fleet)
        self.waiting = Waiting(
            self.tracker, self.fleet, self.versions, self._emit, config.announce_wait_s, wall_offset_s
        )
        self.ended_batches: dict[str, dict[str, int]] = {}
        """Batches that ended lately, with their samples by state."""
        self._out = Decisions()
        self._events_kept: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._rows_refused: Counter[tuple[str, str]] = Counter()
        self._status_at = float("-inf")
        self._now = 0.0

    # ---- agents

    def on_agent_connected(self, peer: str, now: float) -> Decisions:
        self._now = now
        self.fleet.connect(peer, now)
        return self._decided()

    def on_agent_frame(self, peer: str, frame: FrameToManager, now: float) -> Decisions:
        self._now = now
        instance = self.fleet.get(peer)
        if instance is None:
            # Its connection was given up a moment ago; the frame crossed the farewell.
            self.counts.frames_refused += 1
            return self._decided()
        instance.heard_at = now
        try:
            self._agent_frame(instance, frame)
        except WireError as error:
            self._refuse_agent(instance, str(error))
        return self._decided()

    def on_agent_refused(self, peer: str, cause: str, now: float) -> Decisions:
        """It sent something that is no frame at all."""
        self._now = now
        instance = self.fleet.get(peer)
        if instance is not None:
            self._refuse_agent(instance, cause)
        return self._decided()

    def on_agent_lost(self, peer: str, cause: str, now: float) -> Decisions:
        """Its connection has ended. Its samples go on elsewhere, from their last token."""
        self._now = now
        instance = self.fleet.get(peer)
        if instance is not None:
            self._lose(instance, cause, orderly=instance.state is State.DRAINING)
        return self._decided()

    # ---- trainer

    def on_trainer_connected(self, now: float) -> Decisions:
        """A trainer is there; it hears of what happened before it came, as far as that was kept."""
        self._now = now
        self.ended_batches.clear()
        self.trainer_connected = True
        self._status_at = float("-inf")
        if self.counts.events_dropped:
            message = f"{self.counts.events_dropped} events were dropped while no trainer was connected"
            self._warn(message)
        if self._events_kept:
            self._send_events(self._events_kept)
            self._events_kept.clear()
        return self._decided()

    def on_trainer_frame(self, frame: FrameToManager, now: float) -> Decisions:
        self._now = now
        if isinstance(frame, SubmitBatch):
            self._submit(frame)
        elif isinstance(frame, VersionPublished):
            self._published(frame)
        elif isinstance(frame, CancelBatch):
            self._cancel(frame)
        elif isinstance(frame, ReleaseBatch):
            self._release(frame)
        elif not isinstance(frame, TrainerHello):
            self._refuse_trainer(f"a {type(frame).__name__} is an agent's frame, and came from the trainer")
        return self._decided()

    def on_trainer_refused(self, cause: str, now: float) -> Decisions:
        """It sent something that is no frame at all."""
        self._now = now
        self._refuse_trainer(cause)
        return self._decided()

    def on_trainer_lost(self, cause: str, now: float) -> Decisions:
        """Its batches and weight versions are void, for one that comes back submits and publishes again.

        Instances stay, and load what the next trainer publishes.
        """
        self._now = now
        self.trainer_connected = False
        self._warn(f"the trainer is gone: {cause}")
        self._cancel_all(f"the trainer is gone: {cause}")
        self.versions.forget("the trainer is gone, and its weights with it", now)
        return self._decided()

    # ---- time

    def tick(self, now: float) -> Decisions:
        """To be called a few times a second: deadlines, retries, announcements, status."""
        self._now = now
        for instance, cause in self.fleet.overdue(now):
            self._out.close.append((instance.peer, cause))
            self._lose(instance, cause, orderly=instance.state is State.DRAINING)
        self._fail_overdue()
        self._rearrange()
        self._report_refused_rows()
        if now - self._status_at >= self.config.status_s:
            self._status_at = now
            for instance in self.fleet:
                instance.measure_rate(now)
            if self.trainer_connected:
                self._send(TRAINER, self.status(now))
        return self._decided()

    def shutdown(self, now: float, cause: str) -> Decisions:
        """Asks every instance to leave."""
        self._now = now
        for instance in list(self.fleet):
            self.fleet.drain(instance, cause, now)
            self._send(instance.peer, Drain(cause=cause))
        self._cancel_all(cause, tell=True)
        return self._decided()

    def status(self, now: float) -> FleetStatus:
        tracker = self.tracker
        return FleetStatus(
            instances=self.fleet.statuses(self._load_of, now),
            queued=tracker.queued,
            running=tracker.placed,
            finished=tracker.samples_finished,
            failed=tracker.samples_failed,
            tokens_accepted=tracker.tokens_accepted,
            waiting_for=self.waiting.waiting_for,
        )

    # ---- frames of agents

    def _agent_frame(self, instance: Instance, frame: FrameToManager) -> None:
        if isinstance(frame, AgentHello):
            self.fleet.hello(instance, frame, self._now)
            self._send(
                instance.peer,
                Welcome(
                    instance=instance.id,
                    heartbeat_s=self.config.fleet.heartbeat_s,
                    frame_steps=self.config.frame_steps,
                    max_context_tokens=self.config.max_context_tokens,
                    max_frame_bytes=self._agent_frame_bytes,
                    hold_off_s=instance.hold_off_s,
                ),
            )
            self._steer()
        elif not instance.name:
            raise WireError(f"a {type(frame).__name__} before the hello")
        elif isinstance(frame, TokenFrame):
            self._tokens(instance, frame)
        elif isinstance(frame, Heartbeat):
            instance.beat = frame
        elif isinstance(frame, VersionReady):
            self.fleet.version_ready(instance, frame, self._now)
            self._rearrange()
        elif isinstance(frame, LoadFailed):
            self.fleet.load_failed(instance, frame, self._now)
        elif isinstance(frame, Goodbye):
            self._out.close.append((instance.peer, "said goodbye"))
            self._lose(instance, frame.cause[:500] or "said goodbye", orderly=not frame.engine_failed)
        else:
            raise WireError(f"a {type(frame).__name__} is the trainer's frame, and came from an agent")

    def _tokens(self, instance: Instance, frame: TokenFrame) -> None:
        applied = self.tracker.apply(instance.id, frame, instance.versions, instance.vocab_size, self._now)
        instance.tokens_accepted += applied.tokens
        if applied.refused:
            for cause, rows in applied.refused.items():
                self._rows_refused[instance.id, cause] += rows
                instance.rows_refused += rows
                self.counts.rows_refused += rows
        if applied.stop:
            self._stop(instance.peer, applied.stop)
        if applied.moved:
            self._note_moved(instance, applied.moved, applied.moved_tokens, "taken back from the instance")
        if applied.finished:
            self._deliver(applied.finished)
        if applied.finished or applied.moved:
            self._dispatch()
            if not self.tracker.leases_of(instance.id):
                # Idle now: the next weight version may be waiting for that.
                self._steer()

    def _refuse_agent(self, instance: Instance, cause: str) -> None:
        """A peer that sends nonsense is not listened to any further."""
        self.counts.frames_refused += 1
        instance.frames_refused += 1
        self._emit(FrameRefused(ts=self._ts, peer=instance.id, cause=cause))
        self._out.close.append((instance.peer, cause))
        self._lose(instance, f"sent a frame that was refused: {cause}", orderly=False)

    def _lose(self, instance: Instance, cause: str, orderly: bool) -> None:
        suspects = 0 if orderly else instance.max_running
        evicted = self.tracker.evict(instance.id, f"{instance.id} is gone: {cause}", suspects)
        self.fleet.lose(instance, cause, self._now, orderly)
        if evicted.moved:
            self._note_moved(instance, evicted.moved, evicted.tokens_kept, cause)
        self._deliver(evicted.finished)
        self._rearrange()

    def _note_moved(self, instance: Instance, samples: int, tokens: int, cause: str) -> None:
        self.counts.samples_moved += samples
        self.counts.tokens_moved += tokens
        self._emit(SamplesMoved(ts=self._ts, instance=instance.id, samples=samples, tokens_kept=tokens, cause=cause))

    # ---- frames of the trainer

    def _submit(self, frame: SubmitBatch) -> None:
        try:
            batch = self.tracker.add_batch(frame, self._now, self._agent_frame_bytes)
        except RolloutError as error:
            # The batch that is open under this name must not look failed to its owner.
            self._warn(str(error))
            return
        except WireError as error:
            self._refuse_trainer(str(error))
            self._send(TRAINER, BatchFailed(batch=frame.batch, cause=str(error), deadline=False))
            return
        self.ended_batches.pop(batch.name, None)
        self._emit(
            BatchSubmitted(ts=self._ts, batch=batch.name, version=batch.version, samples=batch.samples),
        )
        self._rearrange()

    def _published(self, frame: VersionPublished) -> None:
        if not 0 <= frame.version < 2**32 or not frame.source:
            self._refuse_trainer(f"published weight version {frame.version} at {frame.source!r}")
            return
        self.versions.publish(frame.version, frame.source)
        self._rearrange()

    def _cancel(self, frame: CancelBatch) -> None:
        batch = self.tracker.batch(frame.batch)
        if batch is None:
            self._warn(f"asked to cancel batch {frame.batch!r}, which is not open")
            return
        self._end_batch(batch, f"cancelled: {frame.cause}")
        self.counts.batches_cancelled += 1
        self._rearrange()

    def _release(self, frame: ReleaseBatch) -> None:
        if self.ended_batches.pop(frame.batch, None) is None:
            state = "still open; cancel it first" if self.tracker.batch(frame.batch) else "not known"
            self._warn(f"asked to release batch {frame.batch!r}, which is {state}")

    def _refuse_trainer(self, cause: str) -> None:
        self.counts.frames_refused += 1
        self._emit(FrameRefused(ts=self._ts, peer=TRAINER, cause=cause))

    # ---- samples out

    def _deliver(self, samples: list[TrackedSample]) -> None:
        """Sends finished samples to the trainer, and the end of batches that have no more."""
        if not samples:
            return
        by_batch: dict[str, list[TrackedSample]] = {}
        for sample in samples:
            by_batch.setdefault(sample.batch.name, []).append(sample)
            if sample.cause:
                self._emit(SampleFailed(ts=self._ts, sample=str(sample.id), cause=sample.cause))
        for rows in by_batch.values():
            batch = rows[0].batch
            batch.progress_at = self._now
            for part in _parts(rows, min(FINISHED_BYTES, self.config.max_frame_bytes // 2)):
                self._send(TRAINER, finished_frame(batch, part))
            if batch.ended:
                self._batch_done(batch)

    def _batch_done(self, batch: Batch) -> None:
        self.counts.batches_done += 1
        self._end_batch(batch, "")
        done = BatchDone(batch=batch.name, samples=batch.finished, failed=batch.failed, tokens=batch.tokens)
        self._send(TRAINER, done)
        self._steer()

    def _end_batch(self, batch: Batch, cause: str) -> None:
        """Forgets its samples, stops those that run, and remembers the counts."""
        counts = self.tracker.state_counts(batch)
        for instance, leases in self.tracker.remove_batch(batch.name).items():
            self._stop(self.fleet.peer_of(instance), leases)
        self.ended_batches[batch.name] = counts
        while len(self.ended_batches) > BATCHES_REMEMBERED:
            del self.ended_batches[next(iter(self.ended_batches))]
        self._emit(
            BatchEnded(
                ts=self._ts,
                batch=batch.name,
                samples=batch.finished,
                failed=batch.failed,
                tokens=batch.tokens,
                cause=cause,
            )
        )

    def _cancel_all(self, cause: str, tell: bool = False) -> None:
        for batch in list(self.tracker.batches()):
            self.counts.batches_cancelled += 1
            self._end_batch(batch, cause)
            if tell:
                self._send(TRAINER, BatchFailed(batch=batch.name, cause=cause, deadline=False))
        self._rearrange()

    # ---- work out

    def _dispatch(self) -> None:
        """Gives waiting samples to instances, oldest batch first."""
        rows: dict[str, list[TrackedSample]] = {}
        for batch in self.tracker.batches():
            if not batch.waiting:
                continue
            loads = self._loads(batch)
            for pick in self.policy.assign(batch.waiting, loads):
                instance = loads[pick].instance
                sample = self.tracker.place(batch, instance)
                if sample is not None:
                    rows.setdefault(instance, []).append(sample)
        for instance, samples in rows.items():
            for frame in start_frames(samples, self._agent_frame_bytes // 2):
                self._send(self.fleet.peer_of(instance), frame)

    def _loads(self, batch: Batch) -> list[InstanceLoad]:
        """Instances that hold the batch's version and have the context that any of its samples may come to need."""
        return [
            InstanceLoad(
                instance=instance.id,
                samples=self.tracker.leases_of(instance.id),
                max_running=instance.max_running,
                tokens_per_s=instance.tokens_per_s,
            )
            for instance in self.fleet.ready_for(batch.version, batch.context_tokens)
        ]

    def _steer(self) -> None:
        """Tells instances what to load."""
        for instance, order in self.versions.orders(self._now):
            self._send(instance.peer, order)

    def _fail_overdue(self) -> None:
        while (overdue := self.waiting.overdue(self._now)) is not None:
            batch, cause = overdue
            self.counts.batches_failed += 1
            self._end_batch(batch, cause)
            self._send(TRAINER, BatchFailed(batch=batch.name, cause=cause, deadline=True))
            self._rearrange()

    def _rearrange(self) -> None:
        """After instances or batches have changed: what is to be loaded, who gets what, who waits."""
        self._steer()
        self._dispatch()
        self.waiting.look(self._now)

    # ---- within

    @property
    def _ts(self) -> float:
        return self._now + self.wall_offset_s

    @property
    def _agent_frame_bytes(self) -> int:
        """Most bytes of a frame to or from an agent, which dials in before it can be told of any other limit."""
        return min(self.config.max_frame_bytes, MAX_FRAME_BYTES)

    def _load_of(self, instance: Instance) -> tuple[int, int]:
        leases = self.tracker.leases_of(instance.id)
        running = min(leases, instance.max_running)
        return running, leases - running

    def _report_refused_rows(self) -> None:
        for (instance, cause), rows in self._rows_refused.most_common(CAUSES_TOLD):
            self._emit(RowsRefused(ts=self._ts, instance=instance, rows=rows, cause=cause))
            del self._rows_refused[instance, cause]
        if self._rows_refused:
            rows = self._rows_refused.total()
            self._emit(RowsRefused(ts=self._ts, instance="", rows=rows, cause="other causes, of several instances"))
            self._rows_refused.clear()

    def _warn(self, message: str) -> None:
        self._emit(Warned(ts=self._ts, where="manager", message=message))

    def _emit(self, event: Event) -> None:
        self._out.events.append(event)

    def _send(self, peer: str, frame: FrameFromManager) -> None:
        if peer != TRAINER or self.trainer_connected:
            self._out.frames.append((peer, frame))

    def _stop(self, peer: str, leases: list[int]) -> None:
        most = self._agent_frame_bytes // 16
        for first in range(0, len(leases), most):
            self._send(peer, StopFrame(leases=column_bytes(leases[first : first + most], "Q")))

    def _send_events(self, events: list[Event] | deque[Event]) -> None:
        self._send(TRAINER, EventFrame(events=tuple(encode_event(event) for event in events)))

    def _decided(self) -> Decisions:
        out, self._out = self._out, Decisions()
        if out.events:
            if self.trainer_connected:
                out.frames.append((TRAINER, EventFrame(events=tuple(encode_event(event) for event in out.events))))
            else:
                self.counts.events_dropped += max(0, len(self._events_kept) + len(out.events) - EVENTS_KEPT)
                self._events_kept.extend(out.events)
        return out


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
