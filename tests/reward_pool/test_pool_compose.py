"""Composed rewards, batches with a deadline, equal requests sent once, answers kept."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.errors import RewardError, StorageError
from penstock.reward import AnswerCache, ComputePool, Endpoint, Score, Unscored, compose, composed, score_batch
from penstock.reward.cache import content_key
from penstock.reward.failures import DeadlinePassed, JobFailed
from penstock.simulate.provider_server import ProviderServer
from penstock.simulate.providers import Provider


async def test_parts_run_at_once_and_are_summed_by_weight() -> None:
    both = threading.Barrier(2, timeout=10)

    def format(sample: str) -> float:
        both.wait()
        return 1.0

    def length(sample: str) -> Score:
        both.wait()
        return Score(0.5, {"characters": float(len(sample))})

    reward = compose(format, length, weights={"length": 2.0})
    score = await reward("four")
    assert score == Score(2.0, {"format": 1.0, "length": 0.5, "length.characters": 4.0})


async def test_another_way_to_combine_can_be_given() -> None:
    async def right(sample: str) -> float:
        return 1.0

    async def short(sample: str) -> float:
        return 0.25

    assert (await compose(right, short, combine=lambda v: v["right"] * v["short"])("x")) == Score(
        0.25, {"right": 1.0, "short": 0.25}
    )
    broken = await compose(right, combine=lambda v: v["wrong"])("x")
    assert isinstance(broken, Unscored)
    assert broken.cause.startswith("combine: KeyError")


@pytest.mark.parametrize("result", [None, float("nan"), Unscored("no answer"), RuntimeError("judge is away")])
async def test_a_missing_part_makes_the_whole_missing_and_is_named(result: object) -> None:
    ended = []

    async def judge(sample: str) -> object:
        if isinstance(result, Exception):
            raise result
        return result

    async def slow(sample: str) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        return 1.0

    score = await compose(judge, slow)("x")
    assert isinstance(score, Unscored)
    assert score.cause.startswith("judge: ")
    assert ended == [True], "what no longer matters is stopped"


def test_parts_need_names_and_weights_need_parts() -> None:
    def a(sample: str) -> float:
        return 1.0

    for parts, options, says in (
        ((), {}, "at least one part"),
        ((a, a), {}, "each of another name"),
        ((a,), {"weights": {"b": 1.0}}, "weights name 'b'"),
        ((a,), {"weights": {}, "combine": max}, "not both"),
    ):
        with pytest.raises(RewardError, match=says):
            compose(*parts, **options)


async def test_a_batch_with_a_deadline_names_what_it_could_not_score() -> None:
    async def reward(sample: int) -> float:
        if sample == 2:
            await asyncio.sleep(60)
        if sample == 3:
            raise ValueError("bad row")
        return float(sample)

    report = await score_batch(reward, [0, 1, 2, 3], deadline_s=0.1)
    assert report.results[:2] == [Score(0.0), Score(1.0)]
    assert report.late == [2]
    assert report.causes == {"the batch's deadline of 0.1 s passed": 1, "ValueError: bad row": 1}
    inside = most = 0

    async def counted(sample: int) -> float:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1
        return 0.0

    await score_batch(counted, range(20), concurrency=3)
    assert most == 3
    assert (await score_batch(reward, [])).results == []
    with pytest.raises(RewardError, match="must be above 0"):
        await score_batch(reward, [1], deadline_s=0)


async def test_samples_are_scored_while_later_ones_are_still_generated() -> None:
    told: list[str] = []
    first_is_scored = asyncio.Event()

    async def reward(sample: int) -> float:
        told.append(f"scored {sample}")
        first_is_scored.set()
        return float(sample)

    async def generated():
        for n in range(3):
            told.append(f"generated {n}")
            yield n
            if n == 0:
                await asyncio.wait_for(first_is_scored.wait(), 60)

    report = await score_batch(reward, generated())
    assert [score.value for score in report.results if isinstance(score, Score)] == [0.0, 1.0, 2.0]
    assert told.index("scored 0") < told.index("generated 1")

    async def endless():
        for n in range(3):
            yield n
        await asyncio.Event().wait()

    cut = await score_batch(reward, endless(), deadline_s=0.2)
    assert (len(cut.results), cut.late) == (3, []), "what never came is not in the report"

    async def broken():
        yield 1
        raise OSError("the rollouts are gone")

    with pytest.raises(OSError, match="rollouts are gone"):
        await score_batch(reward, broken())


HANGS = """
import asyncio, threading
from penstock.reward import compose, score_batch

def hangs(sample):
    if sample == 0:
        threading.Event().wait()
    return 1.0

def quick(sample):
    return 1.0

