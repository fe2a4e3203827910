"""Relays on loopback that do to a connection what networks do: cut it, cut it within a frame, swallow, delay.

A relay stands between an agent and its manager, or between agents and the weight store. It decides nothing; what it
does and when is told to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

CHUNK = 65_536
UP, DOWN = "up", "down"


class Link:
    """Listens on a port of its own and relays each connection to `target()`, a (host, port), when it is made."""

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._healed = asyncio.Event()
        self._healed.set()
        self._cut_within: str = ""
        self._cut_after_bytes = 0
        self.delay_s = 0.0
        """For each piece on its way up."""
        self.port = 0
        self.cuts_within = 0
        """Connections that were cut in mid-stream as `cut_within` asks."""
        self.ended_by_target = 0
        """Connections that the target's side has closed or lost."""

    @property
    def connected(self) -> bool:
        return bool(self._writers)

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self.heal()
        if self._server is not None:
            self._server.close()
        self.cut()
        if self._server is not None:
            await self._server.wait_closed()

    # ---- faults

    def cut(self) -> None:
        """Both sides of every connection are closed at once."""
        for writer in list(self._writers):
            writer.transport.abort()

    def cut_within(self, way: str, after_bytes: int = 0) -> None:
        """Of the next piece that goes `way` (up, to the target; or down), half is relayed, and then all is cut.

        `after_bytes`: so much is relayed of the next pieces, and nothing more.
        """
        self._cut_within, self._cut_after_bytes = way, after_bytes

    def swallow(self) -> None:
        """Nothing comes through any more, not even that a side has closed; connections stay open."""
        self._healed.clear()

    def heal(self) -> None:
        """What was swallowed stays lost, so its connections are cut, as by a middlebox that forgot them."""
        if not self._healed.is_set():
            self._healed.set()
            self.cut()

    # ---- within

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await asyncio.open_connection(*self._target())
            self._writers.add(far)
            ways = (self._pump(reader, far, UP), self._pump(far_reader, writer, DOWN))
            tasks = [asyncio.create_task(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except OSError:
            # The target is not there just now; whoever dialled finds out by the closed socket.
            pass
        finally:
            for side in (writer, far):
                if side is not None:
                    self._writers.discard(side)
                    side.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        with contextlib.suppress(OSError):
            while True:
                piece = await reader.read(CHUNK)
                if not piece and way == DOWN:
                    self.ended_by_target += 1
                if not self._healed.is_set():
                    if not piece:
                        await self._healed.wait()
                        return
                    continue
                if not piece:
                    return
                if way == UP and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self._cut_within == way:
                    kept = self._cut_after_bytes or len(piece) // 2
                    writer.write(piece[:kept])
                    self._cut_after_bytes -= min(kept, len(piece))
                    if kept <= len(piece):
                        await writer.drain()
                        self._cut_within, self._cut_after_bytes = "", 0
                        self.cuts_within += 1
                        return
                else:
                    writer.write(piece)
                await writer.drain()
