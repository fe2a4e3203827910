"""What a run's event log says of its machines, training and answers, gathered for the fit.

Decides which events are of use and which steps are left out (the first one, in which engines warm up, where there are
others). Refuses to fit anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.observe import events
from penstock.observe.events import Event, Work

__all__ = ["LoadRow", "Observed", "WorkRow", "gather"]

TRAINING = "train-"
"""Names of training batches begin so; evaluations are shorter and greedy."""
DIFFERENCE = "delta"
"""In a codec's name, where it is one to the version before."""


@dataclass(frozen=True, slots=True)
class WorkRow:
    """One row of an instance's work."""

    name: str
    """Of the instance, the same when it comes back."""
    reserved: bool
    max_running: int
    work: Work


@dataclass(frozen=True, slots=True)
class LoadRow:
    """A version that an instance came to serve."""

    version: int
    fetched_bytes: int
    wall_s: float
    difference: bool
    """It came as one to the version before."""


@dataclass
class Observed:
    config: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""
    rows: list[WorkRow] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each."""
    answers: list[events.AnswersEnded] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)
    """Bytes of each weight version."""
    loads: list[LoadRow] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    """From an engine's process to its joining."""
    reserved: set[str] = field(default_factory=set)
    remote: set[str] = field(default_factory=set)
    changes: list[tuple[float, str, bool]] = field(default_factory=list)
    """(time since 1970, instance's name, ready or gone)."""
    step_ends: list[float] = field(default_factory=list)
    """Time since 1970, of each in `steps`."""


def gather(log: Iterable[Event]) -> Observed:
    found = Observed()
    started: dict[str, float] = {}
    for event in log:
        match event:
            case events.RunStarted(run=run, config=config):
                found.run, found.config = run, config
            case events.InstanceWorked(name=name, reserved=reserved, max_running=places, work=work):
                (found.reserved if reserved else found.remote).add(name)
                found.rows += [WorkRow(name, reserved, places, row) for row in work]
            case events.StepFinished(ts=ts, metrics=metrics):
                found.steps.append(metrics)
                found.step_ends.append(ts)
            case events.AnswersEnded(batch=batch) if batch.startswith(TRAINING):
                found.answers.append(event)
            case events.WeightsPublished(version=version, nbytes=nbytes):
                found.versions[version] = nbytes
            case events.WeightsLoaded(version=version, nbytes=nbytes, wall_s=wall_s, way=way) if wall_s > 0:
                found.loads.append(LoadRow(version, nbytes, wall_s, DIFFERENCE in way.partition(" by ")[0]))
            case events.EngineStarted(ts=ts, name=name):
                started[name] = ts
            case events.InstanceChanged(ts=ts, name=name, after="joining") if name in started:
                found.starts_s.append(max(0.0, ts - started.pop(name)))
            case events.InstanceChanged(ts=ts, name=name, after="ready" | "gone" as after):
                found.changes.append((ts, name, after == "ready"))
    return found
