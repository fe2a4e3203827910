"""Many bytes through a non-blocking socket, on a thread for as long as they flow.

The kernel copies every byte, and that is most of what a transfer costs a processor: on an event loop's own thread all
connections would share one core for it. A connection on which nothing moves gives its thread back and waits in the
loop, so that few threads serve any number of slow peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

__all__ = ["BULK_BYTES", "BulkSocket", "after"]

BULK_BYTES = 1 << 20
"""Less is not worth the way to a thread and back."""
LINGER_MS = 2
"""A thread waits so long for the next byte: pauses on a fast link are shorter, those on a slow one are the loop's."""
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
        self._moving: Future[int] | None = None

    async def receive_some(self, into: memoryview) -> int:
        """Bytes received, from 0 to all; fewer than all where no more came for a moment. Raises OSError."""
        return await self._move(partial(_receive, self._socket, into))

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


def _receive(sock: socket.socket, into: memoryview) -> int:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    filled = 0
    while filled < len(into):
        try:
            got = sock.recv_into(into[filled:])
        except BlockingIOError:
            if not poller.poll(LINGER_MS):
                break
            continue
        if not got:
            break  # The end is there to be read again.
        filled += got
    return filled


def _send(sock: socket.socket, parts: Sequence[memoryview]) -> int:
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    total = sum(map(len, parts))
    left: Sequence[memoryview] = parts
    while left:
        try:
            left = after(left, sock.sendmsg(left[:PARTS]))
        except BlockingIOError:
            if not poller.poll(LINGER_MS):
                break
    return total - sum(map(len, left))


def after(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of `parts` behind their first `nbytes`."""
    left = []
    for part in parts:
        if len(part) > nbytes:
            left.append(part[nbytes:])
        nbytes = max(0, nbytes - len(part))
    return left
