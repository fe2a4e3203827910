"""Time-outs of many tasks by one timer, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from virtual_loop import VirtualLoop

from penstock.reward.expiry import Expiry


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def timed(expiry: Expiry, timeout_s: float, work: Coroutine[Any, Any, Any]) -> str:
    """What `HttpTransport.send` does about its time."""
    task = asyncio.current_task()
    assert task is not None
    cancelling = task.cancelling()
    expiry.begin(task, timeout_s)
    try:
        await work
    except asyncio.CancelledError:
        if not expiry.was_late(task, cancelling):
            raise
        return f"late at {asyncio.get_running_loop().time():g}"
    finally:
        expiry.end(task, timeout_s)
    return "done"


def test_who_is_past_its_time_is_cancelled_then_and_nobody_else_is() -> None:
    async def main() -> list[str]:
        expiry = Expiry(asyncio.get_running_loop())
        work = [timed(expiry, limit_s, asyncio.sleep(s)) for limit_s, s in ((2, 1), (2, 3), (5, 4), (1, 9), (5, 6))]
        return await asyncio.gather(*work)

    assert run(main()) == ["done", "late at 2", "done", "late at 1", "late at 5"]


def test_a_thousand_tasks_of_one_time_out_take_a_few_timers_and_leave_nothing_behind() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        expiry = Expiry(loop)
        for _ in range(100):
            await asyncio.gather(*(timed(expiry, 10, asyncio.sleep(1)) for _ in range(10)))
        assert loop.timers - 1000 <= 100 / 9 + 1  # the sleeps' own, and one in about 10 s
        await asyncio.sleep(20)
        assert not expiry._lanes
        assert not expiry._late

    run(main())


def test_a_task_that_is_late_can_be_timed_again_and_awaits_as_before() -> None:
    async def main() -> list[str]:
        expiry = Expiry(asyncio.get_running_loop())
        seen = [await timed(expiry, 1, asyncio.sleep(s)) for s in (2, 0.5, 2)]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return seen

    assert run(main()) == ["late at 1", "done", "late at 2.5"]


def test_a_callers_own_cancellation_at_the_same_moment_stays_one() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(timed(Expiry(loop), 1, asyncio.sleep(9)))
        await asyncio.sleep(0)
        loop.call_at(1.0, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_work_that_swallows_its_cancellation_leaves_its_task_as_it_was() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(9)
        except asyncio.CancelledError:
            return

    async def main() -> None:
        expiry, task = Expiry(asyncio.get_running_loop()), asyncio.current_task()
        assert await timed(expiry, 1, stubborn()) == "done"
        assert task is not None
        assert task.cancelling() == 0
        assert await timed(expiry, 1, asyncio.sleep(0.5)) == "done"

    run(main())


def test_a_closed_one_cancels_nobody_any_more() -> None:
    async def main() -> str:
        expiry = Expiry(asyncio.get_running_loop())
        task = asyncio.create_task(timed(expiry, 1, asyncio.sleep(5)))
        await asyncio.sleep(0.5)
        expiry.close()
        return await task

    assert run(main()) == "done"
