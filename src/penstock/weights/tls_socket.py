"""The weight protocol over TLS: the same calls as a plain `FramedSocket`, at the cost of a copy."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from penstock.tls import refusal_words, tell_late
from penstock.weights.protocol import LENGTH, LinkLost, TokenRefused, message_length

__all__ = ["TlsSocket"]

HANDSHAKE_S = 10.0
PIECE_BYTES = 1 << 20


class TlsSocket:
    """One connection; any trouble is a LinkLost that names `peer`, a refused certificate a TokenRefused."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, io_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._peer = peer
        self._io_s = io_s

    @classmethod
    async def dial(cls, sock: socket.socket, host: str, peer: str, tls: ssl.SSLContext, io_s: float) -> TlsSocket:
        """The puller's side of a connected socket; `host` is what the store's certificate has to name."""
        try:
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=tls, server_hostname=host, limit=PIECE_BYTES, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:
            sock.close()
            raise _trouble(f"no TLS connection to {peer}", error) from error
        return cls(reader, writer, peer, io_s)

    @classmethod
    async def accept(cls, sock: socket.socket, peer: str, tls: ssl.SSLContext, io_s: float) -> TlsSocket:
        """The store's side of an accepted socket."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=PIECE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:
            sock.close()
            tell_late(tls, error, HANDSHAKE_S)
            raise LinkLost(f"no TLS connection from {peer}: {error}") from error
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop), peer, io_s)

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The other side's, as far as it was verified."""
        certificate: Mapping[str, Any] | None = self._writer.get_extra_info("peercert")
        return certificate

    async def send(self, data: bytes | memoryview) -> None:
        """Sends all of `data`; the deadline is for each piece."""
        view = memoryview(data)
        for start in range(0, len(view), PIECE_BYTES):
            try:
                async with asyncio.timeout(self._io_s):
                    self._writer.write(view[start : start + PIECE_BYTES])
                    await self._writer.drain()
            except TimeoutError:
                raise LinkLost(f"{self._peer} took no byte for {self._io_s:g} s") from None
            except OSError as error:
                raise _trouble(f"the connection to {self._peer} broke", error) from error

    async def read_into(self, into: memoryview, wait_s: float = 0.0) -> None:
        """Fills all of `into`."""
        filled = 0
        while filled < len(into):
            try:
                async with asyncio.timeout(self._io_s + wait_s):
                    data = await self._reader.read(min(len(into) - filled, PIECE_BYTES))
            except TimeoutError:
                raise LinkLost(f"{self._peer} sent no byte for {self._io_s:g} s") from None
            except OSError as error:
                raise _trouble(f"the connection to {self._peer} broke", error) from error
            if not data:
                raise LinkLost(f"{self._peer} closed the connection")
            into[filled : filled + len(data)] = data
            filled += len(data)

    async def read_message(self, wait_s: float = 0.0) -> memoryview:
        """The bytes of the next message. Raises BadLength before reading one over the limit."""
        header = bytearray(LENGTH.size)
        await self.read_into(memoryview(header), wait_s)
        body = memoryview(bytearray(message_length(header)))
        await self.read_into(body)
        return body

    def close(self) -> None:
        self._writer.close()


def _trouble(what: str, error: OSError) -> LinkLost | TokenRefused:
    """A refused certificate stays refused; anything else may pass."""
    words = refusal_words(error)
    return TokenRefused(f"{what}: {words}") if words else LinkLost(f"{what}: {error or type(error).__name__}")
