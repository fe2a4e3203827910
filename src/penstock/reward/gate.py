"""How many requests an endpoint may have in flight: a declared number, or one found from what it turns away.

`LearnedCap` starts small, grows with each answer, and at the first rejection asks what kind of limit it met. A cap
on concurrency never accepts a request at a fuller moment than one at which it rejects; a limit on rate does so all the
time. So: while rejections agree with a cap, the cap is what was in flight at the last one, tried again upward ever more
rarely; after two that contradict it, the endpoint's limit is one of rate and the gate opens wide.

Refuses to know rates (`pacer`) and jobs (`schedule`).
"""

from __future__ import annotations

from collections import deque

__all__ = ["DeclaredCap", "LearnedCap", "Sent"]


class Sent:
    """One request that left, as gate and pacer need to remember it."""

    __slots__ = ("in_flight", "number", "probe", "rejected", "sent_at", "tokens", "told_requests", "told_tokens")

    def __init__(self, sent_at: float, in_flight: int, tokens: float) -> None:
        self.sent_at = sent_at
        self.in_flight = in_flight
        """Others in flight at the same endpoint when it left; without those turned away, once that is known."""
        self.tokens = tokens
        self.rejected = False
        self.probe = False
        """Left above the known cap, to see whether it has risen."""
        self.number = 0
        self.told_requests = 0.0
        self.told_tokens = 0.0


class DeclaredCap:
    """A declared concurrency: never exceeded, never doubted."""

    __slots__ = ("cap",)

    def __init__(self, cap: int) -> None:
        self.cap = cap

    def allows(self, in_flight: int) -> bool:
        return in_flight < self.cap

    def sent(self, sent: Sent) -> None:
        return

    def accepted(self, sent: Sent) -> None:
        return

    def rejected(self, sent: Sent, now: float) -> bool:
        """Whether the cap explains the rejection: never, it is kept."""
        return False

    def lost(self) -> None:
        return


class LearnedCap:
    """A concurrency that nobody states.

    `trusted_rate` says that the endpoint's rate is declared: then a ramp has nothing to protect, and single rejections
    are the network's jitter, so the gate starts wide and only a run of them makes it look for a cap.
    """

    START = 16
    """In flight at first: enough to fill 80 requests/s at 0.2 s each, few enough to be turned away without harm."""
    GROWTH = 2
    """Added for each answer until something is turned away: tripled in each service time. Rejections come back much
    faster than answers, so a steep ramp costs few of them."""
    RECENT = 64
    """Requests looked back on to tell a cap from a rate."""
    PROBE_LEAST = 16
    """Answers between two attempts at one more than the cap; doubled after each that fails, up to 8 caps' worth."""
    BLUR = 1.05
    """What was in flight is known to about this factor: answers on their way back no longer take up a place."""
    RUN = 12
    """Rejections among the recent requests from which a cap is looked for although the rate is declared. A provider
    that stalls for half a second turns away a few of those that it then finds waiting, whatever their pace was; a cap a
    quarter below what the rate asks for turns away a quarter, again and again."""
    CONTRADICTIONS = 2
    DOUBT_S = 20.0
    """After this long a cap is thought possible again: services change."""

    __slots__ = (
        "_answers",
        "_contradictions",
        "_doubted_at",
        "_every",
        "_max",
        "_recent",
        "_rejected_at",
        "_risen",
        "_step",
        "_trusted_rate",
        "cap",
        "found",
        "is_rate",
    )

    def __init__(self, max_in_flight: int, trusted_rate: bool = False) -> None:
        self.cap = max_in_flight if trusted_rate else min(self.START, max_in_flight)
        self.found = False
        """A rejection has shown where the cap is."""
        self.is_rate = False
        """Rejections have shown that it isn't a cap."""
        self._max = max_in_flight
        self._trusted_rate = trusted_rate
        self._recent: deque[Sent] = deque(maxlen=self.RECENT)
        self._answers = 0
        self._every = self.PROBE_LEAST
        self._step = 1
        self._risen = 0
        self._rejected_at = 0.0
        self._contradictions = 0
        self._doubted_at = 0.0

    def redeclare(self, max_in_flight: int) -> None:
        """Takes over another bound; what was learned below it stays."""
        if not self.found and self.cap == self._max:
            self.cap = max_in_flight
        self._max = max_in_flight
        self.cap = min(self.cap, max_in_flight)

    def allows(self, in_flight: int) -> bool:
        if in_flight < self.cap:
            return True
        return self.found and in_flight < self._max and in_flight == self.cap and self._answers >= self._every

    def sent(self, sent: Sent) -> None:
        if self.found and sent.in_flight >= self.cap:
            self._answers = 0
            sent.probe = True
        self._recent.append(sent)

    def accepted(self, sent: Sent) -> None:
        self._answers += 1
        if self.is_rate:
            return
        if not self.found:
            if self.cap < self._max and 2 * sent.in_flight >= self.cap - 1:
                self.cap = min(self._max, self.cap + self.GROWTH)
        elif sent.probe and sent.sent_at > self._rejected_at:
            self.cap = min(self._max, self.cap + self._step)
            self._risen += 1
            if self._risen > 1:
                self._step *= 2
                self._every = max(8, self._every // 2)

    def rejected(self, sent: Sent, now: float) -> bool:
        """Takes note of a rejection; returns whether a cap on concurrency explains it."""
        sent.rejected = True
        for other in self._recent:
            if other.sent_at > sent.sent_at:
                other.in_flight -= 1  # this one, though under way, took no place
        if self.is_rate:
            if now - self._doubted_at < self.DOUBT_S:
                return False
            self.is_rate, self._contradictions = False, 0
        if self._trusted_rate and sum(1 for other in self._recent if other.rejected) < self.RUN:
            return False
        if self._contradicts(sent, now):
            self._contradictions += 1
            if sent.in_flight == 0 or self._contradictions >= self.CONTRADICTIONS:
                self.is_rate, self._doubted_at = True, now
                self.found, self.cap = False, self._max
                return False
        if self.found:
            self._every = min(max(self.PROBE_LEAST, 8 * self.cap), 2 * self._every)
        self.cap = max(1, min(self.cap, sent.in_flight) if self.found else sent.in_flight)
        self.found = True
        self._rejected_at = sent.sent_at
        self._step, self._risen = 1, 0
        return True

    def _contradicts(self, sent: Sent, now: float) -> bool:
        """Whether a cap can't be why `sent` was rejected: nothing was in flight, or a fuller moment was accepted.

        Only what left after the first of the recent rejections counts, since a cap may have fallen just before it; and
        only what left more than two of this rejection's round trips ago, which would have been rejected by now.
        """
        if sent.in_flight == 0:
            return True
        first = next((other.sent_at for other in self._recent if other.rejected), sent.sent_at)
        last = min(sent.sent_at, now - 2 * (now - sent.sent_at))
        fuller = max((s.in_flight for s in self._recent if not s.rejected and first < s.sent_at <= last), default=0)
        return fuller > sent.in_flight * self.BLUR

    def lost(self) -> None:
        """The endpoint was down: it comes back gently, from the start's number or half of what it had."""
        if not self.found and not self.is_rate and not self._trusted_rate:
            self.cap = max(1, min(self.cap, self.START))
