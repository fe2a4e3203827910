"""Fetches one weight version and verifies it; swapping it in is the engine's business.

Decides how many connections fetch, when one is opened again, when a relay is left for the trainer's store, and when
the pull is hopeless. Which way the version comes is in `choose`, what is fetched next in `fetch`, what counts as
verified in `plan`, how chunks are decoded in `encodings`; how bytes move is behind `WeightTransport`. Which way a
version comes is the store's to say, by what this side has measured: one answer has the plan, the manifest and the first
chunks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from penstock.errors import MissingExtra, WeightError
from penstock.weights.addresses import parse_addresses
from penstock.weights.choose import CODEC_CHOICES, QUANTIZED, Rates
from penstock.weights.fetch import Fetch
from penstock.weights.manifest import (
    Encoding,
    Made,
    Manifest,
    StagedWeights,
    decode_manifest,
    is_authentic,
    is_made,
)
from penstock.weights.mapped import verify_in_place
from penstock.weights.memory import NoMemory, host_buffer
from penstock.weights.neighbours import Neighbours
from penstock.weights.partial import Partial, holds_something
from penstock.weights.plan import check_made, check_manifest, split_tensors
from penstock.weights.protocol import (
    GetOffers,
    GetPlan,
    GivenUp,
    Held,
    Layout,
    LinkLost,
    NoSuchCodec,
    OtherProtocol,
    TokenRefused,
)
from penstock.weights.reconnecting import Reconnecting
from penstock.weights.relay import Relay
from penstock.weights.tcp import TcpTransport
from penstock.weights.transport import Planned, WeightLink, WeightTransport

WAIT_S = 5.0
"""That a store is asked to wait for what is on its way; then it is asked again."""
OTHER_RELAYS = 1
"""Instances that are tried after one that had nothing; then the version comes from the store. Where a whole fleet is
gone, each of them would cost seconds."""
PUSH_BYTES = 4 << 20
"""That a store may send behind its plan; more is asked for while they come."""
DEFAULT_MAX_BYTES = 1 << 40

Memory = Callable[[int, memoryview | None], tuple[memoryview, int]]
"""Gives a writable buffer of so many bytes, and says how many of its first bytes are those of the base, where a
difference to it is to be staged there."""

log = logging.getLogger(__name__)


class NotInTime(WeightError):
    """A version did not come whole before the pull's deadline; says how much came, and the last trouble."""


