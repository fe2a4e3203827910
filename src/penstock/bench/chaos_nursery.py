"""Starts `penstock` commands by forking one process that has imported everything: real processes, some 20 ms each.

Decides nothing. Whoever drives it writes one JSON object a line to its standard input and reads one a line back.
All its children (and itself) see a wall clock that is off by the double in a shared file, so that it can be made to
jump. When its input ends, or it dies, its children are ended; a child that has died stays a zombie until it is ended
here, so that a process id that was given out never means another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import mmap
import os
import runpy
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError

PRELOADED = (
    *("penstock.cli.manager", "penstock.cli.adopted", "penstock.cli.parent", "penstock.rollout.server"),
    *("penstock.rollout.balanced", "penstock.cli.join", "penstock.instance.agent", "penstock.instance.paced"),
    *("penstock.instance.preemption", "aiohttp.web"),
)
ANSWER_S = 120.0
"""For one line of answer: a machine that is busy takes long to import all that."""


@contextlib.contextmanager
def skewed_wall_clock(path: Path) -> Iterator[None]:
    """Makes this process's `time.time` off by the seconds in `path`, a double, read at each call."""
    real = time.time
    with path.open("rb") as file, mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ) as shared:
        time.time = lambda: real() + float(struct.unpack_from("<d", shared)[0])
        try:
            yield
        finally:
            time.time = real


def set_skew(path: Path, seconds: float) -> None:
    """In place: the mappings of other processes stay valid."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(struct.pack("<d", seconds))


class Nursery:
    """The driver's side; one caller at a time is served, the others wait."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()

    async def start(self, words: list[str], log_path: Path) -> int:
        """Starts `penstock WORDS...` and returns its process id."""
        return int((await self._ask({"start": words, "log": str(log_path)}))["pid"])

    async def end(self, pid: int) -> None:
        """SIGKILL, unless it is dead already, and forgets it."""
        await self._ask({"end": pid})

    async def lives(self, pid: int) -> bool:
        return bool((await self._ask({"lives": pid}))["lives"])

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise PenstockError("the nursery has no pipes")
        async with self._turn, asyncio.timeout(ANSWER_S):
            stdin.write(json.dumps(request).encode() + b"\n")
            await stdin.drain()
            line = await stdout.readline()
        if not line:
            raise PenstockError("the nursery has died")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.asynccontextmanager
async def open_nursery(clock: Path, environment: Mapping[str, str]) -> AsyncIterator[Nursery]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(clock)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        yield Nursery(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(ANSWER_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


# ---- the nursery's side


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    held_by_children, held_here = os.pipe()
    children: set[int] = set()
    with skewed_wall_clock(Path(sys.argv[1])):
        # Unbuffered: a child must not inherit lines that are not for it.
        with os.fdopen(os.dup(0), "rb", buffering=0) as requests:
            while line := requests.readline():
                answer = _serve(json.loads(line), children, held_by_children, held_here)
                os.write(1, json.dumps(answer).encode() + b"\n")
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _serve(request: dict[str, Any], children: set[int], stdin: int, held_here: int) -> dict[str, Any]:
    if "start" in request:
        pid = os.fork()
        if pid == 0:
            _become(request["start"], request["log"], stdin, held_here)
        children.add(pid)
        return {"pid": pid}
    if "lives" in request:
        pid = request["lives"]
        return {"lives": os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None}
    pid = request["end"]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    children.discard(pid)
    return {}


def _become(words: list[str], log_path: str, stdin: int, held_here: int) -> None:
    """The child: `penstock WORDS...`, ended when the nursery is. Never returns."""
    code = 1
    try:
        os.setsid()
        os.close(held_here)
        os.dup2(stdin, 0)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["penstock", *words, "--exit-with-stdin"]
        runpy.run_module("penstock", run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
