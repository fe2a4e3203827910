"""Fetching one encoding: its chunks over several connections, each verified, decoded on threads as others arrive."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Protocol

from penstock.errors import WeightError
from penstock.weights.choose import Rates
from penstock.weights.encodings import codec_of, decode_chunk
from penstock.weights.manifest import Made, Manifest, completed, encode_manifest
from penstock.weights.partial import Partial
from penstock.weights.plan import (
    ChunkQueue,
    check_chunk,
    chunk_dtypes,
)
from penstock.weights.protocol import LinkLost
from penstock.weights.relay import Relay
from penstock.weights.sums import TensorSums
from penstock.weights.transport import WeightLink

__all__ = ["Connection", "Fetch"]

Asked = tuple[int, memoryview]
"""A chunk, and where its bytes go."""

CHUNK_RETRIES = 3
"""Times that a chunk with a wrong checksum is fetched again: line noise passes, a broken store doesn't."""
AHEAD_BYTES = 32 << 20
"""Asked for and not here yet, on one connection: so much is on its way on 10 Gb/s with 26 ms. Several chunks, so that
the next one is coming while the last one is verified."""
AHEAD_RAW_BYTES = 64 << 20
"""Of raw chunks, which need no memory of their own: where the two ends are near, each message costs both of them more
processor time than a MiB of what it brings."""
THREAD_BYTES = 1 << 20
"""Larger chunks are verified on a thread, while others come in."""
READY_BYTES = 32 << 20
"""On the wire: where more than this has come and waits to be decoded, no more is read."""
SHARES = 4
"""A small version is asked for in so many parts a connection, so that a fast one can take over from a slow one."""
SILENT_S = 2.0
"""A link that sends nothing for so long, while another has nothing left to ask for, is left, and what it was asked for
is asked of others: longer than TCP takes to send again what was lost three times. The next one in the same fetch is
given twice as long, so that links on which bytes come by fits and starts come to an end too."""


