"""One queue over many endpoints: which job goes where next, what an answer means for it, and when to look again.

Decides order (earliest due first, where each priority step moves a job's due time forward by `aging_s`, a deadline *is*
a due time, and a job without one is due `patience_s` after it was queued: strict priorities that can't starve anyone),
placement (lowest expected finish time plus the price of what is scarce), retries, failover, hedges, deadlines, spend.
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
from penstock.reward.breaker import Health
from penstock.reward.failures import (
    BudgetSpent,
    DeadlinePassed,
    JobFailed,
    JobTooLarge,
    NoEndpoint,
    PoolClosed,
    QueueFull,
)
from penstock.reward.jobs import Attempt, Job, Place, Route, State
from penstock.reward.limits import Endpoint, PoolOptions
from penstock.reward.retry import Kind, Outcome, RetryBudget

__all__ = ["Scheduler"]

LOOKAHEAD = 512
"""Jobs looked past for one that gains from a slower endpoint; bounds the cost of placing one."""
PASSED_OVER = 16
"""Jobs passed over, because they broke at a place before, to find one that may go there."""
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
        self.spent = 0.0
        self.reserved = 0.0
        self.closed = False
        self._numbers = itertools.count()
        self._routes: dict[tuple[int, ...], Route] = {}
        self._route_of: dict[str, Route] = {}
        self._waiting = 0
        self._live: dict[Attempt, None] = {}
        self._deferred: deque[Job] = deque()
        self._deadlines: list[tuple[float, int, Job]] = []
        self._stale_deadlines = 0
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
        self._own_hedges = self._own_hedges or hedge_after_s is not None
        self.jobs += 1
        self.budget.job()
        route.queue.add(job)
        self._waiting += 1
        if deadline < math.inf:
            heapq.heappush(self._deadlines, (deadline, job.number, job))
        return job

    def _route(self, model: str) -> Route:
        route = self._route_of.get(model)
        if route is not None:
            return route
        serving = tuple(n for n, place in enumerate(self.places) if not place.retired and place.endpoint.serves(model))
        if not serving:
            known = sorted({pattern for place in self.places for pattern in place.endpoint.models})
            raise NoEndpoint(f"no endpoint of the pool serves model '{model}'; served: {', '.join(known) or 'none'}")
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
        job = route.queue[0]
        if len(route.places) == 1:
            place = route.places[0]
            if place.admission.ready_at(now, job.tokens) > now or not self._usable(place, job):
                return None
            if self.options.max_spend is not None and not self._affordable(place, job):
                self._unaffordable(route, job)
                return None
            route.queue.pop()
            return self._start(job, place, now)
        return self._choose(route, job, now)

    def _choose(self, route: Route, head: Job, now: float) -> Attempt | None:
        free: list[tuple[float, int]] = []
        busy: list[tuple[float, int]] = []
        affordable = False
        for n, place in enumerate(route.places):
            if not self._usable(place, head):
                continue
            if not self._affordable(place, head):
                continue
            affordable = True
            door = place.admission
            ready = door.ready_at(now, head.tokens)
            service_s = route.service_s(place)
            wait_s = ready - now if ready < math.inf else service_s / max(1, door.gate.cap)
            cost = (wait_s + service_s) / place.endpoint.weight
            cost += self.options.seconds_per_unit * place.money(head.tokens) + self._scarcity_s(
                route, place, head.tokens
            )
            if ready <= now:
                free.append((cost, n))
            elif door.breaker.health is Health.CLOSED:
                busy.append((cost, n))
        if not affordable:
            self._unaffordable(route, head)
            return None
        for cost, n in sorted(free):
            index = self._index_for(route, cost, busy, head.tokens)
            place = route.places[n]
            if index < len(route.queue) and (job := self._pick(route, index, place, head, now)) is not None:
                return self._start(job, place, now)
        return None

    def _index_for(self, route: Route, cost: float, busy: list[tuple[float, int]], tokens: float) -> int:
        """Index of the first waiting job that a free place of this cost finishes sooner than waiting for better ones.

        The job at index k gets its turn at the better places after `k / their throughput`.
        """
        better = [(other, n) for other, n in busy if other < cost]
        if not better:
            return 0
        rate = sum(route.places[n].admission.throughput(route.service_s(route.places[n]), tokens) for _, n in better)
        ahead = (cost - min(other for other, _ in better)) * rate
        return LOOKAHEAD if ahead > LOOKAHEAD else max(1, int(ahead))

    def _pick(self, route: Route, index: int, place: Place, head: Job, now: float) -> Job | None:
        """Takes out the job at `index`, or one of the next few if that one must not go to this place."""
        queue, door = route.queue, place.admission
        for k in range(index, min(len(queue), index + PASSED_OVER)):
            job = queue[k]
            if not self._allowed(job, place) or not door.fits(job.tokens):
                continue
            if job is head or (job.tokens <= head.tokens and self.options.max_spend is None):
                return queue.pop(k)
            if door.ready_at(now, job.tokens) <= now and self._affordable(place, job):
                return queue.pop(k)
        return None

    @staticmethod
    def _allowed(job: Job, place: Place) -> bool:
        """Whether a job may go to a place: not where it broke before while a healthy place is untried."""
        if place not in job.failed_on:
            return True
        return not any(
            other not in job.failed_on and other.admission.breaker.health is Health.CLOSED for other in job.route.places
        )

    @staticmethod
    def _usable(place: Place, job: Job) -> bool:
        return not place.retired and place.admission.fits(job.tokens)

    def _scarcity_s(self, route: Route, place: Place, tokens: float) -> float:
        """Shadow price of a place: how long jobs that have fewer places to go to are waiting for it."""
        if len(self._routes) == 1:
            return 0.0
        longest, own = 0.0, set(route.places)
        for other in self._routes.values():
            if other.queue and place in other.places and set(other.places) < own:
                longest = max(longest, len(other.queue) / max(other.throughput(tokens), 1e-9))
        return longest

    def _start(self, job: Job, place: Place, now: float, hedge: bool = False) -> Attempt:
        money = place.money(job.tokens)
        attempt = Attempt(job, place, place.admission.admit(now, job.tokens), money, hedge)
        self.reserved += money
        job.live = (*job.live, attempt)
        if not hedge:
            job.state = State.RUNNING
            self._waiting -= 1
            after_s = job.hedge_after_s or self.options.hedge_after_s or place.admission.latency.slow_s
            self._hedge_at = min(self._hedge_at, now + after_s)
        self._live[attempt] = None
        return attempt

    # Money

    def _affordable(self, place: Place, job: Job) -> bool:
        limit = self.options.max_spend
        return limit is None or self.spent + self.reserved + place.money(job.tokens) <= limit * (1 + 1e-9)

    def _unaffordable(self, route: Route, job: Job) -> None:
        """No place is affordable: wait for reservations to be settled, or fail where there are none."""
        if not self._live:
            route.queue.remove(job)
            self._waiting -= 1
            self._finish(
                job, error=BudgetSpent(f"{self.spent:.4g} of the pool's max_spend of {self.options.max_spend} is spent")
            )

    # Hedges

    def _hedge(self, now: float, started: list[Attempt]) -> None:
        """Starts a second attempt for jobs that take too long, the oldest first. Only called when nothing waits."""
        following, alike = math.inf, len(self.places) == 1 and not self._own_hedges
        for attempt in list(self._live):
            job = attempt.job
            if attempt is not job.live[-1] or len(job.live) > MOST_AT_ONCE:
                continue  # a later attempt is out: its age counts
            after_s = job.hedge_after_s or self.options.hedge_after_s or self._slow_s(attempt)
            if attempt.sent.sent_at + after_s > now:
                following = min(following, attempt.sent.sent_at + after_s)
                if alike:
                    break  # the rest are younger
                continue
            if self.hedges + 1 > self.options.hedge_share * self.jobs:
                break
            place, ready = self._hedge_place(attempt, now)
            if place is None:
                following = min(following, ready)
                continue
            job.hedges += 1
            self.hedges += 1
            started.append(self._start(job, place, now, hedge=True))
        self._hedge_at = max(following, now + HEDGE_LOOK_S)

    def _slow_s(self, attempt: Attempt) -> float:
        """Age at which an attempt is slow: for its endpoint, or 0 where another one needs less than half of its time.

        The second case is the end of a batch, when a fast endpoint has run out of work and a slow one has not.
        """
        route = attempt.job.route
        slow_s = attempt.place.admission.latency.slow_s
        if len(route.places) > 1 and slow_s < math.inf:
            fastest_s = min(
                (
                    route.service_s(p) + self.options.seconds_per_unit * p.money(attempt.job.tokens)
                    for p in route.places
                    if p.admission.latency.count and p is not attempt.place
                ),
                default=math.inf,
            )
            if 2 * fastest_s < attempt.place.admission.latency.mean_s:
                return 0.0
        return slow_s

    def _hedge_place(self, attempt: Attempt, now: float) -> tuple[Place | None, float]:
        """Where a second attempt may go at once, on another endpoint where there is one; or when to ask again."""
        job = attempt.job
        places = [
            place
            for place in job.route.places
            if place.admission.breaker.health is Health.CLOSED
            and self._allowed(job, place)
            and self._usable(place, job)
            and self._affordable(place, job)
        ]
        others = [place for place in places if place is not attempt.place] or places
        ready = [(place.admission.ready_at(now, job.tokens), n) for n, place in enumerate(others)]
        if not ready:
            return None, math.inf
        free = [others[n] for at, n in ready if at <= now]
        if not free:
            return None, min(ready)[0]
        return min(free, key=job.route.service_s), now

    # Answers in

    def report(self, attempt: Attempt, outcome: Outcome, now: float) -> Sequence[Attempt]:
        """Takes note of how an attempt ended; returns the attempts that lost by it, for the edge to cancel."""
        job, place = attempt.job, attempt.place
        place.admission.settle(attempt.sent, now, outcome)
        place.count(outcome)
        del self._live[attempt]
        job.live = tuple(other for other in job.live if other is not attempt)
        if len(self.places) > 1 or self._hedge_at == math.inf:
            self._hedge_at = min(self._hedge_at, now + HEDGE_LOOK_S)
        self._pay(attempt, outcome)
        if job.state is State.RESOLVED:
            return ()
        kind = outcome.kind
        if kind is Kind.DONE or kind is Kind.FINAL:
            job.outcome = outcome
            losers = job.live
            error = None if kind is Kind.DONE else self._failure(job, outcome, place)
            self._finish(job, error)
            return losers
        if kind is Kind.BROKEN or kind is Kind.SPENT:
            job.failed_on = (*job.failed_on, place)
        if kind is Kind.BROKEN:
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
        elif outcome.kind is Kind.TURNED_AWAY:
            job.turned_away += 1
            self._requeue(job)
        elif outcome.kind is Kind.CANCELLED:
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
        tried = f" (attempt {job.attempts} of {job.max_attempts})" if outcome.kind is Kind.BROKEN else ""
        detail = f": {outcome.body[:200]}" if outcome.body else ""
        return JobFailed(
            f"{place.endpoint.label}: {outcome.cause}{tried}{detail}", outcome.status, outcome.body, job.attempts
        )

    def _pay(self, attempt: Attempt, outcome: Outcome) -> None:
        self.reserved -= attempt.money
        if not self._live:
            self.reserved = 0.0  # rounding
        if outcome.kind is Kind.DONE:
            tokens = attempt.job.tokens if outcome.tokens is None else outcome.tokens
            money = attempt.place.money(tokens)
        elif outcome.kind is Kind.CANCELLED and not attempt.place.endpoint.refunds_cancelled:
            money = attempt.money
        else:
            return
        self.spent += money
        attempt.place.spent += money

    def _requeue(self, job: Job) -> None:
        job.state = State.WAITING
        job.route.queue.add(job)
        self._waiting += 1

    def _finish(self, job: Job, error: PoolError | None = None, in_heap: bool = True) -> None:
        job.state = State.RESOLVED
        job.error = error
        self._finished.append(job)
        if in_heap:
            self._forget_deadline(job)

    def take_finished(self) -> list[Job]:
        """Jobs resolved since the last call, each exactly once in its life."""
        if not self._finished:
            return []
        finished, self._finished = self._finished, []
        return finished

    # Ends

    def cancel(self, job: Job) -> Sequence[Attempt]:
        """The caller no longer wants the answer; returns the attempts to cancel. The job isn't among the finished."""
        if job.state is State.RESOLVED:
            return ()
        self._unqueue(job)
        job.state = State.RESOLVED
        self._forget_deadline(job)
        return job.live

    def _unqueue(self, job: Job) -> None:
        if job.state is State.WAITING and job.route.queue.remove(job):
            self._waiting -= 1
        elif job.state is State.DEFERRED:
            self._deferred.remove(job)

    def overdue(self, now: float) -> list[Attempt]:
        """Fails all jobs whose deadline has passed; returns their attempts, for the edge to cancel."""
        lost: list[Attempt] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, job = heapq.heappop(self._deadlines)
            if job.state is State.RESOLVED:
                self._stale_deadlines -= 1
                continue
            self._unqueue(job)
            where = _whereabouts(job)
            last = f"; last: {job.outcome.cause}" if job.outcome is not None else ""
            waited_s = now - job.queued_at
            self._finish(job, DeadlinePassed(f"no answer after {waited_s:.3g} s ({where}){last}"), in_heap=False)
            lost.extend(job.live)
        return lost

    def _forget_deadline(self, job: Job) -> None:
        """Entries of the heap whose job is over are dropped when they outnumber the others."""
        if job.deadline == math.inf:
            return
        self._stale_deadlines += 1
        if self._stale_deadlines > 64 and 2 * self._stale_deadlines > len(self._deadlines):
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not State.RESOLVED]
            heapq.heapify(self._deadlines)
            self._stale_deadlines = 0

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
        kept = {place.endpoint.label: place for place in self.places if not place.retired}
        places = []
        for endpoint in endpoints:
            place = kept.pop(endpoint.label, None)
            if place is None:
                place = Place(endpoint, options)
            else:
                place.endpoint = endpoint
                place.admission.redeclare(endpoint, options, now)
            places.append(place)
        leaving = [place for place in self.places if place.retired or place in kept.values()]
        for place in leaving:
            place.retired = True
        waiting = [job for route in self._routes.values() for job in route.queue]
        self.places = places + [place for place in leaving if place.admission.in_flight]
        self.options = options
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
            if job.state is State.WAITING:
                job.route.queue.add(job)
                self._waiting += 1

    def _drop(self, job: Job, error: PoolError) -> None:
        if job.state is State.DEFERRED:
            self._deferred.remove(job)
        self._finish(job, error)

    # When to look again

    def wake_at(self, now: float) -> float:
        """The next time at which `dispatch` or `overdue` may have something to do without any event; or infinity."""
        wake = self._deadlines[0][0] if self._deadlines else math.inf
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
    def waiting(self) -> int:
        return self._waiting + len(self._deferred)

    @property
    def running(self) -> int:
        return len(self._live)


def _whereabouts(job: Job) -> str:
    """Where a job is that has run out of time, and what keeps it there if that is no queue's length."""
    if job.live:
        return f"at {job.live[0].place.endpoint.label}"
    out = all(place.admission.breaker.health is not Health.CLOSED for place in job.route.places)
    return "in the queue; every endpoint for it is out" if out else "in the queue"
