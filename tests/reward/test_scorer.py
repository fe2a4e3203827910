from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import reward_functions

from penstock.errors import RewardError
from penstock.reward import Sample, Score, Scorer, Unscored
from penstock.reward.drought import FIRST_SCORE_WITHIN
from penstock.reward.functions import function_of
from penstock.reward.scorer import INLINE_THREADS, MAX_GIVEN_UP

SHORT_S = 0.2


@asynccontextmanager
async def scorer_of(path: str, **options: Any) -> AsyncIterator[Scorer]:
    scorer = Scorer(path, **options)
    try:
        yield scorer
    finally:
        await scorer.close()


@pytest.fixture
def gate() -> Any:
    """The module that inline functions live in, with its gate shut; opened at the end, so that no call is left."""
    from penstock.reward import load_function

    module = load_function(f"{reward_functions.__file__}:right").call.__globals__
    module["released"].clear()
    yield module["released"]
    module["released"].set()


@pytest.mark.parametrize("name", ["right", "right_later", "right_by_coroutine", "judge", "judge.method"])
async def test_functions_of_every_kind_are_scored(
    function: Callable[[str], str], make_sample: Callable[..., Sample], name: str
) -> None:
    async with scorer_of(function(name)) as scorer:
        await scorer.start()
        results = await asyncio.gather(*(scorer.score(make_sample(str(n), answer="3")) for n in range(40)))
        assert [result.value for result in results if isinstance(result, Score)] == [float(n == 3) for n in range(40)]


@pytest.mark.parametrize("name", ["obey", "obey_async"])
@pytest.mark.parametrize(
    ("do", "cause"),
    [
        ("raise", "ValueError: no such answer (reward_functions.py:38)"),
        ("exit", "SystemExit: 4 (reward_functions.py:40)"),
        ("nan", "the score's value is not finite: nan"),
        ("none", "the reward function returned None"),
        ("text", "the reward function returned str; it must return a number or a Score"),
        ("unscored", "undecidable"),
    ],
)
async def test_a_sample_without_a_proper_result_is_unscored(
    function: Callable[[str], str], make_sample: Callable[..., Sample], name: str, do: str, cause: str
) -> None:
    async with scorer_of(function(name)) as scorer:
        assert await scorer.score(make_sample(do=do)) == Unscored(cause)
        assert await scorer.score(make_sample(response="x", do="", answer="x")) == Score(1.0)


