"""An instance passes on what it has of a version, so that the trainer's link carries it about once.

Serves the encodings of the versions that it was last told to expect, chunk by chunk as they come in and verify: whoever
asks for one that is on its way waits. To those on the same machine it lends the version, where it lies in memory that
they can see: one of them decodes it, and the others map and verify it, each tensor once that one has. Behind the same
token as the trainer's store; what it says is believed no more than any wire.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.errors import WeightError
from penstock.weights.addresses import format_address
from penstock.weights.manifest import Encoding
from penstock.weights.plan import Bytes
from penstock.weights.protocol import GetOffers, NoSuchVersion, NotLent, NotReady, Offers, Way
from penstock.weights.server import Door, Lease, serve
from penstock.weights.tls_socket import relay_server_context
from penstock.weights.transport import Lender, PartLender

__all__ = ["Relay"]

KEEP_VERSIONS = 2
"""Those last expected, whatever their numbers: a run that goes on from an earlier checkpoint counts from there."""
REMEMBERED = 64
"""Versions that were let go of: who asks for one of them need not wait for it."""
WAIT_S = 5.0
"""For anything of a version to come that this instance has asked for itself; then the puller goes to the trainer."""


T = TypeVar("T")


@dataclass(slots=True)
class _Passing:
    """An encoding that is passed on."""

    manifest: bytes
    chunks: int
    have: dict[int, Bytes] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Replaced at each arrival, so that whoever waits looks again."""
    forgotten: bool = False

    def came(self) -> None:
        self.arrived.set()
        self.arrived = asyncio.Event()

    def forget(self) -> None:
        """Lets go of its memory, also for those who have a lease."""
        self.forgotten = True
        self.have.clear()
        self.came()


@dataclass(frozen=True, slots=True)
class _Whole:
    """A version in memory that others on this machine can see."""

    manifest: bytes
    kind: str
    place: str
    in_parts: bool = False
    """It is being written there."""


