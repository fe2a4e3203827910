"""The weight version that is on its way to the agents: copied at once, announced once its checksums are there.

Decides when the trainer has to wait: for the copy into host memory, and before it asks for samples of a version, for
that version's announcement, which carries the digest. Between the two the trainer does what it likes. Refuses to know
how weights are kept or sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from penstock.observe import events
from penstock.train.actor import NamedTensor
from penstock.train.ports import PublishedWeights, TrainerPorts
from penstock.weights.published import Shaped

__all__ = ["Publishing"]

PUBLISH_S = 600.0
"""For the checksums of a version and its announcement. Two passes over a terabyte take a minute on one core; a
version that is not out by then is not coming, and no sample of it could ever be drawn."""


class Publishing:
    """At most one version on its way. All calls come from the main thread."""

    def __init__(self, ports: TrainerPorts, patience_s: float = 0.0) -> None:
        self._ports = ports
        self._deadline_s = PUBLISH_S + patience_s
        self._under_way: tuple[int, int, float, Future[None]] | None = None
        """Version, its bytes, when it began, and its announcement."""
        self.stall_s = 0.0
        """How long the last `begin` kept the trainer: the host copy."""

    def begin(self, version: int, tensors: Iterable[NamedTensor], config_json: str, shapes: Iterable[Shaped]) -> None:
        """Copies `tensors`, which may change once this returns, one after the other, and leaves the rest to other
        threads. `shapes`: theirs.

        Raises WeightError for tensors that can't be published, and what `settle` raises for the version before.
        """
        self.settle()
        began = time.perf_counter()
        published = self._ports.weights.publish_behind(version, tensors, config_json, shapes)
        self.stall_s = time.perf_counter() - began
        announcing = asyncio.run_coroutine_threadsafe(self._announce(version, published), self._ports.edge.loop)
        self._under_way = version, int(published.raw_nbytes), began, announcing

    def settle(self, watch: Callable[[], None] | None = None) -> None:
        """Waits until agents were told of the version that is under way, if there is one; `watch` is called meanwhile.

        Raises what its checksums or its announcement failed with, DeadlineExceeded where they take too long.
        """
        if self._under_way is None:
            return
        version, nbytes, began, announcing = self._under_way
        self._under_way = None
        what = f"checksums and announcement of weight version {version}"
        self._ports.edge.run(_end_of(announcing), what, self._deadline_s, watch)
        wall_s = time.perf_counter() - began
        self._ports.emit(events.WeightsPublished(ts=time.time(), version=version, nbytes=nbytes, wall_s=wall_s))

    async def _announce(self, version: int, published: PublishedWeights) -> None:
        digest = await asyncio.wrap_future(published.digest_later())
        await self._ports.rollout.publish(version, self._ports.weights_source, digest)


async def _end_of(future: Future[None]) -> None:
    await asyncio.wrap_future(future)