async def test_a_call_that_cancels_itself_is_unscored(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    async with scorer_of(function("obey_async")) as scorer:
        assert await scorer.score(make_sample(do="cancel itself")) == Unscored(
            "CancelledError (reward_functions.py:97)"
        )


async def test_an_async_call_is_ended_at_its_time_limit(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    async with scorer_of(function("obey_async"), timeout_s=SHORT_S, concurrency=1) as scorer:
        late = Unscored("the reward function took longer than 0.2 s")
        assert await asyncio.gather(*(scorer.score(make_sample(do="hang")) for _ in range(2))) == [late, late]
        assert await scorer.score(make_sample(do="", answer="42")) == Score(1.0)


async def test_a_thread_past_its_time_limit_is_given_up_and_replaced(
    function: Callable[[str], str], make_sample: Callable[..., Sample], gate: Any
) -> None:
    async with scorer_of(function("until_released"), timeout_s=SHORT_S, concurrency=2) as scorer:
        late = Unscored("the reward function took longer than 0.2 s")
        assert await scorer.score(make_sample()) == late
        gate.set()
        assert await scorer.score(make_sample()) == Score(1.0)


async def test_when_every_thread_hangs_the_scorer_says_what_to_do(
    function: Callable[[str], str], make_sample: Callable[..., Sample], gate: Any
) -> None:
    async with scorer_of(function("until_released"), timeout_s=SHORT_S, concurrency=3) as scorer:
        results = await asyncio.gather(*(scorer.score(make_sample()) for _ in range(5)), return_exceptions=True)
        late = [result for result in results if result == Unscored("the reward function took longer than 0.2 s")]
        errors = [result for result in results if isinstance(result, RewardError)]
        assert (len(late), len(errors)) == (3, 2)
        assert "3 calls of the reward function never returned" in str(errors[0])
        with pytest.raises(RewardError, match=r"set reward.mode='process'"):
            await scorer.score(make_sample())


async def test_async_calls_that_ignore_their_cancellation_stop_the_scorer_in_the_end(
    function: Callable[[str], str], make_sample: Callable[..., Sample], gate: Any
) -> None:
    async with scorer_of(function("obey_async"), timeout_s=SHORT_S) as scorer:
        calls = (scorer.score(make_sample(do="ignore cancellation")) for _ in range(MAX_GIVEN_UP))
        assert set(await asyncio.gather(*calls)) == {Unscored("the reward function took longer than 0.2 s")}
        with pytest.raises(RewardError, match=r"8 async reward calls ignored .* set reward.mode='process'"):
            await scorer.score(make_sample())
        gate.set()


@pytest.mark.parametrize("concurrency", [1, 5])
async def test_no_more_async_calls_are_in_flight_than_configured(
    function: Callable[[str], str], make_sample: Callable[..., Sample], concurrency: int
) -> None:
    async with scorer_of(function("counted"), concurrency=concurrency) as scorer:
        module = scorer._function.call.__globals__
        module["most_in_flight"] = 0
        await asyncio.gather(*(scorer.score(make_sample()) for _ in range(12)))
        assert module["most_in_flight"] == concurrency


@pytest.mark.parametrize(("concurrency", "threads"), [(1, 1), (3, 3), (256, INLINE_THREADS)])
async def test_synchronous_calls_have_a_bounded_number_of_threads(
    function: Callable[[str], str], make_sample: Callable[..., Sample], concurrency: int, threads: int
) -> None:
    async with scorer_of(function("right"), concurrency=concurrency) as scorer:
        await scorer.score(make_sample())
        assert scorer._threads is not None
        assert len(scorer._threads._inboxes) == threads


async def test_more_waiting_samples_than_the_bound_are_an_error(make_sample: Callable[..., Sample], gate: Any) -> None:
    from penstock.reward.threads import VerifierThreads

    threads = VerifierThreads(lambda sample: gate.wait(30), 1, 60.0, max_waiting=1)
    tasks = [asyncio.create_task(threads.call(make_sample())) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(RewardError, match="more than 1 samples wait"):
        await threads.call(make_sample())
    threads.close()
    closed = Unscored("the scorer was closed before the sample was scored")
    assert await asyncio.gather(*tasks) == [closed, closed]


@pytest.mark.parametrize("name", ["until_released", "obey_async", "right_by_coroutine"])
async def test_a_cancelled_call_leaves_the_scorer_in_order(
    function: Callable[[str], str], make_sample: Callable[..., Sample], gate: Any, name: str
) -> None:
    async with scorer_of(function(name), concurrency=1) as scorer:
        tasks = [asyncio.create_task(scorer.score(make_sample(do="wait for release", answer="42"))) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        gate.set()
        assert await scorer.score(make_sample()) == Score(1.0, {"length": 3.0} if name == "right_by_coroutine" else {})


async def test_a_coroutine_that_comes_too_late_is_closed_and_not_forgotten(
    function: Callable[[str], str], make_sample: Callable[..., Sample], gate: Any
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with scorer_of(function("late_coroutine"), timeout_s=SHORT_S, concurrency=2) as scorer:
            assert isinstance(await scorer.score(make_sample()), Unscored)
            gate.set()
            assert scorer._threads is not None
            async with asyncio.timeout(30):
                while scorer._threads._given_up:  # a thread's end is not announced to tests
                    await asyncio.sleep(0.01)
        gc.collect()
    assert not [warning for warning in caught if "never awaited" in str(warning.message)]


@pytest.mark.parametrize("mode", ["inline", "process"])
@pytest.mark.parametrize("name", ["right", "obey_async", "until_released"])
async def test_closing_leaves_nobody_waiting(
    function: Callable[[str], str], make_sample: Callable[..., Sample], gate: Any, name: str, mode: str
) -> None:
    scorer = Scorer(function(name), mode=mode, processes=1)
    await scorer.start()
    tasks = [asyncio.create_task(scorer.score(make_sample(do="hang", answer="42"))) for _ in range(4)]
    await asyncio.sleep(0)
    await scorer.close()
    async with asyncio.timeout(30):
        results = await asyncio.gather(*tasks)
    assert set(map(str, results)) <= {
        str(Unscored("the scorer was closed before the sample was scored")),
        str(Score(1.0)),
    }
    with pytest.raises(RewardError, match="the scorer is closed"):
        await scorer.score(make_sample())


async def test_process_mode_kills_at_the_time_limit_and_keeps_the_output(
    function: Callable[[str], str], make_sample: Callable[..., Sample], tmp_path: Path
) -> None:
    output = tmp_path / "reward.log"
    async with scorer_of(function("obey"), mode="process", processes=2, timeout_s=3.0, output=output) as scorer:
        await scorer.start()
        results = await asyncio.gather(*(scorer.score(make_sample(do=do)) for do in ("hang", "print")))
        assert results == [Unscored("the reward function took longer than 3 s and was killed"), Score(1.0)]
    assert b"hello on stdout" in output.read_bytes()


@pytest.mark.parametrize("mode", ["inline", "process"])
@pytest.mark.parametrize("name", ["obey", "obey_async"])
async def test_the_first_traceback_of_each_fault_is_in_the_log(
    function: Callable[[str], str], make_sample: Callable[..., Sample], tmp_path: Path, name: str, mode: str
) -> None:
    output = tmp_path / "reward.log"
    async with scorer_of(function(name), mode=mode, processes=2, output=output) as scorer:
        await asyncio.gather(*(scorer.score(make_sample(do=do)) for do in ["raise", "exit"] * 6))
    text = output.read_text()
    assert text.count("Traceback (most recent call last)") == 2
    assert text.count('raise ValueError("no such\\n  answer")') == 1
    assert "of questions.jsonl:8 has no score: ValueError: no such answer (reward_functions.py:38)" in text


@pytest.mark.parametrize("mode", ["inline", "process"])
async def test_a_reward_that_scores_nothing_ends_the_run_and_names_the_cause_and_the_log(
    function: Callable[[str], str], make_sample: Callable[..., Sample], tmp_path: Path, mode: str
) -> None:
    output = tmp_path / "reward.log"
    async with scorer_of(function("obey"), mode=mode, output=output) as scorer:
        for _ in range(FIRST_SCORE_WITHIN - 1):
            assert isinstance(await scorer.score(make_sample(do="raise")), Unscored)
        with pytest.raises(RewardError, match=r"none of the first 256 .* no such answer \(.*:38\); .*reward\.log"):
            await scorer.score(make_sample(do="raise"))


async def test_each_scorer_counts_for_itself(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    async with scorer_of(function("obey_async")) as broken, scorer_of(function("obey_async")) as evaluation:
        for _ in range(FIRST_SCORE_WITHIN - 1):
            assert await evaluation.score(make_sample(do="", answer="42")) == Score(1.0)
            assert isinstance(await broken.score(make_sample(do="none")), Unscored)
        with pytest.raises(RewardError, match="none of the first 256 samples could be scored"):
            await broken.score(make_sample(do="none"))
        assert await evaluation.score(make_sample(do="", answer="42")) == Score(1.0)


async def test_a_scorer_that_cannot_start_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(600)\n")
    for path, error in [("no_such_package:f", RewardError), (f"{file}:f", TimeoutError)]:
        scorer = Scorer(path, mode="process")
        with pytest.raises(error):
            await asyncio.wait_for(scorer.start(), 30 if error is RewardError else 0.3)
        assert scorer._processes is not None
        assert scorer._processes.pids == []


def test_errors_of_the_function_and_the_mode_show_before_the_run(function: Callable[[str], str]) -> None:
    with pytest.raises(RewardError, match="no module 'no_such_package'"):
        Scorer("no_such_package:f")
    with pytest.raises(RewardError, match=r"reward\.mode is 'threads'; it must be one of inline, thread"):
        Scorer(function("right"), mode="threads")


async def test_a_function_that_is_there_already_needs_no_import_path(make_sample: Callable[..., Sample]) -> None:
    scorer = Scorer(function_of(lambda sample: float(len(sample.response))))
    assert await scorer.score(make_sample("four")) == Score(4.0)
    await scorer.close()
    with pytest.raises(RewardError, match="object of this process"):
        Scorer(function_of(lambda sample: 1.0), mode="process")
    with pytest.raises(RewardError, match="called with one sample"):
        function_of(lambda: 1.0)
