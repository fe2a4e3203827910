"""Worker processes for real: each misdeed of a reward function, and what is left of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from reward_support import alive, until_gone

from penstock.errors import RewardError
from penstock.reward import Sample, Score, Unscored
from penstock.reward.processes import FRUITLESS_STARTS, VerifierProcesses

GENEROUS_S = 60.0
SHORT_S = 0.5


@asynccontextmanager
async def pool_of(
    path: str, processes: int = 1, timeout_s: float = GENEROUS_S, **options: Any
) -> AsyncIterator[VerifierProcesses]:
    pool = VerifierProcesses(path, processes, timeout_s, **options)
    try:
        yield pool
    finally:
        await pool.close()
        assert pool.pids == []


async def test_samples_are_scored_by_sync_and_async_functions(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    for name in ("right", "right_later", "right_by_coroutine", "judge"):
        async with pool_of(function(name), processes=2) as pool:
            results = await asyncio.gather(*(pool.score(make_sample(str(n), answer="3")) for n in range(6)))
            assert [result.value for result in results if isinstance(result, Score)] == [0, 0, 0, 1, 0, 0], name


async def test_the_function_sees_the_same_sample_as_in_this_process(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    from reward_functions import describe

    sample = make_sample("ä ✓", replica=3, do="whole sample", nested={"a": [1, (2, 3)]})
    async with pool_of(function("obey")) as pool:
        result = await pool.score(sample)
    assert isinstance(result, Score)
    assert list(result.parts) == [describe(sample)]


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
async def test_a_sample_without_a_proper_result_is_unscored_and_the_worker_goes_on(
    function: Callable[[str], str], make_sample: Callable[..., Sample], do: str, cause: str
) -> None:
    async with pool_of(function("obey")) as pool:
        before = await pool.score(make_sample(do="pid"))
        assert await pool.score(make_sample(do=do)) == Unscored(cause)
        assert await pool.score(make_sample(do="pid")) == before


async def test_what_a_function_prints_does_not_get_into_the_protocol(
    function: Callable[[str], str], make_sample: Callable[..., Sample], tmp_path: Path
) -> None:
    output = tmp_path / "reward.log"
    async with pool_of(function("obey"), output=output) as pool:
        assert await pool.score(make_sample(do="print")) == Score(1.0)
        assert isinstance(await pool.score(make_sample(do="pid")), Score)
    text = output.read_bytes()
    assert b"hello from a child" in text
    assert b"\x01\x02raw bytes" in text


async def test_a_function_may_set_an_alarm_of_its_own(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    async with pool_of(function("obey")) as pool:
        assert await pool.score(make_sample(do="alarm")) == Unscored("TimeoutError: by alarm (reward_functions.py:151)")


@pytest.mark.parametrize("do", ["hang", "hold the lock"])
async def test_a_function_that_never_returns_is_killed_and_its_worker_replaced(
    function: Callable[[str], str], make_sample: Callable[..., Sample], do: str
) -> None:
    async with pool_of(function("obey"), timeout_s=SHORT_S) as pool:
        await pool.start()
        pids = pool.pids
        result = await pool.score(make_sample(do=do))
        assert result == Unscored("the reward function took longer than 0.5 s and was killed")
        await until_gone(*pids)
        assert isinstance(await scored_at_last(pool, make_sample(do="pid")), Score)
        assert set(pool.pids).isdisjoint(pids)


async def scored_at_last(pool: VerifierProcesses, sample: Sample) -> Score | Unscored:
    """On a busy machine even a quick function may miss a short deadline; it gets a few tries."""
    for _ in range(5):
        result = await pool.score(sample)
        if isinstance(result, Score):
            break
    return result


async def test_what_a_hanging_function_started_dies_with_it(
    function: Callable[[str], str], make_sample: Callable[..., Sample], tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    async with pool_of(function("obey"), timeout_s=2.0) as pool:
        result = await pool.score(make_sample(do="spawn and hang", pid_file=str(pid_file)))
        assert isinstance(result, Unscored)
        await until_gone(int(pid_file.read_text()))


async def test_a_death_is_not_told_with_what_an_earlier_sample_printed(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    async with pool_of(function("obey"), processes=1) as pool:
        assert isinstance(await pool.score(make_sample(do="print")), Score)
        death = await pool.score(make_sample(do="die"))
    assert death == Unscored("the verifier process died: exit code 9")


async def test_a_crash_is_that_samples_cause_and_the_worker_is_replaced(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    async with pool_of(function("obey")) as pool:
        crash = await pool.score(make_sample(do="crash"))
        assert crash == Unscored("the verifier process died: exit code 7; about to crash")
        # More crashes than the pool allows for workers that never score: each had its sample.
        for _ in range(FRUITLESS_STARTS):
            assert isinstance(await pool.score(make_sample(do="crash")), Unscored)
        assert isinstance(await pool.score(make_sample(do="pid")), Score)


async def test_a_forked_child_neither_hides_its_parents_death_nor_outlives_it(
    function: Callable[[str], str], make_sample: Callable[..., Sample], tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    async with pool_of(function("obey")) as pool:
        result = await pool.score(make_sample(do="fork and crash", pid_file=str(pid_file)))
        assert isinstance(result, Unscored)
        assert "exit code 9" in result.cause
        await until_gone(int(pid_file.read_text()))


async def test_a_worker_killed_from_outside_costs_its_sample_only(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    async with pool_of(function("obey"), processes=2) as pool:
        await pool.start()
        hanging = asyncio.create_task(pool.score(make_sample(do="hang")))
        await asyncio.sleep(0)
        busy = await busy_pid(pool, hanging)
        os.kill(busy, signal.SIGKILL)
        assert await hanging == Unscored("the verifier process died: killed by SIGKILL")
        assert isinstance(await pool.score(make_sample(do="pid")), Score)


async def busy_pid(pool: VerifierProcesses, task: asyncio.Task[Any]) -> int:
    """The process of the only sample under way."""
    while not pool._roster.running:
        assert not task.done()
        await asyncio.sleep(0.01)
    (worker,) = pool._roster._running
    return pool._workers[worker].pid


async def test_as_many_processes_score_as_were_asked_for(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    for processes in (1, 3):
        async with pool_of(function("obey"), processes=processes) as pool:
            await pool.score(make_sample())
            assert len(pool.pids) == processes


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.rewards:f", "there is no module 'no_such_package'"),
        ("penstock.reward.verifiers:exact_mach", "has no 'exact_mach'"),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_an_error_for_everybody(
    make_sample: Callable[..., Sample], path: str, message: str
) -> None:
    async with pool_of(path, processes=2) as pool:
        with pytest.raises(RewardError, match=message):
            await pool.start()
        with pytest.raises(RewardError, match=message):
            await pool.score(make_sample())


async def test_workers_that_die_while_they_start_end_the_pool_with_their_last_words(
    make_sample: Callable[..., Sample], tmp_path: Path
) -> None:
    file = tmp_path / "fatal.py"
    file.write_text("import os, sys\nprint('no licence', file=sys.stderr, flush=True)\nos._exit(5)\n")
    async with pool_of(f"{file}:f") as pool:
        waiting = [asyncio.create_task(pool.score(make_sample())) for _ in range(3)]
        for task in waiting:
            with pytest.raises(RewardError, match=r"3 verifier processes in a row .* exit code 5; no licence"):
                await task


async def test_a_function_that_takes_for_ever_to_load_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(600)\n")
    async with pool_of(f"{file}:f", start_timeout_s=0.3) as pool:
        with pytest.raises(RewardError, match=r"did not load the reward function within 0.3 s; killed by SIGKILL"):
            await pool.start()


async def test_a_row_that_cannot_cross_leaves_its_sample_unscored(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    async with pool_of(function("right")) as pool:
        result = await pool.score(make_sample(answer="42", odd=object()))
        assert isinstance(result, Unscored)
        assert "its field 'odd'" in result.cause
        result = await pool.score(make_sample(answer="42", half="\ud800"))
        assert isinstance(result, Unscored)
        assert "surrogates not allowed" in result.cause
        assert await pool.score(make_sample()) == Score(1.0)


async def test_a_large_row_crosses(function: Callable[[str], str], make_sample: Callable[..., Sample]) -> None:
    async with pool_of(function("right")) as pool:
        assert await pool.score(make_sample(answer="42", context="x" * 3_000_000)) == Score(1.0)


async def test_more_waiting_samples_than_the_bound_are_an_error(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    async with pool_of(function("obey"), max_waiting=2) as pool:
        await pool.start()
        tasks = [asyncio.create_task(pool.score(make_sample(do="hang"))) for _ in range(3)]
        await busy_pid(pool, tasks[0])
        with pytest.raises(RewardError, match="more than 2 samples wait"):
            await pool.score(make_sample())
        await pool.close()
        closed = Unscored("the scorer was closed before the sample was scored")
        assert await asyncio.gather(*tasks) == [closed] * 3


async def test_a_sample_that_nobody_waits_for_any_more_frees_its_worker(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    async with pool_of(function("obey")) as pool:
        await pool.start()
        hanging = asyncio.create_task(pool.score(make_sample(do="hang")))
        waiting = asyncio.create_task(pool.score(make_sample(do="hang")))
        busy = await busy_pid(pool, hanging)
        waiting.cancel()
        hanging.cancel()
        await asyncio.wait({hanging, waiting})
        assert hanging.cancelled()
        assert isinstance(await pool.score(make_sample(do="pid")), Score)
        await until_gone(busy)


async def test_a_closed_pool_leaves_no_process_and_takes_no_sample(
    function: Callable[[str], str], make_sample: Callable[..., Sample]
) -> None:
    pool = VerifierProcesses(function("right"), 3, GENEROUS_S)
    await pool.start()
    pids = pool.pids
    await pool.close()
    assert not any(map(alive, pids))
    with pytest.raises(RewardError, match="the scorer is closed"):
        await pool.score(make_sample())
    await pool.close()


async def test_a_pool_closed_while_it_starts_says_so(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(600)\n")
    pool = VerifierProcesses(f"{file}:f", 2, GENEROUS_S)
    starting = asyncio.create_task(pool.start())
    await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(RewardError, match="closed while it started"):
        await starting


async def test_an_output_file_that_cannot_be_opened_is_an_error(function: Callable[[str], str], tmp_path: Path) -> None:
    async with pool_of(function("right"), output=tmp_path / "no" / "such" / "folder") as pool:
        with pytest.raises(RewardError, match="output file can't be opened"):
            await pool.start()


@pytest.mark.parametrize("do", ["hang", "hold the lock", "idle"])
async def test_workers_die_with_the_process_that_started_them(
    function: Callable[[str], str], tmp_path: Path, do: str
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from reward_support import build_sample
        from penstock.reward.processes import VerifierProcesses

        async def main():
            pool = VerifierProcesses({function("obey")!r}, 2, 600)
            await pool.start()
            while len(pool.pids) < 2:
                await asyncio.sleep(0.01)
            tasks = [asyncio.create_task(pool.score(build_sample(do={do!r}))) for _ in range(2) if {do!r} != "idle"]
            await asyncio.sleep(0.2)
            print(*pool.pids, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
        """)
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=asyncio.subprocess.PIPE)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        parent.kill()
        await until_gone(*pids)
    finally:
        with contextlib.suppress(ProcessLookupError):
            parent.kill()
        await parent.wait()
