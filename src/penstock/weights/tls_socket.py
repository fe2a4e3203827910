"""The weight protocol over TLS: the same calls as a plain `FramedSocket`, at the cost of a copy."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import socket
import ssl
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import MissingExtra
from penstock.tls import NO_TLS, refusal_words, tell_late
from penstock.weights.bulk import Told, after, nobody
from penstock.weights.plan import Bytes
from penstock.weights.protocol import LENGTH, LinkLost, OtherProtocol, TokenRefused, message_length

__all__ = ["TlsSocket", "relay_client_context", "relay_server_context", "speaks_plainly"]

HANDSHAKE_S = 10.0
PIECE_BYTES = 1 << 20


class TlsSocket:
    """One connection; any trouble is a LinkLost that names `peer`, a refused certificate a TokenRefused."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, io_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._peer = peer
        self._io_s = io_s
        self.heard_at = 0.0
        """When the last bytes came, by `time.monotonic`."""

    @classmethod
    async def dial(cls, sock: socket.socket, host: str, peer: str, tls: ssl.SSLContext, io_s: float) -> TlsSocket:
        """The puller's side of a connected socket; `host` is what the store's certificate has to name."""
        try:
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=tls, server_hostname=host, limit=PIECE_BYTES, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:
            sock.close()
            if isinstance(error, ConnectionResetError):
                error = ConnectionResetError("it ended the connection in the handshake, as one does that speaks no TLS")
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

    def binding(self) -> bytes:
        """The fingerprint of the other side's certificate, verified or not."""
        held: ssl.SSLObject | None = self._writer.get_extra_info("ssl_object")
        certificate = held.getpeercert(binary_form=True) if held is not None else None
        return hashlib.sha256(certificate or b"").digest()

    async def send(self, *parts: Bytes) -> None:
        """Sends all of `parts`; the deadline is for each piece."""
        for part in parts:
            await self._send(memoryview(part))

    async def _send(self, view: memoryview) -> None:
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
        await self.read_parts([into], len(into), wait_s)

    async def read_parts(
        self, parts: Sequence[memoryview], least: int, wait_s: float = 0.0, told: Told = nobody, gladly: int = 0
    ) -> int:
        """Fills `parts` one after the other, until `least` bytes came; returns how many. Reads on no thread."""
        left, came = after(parts, 0), 0
        while came < least:
            data = await self._read(len(left[0]), wait_s)
            left[0][: len(data)] = data
            left, came = after(left, len(data)), came + len(data)
        return came

    async def _read(self, most: int, wait_s: float) -> bytes:
        try:
            async with asyncio.timeout(self._io_s + wait_s):
                data = await self._reader.read(min(most, PIECE_BYTES))
        except TimeoutError:
            raise LinkLost(f"{self._peer} sent no byte for {self._io_s:g} s") from None
        except OSError as error:
            raise _trouble(f"the connection to {self._peer} broke", error) from error
        self.heard_at = time.monotonic()
        if not data:
            raise LinkLost(f"{self._peer} closed the connection")
        return data

    async def read_message(self, wait_s: float = 0.0) -> memoryview:
        """The bytes of the next message. Raises BadLength before reading one over the limit."""
        header = bytearray(LENGTH.size)
        await self.read_into(memoryview(header), wait_s)
        body = memoryview(bytearray(message_length(header)))
        await self.read_into(body)
        return body

    async def stop(self) -> None:
        """Closes it; what is read is written by the caller's own task."""
        self.close()

    def hung_up(self) -> bool:
        return self._reader.at_eof() or self._reader.exception() is not None

    def close(self) -> None:
        self._writer.close()


async def speaks_plainly(sock: socket.socket, peer: str, tls: ssl.SSLContext) -> bool:
    """Whether what an accepted socket sends first, which is left to be read, begins a message in the clear: its length
    does with a zero, and no TLS does. Raises LinkLost, where nothing comes."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await readable.wait()
        return sock.recv(1, socket.MSG_PEEK) == b"\0"
    except TimeoutError:
        tell_late(tls, ConnectionAbortedError(), HANDSHAKE_S)
        raise LinkLost(f"{peer} said nothing for {HANDSHAKE_S:g} s") from None
    except OSError as error:
        raise LinkLost(f"the connection from {peer} broke: {error}") from error
    finally:
        loop.remove_reader(sock)


def relay_client_context() -> ssl.SSLContext:
    """For dialling an instance that passes weights on. It is not known by its certificate but by the proof of the run's
    token, which is bound to it: nothing is verified here, and no link is believed without that proof."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def relay_server_context() -> tuple[ssl.SSLContext, bytes]:
    """For an instance that passes weights on: a certificate of its own, made now and signed by nobody, and its
    fingerprint. Raises MissingExtra where it can't be made."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise MissingExtra("cryptography", "tls", "passing weights on over TLS") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "penstock-relay")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # ssl takes files alone; this one is its owner's, and gone once it is read.
    with tempfile.NamedTemporaryFile(prefix="penstock-relay-") as file:
        file.write(certificate.public_bytes(serialization.Encoding.PEM))
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        file.flush()
        context.load_cert_chain(file.name)
    return context, hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def _trouble(what: str, error: OSError) -> LinkLost | TokenRefused | OtherProtocol:
    """A refused certificate stays refused, and who speaks no TLS learns none; anything else may pass."""
    error.__traceback__ = None  # The stream keeps it, and its frames have what was to be sent.
    words = refusal_words(error)
    if words == NO_TLS:
        return OtherProtocol(f"{what}: {words}, and this side does")
    return TokenRefused(f"{what}: {words}") if words else LinkLost(f"{what}: {str(error) or type(error).__name__}")
