"""Rewards made of parts, and batches of them with a deadline.

`compose` runs independent parts at once and combines them; `score_batch` scores many samples and names what it could
not score. A part that is missing makes the whole missing, with the part's name: it never counts as zero. Knows no
services: a part is any reward function, accelerated or not.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import weakref
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import RewardError
from penstock.reward.functions import describe_exception, normalise
from penstock.reward.helpers import HELPERS
from penstock.sample import Score, Unscored

__all__ = ["BatchReport", "compose", "score_batch"]

SYNC_AT_ONCE = 32
"""Sync calls of one loop in threads: enough for those that wait for a network, few enough for those that compute."""
_ROOM: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def compose(
    *parts: Callable[[Any], Any],
    weights: Mapping[str, float] | None = None,
    combine: Callable[[Mapping[str, float]], float] | None = None,
) -> Callable[[Any], Awaitable[Score | Unscored]]:
    """One reward function of several, each named as its function is; all run at once.

    Async parts share the loop, sync ones run in threads. The value is the weighted sum (weight 1 where none is given)
    or `combine({name: value})`; `parts` of the score hold each part's value, and its own parts as `name.part`.

    Raises:
        RewardError: no parts, two of one name, or a weight for a part that isn't there.
    """
    named = {getattr(part, "__name__", type(part).__name__): part for part in parts}
    if not parts or len(named) < len(parts):
        names = sorted(getattr(part, "__name__", type(part).__name__) for part in parts)
        raise RewardError(
            f"compose needs at least one part, and each of another name; got: {', '.join(names) or 'none'}"
        )
    if unknown := sorted(set(weights or ()) - named.keys()):
        raise RewardError(f"compose: weights name '{unknown[0]}'; the parts are: {', '.join(named)}")
    if weights is not None and combine is not None:
        raise RewardError("compose: give either weights or combine, not both")
    weight = {name: 1.0 if weights is None else weights.get(name, 1.0) for name in named}

    async def composed(sample: Any) -> Score | Unscored:
        tasks = {name: asyncio.ensure_future(_result(part, sample)) for name, part in named.items()}
        try:
            for name, task in tasks.items():
                if isinstance(result := await task, Unscored):
                    return Unscored(f"{name}: {result.cause}")
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        scores = {name: task.result() for name, task in tasks.items()}
        values = {name: score.value for name, score in scores.items() if isinstance(score, Score)}
        try:
            value = combine(values) if combine is not None else sum(weight[name] * v for name, v in values.items())
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the sample says so
            return Unscored(f"combine: {describe_exception(error)}")
        inner = {f"{name}.{k}": v for name, s in scores.items() if isinstance(s, Score) for k, v in s.parts.items()}
        return normalise(Score(value, {**values, **inner}))

    return composed


def _threads() -> asyncio.Semaphore:
    """Room for sync calls on this loop. A call that nobody waits for any more takes up none, though it goes on."""
    loop = asyncio.get_running_loop()
    room = _ROOM.get(loop)
    if room is None:
        room = _ROOM[loop] = asyncio.Semaphore(SYNC_AT_ONCE)
    return room


async def _result(part: Callable[[Any], Any], sample: Any) -> Score | Unscored:
    try:
        if inspect.iscoroutinefunction(part) or inspect.iscoroutinefunction(type(part).__call__):
            result = await part(sample)
        else:
            async with _threads():
                result = await HELPERS.call_async(functools.partial(part, sample))
            if inspect.isawaitable(result):
                result = await result
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the sample says so
        return Unscored(describe_exception(error))
    return normalise(result)


@dataclass(frozen=True)
class BatchReport:
    """`results[i]` belongs to sample i; `causes` counts why samples have no score; `late` were cut off by the
    deadline."""

    results: list[Score | Unscored]
    causes: dict[str, int]
    late: list[int]


async def score_batch(
    function: Callable[[Any], Any],
    samples: Sequence[Any] | AsyncIterable[Any],
    deadline_s: float | None = None,
    concurrency: int = 256,
) -> BatchReport:
    """Scores samples at once, at most `concurrency` of them; after `deadline_s` the rest is `Unscored`.

    Samples may still be on their way: from an async iterable, each is scored as it comes, while later ones are being
    generated. What has not come by the deadline isn't in the report. A sync function runs in threads, and is left
    there at the deadline.

    Raises:
        RewardError: an impossible deadline or concurrency.
        Exception: what the iterable raised; nothing is left running.
    """
    if concurrency < 1 or (deadline_s is not None and not deadline_s > 0):
        raise RewardError(f"score_batch: concurrency = {concurrency}, deadline_s = {deadline_s}: must be above 0")
    results: list[Score | Unscored | None] = []
    working: set[asyncio.Task[None]] = set()
    room = asyncio.Semaphore(concurrency)

    async def score(n: int, sample: Any) -> None:
        try:
            results[n] = await _result(function, sample)
        finally:
            room.release()

    async def take(sample: Any) -> None:
        await room.acquire()
        task = asyncio.ensure_future(score(len(results), sample))
        results.append(None)
        working.add(task)
        task.add_done_callback(working.discard)

    async def all_of_them() -> None:
        if isinstance(samples, AsyncIterable):
            async for sample in samples:
                await take(sample)
        else:
            for sample in samples:
                await take(sample)
        if working:
            await asyncio.wait(working)

    whole_batch = asyncio.ensure_future(all_of_them())
    try:
        done, _ = await asyncio.wait((whole_batch,), timeout=deadline_s)
        for task in done:
            task.result()
    finally:
        for task in (whole_batch, *working):
            task.cancel()
        await asyncio.gather(whole_batch, *working, return_exceptions=True)
    if not isinstance(samples, AsyncIterable):
        results.extend([None] * (len(samples) - len(results)))
    late = [n for n, result in enumerate(results) if result is None]
    cut_off = Unscored(f"the batch's deadline of {deadline_s} s passed")
    scored = [cut_off if result is None else result for result in results]
    causes = Counter(result.cause for result in scored if isinstance(result, Unscored))
    return BatchReport(scored, dict(causes), late)
