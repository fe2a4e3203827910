"""What the adapters share: a reward function's settings, its scorer on a framework's event loop, and a sample's making.

Decides how a framework's words (messages, numpy scalars, OmegaConf) become Penstock's, and insists that somebody says
what a sample without a score counts as where the framework has no value for it. Knows no framework.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from penstock.errors import ConfigError, RewardError
from penstock.reward.functions import function_of, load_function
from penstock.reward.limits import declared
from penstock.reward.scorer import Scorer
from penstock.sample import Finish, Prompt, Sample, SampleId, Score, Unscored

__all__ = ["Rewards", "Settings", "plain", "sample_of", "settings_of", "text_of"]

ENVIRONMENT = "PENSTOCK_REWARD_"


@declared
class Settings:
    """A reward function and how it is called, as a framework's configuration names them. See `config.run` for the
    meaning of each."""

    function: str
    _: dataclasses.KW_ONLY
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mode: Literal["inline", "process"] = "inline"
    processes: Annotated[int, Field(ge=1)] = 2
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    concurrency: Annotated[int, Field(ge=1)] = 256
    unscored_value: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """What the framework is given for a sample that has no score. It has no default: nobody is scored silently."""

    @model_validator(mode="after")
    def _said(self) -> Settings:
        if self.unscored_value is None:
            raise ValueError(
                "'unscored_value' is not given, and this framework has no value for a sample without a score: say "
                "which number stands for it (the lowest score, or one that a later filter finds)"
            )
        return self

    def number_of(self, result: Score | Unscored) -> float:
        """What the framework is given."""
        assert self.unscored_value is not None
        return result.value if isinstance(result, Score) else self.unscored_value

    def rewards(self) -> Rewards:
        """Loads the function. Raises RewardError."""
        return Rewards(
            self.function,
            options=self.options,
            mode=self.mode,
            processes=self.processes,
            timeout_s=self.timeout_s,
            concurrency=self.concurrency,
        )


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Settings as given; those left out (or None) from the environment: `PENSTOCK_REWARD_FUNCTION`, ..._MODE and so on,
    ..._OPTIONS as a JSON object.

    Raises:
        ConfigError: no function, no `unscored_value`, an unknown key or an impossible value.
    """
    values = {name: plain(value) for name, value in given.items() if value is not None}
    for field in dataclasses.fields(Settings):
        told = os.environ.get(ENVIRONMENT + field.name.upper())
        if told is not None and field.name not in values:
            values[field.name] = _json(ENVIRONMENT + field.name.upper(), told) if field.name == "options" else told
    if "function" not in values:
        raise ConfigError(
            "no reward function is named: give 'function' ('package.module:function' or './my_reward.py:function') or "
            f"set {ENVIRONMENT}FUNCTION"
        )
    return Settings(values.pop("function"), **values)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}; it must be a JSON object: {error}") from None


class Rewards:
    """One reward function in a framework's process, with a scorer for each event loop that asks.

    Sync functions run on threads or, with mode `process`, in processes that are killed at the deadline: never on the
    framework's loop. Frameworks don't say when they are done: threads and processes end with this one.
    """

    def __init__(
        self,
        function: str | Callable[[Sample], Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str = "inline",
        processes: int = 2,
        timeout_s: float = 30.0,
        concurrency: int = 256,
    ) -> None:
        """Raises RewardError where the function can't be loaded, or can't be in this mode."""
        if isinstance(function, str) and mode == "process":
            self._function: Any = function
            self.name, self.is_async = function.rpartition(":")[2], False
        else:
            if not isinstance(function, str) and options:
                raise RewardError("options are for a function that is named; give a callable its own")
            self._function = load_function(function, options) if isinstance(function, str) else function_of(function)
            self.name = getattr(self._function.call, "__name__", type(self._function.call).__name__)
            self.is_async = self._function.is_async
        self._how: dict[str, Any] = {
            "mode": mode,
            "processes": processes,
            "timeout_s": timeout_s,
            "concurrency": concurrency,
        }
        if mode == "process":
            self._how["options"] = options
        self._scorers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Scorer] = weakref.WeakKeyDictionary()
        self._first: Scorer | None = self._made()  # what is wrong with the function or the mode shows here

    def _made(self) -> Scorer:
        return Scorer(self._function, **self._how)

    async def score(self, sample: Sample) -> Score | Unscored:
        """Scores one sample. Raises RewardError where no sample can be scored any more (`Scorer.score`)."""
        loop = asyncio.get_running_loop()
        if loop not in self._scorers:
            self._scorers[loop], self._first = self._first or self._made(), None
        return await self._scorers[loop].score(sample)

    async def score_all(self, samples: Sequence[Sample]) -> list[Score | Unscored]:
        """Scores samples at once, in their order."""
        return list(await asyncio.gather(*(self.score(sample) for sample in samples)))


def sample_of(
    prompt: str,
    response: str,
    row: Mapping[str, Any],
    source: str,
    identity: SampleId,
    *,
    prompt_ids: Sequence[int] = (),
    token_ids: Sequence[int] = (),
    logprobs: Sequence[float] | None = None,
    truncated: bool = False,
) -> Sample:
    """A framework's sample in Penstock's form. Log-probabilities that it doesn't give are NaN, never invented."""
    if logprobs is None or len(logprobs) != len(token_ids):
        logprobs = [float("nan")] * len(token_ids)
    return Sample(
        identity,
        Prompt(identity.prompt, prompt, list(prompt_ids), row, source),
        array("i", token_ids),
        array("f", logprobs),
        (),
        Finish.LENGTH if truncated else Finish.STOP,
        response,
    )


def plain(value: Any) -> Any:
    """A value without numpy, tensors or OmegaConf: what a row may hold, and what crosses to a process."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | tuple):
        return [plain(item) for item in value]
    return value


def text_of(said: Any) -> str:
    """The text of a prompt or completion: itself, or what its chat messages say, a blank line between two."""
    if isinstance(said, str):
        return said
    return "\n\n".join(_content(message.get("content")) for message in said)


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
