"""Rewards by a reward model that runs on a group of workers: samples are gathered, scored in one call, handed back.

Decides what goes into one call (all that came while the last one was under way, up to a bound), when it is given up,
and when workers are replaced. Refuses to know the model: workers have a method `score` that takes rows of `text` and
answers with rows of `value` and `cause` (`train.reward_model` is such a worker). Knows neither processes nor Ray.

A call that is late, or whose workers died, leaves its samples Unscored; the workers are then ended and others started.
Where that happens again and again without a score, a RewardError says so. No sample is given to a second call. Waits
are on threads of the run's pool for rewards, so that the loop goes on. Belongs to the asyncio loop of its first call.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from penstock.cluster import Batch, CallTimeout, ClusterError, Column, SubmitPool, WorkerGroup
from penstock.cluster.column import text_column
from penstock.errors import ConfigError, PenstockError, RewardError
from penstock.reward.drought import Drought
from penstock.reward.functions import normalise
from penstock.reward.shown import Text, Unshowable, shown
from penstock.sample import Sample, Score, Unscored

__all__ = ["WorkerScorer"]

T = TypeVar("T")
FRUITLESS_GROUPS = 3
"""Groups in a row that were lost before they scored anything, after which no other is started."""


class _Waiting(NamedTuple):
    text: str
    future: asyncio.Future[Score | Unscored]


class WorkerScorer:
    """Scores samples by `scale * value + offset`; `value` is in the part `raw`."""

    def __init__(
        self,
        open_group: Callable[[], WorkerGroup],
        pool: SubmitPool,
        *,
        text: Text = "{prompt}{response}",
        scale: float = 1.0,
        offset: float = 0.0,
        samples_per_call: int = 256,
        timeout_s: float = 30.0,
    ) -> None:
        """`open_group` starts the workers and may take long; it is called on `pool`, again where workers were lost.

        `timeout_s`: of one call, from its launch. Raises ConfigError.
        """
        if scale == 0 or not timeout_s > 0 or samples_per_call < 1:
            raise ConfigError(
                f"scale = {scale:g} must not be 0, timeout_s = {timeout_s:g} must be above 0, samples_per_call = "
                f"{samples_per_call} at least 1"
            )
        self._open_group = open_group
        self._pool = pool
        self._text = text
        self._scale, self._offset = scale, offset
        self._samples_per_call = samples_per_call
        self._timeout_s = timeout_s
        self._group: WorkerGroup | None = None
        self._lost_in_a_row = 0
        self._last_loss = ""
        self._queue: deque[_Waiting] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._drought = Drought()
        self._closed = False

    async def start(self) -> None:
        """Starts the workers and has them score one text, so that what is wrong shows before the run begins.

        Raises RewardError.
        """
        try:
            group = await self._on_pool(self._opened)
            await self._on_pool(lambda: self._called(group, ["a"]))
        except PenstockError as error:
            raise RewardError(f"the reward model can't be used: {error}") from error

    async def score(self, sample: Sample) -> Score | Unscored:
        """Scores one sample. Raises RewardError where no sample can be scored any more."""
        if self._closed:
            raise RewardError("the scorer is closed")
        try:
            text = shown(self._text, sample)
        except Unshowable as error:
            return Unscored(f"reward model: {error}")
        waiting = _Waiting(text, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        result = await waiting.future
        if not self._closed:  # what closing leaves unscored is nobody's fault
            self._drought.take(result)
            if verdict := self._drought.verdict:
                raise RewardError(f"the reward model: {verdict}")
        return result

    async def close(self) -> None:
        """Samples that wait are Unscored. The workers are the cluster's to end."""
        self._closed = True
        if self._sender is not None:
            self._sender.cancel()
        for waiting in self._taken(len(self._queue)):
            waiting.future.set_result(Unscored("the scorer was closed before the sample was scored"))

    async def _send_all(self) -> None:
        """One call after another until nobody waits; a call's time limit so begins with its work."""
        await asyncio.sleep(0)  # samples that finish together go together
        while batch := self._taken(self._samples_per_call):
            try:
                results: Sequence[Score | Unscored] = await self._scored([waiting.text for waiting in batch])
            except asyncio.CancelledError:
                results = [Unscored("the scorer was closed before the sample was scored")] * len(batch)
                _resolve(batch, results)
                raise
            except Exception as error:  # noqa: BLE001  # whatever it is, who waits must hear of it
                for waiting in (*batch, *self._taken(len(self._queue))):
                    if not waiting.future.done():
                        waiting.future.set_exception(error)
                continue
            _resolve(batch, results)

    def _taken(self, most: int) -> list[_Waiting]:
        """The first of those that still wait."""
        batch: list[_Waiting] = []
        while self._queue and len(batch) < most:
            waiting = self._queue.popleft()
            if not waiting.future.done():
                batch.append(waiting)
        return batch

    async def _scored(self, texts: Sequence[str]) -> list[Score | Unscored]:
        """Raises RewardError where there are no workers."""
        group = await self._on_pool(self._opened)
        try:
            answer = await self._on_pool(lambda: self._called(group, texts))
        except ClusterError as error:
            if isinstance(error, CallTimeout) or group.workers.lost:
                self._last_loss = str(error)
                await self._on_pool(self._lose)
            return [Unscored(f"reward model: {error}")] * len(texts)
        self._lost_in_a_row = 0
        return [
            Unscored(f"reward model: {cause}")
            if cause
            else normalise(Score(self._scale * value + self._offset, {"raw": value}))
            for value, cause in zip(answer.column("value").data.cast("d"), answer.values("cause"), strict=True)
        ]

    # ---- on the pool's threads, one at a time

    def _opened(self) -> WorkerGroup:
        if self._group is None:
            if self._lost_in_a_row >= FRUITLESS_GROUPS:
                raise RewardError(
                    f"{self._lost_in_a_row} groups of reward model workers in a row were lost without a score; "
                    f"the last one: {self._last_loss}"
                )
            try:
                self._group = self._open_group()
            except ClusterError as error:
                raise RewardError(f"the workers of the reward model don't start: {error}") from error
        return self._group

    def _lose(self) -> None:
        group, self._group = self._group, None
        self._lost_in_a_row += 1
        if group is not None:
            group.workers.close()

    def _called(self, group: WorkerGroup, texts: Sequence[str]) -> Batch:
        answer = group.submit("score", batch_of(texts)).result(self._timeout_s)
        assert isinstance(answer, Batch)
        return answer

    async def _on_pool(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._pool.submit(call))


def batch_of(texts: Sequence[str]) -> Batch:
    """Rows of `text`, and their `length` in characters, by which shards are balanced."""
    lengths = memoryview(array("q", map(len, texts))).cast("B")
    return Batch({"text": text_column(texts), "length": Column("int64", lengths, len(texts), ())})


def _resolve(batch: Sequence[_Waiting], results: Sequence[Score | Unscored]) -> None:
    for waiting, result in zip(batch, results, strict=True):
        if not waiting.future.done():
            waiting.future.set_result(result)
