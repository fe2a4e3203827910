"""Where a job is best sent: lowest expected finish time plus the price of what is scarce. Pure.

Decides which of a route's places takes which of its first jobs now, and where a second attempt may go. Refuses to know
attempts, retries and deadlines (`schedule`). Changes nothing but the queue that a job is taken from.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection

from penstock.reward.breaker import CLOSED
from penstock.reward.jobs import Attempt, Job, Place, Route
from penstock.reward.ledger import Ledger
from penstock.reward.limits import PoolOptions

__all__ = ["Nowhere", "hedge_place", "pick", "slow_s"]

LOOKAHEAD = 512
"""Jobs looked past for one that gains from a slower endpoint; bounds the cost of placing one."""
PASSED_OVER = 16
"""Jobs passed over, because they broke at a place before, to find one that may go there."""


class Nowhere(enum.Enum):
    BUSY = "busy"
    """No place can take a job now, or waiting for a better one is sooner."""
    UNAFFORDABLE = "unaffordable"
    """The money left covers no place."""


def pick(
    route: Route, routes: Collection[Route], now: float, options: PoolOptions, ledger: Ledger
) -> tuple[Job, Place] | Nowhere:
    """Takes the job out of a route's queue that should start now, with its place."""
    head = route.queue[0]
    if len(route.places) > 1:
        return _choose(route, routes, head, now, options, ledger)
    place = route.places[0]
    if place.admission.ready_at(now, head.tokens) > now or not place.takes(head):
        return Nowhere.BUSY
    if ledger.max_spend is not None and not ledger.affords(place, head):
        return Nowhere.UNAFFORDABLE
    return route.queue.pop(), place


def _choose(
    route: Route, routes: Collection[Route], head: Job, now: float, options: PoolOptions, ledger: Ledger
) -> tuple[Job, Place] | Nowhere:
    free: list[tuple[float, int]] = []
    busy: list[tuple[float, int]] = []
    affordable = False
    for n, place in enumerate(route.places):
        if not place.takes(head) or not ledger.affords(place, head):
            continue
        affordable = True
        door = place.admission
        ready = door.ready_at(now, head.tokens)
        service_s = route.service_s(place)
        wait_s = ready - now if ready < math.inf else service_s / max(1, door.gate.cap)
        cost = (wait_s + service_s) / place.endpoint.weight
        cost += options.seconds_per_unit * place.money(head.tokens) + _scarcity_s(route, routes, place, head.tokens)
        if ready <= now:
            free.append((cost, n))
        elif door.breaker.health is CLOSED:
            busy.append((cost, n))
    if not affordable:
        return Nowhere.UNAFFORDABLE
    for cost, n in sorted(free):
        index = _index_for(route, cost, busy, head.tokens)
        place = route.places[n]
        if index < len(route.queue) and (job := _job_for(route, index, place, head, now, ledger)) is not None:
            return job, place
    return Nowhere.BUSY


def _index_for(route: Route, cost: float, busy: list[tuple[float, int]], tokens: float) -> int:
    """Index of the first waiting job that a free place of this cost finishes sooner than waiting for better ones.

    The job at index k gets its turn at the better places after `k / their throughput`.
    """
    better = [(other, n) for other, n in busy if other < cost]
    if not better:
        return 0
    rate = sum(route.places[n].admission.throughput(route.service_s(route.places[n]), tokens) for _, n in better)
    ahead = (cost - min(other for other, _ in better)) * rate
    return LOOKAHEAD if ahead > LOOKAHEAD else max(1, int(ahead))


def _job_for(route: Route, index: int, place: Place, head: Job, now: float, ledger: Ledger) -> Job | None:
    """Takes out the job at `index`, or one of the next few if that one must not go to this place."""
    queue, door = route.queue, place.admission
    for k in range(index, min(len(queue), index + PASSED_OVER)):
        job = queue[k]
        if not _allowed(job, place) or not door.fits(job.tokens):
            continue
        if job is head or (job.tokens <= head.tokens and ledger.max_spend is None):
            return queue.pop(k)
        if door.ready_at(now, job.tokens) <= now and ledger.affords(place, job):
            return queue.pop(k)
    return None


def _allowed(job: Job, place: Place) -> bool:
    """Whether a job may go to a place: not where it broke before while a healthy place is untried."""
    if place not in job.failed_on:
        return True
    return not any(
        other not in job.failed_on and other.admission.breaker.health is CLOSED for other in job.route.places
    )


def _scarcity_s(route: Route, routes: Collection[Route], place: Place, tokens: float) -> float:
    """Shadow price of a place: how long jobs that have fewer places to go to are waiting for it."""
    if len(routes) == 1:
        return 0.0
    longest, own = 0.0, set(route.places)
    for other in routes:
        if other.queue and place in other.places and set(other.places) < own:
            longest = max(longest, len(other.queue) / max(other.throughput(tokens), 1e-9))
    return longest


def slow_s(attempt: Attempt, seconds_per_unit: float) -> float:
    """Age at which an attempt is slow: for its endpoint, or 0 where another one needs less than half of its time.

    The second case is the end of a batch, when a fast endpoint has run out of work and a slow one has not.
    """
    route, latency = attempt.job.route, attempt.place.admission.latency
    if len(route.places) > 1 and latency.slow_s < math.inf:
        fastest_s = min(
            (
                route.service_s(place) + seconds_per_unit * place.money(attempt.job.tokens)
                for place in route.places
                if place.admission.latency.count and place is not attempt.place
            ),
            default=math.inf,
        )
        if 2 * fastest_s < latency.mean_s:
            return 0.0
    return latency.slow_s


def hedge_place(attempt: Attempt, now: float, ledger: Ledger) -> tuple[Place | None, float]:
    """Where a second attempt may go at once, on another endpoint where there is one; or when to ask again."""
    job = attempt.job
    places = [
        place
        for place in job.route.places
        if place.admission.breaker.health is CLOSED
        and _allowed(job, place)
        and place.takes(job)
        and ledger.affords(place, job)
    ]
    others = [place for place in places if place is not attempt.place] or places
    ready = [(place.admission.ready_at(now, job.tokens), n) for n, place in enumerate(others)]
    if not ready:
        return None, math.inf
    free = [others[n] for at, n in ready if at <= now]
    if not free:
        return None, min(ready)[0]
    return min(free, key=job.route.service_s), now
