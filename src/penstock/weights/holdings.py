"""Versions that a store holds and their encodings: which are kept, and what is made when, on threads of its own.

Every version that is read or encoded is held until it is released; what nobody holds beyond the newest ones is
forgotten, and its memory given back. The newest version's encodings come first (`encoder`), and versions are held for
one from when it is begun. Thread-safe; knows of no sockets, leases and relays.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from penstock.errors import MissingExtra, WeightError
from penstock.weights.encoder import Encoder
from penstock.weights.encodings import Estimate, can_zipnn, estimate
from penstock.weights.growing import Growing, awaitable, within
from penstock.weights.manifest import Encoding, Manifest
from penstock.weights.memory import NoMemory
from penstock.weights.offers import codecs_of, offers_of
from penstock.weights.protocol import GetOffers, GivenUp, NoSuchVersion, NotReady, Offers
from penstock.weights.published import Coded, Version, comparable, made, scheme_of_codec
from penstock.weights.quantization import SCHEME_DTYPES, quantize
from penstock.weights.spares import Spares

__all__ = ["Holdings"]

SOON_S = 2.0
ASKED_S = 10.0
"""Between two asks for what is not ready a puller pauses, or comes on another connection: it still waits."""
KEEP_DELTAS = 64
"""Encoded differences kept for chains, within the bytes of one version."""

log = logging.getLogger(__name__)


class Holdings:
    """The newest `keep_versions`, within `keep_bytes` (0: any number), and older ones while somebody holds them.

    `cores` encode. `spares` gets the memory of versions that are forgotten. `count(what)` is told what was made.
    """

    def __init__(
        self, token: str, keep_versions: int, keep_bytes: int, cores: int, spares: Spares, count: Callable[[str], None]
    ) -> None:
        self._token = token
        self._keep_versions = keep_versions
        self._keep_bytes = keep_bytes
        self._cores = cores
        self._spares = spares
        self._count = count
        self._lock = threading.Lock()
        self._versions: dict[int, Version] = {}
        self._pending: dict[int, Future[Manifest]] = {}
        self._coded: dict[Encoding, Future[Coded]] = {}
        self._growing: dict[Encoding, Future[Growing]] = {}
        """Of those that are not whole yet; done once the first chunk is about to be made."""
        self._estimates: dict[Encoding, Estimate] = {}
        self._quantized: dict[tuple[int, str], Future[Version]] = {}
        """By version and scheme, as far as somebody has asked."""
        self._deltas_wanted: set[str] = set()
        """Codecs."""
        self._awaited: Counter[Encoding] = Counter()
        """Whoever waits for an encoding now."""
        self._asked: dict[Encoding, float] = {}
        """When somebody waited last for one that waits for its turn."""
        self._encoder = Encoder()
        self._threads = ThreadPoolExecutor(cores, "weight-chunks")
        self._closed = False

    def versions(self) -> list[int]:
        """Held now, oldest first."""
        with self._lock:
            return list(self._versions)

    def encodings(self) -> list[Encoding]:
        """What is encoded now beside the raw versions."""
        return list(self._ready())

    def close(self) -> list[Future[Manifest]]:
        """Nothing more is made. Returns the promises that are open."""
        with self._lock:
            self._closed = True
            pending = list(self._pending.values())
        self._encoder.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        return pending

    # ---- versions

    def promise(self, version: int) -> Future[Manifest]:
        """A version that is on its way: who asks for it waits. Raises WeightError for one that is there."""
        done: Future[Manifest] = Future()
        with self._lock:
            if version in self._versions or version in self._pending:
                raise WeightError(f"weight version {version} is published already; a version never changes")
            self._pending[version] = done
        return done

    def take_back(self, version: int) -> None:
        """It does not come."""
        with self._lock:
            self._pending.pop(version, None)

    def add(self, version: int, held: Version) -> None:
        """It has come; older ones may go."""
        with self._lock:
            before = next(reversed(self._versions.values()), None)
            self._versions[version] = held
            del self._pending[version]
            self._collect()
            if not self._closed and before is not None:
                self._code_ahead(before.manifest, held.manifest)

    async def published(self, version: int, wait_s: float) -> None:
        """Waits for a version that is promised. Raises NotReady."""
        with self._lock:
            pending = self._pending.get(version)
        if pending is not None:
            await within(pending, wait_s, f"weight version {version} is being published")

    def hold(self, version: int) -> Version:
        """The version, which stays until it is released. Raises NoSuchVersion."""
        with self._lock:
            held = self._versions.get(version)
            if held is None:
                raise self._not_held(f"weight version {version}")
            held.readers += 1
            return held

    def release(self, held: Version) -> None:
        with self._lock:
            held.readers -= 1
            self._collect()

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
        """Keeps the newest version's full encodings, and differences for chains, then older full encodings, as long as
        all of these are smaller than a version; the lock is held."""
        newest = next(reversed(self._versions.values()), None)
        left = newest.stream.nbytes if newest else 0
        made: dict[Encoding, int] = {}
        for key, coded in list(self._coded.items()):
            if coded.done():
                if _failed(coded) or (key.base is None and key.version not in self._versions):
                    del self._coded[key]
                else:
                    made[key] = coded.result().manifest.nbytes
        light = {key for key, nbytes in made.items() if nbytes <= left / 2}
        deltas = 0
        # Differences first: an older full encoding can be made again, and one of versions that are gone can't. One that
        # is hardly lighter than a version takes no chain's place.
        for key in sorted(made, key=lambda key: (key.base is not None, key in light, key.version), reverse=True):
            is_delta = key.base is not None
            if not is_delta and newest is not None and key.version == newest.manifest.version:
                continue
            if made[key] > left or deltas + is_delta > KEEP_DELTAS:
                del self._coded[key]
            else:
                left -= made[key]
                deltas += is_delta
        oldest = min(self._versions, default=0)
        for key in [key for key in self._estimates if key.version < oldest]:
            del self._estimates[key]
        for version, scheme in list(self._quantized):
            if version not in self._versions and self._quantized[version, scheme].done():
                del self._quantized[version, scheme]

    # ---- encodings

    async def coded(self, encoding: Encoding, wait_s: float, draft: bool) -> Growing | Coded:
        """An encoding, or with `draft` what there is of one that is still made. Raises NotReady, NoSuchVersion,
        GivenUp."""
        with self._lock:
            if encoding.base is not None:
                self._deltas_wanted.add(encoding.codec)
            coding = self._code(encoding)
            begun = self._growing.get(encoding)
            self._awaited[encoding] += 1
        what = f"{encoding} is being encoded"
        try:
            if draft and begun is not None and not coding.done():
                return await within(begun, wait_s, what)
            return await within(coding, wait_s, what)
        except NotReady:
            raise
        except Exception as error:
            raise GivenUp(f"{encoding} is given up: {str(error) or type(error).__name__}") from error
        finally:
            with self._lock:
                self._awaited[encoding] -= 1
                if not self._awaited[encoding]:
                    del self._awaited[encoding]
                if not coding.done():
                    self._asked[encoding] = time.monotonic()

    def _code_ahead(self, before: Manifest, now: Manifest) -> None:
        """Begins the difference that agents will ask for; the lock is held by the caller."""
        # Who publishes faster than this encodes skips some: their versions are gone when their turn comes.
        if before.version in self._versions and comparable(before, now):
            for codec in self._deltas_wanted:
                self._code(Encoding(now.version, codec, before.version), ahead=True)

    def _quantize(self, version: int, scheme: str) -> Future[Version]:
        """The version quantized, under way or done; the lock is held by the caller."""
        found = self._quantized.get((version, scheme))
        if found is not None and not _failed(found):
            return found
        if version not in self._versions:
            raise self._not_held(f"weight version {version}")
        found = self._quantized[version, scheme] = self._encoder.submit(
            version, partial(self._quantized_version, version, scheme)
        )
        return found

    def _quantized_version(self, version: int, scheme: str) -> Version:
        held = self.hold(version)
        try:
            threads = self._threads if self._cores > 1 else None
            manifest, stream = quantize(held.manifest, held.stream, scheme, threads)
            self._count(f"quantized_{scheme}")
            return Version(manifest, b"", stream)
        finally:
            self.release(held)

    def _code(self, key: Encoding, ahead: bool = False) -> Future[Coded]:
        """The encoding, under way or done, begun by whoever wants it first; the lock is held by the caller.

        Its versions are held from when its turn comes. `ahead`: it is made though nobody waits for it."""
        coded = self._coded.get(key)
        if coded is not None and not _failed(coded):
            return coded
        held = self._versions.get(key.version)
        base = None if key.base is None else self._versions.get(key.base)
        if held is None or (key.base is not None and base is None):
            raise self._not_held(key)
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
                asked = time.monotonic() - self._asked.pop(key, -math.inf)
                if not ahead and not self._awaited[key] and asked > ASKED_S:
                    raise GivenUp(f"{key} is given up: nobody waits for it any more")
            for version in (key.version, key.base):
                if version is not None:
                    held.append(self.hold(version))
            shown = [self._encoder.made(one) for one in quantized] or held
            new, old = shown[0], shown[1] if key.base is not None else None
            coded = made(key.codec, new, old, self._token, self._threads if self._cores > 1 else None, begun)
            self._count(f"encoded_{key.codec}")
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
                self.release(one)

    def _not_held(self, what: object) -> NoSuchVersion:
        """The lock is held by the caller."""
        return NoSuchVersion(f"it does not hold {what} (held: {', '.join(map(str, self._versions)) or 'none'})")

    # ---- what is offered

    async def offers(self, ask: GetOffers) -> Offers:
        """Ways to a version for whoever holds what `ask` says. Raises NoSuchVersion, NotReady."""
        await self.published(ask.version, ask.wait_s)
        if ask.scheme:
            await self._quantized_soon(ask.version, [one.version for one in ask.held], ask.scheme, ask.wait_s)
        if ask.held:
            await self._coded_soon(ask, min(ask.wait_s, SOON_S))
        return await asyncio.to_thread(self._offers, ask)

    def _offers(self, ask: GetOffers) -> Offers:
        with self._lock:
            held = self._versions.get(ask.version)
            if held is None:
                raise self._not_held(f"weight version {ask.version}")
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
                self.release(version)

    def _shown(self, version: int, scheme: str) -> Version | None:
        """A version that is held, as it is or quantized; None where it is not there. The lock is held."""
        if version not in self._versions or not scheme:
            return self._versions.get(version)
        quantized = self._quantized.get((version, scheme))
        return quantized.result() if quantized is not None and quantized.done() and not _failed(quantized) else None

    def _ready(self) -> dict[Encoding, Manifest]:
        with self._lock:
            return {
                key: coded.result().manifest
                for key, coded in self._coded.items()
                if coded.done() and not _failed(coded)
            }

    def _estimated(self, key: Encoding, held: Version, bases: dict[int, Version]) -> Estimate | None:
        with self._lock:
            found = self._estimates.get(key)
        if found is None:
            base = None if key.base is None else bases[key.base].stream
            try:
                found = estimate(held.manifest, held.stream, key.codec, base)
            except MissingExtra as error:
                log.warning("weights are offered raw alone: %s", error)
                return None
            with self._lock:
                self._estimates[key] = found
        return Estimate(found.nbytes, found.encode_s / self._cores)

    async def _coded_soon(self, ask: GetOffers, wait_s: float) -> None:
        """A difference that is being encoded is worth a moment: without it a chain would seem broken. One that leads on
        from what the puller holds is worth none where its draft will do."""
        direct = {one.version for one in ask.held} if ask.draft else set()
        with self._lock:
            coding = {
                key: coded for key, coded in self._coded.items() if key.version == ask.version and not coded.done()
            }
        if coding and not direct.intersection(key.base for key in coding):
            await asyncio.wait([awaitable(one) for one in coding.values()], timeout=wait_s)

    async def _quantized_soon(self, target: int, bases: Sequence[int], scheme: str, wait_s: float) -> None:
        """Begins what is not quantized yet, and waits. Raises NotReady where it takes longer."""
        if scheme not in SCHEME_DTYPES:
            raise NoSuchVersion(f"it knows no quantization {scheme!r}")
        with self._lock:
            there = [version for version in (target, *bases) if version in self._versions]
            wanted = {version: self._quantize(version, scheme) for version in there}
        try:
            for version, quantizing in wanted.items():
                try:
                    await within(quantizing, wait_s, f"weights are being quantized to {scheme}")
                except NoSuchVersion:
                    if version == target:
                        raise
                    # A base that went before its turn came is none.
        except MissingExtra as error:
            raise NoSuchVersion(str(error)) from error
        except NoMemory as error:
            raise GivenUp(f"weight version {target} can't be quantized to {scheme}: {error}") from error


def _failed(work: Future[Any]) -> bool:
    """It has ended otherwise than well."""
    return work.done() and (work.cancelled() or work.exception() is not None)
