"""The rollout manager: joins tracker, fleet and dispatch policy, and is as pure as they are.

Frames and `now` go in, frames, events and journal records come out (`Decisions`). It decides which weights an instance
loads and when, which instances get work, and when waiting becomes an error; what the trainer is owed is decided by its
`trainer_side`. It refuses to know sockets, clocks, files and encodings: the service, the tests, the benchmark and the
simulator drive the same object.

Peers are named by whoever holds the sockets; the trainer is `TRAINER`. `now` is in seconds on any clock that never
goes back; `wall_offset_s` turns it into seconds since 1970 for events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import WireError
from penstock.observe.events import ConnectionRefused, Event, FrameRefused, RowsRefused
from penstock.rollout.balance import BalancePolicy, load_policy
from penstock.rollout.balancing import Balancing
from penstock.rollout.batch import Batch, TrackedSample
from penstock.rollout.blame import Blame
from penstock.rollout.dispatching import Dispatching
from penstock.rollout.fleet import Fleet, FleetConfig, Instance, State
from penstock.rollout.journal import Died, struck_records, tokens_record
from penstock.rollout.journal_replay import Recovered
from penstock.rollout.journal_snapshot import Snapshot
from penstock.rollout.outbox import TRAINER, Decisions, Outbox
from penstock.rollout.provision_types import Add, Call, InstanceView, ProvisionConfig, Release
from penstock.rollout.provisioning import Provisioning
from penstock.rollout.stalls import Stalls
from penstock.rollout.tracker import Tracker
from penstock.rollout.trainer_side import TrainerSide
from penstock.rollout.versions import Versions
from penstock.rollout.waiting import Waiting
from penstock.rollout.windows import Windows
from penstock.rollout.worklog import WorkLog
from penstock.wire import (
    MAX_FRAME_BYTES,
    AgentHello,
    BatchFailed,
    CancelBatch,
    Drain,
    FleetStatus,
    FrameFromManager,
    FrameToManager,
    Goodbye,
    HandedOver,
    Heartbeat,
    LoadFailed,
    ReleaseBatch,
    StepReport,
    SubmitBatch,
    TokenFrame,
    TrainerHello,
    TrainerTurn,
    VersionPublished,
    VersionReady,
    Welcome,
)

__all__ = ["TICK_S", "TRAINER", "Decisions", "Manager", "ManagerConfig"]

TICK_S = 0.1
"""Between two calls of `Manager.tick`, by whoever drives it."""

CAUSES_TOLD = 20
"""Causes of refused rows told apart at one tick; the rest are counted as one."""
CAUSES_OF_DISTRUST = 3
"""Named where an instance is refused for its rows; each may have a token of its own in it."""


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    fleet: FleetConfig = field(default_factory=FleetConfig)
    frame_steps: int = 8
    """Decode steps that an engine gathers in one token frame."""
    max_pending_per_instance: int = 16
    """Samples sent to an instance beyond what it can run at once."""
    balance: str = "penstock.rollout.balanced:Balanced"
    """Import path of the balance policy, which is made with `max_pending`."""
    max_context_tokens: int = 0
    """Context that the run wants, for instances that have no wish of their own; 0 leaves it to them."""
    max_frame_bytes: int = MAX_FRAME_BYTES
    """Larger frames are refused; agents are told, and hold to it. They are sent at most the protocol's default."""
    status_s: float = 0.5
    """Between two FleetStatus frames."""
    announce_wait_s: float = 3.0
    """Waiting while instances still load is announced after so long; with none there, at once."""
    trainer_grace_s: float = 0.0
    """A trainer's batches are kept for so long after it is lost, and worked on; 0: they are void at once."""
    stall_s: float = 300.0
    """A ready instance that has work and gives no token for so long is given up, though it beats. Longer than agents
    wait for their engines, who can tell a slow one from one that is stuck."""
    max_strikes: int = 3
    """A sample that is lost with its instance so often, without a new token in between, is set aside as failed."""


