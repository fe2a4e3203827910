"""Fetches one weight version and verifies it; swapping it in is the engine's business.

Decides how many connections fetch, when one is opened again, when a relay is left for the trainer's store, and when
the pull is hopeless. Which way the version comes is in `choose`, what is fetched next in `fetch`, what counts as
verified in `plan`, how chunks are decoded in `encodings`; how bytes move is behind `WeightTransport`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.errors import MissingExtra, WeightError
from penstock.weights.choose import QUANTIZED, Rates, choose
from penstock.weights.fetch import Fetch
from penstock.weights.manifest import Encoding, Manifest, StagedWeights, decode_manifest, is_authentic
from penstock.weights.memory import host_buffer
from penstock.weights.partial import Partial
from penstock.weights.plan import check_manifest, check_tensors, split_tensors
from penstock.weights.protocol import Held, LinkLost, OtherProtocol, TokenRefused
from penstock.weights.relay import Relay
from penstock.weights.tcp import CONNECT_S, TcpTransport, WeightLink, WeightTransport

BACKOFF_S = (0.05, 1.0)
"""First and longest pause before a broken connection is opened again."""
RELAY_CONNECT_S = 2.0
"""An instance that does not answer by then is left for the trainer's store."""
WAIT_S = 5.0
"""That a store is asked to wait for what is on its way; then it is asked again."""
DEFAULT_MAX_BYTES = 1 << 40

T = TypeVar("T")

log = logging.getLogger(__name__)


class NoMemory(WeightError):
    """There is no memory to stage a version in."""


async def pull(
    source: str,
    version: int,
    token: str,
    *,
    connections: int = 2,
    deadline_s: float = 120.0,
    max_bytes: int = DEFAULT_MAX_BYTES,
    transport: WeightTransport | None = None,
    codec: str = "auto",
    base: StagedWeights | None = None,
    rates: Rates | None = None,
    relay: Relay | None = None,
    partial: Path | None = None,
) -> StagedWeights:
    """Fetches `version` from the store at `source` ("host:port") into host memory, verified to the last tensor.

    Broken connections are opened again, and what is whole stays, until `deadline_s`. `base` is a verified version in
    memory that a difference may be applied to; it is read and never changed. `rates` are what earlier pulls measured,
    and learn from this one. What comes is passed on by `relay`, and kept in the folder `partial` until it is whole.
    Raises WeightError, which names the cause: TokenRefused, OtherProtocol and NoSuchVersion at once, anything that may
    pass at the deadline.
    """
    puller = _Pull(source, version, token, transport or TcpTransport(token), max_bytes)
    puller.connections, puller.relay, puller.partial = connections, relay, partial
    puller.rates = rates or puller.rates
    try:
        async with asyncio.timeout(deadline_s):
            return await puller.run(codec, base)
    except TimeoutError:
        raise WeightError(
            f"weight version {version} did not come from {source} within {deadline_s:g} s ({puller.progress()})"
        ) from None
    except ExceptionGroup as group:
        raise _first_cause(group) from group


