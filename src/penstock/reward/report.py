"""What a pool tells about itself: an event for each attempt, a row for each endpoint, the same as Prometheus text."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.reward.jobs import Attempt, Job
from penstock.reward.retry import Outcome
from penstock.reward.schedule import Scheduler

__all__ = ["METRICS", "AttemptEnded", "EndpointRow", "JobEnded", "Watcher", "prometheus_text", "rows_of"]


class AttemptEnded(msgspec.Struct, tag_field="event", tag="reward_attempt", kw_only=True, frozen=True):
    """One attempt at one job, as it ended. Holds no key and no content."""

    ts: float
    job: int
    endpoint: str
    kind: str
    status: int
    cause: str
    queued_s: float
    """From the job's queueing to this attempt's start."""
    took_s: float
    tokens: float | None
    hedge: bool

    @classmethod
    def of(cls, attempt: Attempt, outcome: Outcome, now: float) -> AttemptEnded:
        sent_at = attempt.sent.sent_at
        return cls(
            ts=time.time(),
            job=attempt.job.number,
            endpoint=attempt.place.endpoint.label,
            kind=outcome.kind.value,
            status=outcome.status,
            cause=outcome.cause,
            queued_s=sent_at - attempt.job.queued_at,
            took_s=now - sent_at,
            tokens=outcome.tokens,
            hedge=attempt.hedge,
        )


class JobEnded(msgspec.Struct, tag_field="event", tag="reward_job", kw_only=True, frozen=True):
    """One job, as it ended. Holds no key and no content."""

    ts: float
    job: int
    model: str
    outcome: str
    """`done`, `cancelled` or the name of the error, such as `DeadlinePassed`."""
    took_s: float
    broken: int
    turned_away: int
    hedges: int
    running: int
    """Attempts that are still being cancelled; their own events follow."""

    @classmethod
    def of(cls, job: Job, outcome: str, now: float) -> JobEnded:
        return cls(
            ts=time.time(),
            job=job.number,
            model=job.model,
            outcome=outcome,
            took_s=now - job.queued_at,
            broken=job.attempts,
            turned_away=job.turned_away,
            hedges=job.hedges,
            running=len(job.live),
        )


class Watcher(Protocol):
    """What a pool tells as it happens, on its own loop. Must be quick; what it raises is told to the loop."""

    def queued(self, job: int, model: str) -> None: ...

    def attempt_ended(self, event: AttemptEnded) -> None: ...

    def job_ended(self, event: JobEnded) -> None: ...


class EndpointRow(msgspec.Struct, frozen=True):
    """One endpoint as it stands. Limits are None where none is known."""

    endpoint: str
    health: str
    in_flight: int
    cap: int | None
    sent: int
    done: int
    refused: int
    """Attempts turned away: 429, 503, 529."""
    broken: int
    rate_limit: float | None
    """Requests/s, declared, told or learned."""
    latency_s: float | None
    slow_s: float | None
    spent: float


def rows_of(scheduler: Scheduler, now: float) -> list[EndpointRow]:
    rows = []
    for place in scheduler.places:
        door = place.admission
        known_cap = not hasattr(door.gate, "found") or door.gate.found
        rows.append(
            EndpointRow(
                endpoint=place.endpoint.label,
                health="retired" if place.retired else door.breaker.health.value,
                in_flight=door.in_flight,
                cap=door.gate.cap if known_cap else None,
                sent=door.admitted,
                done=place.done,
                refused=door.turned_away,
                broken=place.broken,
                rate_limit=_finite(door.rate_limit),
                latency_s=_finite(door.latency.mean_s),
                slow_s=_finite(door.latency.slow_s),
                spent=place.spent,
            )
        )
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


METRICS = (
    ("in_flight", "gauge", "Attempts in flight."),
    ("sent", "counter", "Attempts sent."),
    ("done", "counter", "Attempts answered."),
    ("refused", "counter", "Attempts turned away (429, 503, 529)."),
    ("broken", "counter", "Attempts that broke."),
    ("rate_limit", "gauge", "Requests per second allowed, as far as known."),
    ("latency_s", "gauge", "Mean service time, seconds."),
    ("spent", "counter", "Money spent."),
)


def prometheus_text(rows: Sequence[EndpointRow], waiting: int) -> str:
    """The rows in Prometheus' text format."""
    lines = ["# HELP penstock_pool_waiting Jobs queued.", "# TYPE penstock_pool_waiting gauge"]
    lines.append(f"penstock_pool_waiting {waiting}")
    for name, kind, text in METRICS:
        full = f"penstock_pool_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        for row in rows:
            value = getattr(row, name)
            if value is not None:
                label = row.endpoint.replace("\\", "\\\\").replace('"', '\\"')
                lines.append(f'{full}{{endpoint="{label}"}} {value}')
    return "\n".join(lines) + "\n"
