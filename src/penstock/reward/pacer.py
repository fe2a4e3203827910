"""When the next request may leave, as far as an endpoint's *rate* goes.

Three laws, each a pure state machine that is told `now` (seconds, any monotonic origin):

- `Meter` keeps a declared limit exactly: at most `limit` units in any window of `window_s`, and at most
  `burst + rate * w` in any shorter window of `w` seconds.
- `ToldRate` follows what a provider's own headers say is left.
- `LearnedRate` finds a limit that nobody states. A rejection says that the provider's bucket is empty at that instant.
  Between two such instants the bucket can neither have gained nor lost anything, so the requests accepted between them,
  divided by the time, *are* the limit, to within one request. So it paces 2 % above its estimate: a rejection in some
  fifty requests keeps the estimate fresh, and the provider's bucket empty, which is what using all of the limit means.

Refuses to know concurrency (`gate`), health (`breaker`) or jobs (`schedule`).
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["LearnedRate", "Meter", "ToldRate"]

_SLACK = 1e-6
"""Units by which a level may fall short: less than any rounding error of a day's run can add up to."""


class Meter:
    """A declared limit in requests or tokens, kept in every window.

    Two laws at once: a bucket (`burst`, refilled at `limit / window_s`) bounds short windows, a log of what was taken
    in the last `window_s` bounds the whole one. An entry of the log gathers what is taken within a thousandth of the
    window and counts until the last of it is a window old, which can only delay, never exceed; so memory is bounded.

    A provider whose bucket is no larger than ours refuses what the network has moved closer together, however exactly
    it was sent. After one refusal its bucket is ahead by one request and stays so, unless it only has room for one:
    then each refusal eases the pace a little, and each hundred requests without one take that back.
    """

    EASED = 0.01
    """Share of the pace that a refusal takes away, and that a hundred requests give back: so at most about one request
    in a hundred is refused where easing helps."""
    MOST_EASED = 0.1
    """Where it doesn't help, the refusals have another cause, and more than this would be quota given away."""

    __slots__ = (
        "_eased",
        "_level",
        "_log",
        "_peaks",
        "_used",
        "burst",
        "held_until",
        "limit",
        "rate",
        "updated_at",
        "window_s",
    )

    def __init__(self, limit: float, burst: float, window_s: float = 60.0, refunds: bool = False) -> None:
        self.limit = limit
        self.burst = min(burst, limit)
        self.window_s = window_s
        self._ease(0.0)
        self._level = self.burst
        self.updated_at = -math.inf
        self.held_until = -math.inf
        self._log: deque[list[float]] = deque()
        """[time of the last, units, time of the first] of what was taken."""
        self._used = 0.0
        self._peaks: list[list[float]] | None = [] if refunds else None
        """[time, level] at which the bucket was fuller than at any later time; only kept where there are refunds."""

    def redeclare(self, limit: float, burst: float) -> None:
        """Takes over another limit from now on; what was taken in the last window still counts against it."""
        self.limit, self.burst = limit, min(burst, limit)
        self._ease(0.0)
        self._level = min(self._level, self.burst)

    def _ease(self, share: float) -> None:
        self._eased = share
        self.rate = self.limit / self.window_s * (1.0 - share)

    def idle(self, now: float) -> bool:
        """Whether nothing that was taken counts any more: forgetting the meter would change nothing."""
        self._refill(now)
        return not self._log and self._level >= self.burst - _SLACK and self.held_until <= now

    def fits(self, amount: float) -> bool:
        """Whether a request of this size can ever pass."""
        return amount <= self.limit

    def _refill(self, now: float) -> None:
        if now > self.updated_at:
            if self.updated_at > -math.inf:
                self._level = min(self.burst, self._level + (now - self.updated_at) * self.rate)
            self.updated_at = now
            if self._peaks is not None:
                self._note_peak(self._peaks, now)
        log = self._log
        while log and log[0][0] + self.window_s <= now:
            self._used -= log.popleft()[1]

    def ready_at(self, now: float, amount: float = 1.0) -> float:
        """The earliest time at which `amount` may be taken if nothing else is; `now` if at once.

        An amount above the burst passes when the bucket is full and leaves it in debt.
        """
        self._refill(now)
        missing = min(amount, self.burst) - self._level
        ready = now if missing <= _SLACK else now + missing / self.rate
        over = self._used + amount - self.limit
        if over > _SLACK:
            for taken_at, units, _ in self._log:
                over -= units
                if over <= _SLACK:
                    ready = max(ready, taken_at + self.window_s)
                    break
        return max(ready, self.held_until)

    def take(self, now: float, amount: float = 1.0) -> None:
        self._refill(now)
        self._level -= amount
        self._used += amount
        if self._eased:
            self._ease(max(0.0, self._eased - self.EASED / 100))
        log = self._log
        if log and now - log[-1][2] < self.window_s / 1000:
            entry = log[-1]
            entry[0] = now
            entry[1] += amount
        else:
            log.append([now, amount, now])

    def settle(self, now: float, taken_at: float, amount: float) -> None:
        """Corrects an earlier `take`: gives back `amount` units that weren't used, or charges more if negative.

        What would have overflowed the bucket in the meantime, had it never been taken, isn't given back to it.
        """
        self._refill(now)
        given = amount
        if amount > 0 and self._peaks is not None:
            since = [peak for peak in self._peaks if peak[0] > taken_at]
            given = max(0.0, min(amount, self.burst - max((peak[1] for peak in since), default=self._level)))
            for peak in since:
                peak[1] += given
        self._level = min(self.burst, self._level + given)
        for entry in self._log:
            if entry[0] >= taken_at:
                back = min(amount, entry[1])
                entry[1] -= back
                self._used -= back
                return

    def _note_peak(self, peaks: list[list[float]], now: float) -> None:
        while peaks and peaks[-1][1] <= self._level:
            peaks.pop()
        peaks.append([now, self._level])
        if peaks[0][0] < now - self.window_s:
            del peaks[: next(n for n, peak in enumerate(peaks) if peak[0] >= now - self.window_s)]

    def refused(self, now: float, retry_after_s: float | None) -> None:
        """The provider says that it has nothing left: its clock or its count is behind ours."""
        self._refill(now)
        if self.burst < 2:
            self._ease(min(self.MOST_EASED, self._eased + self.EASED))
        self._level = min(self._level, 0.0)
        if retry_after_s is not None:
            self.held_until = max(self.held_until, now + retry_after_s)


