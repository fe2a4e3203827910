"""Mathematical answers, compared by what they mean: `1/2`, `0.5` and `\\frac{1}{2}` are one answer.

Decides by `math-verify`, without its own time-outs: they rest on SIGALRM, which only a main thread can use, and
elsewhere make every answer wrong. A comparison can take very long, and holds the interpreter meanwhile; in mode
`process` it is killed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from penstock.errors import MissingExtra, RewardError
from penstock.reward.functions import describe_exception
from penstock.reward.options import factory
from penstock.sample import Sample, Score, Unscored

__all__ = ["math_answer"]


@factory
def math_answer(*, field: str = "answer", decimals: int = 6) -> Callable[[Sample], Score | Unscored]:
    """1 where the response's final answer equals the row's `field` as mathematics, else 0.

    The final answer is what stands in `\\boxed{}`, else the last expression. The field is a number, an expression,
    LaTeX with or without dollars, or a text that ends in `#### 42`. Numbers are equal to `decimals` decimals. Part
    `parsed`: 0 where the response holds no answer that can be read (which scores 0). A field that can't be read, and
    a comparison that fails, leave the sample unscored.

    Raises:
        MissingExtra: math-verify is not installed.
        RewardError: negative `decimals`.
    """
    if decimals < 0:
        raise RewardError(f"math_answer: decimals = {decimals}; it must be 0 or more")
    library = _math_verify()

    def verify(sample: Sample) -> Score | Unscored:
        gold = _gold(library, sample.row.get(field))
        if not gold:
            given = repr(sample.row.get(field))[:200]
            return Unscored(f"the row of {sample.prompt.source}: '{field}' can't be read as an answer: {given}")
        answer = library.parse(sample.response, parsing_timeout=None)
        if not answer:
            return Score(0.0, {"parsed": 0.0})
        try:
            right = library.verify(gold, answer, float_rounding=decimals, timeout_seconds=None, raise_on_error=True)
        except Exception as error:  # noqa: BLE001 - sympy may raise anything; one reading of the answer may still do
            if not library.verify(gold, answer, float_rounding=decimals, timeout_seconds=None):
                return Unscored(f"the comparison failed: {describe_exception(error)}")
            right = True
        return Score(float(right), {"parsed": 1.0})

    return verify


def _gold(library: Any, value: object) -> list[Any]:
    """Readings of a row's answer; none where there is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return []
    text = str(value).rpartition("####")[2].strip()
    if not text:
        return []
    if "$" not in text and "\\boxed" not in text:
        with contextlib.suppress(RecursionError):
            if found := library.parse(f"\\boxed{{{text}}}", parsing_timeout=None):
                return found
    return library.parse(text, parsing_timeout=None)


def _math_verify() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise MissingExtra("math-verify", "math", "comparing mathematical answers") from error
    # It warns that its time-outs are off: that is what is wanted.
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify
