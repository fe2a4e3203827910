"""What the manager has decided and not yet handed out: frames, events, connections to end, journal records.

Shared by the parts of the manager, each of which decides something of its own. Decides only what becomes of events
while no trainer is there to hear them: they are kept for it, up to a bound, and what is dropped is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.observe.events import Event, Warned, encode_event
from penstock.rollout.journal import Record
from penstock.rollout.provision_types import Call
from penstock.wire import EventFrame, FrameFromManager, StopFrame, column_bytes

__all__ = ["TRAINER", "Counts", "Decisions", "Outbox"]

TRAINER = "trainer"
"""The trainer's peer name; no agent has it."""
EVENTS_KEPT = 10_000
"""Events kept for a trainer that is not there yet; older ones are dropped and counted."""


@dataclass(slots=True)
class Decisions:
    """What is to be done now, in order; records first, so that nobody hears of what the journal has not."""

    frames: list[tuple[str, FrameFromManager]] = field(default_factory=list)
    """(peer, frame)"""
    events: list[Event] = field(default_factory=list)
    """Also on their way to the trainer, as EventFrame."""
    close: list[tuple[str, str]] = field(default_factory=list)
    """(peer, cause): connections to end, after their frames are sent."""
    records: list[Record] = field(default_factory=list)
    """For the journal; none where the manager keeps none."""
    calls: list[Call] = field(default_factory=list)
    """For the provisioner; none where there is none."""

    @property
    def heard(self) -> bool:
        """Somebody hears of them: the journal must have its records by then."""
        return bool(self.frames or self.events or self.close)


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


class Outbox:
    """Collects decisions until `take`. `agent_frame_bytes`: of the largest frame to an agent."""

    def __init__(self, wall_offset_s: float, agent_frame_bytes: int) -> None:
        self.wall_offset_s = wall_offset_s
        self.agent_frame_bytes = agent_frame_bytes
        self.now = 0.0
        self.trainer_connected = False
        self.journaling = False
        """Whether there is a journal to take records now."""
        self.counts = Counts()
        self._out = Decisions()
        self._events_kept: deque[Event] = deque(maxlen=EVENTS_KEPT)

    @property
    def ts(self) -> float:
        """Now, in seconds since 1970."""
        return self.now + self.wall_offset_s

    def send(self, peer: str, frame: FrameFromManager) -> None:
        if peer != TRAINER or self.trainer_connected:
            self._out.frames.append((peer, frame))

    def stop(self, peer: str, leases: list[int], cause: str = "") -> None:
        """Tells an agent that leases are no longer in force."""
        most = self.agent_frame_bytes // 16
        for first in range(0, len(leases), most):
            self.send(peer, StopFrame(leases=column_bytes(leases[first : first + most], "Q"), cause=cause))

    def close(self, peer: str, cause: str) -> None:
        self._out.close.append((peer, cause))

    def emit(self, event: Event) -> None:
        self._out.events.append(event)

    def warn(self, message: str, where: str = "manager") -> None:
        self.emit(Warned(ts=self.ts, where=where, message=message))

    def record(self, record: Record) -> None:
        if self.journaling:
            self._out.records.append(record)

    def records(self, records: Iterable[Record]) -> None:
        if self.journaling:
            self._out.records.extend(records)

    def catch_up(self) -> None:
        """Sends a trainer that has just come what happened before, as far as that was kept."""
        if self.counts.events_dropped:
            self.warn(f"{self.counts.events_dropped} events were dropped while no trainer was connected")
        if self._events_kept:
            self.send(TRAINER, _event_frame(self._events_kept))
            self._events_kept.clear()

    def ask(self, calls: Iterable[Call]) -> None:
        """Has the provisioner asked."""
        self._out.calls.extend(calls)

    def take(self) -> Decisions:
        out, self._out = self._out, Decisions()
        if out.events:
            if self.trainer_connected:
                out.frames.append((TRAINER, _event_frame(out.events)))
            else:
                self.counts.events_dropped += max(0, len(self._events_kept) + len(out.events) - EVENTS_KEPT)
                self._events_kept.extend(out.events)
        return out


def _event_frame(events: list[Event] | deque[Event]) -> EventFrame:
    return EventFrame(events=tuple(encode_event(event) for event in events))
