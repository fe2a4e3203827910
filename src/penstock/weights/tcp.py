"""The edge of the weight protocol: framed messages over a plain TCP socket, and the puller's side of a connection.

Uses the event loop's socket calls rather than streams: a chunk goes from the store's buffer into the kernel, and
from the kernel into the puller's buffer, without a copy in Python. Every wait has a deadline of its own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from penstock.errors import WeightError
from penstock.weights.manifest import Encoding
from penstock.weights.plan import digest
from penstock.weights.protocol import (
    LENGTH,
    MAGIC,
    MAX_MANIFEST_BYTES,
    NONCE_BYTES,
    PROTOCOL,
    Accepted,
    BadMessage,
    Challenge,
    ChunkReply,
    FromStore,
    GetChunks,
    GetManifest,
    GetOffers,
    Held,
    Hello,
    LinkLost,
    ManifestReply,
    Offers,
    OtherProtocol,
    Proof,
    Refused,
    TokenRefused,
    ToStore,
    decode_from_store,
    encode_message,
    message_length,
    prove,
    proven,
    refusal,
)
from penstock.weights.tls_socket import TlsSocket

CONNECT_S = 10.0
IO_S = 20.0
"""A peer that moves no byte for so long is given up."""


class WeightLink(Protocol):
    """One connection to whatever holds weight versions. Raises LinkLost where another try may succeed."""

    async def offers(self, version: int, held: Sequence[Held], wait_s: float, scheme: str = "") -> Offers:
        """How `version` can be had by one that holds `held`; waits for one that is being published.

        With `scheme`, how it can be had quantized.
        """
        ...

    async def manifest(self, encoding: Encoding, wait_s: float, relay_port: int) -> tuple[bytes, str]:
        """The encoding's manifest, not believed yet, and the address of an instance that has it too, or empty."""
        ...

    async def ask_chunks(self, encoding: Encoding, indices: Sequence[int]) -> None:
        """Asks for chunks; each then has to be read, in that order, with `chunk_into`."""
        ...

    async def chunk_into(self, index: int, into: memoryview) -> None:
        """Fills `into` with the bytes of the next chunk asked for, `index`; they are not verified yet."""
        ...

    def close(self) -> None: ...


class WeightTransport(Protocol):
    """How a puller reaches a source; TCP here, shared memory and Mooncake behind the same door later."""

    async def connect(self, source: str, connect_s: float = CONNECT_S) -> WeightLink: ...


class Framed(Protocol):
    """What carries messages and raw bytes, plain or over TLS; any trouble is a LinkLost."""

    async def send(self, data: bytes | memoryview) -> None: ...

    async def read_into(self, into: memoryview) -> None: ...

    async def read_message(self, wait_s: float = 0.0) -> memoryview:
        """`wait_s` is granted for the first byte, beyond the deadline for any other."""
        ...

    def close(self) -> None: ...


class FramedSocket:
    """A non-blocking TCP socket that carries messages and raw bytes; any trouble is a LinkLost that names `peer`."""

    def __init__(self, sock: socket.socket, peer: str, io_s: float = IO_S) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._peer = peer
        self._io_s = io_s
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes | memoryview) -> None:
        """Sends all of `data`; the deadline is for each piece, so that a slow peer differs from a dead one."""
        view = memoryview(data)
        piece = 1 << 20
        for start in range(0, len(view), piece):
            try:
                async with asyncio.timeout(self._io_s):
                    await self._loop.sock_sendall(self._socket, view[start : start + piece])
            except TimeoutError:
                raise LinkLost(f"{self._peer} took no byte for {self._io_s:g} s") from None
            except OSError as error:
                raise LinkLost(f"the connection to {self._peer} broke: {error}") from error

    async def read_into(self, into: memoryview, wait_s: float = 0.0) -> None:
        """Fills all of `into`."""
        filled = 0
        while filled < len(into):
            try:
                async with asyncio.timeout(self._io_s + wait_s):
                    got = await self._loop.sock_recv_into(self._socket, into[filled:])
            except TimeoutError:
                raise LinkLost(f"{self._peer} sent no byte for {self._io_s:g} s") from None
            except OSError as error:
                raise LinkLost(f"the connection to {self._peer} broke: {error}") from error
            if not got:
                raise LinkLost(f"{self._peer} closed the connection")
            filled += got

    async def read_message(self, wait_s: float = 0.0) -> memoryview:
        """The bytes of the next message. Raises BadLength before reading one over the limit."""
        header = bytearray(LENGTH.size)
        await self.read_into(memoryview(header), wait_s)
        body = memoryview(bytearray(message_length(header)))
        await self.read_into(body)
        return body

    def close(self) -> None:
        self._socket.close()


