"""Many bytes through a non-blocking socket, on a thread for as long as they flow.

The kernel copies every byte, and that is most of what a transfer costs a processor: on an event loop's own thread all
connections would share one core for it. A connection on which nothing moves gives its thread back and waits in the
loop, so that few threads serve any number of slow peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

__all__ = ["BULK_BYTES", "BulkSocket", "Told", "after", "nobody"]

BULK_BYTES = 1 << 20
"""Less is not worth the way to a thread and back."""
LINGER_US = 2000
"""A thread waits so long for the next byte: pauses on a fast link are shorter, those on a slow one are the loop's."""
PIECE_BYTES = 1 << 20
"""A thread that receives is woken once so much is there, and not for every packet."""
HOME_BUFFER_BYTES = 512 * 1024
"""Between two processes of one machine: what is sent is received while it is still in the processor's cache."""
TIMEVAL = struct.Struct("@ll")
THREADS = 16
PARTS = 512
"""In one call; the system has a limit."""
NOTHING = memoryview(b"")


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "weight-sockets")


Told = Callable[[int, int], None]
"""Hears, on the thread that reads, the number of a part that bytes came into, and how many of it are still to come."""


def nobody(number: int, left: int) -> None:
    """Hears of a part, and does nothing."""


class BulkSocket:
    """The large pieces of one socket, which is closed by `close` alone."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        _unpaced_at_home(sock)
        wait = TIMEVAL.pack(*divmod(LINGER_US, 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        self._moving: Future[int] | None = None
        self._filling: _Filling | None = None
        self.heard_at = 0.0
        """When a thread received the last bytes, by `time.monotonic`."""

    @property
    def receives(self) -> bool:
        """Whether a thread fills what is left of the parts last given."""
        return self._filling is not None

    async def receive_some(
        self,
        parts: Sequence[memoryview],
        least: int,
        told: Told = nobody,
        ahead: memoryview = NOTHING,
    ) -> int:
        """Bytes received into `parts`: `least` or more that were there, fewer where no more came for a moment.

        The thread goes on with what is left of them; the next call is for that. It tells `told`, of the first call,
        what it received before that counts as received. What was read `ahead` of the first call comes first, and is
        left alone until that is received. Raises OSError.
        """
        filling = self._filling
        if filling is None:
            filling = self._filling = _Filling(self._socket, parts, told, ahead, self._hear)
            self._moving = _threads().submit(filling.run)
            self._moving.add_done_callback(filling.ended)
        if not await filling.has(least):
            self._filling = None
        return filling.taken()

    def _hear(self) -> None:
        self.heard_at = time.monotonic()

    async def send_some(self, parts: Sequence[memoryview]) -> int:
        """Bytes sent, from 0 to all; fewer than all where the peer took no more for a moment. Raises OSError."""
        self._moving = _threads().submit(_send, self._socket, parts)
        return await asyncio.wrap_future(self._moving)

    async def stop(self) -> None:
        """Closes it, and returns once nothing more is written anywhere."""
        self.close()
        if self._moving is not None:
            await asyncio.gather(asyncio.wrap_future(self._moving), return_exceptions=True)

    def close(self) -> None:
        """At once, or as soon as the thread has left it: a descriptor in use may not be given to another file."""
        if self._moving is None or self._moving.done():
            self._socket.close()
            return
        with contextlib.suppress(OSError):  # The peer was faster, and the thread ends all the same.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._moving.add_done_callback(lambda _: self._socket.close())


class _Filling:
    """Parts that a thread fills one after the other, while the event loop takes note of what has come."""

    def __init__(
        self,
        sock: socket.socket,
        parts: Sequence[memoryview],
        told: Told,
        ahead: memoryview,
        hear: Callable[[], None],
    ) -> None:
        self._socket = sock
        self._parts = list(parts)
        self._count = len(self._parts)
        self._told = told
        self._ahead = ahead
        self._hear = hear
        self._nbytes = sum(map(len, parts))
        self._came = self._taken = 0
        self._wanted = 0
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._end: Future[int] | None = None

    def run(self) -> int:
        """On the thread: until all is filled, or nothing more came for a moment."""
        try:
            self._fill()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            raise
        finally:  # Memory is given out again once nobody refers to it, nor an error that somebody keeps.
            self._parts.clear()
            self._told = nobody
        return self._came

    def _fill(self) -> None:
        left = self._parts
        while left and self._ahead:
            size = min(len(left[0]), len(self._ahead))
            _copy(left[0], self._ahead[:size])
            left, self._ahead = self._filled(left, size), self._ahead[size:]
        with _blocking(self._socket), _woken_by_pieces(self._socket) as wait_for:
            while left:
                piece = left[0][:PIECE_BYTES]
                wait_for(len(piece))
                # Waits that are so long together end the call; with nothing come, by a BlockingIOError.
                got = self._socket.recv_into(piece, 0, socket.MSG_WAITALL)
                if not got:
                    break  # The end is there to be read again.
                if got == len(left[0]) and len(left) > 1:
                    with contextlib.suppress(BlockingIOError):
                        got += self._socket.recvmsg_into(left[1:PARTS], 0, socket.MSG_DONTWAIT)[0]
                left = self._filled(left, got)

    def _filled(self, left: list[memoryview], got: int) -> list[memoryview]:
        """What is left of `left` once `got` bytes came."""
        self._hear()
        rest = after(left, got)
        first = self._count - len(rest)
        for number in range(self._count - len(left), first):
            self._told(number, 0)
        if rest and len(rest[0]) < len(self._parts[first]):
            self._told(first, len(rest[0]))
        self._came += got
        if self._came >= self._wanted:
            self._tell()
        return rest

    def ended(self, end: Future[int]) -> None:
        self._end = end
        self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody listens any more.
            self._loop.call_soon_threadsafe(self._news.set)

    async def has(self, least: int) -> bool:
        """Waits for so much that was not taken. False where the thread has ended; what it got may be less."""
        self._wanted = min(self._taken + least, self._nbytes)
        while self._end is None and (self._came < self._wanted or self._came == self._nbytes):
            self._news.clear()
            if self._end is None and (self._came < self._wanted or self._came == self._nbytes):
                await self._news.wait()
        return self._end is None

    def taken(self) -> int:
        """Bytes that came since the last time. Raises OSError where the thread has ended of it, and nothing came."""
        new = self._came - self._taken
        if self._end is not None and not new:
            self._end.result()
        self._taken += new
        return new


def _send(sock: socket.socket, parts: Sequence[memoryview]) -> int:
    total = sum(map(len, parts))
    left: Sequence[memoryview] = parts
    with _blocking(sock):
        while left:
            left = after(left, sock.sendmsg(left[:PARTS]))
    return total - sum(map(len, left))


def _unpaced_at_home(sock: socket.socket) -> None:
    """Between two processes of one machine there is no network to be spared: BBR's pacing alone costs a third of the
    processor time that such a connection takes."""
    if hasattr(socket, "TCP_CONGESTION") and sock.family in (socket.AF_INET, socket.AF_INET6):
        # A peer that is gone already has no name; a system may have no such algorithm.
        with contextlib.suppress(OSError):
            if sock.getpeername()[0] == sock.getsockname()[0]:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HOME_BUFFER_BYTES)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


@contextlib.contextmanager
def _woken_by_pieces(sock: socket.socket) -> Iterator[Callable[[int], None]]:
    """Gives what says how many bytes the next call waits for."""
    least = 1

    def wait_for(nbytes: int) -> None:
        nonlocal least
        if nbytes != least:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            least = nbytes

    try:
        yield wait_for
    finally:
        wait_for(1)


@contextlib.contextmanager
def _blocking(sock: socket.socket) -> Iterator[None]:
    """The system waits: one call for a whole piece, where a poll for each bit of it costs more than the bytes do."""
    os.set_blocking(sock.fileno(), True)
    try:
        with contextlib.suppress(BlockingIOError):
            yield
    finally:
        os.set_blocking(sock.fileno(), False)


def _copy(into: memoryview, data: memoryview) -> None:
    """Without the interpreter's lock: the first byte that is written to fresh memory has the system clear 2 MiB."""
    if data:
        to, of = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (into, data))
        ctypes.memmove(to, of, len(data))


def after(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of `parts` behind their first `nbytes`; the first that is left has bytes."""
    for number, part in enumerate(parts):
        if len(part) > nbytes:
            return [part[nbytes:], *parts[number + 1 :]]
        nbytes -= len(part)
    return []