class ToldRate:
    """A limit as the provider's headers tell it: `limit`, `remaining`, and the time until all of it is back.

    `remaining` was true when the answered request was admitted, about when it was sent; requests sent since then are
    subtracted, and the time since then is added at the rate that `limit`, `remaining` and `reset` imply.
    """

    __slots__ = ("_level", "_updated_at", "held_until", "known", "limit", "rate")

    def __init__(self) -> None:
        self.known = False
        """Both the limit and its rate have been told."""
        self.limit = math.inf
        self.rate = math.inf
        self.held_until = -math.inf
        self._level = math.inf
        self._updated_at = -math.inf

    def fits(self, amount: float) -> bool:
        return amount <= self.limit

    def _refill(self, now: float) -> None:
        if now > self._updated_at:
            if self.known and self._updated_at > -math.inf:
                self._level = min(self.limit, self._level + (now - self._updated_at) * self.rate)
            self._updated_at = now

    def ready_at(self, now: float, amount: float = 1.0) -> float:
        if not self.known:
            return max(now, self.held_until)
        self._refill(now)
        missing = min(amount, self.limit) - self._level
        return max(now if missing <= _SLACK else now + missing / self.rate, self.held_until)

    def take(self, now: float, amount: float = 1.0) -> None:
        """Counts a request."""
        if self.limit < math.inf:
            self._refill(now)
            self._level -= amount

    def told(
        self, now: float, sent_at: float, since: float, limit: float, remaining: float, reset_s: float | None
    ) -> None:
        """Takes over what the answer to the request sent at `sent_at` said; `since` units have been sent after it."""
        used = limit - remaining
        if reset_s and used > 0:
            # `remaining` is rounded down: what is used is half a unit less on average, and up to a whole one.
            rate = max(used - 0.5, 0.5 * used) / reset_s
            changed = limit != self.limit or not self.known
            trust = 1.0 if changed else min(0.5, 0.02 * used)
            self.rate = rate if changed else self.rate + trust * (rate - self.rate)
        self.limit = limit
        self.known = limit < math.inf and self.rate < math.inf
        if self.known:
            self._level = min(limit, remaining - since + max(0.0, now - sent_at) * self.rate)
            self._updated_at = now

    def refused(self, now: float, retry_after_s: float | None) -> None:
        self._refill(now)
        self._level = min(self._level, 0.0)
        if retry_after_s is not None:
            self.held_until = max(self.held_until, now + retry_after_s)


