"""The edge of the weight protocol, the puller's side: connections to a store, kept, chosen and asked."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from penstock.errors import WeightError
from penstock.weights.addresses import format_address, parse_address, parse_addresses
from penstock.weights.bulk import Told, after, nobody
from penstock.weights.dial import first_to_answer, open_socket
from penstock.weights.framed import IO_S, Framed, FramedSocket, counted_from
from penstock.weights.manifest import Encoding, Made
from penstock.weights.plan import digest
from penstock.weights.protocol import (
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
    GetMade,
    GetManifest,
    GetPlan,
    Hello,
    LinkLost,
    MadeReply,
    ManifestReply,
    OtherProtocol,
    Plan,
    Proof,
    Refused,
    TokenRefused,
    ToStore,
    Way,
    decode_from_store,
    encode_message,
    prove,
    proven,
    refusal,
)
from penstock.weights.tls_socket import TlsSocket, relay_client_context
from penstock.weights.transport import CONNECT_S, Fetcher, Heard, Mapper, Planned, Reader, Seen, WayClosed, WeightLink

HANDSHAKE_S = 30.0
KEEP_S = 300.0
"""A link on which nothing was said for so long is opened anew: on the way, somebody may have forgotten it."""
KEEP_LINKS = 16
"""To one source."""
KEEP_SOURCES = 8
DOUBT_S = 60.0
"""An address that did not answer is tried after the source's others for so long; a faster way that failed is not."""

log = logging.getLogger(__name__)


