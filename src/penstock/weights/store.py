"""The trainer's weight store: holds a few versions in host memory and serves them to whoever proves the token.

A version is hashed behind the trainer's back, on a thread; which ones are kept and what is encoded when is in
`holdings`: the newest `keep_versions` within `keep_bytes`, and older ones while a connection still reads them; a
difference when the first agent that holds its base asks for it, and from then on as soon as a version is published.
Refuses to know what the bytes mean. It serves in a thread of its own with its own event loop; while it does, the
interpreter's lock is free, because the time goes into the kernel's send, into numpy and into zstd.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.errors import WeightError
from penstock.weights.addresses import advertised, format_address, listen, outward_address
from penstock.weights.growing import Growing
from penstock.weights.holdings import Holdings
from penstock.weights.leases import CodedLease, RawLease
from penstock.weights.manifest import Encoding, Manifest, TensorEntry
from penstock.weights.memory import usable_cores
from penstock.weights.plan import CODECS, MAX_CHUNK_BYTES, check_manifest
from penstock.weights.protocol import GetOffers, NoSuchVersion, Offers, Way
from penstock.weights.published import (
    Publication,
    Shaped,
    TensorSource,
    Version,
    described,
    entries_of,
    filled,
    scheme_of_codec,
    version_of,
)
from penstock.weights.relay_chain import RelayChain
from penstock.weights.server import Door, Lease, serve
from penstock.weights.spares import Spares
from penstock.weights.transport import Lender

STOP_S = 5.0
FIRST_S = 0.1
"""That who asks first on a machine may wait for the one that had the last version first there: they are told of a
version at once, and its own memory and what is mapped of it are worth more."""


class WeightStore:
    """Serves weight versions over TCP. `publish` may be called from any thread.

    `host` and `port` are listened on (port 0 takes a free one); agents reach the store by `advertise` (a host, or
    host:port behind a port forwarding), by default `host`. With `tls`, pullers are spoken to over TLS, and one whose
    verified certificate names an agent needs no token. `threads` encode, beside what calls `publish`. `lenders` are
    faster ways than TCP to the raw versions; where several hosts are advertised, with commas between them, agents
    spread their connections over all.
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
        keep_bytes: int = 0,
        threads: int = 0,
        lenders: Sequence[Lender] = (),
    ) -> None:
        if chunk_bytes < 1 or keep_versions < 1:
            raise ValueError(f"chunk_bytes={chunk_bytes} and keep_versions={keep_versions} must be at least 1")
        if chunk_bytes > MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes={chunk_bytes} is over what pullers take, {MAX_CHUNK_BYTES}")
        self._run = run
        self._host = host
        self._port = port
        self._token = token
        self._chunk_bytes = chunk_bytes
        self._advertise = advertise
        self._tls = tls
        self._lock = threading.Lock()
        self._relays: dict[Encoding, RelayChain] = {}
        self._counts: Counter[str] = Counter()
        self._publishing = ThreadPoolExecutor(1, "weight-publish")
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._closed = False
        self._lenders = {lender.kind: lender for lender in lenders}
        self._spares = Spares(lenders)
        self._held = Holdings(token, keep_versions, keep_bytes, threads or usable_cores(), self._spares, self.count)

    def start(self) -> str:
        """Listens and returns the address that agents pull from. Raises PortInUse, or WeightError for a bad host."""
        if self._thread is not None:
            raise WeightError(f"the weight store listens on {self.address} already")
        if self._closed:
            raise WeightError("the weight store is closed")
        listener = listen(self._host, self._port)
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
            return advertised(self._advertise, self._port)
        return format_address(outward_address() if self._host in ("", "0.0.0.0", "::") else self._host, self._port)

    def versions(self) -> list[int]:
        """Versions held now, oldest first."""
        return self._held.versions()

    def encodings(self) -> list[Encoding]:
        """What is encoded now beside the raw versions."""
        return self._held.encodings()

    def counters(self) -> dict[str, int]:
        """What happened so far: connections, manifests, chunks and bytes served, refusals by kind, links lost."""
        with self._lock:
            return dict(self._counts)

    def publish(self, version: int, tensors: Iterable[TensorSource], config_json: str) -> Manifest:
        """Makes `tensors` version `version`, whole or not at all; it can be had when this returns.

        The buffers may change as soon as this returns. Raises WeightError for a version that was published before,
        a buffer whose size is not that of its dtype and shape, or a name given twice.
        """
        return self.publish_behind(version, tensors, config_json).manifest()

    def publish_behind(
        self,
        version: int,
        tensors: Iterable[TensorSource],
        config_json: str,
        shapes: Iterable[Shaped] | None = None,
    ) -> Publication:
        """Copies `tensors` into host memory and returns; checksums are taken on a thread, and the manifest comes last.

        Who asks for the version meanwhile waits. The buffers may change as soon as this returns. `shapes` of all of
        them, where they are known before: then each is copied as it comes, and no two need to be there at once. Raises
        as `publish`, also where other tensors come than `shapes` says.
        """
        if self._thread is not None and not self._thread.is_alive():
            raise WeightError("the weight store's thread has died; its last words are in the log")
        if version < 0:
            raise WeightError(f"weight version {version} is impossible; versions count from 0")
        if self._closed:
            raise WeightError("the weight store is closed")
        done = self._held.promise(version)
        try:
            entries, sources = described(tensors) if shapes is None else (entries_of(shapes), tensors)
            nbytes = sum(entry.nbytes for entry in entries)
            stream = self._spares.buffer(nbytes)
            try:
                filled(stream, entries, sources)
            except BaseException:
                self._spares.put(stream)
                raise
            for lender in self._lenders.values():
                lender.lend(stream)
            self._publishing.submit(self._complete, version, entries, stream, config_json, done)
        except BaseException:
            self._held.take_back(version)
            raise
        return Publication(nbytes, done)

    def _complete(
        self, version: int, entries: list[TensorEntry], stream: memoryview, config_json: str, done: Future[Manifest]
    ) -> None:
        try:
            held = self._held_version(version, entries, stream, config_json)
            self._held.add(version, held)
        except BaseException as error:
            self._held.take_back(version)
            done.set_exception(error)
            raise
        done.set_result(held.manifest)

    def _held_version(self, version: int, entries: list[TensorEntry], stream: memoryview, config_json: str) -> Version:
        held = version_of(self._run, version, entries, stream, config_json, self._chunk_bytes, self._token)
        # What no puller would take is told to whoever publishes it.
        check_manifest(held.manifest, version, held.manifest.raw_nbytes)
        return held

    def close(self) -> None:
        """Stops serving and closes every connection; a second call does nothing."""
        thread, loop, stop = self._thread, self._loop, self._stop
        if thread is None or loop is None or stop is None:
            return
        self._closed = True
        self._publishing.shutdown(wait=False, cancel_futures=True)
        for done in self._held.close():
            # One whose checksums have begun ends by itself and finds its end taken.
            if not done.done():
                done.set_exception(WeightError("the weight store was closed before the version was ready"))
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
            thread.join(STOP_S)
            if thread.is_alive():
                raise WeightError(f"the weight store did not stop within {STOP_S:g} s")
        self._thread = None
        for lender in self._lenders.values():
            lender.close()

    def count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[what] += amount

    # What is served; called in the store's own thread.

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await serve(listener, self, Door(self._token, self._tls), self._stop)

    async def offers(self, ask: GetOffers) -> Offers:
        return await self._held.offers(ask)

    async def open(self, encoding: Encoding, wait_s: float, by: str = "", draft: bool = False) -> Lease:
        await self._held.published(encoding.version, wait_s)
        if encoding.codec == "raw":
            return RawLease(self._held.hold(encoding.version), self._held.release, self._lenders)
        if encoding.codec not in CODECS:
            raise NoSuchVersion(f"it knows no codec {encoding.codec!r}")
        coded = await self._held.coded(encoding, wait_s, draft)
        return CodedLease(coded) if isinstance(coded, Growing) else CodedLease(coded.growing, coded.signed)

    def ways(self, said: Sequence[str]) -> tuple[Way, ...]:
        found = (self._lenders[kind].way(one) for one in said if (kind := one.partition(":")[0]) in self._lenders)
        return tuple(way for way in found if way is not None)

    async def relay(self, encoding: Encoding, address: str, memory: str = "", without: Sequence[str] = ()) -> str:
        oldest = min(self._held.versions(), default=0)
        for key in [key for key in self._relays if key.version < oldest]:
            del self._relays[key]
        chain, base = self._relays.setdefault(encoding, RelayChain()), self._chain_of_base(encoding)
        if address and memory and base is not None:
            await chain.first_first(address, memory, base, FIRST_S)
        return chain.before(address, memory, without)

    def neighbour(self, steps: Sequence[Encoding], address: str, memory: str, without: Sequence[str] = ()) -> str:
        first, last = steps[0], steps[-1]
        if not memory or (first in self._relays and self._relays[first].first_in(memory, (address, *without))):
            return ""
        for key, chain in self._relays.items():
            same = key.version == last.version and scheme_of_codec(key.codec) == scheme_of_codec(last.codec)
            as_late = first.base is None or (key.base is not None and key.base >= first.base)
            if same and as_late and (near := chain.first_in(memory, (address, *without))):
                return near
        return ""

    def _chain_of_base(self, encoding: Encoding) -> RelayChain | None:
        """By which most who hold it came by the base, as far as is known."""
        chains = {key.codec: chain for key, chain in self._relays.items() if key.version == encoding.base}
        return chains.get(encoding.codec) or next(iter(chains.values()), None)
