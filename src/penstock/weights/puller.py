"""Fetches one weight version from a store and verifies it; swapping it in is the engine's business.

Decides how many connections fetch, when one is opened again and when the pull is hopeless. What is fetched next and
what counts as verified is in `plan`; how bytes move is behind `WeightTransport`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.errors import WeightError
from penstock.weights.manifest import Manifest, StagedWeights, decode_manifest
from penstock.weights.memory import host_buffer
from penstock.weights.plan import ChunkQueue, check_chunk, check_manifest, check_tensors, split_tensors
from penstock.weights.protocol import LinkLost
from penstock.weights.tcp import TcpTransport, WeightLink, WeightTransport

CHUNK_RETRIES = 3
"""Times that a chunk with a wrong checksum is fetched again: line noise passes, a broken store doesn't."""
BACKOFF_S = (0.05, 1.0)
"""First and longest pause before a broken connection is opened again."""
DEFAULT_MAX_BYTES = 1 << 40

T = TypeVar("T")

log = logging.getLogger(__name__)


async def pull(
    source: str,
    version: int,
    token: str,
    *,
    connections: int = 2,
    deadline_s: float = 120.0,
    max_bytes: int = DEFAULT_MAX_BYTES,
    transport: WeightTransport | None = None,
) -> StagedWeights:
    """Fetches `version` from the store at `source` ("host:port") into host memory, verified to the last tensor.

    Broken connections are opened again, and what is whole stays, until `deadline_s`. Raises WeightError, which names
    the cause: TokenRefused, OtherProtocol and NoSuchVersion at once, anything that may pass at the deadline.
    """
    puller = _Pull(source, version, transport or TcpTransport(token))
    try:
        async with asyncio.timeout(deadline_s):
            return await puller.run(connections, max_bytes)
    except TimeoutError:
        raise WeightError(
            f"weight version {version} did not come from {source} within {deadline_s:g} s ({puller.progress()})"
        ) from None
    except ExceptionGroup as group:
        raise _first_cause(group) from group


class _Pull:
    """One pull's state, shared by its connections."""

    def __init__(self, source: str, version: int, transport: WeightTransport) -> None:
        self._source = source
        self._version = version
        self._transport = transport
        self._queue: ChunkQueue | None = None
        self._trouble = ""
        self._troubles = 0
        self._changed = asyncio.Event()

    def progress(self) -> str:
        queue = self._queue
        done = "no manifest yet" if queue is None else f"{queue.chunks - queue.left} of {queue.chunks} chunks came"
        return f"{done}; last trouble: {self._trouble}" if self._trouble else done

    async def run(self, connections: int, max_bytes: int) -> StagedWeights:
        async with _Reconnecting(self._source, self._transport, self._note) as first:
            manifest = decode_manifest(await first.call(lambda link: link.manifest(self._version)))
            check_manifest(manifest, self._version, max_bytes)
            stream = host_buffer(manifest.raw_nbytes)
            queue = self._queue = ChunkQueue(len(manifest.chunks), CHUNK_RETRIES)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fetch(first, queue, manifest, stream))
                for _ in range(min(connections, len(manifest.chunks)) - 1):
                    group.create_task(self._fetch_on_its_own(queue, manifest, stream))
        tensors = split_tensors(manifest, stream)
        await asyncio.to_thread(check_tensors, manifest, tensors)
        return StagedWeights(manifest=manifest, tensors=tensors)

    def _note(self, trouble: str) -> None:
        """Remembers it for the error, and says it on the machine's own screen: the 1st, 2nd, 4th, 8th ... time."""
        self._trouble = trouble
        self._troubles += 1
        if self._troubles & (self._troubles - 1) == 0:
            log.warning(
                "weight version %d from %s: %s; trying again (%d so far)",
                self._version,
                self._source,
                trouble,
                self._troubles,
            )

    async def _fetch_on_its_own(self, queue: ChunkQueue, manifest: Manifest, stream: memoryview) -> None:
        async with _Reconnecting(self._source, self._transport, self._note) as connection:
            await self._fetch(connection, queue, manifest, stream)

    async def _fetch(
        self, connection: _Reconnecting, queue: ChunkQueue, manifest: Manifest, stream: memoryview
    ) -> None:
        """Fetches chunks until none is left; waits while others hold the last ones, which may come back."""
        while queue.left:
            index = queue.take()
            if index is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            chunk = manifest.chunks[index]
            into = stream[chunk.offset : chunk.offset + chunk.raw_nbytes]
            try:
                link = await connection.link()
                await link.chunk_into(self._version, index, into)
            except LinkLost as error:
                queue.put_back(index)
                self._changed.set()
                await connection.broke(error)
                continue
            if check_chunk(chunk, into):
                queue.done(index)
            else:
                self._note(f"chunk {index} came with a wrong checksum")
                queue.bad(index)
            self._changed.set()


class _Reconnecting:
    """A link that is opened when needed and again after it broke, ever more slowly, until the pull's deadline."""

    def __init__(self, source: str, transport: WeightTransport, note: Callable[[str], None]) -> None:
        self._source = source
        self._transport = transport
        self._note = note
        self._link: WeightLink | None = None
        self._pause_s = BACKOFF_S[0]

    async def __aenter__(self) -> _Reconnecting:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._drop()

    async def link(self) -> WeightLink:
        if self._link is None:
            self._link = await self._transport.connect(self._source)
            self._pause_s = BACKOFF_S[0]
        return self._link

    async def broke(self, error: LinkLost) -> None:
        """Drops the link and pauses (with jitter, so that a fleet does not come back as one)."""
        self._note(str(error))
        self._drop()
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(self._pause_s * 2, BACKOFF_S[1])

    async def call(self, request: Callable[[WeightLink], Awaitable[T]]) -> T:
        while True:
            try:
                return await request(await self.link())
            except LinkLost as error:
                await self.broke(error)

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show for a pull whose connections failed: a PenstockError where there is one."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, WeightError)), leaves[0])
