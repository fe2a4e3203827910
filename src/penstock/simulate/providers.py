"""A rate-limited world on a virtual clock: providers that limit, slow down and die, and the pool's own scheduler in it.

The `Scheduler` here is the one that runs; only sockets and clock are replaced. Decides how a simulated provider answers
and what the least possible makespan is; refuses to know how the scheduler works.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.reward.headers import Told, ToldLimit
from penstock.reward.jobs import Attempt
from penstock.reward.limits import Endpoint, PoolOptions
from penstock.reward.retry import Kind, Outcome
from penstock.reward.schedule import Scheduler

__all__ = ["Provider", "Report", "least_makespan_s", "run_jobs"]


@dataclass
class Provider:
    """A simulated service. Rates are in units/s; `inf` is no limit."""

    rate: float = math.inf
    burst: float = 1.0
    token_rate: float = math.inf
    token_burst: float = 1.0
    cap: float = math.inf
    median_s: float = 0.2
    spread: float = 0.25
    """Sigma of the log-normal service time."""
    stragglers: float = 0.0
    """Share of requests that take ten times as long."""
    errors: float = 0.0
    """Share answered with a 500 after their service time."""
    resets: float = 0.0
    """Share whose connection is reset half way."""
    dies_at_s: float = math.inf
    """From here on connections are reset at once, running requests too."""
    lives_again_at_s: float = math.inf
    changes: tuple[tuple[float, float], ...] = ()
    """(time, factor) at which the rate and the cap become that multiple of what was declared."""
    tells: str = ""
    """`retry_after` and `headers`, either or both, are sent."""
    round_trip_s: float = 0.005
    price: float = 0.0

    level: float = field(init=False)
    token_level: float = field(init=False)
    in_flight: int = field(init=False, default=0)
    refused: int = field(init=False, default=0)
    accepted_at: list[float] = field(init=False, default_factory=list)
    _updated_at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.level, self.token_level = self.burst, self.token_burst

    def factor(self, now: float) -> float:
        """What the limits are multiplied with at `now`."""
        return next((factor for at, factor in reversed(self.changes) if at <= now), 1.0)

    def alive(self, now: float) -> bool:
        return not self.dies_at_s <= now < self.lives_again_at_s

    def mean_s(self) -> float:
        """Expected service time."""
        return self.median_s * math.exp(self.spread**2 / 2) * (1 + 9 * self.stragglers)

    def service_s(self, rng: random.Random) -> float:
        slow = 10.0 if rng.random() < self.stragglers else 1.0
        return self.median_s * math.exp(rng.gauss(0.0, self.spread)) * slow

    def throughput(self, now: float, mean_tokens: float) -> float:
        """Jobs/s that can be had at `now`: the mu of the bound."""
        if not self.alive(now):
            return 0.0
        factor = self.factor(now)
        token_rate = self.token_rate / mean_tokens if mean_tokens else math.inf
        return min(factor * self.rate, token_rate, factor * self.cap / self.mean_s())

    def admits(self, now: float, tokens: float) -> float | None:
        """None and the units taken if a request is let in; else seconds until it would be."""
        passed, self._updated_at = now - self._updated_at, now
        rate = self.rate * self.factor(now)
        if rate < math.inf:
            self.level = min(self.burst, self.level + passed * rate)
        if self.token_rate < math.inf:
            self.token_level = min(self.token_burst, self.token_level + passed * self.token_rate)
        if self.in_flight >= self.cap * self.factor(now):
            return 0.0
        if rate < math.inf and self.level < 1.0 - 1e-9:
            return (1.0 - self.level) / rate
        if self.token_rate < math.inf and self.token_level < min(tokens, self.token_burst) - 1e-9:
            return (min(tokens, self.token_burst) - self.token_level) / self.token_rate
        self.level -= 1.0
        self.token_level -= tokens
        return None

    def told(self, now: float) -> Told | None:
        if "headers" not in self.tells or self.rate == math.inf:
            return None
        rate = self.rate * self.factor(now)
        reset_s = max(0.0, (self.burst - self.level) / rate)
        return Told(ToldLimit(self.burst, max(0.0, math.floor(self.level)), reset_s), None)


@dataclass
class Report:
    """What a run came to."""

    jobs: int
    makespan_s: float
    bound_s: float
    refused: int
    done: int
    failed: int
    hedges: int
    sent: int
    finished_at: list[float]
    spent: float

    @property
    def over_bound(self) -> float:
        return self.makespan_s / self.bound_s

    @property
    def refused_per_job(self) -> float:
        return self.refused / self.jobs


def least_makespan_s(providers: Sequence[Provider], services: Sequence[Sequence[float]], mean_tokens: float) -> float:
    """`max(max_i min_j s_ij, (N - sum B_j) / sum mu_j)`, the second term with mu as it changes over time.

    `services[i][j]` is the service time of job i at provider j.
    """
    longest = max(min(row) for row in services)
    free = 0.0
    for p in providers:
        bursts = [
            b
            for b, rate in ((p.burst, p.rate), (p.token_burst / max(mean_tokens, 1e-9), p.token_rate))
            if rate < math.inf
        ]
        if bursts and p.alive(0.0):
            free += min(bursts)
    left = len(services) - free
    edges = sorted(
        {t for p in providers for t in (p.dies_at_s, p.lives_again_at_s, *(at for at, _ in p.changes)) if t < math.inf}
    )
    now = 0.0
    for edge in [*edges, math.inf]:
        rate = sum(p.throughput(now, mean_tokens) for p in providers)
        if rate > 0 and now + left / rate <= edge:
            return max(longest, now + left / rate)
        left -= rate * (edge - now)
        now = edge
    return math.inf


class _World:
    def __init__(self, providers: Sequence[Provider], scheduler: Scheduler, seed: int) -> None:
        self.providers = providers
        self.scheduler = scheduler
        self.seed = seed
        self.now = 0.0
        self.sent = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._tries: dict[tuple[int, int], int] = {}
        self._running: list[dict[Attempt, None]] = [{} for _ in providers]
        self._ended: set[Attempt] = set()
        for n, provider in enumerate(providers):
            if provider.dies_at_s < math.inf:
                self.at(provider.dies_at_s, lambda n=n: self._die(n))  # type: ignore[misc]

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def start(self, attempt: Attempt) -> None:
        n = self.scheduler.places.index(attempt.place)
        self.sent += 1
        attempt.handle = n
        self.at(self.now + self.providers[n].round_trip_s / 2, lambda: self._arrive(attempt, n))

    def _arrive(self, attempt: Attempt, n: int) -> None:
        provider, job = self.providers[n], attempt.job
        back_s = provider.round_trip_s / 2
        if attempt in self._ended:
            return
        if not provider.alive(self.now):
            self.at(self.now + back_s, lambda: self._end(attempt, Outcome(Kind.BROKEN, "connection refused")))
            return
        wait_s = provider.admits(self.now, job.tokens)
        told = provider.told(self.now)
        if wait_s is not None:
            provider.refused += 1
            after_s = wait_s if "retry_after" in provider.tells and wait_s > 0 else None
            outcome = Outcome(Kind.TURNED_AWAY, "429", 429, retry_after_s=after_s, told=told)
            self.at(self.now + back_s, lambda: self._end(attempt, outcome))
            return
        provider.accepted_at.append(self.now)
        provider.in_flight += 1
        self._running[n][attempt] = None
        tries = self._tries[job.number, n] = self._tries.get((job.number, n), -1) + 1
        rng = random.Random(f"{self.seed}/{job.number}/{n}/{tries}")
        service_s = provider.service_s(rng)
        outcome = Outcome(Kind.DONE, told=told, tokens=job.tokens or None)
        fate = rng.random()
        if fate < provider.errors:
            outcome = Outcome(Kind.BROKEN, "500", 500, told=told)
        elif fate < provider.errors + provider.resets:
            service_s, outcome = service_s / 2, Outcome(Kind.BROKEN, "reset")
        self.at(self.now + service_s, lambda: self._leave(attempt, n))
        self.at(self.now + service_s + back_s, lambda: self._end(attempt, outcome))

    def _leave(self, attempt: Attempt, n: int) -> None:
        if self._running[n].pop(attempt, 0) is None:
            self.providers[n].in_flight -= 1

    def _die(self, n: int) -> None:
        for attempt in list(self._running[n]):
            self._leave(attempt, n)
            self._end(attempt, Outcome(Kind.BROKEN, "reset"))

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        if attempt in self._ended:
            return
        self._ended.add(attempt)
        self._leave(attempt, attempt.handle)
        for loser in self.scheduler.report(attempt, outcome, self.now):
            self._end(loser, Outcome(Kind.CANCELLED))

    def run(self, until: Callable[[], bool]) -> None:
        """Events in order of time, the scheduler asked after each instant, until `until()`."""
        while not until():
            for attempt in self.scheduler.overdue(self.now):
                self._end(attempt, Outcome(Kind.CANCELLED))
            for attempt in self.scheduler.dispatch(self.now):
                self.start(attempt)
            if until():
                return
            wake = self.scheduler.wake_at(self.now)
            following = self._events[0][0] if self._events else math.inf
            if min(wake, following) == math.inf:
                raise RuntimeError(
                    f"nothing will ever happen again at {self.now} s: {self.scheduler.waiting} jobs wait"
                )
            self.now = max(self.now, min(wake, following))
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()


def run_jobs(
    providers: Sequence[Provider],
    endpoints: Sequence[Endpoint],
    jobs: int,
    seed: int = 0,
    options: PoolOptions | None = None,
    tokens: Callable[[random.Random], float] | None = None,
) -> Report:
    """Runs `jobs` jobs, all there at the start, through a scheduler over `endpoints` that lead to `providers`."""
    scheduler = Scheduler(endpoints, options or PoolOptions(timeout_s=1e6))
    world = _World(providers, scheduler, seed)
    rng = random.Random(f"{seed}/tokens")
    sizes = [tokens(rng) if tokens else 0.0 for _ in range(jobs)]
    submitted = [scheduler.submit(None, 0.0, tokens=size) for size in sizes]
    numbers = {job.number for job in submitted}
    finished: list[float] = []
    failed = 0

    def all_done() -> bool:
        nonlocal failed
        for job in scheduler.take_finished():
            numbers.remove(job.number)  # a second resolution would raise
            finished.append(world.now)
            failed += job.error is not None
        return not numbers

    world.run(all_done)
    services = [
        [p.service_s(random.Random(f"{seed}/{job.number}/{n}/0")) + p.round_trip_s for n, p in enumerate(providers)]
        for job in submitted
    ]
    bound_s = least_makespan_s(providers, services, sum(sizes) / jobs)
    refused = sum(provider.refused for provider in providers)
    return Report(
        jobs,
        world.now,
        bound_s,
        refused,
        jobs - failed,
        failed,
        scheduler.hedges,
        world.sent,
        finished,
        scheduler.spent,
    )
