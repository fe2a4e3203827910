"""A pool's rows for a process that serves its metrics with `prometheus_client` (the extra `prometheus`).

`penstock gateway` needs none of this: its `/metrics` serves the same rows as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtra
from penstock.reward.pool import ComputePool
from penstock.reward.report import METRICS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["PoolCollector"]


class PoolCollector:
    """Collects a pool's rows whenever the registry is asked. A pool of several in a process is told apart by `name`.

    Raises:
        MissingExtra: `prometheus_client` is not installed.
    """

    def __init__(self, pool: ComputePool, name: str = "pool", registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import REGISTRY
        except ImportError:
            raise MissingExtra("prometheus_client", "prometheus", "a Prometheus collector") from None
        self._pool = pool
        self._name = name
        (registry if registry is not None else REGISTRY).register(self)

    def describe(self) -> list[Any]:
        """Nothing: names are the same for every pool, and a second one must be able to register."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        waiting = GaugeMetricFamily("penstock_pool_waiting", "Jobs queued.", labels=["pool"])
        waiting.add_metric([self._name], self._pool.waiting)
        yield waiting
        rows = self._pool.snapshot()
        for name, kind, text in METRICS:
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            metric = family(f"penstock_pool_{name}", text, labels=["pool", "endpoint"])
            for row in rows:
                if (value := getattr(row, name)) is not None:
                    metric.add_metric([self._name, row.endpoint], value)
            yield metric
