"""Items that come one by one, answered by a method of a group of workers: gathered, asked in one call, handed back.

Decides what goes into one call (all that came while the last one was under way, up to a bound), when it is given up,
and when workers are replaced. Refuses to know what items and answers are, and knows neither processes nor Ray.

A call that is late, or whose workers died, leaves its items Unscored; the workers are then ended and others started.
Where that happens again and again without an answer, a RewardError says so. No item is given to a second call. Waits
are on threads of a pool, so that the loop goes on. Belongs to the asyncio loop of its first call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from penstock.cluster import Batch, CallTimeout, ClusterError, SubmitPool, WorkerGroup
from penstock.errors import ConfigError, PenstockError, RewardError
from penstock.sample import Unscored

__all__ = ["FRUITLESS_GROUPS", "WorkerCalls"]

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")
T = TypeVar("T")
FRUITLESS_GROUPS = 3
"""Groups in a row that were lost before they answered anything, after which no other is started."""


class _Waiting(NamedTuple, Generic[I, R]):
    item: I
    future: asyncio.Future[R | Unscored]


class WorkerCalls(Generic[I, R]):
    """Answers of `method` to items: `sent` makes rows of them, `read` takes an answer of each out of what came back."""

    def __init__(
        self,
        open_group: Callable[[], WorkerGroup],
        pool: SubmitPool,
        method: str,
        sent: Callable[[Sequence[I]], Batch],
        read: Callable[[Batch], Sequence[R | Unscored]],
        *,
        what: str,
        samples_per_call: int,
        timeout_s: float,
    ) -> None:
        """`open_group` starts the workers and may take long; it is called on `pool`, again where workers were lost.

        `what` the workers are, for people; `timeout_s`: of one call, from its launch. Raises ConfigError.
        """
        if not timeout_s > 0 or samples_per_call < 1:
            raise ConfigError(
                f"timeout_s = {timeout_s:g} must be above 0, samples_per_call = {samples_per_call} at least 1"
            )
        self._open_group = open_group
        self._pool = pool
        self._method = method
        self._sent, self._read = sent, read
        self._what = what
        self._samples_per_call = samples_per_call
        self._timeout_s = timeout_s
        self.group: WorkerGroup | None = None
        """The workers, where there are any."""
        self._lost_in_a_row = 0
        self._last_loss = ""
        self._queue: deque[_Waiting[I, R]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self.closed = False

    async def start(self, first: I) -> None:
        """Starts the workers and has them answer `first`, so that what is wrong shows before the run begins.

        Raises RewardError.
        """
        try:
            group = await self._on_pool(self._opened)
            await self._on_pool(lambda: self._called(group, [first]))
        except PenstockError as error:
            raise RewardError(f"the {self._what} can't be used: {error}") from error

    async def ask(self, item: I) -> R | Unscored:
        """The answer to one item. Raises RewardError where there can't be any more."""
        if self.closed:
            raise RewardError("the scorer is closed")
        waiting = _Waiting[I, R](item, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        return await waiting.future

    async def close(self) -> None:
        """Items that wait are Unscored. The workers are the cluster's to end."""
        self.closed = True
        if self._sender is not None:
            self._sender.cancel()
        for waiting in self._taken(len(self._queue)):
            waiting.future.set_result(_CLOSED)

    async def _send_all(self) -> None:
        """One call after another until nobody waits; a call's time limit so begins with its work."""
        await asyncio.sleep(0)  # samples that finish together go together
        while batch := self._taken(self._samples_per_call):
            try:
                results: Sequence[R | Unscored] = await self._answers([waiting.item for waiting in batch])
            except asyncio.CancelledError:
                _resolve(batch, [_CLOSED] * len(batch))
                raise
            except Exception as error:  # noqa: BLE001  # whatever it is, who waits must hear of it
                for waiting in (*batch, *self._taken(len(self._queue))):
                    if not waiting.future.done():
                        waiting.future.set_exception(error)
                continue
            _resolve(batch, results)

    def _taken(self, most: int) -> list[_Waiting[I, R]]:
        """The first of those that still wait."""
        batch: list[_Waiting[I, R]] = []
        while self._queue and len(batch) < most:
            waiting = self._queue.popleft()
            if not waiting.future.done():
                batch.append(waiting)
        return batch

    async def _answers(self, items: Sequence[I]) -> Sequence[R | Unscored]:
        """Raises RewardError where there are no workers."""
        group = await self._on_pool(self._opened)
        try:
            answer = await self._on_pool(lambda: self._called(group, items))
        except ClusterError as error:
            if isinstance(error, CallTimeout) or group.workers.lost:
                self._last_loss = str(error)
                await self._on_pool(self._lose)
            return [Unscored(f"{self._what}: {error}")] * len(items)
        self._lost_in_a_row = 0
        return self._read(answer)

    # ---- on the pool's threads, one at a time

    def _opened(self) -> WorkerGroup:
        if self.group is None:
            if self._lost_in_a_row >= FRUITLESS_GROUPS:
                raise RewardError(
                    f"{self._lost_in_a_row} groups of {self._what} workers in a row were lost without an answer; "
                    f"the last one: {self._last_loss}"
                )
            try:
                self.group = self._open_group()
            except ClusterError as error:
                raise RewardError(f"the workers of the {self._what} don't start: {error}") from error
        return self.group

    def _lose(self) -> None:
        group, self.group = self.group, None
        self._lost_in_a_row += 1
        if group is not None:
            group.workers.close()

    def _called(self, group: WorkerGroup, items: Sequence[I]) -> Batch:
        answer = group.submit(self._method, self._sent(items)).result(self._timeout_s)
        assert isinstance(answer, Batch)
        return answer

    async def _on_pool(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._pool.submit(call))


_CLOSED = Unscored("the scorer was closed before the sample was scored")


def _resolve(batch: Sequence[_Waiting[I, R]], results: Sequence[R | Unscored]) -> None:
    for waiting, result in zip(batch, results, strict=True):
        if not waiting.future.done():
            waiting.future.set_result(result)