print(asyncio.run(score_batch(hangs, range(40), deadline_s=1.0)).late)
print(asyncio.run(score_batch(compose(hangs, quick), range(40), deadline_s=1.0)).late)
"""


def test_a_sync_function_that_hangs_keeps_neither_the_others_nor_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0]\n[0]\n", done.stderr


async def test_sync_calls_have_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed, "SYNC_AT_ONCE", 3)
    lock, inside, most = threading.Lock(), 0, 0

    def counted(sample: int) -> float:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.005)
        with lock:
            inside -= 1
        return 0.0

    await score_batch(counted, range(20))
    assert most == 3


ASK = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def test_equal_requests_in_flight_are_sent_once_when_asked_for() -> None:
    async def sent(single_flight: bool) -> int:
        async with ProviderServer(Provider(median_s=0.05, round_trip_s=0.0)) as server:
            async with ComputePool([Endpoint(server.url)], single_flight=single_flight) as pool:
                turned = dict(reversed(ASK.items()))
                replies = await asyncio.gather(*(pool.request("/chat/completions", b) for b in (ASK, turned, ASK)))
                assert len({reply.body for reply in replies}) == 1
                await pool.request("/chat/completions", {**ASK, "seed": 1})
            return server.requests

    assert await sent(True) == 2
    assert await sent(False) == 4


async def test_one_caller_that_leaves_does_not_take_the_others_answer_away() -> None:
    async with ProviderServer(Provider(median_s=0.05, round_trip_s=0.0)) as server:
        async with ComputePool([Endpoint(server.url, concurrency=1)], single_flight=True) as pool:
            tasks = [asyncio.create_task(pool.request("/chat/completions", ASK)) for _ in range(2)]
            await server.arrived(1)
            tasks[0].cancel()
            assert (await tasks[1]).status == 200
            last = asyncio.create_task(pool.request("/chat/completions", {**ASK, "model": "fault-silent"}))
            await server.arrived(2)
            last.cancel()
            await asyncio.gather(last, return_exceptions=True)
            await pool.request("/chat/completions", {**ASK, "seed": 9})


async def test_who_shares_a_request_keeps_its_own_deadline() -> None:
    async with ProviderServer(Provider(median_s=0.3, spread=0.0, round_trip_s=0.0)) as server:
        async with ComputePool([Endpoint(server.url)], single_flight=True) as pool:
            patient = asyncio.create_task(pool.request("/chat/completions", ASK, deadline_s=60))
            await server.arrived(1)
            with pytest.raises(DeadlinePassed, match="equal request is in flight"):
                await pool.request("/chat/completions", ASK, deadline_s=0.05)
            assert (await patient).status == 200
            hasty = asyncio.create_task(pool.request("/chat/completions", {**ASK, "seed": 1}, deadline_s=0.1))
            await server.arrived(2)
            assert (await pool.request("/chat/completions", {**ASK, "seed": 1}, deadline_s=60)).status == 200
            with pytest.raises(DeadlinePassed):
                await hasty


async def test_a_full_disk_costs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    cache = AnswerCache(tmp_path)
    async with ProviderServer() as server, ComputePool([Endpoint(server.url)], cache=cache) as pool:
        for n in range(3):
            assert (await pool.request("/chat/completions", {**ASK, "seed": n})).status == 200
    assert cache.refused == 3
    assert caplog.text.count("No space left on device") == 1
    assert not os.listdir(tmp_path), "and leaves no half-written file"


def tear(folder: Path) -> None:
    (file,) = folder.glob("*.json")
    file.write_bytes(b'{"torn')


async def test_answers_are_kept_on_disk_and_failures_are_not(tmp_path: Path) -> None:
    async with ProviderServer() as server:
        for _ in range(2):
            cache = AnswerCache(tmp_path)
            async with ComputePool([Endpoint(server.url)], cache=cache) as pool:
                reply = await pool.request("/chat/completions", ASK)
                assert reply.value["choices"][0]["message"]["content"] == "echo: hello"
                with pytest.raises(JobFailed):
                    await pool.request("/chat/completions", {**ASK, "model": "fault-400"})
        assert cache.hits == 1
        assert reply.endpoint == "cache"
        assert server.requests == 3
        tear(tmp_path)
        async with ComputePool([Endpoint(server.url)], cache=AnswerCache(tmp_path)) as pool:
            assert (await pool.request("/chat/completions", ASK)).endpoint == server.url


def test_the_cache_is_bounded_and_says_when_the_disk_refuses(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path, at_most=10)
    for n in range(30):
        cache.put(content_key("/x", {"n": n}), b"1")
    assert len(list(tmp_path.glob("*.json"))) <= 10
    assert not list(tmp_path.glob("*.part"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="answer cache"):
        AnswerCache(tmp_path / "file" / "below")
