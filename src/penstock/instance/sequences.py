"""What an engine over a server knows of its sequences, and how chunks become deltas; pure.

Decides whether a sequence can be generated, how often it is begun again, and what is refused of what a server says
(ids outside the vocabulary, log-probabilities that are none). Knows no HTTP, no tasks and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.errors import EngineError
from penstock.instance.dialect import Chunk
from penstock.instance.engine import SequenceStart, TokenDelta
from penstock.sample import Finish

ABORTS_ALLOWED = 3
"""Times that a server may end a sequence unasked; what it does more often it does for a reason."""
ROUNDING = 1e-3
"""A log-probability above 0 by no more is the server's rounding."""


@dataclass(slots=True)
class Held:
    """A sequence in the engine's hands: its start, what was drawn since, and how often the server dropped it."""

    start: SequenceStart
    drawn: list[int]
    """All output tokens, the prefix included."""
    aborts: int = 0
    attempts: int = 0
    request_id: str = ""
    prefilled: bool = False

    @property
    def lease(self) -> int:
        return self.start.lease

    @property
    def context_tokens(self) -> int:
        return len(self.start.prompt_ids) + len(self.drawn)

    def next_start(self, max_context_tokens: int) -> SequenceStart:
        """The sequence from its last token on, with a limit that fits the context."""
        sampling = self.start.sampling
        room = max_context_tokens - len(self.start.prompt_ids)
        if room < sampling.max_new_tokens:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=room)
        return SequenceStart(
            lease=self.lease,
            seed=self.start.seed,
            prompt_ids=self.start.prompt_ids,
            prefix_ids=self.drawn,
            sampling=sampling,
        )


def refusal(sequence: SequenceStart, version: int, max_context_tokens: int, vocab_size: int) -> str:
    """Why a sequence can't be generated; empty where it can."""
    if version < 0:
        return "the engine has no weights yet"
    if not sequence.prompt_ids:
        return "the prompt is empty"
    used = len(sequence.prompt_ids) + len(sequence.prefix_ids)
    if used >= max_context_tokens:
        return f"prompt and prefix of {used} tokens leave no room in a context of {max_context_tokens}"
    if len(sequence.prefix_ids) >= sequence.sampling.max_new_tokens:
        return f"the prefix of {len(sequence.prefix_ids)} tokens leaves none of max_new_tokens to draw"
    strange = _outside((*sequence.prompt_ids, *sequence.prefix_ids), vocab_size)
    return f"token id {strange} is outside the vocabulary of {vocab_size}" if strange is not None else ""


def check_chunk(chunk: Chunk, held: Held, version: int, vocab_size: int) -> None:
    """Raises EngineError for what no sound server says; such a server's other words can't be relied on either."""
    strange = _outside(chunk.token_ids, vocab_size)
    if strange is not None:
        raise EngineError(f"the server drew token id {strange}, which is outside the vocabulary of {vocab_size}")
    if len(chunk.logprobs) != len(chunk.token_ids):
        raise EngineError(f"the server sent {len(chunk.logprobs)} log-probabilities for {len(chunk.token_ids)} tokens")
    for place, value in enumerate(chunk.logprobs):
        if not value <= ROUNDING or value == float("-inf"):
            raise EngineError(
                f"the server gave token {chunk.token_ids[place]} the log-probability {value}; the weights, or the "
                "arithmetic that it does with them, are broken"
            )
        if value > 0:
            chunk.logprobs[place] = 0.0
    if chunk.weight_version:
        check_version(chunk.weight_version, version)
    over = len(held.drawn) + len(chunk.token_ids) - held.start.sampling.max_new_tokens
    if over > 0:
        raise EngineError(f"the server drew {over} tokens more than max_new_tokens")
    if chunk.finish is Finish.STOP and (not chunk.token_ids or chunk.token_ids[-1] not in held.start.sampling.stop_ids):
        last = chunk.token_ids[-1] if chunk.token_ids else "no token"
        raise EngineError(f"the server stopped a sequence after {last}, which is none of its stop ids")


def check_version(said: str, version: int) -> None:
    """Raises EngineError where a server says that it serves other weights than it was given last."""
    if said != str(version):
        raise EngineError(
            f"the server draws with its weight version {said!r} and should serve {version}; was it started again, or "
            "given weights by somebody else?"
        )


def _outside(ids: Sequence[int], vocab_size: int) -> int | None:
    return next((token for token in ids if not 0 <= token < vocab_size), None)


@dataclass(slots=True)
class _Row:
    start: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = Finish.RUNNING


class Gathering:
    """Chunks of many sequences until they are cut off as one delta: a row for each sequence."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._causes: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, lease: int, start: int, chunk: Chunk) -> None:
        """`start` is the place of the chunk's first token in the sequence's output."""
        row = self._rows.setdefault(lease, _Row(start))
        row.token_ids += chunk.token_ids
        row.logprobs += chunk.logprobs
        row.finish = chunk.finish
        if chunk.finish is Finish.FAILED:
            self._causes[lease] = chunk.cause or "the server failed it and did not say why"

    def forget(self, leases: Sequence[int]) -> None:
        for lease in leases:
            self._rows.pop(lease, None)
            self._causes.pop(lease, None)

    def cut(self, version: int) -> TokenDelta:
        delta = TokenDelta(version=version, causes=self._causes)
        for lease, row in self._rows.items():
            delta.leases.append(lease)
            delta.starts.append(row.start)
            delta.counts.append(len(row.token_ids))
            delta.finishes.append(row.finish)
            delta.token_ids += row.token_ids
            delta.logprobs += row.logprobs
        self._rows, self._causes = {}, {}
        return delta


def without(delta: TokenDelta, leases: set[int]) -> TokenDelta:
    """`delta` without the rows of `leases`."""
    if leases.isdisjoint(delta.leases):
        return delta
    kept = TokenDelta(delta.version, causes={k: cause for k, cause in delta.causes.items() if k not in leases})
    at = 0
    for lease, start, count, finish in zip(delta.leases, delta.starts, delta.counts, delta.finishes, strict=True):
        if lease not in leases:
            kept.leases.append(lease)
            kept.starts.append(start)
            kept.counts.append(count)
            kept.finishes.append(finish)
            kept.token_ids += delta.token_ids[at : at + count]
            kept.logprobs += delta.logprobs[at : at + count]
        at += count
    return kept
