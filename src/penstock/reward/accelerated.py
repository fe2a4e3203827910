"""`@accelerate`: deadline, retry, hedging, limits and a default for any function, sync or async.

A decorated function stays what it was: async ones stay coroutine functions, sync ones stay plain functions, type hints
and signature are kept. Decides how one call goes; whose turn it is belongs to `turns`, what an exception means to
`retry`. A sync call with a deadline runs in a helper thread (with the caller's context variables), any other in the
caller's own. Limits hold across all loops and threads of a process; a call made inside another one of the same function
and key counts as part of it, since waiting for its own turn to end would never end.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from penstock.errors import ConfigError
from penstock.reward.calling import NO_DEFAULT, CallOptions, InForce, Stats, checked_limits, named
from penstock.reward.failures import DeadlinePassed
from penstock.reward.headers import retry_after_s
from penstock.reward.helpers import HELPERS, TooLate
from penstock.reward.retry import Kind
from penstock.reward.turns import Turns

__all__ = ["Accelerated", "Stats", "accelerate"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
_clock = time.monotonic

MOST_TURNED_AWAY = 64
"""Times that one call may be turned away (429) before it counts as failed, where no deadline ends it earlier."""
PAUSE_S = 0.1
"""Pause after the second failure of a call, doubled with each further one; none after the first and the last."""


class Accelerated(Protocol, Generic[P, R_co]):
    """A decorated function: callable as before, and it tells what became of its calls."""

    stats: Stats
    turns: Turns

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def with_options(self, **changes: Any) -> Accelerated[P, R_co]:
        """The same function, sharing limits and statistics, with other options for the calls made through it."""
        ...


@overload
def accelerate(function: Callable[P, R], /) -> Accelerated[P, R]: ...


@overload
def accelerate(
    *,
    timeout_s: float | None = None,
    attempts: int = 1,
    hedge_after_s: float | None = None,
    hedge_share: float = 0.05,
    concurrency: int | None = None,
    requests_per_minute: float | None = None,
    burst: int | None = None,
    key: Callable[..., Hashable] | None = None,
    priority: float | Callable[..., float] = 0.0,
    default: Any = NO_DEFAULT,
    retry_on: tuple[type[BaseException], ...] = (),
    classify: Callable[[BaseException], Kind | None] | None = None,
    on_call: Callable[[str, float, BaseException | None], None] | None = None,
    name: str = "",
) -> Callable[[Callable[P, R]], Accelerated[P, R]]: ...


def accelerate(
    function: Callable[P, R] | None = None,
    /,
    *,
    timeout_s: float | None = None,
    attempts: int = 1,
    hedge_after_s: float | None = None,
    hedge_share: float = 0.05,
    concurrency: int | None = None,
    requests_per_minute: float | None = None,
    burst: int | None = None,
    key: Callable[..., Hashable] | None = None,
    priority: float | Callable[..., float] = 0.0,
    default: Any = NO_DEFAULT,
    retry_on: tuple[type[BaseException], ...] = (),
    classify: Callable[[BaseException], Kind | None] | None = None,
    on_call: Callable[[str, float, BaseException | None], None] | None = None,
    name: str = "",
) -> Any:
    """Gives a function a deadline, retries, hedging, limits and a default.

    Args:
        timeout_s: longest time for a call, waiting for its turn included; then `DeadlinePassed` or the default.
        attempts: tries of a call whose error another try may mend; being turned away (429) costs none.
        hedge_after_s: age at which a call is started a second time, if a turn is free; the first answer counts. A sync
            call that lost goes on in its thread, unheard.
        hedge_share: second starts, as a share of all calls.
        concurrency, requests_per_minute, burst: limits for each key.
        key: `key(*args, **kwargs)` names the limit that a call counts against; idle keys are forgotten.
        priority: number, or `priority(*args, **kwargs)`; who waits with a higher one goes first.
        default: returned instead of raising; a callable is called (and awaited) to make it.
        retry_on: exception types that are worth another attempt, whatever `classify` says.
        classify: `classify(error)` returns a `Kind`, or None to leave it to the built-in rules.
        on_call: `on_call(outcome, seconds, error)` after each call; outcome is "done", "failed" or "late".
        name: how a file's `[functions.NAME]` calls it (`reload_functions`); the function's own name if empty.

    Raises:
        ConfigError: an option is impossible.
    """
    options = CallOptions(
        timeout_s, attempts, hedge_after_s, hedge_share, key, priority, default, retry_on, classify, on_call
    )
    checked_limits(concurrency, requests_per_minute, burst, "accelerate")

    def decorate(function: Callable[P, R]) -> Any:
        in_force, turns = InForce(options), Turns(concurrency, requests_per_minute, burst)
        made = _decorated(function, in_force, turns, Stats())
        made.named = named(name or getattr(function, "__name__", type(function).__name__), in_force, turns)
        return made

    return decorate if function is None else decorate(function)


def _decorated(function: Callable[..., Any], in_force: InForce, turns: Turns, stats: Stats) -> Any:
    # An object with an async `__call__` is async, too, though it isn't a coroutine function itself.
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    made: Any = _async(function, in_force, turns, stats) if is_async else _sync(function, in_force, turns, stats)

    def with_options(**changes: Any) -> Any:
        try:
            changed = in_force.with_changes(changes)
        except TypeError:
            known = [field.name for field in dataclasses.fields(CallOptions)]
            wrong = sorted(changes.keys() - set(known))
            raise ConfigError(f"with_options: unknown option '{wrong[0]}'; known: {', '.join(known)}") from None
        return _decorated(function, changed, turns, stats)

    made.stats, made.turns, made.with_options = stats, turns, with_options
    return made


class _Call:
    """One call's way through its attempts, sync and async alike: what to do about each error."""

    __slots__ = ("args", "began", "broken", "deadline", "key", "kwargs", "options", "priority", "turned_away")

    def __init__(self, options: CallOptions, args: Any, kwargs: Any) -> None:
        self.options = options
        self.args = args
        self.kwargs = kwargs
        self.began = _clock()
        self.deadline = math.inf if options.timeout_s is None else self.began + options.timeout_s
        self.key = options.key(*args, **kwargs) if options.key is not None else None
        self.priority = options.priority(*args, **kwargs) if callable(options.priority) else options.priority
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
            turns.hold(self.key, _clock(), pause_s)
        else:
            return None
        return pause_s if _clock() + pause_s < self.deadline else None

    def late(self, name: str) -> DeadlinePassed:
        return DeadlinePassed(f"{name} had no result after {_clock() - self.began:.3g} s")


