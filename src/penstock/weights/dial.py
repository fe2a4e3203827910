"""Opening sockets where there are several addresses, some of which may be dead."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

__all__ = ["STAGGER_S", "first_to_answer", "open_socket"]

STAGGER_S = 0.25
"""What has not answered for so long has the next one tried beside it (RFC 8305)."""


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


async def first_to_answer(tries: Sequence[Callable[[], Awaitable[C]]]) -> tuple[C, int]:
    """What comes first of `tries`, and its number. The next one is begun when one has failed, or none has ended for
    `STAGGER_S`; the others are ended then. Raises the last one's error where all fail."""
    begun: list[asyncio.Future[C]] = []
    first: C | None = None
    try:
        while len(begun) < len(tries) or not all(task.done() for task in begun):
            if len(begun) < len(tries):
                begun.append(asyncio.ensure_future(tries[len(begun)]()))
            running = [task for task in begun if not task.done()]
            patience_s = STAGGER_S if len(begun) < len(tries) else None
            await asyncio.wait(running, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for number, task in enumerate(begun):
                if task.done() and task.exception() is None:
                    first = task.result()
                    return first, number
        return begun[-1].result(), len(begun) - 1  # Which raises its error.
    finally:
        for task in begun:
            task.cancel()
        try:
            if begun:
                await asyncio.wait(begun)
        except BaseException:
            first = None
            raise
        finally:
            for task in begun:
                if task.done():
                    _close(task, first)
                else:
                    task.add_done_callback(partial(_close, kept=first))


def _close(task: asyncio.Future[Any], kept: Closable | None) -> None:
    """What came of a try, unless it is the one that is kept."""
    if not task.cancelled() and task.exception() is None and task.result() is not kept:
        task.result().close()


async def open_socket(host: str, port: int) -> socket.socket:
    """A connected socket, to the first of the addresses that `host` has. Raises OSError."""
    loop = asyncio.get_running_loop()

    async def connected(family: int, kind: int, number: int, address: Any) -> socket.socket:
        sock = socket.socket(family, kind, number)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
        return sock

    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not found:
        raise OSError(f"{host} has no address")
    tries = [partial(connected, family, kind, number, address) for family, kind, number, _, address in found]
    return (await first_to_answer(tries))[0]
