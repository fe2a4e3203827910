"""A child process that answers lines with lines: started at the first call, and anew at the next one after its end.

Decides that a call which is cut off ends the child: what that one is stuck in can't be told to stop. The other calls
under way then fail, as they do whenever the child ends, with how it ended and what it said last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO

import msgspec

from penstock.cli.provision.ray_lines import AddActors, Answer, Begin, Call, ListActors, ReleaseActor
from penstock.errors import ProvisionError

__all__ = ["LineChild"]

log = logging.getLogger("penstock.provision")

LINE_BYTES = 1 << 24
"""Of one answer at most."""
LEAVE_S = 5.0
TAIL_BYTES = 400


class LineChild:
    """`what`: what the child is to people."""

    def __init__(self, command: Sequence[str], begin: Begin, what: str) -> None:
        self._command = command
        self._begin = begin
        self._what = what
        self._number = 0
        self._starting = asyncio.Lock()
        self._life: _Life | None = None

    async def ask(self, request: AddActors | ReleaseActor | ListActors) -> Answer:
        """Raises ProvisionError: the call's own failure, or the child's end."""
        async with self._starting:
            if self._life is None or self._life.over:
                self._life = await _Life.start(self._command, self._begin, self._what)
            life = self._life
        self._number += 1
        answer = await life.ask(Call(self._number, request))
        if answer.error:
            raise ProvisionError(answer.error)
        return answer

    async def close(self) -> None:
        if self._life is not None:
            await self._life.close()


class _Life:
    """Of one process, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, said: IO[bytes], what: str) -> None:
        self._process = process
        self._said = said
        self._what = what
        self._why = ""
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._reading = asyncio.create_task(self._read(), name=f"answers of {what}")

    @classmethod
    async def start(cls, command: Sequence[str], begin: Begin, what: str) -> _Life:
        said = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                limit=LINE_BYTES,
                # Ctrl-C is the run's, which has machines to release.
                start_new_session=True,
            )
        except OSError as error:
            said.close()
            raise ProvisionError(f"{what} can't be started: {error}") from error
        life = cls(process, said, what)
        life._write(begin)
        return life

    @property
    def over(self) -> bool:
        return self._reading.done()

    async def ask(self, call: Call) -> Answer:
        answer = self._waiting[call.number] = asyncio.get_running_loop().create_future()
        try:
            self._write(call)
            return await answer
        except asyncio.CancelledError:
            self._kill("it was ended with a call that was cut off")
            raise
        finally:
            del self._waiting[call.number]

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._why = "it was closed"
        self._process.stdin.close()
        try:
            async with asyncio.timeout(LEAVE_S):
                await asyncio.shield(self._reading)
        except TimeoutError:
            self._kill("")
            await self._reading

    def _write(self, line: Begin | Call) -> None:
        # If the child is gone, so is who reads this, and the end of its answers is met below.
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(line) + b"\n")

    def _kill(self, why: str) -> None:
        self._why = self._why or why
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _read(self) -> None:
        """Until the child ends, by itself or because it is of no use any more."""
        assert self._process.stdout is not None
        decoder = msgspec.json.Decoder(Answer)
        try:
            while line := await self._process.stdout.readline():
                answer = decoder.decode(line)
                waiting = self._waiting.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (ValueError, msgspec.MsgspecError) as error:
            self._kill(f"its answer is none: {error}")
        try:
            # Not killed at once: a signal to one that has just ended takes its exit code from who waits for it.
            async with asyncio.timeout(LEAVE_S):
                code = await self._process.wait()
        except TimeoutError:
            self._kill("its answers ended")
            code = await self._process.wait()
        words = f"{self._what} has ended: {self._why or self._last_words(code)}"
        if self._why != "it was closed":
            log.warning("%s", words)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ProvisionError(words))
        self._said.close()

    def _last_words(self, code: int) -> str:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - TAIL_BYTES))
        tail = " ".join(self._said.read().decode(errors="replace").split())
        return f"{how}; last words: {tail}" if tail else how
