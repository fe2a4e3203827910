"""Sample and Group: the words that every room shares.

A sample has one identity for life, `SampleId(batch, prompt, replica)`. Its tokens, their log-probabilities and
the weight version of each are columns: one flat buffer for each field, never a list of small objects. This module
needs neither numpy nor torch, so that the reward and rollout rooms stay light; a column is `array.array` and
speaks the buffer protocol (`numpy.frombuffer` and `torch.frombuffer` read it without copying).
"""

from __future__ import annotations

import copy
import enum
import hashlib
import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

__all__ = [
    "Finish",
    "Group",
    "Prompt",
    "Sample",
    "SampleId",
    "Score",
    "Unscored",
    "VersionSpan",
    "conversation_of",
    "is_turn",
    "sample_seed",
    "turn_batch",
    "turn_before",
]


class SampleId(NamedTuple):
    """Who a sample is, wherever it runs: its batch (a step of the run), prompt index and replica index."""

    batch: str
    prompt: int
    replica: int

    def __str__(self) -> str:
        return f"{self.batch}/{self.prompt}.{self.replica}"


class VersionSpan(NamedTuple):
    """Output tokens `start` to `end` (exclusive) were drawn with weight version `version`."""

    version: int
    start: int
    end: int


class Finish(enum.IntEnum):
    """Why a sample's generation ended. The numbers are part of the wire format."""

    RUNNING = 0
    STOP = 1
    """A stop id was drawn; it is the last token."""
    LENGTH = 2
    """`max_new_tokens` or the context was reached."""
    ABORTED = 3
    """Stopped by request; the sample is unfinished and may go on elsewhere."""
    FAILED = 4
    """The engine can't generate it; a cause is given."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward: `value` is what training uses, `parts` what people look at."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unscored:
    """A reward that is missing, with its cause. Never counts as zero."""

    cause: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question: its text as the model sees it, its token ids, and the row it came from."""

    index: int
    """Position in its data set; the prompt part of `SampleId`."""
    text: str
    token_ids: Sequence[int]
    row: Mapping[str, Any]
    """All fields of the source row (`answer`, `metadata`, ...), for the reward function."""
    source: str
    """Where the row came from, as `file:line` or `task[index]`."""


@dataclass(slots=True)
class Sample:
    """One finished answer to one prompt.

    `token_ids` is an int32 column of T output tokens (a final stop id included), `logprobs` a float32 column
    of the same length: log-probability of each token under the distribution it was drawn from before
    temperature and truncation (the model's own, temperature 1).

    In a conversation with an environment T counts the environment's tokens too. They are 0 in `learned` and in
    `logprobs`, and in no version's span; the last token is always the model's own.
    """

    id: SampleId
    prompt: Prompt
    token_ids: array[int]
    logprobs: array[float]
    version_spans: tuple[VersionSpan, ...]
    finish: Finish
    response: str = ""
    """The output decoded to text, without special tokens; of a conversation the model's last turn."""
    score: Score | Unscored | None = None
    learned: array[int] | None = None
    """int8, T: 1 on the model's own tokens, 0 on those that an environment put in between. None: all are its own."""
    turns: int = 1
    """How often the model spoke."""
    transcript: str = ""
    """All output of a conversation, special tokens included; empty where there was no environment."""
    outcome: Score | None = None
    """What the environment gave, added up over turns; None where there was none."""
    reference_logprobs: array[float] | None = None
    """float32, T: by the run's reference, where that has workers of its own (`train.reference`) or saw it ahead."""
    old_logprobs: array[float] | None = None
    """float32, T: by the step's first weights, where the trainer has looked at it ahead."""
    values: array[float] | None = None
    """float32, T: the critic's, as long as it has not learned since."""

    @property
    def row(self) -> Mapping[str, Any]:
        return self.prompt.row

    def snapshot(self) -> Sample:
        """A copy for code of others: what it changes, rows of nested values included, changes nothing here."""
        prompt = replace(self.prompt, token_ids=copy.copy(self.prompt.token_ids), row=copy.deepcopy(self.prompt.row))
        learned = None if self.learned is None else self.learned[:]
        return replace(self, prompt=prompt, token_ids=self.token_ids[:], logprobs=self.logprobs[:], learned=learned)

    @property
    def own_tokens(self) -> int:
        """Output tokens that the model drew."""
        return len(self.token_ids) if self.learned is None else sum(self.learned)

    @property
    def truncated(self) -> bool:
        return self.finish is Finish.LENGTH


@dataclass(slots=True)
class Group:
    """All finished samples of one prompt. `missing` counts replicas that failed, by cause."""

    batch: str
    prompt: Prompt
    samples: list[Sample]
    missing: dict[str, int] = field(default_factory=dict)


def sample_seed(run_seed: int, sample: SampleId) -> int:
    """The 64-bit key of a sample's random numbers: the same wherever and with whomever it runs."""
    message = struct.pack("<qqq", run_seed, sample.prompt, sample.replica) + sample.batch.encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")


TURN = ".turn-"
_TURN = re.compile(r"((.+)\.(\d+)\.(\d+))\.turn-(\d+)")


def turn_batch(sample: SampleId, turn: int) -> str:
    """The batch in which turn `turn` (1 is the second) of a conversation is generated, as its only sample."""
    return f"{sample.batch}.{sample.prompt}.{sample.replica}{TURN}{turn}"


def is_turn(batch: str) -> bool:
    """Whether a batch is a further turn of another one's sample."""
    return TURN in batch


def conversation_of(batch: str) -> SampleId | None:
    """Of a further turn's batch: the sample whose conversation it belongs to. None for any other batch."""
    found = _TURN.fullmatch(batch)
    return SampleId(found[2], int(found[3]), int(found[4])) if found is not None else None


def turn_before(batch: str) -> SampleId | None:
    """Of a further turn's batch: the sample that the turn before it is. None for any other batch."""
    found = _TURN.fullmatch(batch)
    if found is None:
        return None
    talk, first, prompt, replica, turn = found.groups()
    if int(turn) == 1:
        return SampleId(first, int(prompt), int(replica))
    return SampleId(f"{talk}{TURN}{int(turn) - 1}", int(prompt), 0)
