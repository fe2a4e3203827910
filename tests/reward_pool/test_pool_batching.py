"""Batching: what goes together, when it goes, and that one bad item fails alone."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, PoolError
from penstock.reward import ComputePool, Endpoint
from penstock.reward.batching import Gathering, batched, pool_batched
from penstock.reward.failures import BudgetSpent, JobFailed
from penstock.simulate.provider_server import ProviderServer


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 0.02)), max_size=60),
    st.integers(1, 8),
    st.sampled_from([40.0, math.inf]),
)
def test_batches_keep_order_and_bounds_and_no_item_waits_too_long(items: list, most: int, tokens: float) -> None:
    gathering: Gathering = Gathering(most, tokens, wait_s=0.01)
    now, out, came = 0.0, [], {}
    for n, (cost, passed_s) in enumerate(items):
        now += passed_s
        if gathering.due_at <= now:
            batch = gathering.take()
            assert min(came[m][0] for m in batch) + 0.01 <= now + 1e-12
            out.append(batch)
        came[n] = (now, cost)
        out += gathering.add(n, cost, now)
        assert gathering.due_at == math.inf or gathering.due_at <= now + 0.01
    out.append(gathering.take())
    assert [n for batch in out for n in batch] == list(range(len(items)))
    for batch in out:
        assert len(batch) <= most
        assert len(batch) <= 1 or sum(came[n][1] for n in batch) <= tokens


async def test_items_are_gathered_by_size_and_by_wait() -> None:
    calls: list[list[int]] = []

    @batched(max_items=4, wait_ms=10)
    async def double(items: list[int]) -> list[int]:
        calls.append(list(items))
        return [2 * item for item in items]

    assert await asyncio.gather(*(double(n) for n in range(10))) == [2 * n for n in range(10)]
    assert [len(call) for call in calls] == [4, 4, 2]
    assert await double(7) == 14, "a lone item goes when its wait is over"


async def test_items_are_gathered_by_tokens_and_key() -> None:
    calls: list[list[str]] = []

    @batched(max_tokens=10, tokens=len, key=lambda item: item[0], wait_ms=1)
    async def same(items: list[str]) -> list[str]:
        calls.append(list(items))
        return items

    await asyncio.gather(*(same(item) for item in ("a" * 6, "a" * 5, "b" * 3, "a" * 20, "b" * 4)))
    assert sorted(calls) == [["a" * 5], ["a" * 6], ["a" * 20], ["bbb", "bbbb"]]


async def test_one_bad_item_fails_alone() -> None:
    calls = 0

    @batched(max_items=8, wait_ms=1)
    async def work(items: list[int]) -> list[int]:
        nonlocal calls
        calls += 1
        if 5 in items:
            raise ValueError("five")
        return items

    results = await asyncio.gather(*(work(n) for n in range(8)), return_exceptions=True)
    assert [r for r in results if not isinstance(r, Exception)] == [0, 1, 2, 3, 4, 6, 7]
    assert isinstance(results[5], ValueError)
    assert calls == 7, "halves, not one by one"


async def test_an_error_that_no_smaller_call_can_mend_is_not_tried_again() -> None:
    calls = 0

    @batched(max_items=4, wait_ms=1)
    async def work(items: list[int]) -> list[int]:
        nonlocal calls
        calls += 1
        raise BudgetSpent("nothing left")

    results = await asyncio.gather(*(work(n) for n in range(4)), return_exceptions=True)
    assert all(isinstance(result, BudgetSpent) for result in results)
    assert calls == 1


async def test_results_that_are_errors_or_too_few_are_told() -> None:
    @batched(max_items=2, wait_ms=1)
    async def partly(items: list[int]) -> list:
        return [KeyError("own") if item == 1 else item for item in items]

    first, second = await asyncio.gather(partly(0), partly(1), return_exceptions=True)
    assert first == 0
    assert isinstance(second, KeyError)

    @batched(max_items=2, wait_ms=1)
    async def short(items: list[int]) -> list:
        return []

    with pytest.raises(PoolError, match="items came back with 0 results"):
        await asyncio.gather(short(0), short(1))


async def test_a_cancelled_item_is_not_sent() -> None:
    seen: list[int] = []

    @batched(max_items=10, wait_ms=20)
    async def work(items: list[int]) -> list[int]:
        seen.extend(items)
        return items

    tasks = [asyncio.create_task(work(n)) for n in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert seen == [0, 2]


async def test_a_pools_services_are_batched() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url)]) as pool:
        embed = pool_batched(pool, "/embeddings", model="e", max_items=8, wait_ms=5, dimensions=2)
        entries = await asyncio.gather(*(embed("x" * n) for n in range(1, 17)))
        assert [entry["embedding"][0] for entry in entries] == [float(n) for n in range(1, 17)]
        assert server.requests == 2
        assert server.seen[0][1]["dimensions"] == 2
        score = pool_batched(pool, "/score", model="rm", text_1="question", wait_ms=1)
        assert [entry["score"] for entry in await asyncio.gather(score("a"), score("bb"))] == [1.0, 2.0]
        complete = pool_batched(pool, "/completions", model="c", max_tokens=5, wait_ms=1)
        assert [c["text"] for c in await asyncio.gather(complete("p"), complete("q"))] == ["echo: p", "echo: q"]
        assert server.seen[-1][1] == {"model": "c", "max_tokens": 5, "prompt": ["p", "q"]}, (
            "the service's, not the batch's"
        )
        short = pool_batched(pool, "/embeddings", model="e", tokens_per_call=2, wait_ms=5)
        before = server.requests
        await asyncio.gather(*(short("four") for _ in range(4)))
        assert server.requests == before + 2, "two tokens' worth of texts in each"
        with pytest.raises(ConfigError, match="n = 0"):
            pool_batched(pool, "/completions", model="c", n=0)
        with pytest.raises(ConfigError, match="must be one of"):
            pool_batched(pool, "/chat/completions", model="m")


async def test_one_bad_text_of_a_services_batch_fails_alone_and_several_choices_stay_together() -> None:
    def answer(path: str, body: dict) -> dict:
        if "bad" in body["prompt"]:
            return {"error": {"message": "a text that can't be read", "code": 400}}
        numbers = range(len(body["prompt"]) * body["n"])
        return {"choices": [{"index": k, "text": body["prompt"][k // body["n"]]} for k in numbers]}

    async with ProviderServer(answer=answer) as server, ComputePool([Endpoint(server.url)]) as pool:
        complete = pool_batched(pool, "/completions", model="c", n=2, wait_ms=5, deadline_s=60)
        texts = ["a", "b", "bad", "c"]
        results = await asyncio.gather(*map(complete, texts), return_exceptions=True)
        assert server.seen[0][1]["prompt"] == texts
    assert isinstance(results[2], JobFailed)
    assert [[choice["text"] for choice in results[k]] for k in (0, 1, 3)] == [["a", "a"], ["b", "b"], ["c", "c"]]


def test_impossible_options_are_refused() -> None:
    for options in ({"max_items": 0}, {"wait_ms": -1}, {"max_tokens": 10}):
        with pytest.raises(ConfigError, match="batched: "):
            batched(**options)
    with pytest.raises(ConfigError, match="async function of a list"):
        batched()(lambda items: items)
