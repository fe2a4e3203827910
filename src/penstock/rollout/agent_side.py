"""What agents tell and are told: their frames in, orders to load in return, and their samples handed on when they go.

Decides whom not to listen to any further, what a lost instance's samples are struck for (`blame` says how sure that
is), and whom a refusal is told. Which version an instance loads is decided by `versions`, where samples go by
`dispatching`. Refuses to know what the trainer is owed: `deliver` takes samples that have ended, `rearrange` what
changes for everybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from penstock.errors import WireError
from penstock.observe.events import FrameRefused, RowsRefused
from penstock.rollout.balancing import Balancing
from penstock.rollout.batch import Batch, TrackedSample
from penstock.rollout.blame import Blame
from penstock.rollout.dispatching import Dispatching
from penstock.rollout.fleet import Fleet, Instance, State
from penstock.rollout.journal import Died, struck_records, tokens_record
from penstock.rollout.journal_replay import Recovered
from penstock.rollout.outbox import Outbox
from penstock.rollout.stalls import Stalls
from penstock.rollout.tracker import Tracker
from penstock.rollout.versions import Versions
from penstock.rollout.windows import Windows
from penstock.wire import (
    AgentHello,
    Drain,
    FrameToManager,
    Goodbye,
    HandedOver,
    Heartbeat,
    LoadFailed,
    TokenFrame,
    VersionReady,
    Welcome,
)

__all__ = ["AgentSide"]

CAUSES_TOLD = 20
"""Causes of refused rows told apart at one tick; the rest are counted as one."""
CAUSES_OF_DISTRUST = 3
"""Named where an instance is refused for its rows; each may have a token of its own in it."""
CAUSE_CHARS = 500
"""Of an agent's own words for why it leaves."""


