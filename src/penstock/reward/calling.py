"""How calls of an accelerated function are made: options that can change while they run, and what became of them.

Decides which options are possible, what a call does about each error, and how a file's `[functions.NAME]` changes
options: all or nothing. Refuses to know how an attempt is made (`accelerated`) and whose turn it is (`turns`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from penstock.errors import ConfigError
from penstock.reward.failures import DeadlinePassed
from penstock.reward.headers import retry_after_s
from penstock.reward.limits import FunctionLimits, load_functions
from penstock.reward.retry import Kind, kind_of_error
from penstock.reward.turns import Turns

__all__ = [
    "NO_DEFAULT",
    "Call",
    "CallOptions",
    "InForce",
    "Stats",
    "checked_limits",
    "clock",
    "default_for",
    "named",
    "reload_functions",
]

NO_DEFAULT: Any = object()
clock = time.monotonic

MOST_TURNED_AWAY = 64
"""Times that one call may be turned away (429) before it counts as failed, where no deadline ends it earlier."""
PAUSE_S = 0.1
"""Pause after the second failure of a call, doubled with each further one; none after the first and the last."""


@dataclasses.dataclass
class Stats:
    """What became of a function's calls so far."""

    calls: int = 0
    done: int = 0
    failed: int = 0
    """Calls that raised or got the default."""
    retries: int = 0
    hedges: int = 0
    late: int = 0
    """Calls whose deadline passed."""
    running: int = 0
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False, compare=False)

    def begin(self) -> None:
        with self._lock:
            self.calls += 1
            self.running += 1

    def end(self, error: BaseException | None) -> None:
        """A call is over; a cancelled one is neither done nor failed."""
        with self._lock:
            self.running -= 1
            if error is None:
                self.done += 1
            elif not isinstance(error, asyncio.CancelledError):
                self.failed += 1
                self.late += isinstance(error, DeadlinePassed)

    def retry(self) -> None:
        with self._lock:
            self.retries += 1

    def hedge(self, share: float) -> bool:
        """Counts a second start, if the share of all calls allows one."""
        with self._lock:
            if self.hedges + 1 > share * self.calls:
                return False
            self.hedges += 1
            return True


