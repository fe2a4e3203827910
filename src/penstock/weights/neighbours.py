"""A version that another instance on this machine has, or writes: seen in its memory, and verified here.

Believed no more than a wire: its manifest is signed, its tensors are those of the store's own plan, and every one is
verified by whoever looks at it. Decides what is waited for; refuses to know what is done where nothing can be seen.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor

from penstock.errors import WeightError
from penstock.weights.choose import Rates
from penstock.weights.manifest import Encoding, Manifest, StagedWeights, decode_manifest
from penstock.weights.mapped import verify_in_place
from penstock.weights.plan import split_tensors
from penstock.weights.protocol import GetOffers, GetPlan, LinkLost, NotLent, NotReady
from penstock.weights.reconnecting import RELAY_CONNECT_S
from penstock.weights.relay import Relay
from penstock.weights.transport import Planned, Seen, WeightLink, WeightTransport

__all__ = ["Neighbours"]

ASK_S = 10.0
"""An instance that gets the version is asked to wait so long, and asked again for as long as it comes there; it says
where nothing more does, which takes it less."""
ANSWER_S = 5.0
"""Whoever answers so late has hung, or is stopped, though its machine still holds the connection."""
AGAIN_S = 0.1
"""Between two asks, of one that does not wait as it is asked to."""
SOON_S = 0.5
"""Within which most versions that are being written are whole; then their writer is asked whether it goes on."""
LAST_S = 1.0
"""In which a writer is whose every tensor has been verified here; if not, it is not asked again on this link."""

Believed = Callable[[Manifest, Encoding, str], Manifest]
"""Raises WeightError for a manifest that is not the trainer's, or not of that encoding and base."""


class Neighbours:
    """For one pull."""

    def __init__(
        self,
        version: int,
        transport: WeightTransport,
        relay: Relay | None,
        rates: Rates,
        believed: Believed,
        note: Callable[[str], None],
    ) -> None:
        """`relay` lends on what is seen; `note` hears of trouble."""
        self._version = version
        self._transport = transport
        self._relay = relay
        self._rates = rates
        self._believed = believed
        self._note = note

    async def seen(self, own: Planned, threads: Executor) -> StagedWeights | None:
        """The version at the instance that the store's `own` plan names; None where it can't be seen there. Raises
        WeightError where that instance has nothing, or other weights."""
        try:
            async with asyncio.timeout(ANSWER_S):
                link = await self._transport.connect(own.relay, RELAY_CONNECT_S, True)
        except TimeoutError:
            raise LinkLost(f"it has shaken no hands for {ANSWER_S:g} s") from None
        try:
            staged = await self._at(link, own, threads) if link.sees else None
        except NotLent:
            staged = None
        except BaseException:
            link.close()
            raise
        self._transport.keep(own.relay, link)
        return staged

    async def _at(self, link: WeightLink, own: Planned, threads: Executor) -> StagedWeights | None:
        planned = await self._lent(link, in_parts=True)
        manifest = self._manifest(own, planned)
        try:
            seen = await link.mapped(planned.place, manifest.raw_nbytes, planned.in_parts)
            if not planned.in_parts:
                await verify_in_place(manifest, seen, threads, self._rates.cores)
        except WeightError as error:
            self._note(f"not to be seen at {own.relay}: {error}")
            link.close()
            return None
        if planned.in_parts:
            await self._verified_in_parts(link, planned.place, seen, manifest, threads)
        if self._relay is not None:
            self._relay.lend(self._version, planned.manifest, link.sees, planned.place)
        return StagedWeights(
            manifest=manifest,
            tensors=split_tensors(manifest, seen.stream),
            stream=seen.stream,
            steps=(Encoding(self._version),),
            bytes_fetched=0,
            way=f"{link.sees} of the instance at {own.relay}",
        )

    async def _lent(self, link: WeightLink, in_parts: bool) -> Planned:
        """Where the version lies there, waiting for it as long as it comes. Raises WeightError where it does not, or
        nobody answers."""
        ask = GetPlan(ask=GetOffers(version=self._version, wait_s=ASK_S, draft=in_parts), codec="raw")
        while True:
            try:
                async with asyncio.timeout(ASK_S + ANSWER_S):
                    return await link.plan(ask)
            except NotReady:
                await asyncio.sleep(AGAIN_S)
            except TimeoutError:
                raise LinkLost(f"it has not answered for {ASK_S + ANSWER_S:g} s") from None

    def _manifest(self, own: Planned, planned: Planned) -> Manifest:
        """Of what the other instance lends."""
        manifest = decode_manifest(planned.manifest)
        manifest = self._believed(manifest, manifest.encoding, manifest.base_digest)
        if len(own.steps) == 1 and manifest.digest != decode_manifest(own.manifest).digest:
            raise WeightError(f"it has other weights under version {self._version}")
        return manifest

    async def _verified_in_parts(
        self, link: WeightLink, place: str, seen: Seen, manifest: Manifest, threads: Executor
    ) -> None:
        """Verifies what is written at `place`, tensor by tensor as its writer lets go of them, and holds all of it.

        A writer that fails, or is killed, lets go of everything: then a tensor does not verify. Who hangs is asked.
        Raises WeightError where it does not come to be whole.
        """
        lent = threading.Event()
        tasks = [asyncio.create_task(verify_in_place(manifest, seen, threads, self._rates.cores, lent))]
        try:
            if not (await asyncio.wait(tasks, timeout=SOON_S))[0]:
                tasks.append(asyncio.create_task(self._comes_to_lie_at(link, place)))
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not tasks[0].done():
                    await tasks[1]
                    lent.set()
            await tasks[0]
            await asyncio.wait(tasks, timeout=LAST_S)
            if not tasks[-1].done() or tasks[-1].exception() is not None:
                link.close()  # What it still says would be taken for the answer to what is asked next.
        finally:
            await _end(tasks)
        if not seen.hold(0, manifest.raw_nbytes):
            raise LinkLost("it has taken its memory for another version")

    async def _comes_to_lie_at(self, link: WeightLink, place: str) -> None:
        """Raises WeightError where the version does not come to be whole, or not there."""
        if (await self._lent(link, in_parts=False)).place != place:
            raise WeightError(f"weight version {self._version} has come to lie elsewhere")


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels them, and empties the list: a task's error refers to who awaited it, and so to what is seen, which would
    be held until both are collected."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()
