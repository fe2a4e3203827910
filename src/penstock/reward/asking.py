"""What a caller may say beside the service's own parameters, and what a request is expected to cost.

Decides which values can be: one that can't would put the order of everybody's jobs out of joint. Knows no pool.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from penstock.errors import ConfigError, PoolError
from penstock.reward.transport import Request

__all__ = ["check_options", "estimated_tokens_of", "own_options"]


def check_options(
    priority: float,
    deadline_s: float | None,
    attempts: int | None,
    hedge_after_s: float | None,
    tokens: float | None,
) -> None:
    """Raises ConfigError for what would put a whole queue out of order, or means nothing."""
    for name, value, right, must in (
        ("priority", priority, lambda v: math.isfinite(v), "a finite number"),
        ("deadline_s", deadline_s, lambda v: not math.isnan(v), "a number of seconds"),
        ("attempts", attempts, lambda v: v >= 1 and isinstance(v, int), "a whole number from 1"),
        ("hedge_after_s", hedge_after_s, lambda v: v > 0, "above 0"),
        ("estimated_tokens", tokens, lambda v: v >= 0 and math.isfinite(v), "a finite number from 0"),
    ):
        if value is not None and not (isinstance(value, int | float) and right(value)):
            raise ConfigError(f"{name} = {value!r}: must be {must}")


OWN_OPTIONS = frozenset(("priority", "deadline_s", "estimated_tokens", "attempts", "hedge_after_s"))


def own_options(params: dict[str, Any]) -> dict[str, Any]:
    """The pool's own options, taken out of a call's parameters; the rest are the service's."""
    if OWN_OPTIONS.isdisjoint(params):
        return _NONE
    return {name: params.pop(name) for name in OWN_OPTIONS & params.keys()}


_NONE: dict[str, Any] = {}


def estimated_tokens_of(request: Request) -> float:
    """Tokens a request is expected to cost: a quarter of its bytes, and what it allows the answer to be."""
    if not request.encoded:
        try:
            request.encoded = msgspec.json.encode(request.body)
        except TypeError as error:
            raise PoolError(f"the request can't be written as JSON: {error}") from None
    body, tokens = request.body, float(len(request.encoded) // 4)
    answer, count = body.get("max_completion_tokens") or body.get("max_tokens"), body.get("n")
    if isinstance(answer, int | float) and answer > 0:
        tokens += answer * count if isinstance(count, int | float) and count > 1 else answer
    return tokens
