"""A call that takes long is started once more beside itself, as a task or in a thread; the first success counts.

Decides how the two end; whether a second start is allowed is the statistics' share and the turns' to say.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.reward.calling import Call, Stats, clock
from penstock.reward.helpers import HELPERS
from penstock.reward.turns import Turns

__all__ = ["race", "race_sync"]


async def race(function: Callable[..., Awaitable[Any]], call: Call, turns: Turns, stats: Stats) -> Any:
    """Runs a call, and once more beside it when it takes long; the first success counts, the other is cancelled."""
    options, limited = call.options, turns.limited

    async def run() -> Any:
        return await function(*call.args, **call.kwargs)

    async def second() -> Any:
        try:
            return await run()
        finally:
            if limited:
                turns.give_back(call.key, clock())

    tasks = {asyncio.ensure_future(run())}
    try:
        done, _ = await asyncio.wait(tasks, timeout=options.hedge_after_s)
        if not done and (not limited or turns.take(call.key, clock())):
            if stats.hedge(options.hedge_share):
                tasks.add(asyncio.ensure_future(second()))
            elif limited:
                turns.give_back(call.key, clock())
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


def race_sync(function: Callable[..., Any], call: Call, turns: Turns, stats: Stats) -> Any:
    """As `race`, in threads. The second one's turn is over when its function returns, heard or not."""
    options, limited = call.options, turns.limited
    run = functools.partial(function, *call.args, **call.kwargs)

    def run_second() -> Any:
        try:
            return run()
        finally:
            if limited:
                turns.give_back(call.key, clock())

    def second() -> Callable[[], Any] | None:
        if limited and not turns.take(call.key, clock()):
            return None
        if stats.hedge(options.hedge_share):
            return run_second
        if limited:
            turns.give_back(call.key, clock())
        return None

    assert options.hedge_after_s is not None
    return HELPERS.race(run, second, options.hedge_after_s, call.deadline - clock())
