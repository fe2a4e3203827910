"""Callers of one pool on several loops, some of which end or stand still meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.errors import PoolError
from penstock.reward import elsewhere
from penstock.reward.failures import DeadlinePassed
from penstock.reward.limits import Endpoint
from penstock.reward.pool import ComputePool
from penstock.reward.transport import FunctionTransport


def pool_of(function, **options) -> ComputePool:
    return ComputePool([Endpoint("local:f", **options)], transports={"local:f": FunctionTransport(function)})


async def value(pool: ComputePool, **options) -> object:
    return (await pool.request("/f", {}, **options)).value


def test_a_caller_elsewhere_outlives_the_loop_that_its_request_ran_on() -> None:
    home_may_end, begun, loops = threading.Event(), threading.Event(), []

    async def answer(body: dict) -> int:
        loops.append(asyncio.get_running_loop())
        if len(loops) == 2:
            begun.set()
            home_may_end.set()
            await asyncio.sleep(600)
        return len(loops)

    pool, answers = pool_of(answer), []
    elsewhere = threading.Thread(target=lambda: answers.append(asyncio.run(value(pool))), daemon=True)

    async def home() -> None:
        assert await value(pool) == 1
        elsewhere.start()
        while not home_may_end.is_set():
            await asyncio.sleep(0.005)

    asyncio.run(home())
    elsewhere.join(60)
    assert answers == [3], "neither cancelled nor forgotten: asked again, on its own loop"
    assert loops[0] is loops[1] is not loops[2]


def test_a_loop_that_stands_still_holds_a_caller_elsewhere_no_longer_than_its_deadline() -> None:
    async def answer(body: dict) -> int:
        return 1

    pool, loop = pool_of(answer), asyncio.new_event_loop()
    assert loop.run_until_complete(value(pool)) == 1
    with pytest.raises(DeadlinePassed, match="stands still"):
        asyncio.run(value(pool, deadline_s=0.1))
    asyncio.run(pool.close())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_a_caller_elsewhere_that_is_cancelled_takes_its_request_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "LOOK_S", 60.0)
    begun, cancelled = threading.Event(), threading.Event()

    async def answer(body: dict) -> int:
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1

    pool, home = pool_of(answer), asyncio.new_event_loop()
    thread = threading.Thread(target=home.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(pool.__aenter__(), home).result(60)

    async def caller() -> None:
        task = asyncio.create_task(value(pool))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(cancelled.wait, 60)
        await pool.close()

    asyncio.run(caller())
    assert cancelled.is_set()
    home.call_soon_threadsafe(home.stop)
    thread.join(60)
    home.close()


async def test_an_error_elsewhere_is_the_jobs_own() -> None:
    async def answer(body: dict) -> int:
        raise ValueError("no such thing")

    pool = pool_of(answer)
    async with pool:
        with pytest.raises(PoolError, match="no such thing"):
            await asyncio.to_thread(lambda: asyncio.run(value(pool)))