class AgentSide:
    """`stalls` finds instances that give nothing though they beat; `left` hears who said goodbye, and why.

    `frame_steps`, `max_context_tokens`: what a welcome tells, as in `ManagerConfig`.
    """

    def __init__(
        self,
        tracker: Tracker,
        fleet: Fleet,
        versions: Versions,
        balancing: Balancing,
        windows: Windows,
        dispatching: Dispatching,
        blame: Blame,
        stalls: Stalls,
        outbox: Outbox,
        *,
        deliver: Callable[[list[TrackedSample]], None],
        rearrange: Callable[[], None],
        left: Callable[[str, str], None],
        frame_steps: int,
        max_context_tokens: int,
    ) -> None:
        self._tracker = tracker
        self._fleet = fleet
        self._versions = versions
        self._balancing = balancing
        self._windows = windows
        self._dispatching = dispatching
        self._blame = blame
        self._stalls = stalls
        self._out = outbox
        self._deliver = deliver
        self._rearrange = rearrange
        self._looked_at = 0
        """Age of the batch up to which engines were looked at for strangers, those that are known."""
        self._known: set[tuple[str, int, int]] = set()
        """(instance, version, vocabulary)."""
        self._left = left
        self._frame_steps = frame_steps
        self._max_context_tokens = max_context_tokens
        self.counts = outbox.counts
        self.accepted: Counter[str] = Counter()
        """Output tokens taken by this manager and those before it, by the name of the instance that drew them."""
        self._rows_refused: Counter[tuple[str, str]] = Counter()

    # ---- coming and going

    def restore(self, recovered: Recovered) -> None:
        """What a journal told; to be called before anybody connects."""
        self.accepted.update(recovered.accepted)
        self._blame.restore(died_at - self._out.wall_offset_s for died_at in recovered.deaths)
        self._tracker.strikes_needed = self._blame.strikes_needed(self._out.now)

    def frame(self, peer: str, frame: FrameToManager) -> None:
        instance = self._fleet.get(peer)
        if instance is None:
            # Its connection was given up a moment ago; the frame crossed the farewell.
            self.counts.frames_refused += 1
            return
        instance.heard_at = self._out.now
        try:
            self._take(instance, frame)
        except WireError as error:
            self._refuse(instance, str(error))

    def refused(self, peer: str, cause: str) -> None:
        """It sent something that is no frame at all."""
        instance = self._fleet.get(peer)
        if instance is not None:
            self._refuse(instance, cause)

    def lost(self, peer: str, cause: str) -> None:
        """Its connection has ended. Its samples go on elsewhere, from their last token."""
        instance = self._fleet.get(peer)
        if instance is not None:
            self._lose(instance, cause, orderly=instance.state is State.DRAINING, may_live=True)

    def tick(self) -> None:
        """Gives up who is overdue, and refuses whose engine can't be of the model."""
        now = self._out.now
        self._tracker.strikes_needed = self._blame.strikes_needed(now)
        for overdue, may_live in ((self._fleet.overdue, True), (self._stalls.overdue, False)):
            for instance, cause in overdue(now):
                self._out.close(instance.peer, cause)
                self._lose(instance, cause, orderly=instance.state is State.DRAINING, may_live=may_live)
        for instance, cause in self._strangers():
            self._refuse(instance, cause)

    def give_back(self, instance: Instance, cause: str) -> None:
        """Its samples go on elsewhere from their last token; it stays."""
        evicted = self._tracker.evict(instance.id, cause)
        if evicted.moved:
            self._dispatching.note_moved(instance.id, evicted.moved, evicted.tokens_kept, cause)
        self._deliver(evicted.finished)
        self._rearrange()

    # ---- what they are told

    def steer(self) -> None:
        """Tells instances what to load."""
        for instance, order in self._versions.orders(self._out.now):
            self._out.send(instance.peer, order)
            # It is coming, and what is left is to be shared with it.
            self._dispatching.look_at_all()

    def drain(self, instance: Instance, cause: str) -> None:
        """Asks an instance to leave."""
        self._fleet.drain(instance, cause, self._out.now)
        self._out.send(instance.peer, Drain(cause=cause))

    def drain_all(self, cause: str) -> None:
        for instance in list(self._fleet):
            self.drain(instance, cause)

    # ---- frames

    def _take(self, instance: Instance, frame: FrameToManager) -> None:
        now = self._out.now
        if isinstance(frame, AgentHello):
            self._hello(instance, frame)
        elif not instance.name:
            raise WireError(f"a {type(frame).__name__} before the hello")
        elif isinstance(frame, TokenFrame):
            self._tokens(instance, frame)
        elif isinstance(frame, Heartbeat):
            instance.beat = frame
            self._balancing.beat(instance, frame, now)
        elif isinstance(frame, VersionReady):
            self._fleet.version_ready(instance, frame, now)
            self._windows.loaded(instance, frame.load_s)
            self._rearrange()
        elif isinstance(frame, LoadFailed):
            self._fleet.load_failed(instance, frame, now)
        elif isinstance(frame, Goodbye):
            cause = frame.cause[:CAUSE_CHARS] or "said goodbye"
            self._left(instance.peer, cause)
            self._out.close(instance.peer, "said goodbye")
            self._lose(instance, cause, orderly=not frame.engine_failed)
        elif isinstance(frame, HandedOver):
            self._windows.handed_over(instance)
        else:
            raise WireError(f"a {type(frame).__name__} is the trainer's frame, and came from an agent")

    def _hello(self, instance: Instance, frame: AgentHello) -> None:
        self._fleet.hello(instance, frame, self._out.now)
        for session in self._fleet.sessions_before(instance):
            # It was only cut off, so none of its samples killed it.
            self._out.records(struck_records(self._tracker.forgive(session.id)))
        self._out.send(
            instance.peer,
            Welcome(
                instance=instance.id,
                heartbeat_s=self._fleet.config.heartbeat_s,
                frame_steps=self._frame_steps,
                max_context_tokens=self._max_context_tokens,
                max_frame_bytes=self._out.agent_frame_bytes,
                hold_off_s=instance.hold_off_s,
            ),
        )
        self.steer()

    def _tokens(self, instance: Instance, frame: TokenFrame) -> None:
        applied = self._tracker.apply(
            *(instance.id, frame, instance.versions, instance.vocab_size, self._out.now),
            distrusts=lambda senseless, sound: self._fleet.distrusted(instance, senseless, sound),
        )
        instance.tokens_accepted += applied.tokens
        self.accepted[instance.name] += applied.tokens
        if applied.tokens and self._out.journaling:
            self._out.record(tokens_record(frame, applied.refused_rows))
        if applied.struck:
            self._out.records(struck_records(applied.struck))
        if applied.refused:
            for cause, rows in applied.refused.items():
                self._rows_refused[instance.id, cause] += rows
                instance.rows_refused += rows
                self.counts.rows_refused += rows
        if applied.stop:
            self._out.stop(instance.peer, applied.stop, "; ".join(applied.refused))
        if applied.moved:
            self._dispatching.note_moved(
                instance.id, applied.moved, applied.moved_tokens, "taken back from the instance"
            )
        if applied.finished:
            self._deliver(applied.finished)
        if applied.distrusted:
            # Before anything is given to it again, and at no sample's expense.
            causes = "; ".join(list(applied.refused)[:CAUSES_OF_DISTRUST])
            self._refuse(instance, f"its engine's rows make no sense: {causes}", suspects=False)
            return
        trial_ended = self._tracker.trial_ended(instance.id)
        if applied.moved or trial_ended:
            self._dispatching.give()
        elif applied.finished:
            self._dispatching.fill(instance)
        if (applied.finished or applied.moved or trial_ended) and not self._tracker.leases_of(instance.id):
            # Idle now: the next weight version may be waiting for that.
            self.steer()

    # ---- whom not to listen to

    def _strangers(self) -> list[tuple[Instance, str]]:
        """Instances whose engine can't be of the model that open batches are for, once each."""
        found = []
        ready = [instance for instance in self._fleet if instance.state is State.READY]
        known = {(instance.id, instance.version, instance.vocab_size) for instance in ready}
        # Who was looked at before knows all but what is new.
        tops = _topmost(self._tracker.since(self._looked_at) if known <= self._known else self._tracker.batches())
        self._known, self._looked_at = known, self._tracker.newest_age
        for instance in ready:
            if not instance.knows(tops.get(instance.version, -1)):
                mine = (batch for batch in self._tracker.batches() if instance.holds(batch.version))
                batch = next(batch for batch in mine if not instance.knows(batch.top_token))
                cause = (
                    f"its vocabulary of {instance.vocab_size} has no token {batch.top_token}, which is in the "
                    f"prompts of batch {batch.name}: another model or tokenizer"
                )
                found.append((instance, cause))
        return found

    def _refuse(self, instance: Instance, cause: str, suspects: bool = True) -> None:
        """A peer that sends nonsense is not listened to any further. `suspects`: one of its samples may be why."""
        self.counts.frames_refused += 1
        instance.frames_refused += 1
        self._out.emit(FrameRefused(ts=self._out.ts, peer=instance.id, cause=cause))
        self._out.close(instance.peer, cause)
        self._lose(instance, f"sent a frame that was refused: {cause}", orderly=False, suspects=suspects)

    def _lose(
        self, instance: Instance, cause: str, orderly: bool, suspects: bool = True, may_live: bool = False
    ) -> None:
        """`suspects`: one of its samples may be why. `may_live`: if its agent comes back, none was."""
        now = self._out.now
        if not may_live:
            instance.process = ""
        suspected = instance.max_running if suspects and not orderly else 0
        evicted = self._tracker.evict(instance.id, f"{instance.id} is gone: {cause}", suspected)
        if evicted.struck:
            self._out.records(struck_records(evicted.struck))
        if any(sample.strikes == 2 for sample in evicted.struck):
            self._blame.found_one()
            self._tracker.strikes_needed = self._blame.strikes_needed(now)
        # Whoever kills machines is a suspect from its second one on.
        if all(sample.strikes == 1 for sample in evicted.struck) and instance.state is State.READY and not orderly:
            self._blame.died_by_itself(now)
            self._out.record(Died((self._out.ts,)))
            self._tracker.strikes_needed = self._blame.strikes_needed(now)
        self._fleet.lose(instance, cause, now, orderly)
        self._balancing.gone(instance.id)
        self._windows.gone(instance)
        if evicted.moved:
            self._dispatching.note_moved(instance.id, evicted.moved, evicted.tokens_kept, cause)
        self._deliver(evicted.finished)
        self._rearrange()

    def report_refused_rows(self) -> None:
        """Tells, once a tick, which rows of frames were left out."""
        for (instance, cause), rows in self._rows_refused.most_common(CAUSES_TOLD):
            self._out.emit(RowsRefused(ts=self._out.ts, instance=instance, rows=rows, cause=cause))
            del self._rows_refused[instance, cause]
        if self._rows_refused:
            rows, others = self._rows_refused.total(), "other causes, of several instances"
            self._out.emit(RowsRefused(ts=self._out.ts, instance="", rows=rows, cause=others))
            self._rows_refused.clear()


def _topmost(batches: Iterable[Batch]) -> dict[int, int]:
    """By version, the greatest token of the prompts."""
    found: dict[int, int] = {}
    for batch in batches:
        found[batch.version] = max(batch.top_token, found.get(batch.version, -1))
    return found