class TcpTransport:
    """Connects to a WeightStore and proves the token; believes the store only once it has proven it too."""

    def __init__(self, token: str, io_s: float = IO_S, tls: ssl.SSLContext | None = None) -> None:
        self._token = token
        self._io_s = io_s
        self._tls = tls

    async def connect(self, source: str, connect_s: float = CONNECT_S) -> TcpLink:
        """Raises LinkLost, TokenRefused, OtherProtocol or another WeightError."""
        host, port = parse_address(source)
        try:
            async with asyncio.timeout(connect_s):
                sock = await _open(host, port)
        except TimeoutError:
            raise LinkLost(f"no connection to the weight store at {source} within {connect_s:g} s") from None
        except OSError as error:
            raise LinkLost(f"no connection to the weight store at {source}: {error}") from error
        peer = f"the weight store at {source}"
        framed: Framed = (
            FramedSocket(sock, peer, self._io_s)
            if self._tls is None
            else await TlsSocket.dial(sock, host, peer, self._tls, self._io_s)
        )
        link = TcpLink(framed, source)
        try:
            await link.shake_hands(self._token)
        except BaseException:
            link.close()
            raise
        return link


class TcpLink:
    """The puller's end of one connection. Requests are answered in turn, so it serves one caller at a time."""

    def __init__(self, framed: Framed, source: str) -> None:
        self._framed = framed
        self._source = source

    async def shake_hands(self, token: str) -> None:
        nonce = os.urandom(NONCE_BYTES)
        challenge = await self._ask(Hello(magic=MAGIC, protocol=PROTOCOL, nonce=nonce))
        if not isinstance(challenge, Challenge):
            raise BadMessage(f"{self._source} answered a hello with {type(challenge).__name__}")
        if challenge.protocol != PROTOCOL:
            raise OtherProtocol(
                f"the weight store at {self._source} speaks protocol {challenge.protocol} and this side {PROTOCOL}; "
                "use the same version of Penstock on both sides"
            )
        accepted = await self._ask(Proof(mac=prove(token, "puller", nonce, challenge.nonce)))
        if not isinstance(accepted, Accepted):
            raise BadMessage(f"{self._source} answered a proof with {type(accepted).__name__}")
        if not proven(token, "store", nonce, challenge.nonce, accepted.mac):
            raise TokenRefused(f"the weight store at {self._source} does not hold this run's token")

    async def offers(self, version: int, held: Sequence[Held], wait_s: float, scheme: str = "") -> Offers:
        reply = await self._ask(GetOffers(version=version, held=tuple(held), wait_s=wait_s, scheme=scheme), wait_s)
        if not isinstance(reply, Offers):
            raise BadMessage(f"{self._source} answered a request for offers with {type(reply).__name__}")
        return reply

    async def manifest(self, encoding: Encoding, wait_s: float, relay_port: int) -> tuple[bytes, str]:
        reply = await self._ask(GetManifest(encoding=encoding, wait_s=wait_s, relay_port=relay_port), wait_s)
        if not isinstance(reply, ManifestReply):
            raise BadMessage(f"{self._source} answered a manifest request with {type(reply).__name__}")
        if not 0 < reply.nbytes <= MAX_MANIFEST_BYTES:
            raise WeightError(f"{self._source} announces a manifest of {reply.nbytes} bytes")
        body = bytearray(reply.nbytes)
        await self._framed.read_into(memoryview(body))
        if digest(body) != reply.xxh3:
            raise LinkLost(f"the manifest of {encoding} from {self._source} came with a wrong checksum")
        return bytes(body), reply.relay

    async def ask_chunks(self, encoding: Encoding, indices: Sequence[int]) -> None:
        await self._framed.send(encode_message(GetChunks(encoding=encoding, indices=tuple(indices))))

    async def chunk_into(self, index: int, into: memoryview) -> None:
        reply = await self._reply()
        if not isinstance(reply, ChunkReply):
            raise BadMessage(f"{self._source} answered a chunk request with {type(reply).__name__}")
        if reply.nbytes != len(into):
            raise WeightError(
                f"{self._source} sends {reply.nbytes} bytes for chunk {index}, which the manifest gives {len(into)}"
            )
        await self._framed.read_into(into)

    def close(self) -> None:
        self._framed.close()

    async def _ask(self, message: ToStore, wait_s: float = 0.0) -> FromStore:
        await self._framed.send(encode_message(message))
        return await self._reply(wait_s)

    async def _reply(self, wait_s: float = 0.0) -> FromStore:
        reply = decode_from_store(await self._framed.read_message(wait_s))
        if isinstance(reply, Refused):
            raise refusal(reply, self._source)
        return reply


async def _open(host: str, port: int) -> socket.socket:
    """A connected socket; tries every address that `host` has."""
    loop = asyncio.get_running_loop()
    error: OSError = OSError(f"{host} has no address")
    for family, kind, number, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, number)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
        except OSError as failure:
            sock.close()
            error = failure
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise error


def parse_address(source: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`. Raises WeightError."""
    host, colon, port = source.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise WeightError(f"{source!r} is not the address of a weight store; expected host:port")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
