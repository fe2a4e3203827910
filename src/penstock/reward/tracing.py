"""A pool's jobs as OpenTelemetry spans and metrics (the extra `otel`): one span a job, a child for each attempt.

Decides names and attributes. Holds counts, kinds, endpoints and statuses; never a key, a prompt, an answer or an
error's text, which may quote one. A job's span is a child of the span that its caller is in.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtra
from penstock.reward.report import AttemptEnded, JobEnded

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

__all__ = ["Tracing"]


class Tracing:
    """A watcher for `ComputePool(..., watchers=[Tracing()])`. Without providers, the process's own are used.

    Raises:
        MissingExtra: OpenTelemetry is not installed.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError:
            raise MissingExtra("opentelemetry-api", "otel", "tracing a pool") from None
        self._trace = trace
        self._tracer = trace.get_tracer("penstock.reward", tracer_provider=tracer_provider)
        meter = metrics.get_meter("penstock.reward", meter_provider=meter_provider)
        self._attempts = meter.create_counter("penstock.attempts", description="Attempts that ended.")
        self._attempt_s = meter.create_histogram("penstock.attempt.duration", "s", "From sent to ended.")
        self._tokens = meter.create_counter("penstock.tokens", description="Tokens that answers report.")
        self._jobs = meter.create_counter("penstock.jobs", description="Jobs that ended.")
        self._job_s = meter.create_histogram("penstock.job.duration", "s", "From queued to ended.")
        self._spans: dict[int, Span] = {}
        self._leaving: dict[int, int] = {}
        """Attempts of ended jobs that are still being cancelled."""

    def queued(self, job: int, model: str) -> None:
        self._spans[job] = self._tracer.start_span(
            "penstock.job", attributes={"penstock.job": job, "gen_ai.request.model": model}
        )

    def attempt_ended(self, event: AttemptEnded) -> None:
        where: dict[str, Any] = {"penstock.endpoint": event.endpoint, "penstock.kind": event.kind}
        self._attempts.add(1, where)
        self._attempt_s.record(event.took_s, where)
        if event.tokens:
            self._tokens.add(int(event.tokens), {"penstock.endpoint": event.endpoint})
        parent = self._spans.get(event.job)
        if parent is None:
            return
        ended_ns = time.time_ns()
        said = {"http.response.status_code": event.status} if event.status else {}
        span = self._tracer.start_span(
            "penstock.attempt",
            context=self._trace.set_span_in_context(parent),
            start_time=ended_ns - int(event.took_s * 1e9),
            attributes={**where, "penstock.hedge": event.hedge, "penstock.queued_s": event.queued_s, **said},
        )
        if event.kind not in ("done", "cancelled"):
            span.set_status(self._trace.StatusCode.ERROR, event.kind)
        span.end(ended_ns)
        if event.job in self._leaving:
            self._leaving[event.job] -= 1
            self._forget_if_over(event.job)

    def job_ended(self, event: JobEnded) -> None:
        self._jobs.add(1, {"penstock.outcome": event.outcome})
        self._job_s.record(event.took_s, {"penstock.outcome": event.outcome})
        span = self._spans.get(event.job)
        if span is None:
            return
        span.set_attributes(
            {
                "penstock.outcome": event.outcome,
                "penstock.broken": event.broken,
                "penstock.turned_away": event.turned_away,
                "penstock.hedges": event.hedges,
            }
        )
        if event.outcome not in ("done", "cancelled"):
            span.set_status(self._trace.StatusCode.ERROR, event.outcome)
        span.end()
        self._leaving[event.job] = event.running
        self._forget_if_over(event.job)

    def _forget_if_over(self, job: int) -> None:
        if self._leaving[job] <= 0:
            del self._spans[job], self._leaving[job]
