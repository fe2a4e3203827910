"""What an answer, or its absence, means for a job, and how many retries a pool may make.

The one place where statuses, exceptions and error bodies become a `Kind`. Decides neither when nor where a retry
happens (`schedule`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

import msgspec

from penstock.reward.headers import Told

__all__ = [
    "BROKEN",
    "CANCELLED",
    "DONE",
    "FINAL",
    "TURNED_AWAY",
    "Kind",
    "Outcome",
    "RetryBudget",
    "kind_of_error",
    "kind_of_status",
]


class Kind(enum.Enum):
    DONE = "done"
    TURNED_AWAY = "turned away"
    """Not processed, for want of capacity (429, 503, 529): costs the job no attempt, and goes where there is room."""
    BROKEN = "broken"
    """Time-out, reset, truncated body, 408, 5xx: another attempt may succeed."""
    SPENT = "spent"
    """The account at this provider has no money left: no use asking it again."""
    FINAL = "final"
    """400, 401, 403, 404, 422 and their like: no attempt anywhere can mend it."""
    CANCELLED = "cancelled"
    """Given up on our side: the other attempt of a hedge won, or the caller left."""


# Looked up once: until Python 3.12, finding an enumeration's member costs as much as a call, on every job's way.
DONE, TURNED_AWAY, BROKEN, FINAL, CANCELLED = Kind.DONE, Kind.TURNED_AWAY, Kind.BROKEN, Kind.FINAL, Kind.CANCELLED


class Outcome(msgspec.Struct, frozen=True):
    """How one attempt ended, as far as scheduling needs to know."""

    kind: Kind
    cause: str = ""
    status: int = 0
    tokens: float | None = None
    """Actual tokens, prompt and output, where the answer says."""
    retry_after_s: float | None = None
    told: Told | None = None
    body: str = ""
    """Start of an error's text."""
    error: BaseException | None = None
    """The exception, where there was one."""
    unreachable: bool = False
    """Nobody was there to be asked: no such name, or the connection was refused."""

    def of_kind(self, kind: Kind, cause: str | None = None) -> Outcome:
        """The same end, taken for something else."""
        return msgspec.structs.replace(self, kind=kind, cause=self.cause if cause is None else cause)


_SPENT_WORDS = (
    "insufficient_quota",
    "billing_hard_limit",
    "billing_not_active",
    "credit balance",
    "exceeded your current quota",
)


def kind_of_status(status: int, body: str = "") -> Kind:
    """The kind of an HTTP answer. `body` is the start of an error's text, which tells a spent account from a limit."""
    if 200 <= status < 300:
        return Kind.DONE
    if status in (402, 429) and (status == 402 or any(word in body for word in _SPENT_WORDS)):
        return Kind.SPENT
    if status in (429, 503, 529):
        return Kind.TURNED_AWAY
    if status in (408, 409, 425) or status >= 500:
        return Kind.BROKEN
    return Kind.FINAL


def kind_of_error(error: BaseException, hook: Callable[[BaseException], Kind | None] | None = None) -> Kind:
    """The kind of an exception of a user's function: the hook's word first, then what the exception itself says.

    An exception with a `status`, `status_code` or `code` that is an HTTP status counts as that answer; connection
    errors and time-outs are worth another attempt; programming errors (TypeError, KeyError, ...) are final; anything
    else may be tried again.
    """
    if hook is not None and (said := hook(error)) is not None:
        return said
    for attribute in ("status", "status_code", "code"):
        status = getattr(error, attribute, None)
        if isinstance(status, int) and 400 <= status < 600:
            return kind_of_status(status, str(error))
    if isinstance(error, TimeoutError | ConnectionError | EOFError):
        return Kind.BROKEN
    if isinstance(
        error,
        TypeError
        | AttributeError
        | LookupError
        | NameError
        | AssertionError
        | NotImplementedError
        | ImportError
        | ValueError,
    ):
        return Kind.FINAL
    return Kind.BROKEN


class RetryBudget:
    """How many attempts beyond the first a pool may make: a share of its jobs, and a reserve that time refills.

    So a service that fails everything is asked at most `1 + share` times as often, not `attempts` times. A retry over
    the budget waits; it isn't refused.
    """

    REFILL_S = 100.0
    """Time in which an empty reserve is full again."""

    __slots__ = ("_left", "_share", "_updated_at", "reserve", "spent")

    def __init__(self, share: float, reserve: int) -> None:
        self._share = share
        self.reserve = float(reserve)
        self._left = float(reserve)
        self._updated_at = -math.inf
        self.spent = 0

    def redeclare(self, share: float, reserve: int) -> None:
        """Takes over another share and reserve; what is left stays, up to the reserve."""
        self._share, self.reserve = share, float(reserve)
        self._left = min(self._left, self.reserve)

    def job(self) -> None:
        """A job was queued: it earns its share."""
        self._left = min(self.reserve, self._left + self._share)

    def _refill(self, now: float) -> None:
        if self._updated_at > -math.inf and now > self._updated_at:
            self._left = min(self.reserve, self._left + (now - self._updated_at) * self.reserve / self.REFILL_S)
        self._updated_at = max(now, self._updated_at)

    def take(self, now: float) -> bool:
        self._refill(now)
        if self._left < 1.0 - 1e-9:
            return False
        self._left -= 1.0
        self.spent += 1
        return True

    def ready_at(self, now: float) -> float:
        self._refill(now)
        return now if self._left >= 1.0 - 1e-9 else now + (1.0 - self._left) * self.REFILL_S / self.reserve
