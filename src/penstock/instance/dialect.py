"""What an agent has to know of one kind of engine server: how to start it, speak to it and give it weights.

The seam between `served.ServedEngine`, which decides what is asked when and gathers deltas, and a server that speaks
HTTP on this machine. A dialect keeps no state about sequences, starts no task and has no clock: it turns calls into
requests and answers into values. It refuses to know leases, samples and the manager.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import aiohttp

from penstock.instance.engine import SequenceStart
from penstock.sample import Finish

__all__ = ["Chunk", "Dialect", "ServerFacts"]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a running server says of itself."""

    software: str
    """Name and version, such as `vllm 0.32.0`."""
    model: str
    """The model's folder or name, as the server holds it."""
    vocab_size: int
    """0 where the server does not say."""
    max_context_tokens: int
    max_running: int
    """0 where the server does not say."""
    device: str = ""
    model_type: str = ""
    """As in config.json; empty where the server does not say."""
    quantization: str = ""
    """Of the folder that it was started on, as `model_folder.quantization_in` has it; empty: its weights are floats."""
    tensor_parallel: int = 0
    """Ranks that share the model; 0 where the server does not say."""


@dataclass(slots=True)
class Chunk:
    """New output tokens of one sequence, each with its log-probability under the model itself (temperature 1)."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = Finish.RUNNING
    cause: str = ""
    """Why, where `finish` is FAILED."""
    aborted: bool = False
    """The server ended it unasked or at our word, with its answer incomplete: it may be started again from here."""
    weight_version: str = ""
    """What the server says the tokens were drawn with (the number given to `load`, as text); empty where it doesn't."""


class Dialect(Protocol):
    """One kind of server. `base_url` has no path and no trailing slash.

    Every method raises EngineError, with what the server said, for an answer that is refused or makes no sense, and
    lets aiohttp's and the system's connection errors through.
    """

    frame_steps: int
    """Tokens of a sequence that the server may gather in one chunk, where it can be told; set before it starts."""

    @property
    def kind(self) -> str:
        """`vllm` or `sglang`."""
        ...

    unties_embeddings: bool
    """Whether the weights' folders hold an output embedding even where the model shares the input's."""

    def command(self, model_folder: Path, host: str, port: int, options: Mapping[str, str]) -> list[str]:
        """The server's command line. `options` are the engine's own, without dashes; an empty value is a flag."""
        ...

    def limits(self, max_running: int, max_context_tokens: int) -> dict[str, str]:
        """The options of `command` that set these; 0 leaves the server's own."""
        ...

    def environment(self) -> dict[str, str]:
        """What the server's process needs in its environment, beside the agent's own."""
        ...

    async def is_up(self, http: aiohttp.ClientSession, base_url: str) -> bool:
        """Whether it answers and can generate; False while it starts."""
        ...

    async def facts(self, http: aiohttp.ClientSession, base_url: str) -> ServerFacts: ...

    async def figures(self, http: aiohttp.ClientSession, base_url: str) -> tuple[float, ...]:
        """What the server counts and measures of its work, where some of it changes with every chunk of a prefill.

        Empty where it does not say. Answered in time even while the server is busy, or not at all.
        """
        ...

    def generate(
        self, http: aiohttp.ClientSession, base_url: str, request_id: str, sequence: SequenceStart
    ) -> AsyncIterator[Chunk]:
        """Streams one sequence. Ends after a chunk that is not RUNNING or that is aborted.

        A request that the server refuses (HTTP 400) ends in a FAILED chunk; EngineError means that the server itself
        can't be relied on, as for a number of log-probabilities that is not that of the ids. Ids outside the
        vocabulary and log-probabilities that are NaN or above 0 are found by whoever reads the chunks.
        """
        ...

    async def abort(self, http: aiohttp.ClientSession, base_url: str, request_ids: Sequence[str]) -> None:
        """Ends sequences; unknown ones are ignored."""
        ...

    async def weight_version(self, http: aiohttp.ClientSession, base_url: str) -> str:
        """What the server says that it serves now: the number last given to `load`, as text, or another's word."""
        ...

    async def load(self, http: aiohttp.ClientSession, base_url: str, folder: Path, version: int) -> None:
        """Swaps in the weights of a Hugging Face folder while nothing runs; KV and prefix caches are dropped.

        Returns once the server serves them and says so, where it has a way to say so.
        """
        ...
