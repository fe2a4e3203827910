"""A batch and its samples as the tracker keeps them: columns, counts and the order in which samples wait.

Holds data and its arithmetic; every decision about it is the tracker's. A sample that has never been placed has no
object yet, so a batch that waits costs little more than its prompts.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from penstock.errors import WireError
from penstock.sample import Finish, SampleId, VersionSpan, sample_seed
from penstock.wire import FinishedFrame, Sampling, SubmitBatch, column, encode, offsets

__all__ = ["Batch", "TrackedSample", "content_digest", "finished_frame"]

MAX_SAMPLES = 1 << 24
MAX_NEW_TOKENS = 1 << 24
MAX_NAME_CHARACTERS = 200
LONE_FRAME_BYTES = 1024
"""Of a frame that starts a single sample, beside its tokens and stop ids; more than enough."""


class TrackedSample:
    """One sample on its way. `tokens` is i[length], `logprobs` f[length], both little-endian."""

    __slots__ = (
        "aborts",
        "batch",
        "cause",
        "closed_spans",
        "finish",
        "instance",
        "lease",
        "length",
        "limit",
        "logprobs",
        "losses",
        "placed_length",
        "prompt",
        "replica",
        "strikes",
        "tokens",
        "version",
    )

    def __init__(self, batch: Batch, prompt: int, replica: int) -> None:
        self.batch = batch
        self.prompt = prompt
        """Row of the batch's prompt columns."""
        self.replica = replica
        self.lease = 0
        self.instance = ""
        self.length = 0
        self.limit = batch.sampling.max_new_tokens
        self.placed_length = 0
        """Length when it was last placed."""
        self.strikes = 0
        """Times in a row that it was lost with its instance, or taken back, without a new token; see the tracker."""
        self.losses = 0
        """The same with those that turned out to be no fault of its."""
        self.aborts = 0
        """Times in a row that an engine handed it back without a new token."""
        self.tokens = bytearray()
        self.logprobs = bytearray()
        self.version = -1
        """Weight version of the last token; its span is still open."""
        self.closed_spans: tuple[tuple[int, int], ...] = ()
        """(version, end) of the spans before the open one."""
        self.finish = Finish.RUNNING
        self.cause = ""

    @property
    def id(self) -> SampleId:
        return SampleId(self.batch.name, self.batch.prompt_indices[self.prompt], self.replica)

    @property
    def index(self) -> int:
        """Position in its batch: prompts in order, the replicas of one side by side."""
        return self.prompt * self.batch.samples_per_prompt + self.replica

    @property
    def seed(self) -> int:
        return sample_seed(self.batch.run_seed, self.id)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        spans, start = [], 0
        for version, end in self._all_spans():
            spans.append(VersionSpan(version, start, end))
            start = end
        return tuple(spans)

    @property
    def complete(self) -> Finish | None:
        """How it has finished where its tokens say so by themselves."""
        if self.length and int.from_bytes(self.tokens[-4:], "little") in self.batch.stop_ids:
            # As engines say it: a stop id is one at the limit too.
            return Finish.STOP
        return Finish.LENGTH if self.length >= self.limit else None

    def append(self, token_ids: bytes, logprobs: bytes, count: int, version: int) -> None:
        """Adds `count` tokens drawn with `version`; both buffers hold 4 bytes a token."""
        if self.version != version:
            self.begin_span(version, self.length)
        self.tokens += token_ids
        self.logprobs += logprobs
        self.length += count

    def begin_span(self, version: int, start: int) -> None:
        """From token `start` on, tokens are of `version`."""
        if start:
            self.closed_spans = (*self.closed_spans, (self.version, start))
        self.version = version

    def _all_spans(self) -> tuple[tuple[int, int], ...]:
        return (*self.closed_spans, (self.version, self.length)) if self.length else ()


