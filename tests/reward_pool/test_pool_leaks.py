"""A pool's edge under any order of calls, answers, cancellations and time: each call ends once, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from virtual_loop import VirtualLoop

from penstock.errors import PoolError
from penstock.reward.limits import Endpoint, PoolOptions
from penstock.reward.pool import ComputePool
from penstock.reward.retry import Kind, Outcome
from penstock.reward.transport import Reply, Request

DONE = Outcome(Kind.DONE)
ENDS = [
    DONE,
    DONE,
    Outcome(Kind.BROKEN, "reset"),
    Outcome(Kind.TURNED_AWAY, "429", 429),
    Outcome(Kind.FINAL, "400", 400),
]


class Held:
    """A transport whose answers the test gives, one by one."""

    def __init__(self) -> None:
        self.open: list[asyncio.Future[Outcome]] = []
        self.most: dict[str, int] = {}
        self._now: dict[str, int] = {}

    async def send(
        self, endpoint: Endpoint, request: Request, timeout_s: float, chunk: Callable[[bytes], Awaitable[None]] | None
    ) -> tuple[Outcome, Reply | None]:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.open.append(future)
        self._now[endpoint.url] = self._now.get(endpoint.url, 0) + 1
        self.most[endpoint.url] = max(self.most.get(endpoint.url, 0), self._now[endpoint.url])
        try:
            outcome = await future
        finally:
            self.open.remove(future)
            self._now[endpoint.url] -= 1
        return outcome, Reply({"answered": True}) if outcome.kind is Kind.DONE else None

    async def close(self) -> None:
        assert not self.open, "closed under an attempt"


class NothingLeaksFromAPool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.held = Held()
        self.callers: list[asyncio.Task[object]] = []
        endpoints = [Endpoint("local:a", concurrency=2), Endpoint("local:b", concurrency=1)]
        options = PoolOptions(hedge_after_s=0.5, hedge_share=1.0, attempts=2)
        self.pool = ComputePool(endpoints, options, {"local:a": self.held, "local:b": self.held})

    def _run(self, seconds: float = 0.0) -> None:
        async def pause() -> None:
            await asyncio.sleep(seconds)
            for _ in range(10):
                await asyncio.sleep(0)

        self.loop.run_until_complete(pause())

    @rule(deadline_s=st.sampled_from([None, 0.2, 3.0]), priority=st.integers(0, 1))
    def call(self, deadline_s: float | None, priority: int) -> None:
        asked = self.pool.request("/x", {"model": "m"}, deadline_s=deadline_s, priority=priority)
        self.callers.append(self.loop.create_task(asked))
        self._run()

    @rule(data=st.data(), outcome=st.sampled_from(ENDS))
    def answer(self, data: st.DataObject, outcome: Outcome) -> None:
        if self.held.open:
            future = self.held.open[data.draw(st.integers(0, len(self.held.open) - 1))]
            if not future.done():
                future.set_result(outcome)
            self._run()

    @rule(data=st.data(), at_once=st.booleans())
    def cancel(self, data: st.DataObject, at_once: bool) -> None:
        waiting = [task for task in self.callers if not task.done()]
        if waiting:
            data.draw(st.sampled_from(waiting)).cancel()
            if not at_once:
                self._run()

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self._run(seconds)

    @invariant()
    def limits_hold_and_what_is_counted_is_what_is_out(self) -> None:
        assert self.held.most.get("local:a", 0) <= 2
        assert self.held.most.get("local:b", 0) <= 1
        if not any(task.cancelling() for task in self.callers if not task.done()):
            assert self.pool.running == len(self.held.open)

    def teardown(self) -> None:
        self.loop.run_until_complete(self.pool.close())
        self._run()
        assert all(task.done() for task in self.callers)
        for task in self.callers:
            if not task.cancelled():
                error = task.exception()
                assert error is None or isinstance(error, PoolError), error
        assert (self.pool.running, self.pool.waiting, len(self.held.open)) == (0, 0, 0)
        assert not asyncio.all_tasks(self.loop), "a task is left"
        assert all(handle.cancelled() for handle in self.loop._scheduled), "a timer is left"
        self.loop.close()


TestNothingLeaksFromAPool = NothingLeaksFromAPool.TestCase
TestNothingLeaksFromAPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_an_answered_call_leaves_no_cycle_for_the_collector() -> None:
    loop, held = VirtualLoop(), Held()
    pool = ComputePool([Endpoint("local:a")], transports={"local:a": held})

    async def one() -> None:
        asked = asyncio.ensure_future(pool.request("/x", {"model": "m"}))
        await asyncio.sleep(0)
        held.open[0].set_result(DONE)
        await asked

    loop.run_until_complete(one())
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            loop.run_until_complete(one())
        assert gc.collect() < 50, "each call leaves something that only the collector frees"
    finally:
        gc.enable()
    loop.run_until_complete(pool.close())
    loop.close()
