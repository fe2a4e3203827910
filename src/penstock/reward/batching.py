"""Small requests gathered into one call: by number, by tokens, and by a wait bounded in milliseconds.

`Gathering` decides what goes together and when (pure, `now` passed in); `batched` turns a function of a list into one
of an item; `pool_batched` does so for a pool's list-taking services. One bad item fails alone: a call that fails for
good is cut in two and tried again, until the item that nobody can mend stands alone.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from penstock.errors import ConfigError, PoolError
from penstock.reward.asking import own_options
from penstock.reward.failures import JobFailed
from penstock.reward.pool import ComputePool
from penstock.reward.retry import Kind, kind_of_error

__all__ = ["Gathering", "batched", "pool_batched"]

_T = TypeVar("_T")
A = TypeVar("A")
B = TypeVar("B")


class Gathering(Generic[_T]):
    """Items that wait for company. A batch leaves when it is full, or when its first item has waited long enough."""

    def __init__(self, max_items: int, max_tokens: float, wait_s: float) -> None:
        self.max_items = max_items
        self.max_tokens = max_tokens
        self.wait_s = wait_s
        self._items: list[_T] = []
        self._tokens = 0.0
        self.due_at = math.inf
        """When the waiting items leave at the latest."""

    def add(self, item: _T, tokens: float, now: float) -> list[list[_T]]:
        """Takes an item in; returns the batches that are full by it. An item above the bound alone goes alone."""
        full = []
        if self._items and self._tokens + tokens > self.max_tokens:
            full.append(self.take())
        if not self._items:
            self.due_at = now + self.wait_s
        self._items.append(item)
        self._tokens += tokens
        if len(self._items) >= self.max_items or self._tokens >= self.max_tokens:
            full.append(self.take())
        return full

    def take(self) -> list[_T]:
        """All that waits."""
        items, self._items = self._items, []
        self._tokens, self.due_at = 0.0, math.inf
        return items

    def drop(self, item: _T, tokens: float) -> None:
        """An item is no longer wanted."""
        if item in self._items:
            self._items.remove(item)
            self._tokens -= tokens
            if not self._items:
                self.due_at = math.inf


class _Waiting:
    __slots__ = ("future", "item")

    def __init__(self, item: Any, future: asyncio.Future[Any]) -> None:
        self.item = item
        self.future = future


def batched(
    *,
    max_items: int = 32,
    max_tokens: float | None = None,
    wait_ms: float = 5.0,
    tokens: Callable[[Any], float] | None = None,
    key: Callable[[Any], Hashable] | None = None,
) -> Callable[[Callable[[Sequence[A]], Awaitable[Sequence[B]]]], Callable[[A], Awaitable[B]]]:
    """Makes an async `f(items) -> results`, one for each in order, into an async `f(item) -> result`.

    Args:
        max_items: items in one call.
        max_tokens: sum of `tokens(item)` in one call; needs `tokens`.
        wait_ms: longest wait of an item for company.
        key: items of different keys never share a call.

    A result that is an exception is raised for its item alone; `f` raising what no retry can mend is tried again in
    halves. Each event loop gathers for itself.

    Raises:
        ConfigError: an impossible option, or a function that isn't async.
    """
    if max_items < 1 or not wait_ms >= 0 or (max_tokens is not None and (max_tokens <= 0 or tokens is None)):
        raise ConfigError(
            f"batched: max_items = {max_items} must be at least 1, wait_ms = {wait_ms} at least 0, and max_tokens = "
            f"{max_tokens} above 0 and with tokens="
        )

    def decorate(function: Callable[[Sequence[A]], Awaitable[Sequence[B]]]) -> Callable[[A], Awaitable[B]]:
        if not inspect.iscoroutinefunction(function):
            raise ConfigError("batched needs an async function of a list")
        gathered: dict[tuple[asyncio.AbstractEventLoop, Hashable], Gathering[_Waiting]] = {}
        running: set[asyncio.Task[None]] = set()

        def send(batch: list[_Waiting]) -> None:
            task = asyncio.get_running_loop().create_task(_send(function, batch))
            running.add(task)
            task.add_done_callback(running.discard)

        def due(place: tuple[asyncio.AbstractEventLoop, Hashable], at: float) -> None:
            gathering = gathered.get(place)
            if gathering is not None and gathering.due_at <= at:
                send(gathering.take())
                del gathered[place]

        @functools.wraps(function)
        async def one(item: A) -> B:
            loop = asyncio.get_running_loop()
            place = (loop, key(item) if key is not None else None)
            gathering = gathered.get(place)
            if gathering is None:
                gathering = gathered[place] = Gathering(max_items, max_tokens or math.inf, wait_ms / 1000)
            waiting = _Waiting(item, loop.create_future())
            cost = tokens(item) if tokens is not None else 0.0
            due_before = gathering.due_at
            for batch in gathering.add(waiting, cost, loop.time()):
                send(batch)
            if gathering.due_at == math.inf:
                del gathered[place]  # nothing waits: keys and loops that are done with are forgotten
            elif gathering.due_at != due_before:
                loop.call_at(gathering.due_at, due, place, gathering.due_at)
            try:
                return await waiting.future
            except asyncio.CancelledError:
                gathering.drop(waiting, cost)
                if gathering.due_at == math.inf and gathered.get(place) is gathering:
                    del gathered[place]
                raise

        return one

    return decorate


async def _send(function: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]], batch: list[_Waiting]) -> None:
    """Calls the function for a batch and hands out what came; in halves where one item may spoil it for the rest."""
    wanted = [waiting for waiting in batch if not waiting.future.done()]
    if not wanted:
        return
    try:
        results = list(await function([waiting.item for waiting in wanted]))
        if len(results) != len(wanted):
            raise PoolError(f"a batched call of {len(wanted)} items came back with {len(results)} results")
    except Exception as error:  # noqa: BLE001 - it is handed to those whose items were in the call
        if len(wanted) > 1 and _may_be_one_items_fault(error):
            half = len(wanted) // 2
            await asyncio.gather(_send(function, wanted[:half]), _send(function, wanted[half:]))
            return
        results = [error] * len(wanted)
    for waiting, result in zip(wanted, results, strict=True):
        if waiting.future.done():
            continue
        if isinstance(result, BaseException):
            waiting.future.set_exception(result)
        else:
            waiting.future.set_result(result)


def _may_be_one_items_fault(error: Exception) -> bool:
    """Whether trying smaller pieces can help: not where the service, the deadline or the money is the trouble."""
    if isinstance(error, JobFailed):
        return error.status in (0, 400, 413, 422) or error.status >= 500
    return not isinstance(error, PoolError) and kind_of_error(error) is not Kind.TURNED_AWAY


_LISTS = {
    "/embeddings": ("input", "data"),
    "/classify": ("input", "data"),
    "/score": ("text_2", "data"),
    "/completions": ("prompt", "choices"),
}


def pool_batched(
    pool: ComputePool,
    path: str,
    *,
    max_items: int = 32,
    tokens_per_call: float | None = None,
    wait_ms: float = 5.0,
    **body: Any,
) -> Callable[[str], Awaitable[Any]]:
    """A pool's list-taking service as a function of one text: `await embed("...")` gives that text's own entry.

    `body` holds the model, any other parameters of the service (a completion's `max_tokens` is one of them) and the
    pool's own (`priority`, `deadline_s`, ...); `path` is `/embeddings`, `/classify`, `/score` or `/completions`. A call
    holds at most `max_items` texts of `tokens_per_call` tokens (estimated, a quarter of their characters). With `n`
    above 1, a completion's entry is the list of its choices.

    Raises:
        ConfigError: the path takes no list, no model is named, or `n` is no count.
    """
    if path not in _LISTS or "model" not in body:
        raise ConfigError(f"pool_batched: path '{path}' must be one of {', '.join(_LISTS)}, and a model must be given")
    asked, answered = _LISTS[path]
    own, each = own_options(body), body.get("n", 1) if path == "/completions" else 1
    if not isinstance(each, int) or each < 1:
        raise ConfigError(f"pool_batched: n = {each!r}: must be a whole number from 1")

    async def call(texts: Sequence[str]) -> Sequence[Any]:
        value = (await pool.request(path, {**body, asked: list(texts)}, **own)).value
        entries = value.get(answered) if isinstance(value, dict) else None
        if not isinstance(entries, list):
            raise PoolError(f"the answer from {path} has no list '{answered}'")
        entries = sorted(entries, key=lambda entry: entry.get("index", 0))
        return entries if each == 1 else [entries[k : k + each] for k in range(0, len(entries), each)]

    def tokens(text: str) -> float:
        return len(text) / 4

    return batched(
        max_items=max_items,
        max_tokens=tokens_per_call,
        wait_ms=wait_ms,
        tokens=tokens if tokens_per_call is not None else None,
    )(call)