def _asked_s(error: BaseException) -> float | None:
    """What the error's own answer says about waiting (`error.response.headers`, as httpx and its users have it)."""
    headers = getattr(getattr(error, "response", None), "headers", None) or getattr(error, "headers", None)
    try:
        return retry_after_s(headers, time.time()) if headers is not None else None
    except (TypeError, AttributeError):
        return None


def _ended(options: CallOptions, stats: Stats, call: _Call, error: BaseException | None) -> None:
    stats.end(error)
    if options.on_call is not None:
        outcome = "done" if error is None else "late" if isinstance(error, DeadlinePassed) else "failed"
        options.on_call(outcome, _clock() - call.began, error)


def _async(
    function: Callable[..., Awaitable[Any]], in_force: InForce, turns: Turns, stats: Stats
) -> Callable[..., Coroutine[Any, Any, Any]]:
    name = getattr(function, "__qualname__", repr(function))

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        stats.begin()
        options = in_force.options
        call = _Call(options, args, kwargs)
        error: BaseException | None = None
        limit: asyncio.Timeout | None = None
        try:
            if call.deadline < math.inf:
                async with asyncio.timeout(options.timeout_s) as limit:
                    value = await attempts(call)
            else:
                value = await attempts(call)
        except asyncio.CancelledError as cancelled:
            stats.end(cancelled)
            raise
        except Exception as raised:  # noqa: BLE001 - any error of the user's function ends the call, and is raised below
            error = call.late(name) if limit is not None and limit.expired() else raised
        _ended(options, stats, call, error)
        if error is None:
            return value
        if options.default is NO_DEFAULT:
            raise error
        made = options.default() if callable(options.default) else options.default
        return await made if inspect.isawaitable(made) else made

    async def attempts(call: _Call) -> Any:
        while True:
            held = _enter(turns, call)
            if held is not None and not turns.take(call.key, _clock()):
                await _turn(turns, call, held)
            try:
                if call.options.hedged:
                    return await _hedge(function, call, turns, stats)
                return await function(*call.args, **call.kwargs)
            except Exception as error:
                call.options = in_force.options
                pause_s = call.pause_s(error, turns)
                if pause_s is None:
                    raise
            finally:
                if held is not None:
                    _HELD.reset(held)
                    turns.give_back(call.key, _clock())
            stats.retry()
            if pause_s:
                await asyncio.sleep(pause_s)

    return call_async


_HELD: contextvars.ContextVar[frozenset[tuple[int, Hashable]]] = contextvars.ContextVar("turns", default=frozenset())


def _enter(turns: Turns, call: _Call) -> contextvars.Token[frozenset[tuple[int, Hashable]]] | None:
    """Notes that this context has a turn of this function and key; None where no turn is needed, or it has one."""
    if not turns.limited:
        return None
    held, mine = _HELD.get(), (id(turns), call.key)
    return None if mine in held else _HELD.set(held | {mine})


