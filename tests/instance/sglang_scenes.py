"""What is asked of a real SGLang server when it is recorded, and of the recording in tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from penstock.instance.dialect import Chunk, ServerFacts
from penstock.instance.engine import SequenceStart
from penstock.instance.sglang import SglangDialect
from penstock.wire import Sampling

MODEL = {"max_position_embeddings": 64, "tie_word_embeddings": True, "architectures": ["Qwen2ForCausalLM"]}
LIMITS = (8, 64)
"""Sequences at once and context, for the recorded server."""
PROMPT = [5, 9, 3, 77, 2]
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
STOP_PLACE = 4

Scene = Callable[[SglangDialect, aiohttp.ClientSession, str, Sequence[Path]], Awaitable[Any]]


async def stream(
    dialect: SglangDialect,
    http: aiohttp.ClientSession,
    url: str,
    request_id: str,
    sampling: Sampling = GREEDY,
    prompt: Sequence[int] = PROMPT,
    prefix: Sequence[int] = (),
    frame_steps: int = 4,
) -> list[Chunk]:
    dialect.frame_steps = frame_steps
    start = SequenceStart(lease=1, seed=2**64 - 7, prompt_ids=prompt, prefix_ids=prefix, sampling=sampling)
    return [chunk async for chunk in dialect.generate(http, url, request_id, start)]


def tokens_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def up(dialect: SglangDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> bool:
    return await dialect.is_up(http, url)


async def facts(dialect: SglangDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> ServerFacts:
    return await dialect.facts(http, url)


async def greedy(dialect: SglangDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> list[Chunk]:
    return await stream(dialect, http, url, "greedy")


async def moved(dialect: SglangDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> list[int]:
    """The greedy answer, whole and from its fifth token on."""
    whole = tokens_of(await stream(dialect, http, url, "whole"))
    rest = tokens_of(await stream(dialect, http, url, "rest", prefix=whole[:5]))
    assert whole[:5] + rest == whole
    return whole


async def stopped(
    dialect: SglangDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]
) -> tuple[list[int], list[Chunk]]:
    whole = tokens_of(await stream(dialect, http, url, "unstopped"))
    sampling = Sampling(max_new_tokens=12, temperature=0.0, stop_ids=(whole[STOP_PLACE], 100))
    return whole, await stream(dialect, http, url, "stopped", sampling)


async def sampled(
    dialect: SglangDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]
) -> list[Chunk]:
    sampling = Sampling(max_new_tokens=20, temperature=0.7, top_p=0.9, top_k=20)
    return await stream(dialect, http, url, "sampled", sampling)


async def too_long(
    dialect: SglangDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]
) -> list[Chunk]:
    return await stream(dialect, http, url, "too-long", prompt=[3] * 80)


async def ended(dialect: SglangDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> list[Chunk]:
    """A sequence aborted after its first tokens."""
    start = SequenceStart(lease=1, seed=1, prompt_ids=PROMPT, prefix_ids=[], sampling=Sampling(max_new_tokens=50))
    chunks: list[Chunk] = []
    dialect.frame_steps = 1
    async for chunk in dialect.generate(http, url, "ended", start):
        if not chunks:
            await dialect.abort(http, url, ["ended", "unknown"])
        chunks.append(chunk)
    return chunks


async def swapped(
    dialect: SglangDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]
) -> list[list[Chunk]]:
    """The greedy answer under version 1 (the second model) and under version 2 (the first one)."""
    answers = []
    for version, folder in ((1, folders[1]), (2, folders[0])):
        await dialect.load(http, url, folder, version)
        answers.append(await stream(dialect, http, url, f"version-{version}", frame_steps=1))
    return answers


async def figures(dialect: SglangDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> Any:
    return await dialect.figures(http, url)


async def not_swapped(dialect: SglangDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> None:
    await dialect.load(http, url, folders[0].parent / "third", 3)


SCENES: dict[str, Scene] = {
    scene.__name__: scene
    for scene in (up, facts, greedy, moved, stopped, sampled, too_long, ended, swapped, figures, not_swapped)
}
AS_IT_COMES = ["facts", "greedy", "ended"]
"""Of a server that nobody told to stream what is new, and to leave log-probabilities as they are."""
