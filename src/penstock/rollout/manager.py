"""The rollout manager: joins tracker, fleet and dispatch policy, and is as pure as they are.

Frames and `now` go in, frames, events and journal records come out (`Decisions`). It decides when which of its parts is
asked, and when waiting becomes an error; `trainer_side`, `agent_side` and `machine_side` have the frames and answers of
whom they are named after. It refuses to know sockets, clocks, files and encodings: the service, the tests, the
benchmark and the simulator drive the same object.

Peers are named by whoever holds the sockets; the trainer is `TRAINER`. `now` is in seconds on any clock that never
goes back; `wall_offset_s` turns it into seconds since 1970 for events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import WireError
from penstock.observe.events import ConnectionRefused, Event
from penstock.rollout.agent_side import AgentSide
from penstock.rollout.balance import BalancePolicy, load_policy
from penstock.rollout.balancing import Balancing
from penstock.rollout.batch import Batch, TrackedSample
from penstock.rollout.blame import Blame
from penstock.rollout.dispatching import Dispatching
from penstock.rollout.fleet import Fleet, FleetConfig, Instance
from penstock.rollout.journal_replay import Recovered
from penstock.rollout.journal_snapshot import Snapshot
from penstock.rollout.machine_side import MachineSide
from penstock.rollout.outbox import TRAINER, Decisions, Outbox
from penstock.rollout.provision_types import Call, ProvisionConfig
from penstock.rollout.provisioning import Provisioning
from penstock.rollout.stalls import Stalls
from penstock.rollout.tracker import Tracker
from penstock.rollout.trainer_side import TrainerSide
from penstock.rollout.versions import Versions
from penstock.rollout.waiting import Waiting
from penstock.rollout.windows import Turn, Windows
from penstock.rollout.worklog import WorkLog
from penstock.sample import is_turn
from penstock.wire import (
    MAX_FRAME_BYTES,
    BatchFailed,
    CancelBatch,
    FleetStatus,
    FrameFromManager,
    FrameToManager,
    ReleaseBatch,
    StepReport,
    SubmitBatch,
    TrainerHello,
    TrainerTurn,
    VersionPublished,
)

__all__ = ["TICK_S", "TRAINER", "Decisions", "Manager", "ManagerConfig"]

TICK_S = 0.1
"""Between two calls of `Manager.tick`, by whoever drives it."""


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
        self.tracker.begin_epoch(epoch)
        self.balancing = Balancing(self.policy, self.tracker, WorkLog(self._emit, lambda: self._ts))
        self.epoch = epoch
        self.fleet = Fleet(config.fleet, self._emit, wall_offset_s)
        self.wall_offset_s = wall_offset_s
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
            self._arrived,
            grace_s=config.trainer_grace_s,
            frame_bytes=config.max_frame_bytes,
        )
        self.windows = Windows(
            self.tracker, self.fleet, self.policy, self._out, self.balancing.load, self._given_back, self._rearrange
        )
        self.dispatching = Dispatching(
            *(self.tracker, self.fleet, self.versions, self.balancing, self.windows, self._out),
            self.trainer.batch,
            most_pending=config.max_pending_per_instance,
        )
        self.machines = MachineSide(self.tracker, self.fleet, self._out, lambda who, why: self.agents.drain(who, why))
        self.blame = Blame(config.max_strikes)
        self.agents = AgentSide(
            *(self.tracker, self.fleet, self.versions, self.balancing, self.windows, self.dispatching, self.blame),
            Stalls(self.tracker, self.fleet, config.stall_s),
            self._out,
            deliver=self._deliver,
            rearrange=self._rearrange,
            left=self.machines.left,
            frame_steps=config.frame_steps,
            max_context_tokens=config.max_context_tokens,
        )
        self._status_at = float("-inf")

    # ---- the journal

    def restore(self, recovered: Recovered, now: float) -> Decisions:
        """Takes up where an earlier manager ended; to be called before anybody connects."""
        self._now = now
        self.epoch = recovered.epoch + 1
        self.agents.restore(recovered)
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
            accepted=self.agents.accepted,
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
        self.agents.frame(peer, frame)
        return self._decided()

    def on_agent_refused(self, peer: str, cause: str, now: float) -> Decisions:
        """It sent something that is no frame at all."""
        self._now = now
        self.agents.refused(peer, cause)
        return self._decided()

    def on_agent_lost(self, peer: str, cause: str, now: float) -> Decisions:
        """Its connection has ended. Its samples go on elsewhere, from their last token."""
        self._now = now
        self.agents.lost(peer, cause)
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
            self.waiting.due(now + frame.deadline_s)
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
                self.machines.rates = self.balancing.rates(self.fleet)
                beside = self.windows.turn is Turn.SHARED
                self.provisioning.step(frame, self.windows.policy.predictor(), beside)
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
        self.machines.provide(config, reserved_engines, saved)
        return self._decided()

    def on_provisioner(self, call: Call, result: Sequence[Any] | None, cause: str, now: float) -> Decisions:
        """A call was answered, or failed for this cause."""
        self._now = now
        self.machines.answered(call, result, cause)
        return self._decided()

    def end_provision(self, cause: str, now: float) -> Decisions:
        """Every machine is released, and none is asked for any more."""
        self._now = now
        self.machines.end(cause)
        return self._decided()

    def tick_machines(self, now: float) -> Decisions:
        """The part of a tick that asks for machines and releases them."""
        self._now = now
        self.machines.tick()
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
        self.agents.tick()
        self.trainer.tick(now)
        self.windows.look()
        self._think()
        self._fail_overdue()
        self._rearrange()
        self.dispatching.move(self._now)
        self.agents.report_refused_rows()
        self.machines.tick()
        if now - self._status_at >= self.config.status_s:
            self._status_at = now
            for instance in self.fleet:
                instance.measure_rate(now)
            if self.trainer_connected:
                self._send(TRAINER, self.status(now))
        return self._decided()

    @property
    def provisioning(self) -> Provisioning | None:
        """None: nobody adds machines for this manager."""
        return self.machines.provisioning

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
        self.agents.drain_all(cause)
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
        self.agents.drain_all(cause)
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

    # ---- work out

    def _turn(self, frame: TrainerTurn) -> None:
        try:
            self.windows.take(frame)
        except WireError as error:
            self.trainer.refuse(str(error))

    def _given_back(self, instance: Instance, cause: str) -> None:
        self.agents.give_back(instance, cause)

    def _deliver(self, samples: list[TrackedSample]) -> None:
        self.balancing.finished(samples)
        if samples and self.trainer.deliver(samples):
            ended = {sample.batch for sample in samples if sample.batch.ended}
            for batch in ended:
                self.windows.batch_ended(batch)
            self.windows.look()
            if not all(is_turn(batch.name) for batch in ended):
                # An instance that has no further turn either is told as it gets idle.
                self.agents.steer()

    def _fail_overdue(self) -> None:
        while (overdue := self.waiting.overdue(self._now, self._excused)) is not None:
            batch, cause = overdue
            self.counts.batches_failed += 1
            self.trainer.fail(batch, cause, deadline=True)
            self._rearrange()

    def _excused(self, batch: Batch) -> bool:
        return self.trainer.unclaimed(batch) or self.windows.excuses

    def _arrived(self, batch: Batch) -> None:
        """A batch has come. With thousands of conversations most are the next turn of one: it changes nothing for
        others where somebody is there for it."""
        if is_turn(batch.name) and self.fleet.any_ready_for(batch.version, batch.context_tokens):
            self.dispatching.offer(batch)
        else:
            self._rearrange()

    def _rearrange(self) -> None:
        """After instances or batches have changed: what is to be loaded, who gets what, who waits."""
        self.agents.steer()
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

    def _load_of(self, instance: Instance) -> tuple[int, int]:
        leases = self.tracker.leases_of(instance.id)
        running = min(leases, instance.max_running)
        return running, leases - running

    def _warn(self, message: str, where: str = "manager") -> None:
        self._out.warn(message, where)

    def _emit(self, event: Event) -> None:
        self._out.emit(event)

    def _send(self, peer: str, frame: FrameFromManager) -> None:
        self._out.send(peer, frame)

    def _decided(self) -> Decisions:
        return self._out.take()
