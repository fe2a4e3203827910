"""The reference on workers of its own: a frozen model that says how likely samples' tokens are, as they come.

Decides what is sent of a sample and how it is laid out in passes: as the actor's own are, so that the numbers are the
same. Refuses to know what becomes of them (`actor`), when samples come, and what goes into one call (`worker_calls`).
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.cluster import Batch, Cluster, Column, SubmitPool, WorkerGroup, dispatch
from penstock.cluster.column import array_column
from penstock.config.reference import ReferenceConfig
from penstock.errors import RewardError
from penstock.reward.worker_calls import WorkerCalls
from penstock.sample import Sample, Score, Unscored
from penstock.train.ports import SampleScorer

__all__ = ["Reference", "ReferenceScorer", "open_reference"]

NAME = "reference"
Tokens = tuple[Sequence[int], Sequence[int]]
"""Of a prompt and of its output."""


def open_reference(cluster: Cluster, config: ReferenceConfig, **arguments: Any) -> WorkerGroup:
    """The reference's workers as one group. Raises WorkerFailed where the model can't be loaded, MissingExtra."""
    if config.on == "ray":
        gpus = config.gpus_per_worker
        return cluster.group(cluster.ray(Reference, config.workers, gpus=gpus, arguments=arguments, name=NAME))
    return cluster.group(cluster.local(Reference, config.workers, arguments=arguments, name=NAME))


class Reference:
    """One worker's copy of the model."""

    def __init__(self, path: str, device: str, dtype: str, temperature: float, tokens_per_micro_batch: int) -> None:
        """Log-probabilities are those of softmax(logits / temperature). Raises CheckpointError."""
        import torch

        from penstock.train.loading import load_causal_lm

        # Workers of one machine share its cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("WORLD_SIZE", "1"))))
        if device == "auto":
            there = torch.cuda.is_available()
            device = f"cuda:{int(os.environ.get('RANK', '0')) % torch.cuda.device_count()}" if there else "cpu"
        self._device = torch.device(device)
        self._dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        # Nothing is learned, so nothing is kept more precisely than it is used.
        self._model = load_causal_lm(Path(path)).to(self._device, self._dtype).requires_grad_(False)
        self._temperature = temperature
        self._tokens = tokens_per_micro_batch

    @dispatch("data_parallel", tokens="length")
    def logprobs(self, batch: Batch) -> Batch:
        """`prompt` and `output` (int32, ragged) -> `logprobs` of all output tokens (float32, ragged)."""
        import torch

        from penstock.train.batching import collate, split_passes
        from penstock.train.forward import score_tokens

        prompts, outputs = ([_row(batch.column(name), k, "i") for k in range(len(batch))] for name in _SENT)
        found = [array("f")] * len(batch)
        lengths = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
        for rows in split_passes(lengths, self._tokens):
            laid_out = collate([prompts[k] for k in rows], [outputs[k] for k in rows]).to(self._device)
            with torch.inference_mode():
                scores = score_tokens(self._model, laid_out, temperature=self._temperature)
            for k, row_T in zip(rows, scores.logprobs_BT.cpu().tolist(), strict=True):
                found[k] = array("f", row_T[: len(outputs[k])])
        return Batch({"logprobs": array_column(found, "float32")})


class ReferenceScorer:
    """Scores samples by `scorer`, and meanwhile has the reference's workers say how likely their tokens are.

    A sample of which they can't say it is Unscored, with the cause.
    """

    def __init__(
        self,
        scorer: SampleScorer,
        open_group: Callable[[], WorkerGroup],
        pool: SubmitPool,
        *,
        samples_per_call: int,
        timeout_s: float,
    ) -> None:
        self._scorer = scorer
        self.calls: WorkerCalls[Tokens, array[float]] = WorkerCalls(
            open_group,
            pool,
            "logprobs",
            _sent,
            _read,
            what="reference",
            samples_per_call=samples_per_call,
            timeout_s=timeout_s,
        )

    async def start(self) -> None:
        """Starts the workers and has them look at one sample. Raises RewardError."""
        await self.calls.start(([1], [1]))

    async def score(self, sample: Sample) -> Score | Unscored:
        """The sample's score, once its `reference_logprobs` are there too. Raises RewardError, and as the scorer."""
        said, score = await asyncio.gather(
            self.calls.ask((sample.prompt.token_ids, sample.token_ids)), self._scorer.score(sample)
        )
        if isinstance(said, Unscored):
            return said
        if len(said) != len(sample.token_ids):
            raise RewardError(f"the reference gave {len(said)} numbers for {len(sample.token_ids)} tokens")
        sample.reference_logprobs = said
        return score

    async def close(self) -> None:
        await self.calls.close()


_SENT = ("prompt", "output")


def _sent(items: Sequence[Tokens]) -> Batch:
    columns = {name: array_column([array("i", item[k]) for item in items]) for k, name in enumerate(_SENT)}
    lengths = memoryview(array("q", [len(prompt) + len(output) for prompt, output in items])).cast("B")
    return Batch({**columns, "length": Column("int64", lengths, len(items), ())})


def _read(answer: Batch) -> list[array[float] | Unscored]:
    return [_row(answer.column("logprobs"), k, "f") for k in range(len(answer))]


def _row(column: Column, row: int, code: str) -> array[Any]:
    values: array[Any] = array(code)
    values.frombytes(column.row_bytes(row))
    return values
