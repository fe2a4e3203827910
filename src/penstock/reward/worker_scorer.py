"""Rewards by a reward model that runs on a group of workers.

Decides what workers read of a sample and what their number is worth. Refuses to know the model, and what goes into
one call (`worker_calls`): workers have a method `score` that takes rows of `text` and answers with rows of `value` and
`cause` (`train.reward_model` is such a worker).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from penstock.cluster import Batch, Column, SubmitPool, WorkerGroup
from penstock.cluster.column import text_column
from penstock.errors import ConfigError, RewardError
from penstock.reward.drought import Drought
from penstock.reward.functions import normalise
from penstock.reward.shown import Text, Unshowable, shown
from penstock.reward.worker_calls import WorkerCalls
from penstock.sample import Sample, Score, Unscored

__all__ = ["WorkerScorer"]


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
        """As `WorkerCalls`. Raises ConfigError."""
        if scale == 0:
            raise ConfigError("scale = 0 would make all rewards the same")
        self._text = text
        self._scale, self._offset = scale, offset
        self.calls: WorkerCalls[str, Score] = WorkerCalls(
            open_group,
            pool,
            "score",
            batch_of,
            self._read,
            what="reward model",
            samples_per_call=samples_per_call,
            timeout_s=timeout_s,
        )
        self._drought = Drought()

    async def start(self) -> None:
        """Starts the workers and has them score one text. Raises RewardError."""
        await self.calls.start("a")

    async def score(self, sample: Sample) -> Score | Unscored:
        """Scores one sample. Raises RewardError where no sample can be scored any more."""
        if self.calls.closed:
            raise RewardError("the scorer is closed")
        try:
            text = shown(self._text, sample)
        except Unshowable as error:
            return Unscored(f"reward model: {error}")
        result = await self.calls.ask(text)
        if not self.calls.closed:  # what closing leaves unscored is nobody's fault
            self._drought.take(result)
            if verdict := self._drought.verdict:
                raise RewardError(f"the reward model: {verdict}")
        return result

    async def close(self) -> None:
        await self.calls.close()

    def _read(self, answer: Batch) -> Sequence[Score | Unscored]:
        return [
            Unscored(f"reward model: {cause}")
            if cause
            else normalise(Score(self._scale * value + self._offset, {"raw": value}))
            for value, cause in zip(answer.column("value").data.cast("d"), answer.values("cause"), strict=True)
        ]


def batch_of(texts: Sequence[str]) -> Batch:
    """Rows of `text`, and their `length` in characters, by which shards are balanced."""
    lengths = memoryview(array("q", map(len, texts))).cast("B")
    return Batch({"text": text_column(texts), "length": Column("int64", lengths, len(texts), ())})
