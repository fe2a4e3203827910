"""The engine protocol: what an agent needs from whatever generates tokens.

An engine starts sequences (with a prefix already generated), stops some, takes weights between two decode steps,
reports its load and yields deltas. It never sees samples, groups or the manager: a sequence is a lease number.
Three engines stand behind it: the built-in one, SGLang and vLLM.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from penstock.sample import Finish
from penstock.weights.manifest import StagedWeights
from penstock.wire import Sampling

DEFAULT_CONTEXT_TOKENS = 2048
"""Of an engine for which neither its machine nor its run has a wish."""


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """One sequence to generate: `prompt_ids` then `prefix_ids` are prefilled, the next token is drawn.

    Token number `len(prefix_ids)` of the output is the first one drawn; the random number of output token n
    depends on (`seed`, n) alone. `sampling.max_new_tokens` counts the prefix.
    """

    lease: int
    seed: int
    prompt_ids: Sequence[int]
    prefix_ids: Sequence[int]
    sampling: Sampling


@dataclass(slots=True)
class TokenDelta:
    """New tokens of N sequences, all drawn with weight version `version`; columns as in `wire.TokenFrame`."""

    version: int
    leases: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token under the model itself (temperature 1, nothing truncated)."""
    causes: dict[int, str] = field(default_factory=dict)
    """Lease to cause, for sequences that end as Finish.FAILED."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    kind: str
    device: str
    max_running: int
    max_context_tokens: int
    vocab_size: int
    """0 until the first weights are loaded."""
    tensor_parallel: int = 1
    """Ranks that share the model."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int
    waiting: int
    kv_tokens: int
    tokens_generated: int
    tokens_prefilled: int
    tokens_per_s: float
    work_done: int = 0
    """Grows with whatever gets done within a step, such as a layer of a long prefill: slow is not stuck."""


@runtime_checkable
class Engine(Protocol):
    """All methods are called from one event loop; none blocks it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def version(self) -> int:
        """Weight version that serves now; -1 before the first."""
        ...

    async def update_weights(self, weights: StagedWeights) -> None:
        """Swaps in verified weights between two decode steps; caches of older versions are not reused.

        The first call builds the model. Raises EngineError, and then the old version still serves.
        Sequences that still run go on with the new version; their later deltas carry its number.
        """
        ...

    def start(self, sequences: Sequence[SequenceStart]) -> None:
        """Takes sequences in; one that can't be generated ends in a delta with Finish.FAILED and its cause."""
        ...

    def stop(self, leases: Sequence[int]) -> None:
        """Ends sequences without a further delta for them; unknown leases are ignored."""
        ...

    def deltas(self) -> AsyncIterator[TokenDelta]:
        """New tokens of all sequences, one delta every few decode steps. Raises EngineError if the engine dies."""
        ...

    def load(self) -> EngineLoad: ...

    async def flush(self) -> None:
        """Makes every token drawn so far appear in `deltas` and draws no more (used before leaving)."""
        ...

    async def close(self) -> None: ...
