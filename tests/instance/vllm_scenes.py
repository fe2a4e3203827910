"""What is asked of a vLLM server in the recording, by name: the recorder asks it, and the tests over the recording."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from penstock.instance.engine import SequenceStart
from penstock.instance.vllm import VllmDialect
from penstock.sample import Finish
from penstock.wire import Sampling

MODEL = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 256}
LIMITS = (8, 256)
"""Sequences at once, and context."""
PROMPT = [5, 6, 7, 8]
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
SAMPLED = Sampling(max_new_tokens=12, temperature=0.7, top_p=0.9, top_k=10)
LONG = Sampling(max_new_tokens=150)
Heard = dict[str, Any]
Scene = Callable[[VllmDialect, aiohttp.ClientSession, str, Sequence[Path]], Awaitable[Any]]


async def hear(
    dialect: VllmDialect,
    http: aiohttp.ClientSession,
    url: str,
    name: str,
    sampling: Sampling,
    prefix: Sequence[int] = (),
    abort: bool = False,
) -> Heard:
    """A whole answer. With `abort` it is aborted at its first tokens."""
    start = SequenceStart(lease=1, seed=7, prompt_ids=PROMPT, prefix_ids=prefix, sampling=sampling)
    heard: Heard = {"ids": [], "logprobs": [], "finish": Finish.RUNNING, "aborted": False, "version": "", "chunks": 0}
    async for chunk in dialect.generate(http, url, name, start):
        heard["ids"] += chunk.token_ids
        heard["logprobs"] += chunk.logprobs
        heard["chunks"] += 1
        heard["finish"], heard["aborted"], heard["version"] = chunk.finish, chunk.aborted, chunk.weight_version
        heard["cause"] = chunk.cause
        if abort and heard["chunks"] == 1:
            await dialect.abort(http, url, [name])
    return heard


async def facts(dialect: VllmDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> Any:
    return await dialect.facts(http, url)


async def greedy(dialect: VllmDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> Heard:
    return await hear(dialect, http, url, "greedy", GREEDY)


async def resumed(dialect: VllmDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> Heard:
    whole = await hear(dialect, http, url, "whole", GREEDY)
    rest = await hear(dialect, http, url, "rest", GREEDY, prefix=whole["ids"][:5])
    return {"whole": whole["ids"], "rest": rest["ids"]}


async def sampled(dialect: VllmDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> Heard:
    return await hear(dialect, http, url, "sampled", SAMPLED)


async def stopped(dialect: VllmDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> Heard:
    whole = await hear(dialect, http, url, "unstopped", GREEDY)
    sampling = Sampling(max_new_tokens=12, temperature=0.0, stop_ids=(whole["ids"][3],))
    return {"whole": whole["ids"], **await hear(dialect, http, url, "stopped", sampling)}


async def aborted(dialect: VllmDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> Heard:
    return await hear(dialect, http, url, "aborted", LONG, abort=True)


async def refused(dialect: VllmDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> Heard:
    return await hear(dialect, http, url, "too-long", GREEDY, prefix=[0] * 300)


async def swapped(dialect: VllmDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> Heard:
    before = await hear(dialect, http, url, "before", GREEDY)
    await dialect.load(http, url, folders[1], 4)
    return {"before": before["ids"], **await hear(dialect, http, url, "after", GREEDY)}


async def figures(dialect: VllmDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> Any:
    return await dialect.figures(http, url)


async def missing_weights(dialect: VllmDialect, http: aiohttp.ClientSession, url: str, folders: Sequence[Path]) -> None:
    """Raises EngineError."""
    await dialect.load(http, url, folders[1].parent / "none", 5)


SCENES: dict[str, Scene] = {
    scene.__name__: scene
    for scene in (facts, greedy, resumed, sampled, stopped, aborted, refused, swapped, figures, missing_weights)
}