def fresh(nbytes: int, base: memoryview | None = None) -> tuple[memoryview, int]:
    """Memory that has nothing of the base."""
    return host_buffer(nbytes), 0


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
    memory: Memory = fresh,
    layout: Layout | None = None,
) -> StagedWeights:
    """Fetches `version` from the store at `source` ("host:port") into host memory, verified to the last tensor.

    It goes over so many `connections`, or one to each of the source's addresses where those are more. Broken ones are
    opened again, and what is whole stays, until `deadline_s`. `base` is a verified version in memory that a difference
    may be applied to; it is read and never changed. `rates` are what earlier pulls measured, and learn from this one.
    What comes is passed on by `relay`, and kept in the folder `partial` until it is whole. `memory` gives the buffer
    that the version is staged in, where the base may lie already; `layout` is told to the store. Links are kept by
    `transport` for the next pull; one that is made here is closed at the end.
    Raises WeightError, which names the cause: TokenRefused, OtherProtocol, NoSuchVersion, NoSuchCodec and NoMemory at
    once, NotInTime for anything that might have passed; ValueError for less than one connection.
    """
    if codec not in CODEC_CHOICES:
        raise NoSuchCodec(f"there is no codec {codec!r} (there are {', '.join(CODEC_CHOICES)})")
    if connections < 1:
        raise ValueError(f"connections={connections} must be at least 1")
    own = TcpTransport(token) if transport is None else None
    puller = _Pull(source, version, token, transport or own or TcpTransport(token), max_bytes)
    puller.connections, puller.relay, puller.partial = connections, relay, partial
    puller.rates, puller.memory, puller.layout = rates or Rates(), memory, layout or Layout()
    try:
        async with asyncio.timeout(deadline_s):
            return await puller.run(codec, base)
    except TimeoutError:
        raise NotInTime(
            f"weight version {version} did not come from {source} within {deadline_s:g} s ({puller.progress()})"
        ) from None
    except (MemoryError, ExceptionGroup) as error:
        cause = _first_cause(error) if isinstance(error, ExceptionGroup) else error
        if isinstance(cause, MemoryError):
            raise NoMemory(f"memory ran out while weight version {version} came ({puller.progress()})") from error
        raise cause from error
    finally:
        puller.forget()
        if own is not None:
            own.close()


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
        self.memory: Memory = fresh
        self._in_place = False
        self.layout = Layout()
        self._came_by = ""
        self._without: list[str] = []
        """Instances that had nothing to pass on."""

    def progress(self) -> str:
        done = "no manifest yet" if self._fetch is None else self._fetch.progress()
        return f"{done}; last trouble: {self._trouble}" if self._trouble else done

    def forget(self) -> None:
        """Lets go of the buffers: what is fetched and this refer to each other, and would hold them for a while."""
        self._fetch = None

    async def run(self, codec: str, base: StagedWeights | None) -> StagedWeights:
        threads = ThreadPoolExecutor(max(1, self.rates.cores), "weight-decode")
        try:
            async with Reconnecting(self._source, self._transport, self._note) as first:
                while True:
                    planned = await self._plan(first, codec, base)
                    if planned.place:
                        try:
                            return await self._seen(first, planned, threads)
                        except LinkLost as error:
                            await first.broke(error)
                    elif planned.relay:
                        try:
                            shared = await self._neighbours().seen(planned, threads)
                        except WeightError as error:
                            self._note(f"not to be seen at {planned.relay}: {error}")
                            # It has nothing to pass on either; another one may.
                            self._without.append(planned.relay)
                        else:
                            if shared is not None:
                                return shared
                            if not planned.only_seen:
                                break
                            self._without.append(planned.relay)
                    else:
                        break
                while True:
                    try:
                        return await self._come(first, planned, base, threads)
                    except (LinkLost, TokenRefused, OtherProtocol):
                        raise
                    except (WeightError, ExceptionGroup) as error:
                        codec, base = self._otherwise(planned, codec, base, error)
                        if not codec:
                            raise
                    # Answers to what was asked for may still be on their way on this link.
                    first.drop()
                    planned = await self._plan(first, codec, base, looks=False)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _otherwise(
        self, planned: Planned, codec: str, base: StagedWeights | None, error: WeightError | ExceptionGroup
    ) -> tuple[str, StagedWeights | None]:
        """The codec and the base with which a version is fetched again after `error`; no codec where that is no use."""
        cause = _first_cause(error) if isinstance(error, ExceptionGroup) else error
        if self._in_place and not isinstance(cause, GivenUp):
            instead = "applied to a copy of the base instead"
        else:
            codec, base = _in_full(planned.steps[0], codec, cause), None
            instead = f"fetched in full instead, {codec}"
        if codec:
            self.forget()
            self._note(f"{planned.steps[-1]}: {cause}; {instead}")
        return codec, base

    async def _plan(self, first: Reconnecting, codec: str, base: StagedWeights | None, looks: bool = True) -> Planned:
        """How the version comes, with the first manifest and, on a link of its own, the first chunks behind it. Without
        `looks`, from nobody whose memory would have to be seen for it: others may wait for this one already."""
        held = (Held(base.version, base.manifest.digest),) if base is not None and base.stream.nbytes else ()
        scheme = codec if codec in QUANTIZED else ""
        ask = GetOffers(
            version=self._version,
            held=held if codec != "raw" else (),
            wait_s=WAIT_S,
            scheme=scheme,
            # What is kept on disk is kept by the final manifest.
            draft=self.partial is None,
        )
        # What is on the disk already need not come again.
        push_bytes = 0 if self.partial is not None and holds_something(self.partial) else PUSH_BYTES

        async def asked(link: WeightLink) -> Planned:
            self.rates.round_trip_s = min(link.round_trip_s, 0.1)
            request = GetPlan(
                ask=ask,
                codec=codec,
                measured=self.rates.told(),
                relay_port=self.relay.port if self.relay is not None else 0,
                lends=self.relay.memory if self.relay is not None else "",
                without=tuple(self._without),
                push_bytes=push_bytes,
                layout=self.layout,
            )
            planned = await link.plan(request)
            self._came_by = link.way
            # No other instance is nearer than the store's own memory.
            no_relay = link.direct or planned.relay in self._without or len(self._without) > OTHER_RELAYS
            return replace(planned, relay="") if no_relay or (planned.only_seen and not looks) else planned

        return await first.call(asked)

    def _neighbours(self) -> Neighbours:
        return Neighbours(self._version, self._transport, self.relay, self.rates, self._believed, self._note)

    async def _seen(self, first: Reconnecting, planned: Planned, threads: ThreadPoolExecutor) -> StagedWeights:
        """The version where the store has it, in memory that both see. Raises LinkLost where that is not to be had."""
        step = planned.steps[0]
        if planned.steps != (Encoding(self._version),):
            raise WeightError(f"asked for weight version {self._version} and got a place for {planned.steps[-1]}")
        manifest = self._believed(decode_manifest(planned.manifest), step, "")
        began = time.perf_counter()
        seen = await (await first.link()).mapped(planned.place, manifest.raw_nbytes)
        await verify_in_place(manifest, seen, threads, self.rates.cores)
        self.rates.fetched(manifest.raw_nbytes, time.perf_counter() - began)
        stream = seen.stream
        if self.relay is not None:
            self.relay.expect(step, planned.manifest, len(manifest.chunks))
            self.relay.stages(self._version, stream)
            for index, chunk in enumerate(manifest.chunks):
                self.relay.put(step, index, stream[chunk.offset : chunk.offset + chunk.nbytes])
        return StagedWeights(
            manifest=manifest,
            tensors=split_tensors(manifest, stream),
            stream=stream,
            steps=planned.steps,
            bytes_fetched=manifest.raw_nbytes,
            way=self._came_by,
        )

    async def _come(
        self, first: Reconnecting, planned: Planned, base: StagedWeights | None, threads: ThreadPoolExecutor
    ) -> StagedWeights:
        steps = planned.steps
        if steps[-1].version != self._version:
            raise WeightError(f"asked for weight version {self._version} and got a plan for {steps[-1]}")
        staging: memoryview | None = None
        ahead = 0
        came = base if steps[0].base is not None else None
        if came is None and steps[0].base is not None:
            raise WeightError(f"{steps[0]} is a difference, and this agent holds no version")
        before = came.stream if came is not None else None
        manifest, digest = None, came.manifest.digest if came is not None else ""
        for number, step in enumerate(steps):
            if number == 0:
                signed, other, pushed = planned.manifest, planned.relay, planned.pushed
            else:
                (signed, other), pushed = await first.call(self._asking_for(step)), 0
            manifest = self._believed(decode_manifest(signed), step, digest, number == 0 and self.partial is None)
            digest = manifest.digest
            if self.relay is not None:
                # It lets go of the oldest version, whose memory can be staged in again.
                self.relay.expect(step, signed, len(manifest.chunks))
            if staging is None:
                staging, ahead = self._memory(manifest, before)
                self._in_place = ahead > 0
                if self.relay is not None:
                    self.relay.stages(self._version, staging)
            if len(before or staging) != len(staging) or len(staging) != manifest.raw_nbytes:
                raise WeightError(f"{step} is {manifest.raw_nbytes} bytes and its base {len(before or staging)}")
            last = number == len(steps) - 1
            fetch = Fetch(manifest, before, staging, threads, self.rates, self._note, verify=last, ahead=ahead)
            await self._one_step(first, fetch, signed, other, fetch.claim(pushed))
            manifest = fetch.manifest
            before = None  # The next step is applied to what is staged.
        if manifest is None or staging is None:
            raise WeightError(f"weight version {self._version} has no way to come")
        return StagedWeights(
            manifest=manifest,
            tensors=split_tensors(manifest, staging),
            stream=staging.toreadonly(),
            steps=tuple(steps),
            bytes_fetched=self._fetched,
            way=self._came_by,
        )

    def _asking_for(self, step: Encoding) -> Callable[[WeightLink], Awaitable[tuple[bytes, str]]]:
        port, lends = (self.relay.port, self.relay.memory) if self.relay is not None else (0, "")
        return lambda link: link.manifest(step, WAIT_S, port, lends)

    async def _one_step(
        self,
        first: Reconnecting,
        fetch: Fetch,
        signed: bytes,
        other: str,
        pushed: Sequence[int],
    ) -> None:
        manifest = fetch.manifest
        if other and pushed:
            raise WeightError(f"{self._source} pushes chunks of {manifest.encoding} and names a relay for them")
        kept = Partial(self.partial, manifest, signed) if self.partial is not None else None
        self._fetch = fetch
        fetch.pass_on(self.relay)
        try:
            if not manifest.is_draft:
                fetch.lend_in_parts()
            await fetch.take_kept(kept)
            async with asyncio.TaskGroup() as group:
                if manifest.is_draft:
                    group.create_task(self._grown(first, fetch))
                # With another instance to fetch from, the trainer's link is left to others.
                elsewhere = other or manifest.is_draft
                group.create_task(self._through(fetch, other) if elsewhere else fetch.run(first, pushed))
                connections = max(self.connections, len(parse_addresses(other or self._source)))
                for _ in range(min(connections, len(manifest.chunks)) - 1):
                    group.create_task(self._through(fetch, other))
            while not await fetch.finish():
                await fetch.run(first)
        finally:
            fetch.end()
            self._fetched += fetch.bytes_fetched
            if kept is not None:
                kept.close()
        if kept is not None:
            kept.delete()

    async def _grown(self, first: Reconnecting, fetch: Fetch) -> None:
        """Hears of a draft's chunks as they are made, to the last. Raises WeightError for what is not the trainer's."""
        draft = fetch.manifest
        while True:
            known = fetch.made

            async def asked(link: WeightLink, known: int = known) -> Made:
                return await link.made(draft.encoding, known, WAIT_S)

            made = await first.call(asked)
            if self._token and not is_made(draft, made, self._token):
                raise WeightError(f"what is said of the chunks of {draft.encoding} is not signed with this run's token")
            check_made(draft, known, made)
            fetch.more(made)
            if fetch.made == len(draft.chunks):
                self._believed(fetch.manifest, draft.encoding, draft.base_digest)
                fetch.lend_in_parts()
                return

    async def _through(self, fetch: Fetch, other: str) -> None:
        async with Reconnecting(self._source, self._transport, self._note, other) as connection:
            await fetch.run(connection)

    def _believed(self, manifest: Manifest, step: Encoding, base_digest: str, draft: bool = False) -> Manifest:
        """Raises WeightError where the manifest is not the trainer's, not in order, or not what was asked for."""
        if self._token and not is_authentic(manifest, self._token):
            raise WeightError(f"the manifest of {step} is not signed with this run's token")
        check_manifest(manifest, step.version, self._max_bytes, draft)
        if manifest.encoding != step:
            raise WeightError(f"asked for {step} and got the manifest of {manifest.encoding}")
        if manifest.base_digest != base_digest and step.base is not None:
            raise WeightError(f"{step} is a difference to other weights than this agent holds")
        return manifest

    def _memory(self, manifest: Manifest, base: memoryview | None) -> tuple[memoryview, int]:
        try:
            return self.memory(manifest.raw_nbytes, base)
        except (OSError, MemoryError, NoMemory) as error:
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


def _in_full(step: Encoding, codec: str, cause: BaseException) -> str:
    """The codec by which a version is fetched whose first step failed; empty for none."""
    if step.base is not None:
        # The base may be at fault, or be gone from the store: a full version needs none.
        return "lossless" if codec == "delta" else codec
    # Quantized weights are another model than any other encoding's.
    return "raw" if isinstance(cause, GivenUp) and step.codec not in QUANTIZED else ""


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
