"""Whether an endpoint is well enough to be given work.

Closed: work flows. Open: none does until the pause is over. Half open: one probe; its success closes the breaker, its
failure opens it for twice as long. A pure state machine; refuses to know why an attempt failed.
"""

from __future__ import annotations

import enum
import math

__all__ = ["CLOSED", "Breaker", "Health"]


class Health(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"
    SPENT = "spent"


CLOSED = Health.CLOSED  # looked up once, as in `retry`


class Breaker:
    SPENT_PAUSE_S = 300.0
    """How long a provider whose account is spent isn't asked: someone has to pay first."""

    __slots__ = ("_failures", "_longest_s", "_pause_s", "_shortest_s", "_threshold", "health", "opens_at", "trips")

    def __init__(self, threshold: int, pause_s: float, longest_s: float) -> None:
        self.redeclare(threshold, pause_s, longest_s)
        self._pause_s = pause_s
        self._failures = 0
        self.health = CLOSED
        self.opens_at = -math.inf
        """When open: the time of the next probe. Infinite while a probe is out."""
        self.trips = 0

    def redeclare(self, threshold: int, pause_s: float, longest_s: float) -> None:
        """Takes over other bounds for the failures from now on."""
        self._threshold = threshold
        self._shortest_s = pause_s
        self._longest_s = max(pause_s, longest_s)

    def ready_at(self, now: float) -> float:
        """`now` when closed, the time of the probe when open, infinity while the probe is out."""
        return now if self.health is CLOSED else max(now, self.opens_at)

    def sent(self) -> None:
        """Work was given; when open, it is the probe."""
        if self.health is not CLOSED:
            self.health = Health.HALF_OPEN
            self.opens_at = math.inf

    def succeeded(self) -> None:
        self._failures = 0
        if self.health is not CLOSED:
            self.health = CLOSED
            self._pause_s = self._shortest_s

    def failed(self, now: float, at_once: bool = False) -> bool:
        """Counts a failure, or with `at_once` as many as it takes; returns whether it opened the breaker."""
        self._failures += 1
        if self.health is CLOSED:
            self._pause_s = self._shortest_s
        if self.health is Health.HALF_OPEN:
            self._pause_s = min(self._longest_s, 2 * self._pause_s)
        elif self.health is not CLOSED or (self._failures < self._threshold and not at_once):
            return False
        self.health = Health.OPEN
        self.opens_at = now + self._pause_s
        self.trips += 1
        return True

    def spent(self, now: float) -> None:
        self.health = Health.SPENT
        self.opens_at = now + self.SPENT_PAUSE_S
        self.trips += 1

    def probe_lost(self, now: float) -> None:
        """The probe ended without a verdict (cancelled): ask again at once."""
        if self.health is Health.HALF_OPEN:
            self.health = Health.OPEN
            self.opens_at = now
