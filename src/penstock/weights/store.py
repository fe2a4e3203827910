"""The trainer's weight store: holds a few versions in host memory and serves them to whoever proves the token.

Decides which versions are kept (the newest `keep_versions` within `keep_bytes`, and older ones while a connection still
reads them) and what is encoded when: a version is hashed and encoded behind the trainer's back, on threads; a
difference when the first agent that holds its base asks for it, and from then on as soon as a version is published.
The newest version's encodings come first (`encoder`), and a version is held for one from when that is begun.
Refuses to know what the bytes mean. It serves in a thread of its own with its own event loop; while it does, the
interpreter's lock is free, because the time goes into the kernel's send, into numpy and into zstd.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from penstock.errors import MissingExtra, WeightError
from penstock.weights.addresses import advertised, format_address, listen, outward_address
from penstock.weights.encoder import Encoder
from penstock.weights.encodings import Estimate, can_zipnn, estimate
from penstock.weights.growing import Growing, within
from penstock.weights.leases import CodedLease, RawLease
from penstock.weights.manifest import Encoding, Manifest, TensorEntry
from penstock.weights.memory import usable_cores
from penstock.weights.offers import RelayChain, codecs_of, offers_of
from penstock.weights.plan import CODECS, MAX_CHUNK_BYTES, check_manifest, tensor_offsets
from penstock.weights.protocol import GetOffers, GivenUp, NoSuchVersion, NotReady, Offers, Way
from penstock.weights.published import (
    Coded,
    Publication,
    TensorSource,
    Version,
    comparable,
    copy_into,
    described,
    made,
    scheme_of_codec,
    version_of,
)
from penstock.weights.quantization import SCHEME_DTYPES, quantize
from penstock.weights.server import Door, Lease, serve
from penstock.weights.spares import Spares
from penstock.weights.transport import Lender

STOP_S = 5.0
SOON_S = 2.0
KEEP_DELTAS = 64
"""Encoded differences kept for chains, within the bytes of one version."""

log = logging.getLogger(__name__)


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
        self._keep_versions = keep_versions
        self._keep_bytes = keep_bytes
        self._advertise = advertise
        self._tls = tls
        self._lock = threading.Lock()
        self._versions: dict[int, Version] = {}
        self._pending: dict[int, Future[Manifest]] = {}
        self._coded: dict[Encoding, Future[Coded]] = {}
        self._growing: dict[Encoding, Future[Growing]] = {}
        """Of those that are not whole yet; done once the first chunk is about to be made."""
        self._estimates: dict[Encoding, Estimate] = {}
        self._relays: dict[Encoding, RelayChain] = {}
        self._quantized: dict[tuple[int, str], Future[Version]] = {}
        """By version and scheme, as far as somebody has asked."""
        self._deltas_wanted: set[str] = set()
        """Codecs."""
        self._counts: Counter[str] = Counter()
        self._cores = threads or usable_cores()
        self._publishing = ThreadPoolExecutor(1, "weight-publish")
        self._encoder = Encoder()
        self._awaited: Counter[Encoding] = Counter()
        """Whoever waits for an encoding now."""
        self._threads = ThreadPoolExecutor(self._cores, "weight-chunks")
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._closed = False
        self._lenders = {lender.kind: lender for lender in lenders}
        self._spares = Spares(lenders)

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
        with self._lock:
            return list(self._versions)

    def encodings(self) -> list[Encoding]:
        """What is encoded now beside the raw versions."""
        with self._lock:
            return [key for key, coded in self._coded.items() if coded.done() and coded.exception() is None]

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

    def publish_behind(self, version: int, tensors: Iterable[TensorSource], config_json: str) -> Publication:
        """Copies `tensors` into host memory and returns; checksums are taken on a thread, and the manifest comes last.

        Who asks for the version meanwhile waits. The buffers may change as soon as this returns. Raises as `publish`.
        """
        if self._thread is not None and not self._thread.is_alive():
            raise WeightError("the weight store's thread has died; its last words are in the log")
        if version < 0:
            raise WeightError(f"weight version {version} is impossible; versions count from 0")
        done: Future[Manifest] = Future()
        if self._closed:
            raise WeightError("the weight store is closed")
        with self._lock:
            if version in self._versions or version in self._pending:
                raise WeightError(f"weight version {version} is published already; a version never changes")
            self._pending[version] = done
        try:
            entries, sources = described(tensors)
            offsets = tensor_offsets(entries)
            stream = self._spares.buffer(offsets[-1])
            for start, source in zip(offsets, sources):
                copy_into(stream[start : start + len(source)], source)
            for lender in self._lenders.values():
                lender.lend(stream)
            self._publishing.submit(self._complete, version, entries, stream, config_json, done)
        except BaseException:
            with self._lock:
                del self._pending[version]
            raise
        return Publication(offsets[-1], done)

    def _complete(
        self, version: int, entries: list[TensorEntry], stream: memoryview, config_json: str, done: Future[Manifest]
    ) -> None:
        try:
            held = self._held_version(version, entries, stream, config_json)
            with self._lock:
                before = next(reversed(self._versions.values()), None)
                self._versions[version] = held
                del self._pending[version]
                self._collect()
                if not self._closed and before is not None:
                    self._code_ahead(before.manifest, held.manifest)
        except BaseException as error:
            with self._lock:
                self._pending.pop(version, None)
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
        with self._lock:
            pending = list(self._pending.values())
        self._publishing.shutdown(wait=False, cancel_futures=True)
        self._encoder.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for done in pending:
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

    def _collect(self) -> None:
        """Forgets versions beyond the newest ones that nobody reads; the lock is held by the caller."""
        held = list(self._versions)
        nbytes = sum(version.stream.nbytes for version in self._versions.values())
        for place, version in enumerate(held[:-1]):
            over = len(held) - place > self._keep_versions or (self._keep_bytes and nbytes > self._keep_bytes)
            if over and not self._versions[version].readers:
                stream = self._versions.pop(version).stream
                nbytes -= stream.nbytes
                self._spares.put(stream)
        self._collect_coded()

    def _collect_coded(self) -> None:
        """Keeps differences for chains, as long as all of them are smaller than a version; the lock is held."""
        newest = next(reversed(self._versions.values()), None)
        left = newest.stream.nbytes if newest else 0
        deltas = 0
        for key in sorted(self._coded, key=lambda key: key.version, reverse=True):
            coded = self._coded[key]
            if not coded.done():
                continue
            if coded.exception() is not None:
                del self._coded[key]
            elif key.base is not None:
                left -= coded.result().manifest.nbytes
                deltas += 1
                if left < 0 or deltas > KEEP_DELTAS:
                    del self._coded[key]
            elif key.version not in self._versions:
                del self._coded[key]
        oldest = min(self._versions, default=0)
        for table in (self._estimates, self._relays):
            for key in [key for key in table if key.version < oldest]:
                del table[key]
        for version, scheme in list(self._quantized):
            if version not in self._versions and self._quantized[version, scheme].done():
                del self._quantized[version, scheme]

    def _code_ahead(self, before: Manifest, now: Manifest) -> None:
        """Begins the difference that agents will ask for; the lock is held by the caller."""
        # Who publishes faster than this encodes skips some: their versions are gone when their turn comes.
        if before.version in self._versions and comparable(before, now):
            for codec in self._deltas_wanted:
                self._code(Encoding(now.version, codec, before.version), ahead=True)

    def _quantize(self, version: int, scheme: str) -> Future[Version]:
        """The version quantized, under way or done; the lock is held by the caller."""
        found = self._quantized.get((version, scheme))
        if found is not None and not (found.done() and found.exception() is not None):
            return found
        if version not in self._versions:
            raise self._not_held(version)
        found = self._quantized[version, scheme] = self._encoder.submit(
            version, partial(self._quantized_version, version, scheme)
        )
        return found

    def _quantized_version(self, version: int, scheme: str) -> Version:
        held = self._hold(version)
        try:
            threads = self._threads if self._cores > 1 else None
            manifest, stream = quantize(held.manifest, held.stream, scheme, threads)
            self.count(f"quantized_{scheme}")
            return Version(manifest, b"", stream)
        finally:
            self._release(held)

    def _code(self, key: Encoding, ahead: bool = False) -> Future[Coded]:
        """The encoding, under way or done, begun by whoever wants it first; the lock is held by the caller.

        Its versions are held from when its turn comes. `ahead`: it is made though nobody waits for it."""
        coded = self._coded.get(key)
        if coded is not None and not (coded.done() and coded.exception() is not None):
            return coded
        held = self._versions.get(key.version)
        base = None if key.base is None else self._versions.get(key.base)
        if held is None or (key.base is not None and base is None):
            raise NoSuchVersion(f"it does not hold {key} (held: {self._names()})")
        if base is not None and not comparable(base.manifest, held.manifest):
            raise NoSuchVersion(f"it has no difference of version {key.version} to {key.base}: other tensors")
        scheme = scheme_of_codec(key.codec)
        quantized = [self._quantize(one, scheme) for one in (key.version, key.base) if scheme and one is not None]
        begun: Future[Growing] = Future()
        self._growing[key] = begun
        coded = self._coded[key] = self._encoder.submit(
            key.version, partial(self._encode, key, quantized, begun, ahead)
        )
        return coded

    def _encode(self, key: Encoding, quantized: list[Future[Version]], begun: Future[Growing], ahead: bool) -> Coded:
        held: list[Version] = []
        try:
            with self._lock:
                if not ahead and not self._awaited[key]:
                    raise GivenUp(f"{key} is given up: nobody waits for it any more")
            for version in (key.version, key.base):
                if version is not None:
                    held.append(self._hold(version))
            shown = [self._encoder.made(one) for one in quantized] or held
            new, old = shown[0], shown[1] if key.base is not None else None
            coded = made(key.codec, new, old, self._token, self._threads if self._cores > 1 else None, begun)
            self.count(f"encoded_{key.codec}")
            return coded
        except BaseException as error:
            if not begun.done():
                begun.set_exception(error)
            raise
        finally:
            with self._lock:
                if self._growing.get(key) is begun:
                    del self._growing[key]
            for one in held:
                self._release(one)

    def _not_held(self, version: int) -> NoSuchVersion:
        """The lock is held by the caller."""
        return NoSuchVersion(f"it does not hold weight version {version} (held: {self._names()})")

    def _names(self) -> str:
        return ", ".join(map(str, self._versions)) or "none"

    def count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[what] += amount

    # What is served; called in the store's own thread.

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await serve(listener, self, Door(self._token, self._tls), self._stop)

    async def offers(self, ask: GetOffers) -> Offers:
        await self._published(ask.version, ask.wait_s)
        if ask.scheme:
            await self._quantized_soon((ask.version, *(one.version for one in ask.held)), ask.scheme, ask.wait_s)
        if ask.held:
            await self._coded_soon(ask, min(ask.wait_s, SOON_S))
        return await asyncio.to_thread(self._offers, ask)

    def _offers(self, ask: GetOffers) -> Offers:
        with self._lock:
            held = self._versions.get(ask.version)
            if held is None:
                raise self._not_held(ask.version)
            new = self._shown(ask.version, ask.scheme)
            if new is None:
                raise NotReady(f"weight version {ask.version} is not quantized to {ask.scheme} yet")
            shown = {one.version: self._shown(one.version, ask.scheme) for one in ask.held}
            bases = {
                one.version: base
                for one in ask.held
                if (base := shown[one.version]) is not None
                and base.manifest.digest == one.digest
                and comparable(base.manifest, new.manifest)
            }
            pinned = [held, *(self._versions[version] for version in bases)]
            for version in pinned:
                version.readers += 1
        try:
            full, delta = codecs_of(ask.scheme)
            fulls = (full, "zipnn") if not ask.scheme and can_zipnn() else (full,)
            wanted = [
                *(Encoding(ask.version, one) for one in fulls),
                *(Encoding(ask.version, delta, base) for base in bases),
            ]
            estimates = {key: found for key in wanted if (found := self._estimated(key, new, bases)) is not None}
            return offers_of(ask, new.manifest.raw_nbytes, self._ready(), estimates)
        finally:
            for version in pinned:
                self._release(version)

    def _shown(self, version: int, scheme: str) -> Version | None:
        """A version that is held, as it is or quantized; None where it is not there. The lock is held."""
        if version not in self._versions or not scheme:
            return self._versions.get(version)
        quantized = self._quantized.get((version, scheme))
        return quantized.result() if quantized is not None and quantized.done() else None

    def _ready(self) -> dict[Encoding, Manifest]:
        with self._lock:
            return {
                key: coded.result().manifest
                for key, coded in self._coded.items()
                if coded.done() and coded.exception() is None
            }

    def _estimated(self, key: Encoding, held: Version, bases: dict[int, Version]) -> Estimate | None:
        found = self._estimates.get(key)
        if found is None:
            base = None if key.base is None else bases[key.base].stream
            try:
                found = estimate(held.manifest, held.stream, key.codec, base)
            except MissingExtra as error:
                log.warning("weights are offered raw alone: %s", error)
                return None
            self._estimates[key] = found
        return Estimate(found.nbytes, found.encode_s / self._cores)

    async def open(self, encoding: Encoding, wait_s: float, by: str = "", draft: bool = False) -> Lease:
        if encoding.codec == "raw":
            await self._published(encoding.version, wait_s)
            held = self._hold(encoding.version)
            return RawLease(held, self._release, self._lenders)
        if encoding.codec not in CODECS:
            raise NoSuchVersion(f"it knows no codec {encoding.codec!r}")
        await self._published(encoding.version, wait_s)
        with self._lock:
            if encoding.base is not None:
                self._deltas_wanted.add(encoding.codec)
            coding = self._code(encoding)
            begun = self._growing.get(encoding)
            self._awaited[encoding] += 1
        what = f"{encoding} is being encoded"
        try:
            if draft and begun is not None and not coding.done():
                return CodedLease(await within(begun, wait_s, what))
            coded = await within(coding, wait_s, what)
        except NotReady:
            raise
        except Exception as error:
            raise GivenUp(f"{encoding} is given up: {str(error) or type(error).__name__}") from error
        finally:
            with self._lock:
                self._awaited[encoding] -= 1
                if not self._awaited[encoding]:
                    del self._awaited[encoding]
        return CodedLease(coded.growing, coded.signed)

    def ways(self, said: Sequence[str]) -> tuple[Way, ...]:
        found = (self._lenders[kind].way(one) for one in said if (kind := one.partition(":")[0]) in self._lenders)
        return tuple(way for way in found if way is not None)

    def relay(self, encoding: Encoding, address: str) -> str:
        with self._lock:
            return self._relays.setdefault(encoding, RelayChain()).before(address)

    async def _coded_soon(self, ask: GetOffers, wait_s: float) -> None:
        """A difference that is being encoded is worth a moment: without it a chain would seem broken. One that leads on
        from what the puller holds is worth none where its draft will do."""
        direct = {one.version for one in ask.held} if ask.draft else set()
        with self._lock:
            coding = {
                key: coded for key, coded in self._coded.items() if key.version == ask.version and not coded.done()
            }
        if coding and not direct.intersection(key.base for key in coding):
            await asyncio.wait([asyncio.wrap_future(one) for one in coding.values()], timeout=wait_s)

    async def _quantized_soon(self, versions: Iterable[int], scheme: str, wait_s: float) -> None:
        """Begins what is not quantized yet, and waits. Raises NotReady where it takes longer."""
        if scheme not in SCHEME_DTYPES:
            raise NoSuchVersion(f"it knows no quantization {scheme!r}")
        with self._lock:
            wanted = [self._quantize(version, scheme) for version in versions if version in self._versions]
        try:
            for quantizing in wanted:
                await within(quantizing, wait_s, f"weights are being quantized to {scheme}")
        except MissingExtra as error:
            raise NoSuchVersion(str(error)) from error

    async def _published(self, version: int, wait_s: float) -> None:
        with self._lock:
            pending = self._pending.get(version)
        if pending is not None:
            await within(pending, wait_s, f"weight version {version} is being published")

    def _hold(self, version: int) -> Version:
        with self._lock:
            held = self._versions.get(version)
            if held is None:
                raise self._not_held(version)
            held.readers += 1
            return held

    def _release(self, held: Version) -> None:
        with self._lock:
            held.readers -= 1
            self._collect()
