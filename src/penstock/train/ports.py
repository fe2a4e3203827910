"""What the loop needs from the rest of the house, as small protocols: the real parts and the tests' fit them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.environments import EnvironmentHost
from penstock.errors import RolloutError
from penstock.observe import events
from penstock.sample import Finish, Prompt, Sample, Score, Unscored, VersionSpan
from penstock.train.actor import NamedTensor
from penstock.train.checkpoint import Checkpoints
from penstock.train.edge import EdgeLoop
from penstock.weights.published import Shaped
from penstock.wire import BatchDone, Sampling, TrainerTurn

__all__ = [
    "Finished",
    "Listener",
    "PromptSource",
    "PublishedWeights",
    "RolloutPort",
    "SampleScorer",
    "TextDecoder",
    "TrainerPorts",
    "WeightPublisher",
]


class Finished(Protocol):
    """One finished or failed sample of a batch, as it comes from the manager."""

    @property
    def prompt(self) -> int: ...
    @property
    def replica(self) -> int: ...
    @property
    def token_ids(self) -> array[int]: ...
    @property
    def logprobs(self) -> array[float]: ...
    @property
    def version_spans(self) -> Sequence[VersionSpan]: ...
    @property
    def finish(self) -> Finish: ...
    @property
    def cause(self) -> str: ...


class Listener(Protocol):
    """What a batch's samples are told to; all calls come from the edge loop and none blocks it."""

    def on_samples(self, samples: Sequence[Any]) -> None:
        """`samples` are `Finished`."""
        ...

    def on_done(self, done: BatchDone) -> None: ...

    def on_failed(self, error: RolloutError) -> None: ...


class RolloutPort(Protocol):
    """The manager, seen from the trainer. Lives on the edge loop; `rollout.client.RolloutClient` is one."""

    async def publish(self, version: int, source: str, digest: str = "") -> None:
        """`digest`: of the weights' content, so that what was drawn with them can be told from another version's."""
        ...

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
    ) -> None: ...

    async def cancel(self, batch: str, cause: str) -> None:
        """Has the manager stop generating a batch; one that is not open is none of its business."""
        ...

    async def release(self, batch: str) -> None: ...

    async def take_turn(self, turn: TrainerTurn) -> float:
        """Tells where the trainer stands on its own devices; its number is given here. With state "wants" it returns
        once they are the trainer's, with the seconds that engines generated on them in this step; else 0 at once."""
        ...

    async def report_step(self, step: int, step_s: float, train_s: float, trainer_wait_s: float) -> None:
        """How a step went, in seconds; the manager judges by it how many machines are worth having."""
        ...


class SampleScorer(Protocol):
    """Rewards. Lives on the edge loop; `reward.scorer.Scorer` is one."""

    async def score(self, sample: Sample) -> Score | Unscored: ...


class PublishedWeights(Protocol):
    """A version whose bytes are copied, and whose checksums are being made."""

    @property
    def raw_nbytes(self) -> int: ...

    def digest_later(self) -> Future[str]:
        """Of the weights' content; done once the version can be pulled, failed where it never will be."""
        ...


class WeightPublisher(Protocol):
    """Where agents pull versions from; `weights.store.WeightStore` is one. Copies the tensors before it returns."""

    def publish_behind(
        self, version: int, tensors: Iterable[NamedTensor], config_json: str, shapes: Iterable[Shaped]
    ) -> PublishedWeights: ...


class PromptSource(Protocol):
    def for_step(self, step: int) -> Sequence[Prompt]:
        """The prompts of step `step` (0-based): a function of the step alone, so that a resumed run goes on alike."""
        ...


class TextDecoder(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


Emit = Callable[[events.Event], None]
Record = Callable[[int, Mapping[str, float]], None]
RecordSamples = Callable[[int, Sequence[Sample]], None]


@dataclass(frozen=True, slots=True)
class TrainerPorts:
    """The parts that the loop is joined to."""

    rollout: RolloutPort
    scorer: SampleScorer
    weights: WeightPublisher
    weights_source: str
    """host:port of the weight store, as agents reach it."""
    decoder: TextDecoder
    """The tokenizer."""
    prompts: PromptSource
    eval_prompts: Sequence[Prompt]
    stop_ids: tuple[int, ...]
    """The tokenizer's end-of-sequence token."""
    edge: EdgeLoop
    """Started; `rollout` and `scorer` live on it."""
    emit: Emit
    record: Record
    """`record(step, metrics)`, once a step."""
    checkpoints: Checkpoints
    record_samples: RecordSamples = lambda step, samples: None
    """`record_samples(step, samples)`: a few samples, training's or an evaluation's, for people to read."""
    eval_sets: Mapping[int, str] = field(default_factory=dict)
    """Names of the sets that held-out prompts are of, by the prompt's index."""
    eval_scorer: SampleScorer | None = None
    """Scores held-out answers; None: `scorer` does."""
    environment: EnvironmentHost | None = None
    """What samples talk with, turn by turn; None: each is a single answer."""
    watch: Callable[[], None] = lambda: None
    """Called on the main thread several times a second while it waits and between passes; may raise to end the run."""
    held: Callable[[], AbstractContextManager[object]] = nullcontext
    """Within, an interrupt is held back for some seconds, and raised at the end."""
