"""Between the manager and its balance policy: what the policy is shown and told, in its own words.

Decides nothing about where samples go; that is the policy's (`balance`). It turns batches into queues, heartbeats
into reports of work, and the tracker's samples into rows. Refuses to know frames, peers and clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.rollout.answers import ask_fill, ask_moves, ask_order, ask_picks, fills, tell
from penstock.rollout.balance import BalancePolicy, InstanceLoad, Move, PlacedSample, Queue, Report
from penstock.rollout.balanced import Balanced
from penstock.rollout.batch import Batch, TrackedSample
from penstock.rollout.fleet import Instance
from penstock.rollout.tracker import Tracker
from penstock.rollout.worklog import WorkLog
from penstock.sample import is_turn
from penstock.wire import Heartbeat

__all__ = ["MOVES_S", "Balancing"]

MOVES_S = 1.0
"""Between two questions after moves: a move costs a prefill, and less than a second of waiting is not worth one."""


@dataclass(slots=True)
class _Beat:
    at: float
    frame: Heartbeat
    waits: bool = False
    """Samples waited at it though it had places left."""
    full: bool = False
    """The same twice in a row: its memory is taken to be full."""


class Balancing:
    """One policy and what it needs to be told."""

    def __init__(self, policy: BalancePolicy, tracker: Tracker, log: WorkLog) -> None:
        self.policy = policy
        self._tracker = tracker
        self._log = log
        self._beats: dict[str, _Beat] = {}
        self._moves_by_choice: dict[TrackedSample, int] = {}
        self._shifts: dict[TrackedSample, int] = {}
        """Of those that waited for a place."""
        self._waited: set[TrackedSample] = set()
        """Of those that the policy was shown last."""
        self._moves_in = ""
        """The batch that they were counted in; one at a time is moved about."""
        self._moved_at = float("-inf")
        self._windows = False
        """Reserved instances generated when moves were asked for last."""
        self.fills = fills(policy)
        """It can be asked for one instance alone."""

    # ---- told

    def beat(self, instance: Instance, frame: Heartbeat, now: float) -> None:
        """A heartbeat. Only time in which the instance had work at both ends counts as time that it worked."""
        before = self._beats.get(instance.id)
        waits = frame.waiting > 0 and 0 < frame.running < instance.max_running
        full = waits and before is not None and before.frame.waiting > 0
        self._beats[instance.id] = _Beat(now, frame, waits, full)
        if before is None or not frame.running or not before.frame.running:
            return
        tokens = frame.tokens_generated - before.frame.tokens_generated
        prefilled = max(0, frame.tokens_prefilled - before.frame.tokens_prefilled)
        if now <= before.at or tokens <= 0:
            return
        report = Report(
            instance=instance.id,
            wall_s=now - before.at,
            running=(frame.running + before.frame.running) / 2,
            context_tokens=(frame.kv_tokens + before.frame.kv_tokens) / 2,
            tokens=tokens,
            prefilled=prefilled,
            # One that waits for the next decode step would have been let in there.
            pending=frame.waiting if waits and before.waits and not prefilled else 0,
        )
        tell(self.policy, "report", report)
        self._log.worked(report, instance.name, instance.reserved, instance.max_running)

    def finished(self, samples: Iterable[TrackedSample]) -> None:
        """Samples that ended, before their batch is closed."""
        ended: dict[str, Batch] = {}
        for sample in samples:
            self._moves_by_choice.pop(sample, None)
            self._shifts.pop(sample, None)
            turn = is_turn(sample.batch.name)
            if not sample.cause:
                tell(self.policy, "finished", -1 if turn else sample.prompt, sample.length)
                self._log.finished(sample)
            if sample.batch.ended and not turn:
                # There are thousands of turns, each a batch of its own: a step does not end with one.
                ended[sample.batch.name] = sample.batch
        for batch in ended.values():
            # Who waited for a place then says nothing about the next batch's samples.
            for beat in self._beats.values():
                beat.full = False
            tell(self.policy, "batch_ended")
            self._log.batch_ended(batch)

    def gone(self, instance: str) -> None:
        self._log.gone(instance)
        self._beats.pop(instance, None)
        tell(self.policy, "gone", instance)

    # ---- shown

    def assign(
        self,
        batch: Batch,
        loads: Sequence[InstanceLoad],
        coming: int = 0,
        near: str = "",
        elapsed_s: float | None = None,
    ) -> list[int]:
        """The policy's picks for a batch's waiting samples, which it may put in another order first.

        `coming`: instances that will take part and are not among `loads` yet. `near`: the one that has what a lone
        sample's prompt begins with. `elapsed_s`: since the planned step began.
        """
        if len(batch.moved) > 1:
            rows = list(batch.moved)
            columns = [sample.length for sample in rows], [sample.prompt for sample in rows]
            batch.moved = deque(rows[k] for k in ask_order(self.policy, *columns))
        at = next((k for k, load in enumerate(loads) if load.instance == near), -1) if near else -1
        return ask_picks(self.policy, _queue(batch, coming, elapsed_s, at), loads)

    def fill(self, batch: Batch, instance: Instance, coming: int) -> int:
        """How many of a batch's samples, which the last picks left waiting, go to an instance on which some have
        ended."""
        return ask_fill(self.policy, _queue(batch, coming), self.load(instance))

    def stays(self, batch: Batch, instance: Instance) -> bool:
        """Whether a lone sample goes to the instance that said its last turn."""
        return ask_fill(self.policy, _queue(batch, near=0), self.load(instance)) > 0

    def load(self, instance: Instance) -> InstanceLoad:
        return InstanceLoad(
            instance=instance.id,
            samples=self._tracker.leases_of(instance.id),
            max_running=instance.max_running,
            tokens_per_s=instance.tokens_per_s,
            pending=self.pending(instance),
            reserved=instance.reserved,
            price_per_h=instance.price_per_h,
            machine=instance.machine,
            of_machine=instance.of_machine,
        )

    def rates(self, instances: Iterable[Instance]) -> dict[str, float]:
        """Instances beside the fastest ones, as `Balanced.rates`; nothing where another policy compares none."""
        if not isinstance(self.policy, Balanced):
            return {}
        return self.policy.rates([self.load(instance) for instance in instances])

    def pending(self, instance: Instance) -> int:
        """Samples that wait at an instance: those beyond its places, or as it says where its memory is full."""
        samples = self._tracker.leases_of(instance.id)
        beyond = max(0, samples - instance.max_running)
        beat = self._beats.get(instance.id)
        if beat is None or not beat.full:
            return beyond
        return max(beyond, min(samples, beat.frame.waiting))

    def moves(self, batch: Batch, loads: Sequence[InstanceLoad], now: float) -> list[Move]:
        """Samples of a batch that are better off elsewhere; asked at most every `MOVES_S`, and at a window's end."""
        windows = any(load.reserved for load in loads)
        ended, self._windows = self._windows and not windows, windows
        if not loads or (now - self._moved_at < MOVES_S and not ended):
            return []
        self._moved_at = now
        if batch.name != self._moves_in:
            self._moves_by_choice.clear()
            self._shifts.clear()
            self._moves_in = batch.name
        self._waited.clear()
        return ask_moves(self.policy, batch.waiting, loads, lambda instance: self._placed(instance, batch, loads))

    def moved(self, sample: TrackedSample) -> None:
        """A sample was moved by choice."""
        counts = self._shifts if sample in self._waited else self._moves_by_choice
        counts[sample] = counts.get(sample, 0) + 1

    def _placed(self, instance: str, batch: Batch, loads: Sequence[InstanceLoad]) -> list[PlacedSample]:
        load = next(load for load in loads if load.instance == instance)
        places = load.samples - load.pending
        rows = []
        for position, sample in enumerate(self._tracker.samples_of(instance)):
            if sample.batch is batch:
                prompt = len(batch.prompt_bytes(sample.prompt)) // 4
                running = sample.length > sample.placed_length or position < places
                if not running:
                    self._waited.add(sample)
                moves, shifts = self._moves_by_choice.get(sample, 0), self._shifts.get(sample, 0)
                rows.append(
                    PlacedSample(
                        sample.lease, sample.length, prompt + sample.length, running, moves, sample.prompt, shifts
                    )
                )
        return rows


def _queue(batch: Batch, coming: int = 0, elapsed_s: float | None = None, near: int = -1) -> Queue:
    return Queue(
        fresh=batch.fresh,
        first_fresh=batch.samples - batch.fresh,
        samples_per_prompt=batch.samples_per_prompt,
        moved=len(batch.moved),
        coming=coming,
        near=near,
        elapsed_s=elapsed_s,
        finished=batch.finished,
        prompt_tokens=batch.prompt_offsets[-1] / len(batch.prompt_indices),
    )
