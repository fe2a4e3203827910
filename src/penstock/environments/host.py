"""Where environments run: a thread and an asyncio loop of their own, each call with a deadline.

Decides what a call may cost: `timeout_s`, and never the loop that tokens and scores go through. An environment that
raises, is late or answers with nonsense is an EnvironmentFault with its cause. One that blocks its loop for good is
left behind with it, a daemon thread, and the next call gets a fresh loop; when `MAX_LEFT` of them are gone the run
hears of it, since threads can't be killed. Refuses to know what is done with an answer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from penstock.environments.protocol import Environment, Observation, Turn
from penstock.errors import EnvironmentFault, RewardError
from penstock.sample import Prompt

__all__ = ["EnvironmentHost"]

T = TypeVar("T")

MAX_LEFT = 8
"""Loops that may be left behind, blocked, before the run ends."""
PROBE_S = 2.0
"""A loop that does not turn for so long after a call's deadline is blocked."""
STOP_S = 1.0
CAUSE_CHARACTERS = 500


class EnvironmentHost:
    """Calls one environment from any loop. `vocab_size` bounds what it may say; `max_observation_tokens` 0: no bound.

    `concurrency`: calls in flight; others wait their turn, and their time runs from then on.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        vocab_size: int,
        timeout_s: float = 30.0,
        max_observation_tokens: int = 0,
        concurrency: int = 256,
    ) -> None:
        self._environment = environment
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._most_tokens = max_observation_tokens or 2**31
        self._gate = asyncio.Semaphore(concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.left_behind = 0
        """Loops that an environment has blocked."""

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    async def reset(self, prompt: Prompt, seed: int) -> Any:
        """The state of a new conversation. Raises EnvironmentFault; RewardError where all is lost."""
        return await self._call("reset", lambda: self._environment.reset(prompt, seed))

    async def step(self, state: Any, turn: Turn) -> Observation:
        """The answer to a turn, checked. Raises as `reset`."""
        return self._checked(await self._call("step", lambda: self._environment.step(state, turn)))

    async def end(self, state: Any) -> None:
        """The conversation is over. Raises as `reset`."""
        await self._call("close", lambda: self._environment.close(state))

    def close(self) -> None:
        """Ends the loop. What still runs on it is cancelled, or left behind where it does not listen."""
        self._closed = True
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(_cancel_all, loop)

    # ---- within

    async def _call(self, what: str, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._gate:
            if self._closed:
                raise EnvironmentFault("the environment is closed")
            if self.left_behind >= MAX_LEFT:
                raise RewardError(
                    f"the environment has blocked {self.left_behind} loops for good; it must not wait or compute "
                    "without end (asyncio.to_thread, or a deadline of its own)"
                )
            loop = self._loop = self._loop or _start_loop()
            future = asyncio.run_coroutine_threadsafe(_guarded(what, begin), loop)
            done, _ = await self._within(future)
            if done:
                if future.cancelled():
                    raise EnvironmentFault(f"{what} was cut off: the environment is closed")
                return future.result()
            future.cancel()
            if loop is self._loop and not await self._turns(loop) and loop is self._loop:
                self._loop = None
                self.left_behind += 1
            raise EnvironmentFault(f"{what} took longer than {self._timeout_s:g} s")

    async def _within(self, future: concurrent.futures.Future[T]) -> tuple[set[Any], set[Any]]:
        try:
            return await asyncio.wait([asyncio.wrap_future(future)], timeout=self._timeout_s)
        except asyncio.CancelledError:
            future.cancel()
            raise

    async def _turns(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether the environment's loop is alive."""
        probe: concurrent.futures.Future[None] = concurrent.futures.Future()
        loop.call_soon_threadsafe(probe.set_result, None)
        done, _ = await asyncio.wait([asyncio.wrap_future(probe)], timeout=PROBE_S)
        return bool(done)

    def _checked(self, observation: Any) -> Observation:
        if not isinstance(observation, Observation):
            raise EnvironmentFault(f"step returned {type(observation).__name__}; it must return an Observation")
        try:
            token_ids = [int(token) for token in observation.token_ids]
            reward = float(observation.reward)
            parts = {str(name): float(value) for name, value in observation.parts.items()}
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise EnvironmentFault(f"step returned an Observation that can't be read: {error}") from error
        if len(token_ids) > self._most_tokens:
            raise EnvironmentFault(
                f"step answered with {len(token_ids)} tokens, over environment.max_observation_tokens="
                f"{self._most_tokens}"
            )
        # One that the model doesn't know would break every engine that is given it.
        if wrong := [token for token in token_ids if not 0 <= token < self._vocab_size]:
            raise EnvironmentFault(f"step answered with token id {wrong[0]}; the vocabulary has {self._vocab_size}")
        if not all(map(math.isfinite, (reward, *parts.values()))):
            raise EnvironmentFault(f"step returned a reward that is not finite: {reward}, parts {parts}")
        return replace(observation, token_ids=token_ids, reward=reward, parts=parts)


async def _guarded(what: str, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """A call whose every failure is an EnvironmentFault, so that none ends the loop or looks like a cancellation."""
    try:
        return await begin()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EnvironmentFault(f"{what} was cancelled by the environment itself") from None
    except EnvironmentFault:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        text = " ".join(str(error).split())[:CAUSE_CHARACTERS]
        raise EnvironmentFault(f"{what} raised {type(error).__name__}" + (f": {text}" if text else "")) from error


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            with contextlib.suppress(RuntimeError):
                loop.close()

    threading.Thread(target=run, name="penstock-environments", daemon=True).start()
    return loop


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """On the loop: cancels what runs there and stops it once that has heard."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if not tasks:
        loop.stop()
        return
    ended = asyncio.gather(*tasks, return_exceptions=True)
    ended.add_done_callback(lambda _: loop.stop())
    loop.call_later(STOP_S, loop.stop)