class TcpTransport:
    """Connects to a weight store and proves the token; believes the store only once it has proven it too.

    A source may be several addresses with commas between them, as a host with several network cards has: connections
    are spread over those that answer, and one that does not is come back to last for a while. Links that are kept are
    used again, until `close`. `fetchers` are the faster ways that this end has, the first choice first. With `tls`,
    sources are spoken to over TLS; instances that pass weights on then are as well, and are known by the token, to
    which their certificate is bound.
    """

    def __init__(
        self,
        token: str,
        io_s: float = IO_S,
        tls: ssl.SSLContext | None = None,
        fetchers: Sequence[Fetcher] = (),
    ) -> None:
        self._token = token
        self._io_s = io_s
        self._tls = tls
        self._fetchers = list(fetchers)
        self._closed_ways: dict[str, tuple[float, str]] = {}
        """Until when, and why, a way is not gone, by where it leads: another store's may be open."""
        self._kept: dict[str, list[tuple[float, TcpLink]]] = {}
        self._out: weakref.WeakSet[TcpLink] = weakref.WeakSet()
        """Links that were given out, for as long as somebody has them."""
        self._going: Counter[str] = Counter()
        """Links that are being opened, by address."""
        self._doubted: dict[str, float] = {}
        """Until when an address is come back to last, which did not answer."""
        self._turn = 0

    async def connect(self, source: str, connect_s: float = CONNECT_S, relay: bool = False) -> WeightLink:
        """Raises LinkLost, TokenRefused, OtherProtocol or another WeightError."""
        self._turn += 1
        left = self._by_choice(source)
        first = left[0]
        self._going[first] += 1
        try:
            while True:
                got, address = await self._reached(source, left, connect_s)
                try:
                    link = got if isinstance(got, TcpLink) else await self._shaken(got, address, relay)
                except LinkLost:
                    self._doubt(address)
                    left.remove(address)
                    if not left:
                        raise
                    continue
                self._out.add(link)
                return link
        finally:
            self._going[first] -= 1

    def _by_choice(self, source: str) -> list[str]:
        """The source's addresses: first those that answered lately, of them the one that fewest links go to, and of
        those one with a link that is kept."""
        now = time.monotonic()
        self._let_go_of_old(now)
        kept = {link.address for _, link in self._kept.get(source, ())}
        going = self._going + Counter(link.address for link in self._out if not link.closed)
        addresses = [format_address(host, port) for host, port in parse_addresses(source)]
        turns = {address: (place - self._turn) % len(addresses) for place, address in enumerate(addresses)}
        return sorted(
            turns,
            key=lambda one: (self._doubted.get(one, now) > now, going[one], one not in kept, turns[one]),
        )

    def _let_go_of_old(self, now: float) -> None:
        """Closes kept links that are too old or broken, also those to sources that nobody asks any more: what is mapped
        of a source's memory stays so as long as a link to it."""
        for links in self._kept.values():
            for since, link in list(links):
                if now - since >= KEEP_S or link.hung_up():
                    links.remove((since, link))
                    link.close()
        self._kept = {source: links for source, links in self._kept.items() if links}

    async def _reached(
        self, source: str, addresses: Sequence[str], connect_s: float
    ) -> tuple[TcpLink | socket.socket, str]:
        """The first link that is kept, or socket that is connected, and where it leads. Raises LinkLost."""
        tries = [partial(self._kept_or_opened, source, address, connect_s) for address in addresses]
        got, number = await first_to_answer(tries)
        for address in addresses[:number]:
            self._doubt(address)
        return got, addresses[number]

    async def _kept_or_opened(self, source: str, address: str, connect_s: float) -> TcpLink | socket.socket:
        for since, link in reversed(self._kept.get(source, ())):
            if link.address == address:
                self._kept[source].remove((since, link))
                return link
        try:
            async with asyncio.timeout(connect_s):
                return await open_socket(*parse_address(address))
        except TimeoutError:
            raise LinkLost(f"no connection to the weight store at {address} within {connect_s:g} s") from None
        except OSError as error:
            raise LinkLost(f"no connection to the weight store at {address}: {error}") from error

    def _doubt(self, address: str) -> None:
        self._doubted[address] = time.monotonic() + DOUBT_S

    def keep(self, source: str, link: WeightLink) -> None:
        links = self._kept.setdefault(source, [])
        if isinstance(link, TcpLink) and len(links) < KEEP_LINKS and not link.makeshift and not link.closed:
            self._out.discard(link)
            link.kept = True
            links.append((time.monotonic(), link))
        else:
            link.close()
        # Of relays that are gone nobody asks again.
        for other in [other for other in self._kept if other != source][: max(0, len(self._kept) - KEEP_SOURCES)]:
            for _, old in self._kept.pop(other):
                old.close()

    def close(self) -> None:
        """Closes the links that are kept."""
        while self._kept:
            _, links = self._kept.popitem()
            for _, link in links:
                link.close()

    async def _shaken(self, sock: socket.socket, source: str, relay: bool) -> TcpLink:
        """A link by a connected socket to `source`, an address. Raises as `connect`."""
        peer = f"the weight store at {source}"
        framed: Framed = FramedSocket(sock, peer, self._io_s)
        binding = b""
        if self._tls is not None:
            context = relay_client_context() if relay else self._tls
            secured = await TlsSocket.dial(sock, parse_address(source)[0], peer, context, self._io_s)
            framed = secured
            binding = secured.binding() if relay else b""
        carrier = "tcp" if self._tls is None else "tls"
        link = TcpLink(framed, source, carrier, partial(self._doubt, source))
        said = self._says(link)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await link.shake_hands(self._token, tuple(said.values()), binding)
        except TimeoutError:
            link.close()
            raise LinkLost(f"the weight store at {source} shook no hands within {HANDSHAKE_S:g} s") from None
        except BaseException:
            link.close()
            raise
        self._doubted.pop(source, None)
        self._choose_way(link, [fetcher for fetcher in self._fetchers if fetcher.kind in said])
        return link

    def _says(self, link: TcpLink) -> dict[str, str]:
        """What this end could do beside the connection, by the kind of way."""
        said = {}
        for fetcher in self._fetchers:
            try:
                said[fetcher.kind] = fetcher.says()
            except WayClosed as error:
                link.not_by(fetcher.kind, str(error))
                link.makeshift |= _may_pass(error)
        return said

    def _choose_way(self, link: TcpLink, fetchers: Sequence[Fetcher]) -> None:
        for fetcher in fetchers:
            way = next((way for way in link.ways if way.kind == fetcher.kind), None)
            if way is None:
                link.not_by(fetcher.kind, "the source has no such way to here")
                continue
            until, cause = self._closed_ways.get(way.where, (0.0, ""))
            if time.monotonic() < until:
                link.not_by(fetcher.kind, cause)
                link.makeshift = True
                continue
            try:
                link.go_by(fetcher.kind, fetcher.open(way), partial(self._closed, way))
            except WayClosed as error:
                link.not_by(fetcher.kind, str(error))
                link.makeshift |= _may_pass(error)
            else:
                return

    def _closed(self, way: Way, cause: str) -> None:
        self._closed_ways[way.where] = time.monotonic() + DOUBT_S, cause
        log.warning("weights come by %s no longer, for %.0f s: %s", way.kind, DOUBT_S, cause)


