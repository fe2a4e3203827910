"""Local process pools and sandboxes as endpoints of a compute pool, scheduled like any service.

Each transport decides how one request becomes one call and what its end means for the job; limits, order and retries
are the scheduler's. `endpoint` declares the concurrency that the transport has, so that nothing queues out of the
scheduler's sight. What is past its time is killed and replaced, so a job that hangs costs its own time and no more.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import RewardError
from penstock.reward.limits import Endpoint
from penstock.reward.processes import VerifierProcesses
from penstock.reward.retry import Kind, Outcome
from penstock.reward.sandbox import Abort, End, Run, Sandbox, SandboxError
from penstock.reward.transport import Reply, Request
from penstock.sample import Unscored

__all__ = ["ProcessTransport", "SandboxTransport"]

Chunk = Callable[[bytes], Awaitable[None]] | None
NO_STREAM = Outcome(Kind.FINAL, "a local endpoint gives its answer at once; it can't be streamed")


class ProcessTransport:
    """A function `f(body) -> answer`, both JSON values, in processes of its own that are killed at `timeout_s`.

    What the function raises, a time-out and a crash are final for their job: the function would do it again.
    """

    def __init__(
        self,
        function: str,
        *,
        processes: int = 2,
        timeout_s: float = 30.0,
        options: Mapping[str, Any] | None = None,
        output: Path | None = None,
    ) -> None:
        """`function`: `package.module:function` or `./file.py:function`; `output`: file for what it prints."""
        if processes < 1 or not timeout_s > 0:
            raise RewardError(f"processes = {processes}, timeout_s = {timeout_s}: must be above 0")
        self._processes = processes
        self._make = lambda: VerifierProcesses(function, processes, timeout_s, output=output, options=options)
        self._pool: VerifierProcesses | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def endpoint(self, name: str, **declared: Any) -> Endpoint:
        """`local:NAME` with this pool's concurrency; `declared` is the rest of an `Endpoint`."""
        return Endpoint(f"local:{name}", concurrency=self._processes, **declared)

    @property
    def pids(self) -> list[int]:
        """Of the processes that live now."""
        return self._pool.pids if self._pool is not None else []

    def _here(self) -> VerifierProcesses:
        """The processes of the running loop; those of a loop that is closed ended with their pipes."""
        loop = asyncio.get_running_loop()
        if self._pool is None or self._loop is not loop:
            self._pool, self._loop = self._make(), loop
        return self._pool

    async def send(
        self, endpoint: Endpoint, request: Request, timeout_s: float, chunk: Chunk
    ) -> tuple[Outcome, Reply | None]:
        if chunk is not None:
            return NO_STREAM, None
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._here().ask(request.payload(endpoint))
        except TimeoutError:
            return Outcome(Kind.FINAL, f"no answer within {timeout_s:.3g} s; the process was killed"), None
        except RewardError as error:
            return Outcome(Kind.FINAL, str(error)), None
        if isinstance(answer, Unscored):
            return Outcome(Kind.FINAL, answer.cause), None
        return Outcome(Kind.DONE), Reply(msgspec.json.decode(answer), answer, endpoint=endpoint.label)

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and self._loop is asyncio.get_running_loop():
            await pool.close()


class SandboxTransport:
    """A `Sandbox` that is asked as SandboxFusion is: `{"code", "stdin", "run_timeout", ...}` by `/run_code`.

    The sandbox's limits are the most that a request can have. Python only.
    """

    def __init__(self, sandbox: Sandbox, *, concurrency: int = 2) -> None:
        if concurrency < 1:
            raise RewardError(f"concurrency = {concurrency}: must be above 0")
        self._sandbox = sandbox
        self._concurrency = concurrency
        self._threads = ThreadPoolExecutor(concurrency, "penstock-sandbox")

    def endpoint(self, name: str, **declared: Any) -> Endpoint:
        """`local:NAME` with this transport's concurrency; `declared` is the rest of an `Endpoint`."""
        return Endpoint(f"local:{name}", concurrency=self._concurrency, **declared)

    async def send(
        self, endpoint: Endpoint, request: Request, timeout_s: float, chunk: Chunk
    ) -> tuple[Outcome, Reply | None]:
        if chunk is not None:
            return NO_STREAM, None
        try:
            sandbox, code, stdin = self._asked(request.body)
        except (RewardError, TypeError, ValueError) as error:
            return Outcome(Kind.FINAL, f"the request can't be run: {error}", 400), None
        abort = Abort()
        future = asyncio.get_running_loop().run_in_executor(self._threads, sandbox.run, code, stdin, abort)
        future.add_done_callback(lambda _: abort.close())
        try:
            async with asyncio.timeout(timeout_s):
                run = await asyncio.shield(future)
        except SandboxError as error:
            return Outcome(Kind.BROKEN, str(error)), None
        except (TimeoutError, asyncio.CancelledError) as ended:
            abort.set()
            await asyncio.wait([future])  # bounded by the sandbox's own end; the slot is free when this returns
            future.exception()
            if isinstance(ended, asyncio.CancelledError):
                raise
            return Outcome(Kind.FINAL, f"no answer within {timeout_s:.3g} s; the program was killed"), None
        value = _fusion(run)
        return Outcome(Kind.DONE), Reply(value, msgspec.json.encode(value), endpoint=endpoint.label)

    def _asked(self, body: Mapping[str, Any]) -> tuple[Sandbox, str, str]:
        code, stdin = body.get("code"), body.get("stdin") or ""
        if not isinstance(code, str) or not isinstance(stdin, str):
            raise TypeError("'code' and 'stdin' must be text")
        if body.get("language", "python") != "python":
            raise ValueError(f"'language' is {body['language']!r}; this sandbox runs python")
        if body.get("files") or body.get("fetch_files"):
            raise ValueError("'files' and 'fetch_files' are not served here")
        limits = self._sandbox.limits
        wall_s = min(limits.wall_s, float(body.get("run_timeout", limits.wall_s)))
        memory_mb = int(body.get("memory_limit_MB", -1))
        memory_mb = min(limits.memory_mb, memory_mb) if memory_mb > 0 else limits.memory_mb
        limits = dataclasses.replace(limits, wall_s=wall_s, memory_mb=memory_mb)
        return dataclasses.replace(self._sandbox, limits=limits), code, stdin

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _fusion(run: Run) -> dict[str, Any]:
    """A run in SandboxFusion's words."""
    late = run.end is End.TIME_OUT
    stderr = run.stderr if run.end is not End.OUTPUT else f"{run.stderr}\noutput limit exceeded"
    result = {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": run.wall_s,
        "return_code": None if late else -9 if run.code is None else run.code,
        "stdout": run.stdout,
        "stderr": stderr,
    }
    status = "Success" if run.end is End.EXITED else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}