@dataclass(slots=True, eq=False)
class Batch:
    """A step's samples: P prompts of `samples_per_prompt` each."""

    name: str
    version: int
    samples_per_prompt: int
    run_seed: int
    sampling: Sampling
    stop_ids: frozenset[int]
    prompt_indices: array[int]
    prompt_ids: bytes
    prompt_offsets: list[int]
    """In tokens, P + 1 of them."""
    context_tokens: int
    """Context that each of its samples is sure to have room in: the longest prompt and max_new_tokens."""
    deadline_s: float
    submitted_at: float
    progress_at: float
    """When it last got a token, or a sample of it ended."""
    frame: SubmitBatch
    """As it was submitted, without what the trainer had of it then."""
    digest: bytes
    """Of its content: two submissions with one digest ask for the same samples."""
    next_fresh: int = 0
    settled: set[int] = field(default_factory=set)
    """Samples from `next_fresh` on that need not be placed any more."""
    moved: deque[TrackedSample] = field(default_factory=deque)
    suspects: deque[TrackedSample] = field(default_factory=deque)
    """Moved ones with a strike: each is tried apart from the others."""
    held: dict[int, TrackedSample] = field(default_factory=dict)
    """Finished and failed samples by index, kept until the trainer releases the batch: it may ask again."""
    elsewhere: dict[int, TrackedSample] = field(default_factory=dict)
    """Samples that the trainer has whole and this side has not, by index."""
    age: int = 0
    """The larger, the later it was taken up."""
    listed: bool = False
    """It is looked at for samples that wait (`OpenBatches`)."""
    struck: bool = False
    """One of its samples had a strike."""
    placed: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0
    """Output tokens accepted, those of samples that failed later included."""

    top_token: int = field(init=False)
    """The greatest token id of its prompts."""
    _rows: dict[int, int] = field(init=False, default_factory=dict)
    """Of prompts, by their index in the data; filled when it is first asked for."""

    def __post_init__(self) -> None:
        self.top_token = max(column(self.prompt_ids, "i"), default=0)

    @classmethod
    def parse(cls, frame: SubmitBatch, now: float, max_frame_bytes: int) -> Batch:
        """Raises WireError, naming the value that makes no sense.

        `max_frame_bytes`: of the frame that starts a sample, which may have to carry its prompt and all its output.
        """
        if not 0 < len(frame.batch) <= MAX_NAME_CHARACTERS:
            raise WireError(f"a batch's name has {len(frame.batch)} characters; 1 to {MAX_NAME_CHARACTERS} are allowed")
        indices = column(frame.prompt_indices, "I").tolist()
        prompts = len(indices)
        lengths = column(frame.prompt_lengths, "I", prompts).tolist()
        ids = column(frame.prompt_ids, "i", sum(lengths))
        samples = prompts * frame.samples_per_prompt
        if not 0 < samples <= MAX_SAMPLES or frame.samples_per_prompt < 1:
            raise WireError(
                f"batch {frame.batch!r} has {prompts} prompts of {frame.samples_per_prompt} samples; "
                f"1 to {MAX_SAMPLES} samples are allowed"
            )
        if len(set(indices)) != prompts:
            twice = Counter(indices).most_common(1)[0][0]
            raise WireError(f"batch {frame.batch!r} has prompt {twice} more than once")
        if not all(lengths):
            raise WireError(f"prompt {indices[lengths.index(0)]} of batch {frame.batch!r} is empty")
        if min(ids) < 0:
            raise WireError(f"batch {frame.batch!r} has a negative token id in a prompt: {min(ids)}")
        if not (math.isfinite(frame.deadline_s) and frame.deadline_s > 0):
            raise WireError(f"batch {frame.batch!r} has deadline_s = {frame.deadline_s}; it must be above 0")
        if not 0 <= frame.version < 2**32 or not -(2**63) <= frame.run_seed < 2**63:
            raise WireError(f"batch {frame.batch!r}: version {frame.version} or run seed {frame.run_seed} out of range")
        if frame.sampling.max_new_tokens > MAX_NEW_TOKENS:
            raise WireError(f"batch {frame.batch!r}: max_new_tokens {frame.sampling.max_new_tokens} > {MAX_NEW_TOKENS}")
        if any(not 0 <= token < 2**31 for token in frame.sampling.stop_ids):
            raise WireError(f"batch {frame.batch!r} has a stop id out of range: {frame.sampling.stop_ids}")
        context_tokens = max(lengths) + frame.sampling.max_new_tokens
        start_bytes = LONE_FRAME_BYTES + 4 * context_tokens + 5 * len(frame.sampling.stop_ids)
        if start_bytes > max_frame_bytes:
            raise WireError(
                f"batch {frame.batch!r}: a sample of {context_tokens} tokens (the longest prompt and max_new_tokens) "
                f"may take a frame of {start_bytes} bytes to go on elsewhere, over the {max_frame_bytes} that an agent "
                "takes; see manager.max_frame_mib"
            )
        batch = cls(
            name=frame.batch,
            version=frame.version,
            samples_per_prompt=frame.samples_per_prompt,
            run_seed=frame.run_seed,
            sampling=frame.sampling,
            stop_ids=frozenset(frame.sampling.stop_ids),
            prompt_indices=array("I", indices),
            prompt_ids=frame.prompt_ids,
            prompt_offsets=offsets(lengths),
            context_tokens=context_tokens,
            deadline_s=frame.deadline_s,
            submitted_at=now,
            progress_at=now,
            frame=_content(frame),
            digest=content_digest(frame),
        )
        batch.taken(frame)
        return batch

    @property
    def samples(self) -> int:
        return len(self.prompt_indices) * self.samples_per_prompt

    @property
    def fresh(self) -> int:
        """Samples that were never placed."""
        return self.samples - self.next_fresh - len(self.settled)

    @property
    def waiting(self) -> int:
        return self.assignable + len(self.suspects)

    @property
    def assignable(self) -> int:
        """Those of them that are no suspects: a policy says where they go."""
        return self.fresh + len(self.moved)

    @property
    def ended(self) -> bool:
        return self.finished + self.failed == self.samples

    def prompt_bytes(self, prompt: int) -> bytes:
        """Token ids of one prompt, i[length]."""
        return self.prompt_ids[4 * self.prompt_offsets[prompt] : 4 * self.prompt_offsets[prompt + 1]]

    def next_waiting(self) -> TrackedSample | None:
        """Takes the next sample that is no suspect out of the queue: moved ones first, then prompts in order."""
        if self.moved:
            return self.moved.popleft()
        while self.next_fresh < self.samples:
            index = self.next_fresh
            self.next_fresh += 1
            if index not in self.settled:
                return self.sample(index)
            self.settled.discard(index)
        return None

    def sample(self, index: int) -> TrackedSample:
        """A sample without a token yet. Raises IndexError."""
        if not 0 <= index < self.samples:
            raise IndexError(f"batch {self.name!r} has {self.samples} samples and no number {index}")
        return TrackedSample(self, *divmod(index, self.samples_per_prompt))

    def ended_sample(self, prompt: int, replica: int) -> TrackedSample | None:
        """A sample that has ended, by its prompt's index in the data; None where it has not, or is not here."""
        if not self._rows:
            self._rows = {index: row for row, index in enumerate(self.prompt_indices)}
        row = self._rows.get(prompt)
        if row is None or replica >= self.samples_per_prompt:
            return None
        return self.held.get(row * self.samples_per_prompt + replica)

    def taken(self, frame: SubmitBatch) -> set[int]:
        """Indices of the samples that a submission says its trainer has. Raises WireError for one of another batch."""
        if not frame.taken_prompts and not frame.taken_replicas:
            return set()
        prompts = column(frame.taken_prompts, "I")
        replicas = column(frame.taken_replicas, "I", len(prompts))
        row_of = {index: row for row, index in enumerate(self.prompt_indices)}
        found = set()
        for prompt, replica in zip(prompts, replicas, strict=True):
            row = row_of.get(prompt)
            if row is None or replica >= self.samples_per_prompt:
                raise WireError(f"batch {self.name!r} has no sample {prompt}.{replica}, which is said to be taken")
            found.add(row * self.samples_per_prompt + replica)
        return found


