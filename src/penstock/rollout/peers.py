"""One peer's WebSocket, outgoing: a bounded queue and the task that empties it.

Decides when a peer that does not read is dropped, and that a connection ends within its deadline, whatever the other
side does. Refuses to know what frames say, and who the peer is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass

from aiohttp import WSCloseCode, web

__all__ = ["Peer", "PeerConfig"]


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """`max_queued_bytes` may wait for a peer, `send_deadline_s` is for one frame, `close_s` for the end."""

    max_queued_bytes: int
    send_deadline_s: float
    close_s: float


class Peer:
    """Belongs to the event loop that makes it."""

    def __init__(
        self, name: str, socket: web.WebSocketResponse, transport: asyncio.Transport | None, config: PeerConfig
    ) -> None:
        self.name = name
        self.closing_cause = ""
        self._socket = socket
        self._transport = transport
        self._config = config
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._writer = asyncio.create_task(self._write(), name=f"to {name}")

    def put(self, data: bytes) -> None:
        """Queues a frame. A peer that has fallen too far behind is dropped instead."""
        if self.closing_cause:
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        if self._queued_bytes > self._config.max_queued_bytes:
            self.close(f"it does not read: {self._queued_bytes} bytes were waiting for it")
            self._abort()
        self._wake.set()

    def close(self, cause: str) -> None:
        """Ends the connection once what is queued is sent."""
        self.closing_cause = self.closing_cause or cause
        self._wake.set()

    async def finish(self) -> None:
        """Waits for the writer to end; it is cut off where it does not."""
        self.close("the connection ended")
        _, late = await asyncio.wait([self._writer], timeout=self._config.close_s)
        if late:
            self._writer.cancel()
            await asyncio.wait([self._writer], timeout=self._config.close_s)

    async def _write(self) -> None:
        try:
            while True:
                while self._queue:
                    data = self._queue.popleft()
                    self._queued_bytes -= len(data)
                    async with asyncio.timeout(self._config.send_deadline_s):
                        await self._socket.send_bytes(data)
                if self.closing_cause:
                    break
                self._wake.clear()
                await self._wake.wait()
        except TimeoutError:
            self.closing_cause = f"it did not read a frame for {self._config.send_deadline_s:g} s"
        except ConnectionError as error:
            self.closing_cause = self.closing_cause or f"the connection broke: {error or type(error).__name__}"
        reason = self.closing_cause.encode()[:120].decode(errors="ignore").encode()
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(self._config.close_s):
                    # One that was not answered yet has no socket to close.
                    if self._socket.prepared:
                        await self._socket.close(code=WSCloseCode.GOING_AWAY, message=reason)
        finally:
            self._abort()

    def _abort(self) -> None:
        """Ends the connection at once. A mere close would wait for a peer that does not read, maybe for ever."""
        self._queue.clear()
        if self._transport is not None:
            self._transport.abort()
