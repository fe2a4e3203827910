"""A language model as a reward function: a rubric goes out by way of the pool, a checked verdict comes back.

Decides how a verdict is asked for (structured output, or words where the service takes no schema), when it is asked
for once more, and what several votes make. Refuses to know what the question says or what counts as an answer
(`rubric`) and where it is sent (`pool`). A verdict that is missing or can't be read makes its sample Unscored with the
cause, never 0.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec

from penstock.errors import ConfigError, PoolError
from penstock.reward.failures import JobFailed
from penstock.reward.options import factory
from penstock.reward.pool import ComputePool
from penstock.reward.rubric import Criterion, Rubric, Unreadable, load_rubric
from penstock.sample import Sample, Score, Unscored

__all__ = ["Criterion", "Rubric", "judge", "load_rubric"]

REFUSES_SCHEMA = (400, 404, 415, 422, 501)
"""What services answer that don't take `response_format`. Any other fault is the same without it."""
OWN = ("model", "messages", "n", "stream", "response_format")


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


@factory
def judge(
    pool: ComputePool | str | os.PathLike[str],
    model: str,
    rubric: Rubric | str | os.PathLike[str],
    *,
    votes: int = 1,
    temperature: float = 0.0,
    structured: Literal["auto", "always", "never"] = "auto",
    params: Mapping[str, Any] | None = None,
) -> Callable[[Sample], Awaitable[Score | Unscored]]:
    """An async reward function that asks a language model for grades.

    Args:
        pool: a pool, or the TOML file that declares one. A pool made here belongs to the function, one for each
            process; where several processes judge, let them share `penstock gateway`.
        rubric: a rubric, or the TOML file that holds one.
        votes: verdicts asked for at once, each with a `seed` of its own; each criterion's median counts. The sample is
            unscored unless more than half of them come. With temperature 0 they hardly differ.
        structured: `always` sends the rubric's schema as `response_format` and takes nothing but the object itself;
            `never` asks in words and looks for the object in the answer; `auto` sends the schema until the service
            refuses it, and looks for the object.
        params: more of the chat API's parameters (`max_tokens`, ...) and of the pool's (`priority`, `deadline_s`, ...).

    An answer that can't be read is asked for once more, with what was wrong with it. The score is in 0..1; its parts
    are the grades.

    Raises:
        ConfigError: an impossible option, pool or rubric.
    """
    if votes < 1 or temperature < 0 or structured not in ("auto", "always", "never"):
        raise ConfigError(
            f"judge: votes = {votes} must be at least 1, temperature = {temperature} at least 0, and structured = "
            f"'{structured}' one of auto, always, never"
        )
    if wrong := sorted(set(OWN) & (params or {}).keys()):
        raise ConfigError(f"judge: '{wrong[0]}' is the judge's own to set")
    pool = pool if isinstance(pool, ComputePool) else ComputePool.from_toml(pool)
    rubric = rubric if isinstance(rubric, Rubric) else load_rubric(rubric)
    body = {"model": model, "temperature": temperature, **(params or {})}
    asker = _Asker(pool, rubric, body, structured)

    async def judged(sample: Sample) -> Score | Unscored:
        try:
            messages = rubric.messages(sample)
        except Unreadable as error:
            return Unscored(f"judge: {error}")
        seeds: list[dict[str, Any]] = [{}] if votes == 1 else [{"seed": seed} for seed in range(votes)]
        verdicts = await asyncio.gather(*(asker.ask(messages, seed) for seed in seeds))
        return _outcome(rubric, verdicts)

    return judged


def _outcome(rubric: Rubric, verdicts: list[dict[str, int] | str]) -> Score | Unscored:
    """What the votes make together; a vote is its grades, or the cause why there are none."""
    came = [verdict for verdict in verdicts if not isinstance(verdict, str)]
    if 2 * len(came) <= len(verdicts):
        causes = list(dict.fromkeys(verdict for verdict in verdicts if isinstance(verdict, str)))
        count = f"{len(verdicts) - len(came)} of {len(verdicts)} votes missing: " if len(verdicts) > 1 else ""
        return Unscored(f"judge: {count}{'; '.join(causes)}")
    grades: Mapping[str, float] = {
        c.name: float(statistics.median(verdict[c.name] for verdict in came)) for c in rubric.criteria
    }
    score = rubric.score(grades)
    return Score(score.value, {**score.parts, "votes": float(len(came))}) if len(verdicts) > 1 else score


class _Asker:
    """Gets one verdict at a time. Remembers whether the service takes a schema."""

    def __init__(self, pool: ComputePool, rubric: Rubric, body: dict[str, Any], structured: str) -> None:
        self._pool = pool
        self._rubric = rubric
        self._body = body
        self._structured = structured
        self._schema = structured != "never"

    async def ask(self, messages: list[dict[str, str]], seed: dict[str, Any]) -> dict[str, int] | str:
        """The grades, or the cause why there are none."""
        cause = ""
        for _ in range(2):
            text = ""
            try:
                text = _said(await self._answer(messages, seed))
                return self._rubric.read(text) if self._structured == "always" else self._rubric.find(text)
            except PoolError as error:
                return f"{type(error).__name__}: {error}"
            except Unreadable as error:
                cause = f"no verdict in the answer: {error}"
                if text:  # shown its fault, a model at temperature 0 doesn't repeat it
                    fault = f"That is no verdict: {error}\n\n{self._rubric.asking()}"
                    said = {"role": "assistant", "content": text}
                    messages = [*messages, said, {"role": "user", "content": fault}]
        return cause

    async def _answer(self, messages: list[dict[str, str]], seed: dict[str, Any]) -> Any:
        """The service's answer to the question, with the schema if the service takes one."""
        if self._schema:
            try:
                form = self._rubric.response_format()
                return await self._pool.chat(messages=messages, response_format=form, **self._body, **seed)
            except JobFailed as error:
                if self._structured == "always" or error.status not in REFUSES_SCHEMA:
                    raise
        value = await self._pool.chat(messages=messages, **self._body, **seed)
        self._schema = False  # answered without the schema and refused with it: it was the schema
        return value


def _said(value: Any) -> str:
    """The text of a chat answer.

    Raises:
        Unreadable: there is none, or not all of it.
    """
    try:
        answer = msgspec.convert(value, _Answer)
    except msgspec.ValidationError as error:
        raise Unreadable(f"the service's answer is no chat completion: {error}") from None
    if not answer.choices:
        raise Unreadable("the service's answer has no choices")
    choice = answer.choices[0]
    if choice.message.refusal:
        raise Unreadable(f"the model refused: {choice.message.refusal}")
    if not choice.message.content:
        raise Unreadable(f"the model said nothing (finish_reason {choice.finish_reason})")
    if choice.finish_reason == "length":
        raise Unreadable("the answer was cut off; raise max_tokens")
    return choice.message.content
