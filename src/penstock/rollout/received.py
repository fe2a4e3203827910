"""What the trainer has of its open batches: samples out of frames, each once.

Decides nothing; it remembers which samples came, so that a manager which is back can be told.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from penstock.errors import RolloutError, WireError
from penstock.sample import Finish, VersionSpan
from penstock.wire import BatchDone, FinishedFrame, SubmitBatch, column

__all__ = ["FinishedSample", "Listener", "OpenBatch", "finished_samples"]


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """A sample that is finished, or failed with its cause; then it has no tokens."""

    prompt: int
    """Index of the prompt, as in `Prompt.index`."""
    replica: int
    token_ids: array[int]
    """i[length]"""
    logprobs: array[float]
    """f[length]"""
    version_spans: tuple[VersionSpan, ...]
    finish: Finish
    cause: str = ""


class Listener(Protocol):
    """Hears of one batch, on the client's loop. After `on_done` or `on_failed` it hears no more."""

    def on_samples(self, samples: list[FinishedSample]) -> None: ...

    def on_done(self, done: BatchDone) -> None: ...

    def on_failed(self, error: RolloutError) -> None: ...


@dataclass(slots=True)
class OpenBatch:
    """A batch whose end has not been heard, and what came of it."""

    frame: SubmitBatch
    listener: Listener
    prompts: array[int] = field(default_factory=lambda: array("I"))
    replicas: array[int] = field(default_factory=lambda: array("I"))
    seen: set[tuple[int, int]] = field(default_factory=set)

    def fresh(self, samples: list[FinishedSample]) -> list[FinishedSample]:
        """Those that had not come before."""
        found = []
        for sample in samples:
            key = sample.prompt, sample.replica
            if key not in self.seen:
                self.seen.add(key)
                self.prompts.append(sample.prompt)
                self.replicas.append(sample.replica)
                found.append(sample)
        return found

    def again(self) -> SubmitBatch:
        """The submission for a manager that may know nothing of it."""
        return msgspec.structs.replace(
            self.frame, taken_prompts=self.prompts.tobytes(), taken_replicas=self.replicas.tobytes()
        )


def finished_samples(frame: FinishedFrame) -> list[FinishedSample]:
    """Rows of a FinishedFrame. Raises WireError where its columns disagree."""
    prompts = column(frame.prompts, "I").tolist()
    rows = len(prompts)
    replicas = column(frame.replicas, "I", rows).tolist()
    finishes = column(frame.finishes, "B", rows).tolist()
    lengths = column(frame.lengths, "I", rows).tolist()
    total = sum(lengths)
    column(frame.token_ids, "i", total)
    column(frame.logprobs, "f", total)
    span_counts = column(frame.span_counts, "I", rows).tolist()
    span_versions = column(frame.span_versions, "I", sum(span_counts)).tolist()
    span_ends = column(frame.span_ends, "I", sum(span_counts)).tolist()
    if rows and max(finishes) >= len(Finish):
        raise WireError(f"a finish of {max(finishes)}; the last one known is {len(Finish) - 1}")
    samples = []
    begin = span = 0
    for row in range(rows):
        end = begin + 4 * lengths[row]
        spans, start = [], 0
        for k in range(span, span + span_counts[row]):
            spans.append(VersionSpan(span_versions[k], start, span_ends[k]))
            start = span_ends[k]
        if start != lengths[row]:
            raise WireError(f"version spans cover {start} of the {lengths[row]} tokens of row {row}")
        samples.append(
            FinishedSample(
                prompt=prompts[row],
                replica=replicas[row],
                token_ids=array("i", frame.token_ids[begin:end]),
                logprobs=array("f", frame.logprobs[begin:end]),
                version_spans=tuple(spans),
                finish=Finish(finishes[row]),
                cause=frame.causes.get(row, ""),
            )
        )
        begin, span = end, span + span_counts[row]
    return samples