def content_digest(frame: SubmitBatch) -> bytes:
    """Of all that decides what a batch's samples are."""
    return hashlib.blake2b(encode(msgspec.structs.replace(_content(frame), deadline_s=1.0)), digest_size=16).digest()


def _content(frame: SubmitBatch) -> SubmitBatch:
    return msgspec.structs.replace(frame, taken_prompts=b"", taken_replicas=b"")


def finished_frame(batch: Batch, samples: list[TrackedSample]) -> FinishedFrame:
    """Finished and failed samples of one batch as columns. A failed one has a cause and no tokens."""
    lengths, span_counts, span_versions, span_ends = array("I"), array("I"), array("I"), array("I")
    token_parts: list[bytearray] = []
    logprob_parts: list[bytearray] = []
    causes: dict[int, str] = {}
    for row, sample in enumerate(samples):
        if sample.finish is Finish.FAILED:
            causes[row] = sample.cause
            lengths.append(0)
            span_counts.append(0)
            continue
        lengths.append(sample.length)
        token_parts.append(sample.tokens)
        logprob_parts.append(sample.logprobs)
        span_counts.append(len(sample.closed_spans) + 1)
        for version, end in sample.closed_spans:
            span_versions.append(version)
            span_ends.append(end)
        span_versions.append(sample.version)
        span_ends.append(sample.length)
    return FinishedFrame(
        batch=batch.name,
        prompts=array("I", [batch.prompt_indices[sample.prompt] for sample in samples]).tobytes(),
        replicas=array("I", [sample.replica for sample in samples]).tobytes(),
        finishes=bytes([sample.finish for sample in samples]),
        lengths=lengths.tobytes(),
        token_ids=b"".join(token_parts),
        logprobs=b"".join(logprob_parts),
        span_counts=span_counts.tobytes(),
        span_versions=span_versions.tobytes(),
        span_ends=span_ends.tobytes(),
        causes=causes,
    )
