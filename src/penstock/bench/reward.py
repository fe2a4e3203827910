"""How near the pool's policies come to the least possible makespan, on a virtual clock, in every world of the suite."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Sequence

from penstock.bench.common import Result
from penstock.reward.limits import Endpoint, PoolOptions
from penstock.reward.retry import Kind, Outcome
from penstock.reward.schedule import Scheduler
from penstock.simulate.providers import Report
from penstock.simulate.reward_scenarios import SCENARIOS

DESCRIPTION = "compute pool: makespan over the bound in rate-limited worlds (virtual clock), cost of scheduling a job"


def run(quick: bool) -> list[Result]:
    results: list[Result] = []
    ratios: list[float] = []
    for scenario in SCENARIOS:
        reports = [scenario.run(seed) for seed in range(1 if quick else 5)]
        ratio = statistics.median(report.over_bound for report in reports)
        refused = statistics.median(report.refused_per_job for report in reports)
        lost = sum(report.failed for report in reports)
        ratios.append(ratio)
        results.append(
            Result(
                scenario.name,
                ratio,
                "x bound",
                f"<= {scenario.at_most}",
                ratio <= scenario.at_most and refused <= scenario.refused_at_most and lost == 0,
                _note(reports, refused, scenario.refused_at_most, lost),
            )
        )
    middle = statistics.median(ratios)
    results.append(Result("median of all scenarios", middle, "x bound", "<= 1.08", middle <= 1.08))
    results.extend(_queue_cost(20_000 if quick else 100_000))
    return results


def _note(reports: Sequence[Report], refused: float, allowed: float, lost: int) -> str:
    worst = max(report.over_bound for report in reports)
    hedged = statistics.median(report.hedges / report.jobs for report in reports)
    return f"{refused:.3f} 429s a job (<= {allowed}), {lost} lost, {hedged:.1%} hedged, worst seed {worst:.3f}"


def _per_job_s(jobs: int) -> float:
    """Seconds to submit, place and finish one job when `jobs` are queued at once."""
    scheduler = Scheduler([Endpoint("http://a.example", concurrency=64)], PoolOptions(timeout_s=1e6))
    done, now = Outcome(Kind.DONE), 0.0
    began = time.perf_counter()
    for _ in range(jobs):
        scheduler.submit(None, now, deadline=1e6)
    while scheduler.waiting or scheduler.running:
        now += 0.001
        for attempt in scheduler.dispatch(now):
            scheduler.report(attempt, done, now)
        scheduler.take_finished()
    return (time.perf_counter() - began) / jobs


def _queue_cost(jobs: int) -> list[Result]:
    scheduler = Scheduler([Endpoint("http://a.example", concurrency=64)], PoolOptions(timeout_s=1e6))
    tracemalloc.start()
    for _ in range(jobs):
        scheduler.submit(None, 0.0, deadline=1e6)
    nbytes = tracemalloc.get_traced_memory()[0] / jobs
    tracemalloc.stop()
    few = statistics.median(_per_job_s(jobs // 100) for _ in range(5))
    many = statistics.median(_per_job_s(jobs) for _ in range(3))
    return [
        Result(f"memory a queued job, {jobs:,} queued", nbytes, "bytes", "< 1024", nbytes < 1024),
        Result(
            f"scheduling cost a job, {jobs:,} queued over {jobs // 100:,}",
            many / few,
            "x",
            "<= 1.5",
            many / few <= 1.5,
            f"{many * 1e6:.1f} us against {few * 1e6:.1f} us",
        ),
    ]
