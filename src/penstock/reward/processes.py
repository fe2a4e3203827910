"""Verifier processes: reward functions that may hang, crash or hold the interpreter's lock, at arm's length.

The edge of `roster`: starts worker processes, sends them samples, and at a deadline kills the worker's whole process
group and starts another. Decides nothing about who gets what. Lives on the asyncio loop that `start` is called on.
Each worker gets one sample at a time, so its time limit starts when its work does. A sample whose worker is killed
or dies is Unscored; an error of the pool itself (the function can't be loaded, workers don't start) is a RewardError
for all who wait.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import IO, Any

import msgspec

from penstock.errors import RewardError
from penstock.reward.crossing import (
    LENGTH,
    Ask,
    Done,
    Ready,
    Refused,
    Reply,
    encode,
    job_of,
)
from penstock.reward.faults import FaultLog
from penstock.reward.functions import describe_exception
from penstock.reward.roster import QueueFull, Roster
from penstock.reward.worker_process import EXIT_GRACE_S, Worker
from penstock.sample import Sample, Score, Unscored

__all__ = ["VerifierProcesses"]

Answer = Score | Unscored | bytes
MAX_WAITING = 65_536
START_TIMEOUT_S = 120.0
FRUITLESS_STARTS = 3
"""Workers in a row that ended without being given a sample, before the pool gives up. One may be bad luck."""
CLOSE_TIMEOUT_S = 5.0
"""A process that survives SIGKILL for so long hangs in the kernel; that is said, not waited for."""


class VerifierProcesses:
    """A pool of worker processes for one reward function."""

    def __init__(
        self,
        function_path: str,
        processes: int,
        timeout_s: float,
        max_waiting: int = MAX_WAITING,
        start_timeout_s: float = START_TIMEOUT_S,
        output: Path | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`output` is a file that what the function prints and the first traceback of each fault are added to.

        Without it, only crashes quote what it prints, and tracebacks are logged.
        `options` are the function's. Raises RewardError where they can't be written as JSON.
        """
        self._function_path = function_path
        self._greeting = _greeting(options)
        self._processes = processes
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._start_timeout_s = start_timeout_s
        self._output_path = output
        self._output: IO[bytes] | None = None
        self._faults = FaultLog(output)
        self._roster = Roster(timeout_s, max_waiting)
        self._workers: dict[int, Worker] = {}
        self._waiters: dict[int, tuple[asyncio.Future[Answer], bytes]] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._numbers = count()
        self._fruitless = 0
        self._first_ready: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failure: RewardError | None = None
        self._closing = False

    @property
    def greeting(self) -> bytes:
        """What a worker reads before its first job."""
        return self._greeting

    @property
    def pids(self) -> list[int]:
        """Of the workers that live now."""
        return [worker.pid for worker in self._workers.values()]

    async def start(self) -> None:
        """Starts all workers and returns when the first has loaded the function. Raises RewardError."""
        self._refuse_if_over()
        if self._first_ready is None:
            self._first_ready = asyncio.get_running_loop().create_future()
            if self._output_path is not None:
                try:
                    self._output = self._output_path.open("ab", buffering=0)
                except OSError as error:
                    raise RewardError(f"the reward function's output file can't be opened: {error}") from error
            for _ in range(self._processes):
                self._spawn()
        await asyncio.shield(self._first_ready)

    async def score(self, sample: Sample) -> Score | Unscored:
        """Scores one sample; waits for a free worker first. Raises RewardError where the pool can't work at all.

        A wait for a worker ends: those before it are each given up at their time limit, and a pool that can't
        start workers fails.
        """
        await self.start()
        number = next(self._numbers)
        try:
            message = job_of(number, sample)
        except ValueError as error:
            return Unscored(str(error))
        result = await self._answer(number, message)
        return result if not isinstance(result, bytes) else Unscored("the worker answered something else")

    async def ask(self, body: bytes) -> bytes | Unscored:
        """Calls the function with a JSON value; what it returns, as JSON, or why there is nothing.

        As `score`, for functions of anything. Raises RewardError as well.
        """
        await self.start()
        number = next(self._numbers)
        try:
            message = encode(Ask(number, body))
        except ValueError as error:
            return Unscored(str(error))
        result = await self._answer(number, message)
        return result if not isinstance(result, Score) else Unscored("the worker answered something else")

    async def _answer(self, number: int, message: bytes) -> Answer:
        try:
            self._roster.submit(number)
        except QueueFull:
            raise RewardError(
                f"more than {self._max_waiting} samples wait for a verifier process; raise reward.processes"
            ) from None
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiters[number] = (future, message)
        self._assign()
        try:
            return await future
        finally:
            if self._waiters.pop(number, None) is not None and future.cancelled():
                self._withdraw(number)

    async def close(self) -> None:
        """Kills all workers and what they started; samples that still wait are Unscored. Leaves no child process."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for future, _ in self._waiters.values():
            if not future.done():
                future.set_result(Unscored("the scorer was closed before the sample was scored"))
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(RewardError("the scorer was closed while it started"))
            self._first_ready.exception()  # retrieved here, in case nobody waits
        deadline = asyncio.get_running_loop().time() + CLOSE_TIMEOUT_S
        while self._starting or self._workers:
            for worker in self._workers.values():
                worker.kill()
            if asyncio.get_running_loop().time() > deadline:
                raise RewardError(f"the verifier processes {self.pids} did not end within {CLOSE_TIMEOUT_S:g} s")
            gone = [worker.gone for worker in self._workers.values()]
            await asyncio.wait([*self._starting, *gone], timeout=EXIT_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        if self._output is not None:
            self._output.close()
            self._output = None

    def _refuse_if_over(self) -> None:
        if self._closing:
            raise RewardError("the scorer is closed")
        if self._failure is not None:
            raise self._failure

    def _spawn(self) -> None:
        task = asyncio.get_running_loop().create_task(self._start_worker(), name="penstock-verifier-start")
        self._starting.add(task)
        task.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(RewardError(f"a verifier process can't be started: {describe_exception(error)}"))

    async def _start_worker(self) -> None:
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        command = (sys.executable, "-P", "-m", "penstock.reward.worker", self._function_path, str(os.getpid()))
        _, worker = await loop.subprocess_exec(lambda: Worker(self, number), *command, start_new_session=True)
        self._workers[number] = worker
        worker.start_timer = loop.call_later(self._start_timeout_s, self._start_overdue, worker)
        if self._closing or self._failure is not None:
            worker.kill()

    def _start_overdue(self, worker: Worker) -> None:
        worker.end_cause = f"it did not load the reward function within {self._start_timeout_s:g} s"
        worker.kill()

    def on_reply(self, worker: Worker, reply: Reply) -> None:
        match reply:
            case Ready():
                worker.ready()
                self._roster.worker_ready(worker.number)
                if self._first_ready is not None and not self._first_ready.done():
                    self._first_ready.set_result(None)
            case Refused(cause=cause):
                self._fail(RewardError(cause))
            case Done(number=number):
                if reply.traceback:
                    self._faults.take(reply.fault, reply.traceback)
                if self._roster.finish(worker.number, number):
                    self._resolve(number, reply.result())
        self._assign()

    def on_output(self, data: bytes) -> None:
        if self._output is not None:
            try:
                self._output.write(data)
            except OSError as error:
                self._output.close()
                self._output = None
                self._fail(RewardError(f"the reward function's output can't be written: {error}"))

    def on_gone(self, worker: Worker) -> None:
        """The worker has ended and its output was read."""
        del self._workers[worker.number]
        job = self._roster.lose(worker.number)
        if job is not None:
            self._resolve(job, Unscored(f"the verifier process died: {worker.exit_text()}"))
        if self._closing or self._failure is not None:
            return
        self._fruitless = 0 if worker.jobs else self._fruitless + 1
        if self._fruitless >= FRUITLESS_STARTS:
            self._fail(
                RewardError(
                    f"{self._fruitless} verifier processes in a row ended before they scored anything: "
                    f"{worker.exit_text()}"
                )
            )
            return
        self._spawn()

    def _assign(self) -> None:
        if self._closing or self._failure is not None:
            return
        now = asyncio.get_running_loop().time()
        for worker_number, job in self._roster.assign(now):
            self._workers[worker_number].send(self._waiters[job][1])
        self._arm()

    def _arm(self) -> None:
        deadline = self._roster.next_deadline()
        if deadline is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._end_overdue)

    def _end_overdue(self) -> None:
        self._timer = None
        for worker_number, job in self._roster.overdue(asyncio.get_running_loop().time()):
            self._workers[worker_number].kill()
            self._resolve(job, Unscored(f"the reward function took longer than {self._timeout_s:g} s and was killed"))
        self._assign()

    def _withdraw(self, number: int) -> None:
        worker_number = self._roster.worker_of(number)
        if worker_number is not None:
            self._roster.lose(worker_number)
            self._workers[worker_number].kill()
        else:
            self._roster.withdraw(number)

    def _resolve(self, number: int, result: Answer) -> None:
        waiter = self._waiters.pop(number, None)
        if waiter is not None and not waiter[0].done():
            waiter[0].set_result(result)

    def _fail(self, error: RewardError) -> None:
        """No sample can be scored any more: everybody who waits is told why."""
        if self._failure is not None or self._closing:
            return
        self._failure = error
        for future, _ in self._waiters.values():
            if not future.done():
                future.set_exception(error)
        self._waiters.clear()
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(error)
        for worker in self._workers.values():
            worker.kill()


def _greeting(options: Mapping[str, Any] | None) -> bytes:
    try:
        body = msgspec.json.encode(dict(options or {}))
    except TypeError as error:
        raise RewardError(f"reward.options can't be sent to verifier processes: {error}") from error
    return LENGTH.pack(len(body)) + body