async def _turn(turns: Turns, call: _Call, held: contextvars.Token[frozenset[tuple[int, Hashable]]]) -> None:
    """Waits for a turn; cancellation (and with it the deadline) gives it up."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    turn = turns.wait(call.key, _clock(), call.priority, lambda: loop.call_soon_threadsafe(woken.set))
    try:
        while not turn.granted:
            look_at = turns.look(call.key, _clock())
            if turn.granted:
                return
            if look_at == math.inf:
                await woken.wait()
            else:
                handle = loop.call_later(max(0.0, look_at - _clock()), woken.set)
                await woken.wait()
                handle.cancel()
            woken.clear()
    except asyncio.CancelledError:
        _HELD.reset(held)
        turns.leave(turn, _clock())
        raise


async def _hedge(function: Callable[..., Awaitable[Any]], call: _Call, turns: Turns, stats: Stats) -> Any:
    """Runs a call, and once more beside it when it takes long; the first success counts, the other is cancelled."""
    options, limited = call.options, turns.limited

    async def run() -> Any:
        return await function(*call.args, **call.kwargs)

    async def second() -> Any:
        try:
            return await run()
        finally:
            if limited:
                turns.give_back(call.key, _clock())

    tasks = {asyncio.ensure_future(run())}
    try:
        done, _ = await asyncio.wait(tasks, timeout=options.hedge_after_s)
        if not done and (not limited or turns.take(call.key, _clock())):
            if stats.hedge(options.hedge_share):
                tasks.add(asyncio.ensure_future(second()))
            elif limited:
                turns.give_back(call.key, _clock())
        pending = tasks
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            good = [task for task in done if task.exception() is None]
            if good or not pending:
                return (good or list(done))[0].result()
    finally:
        losers = [task for task in tasks if not task.done()]
        for task in losers:
            task.cancel()
        if losers:
            await asyncio.wait(losers)
        for task in losers:
            if not task.cancelled():
                task.exception()  # what a loser raised on its way out decides nothing


def _hedge_sync(function: Callable[..., Any], call: _Call, turns: Turns, stats: Stats) -> Any:
    """As `_hedge`, in threads. The second one's turn is over when its function returns, heard or not."""
    options, limited = call.options, turns.limited
    run = functools.partial(function, *call.args, **call.kwargs)

    def run_second() -> Any:
        try:
            return run()
        finally:
            if limited:
                turns.give_back(call.key, _clock())

    def second() -> Callable[[], Any] | None:
        if limited and not turns.take(call.key, _clock()):
            return None
        if stats.hedge(options.hedge_share):
            return run_second
        if limited:
            turns.give_back(call.key, _clock())
        return None

    assert options.hedge_after_s is not None
    return HELPERS.race(run, second, options.hedge_after_s, call.deadline - _clock())


def _sync(function: Callable[..., Any], in_force: InForce, turns: Turns, stats: Stats) -> Callable[..., Any]:
    name = getattr(function, "__qualname__", repr(function))

    @functools.wraps(function)
    def call_sync(*args: Any, **kwargs: Any) -> Any:
        stats.begin()
        options = in_force.options
        call = _Call(options, args, kwargs)
        error: BaseException | None = None
        try:
            value = attempts(call)
        except Exception as raised:  # noqa: BLE001 - any error of the user's function ends the call, and is raised below
            error = raised
        except BaseException as interrupted:
            stats.end(interrupted)
            raise
        _ended(options, stats, call, error)
        if error is None:
            return value
        if options.default is NO_DEFAULT:
            raise error
        made = options.default() if callable(options.default) else options.default
        if inspect.isawaitable(made):
            cast(Any, made).close()
            raise ConfigError(f"{name} is not async: its default must be a value or a sync function")
        return made

    def attempts(call: _Call) -> Any:
        while True:
            held = _enter(turns, call)
            if held is not None and not turns.take(call.key, _clock()):
                _turn_sync(turns, call, name, held)
            try:
                if call.options.hedged:
                    return _hedge_sync(function, call, turns, stats)
                if call.deadline == math.inf:
                    return function(*call.args, **call.kwargs)
                run = functools.partial(function, *call.args, **call.kwargs)
                return HELPERS.call(run, call.deadline - _clock())
            except TooLate:
                raise call.late(name) from None
            except Exception as error:
                call.options = in_force.options
                pause_s = call.pause_s(error, turns)
                if pause_s is None:
                    raise
            finally:
                if held is not None:
                    _HELD.reset(held)
                    turns.give_back(call.key, _clock())
            stats.retry()
            if pause_s:
                time.sleep(pause_s)

    return call_sync


def _turn_sync(turns: Turns, call: _Call, name: str, held: contextvars.Token[frozenset[tuple[int, Hashable]]]) -> None:
    """Waits for a turn in a thread.

    Raises:
        DeadlinePassed: the turn didn't come in time.
    """
    woken = threading.Event()
    turn = turns.wait(call.key, _clock(), call.priority, woken.set)
    try:
        while not turn.granted:
            look_at = min(turns.look(call.key, _clock()), call.deadline)
            if turn.granted:
                return
            woken.wait(None if look_at == math.inf else max(0.0, look_at - _clock()))
            woken.clear()
            if not turn.granted and _clock() >= call.deadline:
                raise call.late(name)
    except BaseException:
        _HELD.reset(held)
        turns.leave(turn, _clock())
        raise