class Relay:
    """`start`, then `expect` an encoding, and `put` each chunk of it once it is verified; `lend` the version once it is
    whole, in memory that others on this machine see by one of `lenders`.

    `secure`: over TLS, with a certificate made for the occasion; either side is known by its proof of the token.
    Raises WeightError without a token, MissingExtra where no certificate can be made.
    """

    def __init__(
        self,
        token: str,
        host: str = "",
        port: int = 0,
        wait_s: float = WAIT_S,
        secure: bool = False,
        lenders: Sequence[Lender] = (),
    ) -> None:
        if not token:
            raise WeightError("an instance without the run's token can't pass weights on")
        tls, binding = relay_server_context() if secure else (None, b"")
        self._door = Door(token, tls, binding)
        self._host = host
        self._wait_s = wait_s
        self._lenders = tuple(lenders)
        self._whole: dict[int, _Whole] = {}
        """That which was lent last at the end."""
        self._written: dict[int, tuple[_Whole, Callable[[], None]]] = {}
        """What is lent in parts, and what lends all of it."""
        self._passing: dict[Encoding, _Passing] = {}
        self._recent: dict[int, None] = {}
        """Versions that were expected, the last one at the end."""
        self._unseen: set[int] = set()
        """Of those: such as are staged where nobody else sees them."""
        self._gone: dict[int, None] = {}
        """Versions that it has gone on from."""
        self._arrived = asyncio.Event()
        self._stop = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._counts: Counter[str] = Counter()
        self.port = port
        """Listened on; a free one where 0 was given."""
        self.memory = next((lender.memory for lender in lenders if isinstance(lender, PartLender)), "")
        """What those say alike whose versions lie in the same; empty where nobody else sees them."""

    def start(self) -> None:
        """Listens, in the running loop. Raises WeightError where the port can't be had."""
        try:
            listener = socket.create_server((self._host, self.port), backlog=64)
        except OSError as error:
            where = format_address(self._host or "*", self.port)
            raise WeightError(f"the relay of weights can't listen on {where}: {error}") from error
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(serve(listener, self, self._door, self._stop), name="weight-relay")

    async def close(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            self._stop.set()
            await asyncio.gather(serving, return_exceptions=True)

    def counters(self) -> dict[str, int]:
        return dict(self._counts)

    def expect(self, encoding: Encoding, manifest: bytes, chunks: int) -> None:
        """Begins to pass an encoding on; those of old versions are forgotten, and their memory can be used again."""
        known = self._passing.get(encoding)
        if known is None or known.manifest != manifest:
            # One that is fetched again, after a cut, goes on for those who wait for the rest of it.
            self._passing[encoding] = _Passing(manifest, chunks)
        whole = self._whole.get(encoding.version)
        if whole is not None and whole.manifest != manifest:
            # Other weights under the same number, or the same ones once more.
            del self._whole[encoding.version]
        _to_the_end(self._recent, encoding.version, None)
        self._gone.pop(encoding.version, None)
        for old in list(self._recent)[:-KEEP_VERSIONS]:
            del self._recent[old]
            self._unseen.discard(old)
            _to_the_end(self._gone, old, None)
        for old in list(self._gone)[:-REMEMBERED]:
            del self._gone[old]
        for key in [key for key in self._passing if key.version not in self._recent]:
            self._passing.pop(key).forget()
        self._stir()

    def stages(self, version: int, stream: memoryview) -> None:
        """One that is expected will lie in `stream`: who would map it is told at once where that is not to be seen."""
        if any(lender.place(stream) for lender in self._lenders):
            self._unseen.discard(version)
        else:
            self._unseen.add(version)
        self._stir()

    def let_go(self) -> bool:
        """Forgets all chunks, so that their memory can be used again; those who wait for some go elsewhere. Whether
        there were any."""
        had = any(passing.have for passing in self._passing.values())
        while self._passing:
            self._passing.popitem()[1].forget()
        self._stir()
        return had

    def put(self, encoding: Encoding, index: int, data: Bytes) -> None:
        """A chunk as it was on the wire, verified; its bytes must not change any more."""
        passing = self._passing.get(encoding)
        if passing is not None:
            passing.have[index] = data
            passing.came()
            self._stir()

    def lend_in_parts(self, version: int, manifest: bytes, stream: memoryview) -> Callable[[int, int], None] | None:
        """The version of `manifest` (signed) is being written to `stream`, if that is memory that others see, until
        `take_back`. What is returned is to be told of each tensor, its offset and its bytes, that nobody will write to
        any more; from any thread."""
        for lender in self._lenders:
            if isinstance(lender, PartLender) and (place := lender.place(stream)):
                let_go = functools.partial(lender.lend, stream)
                self._written[version] = _Whole(manifest, lender.kind, place, True), let_go
                self._stir()
                return functools.partial(lender.lend_part, stream)
        return None

    def take_back(self, version: int) -> Callable[[], None] | None:
        """What was lent in parts is whole, or never will be. What is returned, if it was lent, is to be called once
        nobody writes to any of it any more, from any thread: those who wait for a tensor see for themselves."""
        _, let_go = self._written.pop(version, (None, None))
        return let_go

    def lend(self, version: int, manifest: bytes, kind: str, place: str) -> None:
        """The version of `manifest` (signed) lies whole at `place`, by the way `kind`; nobody writes there any more."""
        _to_the_end(self._whole, version, _Whole(manifest, kind, place))
        for old in list(self._whole)[:-KEEP_VERSIONS]:
            del self._whole[old]
        self._stir()

    def _stir(self) -> None:
        self._arrived.set()
        self._arrived = asyncio.Event()

    # What is served.

    def count(self, what: str, amount: int = 1) -> None:
        self._counts[what] += amount

    async def offers(self, ask: GetOffers) -> Offers:
        raise NoSuchVersion("it passes on what it has, and offers nothing")

    async def open(self, encoding: Encoding, wait_s: float, by: str = "", draft: bool = False) -> Lease:
        if by:
            return _WholeLease(await self._lent(encoding.version, wait_s, draft))
        if encoding not in self._passing and encoding.version in self._whole:
            raise NoSuchVersion(f"it has not fetched {encoding}, but seen it in another instance's memory")
        try:
            async with asyncio.timeout(self._wait_s):
                while encoding not in self._passing:
                    await self._arrived.wait()
        except TimeoutError:
            raise NoSuchVersion(f"it has nothing of {encoding}") from None
        return _RelayLease(self._passing[encoding], encoding, self._wait_s)

    async def _lent(self, version: int, wait_s: float, in_parts: bool) -> _Whole:
        """Waits for as long as something of a version comes; `in_parts`: that it is being written will do. Raises
        NotReady where it still comes after `wait_s`, NotLent where nobody else will see it, and NoSuchVersion where it
        will not come."""
        try:
            async with asyncio.timeout(wait_s):
                return await self._coming(version, in_parts)
        except TimeoutError:
            raise NotReady(f"weight version {version} is not whole here") from None

    async def _coming(self, version: int, in_parts: bool) -> _Whole:
        try:
            # It is expected soon, or never: what comes of other versions says nothing of it.
            async with asyncio.timeout(self._wait_s):
                while version not in self._whole and version not in self._recent:
                    self._check_that_it_may_come(version)
                    await self._arrived.wait()
            while version not in self._whole:
                self._check_that_it_may_come(version)
                if version in self._unseen:
                    raise NotLent(f"weight version {version} lies where nobody else sees it")
                if in_parts and version in self._written:
                    return self._written[version][0]
                async with asyncio.timeout(self._wait_s):
                    await self._arrived.wait()
        except TimeoutError:
            raise NoSuchVersion(f"nothing of weight version {version} has come here for {self._wait_s:g} s") from None
        return self._whole[version]

    def _check_that_it_may_come(self, version: int) -> None:
        """Raises NoSuchVersion for a version whose place another one has taken."""
        if version in self._gone or (version in self._recent and version != next(reversed(self._recent))):
            raise NoSuchVersion(f"it has gone on from weight version {version} to another one")

    def ways(self, said: Sequence[str]) -> tuple[Way, ...]:
        found = (lender.way(one) for lender in self._lenders for one in said)
        return tuple(way for way in found if way is not None)

    async def relay(self, encoding: Encoding, address: str, memory: str = "", without: Sequence[str] = ()) -> str:
        return ""

    def neighbour(self, steps: Sequence[Encoding], address: str, memory: str, without: Sequence[str] = ()) -> str:
        return ""


def _to_the_end(table: dict[int, T], key: int, value: T) -> None:
    table.pop(key, None)
    table[key] = value


class _WholeLease:
    """Where a version lies, for those who see it; they fetch no chunks by it."""

    chunks = 0
    is_draft = False

    def __init__(self, whole: _Whole) -> None:
        self._whole = whole
        self.manifest = whole.manifest
        self.in_parts = whole.in_parts

    def nbytes(self, index: int) -> int:
        return 0

    def place(self, index: int, kind: str) -> tuple[str, int] | None:
        return None

    def whole(self, kind: str) -> str:
        return self._whole.place if kind == self._whole.kind else ""

    async def chunk(self, index: int) -> Bytes:
        raise NotReady("a version that is lent whole is not sent in chunks")

    def close(self) -> None:
        return None


class _RelayLease:
    is_draft = in_parts = False

    def __init__(self, passing: _Passing, encoding: Encoding, wait_s: float) -> None:
        self._passing = passing
        self._encoding = encoding
        self._wait_s = wait_s
        self.manifest = passing.manifest
        self.chunks = passing.chunks

    def nbytes(self, index: int) -> int:
        return len(self._passing.have.get(index, b""))

    def place(self, index: int, kind: str) -> tuple[str, int] | None:
        return None

    def whole(self, kind: str) -> str:
        return ""

    async def chunk(self, index: int) -> Bytes:
        passing = self._passing
        try:
            while index not in passing.have:
                if passing.forgotten:
                    raise NotReady(f"it has gone on from {self._encoding} to other versions")
                # On a slow link a chunk comes late though others come all the time.
                async with asyncio.timeout(self._wait_s):
                    await passing.arrived.wait()
        except TimeoutError:
            raise NotReady(
                f"chunk {index} of {self._encoding} has not reached it, and nothing of it did for {self._wait_s:g} s"
            ) from None
        return passing.have[index]

    def close(self) -> None:
        self._passing = _Passing(b"", 0)
