"""The trainer's weight store: holds a few versions in host memory and serves them to whoever proves the token.

Decides which versions are kept: the newest `keep_versions`, and older ones while a connection still reads them.
Refuses to know what the bytes mean. It runs in a thread of its own with its own event loop; while it serves, the
interpreter's lock is free, because all the time goes into the kernel's send.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import PortInUse, WeightError
from penstock.tls import certificate_role
from penstock.weights.manifest import ChunkEntry, Manifest, TensorEntry, encode_manifest
from penstock.weights.memory import host_buffer
from penstock.weights.plan import Bytes, check_tensor, cut, digest, tensor_offsets
from penstock.weights.protocol import (
    MAGIC,
    NONCE_BYTES,
    PROTOCOL,
    Accepted,
    Challenge,
    ChunkReply,
    FromStore,
    GetChunk,
    GetManifest,
    Hello,
    LinkLost,
    ManifestReply,
    Proof,
    Refused,
    decode_to_store,
    encode_message,
    prove,
    proven,
)
from penstock.weights.tcp import IO_S, Framed, FramedSocket, format_address
from penstock.weights.tls_socket import TlsSocket

AGENT = "agent"
ROLES = frozenset((AGENT, "trainer", "operator"))

MAX_CONNECTIONS = 1024
"""More are turned away with "busy" and come back; a bound on what strangers can make the trainer hold."""
HANDSHAKE_S = 10.0
"""Whoever has not proven the token by then is no agent."""
COPY_BYTES = 16 * 1024 * 1024
"""Copied at once while publishing; other threads of the trainer run in between."""
STOP_S = 5.0

log = logging.getLogger(__name__)

TensorSource = tuple[str, str, tuple[int, ...], Bytes]
"""Name, dtype as in safetensors, shape, and a contiguous buffer of the raw little-endian bytes."""


@dataclass(slots=True, eq=False)
class _Version:
    """One version as it is served; never changed while it is in the store's table."""

    manifest: Manifest
    encoded: bytes
    encoded_xxh3: int
    stream: memoryview
    readers: int = 0


