"""Verifier processes: reward functions that may hang, crash or hold the interpreter's lock, at arm's length.

The edge of `roster`: starts worker processes, sends them samples, and at a deadline kills the worker's whole process
group and starts another. Decides nothing about who gets what. Lives on the asyncio loop that `start` is called on.
Each worker gets one sample at a time, so its time limit starts when its work does. A sample whose worker is killed
or dies is Unscored; an error of the pool itself (the function can't be loaded, workers don't start) is a RewardError
for all who wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import IO, Any

import msgspec

from penstock.errors import RewardError
from penstock.reward.crossing import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    Ask,
    Done,
    Ready,
    Refused,
    Reply,
    decode_reply,
    encode,
    job_of,
)
from penstock.reward.faults import FaultLog
from penstock.reward.functions import describe_exception
from penstock.reward.roster import QueueFull, Roster
from penstock.sample import Sample, Score, Unscored

__all__ = ["VerifierProcesses"]

Answer = Score | Unscored | bytes
MAX_WAITING = 65_536
START_TIMEOUT_S = 120.0
FRUITLESS_STARTS = 3
"""Workers in a row that ended without being given a sample, before the pool gives up. One may be bad luck."""
EXIT_GRACE_S = 0.5
"""After a worker's exit, how long its last output may still arrive."""
CLOSE_TIMEOUT_S = 5.0
"""A process that survives SIGKILL for so long hangs in the kernel; that is said, not waited for."""
TAIL_BYTES = 2048


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
        self._workers: dict[int, _Worker] = {}
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
        _, worker = await loop.subprocess_exec(lambda: _Worker(self, number), *command, start_new_session=True)
        self._workers[number] = worker
        worker.start_timer = loop.call_later(self._start_timeout_s, self._start_overdue, worker)
        if self._closing or self._failure is not None:
            worker.kill()

    def _start_overdue(self, worker: _Worker) -> None:
        worker.end_cause = f"it did not load the reward function within {self._start_timeout_s:g} s"
        worker.kill()

    def on_reply(self, worker: _Worker, reply: Reply) -> None:
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

    def on_gone(self, worker: _Worker) -> None:
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


class _Worker(asyncio.SubprocessProtocol):
    """One process: its pipes and its end. Gone when it has exited and its pipes are empty, or soon after."""

    def __init__(self, pool: VerifierProcesses, number: int) -> None:
        self._pool = pool
        self.number = number
        self.jobs = 0
        self.end_cause = ""
        self.start_timer: asyncio.TimerHandle | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.SubprocessTransport | None = None
        self._buffer = bytearray()
        self._tail = b""
        self._exited = False

    @property
    def transport(self) -> asyncio.SubprocessTransport:
        assert self._transport is not None, "connection_made comes first"
        return self._transport

    @property
    def pid(self) -> int:
        return self.transport.get_pid()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self._write(self._pool.greeting)

    def ready(self) -> None:
        if self.start_timer is not None:
            self.start_timer.cancel()

    def send(self, message: bytes) -> None:
        """One message at a time is under way, so the transport's buffer is bounded by its size."""
        self.jobs += 1
        self._write(message)

    def _write(self, message: bytes) -> None:
        pipe = self.transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        pipe.write(message)

    def kill(self) -> None:
        """SIGKILL to the whole group. The number stays the group's own until the exit has been noticed."""
        if not self._exited:
            # It may have ended already; some systems say so by PermissionError.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            self._pool.on_output(data)
            return
        self._buffer += data
        try:
            for reply in self._replies():
                self._pool.on_reply(self, reply)
        except (msgspec.DecodeError, ValueError) as error:
            self.end_cause = f"it wrote something that is not a reply ({error})"
            self._buffer.clear()
            self.kill()

    def _replies(self) -> list[Reply]:
        replies = []
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a reply of {length} bytes")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                break
            replies.append(decode_reply(self._buffer[LENGTH.size : end]))
            del self._buffer[:end]
        return replies

    def process_exited(self) -> None:
        # What the verifier started must not outlive it, nor keep its pipes open.
        self.kill()
        self._exited = True
        if self.start_timer is not None:
            self.start_timer.cancel()
        asyncio.get_running_loop().call_later(EXIT_GRACE_S, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)
            self.transport.close()
            self._pool.on_gone(self)

    def exit_text(self) -> str:
        """How it ended, and the last line that it printed."""
        code = self.transport.get_returncode()
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
        else:
            how = f"exit code {code}"
        lines = self._tail.decode(errors="replace").strip().splitlines()
        parts = [self.end_cause, how, lines[-1][:300] if lines else ""]
        return "; ".join(part for part in parts if part)