class _Pull:
    """One pull's state, shared by its connections."""

    def __init__(self, source: str, version: int, token: str, transport: WeightTransport, max_bytes: int) -> None:
        self._source = source
        self._version = version
        self._token = token
        self._transport = transport
        self._max_bytes = max_bytes
        self._fetch: Fetch | None = None
        self._fetched = 0
        self._trouble = ""
        self._troubles = 0
        self.connections = 1
        self.rates = Rates()
        self.relay: Relay | None = None
        self.partial: Path | None = None

    def progress(self) -> str:
        done = "no manifest yet" if self._fetch is None else self._fetch.progress()
        return f"{done}; last trouble: {self._trouble}" if self._trouble else done

    async def run(self, codec: str, base: StagedWeights | None) -> StagedWeights:
        threads = ThreadPoolExecutor(max(1, self.rates.cores), "weight-decode")
        try:
            async with Reconnecting(self._source, self._transport, self._note) as first:
                steps = await self._way(first, codec, base)
                try:
                    return await self._come(first, steps, base, threads)
                except (LinkLost, TokenRefused, OtherProtocol):
                    raise
                except (WeightError, ExceptionGroup) as error:
                    if steps[0].base is None:
                        raise
                    # The base may be at fault, or be gone from the store: a full version needs none.
                    cause = _first_cause(error) if isinstance(error, ExceptionGroup) else error
                    self._note(f"{steps[-1]}: {cause}; fetched in full instead")
                # Answers to what was asked for may still be on their way on this link.
                first.drop()
                full = await self._way(first, "lossless" if codec == "delta" else codec, None)
                return await self._come(first, full, None, threads)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    async def _way(self, first: Reconnecting, codec: str, base: StagedWeights | None) -> tuple[Encoding, ...]:
        """The encodings to fetch, one after the other."""
        if codec == "raw":
            return (Encoding(self._version),)
        held = [Held(base.version, base.manifest.digest)] if base is not None and base.stream.nbytes else []
        began = time.monotonic()
        scheme = codec if codec in QUANTIZED else ""
        offered = await first.call(lambda link: link.offers(self._version, held, WAIT_S, scheme))
        self.rates.round_trip_s = min(time.monotonic() - began, 0.1)
        return choose(offered.offers, offered.raw_nbytes, self.rates, codec).steps

    async def _come(
        self, first: Reconnecting, steps: Sequence[Encoding], base: StagedWeights | None, threads: ThreadPoolExecutor
    ) -> StagedWeights:
        staging: memoryview | None = None
        came = base if steps[0].base is not None else None
        before = came.stream if came is not None else None
        manifest, digest = None, came.manifest.digest if came is not None else ""
        for step in steps:
            signed, other = await first.call(self._asking_for(step))
            manifest = self._believed(decode_manifest(signed), step, digest)
            digest = manifest.digest
            if staging is None:
                staging = self._memory(manifest)
            if len(before or staging) != len(staging) or len(staging) != manifest.raw_nbytes:
                raise WeightError(f"{step} is {manifest.raw_nbytes} bytes and its base {len(before or staging)}")
            await self._one_step(first, manifest, signed, other, before, staging, threads)
            before = staging
        if manifest is None or staging is None:
            raise WeightError(f"weight version {self._version} has no way to come")
        tensors = split_tensors(manifest, staging)
        await _verified(manifest, tensors, threads, self.rates.cores)
        return StagedWeights(
            manifest=manifest,
            tensors=tensors,
            stream=staging.toreadonly(),
            steps=tuple(steps),
            bytes_fetched=self._fetched,
        )

    def _asking_for(self, step: Encoding) -> Callable[[WeightLink], Awaitable[tuple[bytes, str]]]:
        port = self.relay.port if self.relay is not None else 0
        return lambda link: link.manifest(step, WAIT_S, port)

    async def _one_step(
        self,
        first: Reconnecting,
        manifest: Manifest,
        signed: bytes,
        other: str,
        before: memoryview | None,
        staging: memoryview,
        threads: ThreadPoolExecutor,
    ) -> None:
        kept = Partial(self.partial, manifest, signed) if self.partial is not None else None
        fetch = self._fetch = Fetch(manifest, before, staging, threads, self.rates, self._note)
        fetch.pass_on(self.relay, signed)
        try:
            await fetch.take_kept(kept)
            async with asyncio.TaskGroup() as group:
                # With another instance to fetch from, the trainer's link is left to others.
                group.create_task(self._through(first, fetch, other))
                for _ in range(min(self.connections, len(manifest.chunks)) - 1):
                    group.create_task(self._through(None, fetch, other))
            await fetch.finish()
        finally:
            self._fetched += fetch.bytes_fetched
            if kept is not None:
                kept.close()
        if kept is not None:
            kept.delete()

    async def _through(self, first: Reconnecting | None, fetch: Fetch, other: str) -> None:
        if first is not None and not other:
            await fetch.run(first)
            return
        async with Reconnecting(self._source, self._transport, self._note, other) as connection:
            await fetch.run(connection)

    def _believed(self, manifest: Manifest, step: Encoding, base_digest: str) -> Manifest:
        """Raises WeightError where the manifest is not the trainer's, not in order, or not what was asked for."""
        if self._token and not is_authentic(manifest, self._token):
            raise WeightError(f"the manifest of {step} is not signed with this run's token")
        check_manifest(manifest, step.version, self._max_bytes)
        if manifest.encoding != step:
            raise WeightError(f"asked for {step} and got the manifest of {manifest.encoding}")
        if manifest.base_digest != base_digest and step.base is not None:
            raise WeightError(f"{step} is a difference to other weights than this agent holds")
        return manifest

    def _memory(self, manifest: Manifest) -> memoryview:
        try:
            return host_buffer(manifest.raw_nbytes)
        except (OSError, MemoryError) as error:
            raise NoMemory(
                f"no {manifest.raw_nbytes} bytes of memory to stage weight version {manifest.version}: {error}"
            ) from error

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


class Reconnecting:
    """A link that is opened when needed and again after it broke, ever more slowly, until the pull's deadline.

    With `relay`, that instance is asked first; any trouble with it, and the link is to `source` from then on.
    """

    def __init__(self, source: str, transport: WeightTransport, note: Callable[[str], None], relay: str = "") -> None:
        self._source = source
        self._relay = relay
        self._transport = transport
        self._note = note
        self._link: WeightLink | None = None
        self._pause_s = BACKOFF_S[0]

    async def __aenter__(self) -> Reconnecting:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.drop()

    @property
    def on_relay(self) -> bool:
        return bool(self._relay)

    async def link(self) -> WeightLink:
        if self._link is None:
            connect_s = RELAY_CONNECT_S if self._relay else CONNECT_S
            self._link = await self._transport.connect(self._relay or self._source, connect_s)
            self._pause_s = BACKOFF_S[0]
        return self._link

    async def broke(self, error: WeightError) -> None:
        """Drops the link and pauses (with jitter, so that a fleet does not come back as one)."""
        self._note(str(error))
        self.drop()
        if self._relay:
            self._relay = ""
            return
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(self._pause_s * 2, BACKOFF_S[1])

    async def call(self, request: Callable[[WeightLink], Awaitable[T]]) -> T:
        while True:
            try:
                return await request(await self.link())
            except LinkLost as error:
                await self.broke(error)

    def drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


async def _verified(
    manifest: Manifest, tensors: dict[str, memoryview], threads: ThreadPoolExecutor, parts: int
) -> None:
    """`check_tensors` on threads. Raises WeightError."""
    loop = asyncio.get_running_loop()
    await asyncio.gather(
        *(loop.run_in_executor(threads, check_tensors, manifest, tensors, part, parts) for part in range(parts))
    )


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
    return next((leaf for leaf in leaves if isinstance(leaf, (WeightError, MissingExtra))), leaves[0])