class Connection(Protocol):
    """A link that can be opened again."""

    @property
    def on_relay(self) -> bool: ...

    async def link(self) -> WeightLink: ...

    async def broke(self, error: WeightError) -> None: ...


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A connection that waits for what it has asked for."""

    link: WeightLink
    since: float
    limit: asyncio.Timeout

    @property
    def heard_at(self) -> float:
        return max(self.since, self.link.heard_at)


class Fetch:
    """One encoding on its way into `staging`. A difference is applied to `base`, whose first `ahead` bytes `staging`
    has already, or, without `base`, to what `staging` has. Of a draft those chunks come that `more` has told of.

    Each chunk is decoded once, since that may change its bytes in place.

    With `verify`, tensors are verified as their chunks come: `finish` raises for one that is not as it should be.
    """

    def __init__(
        self,
        manifest: Manifest,
        base: memoryview | None,
        staging: memoryview,
        threads: Executor,
        rates: Rates,
        note: Callable[[str], None],
        verify: bool = True,
        ahead: int = 0,
    ) -> None:
        self._sums = TensorSums(manifest, staging) if verify else None
        self._checking: set[asyncio.Future[None]] = set()
        self._verdicts: dict[int, bool] = {}
        """Of chunks that were verified by the thread that read them, and are not taken yet."""
        self._manifest = manifest
        self._encoding = manifest.encoding
        self._base = base
        self._ahead = ahead
        self._staging = staging
        self._threads = threads
        self._rates = rates
        self._note = note
        self._coder = None if manifest.codec == "raw" else codec_of(manifest.codec)
        self._dtypes = chunk_dtypes(manifest)
        self._nbytes = [chunk.nbytes for chunk in manifest.chunks]
        self._ahead_bytes = AHEAD_BYTES if self._coder is not None else AHEAD_RAW_BYTES
        self._was_draft = manifest.is_draft
        made = next((index for index, nbytes in enumerate(self._nbytes) if not nbytes), len(self._nbytes))
        self._queue = ChunkQueue(len(manifest.chunks), CHUNK_RETRIES, made)
        self._changed = asyncio.Event()
        self._decoding: set[asyncio.Future[float]] = set()
        self._ready: deque[tuple[int, memoryview]] = deque()
        """Verified, and to be decoded."""
        self._ready_bytes = 0
        self._ready_lock = Lock()
        self._writers = 0
        """Threads that decode."""
        self._when_written: Callable[[], None] | None = None
        self._room = asyncio.Event()
        self._share = max(manifest.nbytes // SHARES, 1)
        self._sharers = 0
        """Connections that fetch now."""
        self._waiting: set[_Waiting] = set()
        self._patience_s = SILENT_S
        self._without: set[asyncio.Timeout] = set()
        """Ends what connections do that hold no chunk: there is no use in it once none is left."""
        self._decode_s = 0.0
        self._failed = False
        self._relay: Relay | None = None
        self._kept: Partial | None = None
        self._began = time.perf_counter()
        self._last = self._began
        self.bytes_fetched = 0
        """Of chunks that came whole, each time that they did."""

    @property
    def manifest(self) -> Manifest:
        """With all that is known of its chunks."""
        return self._manifest

    @property
    def made(self) -> int:
        """Chunks that are known, from the first on."""
        return self._queue.made

    def more(self, made: Made) -> None:
        """More chunks of the draft are known; checked, and believed."""
        self._manifest = completed(self._manifest, made)
        self._nbytes[made.first : made.first + len(made.nbytes)] = made.nbytes
        self._share = max(sum(self._nbytes) // SHARES, 1)
        self._queue.more(len(made.nbytes))
        self._changed.set()

    def progress(self) -> str:
        return f"{self._queue.chunks - self._queue.left} of {self._queue.chunks} chunks came"

    def pass_on(self, relay: Relay | None) -> None:
        """What comes is passed on by `relay`, which expects it."""
        self._relay = relay

    async def take_kept(self, kept: Partial | None) -> None:
        """Takes what an earlier pull left on disk, and leaves there what comes."""
        if kept is None:
            return
        for index in kept.indices():
            if not self._queue.is_pending(index):
                continue
            data = await asyncio.to_thread(kept.get, index)
            if data is None:
                continue
            into = self._buffer(index)
            into[:] = data
            self._queue.here_already(index)
            self._take(index, into)
        self._kept = kept

    def lend_in_parts(self) -> None:
        """Neighbours may look at each tensor, by the relay, from when it is verified; the manifest is final. Not at
        those of raw chunks, which are read to where they lie and may have to be read once more."""
        if self._relay is None or self._sums is None or self._coder is None:
            return
        signed = encode_manifest(self._manifest)
        verified = self._relay.lend_in_parts(self._encoding.version, signed, self._staging)
        if verified is not None:
            self._sums.tell(verified)

    def claim(self, pushed: int) -> Sequence[int]:
        """The chunks that come unasked, for the connection that they come by. Raises WeightError."""
        return self._queue.take_first(pushed)

    async def run(self, connection: Connection, pushed: Sequence[int] = ()) -> None:
        """Fetches chunks until none is left; waits while others hold the last ones, which may come back."""
        self._sharers += 1
        try:
            await self._run(connection, pushed)
        finally:
            self._sharers -= 1

    async def _run(self, connection: Connection, pushed: Sequence[int]) -> None:
        asked = deque((index, self._buffer(index)) for index in pushed)
        dying: WeightLink | None = None
        while self._queue.left:
            if self._failed:
                # No more of it can be decoded: the rest would be fetched, and kept in memory, for nothing.
                await asyncio.gather(*self._decoding)
                return
            try:
                link = await self._link(connection)
                if link is None:
                    continue
                if link is not dying:
                    try:
                        await self._ask_ahead(link, asked)
                    except LinkLost:
                        # A sender that died may have sent all that it was asked for before; it is here, and is read.
                        if not asked:
                            raise
                        dying = link
                elif not asked:
                    raise LinkLost("the sender has sent what it was asked for, and takes no more requests")
                if not asked:
                    # While this one connected, the others may have come to the end.
                    if self._queue.left:
                        await self._until_changed()
                    continue
                doubted = connection.on_relay
                came = await self._next_chunks(link, asked, doubted)
            except WeightError as error:
                if not isinstance(error, LinkLost) and not connection.on_relay:
                    raise
                self._put_back(asked)
                async with self._while_any_is_left():
                    await connection.broke(error)
                continue
            here = [asked.popleft() for _ in range(came)]
            wrong = [index for index, into in here if not await self._came(index, into, doubted)]
            if wrong and connection.on_relay:
                # What it still sends would be written over what others fetch.
                await link.stop()
                self._put_back(asked)
                await connection.broke(WeightError(f"chunk {wrong[0]} from a relay came with a wrong checksum"))
            self._changed.set()
            while self._ready_bytes > READY_BYTES and not self._failed:
                self._room.clear()
                if self._ready_bytes > READY_BYTES and not self._failed:
                    await self._room.wait()

    async def _link(self, connection: Connection) -> WeightLink | None:
        """None where no chunk is left any more."""
        async with self._while_any_is_left():
            return await connection.link()
        return None

    @asynccontextmanager
    async def _while_any_is_left(self) -> AsyncIterator[None]:
        limit = asyncio.timeout(None)
        self._without.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._without.discard(limit)

    async def _next_chunks(self, link: WeightLink, asked: Sequence[Asked], doubted: bool) -> int:
        """How many of those that were `asked` for came. Raises LinkLost, also where the link was silent for too long
        for those who wait."""
        indices, intos = [index for index, _ in asked], [into for _, into in asked]
        gladly = 0 if doubted else self._gladly(asked)
        waiting = _Waiting(link, time.monotonic(), asyncio.timeout(None))
        if not doubted and not link.direct:
            # A relay may wait for its own chunks; what a faster way still writes can't be stopped.
            self._waiting.add(waiting)
        try:
            async with waiting.limit:
                return await link.chunks_into(indices, intos, partial(self._at_once, doubted), gladly)
        except TimeoutError:
            if not waiting.limit.expired():
                raise
            # What it still sends would be written over what others fetch.
            await link.stop()
            raise LinkLost("a connection fell silent, and others fetch what it was asked for") from None
        finally:
            self._waiting.discard(waiting)

    async def _until_changed(self) -> None:
        """Until there may be something to do for a connection that has nothing to do. Where another's link is silent
        meanwhile, what that was asked for is put back."""
        self._changed.clear()
        now = time.monotonic()
        heard_at = min((waiting.heard_at for waiting in self._waiting), default=now)
        try:
            async with asyncio.timeout(heard_at + self._patience_s - now):
                await self._changed.wait()
        except TimeoutError:
            since = time.monotonic() - self._patience_s
            silent = {waiting for waiting in self._waiting if waiting.heard_at <= since}
            self._waiting -= silent
            self._patience_s *= 2 if silent else 1
            _end(waiting.limit for waiting in silent)

    async def _came(self, index: int, data: memoryview, doubted: bool) -> bool:
        """Whether the chunk that came is as it should be."""
        self.bytes_fetched += len(data)
        if not await self._verified(index, data, doubted):
            self._note(f"chunk {index} came with a wrong checksum")
            self._queue.bad(index)
            return False
        self._queue.done(index)
        if not self._queue.left:
            _end(self._without)
            self._without.clear()
        self._last = time.perf_counter()
        self._take(index, data)
        if self._kept is not None:
            await asyncio.to_thread(self._kept.put, index, data)
        return True

    async def finish(self) -> bool:
        """Waits for the decoding and for what is verified behind it. False where chunks are to be fetched again.

        Raises WeightError for a chunk that is not of its codec, or for a tensor that does not verify.
        """
        while self._decoding:
            await asyncio.gather(*self._decoding)
        while self._checking:
            checks, self._checking = self._checking, set()
            await asyncio.gather(*checks)
        if self._sums is not None and not (self._by_tensors and await self._found_wrong(self._sums)):
            self._sums.check()
        if self._queue.left:
            return False
        if not self._was_draft:
            # What was waited for says nothing of the link.
            self._rates.fetched(self.bytes_fetched, self._last - self._began)
        if self._coder is not None:
            self._rates.decoded(self._coder.name, self._manifest.raw_nbytes, self._decode_s)
        return True

    def end(self) -> None:
        """Whoever waits no more: nothing of it is decoded beyond the chunks that threads are at. What was lent in parts
        is lent whole from now on or not at all, and let go of once these threads are through."""
        let_go = self._relay.take_back(self._encoding.version) if self._relay is not None else None
        with self._ready_lock:
            self._failed = True
            self._when_written = let_go
            self._let_go_once_written()

    def _let_go_once_written(self) -> None:
        """Under the lock."""
        if self._when_written is not None and not self._writers:
            self._when_written()
            self._when_written = None

    @property
    def _by_tensors(self) -> bool:
        """Whether raw chunks are verified by their tensors alone, and one by one only where a tensor is not as it
        should be: one checksum less. What is handed on, or kept on disk, is verified before; so is what a relay sends,
        which is left at the first wrong chunk (`doubted`)."""
        return self._coder is None and self._sums is not None and self._relay is None and self._kept is None

    async def _found_wrong(self, sums: TensorSums) -> bool:
        """Whether chunks are at fault for tensors that do not verify; those are to come again."""
        wrong = False
        for index in sums.chunks_of(sums.wrong()):
            if await self._as_promised(index, self._buffer(index)):
                continue
            wrong = True
            self._note(f"chunk {index} came with a wrong checksum")
            self._queue.again(index)
            sums.lost(index)
        return wrong

    def _at_once(self, doubted: bool, index: int, data: memoryview, left: int) -> None:
        """On the thread that has just read all but `left` bytes: they are verified while they are in the processor's
        cache."""
        if self._by_tensors and self._sums is not None and not doubted:
            self._sums.came(index, len(data) - left)
            good = True
        elif not left:
            good = check_chunk(self._manifest.chunks[index], data)
            if good and self._coder is None and self._sums is not None:
                self._sums.came(index)
        if not left:
            self._verdicts[index] = good

    async def _verified(self, index: int, data: memoryview, doubted: bool) -> bool:
        good = self._verdicts.pop(index, None)
        if good is not None:
            return good
        return (self._by_tensors and not doubted) or await self._as_promised(index, data)

    async def _as_promised(self, index: int, data: memoryview) -> bool:
        chunk = self._manifest.chunks[index]
        if len(data) < THREAD_BYTES:
            return check_chunk(chunk, data)
        return await asyncio.get_running_loop().run_in_executor(self._threads, check_chunk, chunk, data)

    def _gladly(self, asked: Sequence[Asked]) -> int:
        """Bytes that come before there is anything to be done but to take note of them; 0 where each chunk is waited
        for. Each time that the loop is woken costs processor time and keeps the interpreter's lock from who reads."""
        if not self._by_tensors:
            return 0
        return sum(len(into) for _, into in asked) - (self._enough if self._queue.pending else 0)

    @property
    def _enough(self) -> int:
        """More bytes than so many that are asked for and not here yet are enough for now."""
        return min(self._ahead_bytes, self._share) // 2

    async def _ask_ahead(self, link: WeightLink, asked: deque[Asked]) -> None:
        on_its_way = sum(len(into) for _, into in asked)
        if asked and on_its_way > self._enough:
            return  # One message asks for several.
        most_bytes = min(self._ahead_bytes - on_its_way, self._share)
        batch = self._queue.take_batch(self._nbytes, most_bytes, self._sharers)
        if not batch:
            return
        try:
            await link.ask_chunks(self._encoding, batch)
        except BaseException:
            for index in reversed(batch):
                self._queue.put_back(index)
            self._changed.set()
            raise
        asked.extend((index, self._buffer(index)) for index in batch)

    def _put_back(self, asked: deque[Asked]) -> None:
        while asked:
            index = asked.pop()[0]
            self._queue.put_back(index)
            self._verdicts.pop(index, None)
            if self._sums is not None:
                self._sums.lost(index)
        self._changed.set()

    def _buffer(self, index: int) -> memoryview:
        chunk = self._manifest.chunks[index]
        if self._coder is None:
            return self._staging[chunk.offset : chunk.offset + chunk.raw_nbytes]
        return memoryview(bytearray(chunk.nbytes))

    def _take(self, index: int, data: memoryview) -> None:
        """A verified chunk: into its place, and passed on."""
        if self._relay is not None:
            self._relay.put(self._encoding, index, data.toreadonly())
        if self._coder is not None:
            with self._ready_lock:
                self._ready.append((index, data))
                self._ready_bytes += len(data)
            self._decode_more()
        elif self._sums is not None and not self._sums.has(index):
            checking = asyncio.get_running_loop().run_in_executor(self._threads, self._sums.came, index)
            self._checking.add(checking)
            checking.add_done_callback(_heard)

    def _decode_more(self) -> None:
        """A thread a core, each for as long as there is something: a small chunk takes longer to hand over than to
        decode."""
        loop = asyncio.get_running_loop()
        if self._ready and len(self._decoding) < self._rates.cores and not self._failed:
            decoding = loop.run_in_executor(self._threads, self._decode, loop)
            self._decoding.add(decoding)
            decoding.add_done_callback(self._decoded)

    def _decode(self, loop: asyncio.AbstractEventLoop) -> float:
        """On a thread: what is ready, chunk by chunk. Returns the seconds that it took."""
        with self._ready_lock:
            self._writers += 1
        try:
            return self._decode_ready(loop)
        finally:
            with self._ready_lock:
                self._writers -= 1
                self._let_go_once_written()

    def _decode_ready(self, loop: asyncio.AbstractEventLoop) -> float:
        began = time.perf_counter()
        coder = self._coder
        while coder is not None and (work := self._next_ready(loop)) is not None:
            index, data = work
            chunk = self._manifest.chunks[index]
            base = self._base if chunk.offset + chunk.raw_nbytes > self._ahead else None
            decode_chunk(coder, self._dtypes[index], chunk, data, base, self._staging)
            if self._sums is not None:
                self._sums.came(index)
        return time.perf_counter() - began

    def _next_ready(self, loop: asyncio.AbstractEventLoop) -> tuple[int, memoryview] | None:
        with self._ready_lock:
            if not self._ready or self._failed:
                return None
            index, data = self._ready.popleft()
            was, self._ready_bytes = self._ready_bytes, self._ready_bytes - len(data)
        if self._ready_bytes <= READY_BYTES < was:
            loop.call_soon_threadsafe(self._room.set)
        return index, data

    def _decoded(self, decoding: asyncio.Future[float]) -> None:
        if decoding.cancelled():
            return
        if decoding.exception() is None:
            self._decoding.discard(decoding)
            self._decode_s += decoding.result()
            self._decode_more()
        else:
            # Left where connections and `finish` find it.
            self._failed = True
            self._room.set()
            self._changed.set()


def _end(limits: Iterable[asyncio.Timeout]) -> None:
    for limit in limits:
        limit.reschedule(asyncio.get_running_loop().time())


def _heard(checking: asyncio.Future[None]) -> None:
    """A pull that is cut does not come back for it."""
    if not checking.cancelled():
        checking.exception()
