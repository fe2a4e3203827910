"""An endpoint's door: rate, tokens, concurrency and health asked together, and taught together by each answer.

Decides when the next request may pass, and which law an answer is evidence for. `in flight = admitted - settled`,
always. Refuses to know jobs and other endpoints (`schedule`). Pure: `now` in, times out.
"""

from __future__ import annotations

import math
from collections import deque

from penstock.reward.breaker import CLOSED, Breaker
from penstock.reward.gate import DeclaredCap, LearnedCap, Sent
from penstock.reward.limits import Endpoint, PoolOptions
from penstock.reward.pacer import LearnedRate, Meter, ToldRate
from penstock.reward.retry import CANCELLED, DONE, FINAL, TURNED_AWAY, Kind, Outcome

__all__ = ["Admission", "Latency"]

BURST_S = 0.1
"""Of an undeclared burst: this many seconds' worth of the declared rate, which providers' own buckets all allow."""


class Latency:
    """Service times of an endpoint: a running mean for placement, a high quantile for hedging."""

    __slots__ = ("_recent", "count", "mean_s", "slow_s")

    QUANTILE = 0.95
    ENOUGH = 20
    """Answers before a quantile means anything."""

    def __init__(self) -> None:
        self.mean_s = math.nan
        self.count = 0
        self._recent: deque[float] = deque(maxlen=200)
        self.slow_s = math.inf
        """Age at which a request is slow: the 95th percentile, and at least 1.5 medians; infinite until known."""

    def add(self, seconds: float) -> None:
        self.count += 1
        self._recent.append(seconds)
        if self.count == 1:
            self.mean_s = seconds
        else:
            self.mean_s += max(0.02, 1 / self.count) * (seconds - self.mean_s)
        if self.count % 20 == 0 and self.count >= self.ENOUGH:
            ordered = sorted(self._recent)
            self.slow_s = max(1.5 * ordered[len(ordered) // 2], ordered[int(self.QUANTILE * len(ordered))])


class Admission:
    """One endpoint's door. `requests` and `tokens` are declared meters or None; undeclared laws are learned or told."""

    OVERLOAD_S = 0.05
    """First pause of an endpoint that turns work away with nothing in flight; doubled each time."""
    OVERLOAD_MAX_S = 5.0
    REACHED_S = 1.0
    """An endpoint that refuses a connection, and has answered nothing for so long, is down: asking it again at once
    would spend a job's attempts in a few milliseconds."""

    def __init__(self, endpoint: Endpoint, options: PoolOptions) -> None:
        self.endpoint = endpoint
        self.requests: Meter | None = None
        self.tokens: Meter | None = None
        self.gate: DeclaredCap | LearnedCap = DeclaredCap(1)
        self._declare(endpoint, options)
        self.learned = LearnedRate()
        self.told_requests = ToldRate()
        self.told_tokens = ToldRate()
        self.breaker = Breaker(options.breaker_failures, options.breaker_pause_s, options.breaker_pause_max_s)
        self.latency = Latency()
        self.in_flight = 0
        self.admitted = 0
        self.turned_away = 0
        self._sent_tokens = 0.0
        self._pause_s = self.OVERLOAD_S
        self._paused_until = -math.inf
        self._answered_at = -math.inf

    def _declare(self, endpoint: Endpoint, options: PoolOptions) -> None:
        rpm, tpm = endpoint.requests_per_minute, endpoint.tokens_per_minute
        self.requests = None if rpm is None else _meter(self.requests, rpm, endpoint.burst or rpm / 60 * BURST_S, False)
        self.tokens = None if tpm is None else _meter(self.tokens, tpm, tpm / 60, True)
        if endpoint.concurrency is not None:
            self.gate = DeclaredCap(endpoint.concurrency)
        else:
            self.gate = LearnedCap(options.max_in_flight, trusted_rate=rpm is not None)

    def redeclare(self, endpoint: Endpoint, options: PoolOptions, now: float) -> None:
        """Takes over another declaration. What was sent still counts; what was learned stays where it still applies."""
        before, self.endpoint = self.endpoint, endpoint
        gate = self.gate
        self._declare(endpoint, options)
        if isinstance(gate, LearnedCap) and before.concurrency is None and endpoint.concurrency is None:
            gate.redeclare(options.max_in_flight)
            self.gate = gate
        self.breaker.redeclare(options.breaker_failures, options.breaker_pause_s, options.breaker_pause_max_s)

    def fits(self, tokens: float) -> bool:
        """Whether a job of this size can ever pass the declared limits."""
        return self.tokens is None or self.tokens.fits(tokens)

    def ready_at(self, now: float, tokens: float = 0.0) -> float:
        """The earliest time at which a request may pass; infinity where only an answer can open the door."""
        if not self.gate.allows(self.in_flight):
            return math.inf
        ready = now if self.breaker.health is CLOSED else self.breaker.ready_at(now)
        if self._paused_until > ready:
            ready = self._paused_until
        if self.requests is not None:
            at = self.requests.ready_at(now)
        elif self.told_requests.known:
            at = self.told_requests.ready_at(now)
        else:
            at = self.learned.ready_at(now)
        if at > ready:
            ready = at
        if self.tokens is not None:
            return max(ready, self.tokens.ready_at(now, tokens))
        if self.told_tokens.known:
            return max(ready, self.told_tokens.ready_at(now, tokens))
        return ready

    def admit(self, now: float, tokens: float = 0.0) -> Sent:
        """Lets one request pass. Only after `ready_at(now, tokens) <= now`."""
        sent = Sent(now, self.in_flight, tokens)
        self.in_flight += 1
        self.admitted += 1
        if self.requests is not None:
            self.requests.take(now)
        if self.tokens is not None:
            self.tokens.take(now, tokens)
        sent.number = self.learned.take(now)
        self._sent_tokens += tokens
        sent.told_requests, sent.told_tokens = self.admitted, self._sent_tokens
        if self.told_requests.limit < math.inf:
            self.told_requests.take(now)
        if self.told_tokens.limit < math.inf:
            self.told_tokens.take(now, tokens)
        self.gate.sent(sent)
        if self.breaker.health is not CLOSED:
            self.breaker.sent()
        return sent

    def settle(self, sent: Sent, now: float, outcome: Outcome) -> None:
        """Takes note of how an admitted request ended. Exactly once for each."""
        self.in_flight -= 1
        kind = outcome.kind
        if outcome.told is not None:
            self._told(sent, now, outcome)
        if kind is DONE or kind is FINAL:
            self._answered_at = now
            self.breaker.succeeded()
            self._pause_s = self.OVERLOAD_S
            self.gate.accepted(sent)
            if kind is DONE:
                self.latency.add(now - sent.sent_at)
        elif kind is TURNED_AWAY:
            self._refused(sent, now, outcome.retry_after_s)
        elif kind is CANCELLED:
            self.breaker.probe_lost(now)
        elif kind is Kind.SPENT:
            self.breaker.spent(now)
        else:
            if self.breaker.failed(now, outcome.unreachable and now > self._answered_at + self.REACHED_S):
                self.gate.lost()
            if outcome.retry_after_s:
                self._paused_until = max(self._paused_until, now + outcome.retry_after_s)
        if self.tokens is not None:
            self._refund(self.tokens, sent, now, outcome)

    def _refund(self, tokens: Meter, sent: Sent, now: float, outcome: Outcome) -> None:
        used = outcome.tokens
        if outcome.kind is TURNED_AWAY or (outcome.kind is CANCELLED and self.endpoint.refunds_cancelled):
            used = 0.0
        if used is not None and used != sent.tokens:
            tokens.settle(now, sent.sent_at, sent.tokens - used)

    def _told(self, sent: Sent, now: float, outcome: Outcome) -> None:
        assert outcome.told is not None
        requests, tokens = outcome.told
        if requests is not None:
            self.told_requests.told(now, sent.sent_at, self.admitted - sent.told_requests, *requests)
        if tokens is not None:
            self.told_tokens.told(now, sent.sent_at, self._sent_tokens - sent.told_tokens, *tokens)

    def _refused(self, sent: Sent, now: float, retry_after_s: float | None) -> None:
        """Finds the law that explains a rejection, and teaches that one only."""
        self.turned_away += 1
        self.breaker.probe_lost(now)
        if self.requests is not None:
            self.requests.refused(now, retry_after_s)
        elif self.told_requests.known:
            self.told_requests.refused(now, retry_after_s)
        explained = self.gate.rejected(sent, now)
        if self.requests is None and not self.told_requests.known:
            self.learned.rejected(now, sent.number, sent.sent_at, None if explained else retry_after_s)
            self.learned.armed = not explained
        if self.in_flight == 0 and retry_after_s is None:
            # Nothing in flight will tell when there is room again: ask ever more rarely.
            self._paused_until = now + self._pause_s
            self._pause_s = min(self.OVERLOAD_MAX_S, 2 * self._pause_s)
        elif retry_after_s is not None and (self.in_flight == 0 or not explained):
            self._paused_until = max(self._paused_until, now + retry_after_s)

    @property
    def rate_limit(self) -> float:
        """Requests/s that the laws of rate allow, as far as known."""
        if self.requests is not None:
            return self.requests.rate
        if self.told_requests.known:
            return self.told_requests.rate
        return self.learned.rate if self.learned.armed else math.inf

    def throughput(self, service_s: float, tokens: float) -> float:
        """Jobs/s of this size that the endpoint can be expected to finish."""
        rate = min(self.rate_limit, self.gate.cap / max(service_s, 1e-6))
        meter = self.tokens if self.tokens is not None else self.told_tokens if self.told_tokens.known else None
        return min(rate, meter.rate / tokens) if meter is not None and tokens > 0 else rate


def _meter(old: Meter | None, limit: float, burst: float, refunds: bool) -> Meter:
    if old is None:
        return Meter(limit, max(1.0, burst), refunds=refunds)
    old.redeclare(limit, max(1.0, burst))
    return old
