"""Rewards by workers: what goes into one call, what late and lost ones cost, and that no sample is scored twice."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.cluster import Batch, CallTimeout, Column, SubmitPool, WorkerFailed
from penstock.cluster.column import text_column
from penstock.errors import ConfigError, RewardError
from penstock.reward.worker_calls import FRUITLESS_GROUPS
from penstock.reward.worker_scorer import WorkerScorer
from penstock.sample import Finish, Prompt, Sample, SampleId, Score, Unscored


def sample(response: str, row: dict[str, Any] | None = None) -> Sample:
    prompt = Prompt(0, "q:", [1], row or {}, "here:1")
    return Sample(SampleId("b", 0, 0), prompt, array("i", [1]), array("f", [-1.0]), (), Finish.STOP, response)


class Group:
    """Workers whose value of a text is its length, and that do what a test says of its texts instead."""

    def __init__(self, act: Callable[[list[str]], None] = lambda texts: None) -> None:
        self.workers = self
        self.lost = ""
        self.closed = False
        self.calls: list[list[str]] = []
        self._act = act

    def submit(self, name: str, batch: Batch) -> Any:
        assert name == "score"
        texts = batch.values("text")
        assert list(batch.column("length").data.cast("q")) == [len(text) for text in texts]
        self.calls.append(texts)
        group = self

        class Pending:
            def result(self, timeout_s: float) -> Batch:
                group._act(texts)
                values = memoryview(array("d", map(len, texts))).cast("B")
                causes = text_column(["it is bad" if "bad" in text else "" for text in texts])
                return Batch({"value": Column("float64", values, len(texts), ()), "cause": causes})

        return Pending()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pool() -> Iterator[SubmitPool]:
    with SubmitPool("reward", 2) as pool:
        yield pool


async def test_samples_that_come_together_go_together_and_each_gets_its_own(pool: SubmitPool) -> None:
    group = Group()
    scorer = WorkerScorer(lambda: group, pool, scale=2.0, offset=1.0, samples_per_call=3)  # type: ignore[arg-type]
    await scorer.start()
    words = ["a", "bc", "bad", "defg", ""]
    results = await asyncio.gather(*(scorer.score(sample(word)) for word in words))
    assert group.calls == [["a"], ["q:a", "q:bc", "q:bad"], ["q:defg", "q:"]]
    assert [r.value if isinstance(r, Score) else r.cause for r in results] == [7, 9, "reward model: it is bad", 13, 5]
    assert results[0] == Score(7.0, {"raw": 3.0})
    await scorer.close()
    with pytest.raises(RewardError, match="closed"):
        await scorer.score(sample("a"))


async def test_a_method_that_fails_costs_its_call_and_no_more(pool: SubmitPool) -> None:
    def act(texts: list[str]) -> None:
        if "q:x" in texts:
            raise WorkerFailed("reward-model", 1, "score", "ValueError: no x")

    group = Group(act)
    scorer = WorkerScorer(lambda: group, pool)  # type: ignore[arg-type]
    first = await scorer.score(sample("x"))
    assert isinstance(first, Unscored)
    assert "rank 1 failed in score(): ValueError: no x" in first.cause
    assert isinstance(await scorer.score(sample("y")), Score)
    assert not group.closed


async def test_workers_that_are_late_or_gone_are_replaced_and_their_samples_are_not_tried_again(
    pool: SubmitPool,
) -> None:
    groups: list[Group] = []

    def opened() -> Group:
        def act(texts: list[str]) -> None:
            if "q:slow" in texts:
                raise CallTimeout("reward-model: no answer to score() from rank 0 in 30 s")
            if "q:kill" in texts:
                group.lost = "rank 0 is gone"
                raise WorkerFailed("reward-model", 0, "score", "its process was ended by SIGKILL")

        group = Group(act)
        groups.append(group)
        return group

    scorer = WorkerScorer(opened, pool)  # type: ignore[arg-type]
    causes = [await scorer.score(sample(word)) for word in ("fine", "slow", "fine", "kill", "fine")]
    assert [isinstance(result, Score) for result in causes] == [True, False, True, False, True]
    assert [group.closed for group in groups] == [True, True, False]
    assert sum(texts == ["q:slow"] for group in groups for texts in group.calls) == 1


async def test_workers_that_are_lost_again_and_again_end_the_run(pool: SubmitPool) -> None:
    def act(texts: list[str]) -> None:
        raise CallTimeout("no answer")

    opened = []
    scorer = WorkerScorer(lambda: opened.append(Group(act)) or opened[-1], pool)  # type: ignore[arg-type, func-returns-value]
    for _ in range(FRUITLESS_GROUPS):
        assert isinstance(await scorer.score(sample("a")), Unscored)
    with pytest.raises(
        RewardError, match=r"3 groups of reward model workers in a row were lost without an answer; .* no answer"
    ):
        await scorer.score(sample("a"))
    assert len(opened) == FRUITLESS_GROUPS


async def test_workers_that_do_not_start_are_told_before_the_run_begins(pool: SubmitPool) -> None:
    def opened() -> Any:
        raise WorkerFailed("reward-model", 0, "__init__", "OSError: no such folder")

    with pytest.raises(RewardError, match=r"reward model can't be used: .* no such folder"):
        await WorkerScorer(opened, pool).start()
    with pytest.raises(ConfigError, match="scale = 0"):
        WorkerScorer(opened, pool, scale=0)


async def test_what_a_sample_lacks_is_its_cause(pool: SubmitPool) -> None:
    scorer = WorkerScorer(Group, pool, text="{row.story}{response}")  # type: ignore[arg-type]
    result = await scorer.score(sample("a"))
    assert result == Unscored("reward model: the sample has no row.story, which the text needs")
    assert await scorer.score(sample("a", {"story": "long"})) == Score(5.0, {"raw": 5.0})


async def test_closing_leaves_who_waits_unscored(pool: SubmitPool) -> None:
    begun, free = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def act(texts: list[str]) -> None:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(free.wait(), loop).result(30)

    scorer = WorkerScorer(lambda: Group(act), pool)  # type: ignore[arg-type, return-value]
    under_way = asyncio.create_task(scorer.score(sample("a")))
    await begun.wait()
    waiting = asyncio.create_task(scorer.score(sample("b")))
    await asyncio.sleep(0)
    await scorer.close()
    free.set()
    closed = Unscored("the scorer was closed before the sample was scored")
    assert (await under_way, await waiting) == (closed, closed)
