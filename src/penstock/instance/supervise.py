"""Engine servers as processes of this machine: started, watched, ended with the agent, or adopted as they are.

Decides nothing about sequences and weights. A server runs under `keeper.py`, which ends it when this process is gone,
however it went. Why a server did not start or died is told with the last lines of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import aiohttp

from penstock.errors import ConfigError, EngineError
from penstock.instance import keeper
from penstock.instance.dialect import Dialect

START_S = 600.0
"""For a server to answer, its weights read and its kernels made."""
POLL_S = 0.2
STOP_S = 5.0
LOG_LINES = 15
TAIL_BYTES = 65_536
LOG_BYTES = 64 * 2**20
"""A server's log becomes LOG.1 at this size; a server that prints a line for each request fills disks otherwise."""
PLACEHOLDERS = ("{model}", "{host}", "{port}")


class Server(Protocol):
    """Where an engine's server is, and how long it is there."""

    @property
    def base_url(self) -> str: ...

    @property
    def managed(self) -> bool:
        """Whether it is started here, on the run's own weights."""
        ...

    async def start(self, http: aiohttp.ClientSession, folder: Path, limits: Mapping[str, str]) -> None:
        """Returns once it answers. `limits` are the dialect's. Raises EngineError with the reason why it does not."""
        ...

    async def died(self) -> str:
        """Returns why its process ended, when it does."""
        ...

    def cpu_s(self) -> float:
        """Processor time of its processes so far; 0 where it is not known."""
        ...

    async def close(self) -> None: ...


class AdoptedServer:
    """A server that runs already and goes on when the agent leaves."""

    managed = False

    def __init__(self, dialect: Dialect, url: str) -> None:
        self.base_url = checked_url(url)
        self._dialect = dialect

    async def start(self, http: aiohttp.ClientSession, folder: Path, limits: Mapping[str, str]) -> None:
        if not await self._dialect.is_up(http, self.base_url):
            raise EngineError(f"no {self._dialect.kind} server answers at {self.base_url}; is it up?")

    async def died(self) -> str:
        await asyncio.Event().wait()
        return ""

    def cpu_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        """It is not this agent's to end."""


class ManagedServer:
    """A server that this agent starts on its first weights and ends with itself.

    `template` is a command line with {model}, {host} and {port}; without one the dialect makes it. `options` are the
    engine's own, put behind either; limits are for the dialect's command line alone. The log goes to `log_path`, which
    with the one before it (`log_path` and ".1") takes twice `log_bytes` at most.
    """

    managed = True

    def __init__(
        self,
        dialect: Dialect,
        log_path: Path,
        *,
        template: str = "",
        options: Mapping[str, str] | None = None,
        start_s: float = START_S,
        environment: Mapping[str, str] | None = None,
        log_bytes: int = LOG_BYTES,
    ) -> None:
        self._dialect = dialect
        self._log_path = log_path
        self._template = checked_template(template) if template else []
        self._options = dict(options or {})
        self._start_s = start_s
        self._environment = dict(environment or {})
        self._log_bytes = log_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""

    @property
    def base_url(self) -> str:
        return self._url

    async def start(self, http: aiohttp.ClientSession, folder: Path, limits: Mapping[str, str]) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        words = self.words(folder, "127.0.0.1", port, limits)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            log.write(f"$ {shlex.join(words)}\n".encode())
            log.flush()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                keeper.__file__,
                str(self._log_path.absolute()),
                str(self._log_bytes),
                *words,
                stdin=subprocess.PIPE,
                stdout=log,  # The keeper's own words, should it fail itself.
                stderr=subprocess.STDOUT,
                env={**without_tokens(os.environ), **self._dialect.environment(), **self._environment},
                start_new_session=True,
            )
        deadline = time.monotonic() + self._start_s
        while True:
            up = await self._dialect.is_up(http, self._url)
            # Looked at even where somebody answers: on a port that was taken meanwhile, that is another server.
            if self._process.returncode is not None:
                raise EngineError(f"the {self._dialect.kind} server did not start: {self._last_words()}")
            if up:
                return
            if time.monotonic() > deadline:
                await self.close()
                raise EngineError(
                    f"the {self._dialect.kind} server did not answer within {self._start_s:g} s: {self._last_words()}"
                )
            await asyncio.sleep(POLL_S)

    def words(self, folder: Path, host: str, port: int, limits: Mapping[str, str]) -> list[str]:
        """The command line for a server on `folder`."""
        if not self._template:
            return self._dialect.command(folder, host, port, {**limits, **self._options})
        values = dict(zip(PLACEHOLDERS, (str(folder), host, str(port))))
        words = [re.sub(r"\{(model|host|port)\}", lambda found: values[found[0]], word) for word in self._template]
        return words + [f"--{name}={value}" if value else f"--{name}" for name, value in self._options.items()]

    async def died(self) -> str:
        if self._process is None:
            await asyncio.Event().wait()
            return ""
        await self._process.wait()
        return f"the {self._dialect.kind} server died: {self._last_words()}"

    def cpu_s(self) -> float:
        """Of the whole process group, by /proc; 0 on a system that has none."""
        return 0.0 if self._process is None else group_cpu_s(self._process.pid)

    async def close(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()  # The keeper ends the whole group.
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _last_words(self) -> str:
        """The end of the log, and where all of it is."""
        end = b""
        for path in (self._log_path.with_name(f"{self._log_path.name}.1"), self._log_path):
            try:
                with path.open("rb") as log:
                    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                    end += log.read()
            except FileNotFoundError:
                continue  # Never full, or just begun anew.
            except OSError as error:
                return f"its log {path} can't be read: {error.strerror}"
        return f"log {self._log_path} ends: " + "\n".join(end.decode(errors="replace").splitlines()[-LOG_LINES:])


def without_tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """A server has no business at any door of the run, and may print its environment."""
    return {
        name: value
        for name, value in environment.items()
        if not (name.startswith("PENSTOCK_") and name.endswith("TOKEN"))
    }


def checked_url(url: str) -> str:
    """A server's address without path or trailing slash. Raises ConfigError."""
    base = url.strip().rstrip("/")
    if re.fullmatch(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", base) is None:
        raise ConfigError(f"{url!r} is not the address of a server; expected http://host:port without a path")
    return base


def checked_template(template: str) -> list[str]:
    """A command line's words. Raises ConfigError where it could not start a server."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ConfigError(f"the engine command {template!r} is no command line: {error}") from error
    missing = [name for name in ("{model}", "{port}") if not any(name in word for word in words)]
    if not words or missing:
        raise ConfigError(
            f"the engine command {template!r} lacks {' and '.join(missing)}: the folder with the weights and the port "
            "to listen on are put there"
        )
    return words


def group_cpu_s(group: int) -> float:
    """Processor time of the living processes of a process group (proc(5): the fields behind the command's name)."""
    ticks = 0
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            with contextlib.suppress(OSError):  # It ended just now.
                words = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(words[2]) == group:
                    ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
