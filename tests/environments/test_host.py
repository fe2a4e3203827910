"""What an environment may do to a run: nothing, but leave its own samples unscored."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.environments import EnvironmentHost, Observation, Turn, host, load_environment
from penstock.errors import ConfigError, EnvironmentFault, RewardError
from penstock.sample import Finish, Prompt

PROMPT = Prompt(0, "?", [1], {}, "test")
TURN = Turn(0, array("i", [5, 2]), Finish.STOP, 10, False)


@dataclass
class Does:
    """Does what it is told."""

    what: Callable[[], Any]
    seeds: list[int] = field(default_factory=list)

    async def reset(self, prompt: Prompt, seed: int) -> int:
        self.seeds.append(seed)
        return seed

    async def step(self, state: int, turn: Turn) -> Observation:
        done = self.what()
        return await done if asyncio.iscoroutine(done) else done

    async def close(self, state: int) -> None:
        return None


@contextmanager
def hosted(what: Callable[[], Any], **options: Any) -> Iterator[EnvironmentHost]:
    made = EnvironmentHost(Does(what), **{"vocab_size": 100, "timeout_s": 30.0, **options})
    try:
        yield made
    finally:
        made.close()


def fail(error: BaseException) -> Any:
    raise error


async def test_an_environment_runs_on_a_loop_of_its_own() -> None:
    where: list[str] = []

    def answer() -> Observation:
        where.append(threading.current_thread().name)
        return Observation([7], reward=True, parts={"calls": 1})

    with hosted(answer) as made:
        assert await made.reset(PROMPT, 7) == 7
        assert await made.step(7, TURN) == Observation([7], reward=1.0, parts={"calls": 1.0})
        await made.end(7)
    assert where == ["penstock-environments"]


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        (lambda: fail(ValueError("no such\ntool")), "step raised ValueError: no such tool"),
        (lambda: fail(SystemExit(3)), "step raised SystemExit: 3"),
        (lambda: fail(asyncio.CancelledError()), "cancelled by the environment itself"),
        (lambda: [7], "step returned list; it must return an Observation"),
        (lambda: Observation([7] * 9), "9 tokens, over environment.max_observation_tokens=8"),
        (lambda: Observation([100]), "token id 100; the vocabulary has 100"),
        (lambda: Observation([-1]), "token id -1"),
        (lambda: Observation(["a"]), "can't be read"),  # type: ignore[list-item]
        (lambda: Observation([7], reward=float("nan")), "not finite"),
        (lambda: Observation([7], parts={"x": float("inf")}), "not finite"),
    ],
)
async def test_what_makes_no_sense_is_a_fault_with_its_cause(does: Callable[[], Any], cause: str) -> None:
    with hosted(does, max_observation_tokens=8) as made:
        with pytest.raises(EnvironmentFault, match=cause):
            await made.step(None, TURN)
        assert await made.reset(PROMPT, 1) == 1, "the loop goes on"


async def test_one_that_is_late_is_a_fault_and_its_call_is_cancelled() -> None:
    ended = threading.Event()

    async def waits() -> Observation:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return Observation()

    with hosted(waits, timeout_s=0.02) as made:
        with pytest.raises(EnvironmentFault, match=r"step took longer than 0\.02 s"):
            await made.step(None, TURN)
        assert await asyncio.to_thread(ended.wait, 10.0)
        assert made.left_behind == 0


async def test_one_that_blocks_its_loop_is_left_behind_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PROBE_S", 0.02)
    monkeypatch.setattr(host, "MAX_LEFT", 2)
    stuck = threading.Event()
    with hosted(stuck.wait, timeout_s=0.05) as made:
        try:
            for left in (1, 2):
                with pytest.raises(EnvironmentFault, match="took longer"):
                    await made.step(None, TURN)
                assert made.left_behind == left
            with pytest.raises(RewardError, match="has blocked 2 loops for good"):
                await made.step(None, TURN)
        finally:
            stuck.set()


async def test_no_more_calls_are_in_flight_than_is_asked_for() -> None:
    inside = most = 0
    full = asyncio.Event()

    async def counts() -> Observation:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 3:
            full.set()
        # However slowly calls come, the first ones wait for as many as may be.
        await full.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        inside -= 1
        return Observation([7])

    with hosted(counts, concurrency=3) as made:
        await asyncio.gather(*(made.step(None, TURN) for _ in range(12)))
    assert most == 3


async def test_a_call_whose_caller_is_gone_is_cancelled() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def waits() -> Observation:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return Observation()

    with hosted(waits) as made:
        call = asyncio.create_task(made.step(None, TURN))
        assert await asyncio.to_thread(begun.wait, 10.0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(ended.wait, 10.0)


async def test_a_host_that_is_closed_ends_what_runs_and_begins_nothing() -> None:
    begun = threading.Event()

    async def waits() -> Observation:
        begun.set()
        await asyncio.Event().wait()
        return Observation()

    with hosted(waits) as made:
        call = asyncio.create_task(made.step(None, TURN))
        assert await asyncio.to_thread(begun.wait, 10.0)
        made.close()
        with pytest.raises(EnvironmentFault, match="cut off: the environment is closed"):
            await call
        with pytest.raises(EnvironmentFault, match="is closed"):
            await made.step(None, TURN)


FILE = """
class Mine:
    def __init__(self, tokenizer, size=1):
        if size < 1:
            raise ValueError("size is below 1")
        self.tokenizer, self.size = tokenizer, size
    async def reset(self, prompt, seed): return None
    async def step(self, state, turn): return None
    async def close(self, state): return None

class Half:
    def __init__(self, tokenizer): pass
    async def reset(self, prompt, seed): return None
"""


def test_an_environment_is_loaded_with_its_options_and_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    made: Any = load_environment(f"{tmp_path}/mine.py:Mine", {"size": 3}, "the tokenizer")
    assert (made.size, made.tokenizer) == (3, "the tokenizer")


@pytest.mark.parametrize(
    ("path", "options", "cause"),
    [
        ("calculator", {}, "not of the form"),
        ("no.such.module:Mine", {}, "can't import no.such.module"),
        ("missing.py:Mine", {}, "there is no file"),
        ("FILE:Other", {}, "has no class or function 'Other'"),
        ("FILE:Mine", {"sise": 1}, "unexpected keyword argument 'sise'"),
        ("FILE:Mine", {"size": 0}, "can't be made: ValueError: size is below 1"),
        ("FILE:Half", {}, "a Half has no step and no close"),
    ],
)
def test_a_wrong_name_or_option_is_refused_before_anything_starts(
    path: str, options: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(ConfigError, match=cause):
        load_environment(path.replace("FILE", f"{tmp_path}/mine.py"), options, None)