class LearnedRate:
    """Finds a request rate that nobody states, from the instants at which the provider says no.

    Constants, and why that side of the trade:
    """

    ABOVE = 1.02
    """Pace over estimate. Lower: the estimate goes stale. Higher: more rejections, this share of all requests."""
    BELOW = 0.97
    """Pace over estimate where a rejection costs a long Retry-After: better a little idle than a pause."""
    SURE = 50
    """Accepted requests after which an estimate is trusted for as many more; then the pace grows to look for more."""
    SHORT = 6
    """Accepted requests that suffice to notice that the limit is another one than before (to about a sixth)."""
    MEMORY = 200
    """Accepted requests that an estimate looks back on."""
    GROWN = 1.25
    """Recent pace over estimate from which a rejection starts a new estimate from the last `RECENT` requests alone."""
    RECENT = 16
    MISSES = 3
    """Rejections with nothing accepted between them after which the estimate is halved and forgotten."""
    DOUBLING_S = 0.1
    """Least time in which the pace doubles (four round trips of a rejection, if that is more): a stalled client must
    not take its own silence for consent."""
    CATCH_UP_S = 0.02
    """A late caller may make up for this much: timers fire late, and pace lost to that is lost for good."""

    __slots__ = (
        "_accepted_at_reject",
        "_grown_at",
        "_growth",
        "_misses",
        "_next",
        "_pause_s",
        "_points",
        "_reacted_at",
        "_rejects",
        "_round_trip_s",
        "_sent",
        "_start",
        "_times",
        "armed",
        "held_until",
        "rate",
    )

    def __init__(self) -> None:
        self.armed = False
        self.rate = math.inf
        self.held_until = -math.inf
        self._next = -math.inf
        self._pause_s = 0.0
        self._sent = 0
        self._rejects = 0
        self._start = math.nan
        self._accepted_at_reject = 0
        self._misses = 0
        self._reacted_at = -math.inf
        self._growth = 0.0
        self._grown_at = -math.inf
        self._round_trip_s = 0.0
        self._times: deque[float] = deque(maxlen=self.RECENT)
        self._points: deque[tuple[float, int]] = deque()

    def ready_at(self, now: float) -> float:
        if not self.armed:
            return now if now >= self.held_until else self.held_until
        return max(now, self._next, self.held_until)

    def take(self, now: float) -> int:
        """Counts a request that leaves; returns its number, for `rejected`."""
        if self._sent == 0:
            self._start = now
        self._sent += 1
        if self.armed and self.rate < math.inf:
            self._times.append(now)
            self._grow(now)
            self._next = max(self._next, now - self.CATCH_UP_S) + 1.0 / self.pace
        return self._sent

    @property
    def pace(self) -> float:
        """Requests/s that may leave now: the estimate, and more the longer nothing has been rejected."""
        base = self.BELOW if self._pause_s * self.rate > 3 else self.ABOVE
        return self.rate * base * 2.0**self._growth

    def _grow(self, now: float) -> None:
        """Doubles the pace with each `sure` requests accepted, but not before their rejections could have come back."""
        sure, points = float(self.SURE), self._points
        if self._pause_s * self.rate > 3:
            sure = max(sure, 10 * self._pause_s * self.rate)
        if points:
            sure = max(2.0, min(sure, points[-1][1] - points[0][1]))
        accepted = self._sent - self._rejects - self._accepted_at_reject
        passed_s = now - max(self._grown_at, self._reacted_at)
        earliest = self._growth + max(0.0, passed_s) / max(self.DOUBLING_S, 4 * self._round_trip_s)
        self._growth = max(0.0, min(6.0, (accepted - sure) / sure, earliest))
        self._grown_at = now

    def rejected(self, now: float, number: int, sent_at: float, retry_after_s: float | None) -> None:
        """Request `number`, sent at `sent_at`, was turned away for its rate."""
        self._rejects += 1
        self._growth = 0.0
        self._round_trip_s += 0.2 * (now - sent_at - self._round_trip_s)
        self._pause_s = retry_after_s or 0.0
        if retry_after_s is not None:
            self.held_until = max(self.held_until, now + retry_after_s)
        accepted = max(0, number - self._rejects)
        points = self._points
        if points and sent_at <= points[-1][0]:
            self._next = max(self._next, now + 1.0 / self.rate)
            return  # overtaken by a later one, which has said all
        while points and points[-1][1] > accepted:
            points.pop()  # counted as accepted what wasn't: its rejection was still on its way
        self._accepted_at_reject = self._sent - self._rejects
        if points and sent_at < self._reacted_at:
            # It left before we knew of the last rejection: the same empty bucket, seen a little later.
            points[-1] = (sent_at, accepted)
            self._next = max(self._next, now + 1.0 / self.rate)
            return
        self._reacted_at = now
        self._misses = self._misses + 1 if points and accepted == points[-1][1] else 0
        if self._misses > self.MISSES:
            self.rate /= 2
            self._misses = 0
            points.clear()
        self._forget_slower(sent_at, accepted)
        points.append((sent_at, accepted))
        self.rate = self._estimate()
        self._next = now + 2.0 ** min(max(0, self._misses - 1), 2) / self.rate

    def _forget_slower(self, sent_at: float, accepted: int) -> None:
        """Starts from the last requests alone where the pace had grown well above the estimate and was accepted."""
        times, points = self._times, self._points
        if len(times) < self.RECENT or not points:
            return
        spread = min(times[-1], sent_at) - times[0]
        if spread > 0 and self.rate * self.GROWN * spread < self.RECENT - 1 <= accepted - points[-1][1]:
            points.clear()
            points.append((times[0], accepted - self.RECENT + 1))

    def _estimate(self) -> float:
        """Requests/s accepted between rejections, over as much of the past as agrees with the latest of it."""
        points = self._points
        last_at, last = points[-1]
        while len(points) > 2 and last - points[1][1] >= self.MEMORY:
            points.popleft()
        if len(points) == 1:
            return self.rate if self.rate < math.inf else max(1, last) / max(1e-3, last_at - self._start)
        for n in range(len(points) - 2, 0, -1):
            at, accepted = points[n]
            short, whole = last - accepted, (last - points[0][1]) / (last_at - points[0][0])
            if short >= self.SHORT or (short + 1) / (last_at - at) < 0.5 * whole:
                if not 0.65 <= short / (last_at - at) / max(whole, 1e-9) <= 1.5:
                    for _ in range(n):
                        points.popleft()
                break
        accepted = last - points[0][1]
        estimate = (accepted + 0.5) / (last_at - points[0][0])
        # So few are only an upper bound: they can lower the estimate; that it is too low, the growing pace finds out.
        return min(self.rate, estimate) if accepted < self.SHORT else estimate
