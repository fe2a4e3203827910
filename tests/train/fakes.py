"""Ports for the training loop: a manager that answers from a seeded script, a scorer, a weight store."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any

from penstock.rollout.client import FinishedSample
from penstock.sample import Finish, Prompt, Sample, Score, Unscored, VersionSpan
from penstock.train.actor import NamedTensor
from penstock.train.ports import Listener
from penstock.weights.plan import DTYPE_BYTES
from penstock.weights.published import Shaped
from penstock.wire import BatchDone, Sampling, TrainerTurn


def written(tensors: Iterable[NamedTensor]) -> dict[str, bytes]:
    """By name, what each writes where it is put."""
    found = {}
    for name, dtype, shape, write in tensors:
        into = bytearray(prod(shape) * DTYPE_BYTES[dtype])
        write(memoryview(into))
        found[name] = bytes(into)
    return found


Script = Callable[["FakeRollout", str, FinishedSample], FinishedSample]


@dataclass
class FakeRollout:
    """Answers each batch sample by sample; what a sample says is a function of its identity alone."""

    alter: Callable[[str, FinishedSample], FinishedSample | None] = lambda batch, sample: sample
    """Changes a sample on its way; None loses it."""
    gate: Callable[[str, int], float] = lambda batch, number: 0.0
    """Seconds before sample `number` of `batch`."""
    fail_with: Exception | None = None
    cancel_with: Exception | None = None
    cancel_s: float = 0.0
    published: list[int] = field(default_factory=list)
    batches: dict[str, tuple[int, Sampling, list[int]]] = field(default_factory=dict)
    prompts: dict[str, list[Prompt]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    steps_reported: list[tuple[int, float, float, float]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    cancelled: dict[str, str] = field(default_factory=dict)
    turns: list[tuple[str, str]] = field(default_factory=list)
    window_s: float = 0.0
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def publish(self, version: int, source: str, digest: str = "") -> None:
        self.published.append(version)

    async def submit(
        self,
        batch: str,
        version: int,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        run_seed: int,
        sampling: Sampling,
        deadline_s: float,
        listener: Listener,
    ) -> None:
        assert version in self.published
        self.batches[batch] = (version, sampling, [prompt.index for prompt in prompts])
        self.prompts[batch] = list(prompts)
        samples = [
            make_finished(batch, prompt.index, replica, version, sampling.max_new_tokens)
            for prompt in prompts
            for replica in range(samples_per_prompt)
        ]
        self._tasks[batch] = asyncio.get_running_loop().create_task(self._answer(batch, samples, listener))

    async def cancel(self, batch: str, cause: str) -> None:
        """As the client does: a batch that has ended is passed over, and one that is cancelled is heard of no more."""
        await asyncio.sleep(self.cancel_s)
        if self.cancel_with is not None:
            raise self.cancel_with
        task = self._tasks[batch]
        if not task.done():
            task.cancel()
            self.cancelled[batch] = cause

    async def release(self, batch: str) -> None:
        self.released.append(batch)

    async def report_step(self, step: int, step_s: float, train_s: float, trainer_wait_s: float) -> None:
        self.steps_reported.append((step, step_s, train_s, trainer_wait_s))

    async def take_turn(self, turn: TrainerTurn) -> float:
        """As a manager whose engines hand over after `window_s` of the step, at once."""
        self.turns.append((turn.batch, turn.state))
        return self.window_s if turn.state == "wants" else 0.0

    async def _answer(self, batch: str, samples: list[FinishedSample], listener: Listener) -> None:
        self.sent[batch] = 0
        for number, sample in enumerate(samples):
            await asyncio.sleep(self.gate(batch, number))
            if self.fail_with is not None and number == len(samples) // 2:
                listener.on_failed(self.fail_with)  # type: ignore[arg-type]
                return
            altered = self.alter(batch, sample)
            if altered is not None:
                listener.on_samples([altered])
            self.sent[batch] += 1
        listener.on_done(BatchDone(batch=batch, samples=len(samples), failed=0, tokens=0))


def make_finished(batch: str, prompt: int, replica: int, version: int, max_tokens: int = 8) -> FinishedSample:
    chance = random.Random(f"{batch}/{prompt}.{replica}")
    length = min(chance.randint(1, 8), max_tokens)
    return FinishedSample(
        prompt=prompt,
        replica=replica,
        token_ids=array("i", [chance.randrange(5, 60) for _ in range(length)]),
        logprobs=array("f", [-4.0 - chance.random() for _ in range(length)]),
        version_spans=(VersionSpan(version, 0, length),),
        finish=Finish.STOP,
    )


@dataclass
class FakeScorer:
    judge: Callable[[Sample], Score | Unscored] = lambda sample: Score(
        float(random.Random(str(sample.id)).random() < 0.5)
    )
    scored: list[Sample] = field(default_factory=list)

    async def score(self, sample: Sample) -> Score | Unscored:
        self.scored.append(sample)
        return self.judge(sample)


@dataclass
class FakeStore:
    versions: dict[int, dict[str, bytes]] = field(default_factory=dict)

    digests: dict[int, Future[str]] = field(default_factory=dict)
    """Where a test puts one, it says when the checksums of that version end, and how."""

    def publish_behind(
        self, version: int, tensors: Iterable[NamedTensor], config_json: str, shapes: Iterable[Shaped]
    ) -> Any:
        told = list(shapes)
        self.versions[version] = written(tensors)
        assert [name for name, _, _ in told] == list(self.versions[version])
        if version not in self.digests:
            self.digests[version] = Future()
            self.digests[version].set_result(f"weights {version}")
        nbytes = sum(map(len, self.versions[version].values()))
        return SimpleNamespace(raw_nbytes=nbytes, digest_later=lambda: self.digests[version])


@dataclass
class StepPrompts:
    """Four prompts a step, other ones each step."""

    prompts: Sequence[Prompt]

    def for_step(self, step: int) -> Sequence[Prompt]:
        return random.Random(step).sample(self.prompts, 4)
