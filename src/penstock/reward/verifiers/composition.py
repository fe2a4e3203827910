"""Verifiers made of verifiers: of a part of the answer, and several with weights.

Decide what each part gets to see and how parts add up; what is right is the parts' business. A part is named by its
import path with options, as in TOML, or given as a function.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from penstock.errors import RewardError
from penstock.reward.composed import compose
from penstock.reward.functions import load_function, normalise
from penstock.reward.options import factory
from penstock.sample import Sample, Score, Unscored

__all__ = ["Part", "weighted", "within_tags"]

Verifier = Callable[[Sample], Any]


class Part(BaseModel):
    """One part of a weighted sum."""

    model_config = ConfigDict(extra="forbid")

    function: str
    """`package.module:function` or `./file.py:function`."""
    weight: float = 1.0
    name: str = ""
    """Under which its value is shown; the function's own name where none is given."""
    options: dict[str, Any] = {}


@factory
def weighted(parts: Sequence[Part]) -> Callable[[Sample], Awaitable[Score | Unscored]]:
    """The weighted sum of several verifiers, which run at once; their values and parts are shown under their names.

    One part that is unscored leaves the sample unscored. From Python, `compose` takes the functions themselves.

    Raises:
        RewardError: no parts, two of one name, or one that can't be loaded.
    """
    named = {}
    for part in parts:
        loaded = load_function(part.function, part.options)
        name = part.name or part.function.rpartition(":")[2].rpartition(".")[2]
        if name in named:
            raise RewardError(f"weighted has two parts called '{name}'; give one of them a name")
        named[name] = _named(name, loaded.call, loaded.is_async)
    if not named:
        raise RewardError("weighted needs at least one part")
    weights = {name: part.weight for name, part in zip(named, parts, strict=True)}
    return compose(*named.values(), weights=weights)


def _named(name: str, call: Verifier, is_async: bool) -> Verifier:
    def verify(sample: Sample) -> Any:
        return call(sample)

    async def verify_async(sample: Sample) -> Any:
        return await call(sample)

    chosen = verify_async if is_async else verify
    chosen.__name__ = name
    return chosen


@factory
def within_tags(
    verifier: str | Callable[..., Any],
    *,
    tag: str = "answer",
    options: dict[str, Any] | None = None,
    missing: Literal["zero", "unscored"] = "zero",
) -> Verifier:
    """Another verifier, of what stands in the last `<answer>…</answer>` alone. Part `tagged`: 1 where that is there.

    Without it the sample scores 0, or is unscored where `missing` says so. The rest of the sample (tokens, row) stays
    as it is.

    Raises:
        RewardError: the verifier can't be loaded.
    """
    if isinstance(verifier, str):
        loaded = load_function(verifier, options)
        call, is_async = loaded.call, loaded.is_async
    else:
        call, is_async = verifier, inspect.iscoroutinefunction(verifier)
    absent = Unscored(f"the response has no <{tag}>…</{tag}>") if missing == "unscored" else Score(0.0, {"tagged": 0.0})

    def verify(sample: Sample) -> Any:
        text = _last_within(sample.response, tag)
        if text is None:
            return absent
        return _tagged(call(dataclasses.replace(sample, response=text)))

    async def verify_async(sample: Sample) -> Any:
        text = _last_within(sample.response, tag)
        if text is None:
            return absent
        return _tagged(await call(dataclasses.replace(sample, response=text)))

    return verify_async if is_async else verify


def _last_within(text: str, tag: str) -> str | None:
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if closing and opening else None


def _tagged(result: object) -> object:
    if inspect.isawaitable(result):
        return result  # a plain function that hands back a coroutine: whoever awaits it gets its result as it is
    result = normalise(result)
    return Score(result.value, {"tagged": 1.0, **result.parts}) if isinstance(result, Score) else result
