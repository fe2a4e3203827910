"""Serving weights: hands shaken, requests answered in turn, over plain TCP or TLS.

The same for the trainer's store and for an instance that passes on what it has. Decides who is let in; what there is
to be had, and when, is the `Shelf`'s to say.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from penstock.errors import WeightError
from penstock.tls import certificate_role
from penstock.weights.addresses import format_address
from penstock.weights.choose import choose
from penstock.weights.framed import IO_S, Framed, FramedSocket
from penstock.weights.manifest import Encoding, Made
from penstock.weights.plan import MAX_BATCH, Bytes, digest
from penstock.weights.protocol import (
    MAGIC,
    NONCE_BYTES,
    PROTOCOL,
    Accepted,
    Challenge,
    ChunkReply,
    FromStore,
    GetChunks,
    GetMade,
    GetManifest,
    GetOffers,
    GetPlan,
    GivenUp,
    Hello,
    LinkLost,
    MadeReply,
    ManifestReply,
    NoSuchCodec,
    NoSuchVersion,
    NotLent,
    NotReady,
    Offers,
    OtherProtocol,
    Plan,
    Proof,
    Refused,
    Way,
    decode_to_store,
    encode_message,
    prove,
    proven,
)
from penstock.weights.tls_socket import TlsSocket, speaks_plainly

AGENT = "agent"
ROLES = frozenset((AGENT, "trainer", "operator"))

MAX_CONNECTIONS = 1024
"""More are turned away with "busy" and come back; a bound on what strangers can make a server hold."""
HANDSHAKE_S = 10.0
"""Whoever has not proven the token by then is no agent."""
MAX_WAIT_S = 600.0
"""That a puller may ask a server to wait for a version."""
IDLE_S = 900.0
"""A puller may be silent for so long between two versions; longer than it keeps its links."""
LEASE_IDLE_S = IO_S
"""One that asks for nothing for so long holds no old version in memory."""
PUSH_SHARES = 4
"""Of a small version no more than one part in so many is pushed: the rest is for the puller's other connections."""
PUSH_LEAST_BYTES = 1 << 20
PUSH_MOST_BYTES = 8 << 20
SEND_BYTES = 32 << 20
"""Chunks that are there go out together, up to so much: half of what a puller asks for ahead of raw ones."""

log = logging.getLogger(__name__)


class Lease(Protocol):
    """One encoding, held for as long as a connection reads it."""

    @property
    def manifest(self) -> bytes: ...

    @property
    def chunks(self) -> int: ...

    @property
    def is_draft(self) -> bool:
        """Whether `manifest` is a draft, of a DraftLease."""
        ...

    @property
    def in_parts(self) -> bool:
        """Whether where it lies `whole` it is still being written."""
        ...

    def nbytes(self, index: int) -> int:
        """Of a chunk, on the wire; 0 where that is not known, since it is not there yet."""
        ...

    def place(self, index: int, kind: str) -> tuple[str, int] | None:
        """Where the chunk can be fetched by that way, and its offset there; None where it has to be sent."""
        ...

    def whole(self, kind: str) -> str:
        """Where all of the encoding's bytes lie, by that way; empty where they have to be fetched."""
        ...

    async def chunk(self, index: int) -> Bytes:
        """The chunk as it goes on the wire. Raises NotReady where it does not come in time."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class DraftLease(Lease, Protocol):
    """Of an encoding that is, or was, made while it is read."""

    async def made(self, first: int, wait_s: float) -> Made:
        """What has been made from chunk `first` on. Raises NotReady, GivenUp."""
        ...


class Shelf(Protocol):
    """What is served."""

    def count(self, what: str, amount: int = 1) -> None: ...

    async def offers(self, ask: GetOffers) -> Offers:
        """Raises NoSuchVersion."""
        ...

    async def open(self, encoding: Encoding, wait_s: float, by: str = "", draft: bool = False) -> Lease:
        """`by`: the kind of way by which the puller can map it whole. `draft`: one that is being made will do, with a
        DraftLease. Raises NoSuchVersion, or NotReady where it is not there after `wait_s`."""
        ...

    def ways(self, said: Sequence[str]) -> tuple[Way, ...]:
        """Those by which chunks can be fetched, of what a puller's Hello says."""
        ...

    async def relay(self, encoding: Encoding, address: str, memory: str = "", without: Sequence[str] = ()) -> str:
        """Notes that `address` (empty for none) will have the encoding; returns who else has it, but those `without`
        which it wants to do, or empty. `memory` is what those say alike that lend the same; empty for none."""
        ...

    def neighbour(self, steps: Sequence[Encoding], address: str, memory: str, without: Sequence[str] = ()) -> str:
        """Who, but those `without`, has or gets the last step's version in that `memory` by another encoding, a
        difference to no earlier version than the first step is; empty for none, and where `relay` knows one there."""
        ...


