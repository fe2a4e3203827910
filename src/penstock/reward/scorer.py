"""The scorer: a finished sample goes in, a Score or Unscored comes out, whatever the reward function does.

Decides how a function is called: async ones on the caller's loop, synchronous ones on threads (mode `sync`: one sample
after another), and in modes `process` and `ray` either kind in processes that are killed at the deadline. No mode calls
it twice for one sample. Knows nothing of groups or advantages. A deadline starts
when the call does. What raises, returns nonsense or runs late is Unscored with its cause; RewardError is raised only
where no sample could be scored any more, or none has been for long (`drought`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import RewardError
from penstock.reward.drought import Drought
from penstock.reward.faults import FaultLog
from penstock.reward.functions import RewardFunction, load_function, normalise
from penstock.reward.processes import VerifierProcesses
from penstock.reward.threads import VerifierThreads
from penstock.sample import Sample, Score, Unscored

if TYPE_CHECKING:
    from penstock.reward.ray_verifiers import RayVerifiers

__all__ = ["Scorer"]

MODES = ("inline", "thread", "sync", "process", "ray")
INLINE_THREADS = 8
"""Synchronous functions share the interpreter, so more threads help only those that wait."""
CANCEL_GRACE_S = 1.0
"""How long a cancelled call may clean up before it is given up."""
MAX_GIVEN_UP = 8
"""Async calls that ignore their cancellation, before the scorer stops."""


class Scorer:
    """Scores samples with one reward function. Belongs to the asyncio loop that its first call runs on."""

    def __init__(
        self,
        function: str | RewardFunction,
        *,
        options: Mapping[str, Any] | None = None,
        mode: str = "inline",
        processes: int = 2,
        timeout_s: float = 30.0,
        concurrency: int = 256,
        threads: int = INLINE_THREADS,
        output: Path | None = None,
    ) -> None:
        """Modes as in `reward.mode`; `thread` is another name for `inline`. `process` and `ray` load the function in
        `start`, the others here. Raises RewardError.

        `function`: an import path or a file with a name (`load_function`); inline mode takes a loaded one as well.
        `options`: of a function that is named, as in `reward.options`; they cross to processes as JSON.
        `threads`: for synchronous functions of inline mode.
        `output`: file that the first traceback of each distinct fault is added to and, in process mode, what the
        function prints.
        """
        self._function_path = function if isinstance(function, str) else function.path
        self._timeout_s = timeout_s
        self._output = output
        self._faults = FaultLog(output)
        self._drought = Drought()
        self._calls: set[asyncio.Task[Score | Unscored]] = set()
        self._given_up: set[asyncio.Task[Score | Unscored]] = set()
        self._processes: VerifierProcesses | RayVerifiers | None = None
        self._threads: VerifierThreads | None = None
        if not timeout_s > 0 or processes < 1 or concurrency < 1 or threads < 1:
            raise RewardError(
                f"timeout_s = {timeout_s:g} must be above 0, processes = {processes}, concurrency = {concurrency} and "
                f"threads = {threads} at least 1"
            )
        concurrency = 1 if mode == "sync" else concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._closed = False
        if mode not in MODES:
            raise RewardError(f"reward.mode is '{mode}'; it must be one of {', '.join(MODES)}")
        if mode in ("process", "ray"):
            if not isinstance(function, str):
                raise RewardError(
                    f"the reward function '{function.path}' is an object of this process; mode '{mode}' loads it in "
                    "others and needs its import path: 'package.module:function' or './my_reward.py:function'"
                )
            if mode == "process":
                self._processes = VerifierProcesses(function, processes, timeout_s, output=output, options=options)
            else:
                from penstock.reward.ray_verifiers import RayVerifiers

                self._processes = RayVerifiers(function, processes, timeout_s, output=output, options=options)
            return
        self._function = load_function(function, options) if isinstance(function, str) else function
        if not self._function.is_async:
            threads = min(threads, concurrency)
            self._threads = VerifierThreads(self._function.call, threads, timeout_s, faults=self._faults)

    async def start(self) -> None:
        """Gets ready, so that errors of the function show before the run begins; `score` does it too where needed.

        Raises RewardError. Closes the scorer where it can't start.
        """
        if self._processes is not None:
            try:
                await self._processes.start()
            except BaseException:
                await self.close()  # the caller may never get to it, and no process may be left
                raise

    async def score(self, sample: Sample) -> Score | Unscored:
        """Scores one sample.

        Raises RewardError where the function can't be called at all, where it has scored nothing for so long that it
        must be broken, and where the scorer is closed.
        """
        if self._closed:
            raise RewardError("the scorer is closed")
        result = await self._call(sample)
        if not self._closed:  # what closing leaves unscored is nobody's fault
            self._drought.take(result)
            if verdict := self._drought.verdict:
                log = f"; tracebacks and output: {self._output}" if self._output is not None else ""
                raise RewardError(f"reward.function '{self._function_path}': {verdict}{log}")
        return result

    async def _call(self, sample: Sample) -> Score | Unscored:
        if self._processes is not None:
            return await self._processes.score(sample)
        sample = sample.snapshot()  # what a function does to it must not reach what is trained on
        if self._threads is not None:
            result = await self._threads.call(sample)
            if not inspect.isawaitable(result):
                return normalise(result)
            # A plain function that hands back a coroutine, a common slip: its result is what was meant.
            async with self._slots:
                return await self._in_time(result, sample)
        async with self._slots:
            try:
                awaitable = self._function.call(sample)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # the cause of this sample's missing score
                return Unscored(self._faults.cause(error, sample))
            return await self._in_time(awaitable, sample)

    async def close(self) -> None:
        """Ends processes and threads; samples under way are Unscored."""
        self._closed = True
        if self._processes is not None:
            await self._processes.close()
        if self._threads is not None:
            self._threads.close()
        for task in self._calls:
            task.cancel()

    async def _in_time(self, awaitable: Awaitable[Any], sample: Sample) -> Score | Unscored:
        """Awaits a call for at most the time limit. One that ignores its cancellation is left behind and counted."""
        refusal = self._refusal()
        if refusal is not None:
            _close(awaitable)
            raise refusal
        task = asyncio.ensure_future(self._guarded(awaitable, sample))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(lambda _: _close(awaitable))  # cancelled before it began, nobody else would
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if self._closed:
            return Unscored("the scorer was closed before the sample was scored")
        if done:
            return task.result()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        if not done:
            self._given_up.add(task)
            task.add_done_callback(self._given_up.discard)
        return Unscored(f"the reward function took longer than {self._timeout_s:g} s")

    async def _guarded(self, awaitable: Awaitable[Any], sample: Sample) -> Score | Unscored:
        """The call's result or its cause; nothing that it raises reaches the loop."""
        try:
            return normalise(await awaitable)
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:  # noqa: BLE001
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                return Unscored("the call was cancelled")  # by its deadline or by who waits: no fault of the function
            return Unscored(self._faults.cause(error, sample))

    def _refusal(self) -> RewardError | None:
        if self._closed:
            return RewardError("the scorer is closed")
        if len(self._given_up) >= MAX_GIVEN_UP:
            return RewardError(
                f"{len(self._given_up)} async reward calls ignored their cancellation and still run; "
                "set reward.mode='process', where such calls are killed"
            )
        return None


def _close(awaitable: Awaitable[Any]) -> None:
    """Ends a coroutine that may never have begun, so that Python doesn't complain of it much later."""
    if inspect.iscoroutine(awaitable):
        awaitable.close()
