"""`accelerate`: every option changes what is observed, sync and async alike, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, get_type_hints

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.errors import ConfigError, RewardError
from penstock.reward import helpers
from penstock.reward.accelerated import accelerate
from penstock.reward.calling import reload_functions
from penstock.reward.failures import DeadlinePassed
from penstock.reward.retry import Kind
from penstock.reward.turns import Turn, Turns
from penstock.sample import Unscored


def failing(times: int, error: BaseException, calls: list):
    """An async and a sync function that raise `error` the first `times` times."""

    def work(x: int) -> int:
        calls.append(x)
        if len(calls) <= times:
            raise error
        return x

    async def work_async(x: int) -> int:
        return work(x)

    return work_async, work


def call_both(options: dict, times: int, error: BaseException) -> list:
    """What the async and the sync function come to: (result or exception type, number of calls)."""
    results = []
    for n in range(2):
        calls: list = []
        function = accelerate(**options)(failing(times, error, calls)[n])
        try:
            value = asyncio.run(function(7)) if n == 0 else function(7)
        except Exception as raised:  # noqa: BLE001 - the type is what is looked at
            value = type(raised)
        results.append((value, len(calls)))
    return results


def test_a_decorated_function_keeps_its_kind_name_and_hints() -> None:
    @accelerate
    async def judge(sample: str, weight: float = 1.0) -> float:
        """Doc."""
        return weight

    @accelerate(attempts=2)
    def check(sample: str) -> bool:
        return True

    assert inspect.iscoroutinefunction(judge)
    assert not inspect.iscoroutinefunction(check)
    assert get_type_hints(judge) == {"sample": str, "weight": float, "return": float}
    assert judge.__name__ == "judge"  # type: ignore[attr-defined]
    assert list(inspect.signature(judge).parameters) == ["sample", "weight"]
    assert check("x") is True


def test_attempts_mend_what_can_be_mended() -> None:
    reset = ConnectionResetError("gone")
    assert call_both({"attempts": 3}, 2, reset) == [(7, 3), (7, 3)]
    assert call_both({"attempts": 1}, 1, reset) == [(ConnectionResetError, 1)] * 2
    assert call_both({"attempts": 2}, 9, reset) == [(ConnectionResetError, 2)] * 2


def test_a_final_error_is_raised_at_once_and_the_users_word_counts() -> None:
    assert call_both({"attempts": 3}, 1, KeyError("x")) == [(KeyError, 1)] * 2
    assert call_both({"attempts": 3, "retry_on": (KeyError,)}, 1, KeyError("x")) == [(7, 2)] * 2
    final = {"attempts": 3, "classify": lambda error: Kind.FINAL}
    assert call_both(final, 1, ConnectionResetError()) == [(ConnectionResetError, 1)] * 2


def test_a_final_failure_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def work() -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        accelerate(attempts=4)(work)()
    assert slept == [0.1, 0.2], "none before the second attempt, none after the last"


def test_being_turned_away_costs_no_attempt_and_waits_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    busy = RuntimeError("busy")
    busy.status_code = 429  # type: ignore[attr-defined]
    busy.response = SimpleNamespace(headers={"retry-after": "0.25"})  # type: ignore[attr-defined]
    calls: list = []
    function = accelerate(attempts=2)(failing(5, busy, calls)[1])
    assert function(7) == 7
    assert slept == [0.25] * 5


@pytest.mark.parametrize("default", [None, 0.5, lambda: 0.5])
def test_a_default_takes_the_place_of_an_error(default: object) -> None:
    expected = default() if callable(default) else default
    assert call_both({"default": default}, 1, KeyError("x")) == [(expected, 1)] * 2


async def test_a_default_that_asks_for_the_error_keeps_the_cause() -> None:
    def unscored(error: BaseException) -> Unscored:
        return Unscored(f"{type(error).__name__}: {error}")

    async def unscored_async(error: BaseException) -> Unscored:
        return unscored(error)

    async def hangs(sample: int) -> float:
        await asyncio.sleep(600)
        return 1.0

    late = await accelerate(timeout_s=0.01, default=unscored)(hangs)(1)
    assert isinstance(late, Unscored)
    assert late.cause.startswith("DeadlinePassed: ")
    broken, plain = failing(9, KeyError("x"), [])
    assert await accelerate(default=unscored_async)(broken)(1) == Unscored("KeyError: 'x'")
    assert accelerate(default=unscored)(plain)(1) == Unscored("KeyError: 'x'")
    assert accelerate(default=float)(plain)(1) == 0.0, "a factory that needs nothing is given nothing"


async def test_an_async_default_is_awaited_and_a_sync_function_refuses_it() -> None:
    async def later() -> str:
        return "later"

    assert await accelerate(default=later)(failing(1, KeyError(), [])[0])(1) == "later"
    with pytest.raises(ConfigError, match="not async"):
        accelerate(default=later)(failing(1, KeyError(), [])[1])(1)


async def test_a_deadline_ends_a_call_that_hangs() -> None:
    ended = []

    @accelerate(timeout_s=0.05)
    async def hangs() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(DeadlinePassed, match="hangs had no result after"):
        await hangs()
    assert ended == [True]
    assert (hangs.stats.late, hangs.stats.running) == (1, 0)


def test_a_deadline_ends_a_sync_call_that_hangs_and_the_next_one_is_none_the_worse() -> None:
    release = threading.Event()

    @accelerate(timeout_s=0.05, default="late")
    def hangs(long: bool) -> str:
        if long:
            release.wait(30)
        return "done"

    assert hangs(True) == "late"
    assert hangs.with_options(timeout_s=60)(False) == "done"
    release.set()


def test_too_many_abandoned_calls_are_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "MOST_ABANDONED", 1)
    own = helpers.Helpers()
    release = threading.Event()
    with pytest.raises(helpers.TooLate):
        own.call(lambda: release.wait(30), 0.02)
    with pytest.raises(RewardError, match='mode = "process"'):
        own.call(lambda: None, 1.0)
    release.set()


def test_a_users_own_timeout_is_not_taken_for_the_deadline() -> None:
    assert call_both({"timeout_s": 10, "attempts": 2}, 1, TimeoutError("mine")) == [(7, 2)] * 2
    assert call_both({"timeout_s": 10}, 1, TimeoutError("mine")) == [(TimeoutError, 1)] * 2


async def test_concurrency_is_kept_and_cancelled_waiters_leave_no_trace() -> None:
    inside = most = 0

    @accelerate(concurrency=3)
    async def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            await asyncio.sleep(0.001)
        finally:
            inside -= 1

    tasks = [asyncio.create_task(work()) for _ in range(50)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 3
    await asyncio.gather(*(work() for _ in range(6)))
    assert most == 3
    assert work.turns.waiting == 0
    assert work.stats.running == 0


def test_concurrency_is_kept_across_threads_and_loops() -> None:
    lock, counts = threading.Lock(), {"inside": 0, "most": 0}

    def body() -> None:
        with lock:
            counts["inside"] += 1
            counts["most"] = max(counts["most"], counts["inside"])
        time.sleep(0.002)
        with lock:
            counts["inside"] -= 1

    @accelerate(concurrency=2, timeout_s=30)
    def work() -> None:
        body()

    threads = [threading.Thread(target=lambda: [work() for _ in range(5)]) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts["most"] == 2
    assert work.stats.calls == work.stats.done == 30

    @accelerate(concurrency=2)
    async def work_async() -> None:
        await asyncio.to_thread(body)

    async def several() -> None:
        await asyncio.gather(*(work_async() for _ in range(5)))

    counts["most"] = 0
    threads = [threading.Thread(target=lambda: asyncio.run(several())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts["most"] == 2


async def test_limits_are_per_key_and_higher_priority_goes_first() -> None:
    order: list[str] = []

    @accelerate(concurrency=1, key=lambda user, n: user, priority=lambda user, n: n)
    async def work(user: str, n: int) -> None:
        order.append(f"{user}{n}")
        await asyncio.sleep(0.005)

    await asyncio.gather(work("a", 0), work("a", 1), work("a", 2), work("b", 0))
    assert order == ["a0", "b0", "a2", "a1"]


async def test_who_is_turned_away_holds_the_others_of_its_limit_back() -> None:
    class Busy(Exception):
        status = 429
        headers: ClassVar = {"retry-after": "600"}

    @accelerate(requests_per_minute=6000, burst=10, key=lambda host: host, timeout_s=6000)
    async def work(host: str) -> None:
        raise Busy

    turned_away = asyncio.create_task(work("a"))
    while not work.stats.retries:
        await asyncio.sleep(0)
    assert not work.turns.take("a", time.monotonic())
    assert work.turns.take("b", time.monotonic()), "another limit is another service"
    turned_away.cancel()
    await asyncio.gather(turned_away, return_exceptions=True)


async def test_rate_is_kept() -> None:
    starts: list[float] = []

    @accelerate(requests_per_minute=6000, burst=5)
    async def work() -> None:
        starts.append(time.monotonic())

    await asyncio.gather(*(work() for _ in range(25)))
    assert len(starts) == 25
    for n, start in enumerate(starts):
        within = sum(1 for at in starts[n:] if at < start + 0.05)
        assert within <= 5 + 0.05 * 100 + 1


def test_a_sync_rate_is_kept_and_a_deadline_covers_the_wait_for_a_turn() -> None:
    @accelerate(requests_per_minute=0.5, burst=1, timeout_s=60)
    def work() -> str:
        return "done"

    assert work() == "done"
    with pytest.raises(DeadlinePassed):
        work.with_options(timeout_s=0.05)()
    assert work.turns.waiting == 0


async def test_a_hedge_answers_for_a_slow_call_and_the_loser_is_cancelled() -> None:
    started = cancelled = 0

    @accelerate(hedge_after_s=0.02, hedge_share=1.0, concurrency=2)
    async def work() -> int:
        nonlocal started, cancelled
        started += 1
        if started == 1:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled += 1
                raise
        return started

    assert await work() == 2
    assert (cancelled, work.stats.hedges) == (1, 1)
    started = 10
    assert await work() == 11, "both turns were given back"
    assert work.stats.hedges == 1


async def test_hedges_stay_within_their_share() -> None:
    @accelerate(hedge_after_s=0.001)
    async def slow() -> None:
        await asyncio.sleep(0.01)

    await asyncio.gather(*(slow() for _ in range(100)))
    assert 1 <= slow.stats.hedges <= 5


async def test_a_hedge_whose_partner_fails_goes_on_alone() -> None:
    started = 0

    @accelerate(hedge_after_s=0.01, hedge_share=1.0)
    async def work() -> str:
        nonlocal started
        started += 1
        if started == 1:
            await asyncio.sleep(0.02)
            raise ConnectionResetError
        await asyncio.sleep(0.04)
        return "second"

    assert await work() == "second"


async def test_nested_calls_do_not_wait_for_themselves() -> None:
    @accelerate(concurrency=1, timeout_s=5)
    async def down(n: int) -> int:
        return 0 if n == 0 else 1 + await down(n - 1)

    assert await down(3) == 3

    @accelerate(concurrency=1, timeout_s=5)
    def down_sync(n: int) -> int:
        return 0 if n == 0 else 1 + down_sync(n - 1)

    assert down_sync(3) == 3


def test_context_variables_reach_a_sync_call_in_its_thread() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("seen")
    assert accelerate(timeout_s=5)(variable.get)() == "seen"


async def test_outer_cancellation_passes_and_counts_as_neither_done_nor_failed() -> None:
    @accelerate(timeout_s=30, attempts=4, default=0, concurrency=1)
    async def work() -> None:
        await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = work.stats
    assert (stats.calls, stats.done, stats.failed, stats.running) == (1, 0, 0, 0)


async def test_a_call_can_have_options_of_its_own() -> None:
    @accelerate(timeout_s=30)
    async def work() -> None:
        await asyncio.sleep(60)

    assert await work.with_options(timeout_s=0.01, default="short")() == "short"
    assert work.stats.calls == 1, "statistics are shared"
    with pytest.raises(ConfigError, match="unknown option 'timeout'"):
        work.with_options(timeout=1)


async def test_each_call_is_told() -> None:
    told: list[tuple] = []
    function = accelerate(on_call=lambda *what: told.append(what), default=0)(failing(1, KeyError("x"), [])[0])
    await function(1)
    await function(2)
    assert [(outcome, type(error)) for outcome, _, error in told] == [("failed", KeyError), ("done", type(None))]
    assert all(seconds >= 0 for _, seconds, _ in told)


async def test_a_listener_that_raises_takes_no_answer_away(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("listener")

    asked, plain = failing(0, KeyError("x"), [])
    assert await accelerate(on_call=broken)(asked)(1) == 1
    assert accelerate(on_call=broken)(plain)(2) == 2
    assert caplog.text.count("on_call raised") == 2


@pytest.mark.parametrize("option", ["key", "priority"])
def test_a_key_or_priority_that_fails_is_the_callers_error_and_no_call(option: str) -> None:
    def broken(x: int) -> float:
        raise KeyError("no such host")

    for function in failing(0, KeyError("x"), []):
        made = accelerate(concurrency=1, **{option: broken})(function)
        with pytest.raises(KeyError, match="no such host"):
            asyncio.run(made(1)) if inspect.iscoroutinefunction(function) else made(1)
        assert (made.stats.calls, made.stats.running) == (0, 0)
    with pytest.raises(ConfigError, match="priority = nan: must be a finite number"):
        accelerate(concurrency=1, priority=lambda x: float("nan"))(failing(0, KeyError("x"), [])[1])(1)


def test_a_waiter_whose_loop_was_closed_keeps_no_turn_from_the_others() -> None:
    release = threading.Event()

    @accelerate(concurrency=1)
    def work(x: int) -> int:
        release.wait(60)
        return x

    answers: list[int] = []
    holder = threading.Thread(target=lambda: answers.append(work(1)), daemon=True)
    holder.start()
    while work.stats.running < 1:
        time.sleep(0.001)

    turn = work.turns.wait(None, time.monotonic(), 0.0, closed_loops_wake())
    after = threading.Thread(target=lambda: answers.append(work(2)), daemon=True)
    after.start()
    while work.turns.waiting < 2:
        time.sleep(0.001)
    release.set()
    holder.join(60)
    after.join(60)
    assert answers == [1, 2]
    assert turn.left


def closed_loops_wake():
    loop = asyncio.new_event_loop()
    loop.close()
    return lambda: loop.call_soon_threadsafe(print)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"attempts": 0},
        {"concurrency": 0},
        {"requests_per_minute": 0},
        {"burst": 3},
        {"hedge_share": 2},
        {"hedge_after_s": 0},
        {"priority": float("nan")},
        {"priority": "high"},
    ],
)
def test_impossible_options_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=f"accelerate: {next(iter(options))} = "):
        accelerate(**options)


def test_a_sync_call_that_takes_long_is_raced_by_another_and_both_turns_come_back() -> None:
    release, started = threading.Event(), []

    @accelerate(hedge_after_s=0.02, hedge_share=1.0, concurrency=2, timeout_s=60)
    def work() -> int:
        started.append(len(started))
        mine = len(started)
        if mine == 1:
            release.wait(60)
        return mine

    assert work() == 2, "the second answers, and the first is not waited for"
    assert work.stats.hedges == 1
    release.set()
    assert work() == 3
    assert work.turns.take(None, time.monotonic())
    assert work.turns.take(None, time.monotonic()), "the loser's turn came back, too"

    @accelerate(hedge_after_s=0.02, hedge_share=0.0, timeout_s=0.2, default="late")
    def alone() -> str:
        started.append(0)
        release.wait(0 if len(started) > 4 else 60)
        return "done"

    release.clear()
    assert alone() == "late", "without a share there is no second start"
    release.set()


def test_a_sync_race_is_lost_only_when_both_fail() -> None:
    started: list[int] = []

    @accelerate(hedge_after_s=0.01, hedge_share=1.0)
    def work(both: bool) -> str:
        started.append(0)
        if len(started) == 1 or both:
            time.sleep(0.05)
            raise KeyError(len(started))
        time.sleep(0.1)
        return "second"

    assert work(False) == "second"
    with pytest.raises(KeyError):
        work(True)
    assert len(started) == 4


def functions(tmp_path: Path, text: str) -> Path:
    (tmp_path / "pool.toml").write_text(text)
    return tmp_path / "pool.toml"


async def test_a_file_changes_limits_while_calls_wait_and_loses_none(tmp_path: Path) -> None:
    inside = most = 0
    go = asyncio.Event()

    @accelerate(concurrency=1, name="reloaded-limits")
    async def work(n: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await go.wait()
        inside -= 1
        return n

    tasks = [asyncio.create_task(work(n)) for n in range(10)]
    while not inside:
        await asyncio.sleep(0)
    assert reload_functions(functions(tmp_path, "[functions.reloaded-limits]\nconcurrency = 4")) == ["reloaded-limits"]
    while inside < 4:
        await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*tasks) == list(range(10))
    assert most == 4
    reload_functions(functions(tmp_path, ""))
    assert work.turns.concurrency == 1, "what the file no longer says is as the decorator says"


def test_a_file_frees_sync_callers_that_wait_for_a_rate(tmp_path: Path) -> None:
    @accelerate(requests_per_minute=0.01, burst=1, name="reloaded-rate")
    def work() -> str:
        return "done"

    assert work() == "done"
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    while not work.turns.waiting:
        time.sleep(0.001)
    reload_functions(functions(tmp_path, "[functions.reloaded-rate]\nrequests_per_minute = 60000\nburst = 100"))
    thread.join(60)
    assert done == ["done"]


async def test_a_file_changes_time_outs_and_attempts_and_options_of_a_call_stay_over_it(tmp_path: Path) -> None:
    calls: list = []

    @accelerate(name="reloaded-options")
    async def work(hang: bool) -> None:
        calls.append(hang)
        if hang:
            await asyncio.sleep(600)
        raise ConnectionResetError

    own = work.with_options(attempts=2)
    reload_functions(functions(tmp_path, "[functions.reloaded-options]\nattempts = 3\ntimeout_s = 5"))
    for function, times in ((work, 3), (own, 2)):
        calls.clear()
        with pytest.raises(ConnectionResetError):
            await function(False)
        assert len(calls) == times
    reload_functions(functions(tmp_path, "[functions.reloaded-options]\ntimeout_s = 0.05"))
    with pytest.raises(DeadlinePassed):
        await own(True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[functions.reloaded-wrong]\nconcurrency = 0", "functions.reloaded-wrong: 'concurrency' = 0"),
        ("[functions.reloaded-wrong]\nconcurency = 2", "did you mean 'concurrency'"),
        ("[functions.reloaded-wrong]\nburst = 2", "needs requests_per_minute"),
        ("[functions.reloaded-nobody]\nattempts = 2", "no accelerated function has this name.*reloaded-wrong"),
        ("[function.reloaded-wrong]\nattempts = 2", "unknown key 'function'"),
    ],
)
def test_a_wrong_file_changes_nothing(tmp_path: Path, text: str, says: str) -> None:
    @accelerate(concurrency=3, name="reloaded-wrong")
    def work() -> None:
        return

    @accelerate(concurrency=3, name="reloaded-right")
    def other() -> None:
        return

    with pytest.raises(ConfigError, match=says):
        reload_functions(functions(tmp_path, "[functions.reloaded-right]\nconcurrency = 5\n" + text))
    assert (work.turns.concurrency, other.turns.concurrency) == (3, 3)


def test_idle_keys_are_forgotten_and_busy_ones_are_not() -> None:
    turns = Turns(concurrency=1, requests_per_minute=60, burst=1)
    assert turns.take("busy", 0.0)
    for n in range(5000):
        now = n * 10.0
        assert turns.take(n, now)
        turns.give_back(n, now)
    assert len(turns) <= 2 * Turns.SWEEP
    assert not turns.take("busy", 60_000.0)


def test_an_interpreter_exits_while_a_call_hangs() -> None:
    code = (
        "import time\nfrom penstock.reward import accelerate\n"
        "print(accelerate(timeout_s=0.05, default='left')(lambda: time.sleep(600))())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


class TurnsAreFair(RuleBasedStateMachine):
    """In flight is what was taken and not given back; nobody waits while there is room; each waiter is woken once."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(concurrency=2, requests_per_minute=None, burst=None)
        self.running = {"a": 0, "b": 0}
        self.waiting: list[Turn] = []
        self.woken: list[Turn] = []

    @rule(key=st.sampled_from("ab"), priority=st.integers(0, 2))
    def come(self, key: str, priority: int) -> None:
        if self.turns.take(key, 0.0):
            self.running[key] += 1
            return
        turn = self.turns.wait(key, 0.0, priority, lambda: None)
        (self.woken if turn.granted else self.waiting).append(turn)

    @rule(key=st.sampled_from("ab"))
    def go(self, key: str) -> None:
        if self.running[key]:
            self.running[key] -= 1
            before = [turn for turn in self.waiting if turn.key == key]
            self.turns.give_back(key, 0.0)
            granted = [turn for turn in before if turn.granted]
            assert granted == sorted(before)[: len(granted)], "highest priority first, then who came first"
            for turn in granted:
                self.waiting.remove(turn)
                self.running[key] += 1

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        if self.waiting:
            turn = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(turn)
            self.turns.leave(turn, 0.0)

    @invariant()
    def bounded_and_never_idle(self) -> None:
        assert self.turns.waiting == len(self.waiting)
        for key, running in self.running.items():
            assert running <= 2
            assert running == 2 or not any(turn.key == key for turn in self.waiting)


TestTurnsAreFair = TurnsAreFair.TestCase
TestTurnsAreFair.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
