"""What a person wants to know of a run at a glance, reduced from its events and the manager's reports.

Pure: events and reports go in, fields are read. It owns no clock, terminal or thread, and is not thread-safe; the views
(`terminal`) hold a lock around it. All of it is bounded, however long the run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from penstock.observe import events
from penstock.observe.events import Event
from penstock.observe.instances import RUN_ENDED, is_loss
from penstock.observe.metrics import REWARD_MEAN, ROLLOUT_TOKENS_PER_S, STEP_S, TRAINER_WAIT_S
from penstock.observe.notices import Notice, Notices

HISTORY = 10_000
"""Most steps remembered for the curves."""
REPORTS = 8
"""Of the manager, over which what the fleet does is levelled: a few seconds. Between two short steps nothing runs, and
a single report that falls there says nothing about the run."""


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance, as the manager reports it."""

    instance: str
    name: str
    engine: str
    state: str
    """joining, loading, ready, draining or gone."""
    version: int
    running: int
    pending: int
    tokens_accepted: int
    tokens_per_s: float
    age_s: float
    cause: str = ""
    orderly: bool = False
    """Of one that is gone: it left in good order."""


class _Report(Protocol):
    """The shape of the manager's report (this room knows no frames)."""

    @property
    def instances(self) -> Sequence[Any]: ...
    @property
    def queued(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def finished(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def tokens_accepted(self) -> int: ...
    @property
    def waiting_for(self) -> str: ...


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The manager's report at one moment: instances, and samples by state."""

    ts: float
    instances: tuple[InstanceRow, ...] = ()
    queued: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    tokens_accepted: int = 0
    waiting_for: str = ""
    window: str = ""
    """Whose turn it is on the trainer's own devices; empty where they don't take turns."""

    @classmethod
    def of(cls, report: _Report, ts: float) -> FleetSnapshot:
        """From anything with the report's fields, such as `wire.FleetStatus`."""
        names = InstanceRow.__dataclass_fields__
        rows = tuple(InstanceRow(**{name: getattr(row, name) for name in names}) for row in report.instances)
        return cls(
            ts=ts,
            instances=rows,
            queued=report.queued,
            running=report.running,
            finished=report.finished,
            failed=report.failed,
            tokens_accepted=report.tokens_accepted,
            waiting_for=report.waiting_for,
            window=getattr(report, "window", ""),
        )

    @property
    def tokens_per_s(self) -> float:
        return sum(row.tokens_per_s for row in self.instances if row.state != "gone")


@dataclass(slots=True)
class RunView:
    """The state of a run, for the eye. Feed it with `apply` and `apply_fleet`."""

    run: str = ""
    folder: str = ""
    steps: int = 0
    """Of the whole run; 0 while unknown."""
    step: int = 0
    """Steps finished."""
    started_ts: float = 0.0
    now_ts: float = 0.0
    """Of the latest event or report."""
    outcome: str = ""
    """Empty while the run goes on."""
    weight_version: int = 0
    rewards: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    accuracies: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    """(step, held-out accuracy)."""
    step_metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the latest step."""
    trained_s: float = 0.0
    """Seconds in finished steps."""
    waited_s: float = 0.0
    """Of these, seconds in which the trainer waited for rollouts."""
    fleet: FleetSnapshot = FleetSnapshot(ts=0.0)
    """The latest report."""
    waiting_for: str = ""
    waiting_samples: int = 0
    unscored: int = 0
    samples_moved: int = 0
    notices: Notices = field(default_factory=Notices)
    ended_with_run: set[str] = field(default_factory=set)
    """Names of this machine's engines that the run ended when it was over."""
    _reports: deque[FleetSnapshot] = field(default_factory=lambda: deque(maxlen=REPORTS))
    _first_step: int = -1
    _first_step_ts: float = 0.0

    def apply(self, event: Event) -> Notice | None:
        """Takes one event; returns the sentence it is worth to a person, if any."""
        self.now_ts = max(self.now_ts, event.ts)
        match event:
            case events.RunStarted():
                self._start(event)
            case events.RunFinished(outcome=outcome):
                self.outcome = outcome
            case events.StepStarted(weight_version=version, step=step):
                self.weight_version = version
                if self._first_step < 0:
                    self._first_step, self._first_step_ts = step, event.ts
            case events.StepFinished():
                self._finish_step(event)
            case events.Evaluated(step=step, accuracy=accuracy):
                self.accuracies.append((step, accuracy))
            case events.WeightsPublished(version=version):
                self.weight_version = version
            case events.WaitingForInstances(waiting_for=what, samples=samples):
                self.waiting_for, self.waiting_samples = what, samples
            case events.WaitingOver():
                self.waiting_for, self.waiting_samples = "", 0
            case events.SamplesMoved(samples=samples):
                self.samples_moved += samples
            case events.Unscorable(causes=causes):
                self.unscored += sum(causes.values())
            case events.EngineExited(name=name, cause=cause) if cause == RUN_ENDED:
                self.ended_with_run.add(name)
            case events.InstanceChanged(name=name, after="gone") if self.steps_done and not is_loss(event):
                self.ended_with_run.add(name)
        return self.notices.take(event)

    def apply_fleet(self, fleet: FleetSnapshot) -> None:
        """Takes one report of the manager."""
        self.now_ts = max(self.now_ts, fleet.ts)
        self.fleet = fleet
        self._reports.append(fleet)
        self.waiting_for = fleet.waiting_for
        for row in fleet.instances:
            self.notices.name_instance(row.instance, row.name)

    @property
    def elapsed_s(self) -> float:
        return max(0.0, self.now_ts - self.started_ts) if self.started_ts else 0.0

    @property
    def remaining_s(self) -> float | None:
        """At the pace of this run so far; None before its first step is finished."""
        done = self.step - self._first_step
        if self._first_step < 0 or done <= 0 or self.steps <= self.step:
            return None
        return (self.now_ts - self._first_step_ts) / done * (self.steps - self.step)

    @property
    def trainer_wait_share(self) -> float | None:
        """Part of all finished steps' time in which the trainer waited; None before the first."""
        return self.waited_s / self.trained_s if self.trained_s > 0 else None

    @property
    def tokens_per_s(self) -> float:
        """Of the fleet, mean of the last reports; of the latest step where the manager has not reported yet."""
        if not self._reports:
            return self.step_tokens_per_s or 0.0
        return sum(report.tokens_per_s for report in self._reports) / len(self._reports)

    @property
    def step_tokens_per_s(self) -> float | None:
        """Of the latest step, while it generated."""
        return self.step_metrics.get(ROLLOUT_TOKENS_PER_S)

    @property
    def running_peak(self) -> int:
        """Most samples in flight in any of the last reports."""
        return max((report.running for report in self._reports), default=0)

    @property
    def steps_done(self) -> bool:
        return 0 < self.steps <= self.step

    def levelled(self) -> list[InstanceRow]:
        """The instances of the latest report, `running` at its peak and `tokens_per_s` as mean over the last ones."""
        peaks: Counter[str] = Counter()
        rates: dict[str, list[float]] = {}
        for report in self._reports:
            for row in report.instances:
                peaks[row.instance] = max(peaks[row.instance], row.running)
                rates.setdefault(row.instance, []).append(row.tokens_per_s)
        return [
            replace(
                row,
                running=peaks[row.instance],
                tokens_per_s=sum(rates[row.instance]) / len(rates[row.instance]),
            )
            for row in self.fleet.instances
        ]

    def _start(self, event: events.RunStarted) -> None:
        self.run, self.started_ts = event.run, event.ts
        train = event.config.get("train")
        steps = train.get("steps") if isinstance(train, Mapping) else None
        self.steps = steps if isinstance(steps, int) else 0

    def _finish_step(self, event: events.StepFinished) -> None:
        self.step, self.step_metrics = event.step + 1, event.metrics
        self.notices.steps_done = self.steps_done
        self.trained_s += event.metrics.get(STEP_S, 0.0)
        self.waited_s += event.metrics.get(TRAINER_WAIT_S, 0.0)
        if REWARD_MEAN in event.metrics:
            self.rewards.append((event.step, event.metrics[REWARD_MEAN]))
