"""`@accelerate`: deadline, retry, hedging, limits and a default for any function, sync or async.

A decorated function stays what it was: async ones stay coroutine functions, sync ones stay plain functions, type hints
and signature are kept. Decides how one call goes; whose turn it is belongs to `turns`, how it is waited for to
`waiting`, what an exception means for the call to `calling`, a second start to `racing`. A sync call with a deadline
runs in a helper thread (with the caller's context variables), any other in the caller's own. Limits hold across all
loops and threads of a process; a call made inside another one of the same function and key counts as part of it, since
waiting for its own turn to end would never end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from penstock.errors import ConfigError
from penstock.reward.calling import (
    NO_DEFAULT,
    Call,
    CallOptions,
    InForce,
    Stats,
    checked_limits,
    clock,
    default_for,
    named,
)
from penstock.reward.failures import DeadlinePassed
from penstock.reward.helpers import HELPERS, TooLate
from penstock.reward.racing import race, race_sync
from penstock.reward.retry import Kind
from penstock.reward.turns import Turns
from penstock.reward.waiting import HELD, enter, wait, wait_sync

__all__ = ["Accelerated", "Stats", "accelerate"]

_LOG = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


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
        priority: finite number, or `priority(*args, **kwargs)`; who waits with a higher one goes first.
        default: returned instead of raising; a callable is called (and awaited) to make it, with the error if it needs
            one argument.
        retry_on: exception types that are worth another attempt, whatever `classify` says.
        classify: `classify(error)` returns a `Kind`, or None to leave it to the built-in rules.
        on_call: `on_call(outcome, seconds, error)` after each call; outcome is "done", "failed" or "late". What
            it raises is logged.
        name: how a file's `[functions.NAME]` calls it (`reload_functions`); the function's own name if empty.

    A call raises what `key` or `priority` raise, and ConfigError for a priority that is no finite number.

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


def _ended(options: CallOptions, stats: Stats, call: Call, error: BaseException | None) -> None:
    stats.end(error)
    if options.on_call is not None:
        outcome = "done" if error is None else "late" if isinstance(error, DeadlinePassed) else "failed"
        try:
            options.on_call(outcome, clock() - call.began, error)
        except Exception:  # noqa: BLE001 - a listener's fault must not lose an answer
            _LOG.exception("on_call raised; the call goes on as if it had not")


def _async(
    function: Callable[..., Awaitable[Any]], in_force: InForce, turns: Turns, stats: Stats
) -> Callable[..., Coroutine[Any, Any, Any]]:
    name = getattr(function, "__qualname__", repr(function))

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        options = in_force.options
        call = Call(options, args, kwargs)
        stats.begin()
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
        made = default_for(error, options.default)
        return await made if inspect.isawaitable(made) else made

    async def attempts(call: Call) -> Any:
        while True:
            held = enter(turns, call)
            if held is not None and not turns.take(call.key, clock()):
                await wait(turns, call, held)
            try:
                if call.options.hedged:
                    return await race(function, call, turns, stats)
                return await function(*call.args, **call.kwargs)
            except Exception as error:
                call.options = in_force.options
                pause_s = call.pause_s(error, turns)
                if pause_s is None:
                    raise
            finally:
                if held is not None:
                    HELD.reset(held)
                    turns.give_back(call.key, clock())
            stats.retry()
            if pause_s:
                await asyncio.sleep(pause_s)

    return call_async


def _sync(function: Callable[..., Any], in_force: InForce, turns: Turns, stats: Stats) -> Callable[..., Any]:
    name = getattr(function, "__qualname__", repr(function))

    @functools.wraps(function)
    def call_sync(*args: Any, **kwargs: Any) -> Any:
        options = in_force.options
        call = Call(options, args, kwargs)
        stats.begin()
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
        made = default_for(error, options.default)
        if inspect.isawaitable(made):
            cast(Any, made).close()
            raise ConfigError(f"{name} is not async: its default must be a value or a sync function")
        return made

    def attempts(call: Call) -> Any:
        while True:
            held = enter(turns, call)
            if held is not None and not turns.take(call.key, clock()):
                wait_sync(turns, call, name, held)
            try:
                if call.options.hedged:
                    return race_sync(function, call, turns, stats)
                if call.deadline == math.inf:
                    return function(*call.args, **call.kwargs)
                run = functools.partial(function, *call.args, **call.kwargs)
                return HELPERS.call(run, call.deadline - clock())
            except TooLate:
                raise call.late(name) from None
            except Exception as error:
                call.options = in_force.options
                pause_s = call.pause_s(error, turns)
                if pause_s is None:
                    raise
            finally:
                if held is not None:
                    HELD.reset(held)
                    turns.give_back(call.key, clock())
            stats.retry()
            if pause_s:
                time.sleep(pause_s)

    return call_sync
