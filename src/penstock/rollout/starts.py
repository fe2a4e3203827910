"""Samples that were just placed, as the frames that start them: columns, cut to a bounded size.

Decides nothing but where one frame ends; knows the wire's columns and nothing of instances.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from penstock.rollout.batch import TrackedSample
from penstock.wire import Sampling, StartFrame

__all__ = ["start_frames"]

ROW_BYTES = 64
"""What a row takes beside its token ids, roughly: lease, seed, lengths and the frame's share."""


def start_frames(samples: Sequence[TrackedSample], limit_bytes: int) -> Iterator[StartFrame]:
    """Frames for samples of one instance, in order; each of one weight version and about `limit_bytes` at most.

    A single sample over the limit has a frame of its own: what came in one frame goes out in one.
    """
    first = size = 0
    for position, sample in enumerate(samples):
        row = ROW_BYTES + len(sample.batch.prompt_bytes(sample.prompt)) + len(sample.tokens)
        full = size + row > limit_bytes
        if position > first and (full or sample.batch.version != samples[first].batch.version):
            yield _frame(samples[first:position])
            first, size = position, 0
        size += row
    if samples:
        yield _frame(samples[first:])


def _frame(samples: Sequence[TrackedSample]) -> StartFrame:
    prompts = [sample.batch.prompt_bytes(sample.prompt) for sample in samples]
    samplings: dict[Sampling, int] = {}
    sampling_of = array("I", [samplings.setdefault(sample.batch.sampling, len(samplings)) for sample in samples])
    return StartFrame(
        version=samples[0].batch.version,
        leases=array("Q", [sample.lease for sample in samples]).tobytes(),
        seeds=array("Q", [sample.seed for sample in samples]).tobytes(),
        prompt_ids=b"".join(prompts),
        prompt_lengths=array("I", [len(prompt) // 4 for prompt in prompts]).tobytes(),
        prefix_ids=b"".join([sample.tokens for sample in samples]),
        prefix_lengths=array("I", [sample.length for sample in samples]).tobytes(),
        samplings=tuple(samplings),
        sampling_of=sampling_of.tobytes(),
    )