@dataclasses.dataclass(frozen=True)
class CallOptions:
    timeout_s: float | None
    attempts: int
    hedge_after_s: float | None
    hedge_share: float
    key: Callable[..., Hashable] | None
    priority: float | Callable[..., float]
    default: Any
    retry_on: tuple[type[BaseException], ...]
    classify: Callable[[BaseException], Kind | None] | None
    on_call: Callable[[str, float, BaseException | None], None] | None

    def __post_init__(self) -> None:
        for name in ("timeout_s", "hedge_after_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"accelerate: {name} = {value!r}: must be greater than 0")
        if self.attempts < 1:
            raise ConfigError(f"accelerate: attempts = {self.attempts!r}: must be at least 1")
        if not 0 <= self.hedge_share <= 1:
            raise ConfigError(f"accelerate: hedge_share = {self.hedge_share!r}: must be from 0 to 1")
        if not callable(self.priority):
            checked_priority(self.priority)

    def with_limits(self, said: FunctionLimits) -> CallOptions:
        """These, but for what a file says."""
        names = ("timeout_s", "attempts", "hedge_after_s", "hedge_share", "priority")
        changes = {name: value for name in names if (value := getattr(said, name)) is not None}
        return dataclasses.replace(self, **changes)

    @property
    def hedged(self) -> bool:
        return self.hedge_after_s is not None and self.hedge_share > 0

    def kind(self, error: BaseException) -> Kind:
        if self.retry_on and isinstance(error, self.retry_on):
            return Kind.BROKEN
        return kind_of_error(error, self.classify)


def default_for(error: BaseException, default: Any) -> Any:
    """What stands for a failed call: the default, or what it makes, told of the error where it asks for one."""
    if not callable(default):
        return default
    try:
        parameters = inspect.signature(default).parameters.values()
    except (ValueError, TypeError):  # a built-in that doesn't tell
        return default()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = sum(1 for p in parameters if p.kind in by_place and p.default is p.empty)
    return default(error) if needed == 1 else default()


def checked_priority(priority: object) -> float:
    """Raises ConfigError for what would put everybody's queue out of order."""
    if isinstance(priority, int | float) and math.isfinite(priority):
        return priority
    raise ConfigError(f"accelerate: priority = {priority!r}: must be a finite number")


class Call:
    """One call's way through its attempts, sync and async alike: what to do about each error."""

    __slots__ = ("args", "began", "broken", "deadline", "key", "kwargs", "options", "priority", "turned_away")

    def __init__(self, options: CallOptions, args: Any, kwargs: Any) -> None:
        self.options = options
        self.args = args
        self.kwargs = kwargs
        self.began = clock()
        self.deadline = math.inf if options.timeout_s is None else self.began + options.timeout_s
        self.key = options.key(*args, **kwargs) if options.key is not None else None
        priority = options.priority
        self.priority = checked_priority(priority(*args, **kwargs)) if callable(priority) else priority
        self.broken = 0
        self.turned_away = 0

    def pause_s(self, error: BaseException, turns: Turns) -> float | None:
        """Seconds to wait before the next attempt; None where there is none, which is found out without waiting."""
        kind = self.options.kind(error)
        if kind is Kind.BROKEN:
            self.broken += 1
            if self.broken >= self.options.attempts:
                return None
            pause_s = 0.0 if self.broken == 1 else PAUSE_S * 2.0 ** (self.broken - 2)
        elif kind is Kind.TURNED_AWAY:
            self.turned_away += 1
            if self.turned_away > MOST_TURNED_AWAY or (self.options.attempts == 1 and self.deadline == math.inf):
                return None
            asked_s = _asked_s(error)
            pause_s = min(5.0, PAUSE_S * 2.0 ** (self.turned_away - 1)) if asked_s is None else asked_s
            turns.hold(self.key, clock(), pause_s)
        else:
            return None
        return pause_s if clock() + pause_s < self.deadline else None

    def late(self, name: str) -> DeadlinePassed:
        return DeadlinePassed(f"{name} had no result after {clock() - self.began:.3g} s")


def _asked_s(error: BaseException) -> float | None:
    """What the error's own answer says about waiting (`error.response.headers`, as httpx and its users have it)."""
    headers = getattr(getattr(error, "response", None), "headers", None) or getattr(error, "headers", None)
    try:
        return retry_after_s(headers, time.time()) if headers is not None else None
    except (TypeError, AttributeError):
        return None


class InForce:
    """The options in force for one decorated function, or for one set of `with_options` over it."""

    __slots__ = ("__weakref__", "_changes", "_over", "declared", "options")

    def __init__(self, declared: CallOptions, changes: dict[str, Any] | None = None) -> None:
        self.declared = declared
        """As the decorator says."""
        self.options = declared
        self._changes = changes or {}
        self._over: weakref.WeakSet[InForce] = weakref.WeakSet()

    def with_changes(self, changes: dict[str, Any]) -> InForce:
        """These with changes, which also stay over whatever these become."""
        over = InForce(dataclasses.replace(self.options, **changes), changes)
        self._over.add(over)
        return over

    def checked(self, options: CallOptions) -> None:
        """Raises ConfigError where `with_options` could not stay over these."""
        for over in self._over:
            over.checked(dataclasses.replace(options, **over._changes))

    def become(self, options: CallOptions) -> None:
        self.options = options
        for over in self._over:
            over.become(dataclasses.replace(options, **over._changes))


class _Named:
    """One decorated function, as a file can name it."""

    __slots__ = ("__weakref__", "_limits", "in_force", "turns")

    def __init__(self, in_force: InForce, turns: Turns) -> None:
        self.in_force = in_force
        self.turns = turns
        self._limits = (turns.concurrency, turns.requests_per_minute, turns.burst)

    def planned(self, said: FunctionLimits, name: str) -> Callable[[], None]:
        """What to do so that the function follows the file; nothing is changed yet.

        Raises:
            ConfigError: the file and the decorator together are impossible.
        """
        options = self.in_force.declared.with_limits(said)
        self.in_force.checked(options)
        concurrency, rate, burst = self._limits
        concurrency = said.concurrency if said.concurrency is not None else concurrency
        rate = said.requests_per_minute if said.requests_per_minute is not None else rate
        burst = said.burst if said.burst is not None else burst
        checked_limits(concurrency, rate, burst, f"functions.{name}")

        def apply() -> None:
            self.in_force.become(options)
            self.turns.redeclare(concurrency, rate, burst, time.monotonic())

        return apply


_NAMED: dict[str, weakref.WeakSet[_Named]] = {}
_NAMING = threading.Lock()


def named(name: str, in_force: InForce, turns: Turns) -> object:
    """Lets a file change a function by its name, for as long as what is returned is kept."""
    entry = _Named(in_force, turns)
    with _NAMING:
        _NAMED.setdefault(name, weakref.WeakSet()).add(entry)
    return entry


def reload_functions(path: str | os.PathLike[str]) -> list[str]:
    """Applies a file's `[functions.NAME]` to the accelerated functions of this process, all or nothing.

    Calls that run or wait go on; waiters take their turns by the other limits, the next attempt of each call goes by
    the other options. What a file no longer says is as the decorator says again. Returns the names that the file sets.

    Raises:
        ConfigError: the file is wrong, names a function that this process doesn't have, or asks for the impossible.
    """
    said = load_functions(path)
    with _NAMING:
        known = {name: list(entries) for name, entries in _NAMED.items() if entries}
        if unknown := sorted(said.keys() - known.keys()):
            there = ", ".join(sorted(known)) or "none"
            raise ConfigError(
                f"{path}: functions.{unknown[0]}: no accelerated function has this name; there are: {there}"
            )
        plans = [
            entry.planned(said.get(name, FunctionLimits()), name)
            for name, entries in known.items()
            for entry in entries
        ]
        for apply in plans:
            apply()
    return sorted(said)


def checked_limits(concurrency: int | None, requests_per_minute: float | None, burst: int | None, where: str) -> None:
    """Raises ConfigError where a limit is impossible."""
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"{where}: concurrency = {concurrency!r}: must be at least 1")
    if requests_per_minute is not None and not requests_per_minute > 0:
        raise ConfigError(f"{where}: requests_per_minute = {requests_per_minute!r}: must be greater than 0")
    if burst is not None and (burst < 1 or requests_per_minute is None):
        raise ConfigError(f"{where}: burst = {burst!r}: must be at least 1, and needs requests_per_minute")
