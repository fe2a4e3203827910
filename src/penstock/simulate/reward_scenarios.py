"""The rate-limited worlds that the pool's policies are judged in, each with how near the bound a run must come.

Clean worlds (limits declared or told, nothing fails) allow 1.05 of the least makespan; worlds with stragglers, errors,
changing or unknown limits or a dying endpoint allow 1.20.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from penstock.reward.limits import Endpoint, PoolOptions
from penstock.simulate.providers import Provider, Report, run_jobs

__all__ = ["SCENARIOS", "Scenario"]

CLEAN, HARD = 1.05, 1.20
TOLD_429, FOUND_429 = 0.05, 0.15


@dataclass(frozen=True)
class Scenario:
    name: str
    jobs: int
    world: Callable[[], tuple[list[Provider], list[Endpoint]]]
    at_most: float
    refused_at_most: float
    tokens: Callable[[random.Random], float] | None = None
    options: PoolOptions | None = None

    def run(self, seed: int) -> Report:
        providers, endpoints = self.world()
        return run_jobs(providers, endpoints, self.jobs, seed, self.options, self.tokens)


def _endpoint(name: str, **declared: float) -> Endpoint:
    return Endpoint(f"http://{name}.example", **declared)  # type: ignore[arg-type]


def _one(
    declared: dict[str, float], **provider: float | str | tuple
) -> Callable[[], tuple[list[Provider], list[Endpoint]]]:
    return lambda: ([Provider(**provider)], [_endpoint("a", **declared)])  # type: ignore[arg-type]


def _two(
    first: tuple[dict[str, float], dict[str, float]], second: tuple[dict[str, float], dict[str, float]]
) -> Callable[[], tuple[list[Provider], list[Endpoint]]]:
    return lambda: (
        [Provider(**first[1]), Provider(**second[1])],  # type: ignore[arg-type]
        [_endpoint("a", **first[0]), _endpoint("b", **second[0])],
    )


def _sizes(rng: random.Random) -> float:
    return float(rng.choice((200, 500, 1000, 2000)))


_FAST = {"rate": 50.0, "burst": 20.0}
_FAST_SAID: dict[str, float] = {"requests_per_minute": 3000, "burst": 20}
_BAD = {"stragglers": 0.02, "errors": 0.01, "resets": 0.005}

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("60 requests/min", 1000, _one({"requests_per_minute": 60}, rate=1, burst=1), CLEAN, TOLD_429),
    Scenario("600 requests/min", 2000, _one({"requests_per_minute": 600}, rate=10, burst=10), CLEAN, TOLD_429),
    Scenario("6000 requests/min", 4000, _one({"requests_per_minute": 6000}, rate=100, burst=20), CLEAN, TOLD_429),
    Scenario(
        "1200 requests/min, minutes", 4000, _one({"requests_per_minute": 1200}, rate=20, burst=2), CLEAN, TOLD_429
    ),
    Scenario(
        "burst of 200 at start",
        4000,
        _one({"requests_per_minute": 6000, "burst": 200}, rate=100, burst=200),
        CLEAN,
        TOLD_429,
    ),
    Scenario(
        "600,000 tokens/min",
        2000,
        _one({"tokens_per_minute": 600_000}, token_rate=10_000, token_burst=10_000),
        CLEAN,
        TOLD_429,
        tokens=_sizes,
    ),
    Scenario("cap of 64 in flight", 5000, _one({"concurrency": 64}, cap=64), CLEAN, TOLD_429),
    Scenario("limit told in headers", 4000, _one({}, rate=100, burst=20, tells="headers"), CLEAN, TOLD_429),
    Scenario(
        "two speeds and prices",
        5000,
        _two(
            (_FAST_SAID | {"price_per_request": 2.0}, _FAST | {"price": 2.0}),
            (
                {"requests_per_minute": 6000, "burst": 20, "price_per_request": 1.0},
                {"rate": 100, "burst": 20, "median_s": 0.8},
            ),
        ),
        CLEAN,
        TOLD_429,
    ),
    Scenario(
        "limit halves, told", 4000, _one({}, rate=100, burst=20, changes=((15, 0.5),), tells="headers"), HARD, TOLD_429
    ),
    Scenario("limit halves, unknown", 4000, _one({}, rate=100, burst=20, changes=((15, 0.5),)), HARD, FOUND_429),
    Scenario("limit doubles, unknown", 4000, _one({}, rate=50, burst=20, changes=((15, 2.0),)), HARD, FOUND_429),
    Scenario("60/min, unknown", 1000, _one({}, rate=1, burst=10), HARD, FOUND_429),
    Scenario("60/min without burst, unknown", 1000, _one({}, rate=1, burst=1), HARD, FOUND_429),
    Scenario("600/min, unknown", 2000, _one({}, rate=10, burst=10), HARD, FOUND_429),
    Scenario("6000/min, unknown", 4000, _one({}, rate=100, burst=100), HARD, FOUND_429),
    Scenario(
        "6000/min, unknown, Retry-After", 4000, _one({}, rate=100, burst=20, tells="retry_after"), HARD, FOUND_429
    ),
    Scenario(
        "tokens/min, unknown", 2000, _one({}, token_rate=10_000, token_burst=10_000), HARD, FOUND_429, tokens=_sizes
    ),
    Scenario("cap of 64, unknown", 4000, _one({}, cap=64), HARD, FOUND_429),
    Scenario("cap of 8, unknown", 1000, _one({}, cap=8), HARD, FOUND_429),
    Scenario("cap halves, unknown", 4000, _one({}, cap=64, changes=((7, 0.5),)), HARD, FOUND_429),
    Scenario(
        "stragglers, errors, resets",
        3000,
        _one({"requests_per_minute": 6000, "burst": 20}, rate=100, burst=20, **_BAD),
        HARD,
        TOLD_429,
    ),
    Scenario("the same, cap of 64", 3000, _one({"concurrency": 64}, cap=64, **_BAD), HARD, TOLD_429),
    Scenario("the same, rate unknown", 3000, _one({}, rate=100, burst=20, **_BAD), HARD, FOUND_429),
    Scenario("the same, cap unknown", 3000, _one({}, cap=64, **_BAD), HARD, FOUND_429),
    Scenario(
        "two, both unknown", 4000, _two(({}, _FAST), ({}, {"rate": 100, "burst": 20, "median_s": 0.8})), HARD, FOUND_429
    ),
    Scenario(
        "one of two dies half way",
        3000,
        _two((_FAST_SAID, _FAST | {"dies_at_s": 15}), (_FAST_SAID, _FAST)),
        HARD,
        TOLD_429,
    ),
    Scenario("one of two dies, unknown", 3000, _two(({}, _FAST | {"dies_at_s": 15}), ({}, _FAST)), HARD, FOUND_429),
    Scenario("one of two was never there", 2000, _two(({}, _FAST | {"dies_at_s": 0}), ({}, _FAST)), HARD, FOUND_429),
    Scenario(
        "one dies and comes back",
        4000,
        _two((_FAST_SAID, _FAST | {"dies_at_s": 10, "lives_again_at_s": 20}), (_FAST_SAID, _FAST)),
        HARD,
        TOLD_429,
    ),
)
