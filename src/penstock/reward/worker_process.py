"""One verifier process: its pipes, its messages and its end.

The edge below `processes`, which owns it and is told of what it says. Decides when a process counts as gone (its exit
is known and its pipes are empty, or soon after) and how its end is put into words. Refuses to know whose turn it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import termios
from array import array
from typing import Protocol

import msgspec

from penstock.reward.crossing import LENGTH, MAX_MESSAGE_BYTES, Reply, decode_reply

__all__ = ["EXIT_GRACE_S", "Worker"]

EXIT_GRACE_S = 0.5
"""After a worker's exit, how long its last output may still arrive."""
TAIL_BYTES = 2048


class Owner(Protocol):
    """Who starts workers."""

    @property
    def greeting(self) -> bytes:
        """What a worker reads before its first job."""
        ...

    def on_reply(self, worker: Worker, reply: Reply) -> None: ...

    def on_output(self, data: bytes) -> None: ...

    def on_gone(self, worker: Worker) -> None: ...


class Worker(asyncio.SubprocessProtocol):
    """One process: its pipes and its end. Gone when it has exited and its pipes are empty, or soon after."""

    def __init__(self, pool: Owner, number: int) -> None:
        self._pool = pool
        self.number = number
        self.jobs = 0
        self.end_cause = ""
        self.start_timer: asyncio.TimerHandle | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.SubprocessTransport | None = None
        self._buffer = bytearray()
        self._tail = b""
        self._stale = 0
        """Bytes of output that an earlier job has written and that are still to be read."""
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
        self._tail, self._stale = b"", self._unread()
        self._write(message)

    def _unread(self) -> int:
        """Bytes of output that wait in the pipe: the job before has written them, since its reply is here."""
        pipe = self.transport.get_pipe_transport(2)
        file = pipe.get_extra_info("pipe") if pipe is not None and not pipe.is_closing() else None
        if file is None:
            return 0
        count = array("i", [0])
        fcntl.ioctl(file.fileno(), termios.FIONREAD, count)
        return count[0]

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
            stale = min(self._stale, len(data))
            self._stale -= stale
            self._tail = (self._tail + data[stale:])[-TAIL_BYTES:]
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
        """How it ended, and the last line that it printed since it was given its last job."""
        code = self.transport.get_returncode()
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
        else:
            how = f"exit code {code}"
        lines = self._tail.decode(errors="replace").strip().splitlines()
        parts = [self.end_cause, how, lines[-1][:300] if lines else ""]
        return "; ".join(part for part in parts if part)