class Manager:
    """All decisions of the rollout side of a run."""

    def __init__(
        self,
        config: ManagerConfig,
        policy: BalancePolicy | None = None,
        wall_offset_s: float = 0.0,
        epoch: int = 0,
    ) -> None:
        self.config = config
        self.policy: BalancePolicy = policy or load_policy(config.balance, max_pending=config.max_pending_per_instance)
        self._out = Outbox(wall_offset_s, min(config.max_frame_bytes, MAX_FRAME_BYTES))
        self.counts = self._out.counts
        self.tracker = Tracker(config.max_strikes)
        self.blame = Blame(config.max_strikes)
        self.tracker.begin_epoch(epoch)
        self.balancing = Balancing(self.policy, self.tracker, WorkLog(self._emit, lambda: self._ts))
        self.epoch = epoch
        self.fleet = Fleet(config.fleet, self._emit, wall_offset_s)
        self.wall_offset_s = wall_offset_s
        self.stalls = Stalls(self.tracker, self.fleet, config.stall_s)
        self.versions = Versions(self.tracker, self.fleet)
        self.waiting = Waiting(
            self.tracker, self.fleet, self.versions, self._emit, config.announce_wait_s, wall_offset_s
        )
        self.trainer = TrainerSide(
            self.tracker,
            self.fleet,
            self.versions,
            self._out,
            self._rearrange,
            grace_s=config.trainer_grace_s,
            frame_bytes=config.max_frame_bytes,
        )
        self.windows = Windows(
            self.tracker, self.fleet, self.policy, self._out, self.balancing.load, self._give_back, self._rearrange
        )
        self.dispatching = Dispatching(
            *(self.tracker, self.fleet, self.versions, self.balancing, self.windows, self._out),
            self.trainer.batch,
            most_pending=config.max_pending_per_instance,
        )
        self.accepted: Counter[str] = Counter()
        """Output tokens taken by this manager and those before it, by the name of the instance that drew them."""
        self.provisioning: Provisioning | None = None
        """None: nobody adds machines for this manager."""
        self._rows_refused: Counter[tuple[str, str]] = Counter()
        self._status_at = float("-inf")

    # ---- the journal

    def restore(self, recovered: Recovered, now: float) -> Decisions:
        """Takes up where an earlier manager ended; to be called before anybody connects."""
        self._now = now
        self.epoch = recovered.epoch + 1
        self.accepted.update(recovered.accepted)
        self.blame.restore(died_at - self.wall_offset_s for died_at in recovered.deaths)
        self.tracker.strikes_needed = self.blame.strikes_needed(now)
        self.tracker.begin_epoch(self.epoch)
        self.trainer.restore(recovered)
        self.windows.restore(recovered.windows)
        return self._decided()

    def on_journal(self, running: bool, message: str, now: float) -> Decisions:
        """The journal begins, fails or is taken up again; while it runs, decisions carry records for it."""
        self._now = now
        self._out.journaling = running
        if message:
            self._warn(message, "journal")
        return self._decided()

    def snapshot(self) -> Snapshot:
        """The living state as it is now, to be written down piece by piece while it goes on."""
        return Snapshot.of(
            self.epoch,
            self.trainer.session,
            self.versions,
            self.tracker,
            self.trainer.every_batch(),
            names={instance.id: instance.name for instance in self.fleet},
            accepted=self.accepted,
            deaths=[died_at + self.wall_offset_s for died_at in self.blame.deaths()],
            windows=self.windows.memory.rows.values(),
        )

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
            self._lose(instance, cause, orderly=instance.state is State.DRAINING, may_live=True)
        return self._decided()

    def on_connection_refused(self, peer: str, door: str, cause: str, times: int, now: float) -> Decisions:
        """Somebody was not let in: for the record."""
        self._now = now
        self._emit(ConnectionRefused(ts=self._ts, peer=peer, door=door, cause=cause, times=times))
        return self._decided()

    # ---- trainer

    def on_trainer_connected(self, now: float) -> Decisions:
        """A trainer is there; it hears of what happened before it came, as far as that was kept."""
        self._now = now
        self._status_at = float("-inf")
        self.trainer.connected()
        return self._decided()

    def on_trainer_frame(self, frame: FrameToManager, now: float) -> Decisions:
        self._now = now
        trainer = self.trainer
        if isinstance(frame, SubmitBatch):
            trainer.submit(frame, self._out.agent_frame_bytes)
        elif isinstance(frame, VersionPublished):
            trainer.publish(frame)
        elif isinstance(frame, CancelBatch):
            trainer.cancel(frame)
        elif isinstance(frame, ReleaseBatch):
            trainer.release(frame)
        elif isinstance(frame, TrainerHello):
            if frame.session != trainer.session or not frame.session:
                self.windows.reset()
            trainer.hello(frame)
        elif isinstance(frame, TrainerTurn):
            self._turn(frame)
        elif isinstance(frame, StepReport):
            if self.provisioning is not None:
                self.provisioning.step(frame, self.windows.policy.predictor())
        else:
            trainer.refuse(f"a {type(frame).__name__} is an agent's frame, and came from the trainer")
        return self._decided()

    def on_trainer_refused(self, cause: str, now: float) -> Decisions:
        """It sent something that is no frame at all."""
        self._now = now
        self.trainer.refuse(cause)
        return self._decided()

    def on_trainer_lost(self, cause: str, now: float) -> Decisions:
        """Its batches are kept for `trainer_grace_s`, and instances keep what they have loaded."""
        self._now = now
        self.trainer.lost(cause)
        return self._decided()

    # ---- machines

    def provide(
        self, config: ProvisionConfig, reserved_engines: int, saved: Mapping[str, Any] | None, now: float
    ) -> Decisions:
        """From now on machines are asked for and released. `saved`: the account of an earlier manager of the run."""
        self._now = now
        self.provisioning = Provisioning(config, self._emit, self.wall_offset_s, reserved_engines)
        if saved is not None:
            try:
                self.provisioning.restore(saved, now)
            except (KeyError, TypeError, ValueError) as error:
                self._warn(f"what an earlier manager spent on machines is not known: {error!r}", "provisioner")
        return self._decided()

    def on_provisioner(self, call: Call, result: Sequence[Any] | None, cause: str, now: float) -> Decisions:
        """A call was answered, or failed for this cause."""
        self._now = now
        if self.provisioning is not None:
            machines = self.provisioning.machines
            if cause:
                machines.failed(call.call, cause, now)
            elif isinstance(call, Add):
                machines.added(call.call, result or (), now)
            elif isinstance(call, Release):
                machines.released(call.call, now)
            else:
                machines.listed(call.call, result or (), now)
        return self._decided()

    def end_provision(self, cause: str, now: float) -> Decisions:
        """Every machine is released, and none is asked for any more."""
        self._now = now
        if self.provisioning is not None:
            self.provisioning.machines.end(cause, now)
            self._provision()
        return self._decided()

    def tick_machines(self, now: float) -> Decisions:
        """The part of a tick that asks for machines and releases them."""
        self._now = now
        self._provision()
        return self._decided()

    def warn(self, where: str, message: str, now: float) -> Decisions:
        self._now = now
        self._warn(message, where)
        return self._decided()

    # ---- time

    def on_pause(self, seconds: float, now: float) -> None:
        """This manager itself stood still for so long, as when its machine was suspended; what came in meanwhile is
        still to be read."""
        self._now = now
        self.fleet.excuse(seconds, now)

    def tick(self, now: float) -> Decisions:
        """To be called a few times a second: deadlines, retries, announcements, status."""
        self._now = now
        self.tracker.strikes_needed = self.blame.strikes_needed(now)
        for overdue, may_live in ((self.fleet.overdue, True), (self.stalls.overdue, False)):
            for instance, cause in overdue(now):
                self._out.close(instance.peer, cause)
                self._lose(instance, cause, orderly=instance.state is State.DRAINING, may_live=may_live)
        for instance, cause in self._strangers():
            self._refuse_agent(instance, cause)
        self.trainer.tick(now)
        self.windows.look()
        self._think()
        self._fail_overdue()
        self._rearrange()
        self.dispatching.move(self._now)
        self._report_refused_rows()
        self._provision()
        if now - self._status_at >= self.config.status_s:
            self._status_at = now
            for instance in self.fleet:
                instance.measure_rate(now)
            if self.trainer_connected:
                self._send(TRAINER, self.status(now))
        return self._decided()

    @property
    def thinking(self) -> bool:
        """`think` has something to do."""
        return self.windows.thinking or (self.provisioning is not None and self.provisioning.thinking)

    def think(self, now: float) -> Decisions:
        """A few milliseconds of a longer thought, for whenever nothing else is to be done. A tick has one too."""
        self._now = now
        self._think()
        return self._decided()

    def _think(self) -> None:
        # The step that has begun waits for its window; more machines take their time anyway.
        if self.windows.thinking:
            self.windows.think()
        elif self.provisioning is not None:
            self.provisioning.think(self._now)

    def shutdown(self, now: float, cause: str) -> Decisions:
        """Asks every instance to leave. What the journal has stays there, for whoever goes on."""
        self._now = now
        self._out.journaling = False
        for instance in list(self.fleet):
            self.fleet.drain(instance, cause, now)
            self._send(instance.peer, Drain(cause=cause))
        self.trainer.cancel_all(cause)
        return self._decided()

    def give_up(self, cause: str, now: float) -> Decisions:
        """After an error in the midst of a decision: what it was about is half done, and no policy is asked any more.

        The trainer hears that its batches have failed, and agents are asked to leave. What was decided before the error
        goes out; nothing is journaled any more. Only machines are still looked after (`tick_machines`, `forget`).
        """
        self._now = now
        for batch in self.tracker.batches():
            self.counts.batches_failed += 1
            self._send(TRAINER, BatchFailed(batch=batch.name, cause=cause, deadline=False))
        for instance in list(self.fleet):
            self.fleet.drain(instance, cause, now)
            self._send(instance.peer, Drain(cause=cause))
        self._warn(cause)
        if self.trainer_connected:
            self._out.close(TRAINER, cause)
        return self._decided()

    def forget(self, peer: str, cause: str, now: float) -> Decisions:
        """After `give_up`: an agent's connection has ended, and its machine need not be waited for."""
        self._now = now
        instance = self.fleet.get(peer)
        if instance is not None:
            self.fleet.lose(instance, cause, now, orderly=True)
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
            window=self.windows.words(now),
        )

    # ---- frames of agents

    def _agent_frame(self, instance: Instance, frame: FrameToManager) -> None:
        if isinstance(frame, AgentHello):
            self.fleet.hello(instance, frame, self._now)
            for session in self.fleet.sessions_before(instance):
                # It was only cut off, so none of its samples killed it.
                self._out.records(struck_records(self.tracker.forgive(session.id)))
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
            self.balancing.beat(instance, frame, self._now)
        elif isinstance(frame, VersionReady):
            self.fleet.version_ready(instance, frame, self._now)
            self.windows.loaded(instance, frame.load_s)
            self._rearrange()
        elif isinstance(frame, LoadFailed):
            self.fleet.load_failed(instance, frame, self._now)
        elif isinstance(frame, Goodbye):
            if self.provisioning is not None:
                self.provisioning.machines.left(instance.peer, frame.cause[:500] or "said goodbye", self._now)
            self._out.close(instance.peer, "said goodbye")
            self._lose(instance, frame.cause[:500] or "said goodbye", orderly=not frame.engine_failed)
        elif isinstance(frame, HandedOver):
            self.windows.handed_over(instance)
        else:
            raise WireError(f"a {type(frame).__name__} is the trainer's frame, and came from an agent")

    def _tokens(self, instance: Instance, frame: TokenFrame) -> None:
        applied = self.tracker.apply(
            *(instance.id, frame, instance.versions, instance.vocab_size, self._now),
            distrusts=lambda senseless, sound: self.fleet.distrusted(instance, senseless, sound),
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
            self._stop(instance.peer, applied.stop, "; ".join(applied.refused))
        if applied.moved:
            self.dispatching.note_moved(
                instance.id, applied.moved, applied.moved_tokens, "taken back from the instance"
            )
        if applied.finished:
            self._deliver(applied.finished)
        if applied.distrusted:
            # Before anything is given to it again, and at no sample's expense.
            causes = "; ".join(list(applied.refused)[:CAUSES_OF_DISTRUST])
            self._refuse_agent(instance, f"its engine's rows make no sense: {causes}", suspects=False)
        elif applied.finished or applied.moved or self.tracker.trial_ended(instance.id):
            self.dispatching.give()
            if not self.tracker.leases_of(instance.id):
                # Idle now: the next weight version may be waiting for that.
                self._steer()

    def _strangers(self) -> list[tuple[Instance, str]]:
        """Instances whose engine can't be of the model that open batches are for."""
        return [
            (
                instance,
                f"its vocabulary of {instance.vocab_size} has no token {batch.top_token}, which is in the prompts of "
                f"batch {batch.name}: another model or tokenizer",
            )
            for batch in self.tracker.batches()
            for instance in self.fleet
            if instance.holds(batch.version) and not instance.knows(batch.top_token)
        ]

    def _refuse_agent(self, instance: Instance, cause: str, suspects: bool = True) -> None:
        """A peer that sends nonsense is not listened to any further. `suspects`: one of its samples may be why."""
        self.counts.frames_refused += 1
        instance.frames_refused += 1
        self._emit(FrameRefused(ts=self._ts, peer=instance.id, cause=cause))
        self._out.close(instance.peer, cause)
        self._lose(instance, f"sent a frame that was refused: {cause}", orderly=False, suspects=suspects)

    def _lose(
        self, instance: Instance, cause: str, orderly: bool, suspects: bool = True, may_live: bool = False
    ) -> None:
        """`suspects`: one of its samples may be why. `may_live`: if its agent comes back, none was."""
        if not may_live:
            instance.process = ""
        suspected = instance.max_running if suspects and not orderly else 0
        evicted = self.tracker.evict(instance.id, f"{instance.id} is gone: {cause}", suspected)
        if evicted.struck:
            self._out.records(struck_records(evicted.struck))
        if any(sample.strikes == 2 for sample in evicted.struck):
            self.blame.found_one()
            self.tracker.strikes_needed = self.blame.strikes_needed(self._now)
        # Whoever kills machines is a suspect from its second one on.
        if all(sample.strikes == 1 for sample in evicted.struck) and instance.state is State.READY and not orderly:
            self.blame.died_by_itself(self._now)
            self._out.record(Died((self._ts,)))
            self.tracker.strikes_needed = self.blame.strikes_needed(self._now)
        self.fleet.lose(instance, cause, self._now, orderly)
        self.balancing.gone(instance.id)
        self.windows.gone(instance)
        if evicted.moved:
            self.dispatching.note_moved(instance.id, evicted.moved, evicted.tokens_kept, cause)
        self._deliver(evicted.finished)
        self._rearrange()

    def _give_back(self, instance: Instance, cause: str) -> None:
        """Its samples go on elsewhere from their last token; it stays."""
        evicted = self.tracker.evict(instance.id, cause)
        if evicted.moved:
            self.dispatching.note_moved(instance.id, evicted.moved, evicted.tokens_kept, cause)
        self._deliver(evicted.finished)
        self._rearrange()

    def _turn(self, frame: TrainerTurn) -> None:
        try:
            self.windows.take(frame)
        except WireError as error:
            self.trainer.refuse(str(error))

    def _deliver(self, samples: list[TrackedSample]) -> None:
        self.balancing.finished(samples)
        if samples and self.trainer.deliver(samples):
            for batch in {sample.batch for sample in samples if sample.batch.ended}:
                self.windows.batch_ended(batch)
            self.windows.look()
            self._steer()

    def _provision(self) -> None:
        if self.provisioning is None:
            return
        views = [
            InstanceView(
                peer=instance.peer,
                name=instance.name,
                host=instance.host,
                loading=instance.state is State.LOADING,
                ready=instance.state is State.READY,
                reserved=instance.reserved,
                samples=self.tracker.leases_of(instance.id),
            )
            for instance in self.fleet
            if instance.name
        ]
        orders = self.provisioning.tick(views, self._now, self.trainer_connected)
        cordoned = self.provisioning.machines.cordoned
        for instance in self.fleet:
            instance.cordoned = instance.peer in cordoned
        for peer, cause in orders.leave:
            leaving = self.fleet.get(peer)
            if leaving is not None:
                self.fleet.drain(leaving, cause, self._now)
                self._send(peer, Drain(cause=cause))
        self._out.ask(orders.calls)

    # ---- work out

    def _steer(self) -> None:
        """Tells instances what to load."""
        for instance, order in self.versions.orders(self._now):
            self._send(instance.peer, order)

    def _fail_overdue(self) -> None:
        while (overdue := self.waiting.overdue(self._now, self._excused)) is not None:
            batch, cause = overdue
            self.counts.batches_failed += 1
            self.trainer.fail(batch, cause, deadline=True)
            self._rearrange()

    def _excused(self, batch: Batch) -> bool:
        return self.trainer.unclaimed(batch) or self.windows.excuses

    def _rearrange(self) -> None:
        """After instances or batches have changed: what is to be loaded, who gets what, who waits."""
        self._steer()
        self.dispatching.give()
        self.waiting.look(self._now)

    # ---- within

    @property
    def trainer_connected(self) -> bool:
        return self._out.trainer_connected

    @property
    def ended_batches(self) -> dict[str, dict[str, int]]:
        """Batches that ended lately, with their samples by state."""
        return self.trainer.ended_batches

    @property
    def _now(self) -> float:
        return self._out.now

    @_now.setter
    def _now(self, now: float) -> None:
        self._out.now = now

    @property
    def _ts(self) -> float:
        return self._out.ts

    @property
    def _agent_frame_bytes(self) -> int:
        """Most bytes of a frame to or from an agent, which dials in before it can be told of any other limit."""
        return self._out.agent_frame_bytes

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

    def _warn(self, message: str, where: str = "manager") -> None:
        self._out.warn(message, where)

    def _emit(self, event: Event) -> None:
        self._out.emit(event)

    def _send(self, peer: str, frame: FrameFromManager) -> None:
        self._out.send(peer, frame)

    def _stop(self, peer: str, leases: list[int], cause: str = "") -> None:
        self._out.stop(peer, leases, cause)

    def _decided(self) -> Decisions:
        return self._out.take()
