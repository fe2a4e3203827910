"""An encoding while it is made: its draft, and its chunks one after the other, for those who fetch them meanwhile.

Between the thread that encodes and the event loop that serves. Every chunk that is served is one that the encoder has
handed over with its checksum; what is said of it is signed for this draft. Ends whole, with the final manifest's
signature, or given up; never anything in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from typing import TypeVar

from penstock.weights.choose import DRAFT_PARTS
from penstock.weights.manifest import ChunkEntry, Made, Manifest, encode_manifest, sign_made, sign_manifest
from penstock.weights.protocol import GivenUp, NotReady

__all__ = ["Growing", "awaitable", "within"]

T = TypeVar("T")

MAX_MADE = 512
"""Chunks told of at once: a message has a limit."""


class Growing:
    """`add` each chunk in order, then `finish` or `give_up`, from one thread; the rest is for event loops."""

    def __init__(self, draft: Manifest, token: str) -> None:
        self.draft = sign_manifest(draft, token)
        self.signed_draft = encode_manifest(self.draft)
        self.chunks = len(draft.chunks)
        self._token = token
        self._lock = threading.Lock()
        self._entries: list[ChunkEntry] = []
        self._data: list[bytes] = []
        self._final = b""
        self._trouble = ""
        self._waiting: list[asyncio.Future[None]] = []

    def add(self, entry: ChunkEntry, data: bytes) -> None:
        with self._lock:
            self._entries.append(entry)
            self._data.append(data)
        self._wake()

    def finish(self, mac: bytes) -> None:
        """All are added; `mac` is the final manifest's."""
        with self._lock:
            self._final = mac
        self._wake()

    def give_up(self, cause: BaseException) -> None:
        with self._lock:
            self._trouble = f"{self.draft.encoding} is given up: {str(cause) or type(cause).__name__}"
        self._wake()

    def nbytes(self, index: int) -> int:
        """Of a chunk; 0 where it is not made yet."""
        with self._lock:
            return len(self._data[index]) if index < len(self._data) else 0

    async def chunk(self, index: int, wait_s: float) -> bytes:
        """Raises NotReady where it is not made in time, GivenUp where it never will be."""
        await self._until(index + 1, False, wait_s)
        return self._data[index]

    async def made(self, first: int, wait_s: float) -> Made:
        """What has been made from `first` on, as soon as that is a part worth telling. Raises as `chunk`."""
        part = -(-self.chunks // DRAFT_PARTS)
        await self._until(min(first + part, self.chunks), True, wait_s)
        with self._lock:
            # The last one comes with the final signature.
            there = self.chunks if self._final else self.chunks - 1
            entries = self._entries[first : min(first + MAX_MADE, there)]
            final = self._final if first + len(entries) == self.chunks else b""
        made = Made(
            first=first,
            nbytes=tuple(entry.nbytes for entry in entries),
            xxh3=tuple(entry.xxh3 for entry in entries),
            final=final,
        )
        return sign_made(self.draft, made, self._token)

    async def _until(self, count: int, signed: bool, wait_s: float) -> None:
        """Until so many chunks are made; with `signed`, all of them only with the final signature."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    with self._lock:
                        if self._trouble:
                            raise GivenUp(self._trouble)
                        there = len(self._data) >= count
                        if there and (self._final or not signed or count < self.chunks):
                            return
                        waiter = asyncio.get_running_loop().create_future()
                        self._waiting.append(waiter)
                    await waiter
        except TimeoutError:
            raise NotReady(
                f"{self.draft.encoding} is being encoded, chunk {count - 1} not after {wait_s:g} s"
            ) from None

    def _wake(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            # A store that is closed while it encodes has no loop any more, and nobody waits.
            with contextlib.suppress(RuntimeError):
                waiter.get_loop().call_soon_threadsafe(_there, waiter)


def _there(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def awaitable(future: Future[T]) -> asyncio.Future[T]:
    """Whoever waits no more is not told how it ends, and nobody else is for that reason."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return waiting


async def within(future: Future[T], wait_s: float, what: str) -> T:
    """The future's result. Raises NotReady where it takes longer, WeightError where the work behind it failed."""
    if future.done() and not future.cancelled() and future.exception() is None:
        return future.result()
    try:
        async with asyncio.timeout(wait_s):
            return await asyncio.shield(awaitable(future))
    except TimeoutError:
        raise NotReady(f"{what}, and not ready after {wait_s:g} s") from None
