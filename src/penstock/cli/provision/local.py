"""Machines that are processes here: `penstock join` children of the manager, for one machine and for tests.

They end with the manager, whose pipe they watch, so there is never one that a later manager would have to find.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from penstock.errors import ConfigError
from penstock.rollout.doors import agents_environment
from penstock.rollout.provision_types import JoinOrder, Seen

__all__ = ["LocalProvisioner"]

LEAVE_S = 5.0
TAIL_LINES = 3


class LocalProvisioner:
    """`arguments`: further words for `penstock join`. `leave_s`: from SIGTERM to SIGKILL."""

    def __init__(self, join: JoinOrder, *, arguments: Sequence[str] = (), leave_s: float = LEAVE_S) -> None:
        if isinstance(arguments, str) or not all(isinstance(word, str) for word in arguments):
            raise ConfigError(f"arguments={arguments!r}: a list of words for penstock join is needed")
        self._join = join
        self._arguments = tuple(arguments)
        self._leave_s = leave_s
        # Names are not used again by the next manager of the run.
        self._stem = f"local-{secrets.token_hex(3)}"
        self._made = 0
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._logs: dict[str, Path] = {}

    async def add(self, count: int) -> Sequence[str]:
        return [await self._start() for _ in range(count)]

    async def release(self, machine: str) -> None:
        process = self._processes.get(machine)
        if process is None:
            return
        await _end(process, self._leave_s)
        # Not before: whoever cuts this off finds it listed.
        self._processes.pop(machine, None)

    async def list(self) -> Sequence[Seen]:
        return [
            Seen(name, process.returncode is None, "" if process.returncode is None else self._last_words(name))
            for name, process in self._processes.items()
        ]

    async def close(self) -> None:
        await asyncio.gather(*(self.release(name) for name in list(self._processes)))

    async def _start(self) -> str:
        self._made += 1
        name = f"{self._stem}-{self._made}"
        words = [*self._join.words(name), "--exit-with-stdin", "--preemption", "none", *self._arguments]
        log_file = self._log(name)
        try:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock", *words),
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env={**agents_environment(os.environ, self._join.token), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        finally:
            if not isinstance(log_file, int):
                log_file.close()
        return name

    def _log(self, name: str) -> IO[bytes] | int:
        if not self._join.folder:
            return subprocess.DEVNULL
        Path(self._join.folder).mkdir(parents=True, exist_ok=True)
        self._logs[name] = Path(self._join.folder) / f"{name}.log"
        return self._logs[name].open("ab")

    def _last_words(self, name: str) -> str:
        code = self._processes[name].returncode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        path = self._logs.get(name)
        if path is None:
            return how
        how = f"{how}, see {path.parent.name}/{path.name}"
        tail = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return f"{how}; last words: {' / '.join(tail)}" if tail else how


async def _end(process: asyncio.subprocess.Process, leave_s: float) -> None:
    """SIGTERM, and SIGKILL to its process group where that does not help in time."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(leave_s):
                await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.stdin is not None:
        process.stdin.close()
