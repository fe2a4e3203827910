"""What a run's summary counts, as it happens: no file needs to be read back, and memory doesn't grow with the run.

Pure: events and metrics go in, counts are read. Refuses to know how figures are called or shown (`summary`).
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.observe import events
from penstock.observe.events import Event
from penstock.observe.instances import is_loss
from penstock.observe.metrics import REWARD_MEAN, STEP_S, TRAINER_WAIT_S
from penstock.observe.standing import Standing
from penstock.sample import is_turn


class StepTally:
    """Sums over the metrics of steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.reward_first: float | None = None
        self.reward_last: float | None = None
        self._step_s = self._wait_s = 0.0

    def take(self, metrics: Mapping[str, float | None]) -> None:
        self.steps += 1
        reward, step_s, wait_s = metrics.get(REWARD_MEAN), metrics.get(STEP_S), metrics.get(TRAINER_WAIT_S)
        if reward is not None:
            self.reward_first = reward if self.reward_first is None else self.reward_first
            self.reward_last = reward
        if step_s is not None and wait_s is not None:
            self._step_s += step_s
            self._wait_s += wait_s

    @property
    def trainer_wait_share(self) -> float | None:
        """Part of the steps' time; None where it wasn't measured."""
        return self._wait_s / self._step_s if self._step_s > 0 else None


class SummaryTally:
    """Counts over a run's events in one pass, so that it may listen to an EventLog; only evaluations take memory.

    Not thread-safe: an EventLog hands events on one at a time.
    """

    def __init__(self) -> None:
        self.run = self.outcome = ""
        self.checkpoint = ""
        """Path of the last one."""
        self.steps = StepTally()
        self.standing = Standing()
        """What of it stands."""
        self.samples_finished = self.samples_failed = self.samples_lost = 0
        self.samples_unscored = self.samples_moved = self.warnings = 0
        self.manager_losses = self.manager_restarts = self.samples_recovered = 0
        self.waited_for_instances_s = 0.0
        self.machines_asked = self.machines_failed = 0
        self.machines_spent: float | None = None
        self.weight_versions = self.instances_joined = self.instances_lost = 0
        self._latest_version = -1
        self._there: set[str] = set()
        self._submitted: dict[str, int] = {}
        self._wall_s = 0.0
        self._earlier_s = 0.0
        self._started_ts = self._last_ts = 0.0

    @property
    def evaluations(self) -> int:
        return len(self.standing.evaluations)

    @property
    def accuracy_first(self) -> float | None:
        return self.standing.evaluations[0].accuracy if self.standing.evaluations else None

    @property
    def accuracies_last(self) -> list[float]:
        """Of the last two evaluations after the first."""
        return [event.accuracy for event in self.standing.evaluations[1:][-2:]]

    @property
    def samples_open(self) -> int:
        """Of batches that never ended."""
        return sum(self._submitted.values())

    @property
    def wall_s(self) -> float:
        """Of all parts of a run that was resumed; a part that breaks off counts up to its last event."""
        running = 0.0 if self.outcome or not self._started_ts else self._last_ts - self._started_ts
        return self._earlier_s + self._wall_s + running

    def take(self, event: Event) -> None:
        self.standing.take(event)
        match event:
            case events.RunStarted(run=run, ts=ts):
                self._begin_part(run, ts)
            case events.RunFinished(outcome=outcome, wall_s=wall_s):
                self.outcome, self._wall_s = outcome, wall_s
            case events.StepFinished(metrics=metrics):
                self.steps.take(metrics)
            case events.CheckpointSaved(path=path):
                self.checkpoint = path
            case events.BatchSubmitted(batch=batch, samples=samples):
                self._submitted[batch] = samples
            case events.BatchTakenUp(batch=batch, samples=samples, finished=finished):
                self._submitted[batch] = samples
                self.samples_recovered += finished
            case events.ManagerChanged(state=state):
                self.manager_losses += state == "lost"
                self.manager_restarts += state == "restarted"
            case events.BatchEnded(batch=batch, samples=samples, failed=failed, cause=cause):
                # A turn is told of only where it did not end as it should.
                asked = self._submitted.pop(batch, 1 if is_turn(batch) else samples + failed)
                # Of a conversation the first turn counts, which every one of them has.
                self.samples_finished += 0 if is_turn(batch) else samples
                self.samples_failed += failed
                missing = max(0, asked - samples - failed)
                if cause.startswith(events.CANCELLED):
                    # By a trainer that ends: nobody lost them, and a run that goes on asks for them again.
                    self._submitted[batch] = missing
                else:
                    self.samples_lost += missing
            case events.SamplesMoved(samples=samples):
                self.samples_moved += samples
            case events.Unscorable(causes=causes):
                self.samples_unscored += sum(causes.values())
            case events.WeightsPublished(version=version):
                # Versions go up; what a resumed run publishes again is no further one.
                self.weight_versions += version > self._latest_version
                self._latest_version = max(self._latest_version, version)
            case events.InstanceChanged():
                self._take_instance(event)
            case events.MachineChanged(after=after, spent=spent):
                self.machines_asked += after == "asked"
                self.machines_failed += after == "failed"
                # The manager's account, which goes on where the one before it ended.
                self.machines_spent = max(spent, self.machines_spent or 0.0)
            case events.WaitingOver(waited_s=waited_s):
                self.waited_for_instances_s += waited_s
            case events.Warned():
                self.warnings += 1
        self._last_ts = max(self._last_ts, event.ts)

    def _begin_part(self, run: str, ts: float) -> None:
        """A run that is resumed goes on in the same log; what its earlier part left open was interrupted there."""
        self._earlier_s = self.wall_s
        self.run, self.outcome, self._wall_s, self._started_ts, self._last_ts = run, "", 0.0, ts, ts
        self._submitted.clear()
        self._there.clear()

    def _take_instance(self, event: events.InstanceChanged) -> None:
        if event.after == "gone":
            self._there.discard(event.instance)
            self.instances_lost += is_loss(event)
        elif event.instance not in self._there:
            self._there.add(event.instance)
            self.instances_joined += 1
