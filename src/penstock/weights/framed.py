"""Messages and raw bytes over a plain TCP socket.

Uses the event loop's socket calls rather than streams: a chunk goes from the store's buffer into the kernel, and
from the kernel into the puller's buffer, without a copy in Python. Every wait has a deadline of its own.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import Protocol

from penstock.weights.bulk import BULK_BYTES, BulkSocket, Told, after, nobody
from penstock.weights.plan import Bytes
from penstock.weights.protocol import LENGTH, LinkLost, OtherProtocol, is_tls, message_length

__all__ = ["IO_S", "Framed", "FramedSocket", "counted_from"]

IO_S = 20.0
"""A peer that moves no byte for so long is given up."""
PIECE_BYTES = 64 * 1024
"""Of what is for threads, moved on the loop at once, before the rest goes by a thread again. Less than this goes out
together, and is read with what else is there."""
ALIVE_IDLE_S, ALIVE_PAUSE_S, ALIVE_PROBES = 10, 5, 2
"""The kernel asks after a peer that is silent: a half-open link that is kept is found dead before it is used."""


class Framed(Protocol):
    """What carries messages and raw bytes, plain or over TLS; any trouble is a LinkLost."""

    @property
    def heard_at(self) -> float:
        """When the last bytes came, by `time.monotonic`."""
        ...

    async def send(self, *parts: Bytes) -> None: ...

    async def read_into(self, into: memoryview) -> None: ...

    async def read_parts(
        self, parts: Sequence[memoryview], least: int, wait_s: float = 0.0, told: Told = nobody, gladly: int = 0
    ) -> int:
        """Fills `parts` one after the other, until `least` bytes came or more that were there; returns how many.

        The rest may be written to meanwhile, and is what has to be read next. A thread that reads tells `told` what
        came, and goes on until it is `gladly` bytes or no more come for a moment."""
        ...

    async def read_message(self, wait_s: float = 0.0) -> memoryview:
        """`wait_s` is granted for the first byte, beyond the deadline for any other."""
        ...

    async def stop(self) -> None: ...

    def hung_up(self) -> bool:
        """Whether the other end, which has nothing to say just now, has closed it."""
        ...

    def close(self) -> None: ...


class FramedSocket:
    """A non-blocking TCP socket that carries messages and raw bytes; any trouble is a LinkLost that names `peer`."""

    def __init__(self, sock: socket.socket, peer: str, io_s: float = IO_S) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        self._socket = sock
        self._bulk = BulkSocket(sock)
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        self._ahead = self._buffer[:0]
        """Read and not asked for yet."""
        self._peer = peer
        self._io_s = io_s
        self._heard_at = 0.0
        self._loop = asyncio.get_running_loop()

    @property
    def heard_at(self) -> float:
        return max(self._heard_at, self._bulk.heard_at)

    async def send(self, *parts: Bytes) -> None:
        """Sends all of `parts`; the deadline is for each piece, so that a slow peer differs from a dead one."""
        left = [memoryview(part) for part in parts]
        try:
            while left:
                if sum(map(len, left)) >= BULK_BYTES:
                    left = after(left, await self._bulk.send_some(left))
                if len(left) > 1 and sum(map(len, left)) <= PIECE_BYTES:
                    left = [memoryview(b"".join(left))]
                if left:
                    piece = _on_the_loop(left[0])
                    async with asyncio.timeout(self._io_s):
                        await self._loop.sock_sendall(self._socket, piece)
                    left = after(left, len(piece))
        except TimeoutError:
            raise LinkLost(f"{self._peer} took no byte for {self._io_s:g} s") from None
        except OSError as error:
            raise _broken(self._peer, error) from error

    async def read_into(self, into: memoryview, wait_s: float = 0.0) -> None:
        """Fills all of `into`."""
        await self.read_parts([into], len(into), wait_s)

    async def read_parts(
        self, parts: Sequence[memoryview], least: int, wait_s: float = 0.0, told: Told = nobody, gladly: int = 0
    ) -> int:
        """Fills `parts` one after the other, until `least` bytes came or more that were there; returns how many.

        Small reads take what else is there with them, for the next ones. Large ones go on meanwhile: the next is for
        the rest of `parts`. `told` hears what a thread has read, which goes on until it is `gladly` bytes or no more
        come for a moment.
        """
        left, came = after(parts, 0), 0
        try:
            while came < least:
                from_left = counted_from(told, len(parts) - len(left))
                got = await self._read_some(left, max(least, gladly) - came, wait_s, from_left)
                left, came = after(left, got), came + got
        except TimeoutError:
            raise LinkLost(f"{self._peer} sent no byte for {self._io_s:g} s") from None
        except OSError as error:
            raise _broken(self._peer, error) from error
        return came

    async def _read_some(self, left: Sequence[memoryview], least: int, wait_s: float, told: Told) -> int:
        """Bytes that came into `left`; 0 where they are ahead."""
        many = self._bulk.receives or sum(map(len, left)) >= BULK_BYTES
        ahead = self._ahead
        if ahead and not many:
            got = 0
            for part in left:
                found = ahead[got : got + len(part)]
                part[: len(found)] = found
                got += len(found)
                if got == len(ahead):
                    break
            self._ahead = ahead[got:]
            return got
        if many:
            self._ahead = ahead[:0]
            if got := await self._bulk.receive_some(left, least, told, ahead):
                return got
        into = _on_the_loop(left[0])
        small = len(into) < PIECE_BYTES
        async with asyncio.timeout(self._io_s + wait_s):
            got = await self._loop.sock_recv_into(self._socket, self._buffer if small else into)
        self._heard_at = time.monotonic()
        if not got:
            raise LinkLost(f"{self._peer} closed the connection")
        if not small:
            return got
        self._ahead = self._buffer[:got]
        return 0

    async def read_message(self, wait_s: float = 0.0) -> memoryview:
        """The bytes of the next message. Raises BadLength before reading one over the limit, OtherProtocol for TLS."""
        header = bytearray(LENGTH.size)
        await self.read_into(memoryview(header), wait_s)
        if is_tls(header):
            raise OtherProtocol(f"{self._peer} speaks TLS, and this side does not")
        body = memoryview(bytearray(message_length(header)))
        await self.read_into(body)
        return body

    async def stop(self) -> None:
        """Closes it, and returns once nothing more is written anywhere."""
        await self._bulk.stop()

    def hung_up(self) -> bool:
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._bulk.close()


def _broken(peer: str, error: OSError) -> LinkLost:
    # The event loop's sockets and threads keep their errors, whose frames have the memory that bytes came from or were
    # to go to: it is given out again once nobody refers to it.
    error.__traceback__ = None
    return LinkLost(f"the connection to {peer} broke: {error}")


def counted_from(told: Told, first: int) -> Told:
    """Tells `told` the number of a part in a list that begins `first` earlier."""
    return (lambda number, left: told(first + number, left)) if first else told


def _on_the_loop(data: memoryview) -> memoryview:
    """So much of `data` as the loop moves at once."""
    return data if len(data) < BULK_BYTES else data[:PIECE_BYTES]


def keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": ALIVE_IDLE_S, "TCP_KEEPINTVL": ALIVE_PAUSE_S, "TCP_KEEPCNT": ALIVE_PROBES}
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