@dataclass(frozen=True, slots=True)
class Door:
    """Who is let in, and how they are spoken to."""

    token: str = field(repr=False)
    tls: ssl.SSLContext | None = None
    binding: bytes = b""
    """Fingerprint of the certificate of `tls`, where the proof of the token is what it is known by."""


async def serve(listener: socket.socket, shelf: Shelf, door: Door, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then cuts every connection."""
    connections: set[asyncio.Task[None]] = set()
    accepting = asyncio.create_task(_accept(listener, shelf, door, connections))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((accepting, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        listener.close()
        for task in (accepting, stopping, *connections):
            task.cancel()
        await asyncio.gather(accepting, stopping, *connections, return_exceptions=True)
    if accepting.done() and not accepting.cancelled() and (error := accepting.exception()):
        raise error


async def _accept(listener: socket.socket, shelf: Shelf, door: Door, connections: set[asyncio.Task[None]]) -> None:
    loop = asyncio.get_running_loop()

    def ended(task: asyncio.Task[None]) -> None:
        connections.discard(task)
        if not task.cancelled() and (error := task.exception()):
            shelf.count("connections_failed")
            log.error("a connection of the weight store failed", exc_info=error)

    while True:
        try:
            sock, peer = await loop.sock_accept(listener)
        except OSError as error:
            # Out of file descriptors, or a peer that left before it was accepted: neither ends the store.
            shelf.count("accept_failed")
            log.warning("the weight store could not accept a connection: %s", error)
            await asyncio.sleep(0.1)
            continue
        shelf.count("connections")
        reader = _Reader(shelf, sock, peer[0], peer[1], door)
        task = asyncio.create_task(reader.run(busy=len(connections) >= MAX_CONNECTIONS))
        connections.add(task)
        task.add_done_callback(ended)


class _Reader:
    """One connection: hands shaken, then requests answered in turn. Holds the encoding that it reads."""

    def __init__(self, shelf: Shelf, sock: socket.socket, host: str, port: int, door: Door) -> None:
        self._shelf = shelf
        self._socket = sock
        self._host = host
        self._peer = f"the agent at {host}:{port}"
        self._door = door
        self._framed: Framed
        self._role = ""
        """What the puller's certificate calls it."""
        self._lease: Lease | None = None
        self._encoding: Encoding | None = None
        self._draft = False
        """Whether that may have been opened as a draft."""

    async def run(self, busy: bool) -> None:
        try:
            await self._open()
        except LinkLost:
            self._socket.close()
            self._shelf.count("handshakes_failed")
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
            self._shelf.count("links_closed")
        except TimeoutError:
            self._shelf.count("handshakes_late")
        except WeightError as error:
            self._shelf.count("bad_messages")
            log.warning("the weight store closed a connection: %s", error)
        finally:
            self._framed.close()
            self._let_go()

    async def _open(self) -> None:
        tls = self._door.tls
        if tls is None or await speaks_plainly(self._socket, self._peer, tls):
            self._framed = FramedSocket(self._socket, self._peer)
            return
        secured = self._framed = await TlsSocket.accept(self._socket, self._peer, tls, IO_S)
        self._role = certificate_role(secured.certificate or {}, ROLES)

    async def _welcome(self) -> bool:
        hello = decode_to_store(await self._first_message())
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
        mac = prove(token, "store", hello.nonce, nonce, self._door.binding)
        await self._send(Accepted(mac=mac, ways=self._shelf.ways(hello.ways)))
        return True

    async def _first_message(self) -> memoryview:
        """Raises OtherProtocol where one end speaks TLS and the other does not; the puller is told in the clear, which
        where it speaks TLS is no TLS, and as such tells it enough."""
        try:
            message = await self._framed.read_message()
            if self._door.tls is not None and isinstance(self._framed, FramedSocket):
                raise OtherProtocol(f"{self._peer} speaks no TLS, and this weight store does")
        except OtherProtocol:
            said = "it speaks no TLS" if self._door.tls is None else "it speaks TLS (penstock join --tls-ca)"
            await self._refuse("protocol", f"{said}, unlike the puller")
            raise
        return message

    def _proven_token(self, mac: bytes, nonce: bytes, own_nonce: bytes) -> str | None:
        """The token that the puller has proven; for one known by its certificate the empty one will do."""
        held, binding = self._door.token, self._door.binding
        allowed = ([held] if held else []) + ([""] if self._role == AGENT else [])
        return next((token for token in allowed if proven(token, "puller", nonce, own_nonce, mac, binding)), None)

    async def _answer(self) -> bool:
        request = decode_to_store(await self._next_request())
        try:
            if isinstance(request, GetPlan):
                await self._send_plan(request)
            elif isinstance(request, GetManifest):
                await self._send_manifest(request)
            elif isinstance(request, GetMade):
                return await self._send_made(request)
            elif isinstance(request, GetChunks):
                return await self._send_chunks(request)
            else:
                return await self._refuse("request", f"a {type(request).__name__} is no request")
        except NoSuchVersion as error:
            return await self._refuse("version", str(error))
        except NoSuchCodec as error:
            return await self._refuse("codec", str(error))
        except GivenUp as error:
            return await self._refuse("given_up", str(error))
        except (NotReady, NotLent) as error:
            await self._refuse("not_ready" if isinstance(error, NotReady) else "not_lent", str(error))
            # It may be asked for again at once, or for its chunks.
            return isinstance(request, GetPlan)
        return True

    async def _next_request(self) -> memoryview:
        """The link may rest between two versions, and what it read of the last one is let go meanwhile."""
        letting_go = asyncio.get_running_loop().call_later(LEASE_IDLE_S, self._let_go)
        try:
            return await self._framed.read_message(IDLE_S)
        finally:
            letting_go.cancel()

    async def _send_plan(self, request: GetPlan) -> None:
        ask = request.ask
        if request.codec == "raw":
            steps: tuple[Encoding, ...] = (Encoding(ask.version),)
            lease = await self._leased(steps[0], ask.wait_s, request.by, ask.draft)
        else:
            steps, lease = await self._chosen(request)
        place = lease.whole(request.by) if request.by else ""
        address = self._address(request.relay_port)
        near = "" if place else self._shelf.neighbour(steps, address, request.lends, request.without)
        relay = near or await self._shelf.relay(steps[0], address, request.lends, request.without)
        pushed = 0 if relay or place or lease.is_draft else _pushed(lease, request.push_bytes)
        signed = lease.manifest
        plan = Plan(
            steps=steps,
            nbytes=len(signed),
            xxh3=digest(signed),
            relay=relay,
            only_seen=bool(near),
            pushed=pushed,
            place=place,
            in_parts=lease.in_parts,
        )
        # Before it goes: who has it may be done with all of it before this goes on.
        self._shelf.count("drafts" if lease.is_draft else "manifests")
        if place:
            self._shelf.count(f"lent_by_{request.by}")
        await self._framed.send(encode_message(plan) + signed)
        await self._send_run([await lease.chunk(index) for index in range(pushed)])

    async def _chosen(self, request: GetPlan) -> tuple[tuple[Encoding, ...], Lease]:
        """The way that ends soonest, of those that can still be had: a base may go while it is looked at."""
        ask = request.ask
        offered = await self._shelf.offers(ask)
        offers, trouble = list(offered.offers), None
        while True:
            try:
                steps = choose(offers, offered.raw_nbytes, request.measured, request.codec, ask.draft).steps
            except NoSuchCodec as error:
                raise trouble or error from None
            try:
                return steps, await self._leased(steps[0], ask.wait_s, request.by, ask.draft)
            except (NoSuchVersion, GivenUp) as error:
                trouble = trouble or error
                offers = [offer for offer in offers if steps[0] not in offer.steps]

    async def _send_manifest(self, ask: GetManifest) -> None:
        lease = await self._leased(ask.encoding, ask.wait_s)
        relay = await self._shelf.relay(ask.encoding, self._address(ask.relay_port), ask.lends)
        encoded = lease.manifest
        reply = ManifestReply(nbytes=len(encoded), xxh3=digest(encoded), relay=relay)
        await self._framed.send(encode_message(reply) + encoded)
        self._shelf.count("manifests")

    async def _send_made(self, ask: GetMade) -> bool:
        lease = await self._leased(ask.encoding, ask.wait_s, draft=True)
        if not isinstance(lease, DraftLease) or not 0 <= ask.first <= lease.chunks:
            return await self._refuse("request", f"{ask.encoding} has no chunk {ask.first} to be made")
        await self._send(MadeReply(made=await lease.made(ask.first, min(max(ask.wait_s, 0.0), MAX_WAIT_S))))
        return True

    def _address(self, relay_port: int) -> str:
        """Of the puller's relay; empty for none."""
        return format_address(self._host, relay_port) if 0 < relay_port < 65536 else ""

    async def _send_chunks(self, ask: GetChunks) -> bool:
        lease = await self._leased(ask.encoding, 0.0, draft=True)
        if len(ask.indices) > MAX_BATCH:
            return await self._refuse("request", f"{len(ask.indices)} chunks at once are over the limit of {MAX_BATCH}")
        run: list[Bytes] = []
        for index in ask.indices:
            if not 0 <= index < lease.chunks:
                await self._send_run(run)
                return await self._refuse("request", f"{ask.encoding} has no chunk {index}")
            lent = lease.place(index, ask.by) if ask.by else None
            # What has to be waited for keeps back nothing that is there.
            if lent is not None or not lease.nbytes(index) or sum(map(len, run)) > SEND_BYTES:
                await self._send_run(run)
                run = []
            if lent is None:
                run.append(await lease.chunk(index))
            else:
                await self._send(ChunkReply(nbytes=lease.nbytes(index), place=lent[0], offset=lent[1]))
                self._shelf.count(f"chunks_by_{ask.by}")
        await self._send_run(run)
        return True

    async def _send_run(self, chunks: Sequence[Bytes]) -> None:
        if not chunks:
            return
        nbytes = sum(map(len, chunks))
        await self._framed.send(encode_message(ChunkReply(nbytes=nbytes, count=len(chunks))), *chunks)
        self._shelf.count("chunks", len(chunks))
        self._shelf.count("bytes", nbytes)

    def _let_go(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    async def _leased(self, encoding: Encoding, wait_s: float, by: str = "", draft: bool = False) -> Lease:
        if self._lease is None or self._encoding != encoding or by or (self._draft and not draft):
            self._let_go()
            self._lease = await self._shelf.open(encoding, min(max(wait_s, 0.0), MAX_WAIT_S), by, draft)
            self._encoding, self._draft = encoding, draft
        return self._lease

    async def _refuse(self, kind: str, message: str) -> bool:
        self._shelf.count(f"refused_{kind}")
        await self._send(Refused(kind=kind, message=message))
        return False

    async def _send(self, message: FromStore) -> None:
        await self._framed.send(encode_message(message))


def _pushed(lease: Lease, push_bytes: int) -> int:
    """How many chunks go out behind a plan."""
    sizes = [lease.nbytes(index) for index in range(lease.chunks)] if push_bytes > 0 else []
    most = min(push_bytes, PUSH_MOST_BYTES, max(sum(sizes) // PUSH_SHARES, PUSH_LEAST_BYTES))
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > most:
            return count
    return len(sizes)
