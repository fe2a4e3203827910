"""How weights reach a puller: the seams between what is said and how bytes move. No sockets and no policy here.

One connection to the source (TCP, or TLS) carries requests, manifests and, where both ends have nothing faster, the
chunks. A faster way moves the bytes alone: the store lends the memory that a version lies in (`Lender`), and the puller
(`Fetcher`) either maps that memory as the Plan names it (`Mapper`), or fetches each chunk from where a ChunkReply says
that it is (`Reader`). The kinds in use are those that both ends have, the puller's first choice before others; each
falls back to the connection, with the cause kept for people to read. Bytes are believed by their checksums, whichever
way they came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.errors import WeightError
from penstock.weights.manifest import Encoding, Made
from penstock.weights.protocol import GetPlan, Way

__all__ = [
    "CONNECT_S",
    "Fetcher",
    "Lender",
    "Mapper",
    "PartLender",
    "Planned",
    "Reader",
    "Seen",
    "WayClosed",
    "WeightLink",
    "WeightTransport",
]

CONNECT_S = 10.0


class WayClosed(WeightError):
    """A way can't be gone from here, or no longer; chunks come by the connection instead."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A store's answer to `GetPlan`; the manifest is not believed yet."""

    steps: tuple[Encoding, ...]
    manifest: bytes
    """Of the first step."""
    relay: str = ""
    """host:port of an instance that has, or is getting, the same encoding; empty for none."""
    only_seen: bool = False
    """It is getting the version by another encoding: to be mapped there, or had elsewhere."""
    pushed: int = 0
    """Chunks of the first step, from the first on, that are to be read from this link as if asked for."""
    place: str = ""
    """Where the first step's bytes lie whole, for `WeightLink.mapped`; empty where they have to be fetched."""
    in_parts: bool = False
    """They are being written there."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Memory of another process, read-only. What is held is not written to while a view of any of it is left."""

    stream: memoryview
    hold: Callable[[int, int], bool]
    """Holds so many bytes from an offset on; False where they may still be written to. From any thread."""
    touch: Callable[[int, int], None]
    """Maps the pages of so many bytes from an offset on at once, where that was not done before; from any thread."""


Heard = Callable[[int, memoryview, int], None]
"""Hears, on the thread that reads, of a chunk, where its bytes go, and how many of them are still to come."""


class WeightLink(Protocol):
    """One connection to whatever holds weight versions. Raises LinkLost where another try may succeed."""

    @property
    def way(self) -> str:
        """How chunks come: tcp, tls, or the kind of a faster way; with the cause where one was wanted and is not
        had."""
        ...

    @property
    def direct(self) -> bool:
        """Whether chunks bypass the network, so that no other instance could bring them sooner."""
        ...

    @property
    def sees(self) -> str:
        """The kind of way by which this end can map memory of the other; empty for none."""
        ...

    @property
    def kept(self) -> bool:
        """Whether it was open since before this pull: that it is dead then says nothing of the source."""
        ...

    @property
    def round_trip_s(self) -> float: ...

    @property
    def heard_at(self) -> float:
        """When the last bytes came on the connection, by `time.monotonic`."""
        ...

    async def plan(self, ask: GetPlan) -> Planned:
        """The way to the version that is asked for; waits for one that is being published."""
        ...

    async def mapped(self, place: str, nbytes: int, in_parts: bool = False) -> Seen:
        """The bytes at a plan's `place`, not verified yet. All of them are held, or, `in_parts`, none yet."""
        ...

    async def manifest(self, encoding: Encoding, wait_s: float, relay_port: int, lends: str = "") -> tuple[bytes, str]:
        """The encoding's manifest, not believed yet, and the address of an instance that has it too, or empty."""
        ...

    async def made(self, encoding: Encoding, first: int, wait_s: float) -> Made:
        """What has been made of a draft from chunk `first` on, not believed yet; waits until there is more."""
        ...

    async def ask_chunks(self, encoding: Encoding, indices: Sequence[int]) -> None:
        """Asks for chunks; each then has to be read, in that order, with `chunks_into`."""
        ...

    async def chunks_into(
        self, indices: Sequence[int], intos: Sequence[memoryview], heard: Heard | None = None, gladly: int = 0
    ) -> int:
        """Fills the first of `intos` with the next chunks asked for, which are `indices`; returns how many came, at
        least one. They are not verified yet. The rest may be written to until all came or the link is stopped. Where
        a thread reads, it tells `heard` what came before that counts as come, and goes on until it is `gladly` bytes
        or no more come for a moment."""
        ...

    async def stop(self) -> None:
        """Closes the link, which is at fault, and returns once nothing more is written anywhere."""
        ...

    def close(self) -> None: ...


class WeightTransport(Protocol):
    """How a puller reaches sources."""

    async def connect(self, source: str, connect_s: float = CONNECT_S, relay: bool = False) -> WeightLink:
        """A link to `source`, one that was kept where there is one. `relay`: it is another instance."""
        ...

    def keep(self, source: str, link: WeightLink) -> None:
        """Takes back a link on which nothing is left to be read."""
        ...


@runtime_checkable
class Mapper(Protocol):
    """The puller's end of a way to memory that it can see."""

    def map(self, place: str, nbytes: int, in_parts: bool = False) -> Seen:
        """Raises WayClosed, or LinkLost where the store has given the place to another version meanwhile."""
        ...

    def close(self) -> None:
        """Lets go of what is kept for later versions; what somebody looks at lasts as long as that."""
        ...


class Reader(Protocol):
    """The puller's end of a way that is open."""

    async def read_into(self, place: str, offset: int, into: memoryview) -> None:
        """Fills `into`. Raises WayClosed."""
        ...

    def close(self) -> None: ...


class Fetcher(Protocol):
    """A way that a puller has."""

    @property
    def kind(self) -> str: ...

    def says(self) -> str:
        """For the Hello: the kind, and what a store needs to know of this end. Raises WayClosed."""
        ...

    def open(self, way: Way) -> Reader | Mapper:
        """Raises WayClosed where `way` does not lead to the store's memory."""
        ...


class Lender(Protocol):
    """A way that a store has: memory from which pullers fetch by themselves. Its calls come from any thread."""

    @property
    def kind(self) -> str: ...

    def way(self, said: str) -> Way | None:
        """For a puller whose Hello says so; None where it can't be gone."""
        ...

    @property
    def makes_memory(self) -> bool:
        """Whether it lends memory of its own making alone, by `buffer`; otherwise any will do."""
        ...

    def buffer(self, nbytes: int) -> memoryview | None:
        """Memory to lend, zero bytes; None where there is none, or where any memory will do."""
        ...

    def lend(self, stream: memoryview) -> None:
        """A version's bytes are about to be served from here; nobody writes to them until `claim` says yes."""
        ...

    def claim(self, stream: memoryview) -> bool:
        """Takes memory back, to be written to; False where a puller still looks at it, which may be for long."""
        ...

    def place(self, stream: memoryview) -> str:
        """Where `stream` is found; empty where it is not lent."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class PartLender(Lender, Protocol):
    """A way by which bytes can be looked at while others beside them are written."""

    @property
    def memory(self) -> str:
        """What those say alike who lend the same."""
        ...

    def lend_part(self, stream: memoryview, start: int, nbytes: int) -> None:
        """These may be served from here, and nobody writes to them until `claim` says yes."""
        ...