class WeightStore:
    """Serves weight versions over TCP. `publish` may be called from any thread.

    `host` and `port` are listened on (port 0 takes a free one); agents reach the store by `advertise` (a host, or
    host:port behind a port forwarding), by default `host`. With `tls`, pullers are spoken to over TLS, and one whose
    verified certificate names an agent needs no token.
    """

    def __init__(
        self,
        run: str,
        host: str,
        port: int,
        token: str,
        chunk_bytes: int = 4 * 1024 * 1024,
        keep_versions: int = 2,
        advertise: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if chunk_bytes < 1 or keep_versions < 1:
            raise ValueError(f"chunk_bytes={chunk_bytes} and keep_versions={keep_versions} must be at least 1")
        self._run = run
        self._host = host
        self._port = port
        self._token = token
        self._chunk_bytes = chunk_bytes
        self._keep_versions = keep_versions
        self._advertise = advertise
        self._tls = tls
        self._lock = threading.Lock()
        self._versions: dict[int, _Version] = {}
        self._spare: memoryview | None = None
        self._counts: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def start(self) -> str:
        """Listens and returns the address that agents pull from. Raises PortInUse, or WeightError for a bad host."""
        if self._thread is not None:
            raise WeightError(f"the weight store listens on {self.address} already")
        listener = _listen(self._host, self._port)
        self._port = listener.getsockname()[1]
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listener, ready)), name="weight-store", daemon=True
        )
        self._thread.start()
        if not ready.wait(STOP_S):
            raise WeightError(f"the weight store's thread was not up after {STOP_S:g} s")
        return self.address

    @property
    def address(self) -> str:
        """host:port as agents reach the store."""
        if self._advertise:
            host, colon, port = self._advertise.rpartition(":")
            has_port = colon and port.isdecimal() and (":" not in host or host.endswith("]"))
            return self._advertise if has_port else format_address(self._advertise.strip("[]"), self._port)
        return format_address(_outward_address() if self._host in ("", "0.0.0.0", "::") else self._host, self._port)

    def versions(self) -> list[int]:
        """Versions held now, oldest first."""
        with self._lock:
            return list(self._versions)

    def counters(self) -> dict[str, int]:
        """What happened so far: connections, manifests, chunks and bytes served, refusals by kind, links lost."""
        with self._lock:
            return dict(self._counts)

    def publish(self, version: int, tensors: Iterable[TensorSource], config_json: str) -> Manifest:
        """Copies `tensors` into host memory and makes them `version`, whole or not at all.

        The buffers may change as soon as this returns. Raises WeightError for a version that was published before,
        a buffer whose size is not that of its dtype and shape, or a name given twice.
        """
        if self._thread is not None and not self._thread.is_alive():
            raise WeightError("the weight store's thread has died; its last words are in the log")
        if version < 0:
            raise WeightError(f"weight version {version} is impossible; versions count from 0")
        with self._lock:
            if version in self._versions:
                raise WeightError(f"weight version {version} is published already; a version never changes")
        entries, sources = _described(tensors)
        offsets = tensor_offsets(entries)
        stream = self._buffer(offsets[-1])
        for start, source in zip(offsets, sources):
            _copy(stream[start : start + len(source)], source)
        chunks = tuple(
            ChunkEntry(offset=start, nbytes=size, raw_nbytes=size, xxh3=digest(stream[start : start + size]))
            for start, size in cut(offsets[-1], self._chunk_bytes)
        )
        manifest = Manifest(
            run=self._run,
            version=version,
            codec="raw",
            base=None,
            config_json=config_json,
            tensors=tuple(
                TensorEntry(
                    name=entry.name,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    nbytes=entry.nbytes,
                    xxh3=digest(stream[start : start + entry.nbytes]),
                )
                for entry, start in zip(entries, offsets)
            ),
            chunks=chunks,
        )
        encoded = encode_manifest(manifest)
        held = _Version(manifest, encoded, digest(encoded), stream)
        with self._lock:
            if version in self._versions:
                raise WeightError(f"weight version {version} was published by another thread meanwhile")
            self._versions[version] = held
            self._collect()
        return manifest

    def close(self) -> None:
        """Stops serving and closes every connection; a second call does nothing."""
        thread, loop, stop = self._thread, self._loop, self._stop
        if thread is None or loop is None or stop is None:
            return
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
            thread.join(STOP_S)
            if thread.is_alive():
                raise WeightError(f"the weight store did not stop within {STOP_S:g} s")
        self._thread = None

    def _collect(self) -> None:
        """Forgets versions beyond the newest ones that nobody reads; the lock is held by the caller."""
        for version in list(self._versions)[: -self._keep_versions]:
            if not self._versions[version].readers:
                self._spare = self._versions.pop(version).stream

    def _buffer(self, nbytes: int) -> memoryview:
        """Memory for a version: that of the last one collected where it fits, since fresh pages cost far more."""
        with self._lock:
            spare, self._spare = self._spare, None
        return spare if spare is not None and spare.nbytes == nbytes else host_buffer(nbytes)

    def _count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[what] += amount

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        loop = asyncio.get_running_loop()
        self._loop, self._stop = loop, asyncio.Event()
        connections: set[asyncio.Task[None]] = set()
        accepting = asyncio.create_task(self._accept(listener, connections))
        ready.set()
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((accepting, stopping), return_when=asyncio.FIRST_COMPLETED)
        listener.close()
        for task in (accepting, stopping, *connections):
            task.cancel()
        await asyncio.gather(accepting, stopping, *connections, return_exceptions=True)
        if accepting.done() and not accepting.cancelled() and (error := accepting.exception()):
            raise error

    async def _accept(self, listener: socket.socket, connections: set[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:
                # Out of file descriptors, or a peer that left before it was accepted: neither ends the store.
                self._count("accept_failed")
                log.warning("the weight store could not accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            self._count("connections")
            reader = _Reader(self, sock, f"the agent at {peer[0]}:{peer[1]}")
            task = asyncio.create_task(reader.run(busy=len(connections) >= MAX_CONNECTIONS))
            connections.add(task)
            task.add_done_callback(connections.discard)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._count("connections_failed")
            log.error("a connection of the weight store failed", exc_info=error)

    def _hold(self, version: int) -> _Version | None:
        with self._lock:
            held = self._versions.get(version)
            if held is not None:
                held.readers += 1
            return held

    def _release(self, held: _Version) -> None:
        with self._lock:
            held.readers -= 1
            self._collect()


class _Reader:
    """One connection: hands shaken, then requests answered in turn. Holds the version that it reads."""

    def __init__(self, store: WeightStore, sock: socket.socket, peer: str) -> None:
        self._store = store
        self._socket = sock
        self._peer = peer
        self._framed: Framed
        self._role = ""
        """What the puller's certificate calls it."""
        self._held: _Version | None = None

    async def run(self, busy: bool) -> None:
        try:
            await self._open()
        except LinkLost:
            self._store._count("handshakes_failed")
            return
        except BaseException:
            self._socket.close()
            raise
        try:
            if busy:
                await self._refuse("busy", f"it serves {MAX_CONNECTIONS} connections already")
            else:
                async with asyncio.timeout(HANDSHAKE_S):
                    welcome = await self._welcome()
                while welcome and await self._answer():
                    pass
        except LinkLost:
            # A puller that is done closes its connections, and one that died looks the same from here. One that asks
            # for nothing is closed by the socket's own deadline, so that it holds no old version in memory.
            self._store._count("links_closed")
        except TimeoutError:
            self._store._count("handshakes_late")
        except WeightError as error:
            self._store._count("bad_messages")
            log.warning("the weight store closed a connection: %s", error)
        finally:
            self._framed.close()
            if self._held is not None:
                self._store._release(self._held)

    async def _open(self) -> None:
        tls = self._store._tls
        if tls is None:
            self._framed = FramedSocket(self._socket, self._peer)
            return
        secured = self._framed = await TlsSocket.accept(self._socket, self._peer, tls, IO_S)
        self._role = certificate_role(secured.certificate or {}, ROLES)

    async def _welcome(self) -> bool:
        hello = decode_to_store(await self._framed.read_message())
        if not isinstance(hello, Hello) or hello.magic != MAGIC or len(hello.nonce) != NONCE_BYTES:
            return await self._refuse("request", "that is not how a puller says hello")
        if hello.protocol != PROTOCOL:
            return await self._refuse(
                "protocol",
                f"it speaks weight protocol {PROTOCOL} and the puller {hello.protocol}; "
                "use the same version of Penstock on both sides",
            )
        nonce = os.urandom(NONCE_BYTES)
        await self._send(Challenge(protocol=PROTOCOL, nonce=nonce))
        proof = decode_to_store(await self._framed.read_message())
        if self._role not in ("", AGENT):
            return await self._refuse("token", f"that certificate is a {self._role}'s, and this door is for agents")
        token = self._proven_token(proof.mac, hello.nonce, nonce) if isinstance(proof, Proof) else None
        if token is None:
            return await self._refuse("token", "the token is not that of this run (PENSTOCK_TOKEN)")
        await self._send(Accepted(mac=prove(token, "store", hello.nonce, nonce)))
        return True

    def _proven_token(self, mac: bytes, nonce: bytes, own_nonce: bytes) -> str | None:
        """The token that the puller has proven; for one known by its certificate the empty one will do."""
        held = self._store._token
        allowed = ([held] if held else []) + ([""] if self._role == AGENT else [])
        return next((token for token in allowed if proven(token, "puller", nonce, own_nonce, mac)), None)

    async def _answer(self) -> bool:
        request = decode_to_store(await self._framed.read_message())
        if isinstance(request, GetManifest):
            return await self._send_manifest(request.version)
        if isinstance(request, GetChunk):
            return await self._send_chunk(request.version, request.index)
        return await self._refuse("request", f"a {type(request).__name__} is no request")

    async def _send_manifest(self, version: int) -> bool:
        held = self._hold(version)
        if held is None:
            return await self._no_such(version)
        await self._send(ManifestReply(nbytes=len(held.encoded), xxh3=held.encoded_xxh3))
        await self._framed.send(held.encoded)
        self._store._count("manifests")
        return True

    async def _send_chunk(self, version: int, index: int) -> bool:
        held = self._hold(version)
        if held is None:
            return await self._no_such(version)
        if not 0 <= index < len(held.manifest.chunks):
            return await self._refuse("request", f"version {version} has no chunk {index}")
        chunk = held.manifest.chunks[index]
        await self._send(ChunkReply(nbytes=chunk.nbytes))
        await self._framed.send(held.stream[chunk.offset : chunk.offset + chunk.nbytes])
        self._store._count("chunks")
        self._store._count("bytes", chunk.nbytes)
        return True

    def _hold(self, version: int) -> _Version | None:
        if self._held is None or self._held.manifest.version != version:
            before, self._held = self._held, self._store._hold(version)
            if before is not None:
                self._store._release(before)
        return self._held

    async def _no_such(self, version: int) -> bool:
        held = ", ".join(map(str, self._store.versions())) or "none"
        return await self._refuse("version", f"it does not hold weight version {version} (held: {held})")

    async def _refuse(self, kind: str, message: str) -> bool:
        self._store._count(f"refused_{kind}")
        await self._send(Refused(kind=kind, message=message))
        return False

    async def _send(self, message: FromStore) -> None:
        await self._framed.send(encode_message(message))


def _described(tensors: Iterable[TensorSource]) -> tuple[list[TensorEntry], list[memoryview]]:
    entries: list[TensorEntry] = []
    sources: list[memoryview] = []
    names: set[str] = set()
    for name, dtype, shape, buffer in tensors:
        source = memoryview(buffer)
        if not source.c_contiguous:
            raise WeightError(f"the buffer of tensor {name} is not contiguous")
        entry = TensorEntry(name=name, dtype=dtype, shape=tuple(shape), nbytes=source.nbytes, xxh3=0)
        check_tensor(entry)
        if name in names:
            raise WeightError(f"tensor {name} is given twice")
        names.add(name)
        entries.append(entry)
        # An empty view can't be cast; it has no bytes to copy either.
        sources.append(source.cast("B") if source.nbytes else memoryview(b""))
    return entries, sources


def _copy(into: memoryview, source: memoryview) -> None:
    for start in range(0, len(source), COPY_BYTES):
        end = min(start + COPY_BYTES, len(source))
        into[start:end] = source[start:end]


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"the weight store can't listen on {format_address(host, port)}: the port is in use; "
                "set weights.port to another one, or to 0 for any free one"
            ) from error
        raise WeightError(f"the weight store can't listen on {format_address(host, port)}: {error}") from error
    listener.setblocking(False)
    return listener


def _outward_address() -> str:
    """This machine's address on the way out; a datagram socket picks a route without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # 192.0.2.1 is set aside for documentation (RFC 5737); no packet goes there.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])