class TcpLink:
    """The puller's end of one connection. Requests are answered in turn, so it serves one caller at a time."""

    def __init__(
        self, framed: Framed, source: str, carrier: str = "tcp", on_fault: Callable[[], None] = lambda: None
    ) -> None:
        self._framed = framed
        self._source = source
        self._carrier = carrier
        self._on_fault = on_fault
        self._by = ""
        self._reader: Reader | None = None
        self._mapper: Mapper | None = None
        self._on_closed: Callable[[str], None] = lambda cause: None
        self._not_by: dict[str, str] = {}
        self._lent = False
        """Whether the version last planned lies where this end can map it."""
        self._coming: list[memoryview] = []
        """What is left to be filled of the last reply's chunks."""
        self._told: Told = nobody
        """Hears what a thread reads, by the number that a chunk has in the last reply."""
        self._count = 0
        """Of chunks in the last reply."""
        self.ways: tuple[Way, ...] = ()
        self.kept = False
        self.makeshift = False
        """It lacks a faster way that may be open again by the next pull."""
        self.closed = False
        self.round_trip_s = 0.0

    @property
    def address(self) -> str:
        """Of the other end."""
        return self._source

    @property
    def heard_at(self) -> float:
        return self._framed.heard_at

    @property
    def direct(self) -> bool:
        return self._reader is not None

    @property
    def sees(self) -> str:
        return self._by if self._mapper is not None else ""

    @property
    def way(self) -> str:
        if self._reader is not None or self._lent:
            return self._by
        causes = "; ".join(f"not by {kind}: {cause}" for kind, cause in self._not_by.items())
        return f"{self._carrier} ({causes})" if causes else self._carrier

    async def shake_hands(self, token: str, ways: tuple[str, ...] = (), binding: bytes = b"") -> None:
        nonce = os.urandom(NONCE_BYTES)
        began = time.monotonic()
        challenge = await self._ask(Hello(magic=MAGIC, protocol=PROTOCOL, nonce=nonce, ways=ways))
        self.round_trip_s = time.monotonic() - began
        if not isinstance(challenge, Challenge):
            raise BadMessage(f"{self._source} answered a hello with {type(challenge).__name__}")
        if challenge.protocol != PROTOCOL:
            raise OtherProtocol(
                f"the weight store at {self._source} speaks protocol {challenge.protocol} and this side {PROTOCOL}; "
                "use the same version of Penstock on both sides"
            )
        accepted = await self._ask(Proof(mac=prove(token, "puller", nonce, challenge.nonce, binding)))
        if not isinstance(accepted, Accepted):
            raise BadMessage(f"{self._source} answered a proof with {type(accepted).__name__}")
        if not proven(token, "store", nonce, challenge.nonce, accepted.mac, binding):
            raise TokenRefused(f"the weight store at {self._source} does not hold this run's token")
        self.ways = accepted.ways

    def go_by(self, kind: str, opened: Reader | Mapper, on_closed: Callable[[str], None]) -> None:
        """From now on bytes come by `opened` where the store lends them; `on_closed` hears why they no longer do."""
        self._by, self._on_closed = kind, on_closed
        if isinstance(opened, Mapper):
            self._mapper = opened
        else:
            self._reader = opened

    def not_by(self, kind: str, cause: str) -> None:
        self._not_by[kind] = cause

    async def plan(self, ask: GetPlan) -> Planned:
        if self._mapper is not None:
            ask = msgspec.structs.replace(ask, by=self._by)
        elif self._reader is not None:
            # A way of its own needs no bytes on the connection before it.
            ask = msgspec.structs.replace(ask, push_bytes=0)
        reply = await self._ask(ask, ask.ask.wait_s)
        if not isinstance(reply, Plan) or not reply.steps:
            raise BadMessage(f"{self._source} answered a request for a plan with {type(reply).__name__}")
        manifest = await self._manifest(reply.nbytes, reply.xxh3, reply.steps[0])
        if self._mapper is not None:
            self._lent = bool(reply.place)
            self._not_by[self._by] = "this version does not lie there"
        place = reply.place if self._mapper else ""
        return Planned(reply.steps, manifest, reply.relay, reply.only_seen, reply.pushed, place, reply.in_parts)

    async def mapped(self, place: str, nbytes: int, in_parts: bool = False) -> Seen:
        if self._mapper is None:
            raise BadMessage(f"{self._source} names a place, and was asked for none")
        try:
            return self._mapper.map(place, nbytes, in_parts)
        except WayClosed as error:
            self._on_closed(str(error))
            raise LinkLost(str(error)) from error

    async def manifest(self, encoding: Encoding, wait_s: float, relay_port: int, lends: str = "") -> tuple[bytes, str]:
        ask = GetManifest(encoding=encoding, wait_s=wait_s, relay_port=relay_port, lends=lends)
        reply = await self._ask(ask, wait_s)
        if not isinstance(reply, ManifestReply):
            raise BadMessage(f"{self._source} answered a manifest request with {type(reply).__name__}")
        return await self._manifest(reply.nbytes, reply.xxh3, encoding), reply.relay

    async def made(self, encoding: Encoding, first: int, wait_s: float) -> Made:
        reply = await self._ask(GetMade(encoding=encoding, first=first, wait_s=wait_s), wait_s)
        if not isinstance(reply, MadeReply):
            raise BadMessage(f"{self._source} answered a request for what is made with {type(reply).__name__}")
        return reply.made

    async def ask_chunks(self, encoding: Encoding, indices: Sequence[int]) -> None:
        by = "" if self._reader is None else self._by
        await self._framed.send(encode_message(GetChunks(encoding=encoding, indices=tuple(indices), by=by)))

    async def chunks_into(
        self, indices: Sequence[int], intos: Sequence[memoryview], heard: Heard | None = None, gladly: int = 0
    ) -> int:
        if self._coming:
            return await self._some(gladly)
        reply = await self._reply()
        if not isinstance(reply, ChunkReply) or not 0 < reply.count <= len(indices):
            raise BadMessage(f"{self._source} answered a chunk request with {type(reply).__name__}")
        intos = intos[: reply.count]
        if reply.nbytes != sum(map(len, intos)):
            what = f"chunk {indices[0]}" + (f" and the {reply.count - 1} behind it" if reply.count > 1 else "")
            raise WeightError(
                f"{self._source} sends {reply.nbytes} bytes for {what}, which the manifest gives {sum(map(len, intos))}"
            )
        if reply.place:
            await self._fetch(reply, indices[0], intos[0])
            return 1
        self._coming, self._count = list(intos), len(intos)
        self._told = _by_number(heard, list(zip(indices, intos)))
        return await self._some(gladly)

    async def _some(self, gladly: int) -> int:
        """The next of the chunks that are coming, with those that are here at once."""
        coming, before = self._coming, len(self._coming)
        told = counted_from(self._told, self._count - before)
        gladly = min(gladly, sum(map(len, coming)))
        self._coming = after(coming, await self._framed.read_parts(coming, len(coming[0]), told=told, gladly=gladly))
        if not self._coming:
            self._told = nobody  # Memory is given out again once nobody refers to it.
        return before - len(self._coming)

    async def _fetch(self, reply: ChunkReply, index: int, into: memoryview) -> None:
        """A chunk from where the store says that it is."""
        if self._reader is None or reply.count != 1:
            raise BadMessage(f"{self._source} names a place for chunk {index}, and was asked for none")
        try:
            await self._reader.read_into(reply.place, reply.offset, into)
        except WayClosed as error:
            self._on_closed(str(error))
            raise LinkLost(str(error)) from error

    def hung_up(self) -> bool:
        """Of a link that is kept: whether its other end is gone."""
        return self._framed.hung_up()

    async def stop(self) -> None:
        self._on_fault()
        await self._framed.stop()
        self.close()

    def close(self) -> None:
        self.closed = True
        # What was to be staged is free for the next pull, however long somebody has this link.
        self._coming, self._told = [], nobody
        self._framed.close()
        opened = self._reader or self._mapper
        if opened is not None:
            opened.close()

    async def _manifest(self, nbytes: int, xxh3: int, encoding: Encoding) -> bytes:
        if not 0 < nbytes <= MAX_MANIFEST_BYTES:
            raise WeightError(f"{self._source} announces a manifest of {nbytes} bytes")
        body = bytearray(nbytes)
        await self._framed.read_into(memoryview(body))
        if digest(body) != xxh3:
            raise LinkLost(f"the manifest of {encoding} from {self._source} came with a wrong checksum")
        return bytes(body)

    async def _ask(self, message: ToStore, wait_s: float = 0.0) -> FromStore:
        await self._framed.send(encode_message(message))
        return await self._reply(wait_s)

    async def _reply(self, wait_s: float = 0.0) -> FromStore:
        reply = decode_from_store(await self._framed.read_message(wait_s))
        if isinstance(reply, Refused):
            raise refusal(reply, self._source)
        return reply


def _may_pass(error: WayClosed) -> bool:
    """Whether a way that can't be opened now may be in a moment, since only descriptors or memory are short."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _by_number(heard: Heard | None, chunks: Sequence[tuple[int, memoryview]]) -> Told:
    if heard is None:
        return nobody

    def told(number: int, left: int) -> None:
        index, into = chunks[number]
        heard(index, into, left)

    return told
