"""What a provider's answer says about its limits: `Retry-After` and the rate-limit headers, parsed once, here.

Understands `retry-after` (seconds or an HTTP date), `retry-after-ms`, OpenAI's `x-ratelimit-{limit,remaining,reset}-
{requests,tokens}` with durations such as `6m0s`, and Anthropic's `anthropic-ratelimit-*` with RFC 3339 times. What
can't be parsed is left out, never guessed. Knows no clock: the wall time is passed in.
"""

from __future__ import annotations

import datetime
import email.utils
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Told", "ToldLimit", "duration_s", "retry_after_s", "told_limits"]

_UNITS_S = {"ms": 1e-3, "us": 1e-6, "µs": 1e-6, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|s|m|h|d)")
_LONGEST_S = 7 * 86400.0


class ToldLimit(NamedTuple):
    """`limit` units in all, `remaining` of them now, all of them back in `reset_s` (None where it isn't said)."""

    limit: float
    remaining: float
    reset_s: float | None


class Told(NamedTuple):
    requests: ToldLimit | None
    tokens: ToldLimit | None


def duration_s(text: str, wall_s: float) -> float | None:
    """Seconds that `text` means: a number, `6m0s`, an RFC 3339 time or an HTTP date; None if it is none of them."""
    text = text.strip()
    try:
        return _bounded(float(text))
    except ValueError:
        pass
    parts = _PART.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return _bounded(sum(float(number) * _UNITS_S[unit] for number, unit in parts))
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        try:
            when = email.utils.parsedate_to_datetime(text)
        except ValueError:
            return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return _bounded(max(0.0, when.timestamp() - wall_s))


def _bounded(seconds: float) -> float | None:
    return min(seconds, _LONGEST_S) if math.isfinite(seconds) and seconds >= 0 else None


def retry_after_s(headers: Mapping[str, str], wall_s: float) -> float | None:
    """How long the provider asks to wait; None where it doesn't say. Keys are lower-case or don't mind their case."""
    if (milliseconds := headers.get("retry-after-ms")) is not None:
        try:
            return _bounded(float(milliseconds) / 1000)
        except ValueError:
            pass
    after = headers.get("retry-after")
    return duration_s(after, wall_s) if after is not None else None


def told_limits(headers: Mapping[str, str], wall_s: float) -> Told | None:
    """Limits as the answer's headers tell them; None where there are none, which is found out by two look-ups."""
    if "x-ratelimit-limit-requests" in headers or "x-ratelimit-limit-tokens" in headers:
        prefix, order = "x-ratelimit", "{prefix}-{what}-{unit}"
    elif "anthropic-ratelimit-requests-limit" in headers or "anthropic-ratelimit-tokens-limit" in headers:
        prefix, order = "anthropic-ratelimit", "{prefix}-{unit}-{what}"
    else:
        return None
    return Told(_limit(headers, prefix, order, "requests", wall_s), _limit(headers, prefix, order, "tokens", wall_s))


def _limit(headers: Mapping[str, str], prefix: str, order: str, unit: str, wall_s: float) -> ToldLimit | None:
    def value(what: str) -> str | None:
        return headers.get(order.format(prefix=prefix, what=what, unit=unit))

    try:
        limit, remaining = float(value("limit") or ""), float(value("remaining") or "")
    except ValueError:
        return None
    if not (0 < limit < math.inf and 0 <= remaining <= limit):
        return None
    reset = value("reset")
    return ToldLimit(limit, remaining, duration_s(reset, wall_s) if reset is not None else None)
