"""Many bytes through a non-blocking socket, on a thread for as long as they flow.

The kernel copies every byte, and that is most of what a transfer costs a processor: on an event loop's own thread all
connections would share one core for it. A connection on which nothing moves gives its thread back and waits in the
loop, so that few threads serve any number of slow peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

__all__ = ["BULK_BYTES", "BulkSocket", "after"]

BULK_BYTES = 1 << 20
"""Less is not worth the way to a thread and back."""
LINGER_US = 2000
"""A thread waits so long for the next byte: pauses on a fast link are shorter, those on a slow one are the loop's."""
TIMEVAL = struct.Struct("@ll")
THREADS = 16
PARTS = 512
"""In one call; the system has a limit."""


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "weight-sockets")


class BulkSocket:
    """The large pieces of one socket, which is closed by `close` alone."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        _unpaced_at_home(sock)
        wait = TIMEVAL.pack(*divmod(LINGER_US, 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        self._moving: Future[int] | None = None

    async def receive_some(self, parts: Sequence[memoryview], least: int) -> int:
        """Bytes received into `parts`: `least` or more that were there, fewer where no more came for a moment.

        Raises OSError.
        """
        return await self._move(partial(_receive, self._socket, parts, least))

    async def send_some(self, parts: Sequence[memoryview]) -> int:
        """Bytes sent, from 0 to all; fewer than all where the peer took no more for a moment. Raises OSError."""
        return await self._move(partial(_send, self._socket, parts))

    def close(self) -> None:
        """At once, or as soon as the thread has left it: a descriptor in use may not be given to another file."""
        if self._moving is None or self._moving.done():
            self._socket.close()
            return
        with contextlib.suppress(OSError):  # The peer was faster, and the thread ends all the same.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._moving.add_done_callback(lambda _: self._socket.close())

    async def _move(self, work: Callable[[], int]) -> int:
        self._moving = _threads().submit(work)
        return await asyncio.wrap_future(self._moving)


def _receive(sock: socket.socket, parts: Sequence[memoryview], least: int) -> int:
    came = 0
    with _blocking(sock):
        while came < least:
            # Waits that are so long together end the call; with nothing come, by a BlockingIOError.
            got = sock.recvmsg_into(after(parts, came)[:1], 0, socket.MSG_WAITALL)[0]
            if not got:
                return came  # The end is there to be read again.
            came += got
        if rest := after(parts, came)[:PARTS]:
            came += sock.recvmsg_into(rest, 0, socket.MSG_DONTWAIT)[0]
    return came


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
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


@contextlib.contextmanager
def _blocking(sock: socket.socket) -> Iterator[None]:
    """The system waits: one call for a whole piece, where a poll for each bit of it costs more than the bytes do."""
    sock.setblocking(True)
    try:
        with contextlib.suppress(BlockingIOError):
            yield
    finally:
        sock.setblocking(False)


def after(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of `parts` behind their first `nbytes`."""
    left = []
    for part in parts:
        if len(part) > nbytes:
            left.append(part[nbytes:])
        nbytes = max(0, nbytes - len(part))
    return left
