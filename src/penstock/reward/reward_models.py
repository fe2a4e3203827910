"""Reward models behind an inference server, as reward functions: vLLM `/classify` and `/score`, SGLang `/classify`.

Decides what text a model is shown, which of its numbers is the reward, and what an answer must look like; refuses to
know servers, limits and retries (`pool`) and what goes into one call (`batching`). An answer of another shape makes its
samples Unscored with the cause. Request and answer, as the servers have them:

- vLLM `POST /classify {model, input: [...]}` -> `{data: [{index, probs: [...]}]}`
- vLLM `POST /score {model, text_1: [...], text_2: [...]}` -> `{data: [{index, score}]}`
- SGLang `POST /classify {model, text: [...]}` -> `[{embedding: [...]}]`
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from penstock.errors import ConfigError, PoolError
from penstock.reward.batching import batched
from penstock.reward.functions import normalise
from penstock.reward.options import factory
from penstock.reward.pool import ComputePool
from penstock.reward.shown import Text, Unshowable, shown
from penstock.sample import Sample, Score, Unscored

__all__ = ["sglang_classify", "vllm_classify", "vllm_score"]

T = TypeVar("T")
Pool = ComputePool | str | os.PathLike[str]
Reward = Callable[[Sample], Awaitable[Score | Unscored]]
CHARACTERS_PER_TOKEN = 4


class _Class(msgspec.Struct):
    index: int
    probs: list[float]


class _Classes(msgspec.Struct):
    data: list[_Class]


class _Pair(msgspec.Struct):
    index: int
    score: float


class _Pairs(msgspec.Struct):
    data: list[_Pair]


class _Embedded(msgspec.Struct):
    embedding: list[float]


@factory
def vllm_classify(
    pool: Pool,
    model: str,
    *,
    text: Text = "{prompt}{response}",
    label: int | None = None,
    logits: bool = False,
    scale: float = 1.0,
    offset: float = 0.0,
    max_items: int = 32,
    max_tokens: int | None = None,
    wait_ms: float = 5.0,
    params: Mapping[str, Any] | None = None,
) -> Reward:
    """A sequence classifier behind vLLM; the reward is `scale * probability + offset`.

    Args:
        pool: a pool, or the TOML file that declares one (`judge` says whose it is).
        text: what the model reads: a template with {prompt}, {response} and {row.FIELD}, or a function of the sample.
            The server applies no chat template, so it must be written as the model was trained.
        label: which of the model's classes, from 0; needed unless it has one.
        logits: the class's logit instead (`use_activation: false`).
        max_items, max_tokens, wait_ms: what goes into one call; see `batching.batched`. Tokens are estimated.
        params: more of the request's fields.

    Raises:
        ConfigError: an impossible option or pool.
    """
    chosen = _pool(pool)
    body = {"model": model, **({"use_activation": False} if logits else {}), **(params or {})}

    async def call(texts: Sequence[str]) -> Sequence[list[float]]:
        value = (await chosen.request("/classify", {**body, "input": list(texts)})).value
        return [entry.probs for entry in _in_order(_typed(value, _Classes, "/classify").data, len(texts))]

    numbers = batched(max_items=max_items, max_tokens=max_tokens, wait_ms=wait_ms, tokens=_tokens)(call)
    return _reward(_classified(numbers, text, label), scale, offset)


@factory
def vllm_score(
    pool: Pool,
    model: str,
    *,
    text: Text = "{prompt}",
    answer: Text = "{response}",
    scale: float = 1.0,
    offset: float = 0.0,
    max_items: int = 32,
    max_tokens: int | None = None,
    wait_ms: float = 5.0,
    params: Mapping[str, Any] | None = None,
) -> Reward:
    """A cross-encoder behind vLLM, which scores `answer` for `text`; the reward is `scale * score + offset`.

    `{row.answer}` in `text` compares with the reference instead of the prompt. The other options are as in
    `vllm_classify`.

    Raises:
        ConfigError: an impossible option or pool.
    """
    chosen = _pool(pool)
    body = {"model": model, **(params or {})}

    async def call(pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
        asked = {**body, "text_1": [pair[0] for pair in pairs], "text_2": [pair[1] for pair in pairs]}
        value = (await chosen.request("/score", asked)).value
        return [entry.score for entry in _in_order(_typed(value, _Pairs, "/score").data, len(pairs))]

    number = batched(max_items=max_items, max_tokens=max_tokens, wait_ms=wait_ms, tokens=_tokens)(call)

    async def of_sample(sample: Sample) -> float:
        return await number((shown(text, sample), shown(answer, sample)))

    return _reward(of_sample, scale, offset)


@factory
def sglang_classify(
    pool: Pool,
    model: str,
    *,
    text: Text = "{prompt}{response}",
    label: int | None = None,
    scale: float = 1.0,
    offset: float = 0.0,
    max_items: int = 32,
    max_tokens: int | None = None,
    wait_ms: float = 5.0,
    params: Mapping[str, Any] | None = None,
) -> Reward:
    """A reward model behind SGLang (`--is-embedding`); the reward is `scale * logit + offset`.

    `label` says which of the model's outputs, from 0; needed unless it has one. The other options are as in
    `vllm_classify`.

    Raises:
        ConfigError: an impossible option or pool.
    """
    chosen = _pool(pool)
    body = {"model": model, **(params or {})}

    async def call(texts: Sequence[str]) -> Sequence[list[float]]:
        value = (await chosen.request("/classify", {**body, "text": list(texts)})).value
        return [entry.embedding for entry in _typed(value, list[_Embedded], "/classify")]

    numbers = batched(max_items=max_items, max_tokens=max_tokens, wait_ms=wait_ms, tokens=_tokens)(call)
    return _reward(_classified(numbers, text, label), scale, offset)


def _pool(pool: Pool) -> ComputePool:
    return pool if isinstance(pool, ComputePool) else ComputePool.from_toml(pool)


def _classified(
    numbers: Callable[[str], Awaitable[list[float]]], text: Text, label: int | None
) -> Callable[[Sample], Awaitable[float]]:
    """One of the numbers that a classifier has for what a sample is shown as."""

    async def of_sample(sample: Sample) -> float:
        return _one_of(await numbers(shown(text, sample)), label)

    return of_sample


def _reward(number: Callable[[Sample], Awaitable[float]], scale: float, offset: float) -> Reward:
    if scale == 0:
        raise ConfigError("a reward model with scale = 0 gives every sample the same reward")

    async def reward(sample: Sample) -> Score | Unscored:
        try:
            raw = await number(sample)
        except Unshowable as error:
            return Unscored(f"reward model: {error}")
        except PoolError as error:
            return Unscored(f"reward model: {type(error).__name__}: {error}")
        return normalise(Score(scale * raw + offset, {"raw": raw}))

    return reward


def _typed(value: Any, kind: type[T], path: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise PoolError(f"the answer from {path} has another shape than was asked for: {error}") from None


def _in_order(entries: list[Any], count: int) -> list[Any]:
    """The entries by their index, each exactly once: a number is never given to another sample."""
    ordered = sorted(entries, key=lambda entry: entry.index)
    if [entry.index for entry in ordered] != list(range(count)):
        raise PoolError(f"of {count} entries asked for came {[entry.index for entry in ordered][:10]}")
    return ordered


def _one_of(numbers: list[float], label: int | None) -> float:
    if label is None:
        if len(numbers) != 1:
            raise PoolError(f"the model has {len(numbers)} outputs; say with label= which one is the reward")
        return numbers[0]
    if not 0 <= label < len(numbers):
        raise PoolError(f"label = {label}, and the model has {len(numbers)} outputs")
    return numbers[label]


def _tokens(item: str | tuple[str, ...]) -> float:
    texts = (item,) if isinstance(item, str) else item
    return sum(map(len, texts)) / CHARACTERS_PER_TOKEN
