"""Spans, metrics and Prometheus families of a pool, read with the real libraries' own in-memory exporters."""

from __future__ import annotations

import asyncio
import sys

import pytest

from penstock.errors import MissingExtra
from penstock.reward.failures import JobFailed
from penstock.reward.limits import Endpoint, PoolOptions
from penstock.reward.pool import ComputePool
from penstock.reward.prometheus import PoolCollector
from penstock.reward.tracing import Tracing
from penstock.simulate.provider_server import ProviderServer

USER = [{"role": "user", "content": "a secret question"}]


def test_without_its_library_an_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtra, match=r"penstock\[otel\]"):
        Tracing()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match=r"penstock\[prometheus\]"):
        PoolCollector(ComputePool([Endpoint("http://127.0.0.1:9")]))


async def test_a_job_is_a_span_its_attempts_are_children_and_no_content_is_told(monkeypatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(tracers, MeterProvider([reader]))
    async with ProviderServer(key="s3cret") as server:
        endpoint = Endpoint(server.url, name="judge", api_key_env="JUDGE_KEY")
        async with ComputePool([endpoint], PoolOptions(attempts=1), watchers=[tracing]) as pool:
            with tracers.get_tracer("test").start_as_current_span("caller"):
                await pool.chat(model="fault-429-once", messages=USER)
            with pytest.raises(JobFailed):
                await pool.chat(model="fault-500", messages=USER)
            leaver = asyncio.create_task(pool.chat(model="fault-silent", messages=USER))
            await server.arrived(4)
            leaver.cancel()
            await asyncio.gather(leaver, return_exceptions=True)
    spans = exporter.get_finished_spans()
    jobs = [span for span in spans if span.name == "penstock.job"]
    caller = next(span for span in spans if span.name == "caller")
    assert [span.attributes["penstock.outcome"] for span in jobs] == ["done", "JobFailed", "cancelled"]
    assert jobs[0].parent.span_id == caller.context.span_id
    assert [span.status.is_ok for span in jobs] == [True, False, True]

    def kinds(job) -> list[str]:
        children = [s for s in spans if s.parent is not None and s.parent.span_id == job.context.span_id]
        return [span.attributes["penstock.kind"] for span in children]

    assert [kinds(job) for job in jobs] == [["turned away", "done"], ["broken"], ["cancelled"]]
    assert all(s.attributes["penstock.endpoint"] == "judge" for s in spans if s.name == "penstock.attempt")
    assert not tracing._spans
    assert not tracing._leaving
    told = "".join(span.to_json() for span in spans) + reader.get_metrics_data().to_json()
    for hidden in ("s3cret", "secret question", "told to answer"):
        assert hidden not in told


async def test_metrics_count_attempts_jobs_and_tokens() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    async with ProviderServer() as server:
        watchers = [Tracing(meter_provider=MeterProvider([reader]))]
        async with ComputePool([Endpoint(server.url, name="judge")], watchers=watchers) as pool:
            await asyncio.gather(*(pool.chat(model="m", messages=USER) for _ in range(3)))
    scopes = reader.get_metrics_data().resource_metrics[0].scope_metrics
    points = {metric.name: metric.data.data_points[0] for scope in scopes for metric in scope.metrics}
    assert points["penstock.attempts"].value == 3
    assert points["penstock.attempts"].attributes == {"penstock.endpoint": "judge", "penstock.kind": "done"}
    assert points["penstock.jobs"].value == 3
    assert points["penstock.tokens"].value == 21
    assert points["penstock.attempt.duration"].count == 3


async def test_prometheus_collects_the_rows_of_each_pool() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    async with ProviderServer() as server:
        endpoint = Endpoint(server.url, name="judge")
        async with ComputePool([endpoint]) as first, ComputePool([endpoint]) as second:
            PoolCollector(first, "first", registry)
            PoolCollector(second, "second", registry)
            await first.chat(model="m", messages=USER)

            def value(pool: str) -> float | None:
                return registry.get_sample_value("penstock_pool_done_total", {"pool": pool, "endpoint": "judge"})

            assert (value("first"), value("second")) == (1.0, 0.0)
            assert b'penstock_pool_waiting{pool="first"} 0.0' in prometheus.generate_latest(registry)
