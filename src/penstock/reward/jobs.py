"""The words of the scheduler: a job, an attempt at it, the place where it is made, the route that leads there."""

from __future__ import annotations

import enum
import math
from typing import Any

from penstock.errors import PoolError
from penstock.reward.admission import Admission
from penstock.reward.gate import Sent
from penstock.reward.limits import Endpoint, PoolOptions
from penstock.reward.queue import DueQueue
from penstock.reward.retry import BROKEN, DONE, Outcome

__all__ = ["RESOLVED", "RUNNING", "WAITING", "Attempt", "Job", "Place", "Route", "State"]


class State(enum.Enum):
    WAITING = "waiting"
    """In its route's queue."""
    DEFERRED = "deferred"
    """Broken once, and waiting for the pool's retry budget."""
    RUNNING = "running"
    """At least one attempt is out."""
    RESOLVED = "resolved"


WAITING, RUNNING, RESOLVED = State.WAITING, State.RUNNING, State.RESOLVED  # looked up once, as in `retry`


class Job:
    """One request. `payload` is the edge's own and never looked at."""

    __slots__ = (
        "attempts",
        "deadline",
        "due",
        "error",
        "failed_on",
        "hedge_after_s",
        "hedges",
        "live",
        "max_attempts",
        "model",
        "number",
        "outcome",
        "payload",
        "queued_at",
        "route",
        "state",
        "tokens",
        "turned_away",
    )

    def __init__(
        self,
        number: int,
        route: Route,
        model: str,
        payload: Any,
        queued_at: float,
        due: float,
        deadline: float,
        tokens: float,
        max_attempts: int,
        hedge_after_s: float | None,
    ) -> None:
        self.number = number
        self.route = route
        self.model = model
        self.payload = payload
        self.queued_at = queued_at
        self.due = due
        self.deadline = deadline
        self.tokens = tokens
        self.max_attempts = max_attempts
        self.hedge_after_s = hedge_after_s
        self.state = WAITING
        self.attempts = 0
        """Attempts that broke."""
        self.turned_away = 0
        self.hedges = 0
        self.failed_on: tuple[Place, ...] = ()
        self.live: tuple[Attempt, ...] = ()
        self.outcome: Outcome | None = None
        """How the deciding attempt ended."""
        self.error: PoolError | None = None
        """Why there is no answer; None when `outcome` is one."""


class Attempt:
    """One try of one job at one place. `handle` is the edge's own (its task)."""

    __slots__ = ("handle", "hedge", "job", "money", "place", "sent")

    def __init__(self, job: Job, place: Place, sent: Sent, money: float, hedge: bool) -> None:
        self.job = job
        self.place = place
        self.sent = sent
        self.money = money
        self.hedge = hedge
        self.handle: Any = None


class Place:
    """An endpoint in the scheduler's eyes: its door and its running counts."""

    def __init__(self, endpoint: Endpoint, options: PoolOptions) -> None:
        self.endpoint = endpoint
        self.priced = _priced(endpoint)
        """Whether an attempt there costs money."""
        self.admission = Admission(endpoint, options)
        self.spent = 0.0
        self.done = 0
        self.broken = 0
        self.retired = False
        """Taken out by a reload; finishes what it has."""

    def redeclare(self, endpoint: Endpoint, options: PoolOptions, now: float) -> None:
        """Takes over another declaration of the same label; attempts in flight cost what they were to cost."""
        self.endpoint, self.retired = endpoint, False
        self.priced = self.priced or _priced(endpoint)
        self.admission.redeclare(endpoint, options, now)

    def takes(self, job: Job) -> bool:
        """Whether it may ever be given a job of this size."""
        return not self.retired and self.admission.fits(job.tokens)

    def money(self, tokens: float) -> float:
        return self.endpoint.price_per_request + self.endpoint.price_per_1k_tokens * tokens / 1000

    def count(self, outcome: Outcome) -> None:
        if outcome.kind is DONE:
            self.done += 1
        elif outcome.kind is BROKEN:
            self.broken += 1


def _priced(endpoint: Endpoint) -> bool:
    return endpoint.price_per_request > 0 or endpoint.price_per_1k_tokens > 0


class Route:
    """All places that serve the same models, and the queue in front of them."""

    def __init__(self, places: tuple[Place, ...]) -> None:
        self.places = places
        self.queue: DueQueue[Job] = DueQueue()

    def service_s(self, place: Place) -> float:
        """Expected service time; a place that has answered nothing yet counts as the best, so that it is tried."""
        mean = place.admission.latency.mean_s
        if not math.isnan(mean):
            return mean
        known = [p.admission.latency.mean_s for p in self.places if p.admission.latency.count]
        return min(known, default=1.0)

    def throughput(self, tokens: float) -> float:
        """Jobs/s of all places together."""
        return sum(place.admission.throughput(self.service_s(place), tokens) for place in self.places)
