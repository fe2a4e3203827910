"""One queue over many endpoints: which job goes where next, what an answer means for it, and when to look again.

Decides order (earliest due first, where each priority step moves a job's due time forward by `aging_s`, a deadline *is*
a due time, and a job without one is due `patience_s` after it was queued: strict priorities that can't starve anyone),
retries, failover, hedges and deadlines; where a job is best sent is `placing`'s, what it may cost `ledger`'s.
Work that is turned away comes back here with its old due time; it never sleeps in a back-off of its own, so it waits
only as long as no endpoint can take it.

Pure: owns no clock, task or socket. The edge calls `submit`, `report`, `cancel` and `dispatch` with `now`, runs the
attempts it is handed, resolves the jobs in `take_finished`, and calls again no later than `wake_at`. Invariants: each
job is finished exactly once; `live` attempts of a place equal its door's `in_flight`; retries stay within the retry
budget and hedges within their share of the jobs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.errors import PoolError
from penstock.reward.breaker import CLOSED, Health
from penstock.reward.deadlines import Deadlines
from penstock.reward.failures import (
    BudgetSpent,
    DeadlinePassed,
    JobFailed,
    JobTooLarge,
    NoEndpoint,
    PoolClosed,
    QueueFull,
)
from penstock.reward.jobs import RESOLVED, RUNNING, WAITING, Attempt, Job, Place, Route, State
from penstock.reward.ledger import Ledger
from penstock.reward.limits import Endpoint, PoolOptions
from penstock.reward.placing import Nowhere, hedge_place, pick, slow_s
from penstock.reward.retry import BROKEN, CANCELLED, DONE, FINAL, TURNED_AWAY, Kind, Outcome, RetryBudget

__all__ = ["Scheduler"]

MOST_AT_ONCE = 2
"""Second attempts of one job that may be out at the same time: a hedge can be slow, too."""
HEDGE_LOOK_S = 0.005
"""Between two looks for jobs to hedge, and between a place's coming free and its use for a hedge: in a closed loop of
callers the next job is about to take it."""
ROUTES_KNOWN = 4096
"""Model names remembered with their route; forgotten all at once beyond that (they are found again)."""


class Scheduler:
    def __init__(self, endpoints: Sequence[Endpoint], options: PoolOptions) -> None:
        self.options = options
        self.places = [Place(endpoint, options) for endpoint in endpoints]
        self.budget = RetryBudget(options.retry_share, options.retry_reserve)
        self.jobs = 0
        self.hedges = 0
        self.ledger = Ledger(options.max_spend)
        self.closed = False
        self._left: dict[str, Place] = {}
        """Places taken out by reloads, by their labels: one that is declared again knows what it was sent before."""
        self._numbers = itertools.count()
        self._routes: dict[tuple[int, ...], Route] = {}
        self._route_of: dict[str, Route] = {}
        self._waiting = 0
        self._live: dict[Attempt, None] = {}
        self._deferred: deque[Job] = deque()
        self._deadlines = Deadlines()
        self._hedge_at = -math.inf
        self._own_hedges = False
        self._finished: list[Job] = []

    # Jobs in

    def submit(
        self,
        payload: Any,
        now: float,
        model: str = "",
        tokens: float = 0.0,
        priority: float = 0.0,
        deadline: float = math.inf,
        attempts: int | None = None,
        hedge_after_s: float | None = None,
        patient: bool = False,
    ) -> Job:
        """Queues a job. `deadline` is in the time of `now`; a `patient` job has one only so as not to wait for ever.

        Raises:
            PoolClosed, NoEndpoint, JobTooLarge, QueueFull: the job can't be taken; nothing has changed.
        """
        options = self.options
        if self.closed:
            raise PoolClosed("the pool is shut down and takes no more jobs")
        route = self._route(model)
        for place in route.places:
            if place.admission.tokens is None or place.admission.fits(tokens):
                break
        else:
            raise JobTooLarge(
                f"a job of {tokens:.0f} tokens is above every limit of tokens a minute for model '{model}'"
            )
        if self._waiting >= options.max_queued:
            raise QueueFull(f"{self._waiting} jobs wait already; the pool's max_queued is {options.max_queued}")
        wanted = now + options.patience_s if patient or deadline == math.inf else deadline
        due = wanted - priority * options.aging_s
        number, attempts = next(self._numbers), attempts or options.attempts
        job = Job(number, route, model, payload, now, due, deadline, tokens, attempts, hedge_after_s)
        if hedge_after_s is not None:
            self._own_hedges = True
        self.jobs += 1
        self.budget.job()
        route.queue.add(job)
        self._waiting += 1
        self._deadlines.add(job)
        return job

    def _route(self, model: str) -> Route:
        route = self._route_of.get(model)
        if route is not None:
            return route
        serving = tuple(n for n, place in enumerate(self.places) if not place.retired and place.endpoint.serves(model))
        if not serving:
            known = sorted({pattern for place in self.places for pattern in place.endpoint.models})
            asked = f"no endpoint of the pool serves model '{model}'" if model else "the request names no model"
            raise NoEndpoint(f"{asked}; served: {', '.join(known) or 'none'}")
        route = self._routes.get(serving)
        if route is None:
            route = self._routes[serving] = Route(tuple(self.places[n] for n in serving))
        if len(self._route_of) >= ROUTES_KNOWN:
            self._route_of.clear()
        self._route_of[model] = route
        return route

    # Attempts out

    def dispatch(self, now: float) -> list[Attempt]:
        """All attempts that should start now, already admitted."""
        if self._deferred:
            while self._deferred and self.budget.take(now):
                self._requeue(self._deferred.popleft())
        started: list[Attempt] = []
        if self._waiting:
            if len(self._routes) == 1:
                (route,) = self._routes.values()
                while route.queue and (attempt := self._place(route, now)) is not None:
                    started.append(attempt)
            else:
                self._dispatch_routes(now, started)
        if not self._waiting and self._live and now >= self._hedge_at and self.options.hedge_share > 0:
            self._hedge(now, started)
        return started

    def _dispatch_routes(self, now: float, started: list[Attempt]) -> None:
        """Serves the routes' heads in order of due time; a route whose head can't go steps aside for this round."""
        heads = [(route.queue[0].due, n, route) for n, route in enumerate(self._routes.values()) if route.queue]
        heapq.heapify(heads)
        while heads:
            _, n, route = heads[0]
            attempt = self._place(route, now)
            if attempt is not None:
                started.append(attempt)
            if attempt is not None and route.queue:
                heapq.heapreplace(heads, (route.queue[0].due, n, route))
            else:
                heapq.heappop(heads)

    def _place(self, route: Route, now: float) -> Attempt | None:
        """Starts one job of a route at the place that serves it best, if that place can take it now."""
        while route.queue:
            found = pick(route, self._routes.values(), now, self.options, self.ledger)
            if isinstance(found, tuple):
                return self._start(*found, now)
            if found is not Nowhere.UNAFFORDABLE or not self._unaffordable(route):
                break
        return None

    def _start(self, job: Job, place: Place, now: float, hedge: bool = False) -> Attempt:
        money = place.money(job.tokens) if place.priced else 0.0
        attempt = Attempt(job, place, place.admission.admit(now, job.tokens), money, hedge)
        self.ledger.reserved += money
        job.live = (*job.live, attempt)
        if not hedge:
            job.state = RUNNING
            self._waiting -= 1
            after_s = job.hedge_after_s or self.options.hedge_after_s or place.admission.latency.slow_s
            if now + after_s < self._hedge_at:
                self._hedge_at = now + after_s
        self._live[attempt] = None
        return attempt

    def _unaffordable(self, route: Route) -> bool:
        """No place is affordable for a route's first job: it waits for reservations, or fails where there are none.
        Then the next one is to be looked at: no event will come for it."""
        if self._live:
            return False
        job = route.queue.pop()
        self._waiting -= 1
        self._finish(
            job, BudgetSpent(f"{self.ledger.spent:.4g} of the pool's max_spend of {self.options.max_spend} is spent")
        )
        return True

    # Hedges

    def _hedge(self, now: float, started: list[Attempt]) -> None:
        """Starts a second attempt for jobs that take too long, the oldest first. Only called when nothing waits."""
        following, alike = math.inf, len(self.places) == 1 and not self._own_hedges
        for attempt in list(self._live):
            job = attempt.job
            if attempt is not job.live[-1] or len(job.live) > MOST_AT_ONCE:
                continue  # a later attempt is out: its age counts
            after_s = job.hedge_after_s or self.options.hedge_after_s or slow_s(attempt, self.options.seconds_per_unit)
            if attempt.sent.sent_at + after_s > now:
                following = min(following, attempt.sent.sent_at + after_s)
                if alike:
                    break  # the rest are younger
                continue
            if self.hedges + 1 > self.options.hedge_share * self.jobs:
                break
            place, ready = hedge_place(attempt, now, self.ledger)
            if place is None:
                following = min(following, ready)
                continue
            job.hedges += 1
            self.hedges += 1
            started.append(self._start(job, place, now, hedge=True))
        self._hedge_at = max(following, now + HEDGE_LOOK_S)

    # Answers in

    def report(self, attempt: Attempt, outcome: Outcome, now: float) -> Sequence[Attempt]:
        """Takes note of how an attempt ended; returns the attempts that lost by it, for the edge to cancel."""
        job, place = attempt.job, attempt.place
        place.admission.settle(attempt.sent, now, outcome)
        place.count(outcome)
        del self._live[attempt]
        job.live = () if len(job.live) == 1 else tuple(other for other in job.live if other is not attempt)
        self.ledger.settle(attempt, outcome)
        if not self._live:
            self.ledger.nothing_out()
        if (len(self.places) > 1 or self._hedge_at == math.inf) and now + HEDGE_LOOK_S < self._hedge_at:
            self._hedge_at = now + HEDGE_LOOK_S
        if job.state is RESOLVED:
            return ()
        kind = outcome.kind
        if kind is DONE or kind is FINAL:
            job.outcome = outcome
            self._finish(job, None if kind is DONE else self._failure(job, outcome, place))
            return job.live
        if kind is BROKEN or kind is Kind.SPENT:
            job.failed_on = (*job.failed_on, place)
        if kind is BROKEN:
            job.attempts += 1
        job.outcome = outcome
        if job.live:
            self._hedge_at = min(self._hedge_at, now + HEDGE_LOOK_S)  # the other attempt may want company again
            return ()
        self._again(job, outcome, place, now)
        return ()

    def _again(self, job: Job, outcome: Outcome, place: Place, now: float) -> None:
        """Gives a job back to the queue, or fails it where no further attempt is allowed."""
        if self.closed:
            self._finish(job, PoolClosed("the pool was shut down before the job was answered"))
        elif not job.route.places:
            self._finish(job, NoEndpoint(f"no endpoint of the pool serves model '{job.model}' any more"))
        elif outcome.kind is TURNED_AWAY:
            job.turned_away += 1
            self._requeue(job)
        elif outcome.kind is CANCELLED:
            self._requeue(job)
        elif outcome.kind is Kind.SPENT:
            if all(p.admission.breaker.health is Health.SPENT for p in job.route.places):
                self._finish(job, BudgetSpent(f"{place.endpoint.label}: {outcome.cause}; no other account is left"))
            else:
                self._requeue(job)
        elif job.attempts >= job.max_attempts:
            self._finish(job, self._failure(job, outcome, place))
        elif self.budget.take(now):
            self._requeue(job)
        else:
            job.state = State.DEFERRED
            self._deferred.append(job)

    @staticmethod
    def _failure(job: Job, outcome: Outcome, place: Place) -> PoolError:
        tried = f" (attempt {job.attempts} of {job.max_attempts})" if outcome.kind is BROKEN else ""
        detail = f": {outcome.body[:200]}" if outcome.body else ""
        return JobFailed(
            f"{place.endpoint.label}: {outcome.cause}{tried}{detail}", outcome.status, outcome.body, job.attempts
        )

    def _requeue(self, job: Job) -> None:
        job.state = WAITING
        job.route.queue.add(job)
        self._waiting += 1

    def _finish(self, job: Job, error: PoolError | None) -> None:
        job.state = RESOLVED
        job.error = error
        self._finished.append(job)
        self._deadlines.over(job)

    def take_finished(self) -> list[Job]:
        """Jobs resolved since the last call, each exactly once in its life."""
        if not self._finished:
            return []
        finished, self._finished = self._finished, []
        return finished

    # Ends

    def cancel(self, job: Job) -> Sequence[Attempt]:
        """The caller no longer wants the answer; returns the attempts to cancel. The job isn't among the finished."""
        if job.state is RESOLVED:
            return ()
        self._unqueue(job)
        job.state = RESOLVED
        self._deadlines.over(job)
        return job.live

    def _unqueue(self, job: Job) -> None:
        if job.state is WAITING and job.route.queue.remove(job):
            self._waiting -= 1
        elif job.state is State.DEFERRED:
            self._deferred.remove(job)

    def overdue(self, now: float) -> list[Attempt]:
        """Fails all jobs whose deadline has passed; returns their attempts, for the edge to cancel."""
        if self._deadlines.next_at() > now:
            return []
        lost: list[Attempt] = []
        for job in self._deadlines.take_passed(now):
            self._unqueue(job)
            where = _whereabouts(job)
            last = f"; last: {job.outcome.cause}" if job.outcome is not None else ""
            waited_s = now - job.queued_at
            job.state, job.error = RESOLVED, DeadlinePassed(f"no answer after {waited_s:.3g} s ({where}){last}")
            self._finished.append(job)
            lost.extend(job.live)
        return lost

    def close(self) -> list[Attempt]:
        """Fails every job that isn't running and takes no more; returns the attempts that still run."""
        self.closed = True
        waiting = [job for route in self._routes.values() for job in route.queue] + list(self._deferred)
        for job in waiting:
            self._unqueue(job)
            self._finish(job, PoolClosed("the pool was shut down before the job was answered"))
        return list(self._live)

    def attempts(self) -> Iterable[Attempt]:
        """All attempts in flight."""
        return self._live

    def redeclare(self, endpoints: Sequence[Endpoint], options: PoolOptions, now: float) -> None:
        """Takes over other declarations; places of the same label keep what they learned and what they have in flight.

        Waiting jobs are led anew; one whose model nobody serves any more fails with `NoEndpoint`.
        """
        known = self._left | {place.endpoint.label: place for place in self.places}
        places = []
        for endpoint in endpoints:
            place = known.pop(endpoint.label, None)
            if place is None:
                place = Place(endpoint, options)
            else:
                place.redeclare(endpoint, options, now)
            places.append(place)
        for place in known.values():
            place.retired = True
        waiting = [job for route in self._routes.values() for job in route.queue]
        self.places = places + [place for place in known.values() if place.admission.in_flight]
        self._left = known
        self.options = options
        self.ledger.max_spend = options.max_spend
        self.budget.redeclare(options.retry_share, options.retry_reserve)
        self._routes, self._route_of, self._waiting = {}, {}, 0
        for job in [*waiting, *self._deferred, *{attempt.job: None for attempt in self._live}]:
            try:
                job.route = self._route(job.model)
            except NoEndpoint as error:
                if job.live:
                    job.route = Route(())
                else:
                    self._drop(job, error)
                continue
            if job.state is WAITING:
                job.route.queue.add(job)
                self._waiting += 1

    def _drop(self, job: Job, error: PoolError) -> None:
        if job.state is State.DEFERRED:
            self._deferred.remove(job)
        self._finish(job, error)

    # When to look again

    def wake_at(self, now: float) -> float:
        """The next time at which `dispatch` or `overdue` may have something to do without any event; or infinity."""
        wake = self._deadlines.next_at()
        if self._waiting:
            for route in self._routes.values():
                if route.queue:
                    tokens = route.queue[0].tokens
                    for place in route.places:
                        ready = place.admission.ready_at(now, tokens)
                        if now < ready < wake:
                            wake = ready
        elif self._live and self.options.hedge_share > 0 and self._hedge_at < wake:
            wake = max(now, self._hedge_at)
        if self._deferred:
            wake = min(wake, self.budget.ready_at(now))
        return wake

    @property
    def spent(self) -> float:
        """Money, in the endpoints' currency."""
        return self.ledger.spent

    @property
    def waiting(self) -> int:
        return self._waiting + len(self._deferred)

    @property
    def running(self) -> int:
        return len(self._live)


def _whereabouts(job: Job) -> str:
    """Where a job is that has run out of time, and what keeps it there if that is no queue's length."""
    if job.live:
        return f"at {job.live[0].place.endpoint.label}"
    out = all(place.admission.breaker.health is not CLOSED for place in job.route.places)
    return "in the queue; every endpoint for it is out" if out else "in the queue"
