"""Environments of Prime Intellect's `verifiers` (0.1: `MultiTurnEnv`, `ToolEnv` and what derives from them).

There an environment drives the model: `rollout` asks a client for one response after another. Here the trainer drives.
So a rollout runs as a task whose client hands each request out and waits for the model's turn; nothing of an
environment is reached around, and its own stop conditions, tools and rubric hold.

Requests must grow: each begins with the messages of the one before and the model's answer, and what is behind them is
what the model is told. An environment that rewrites its history leaves the sample unscored, since tokens that were
drawn can't be taken back. Tool calls are read as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the form
of Hermes and Qwen; that tools exist is for the prompt to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.environments.protocol import Observation, Turn
from penstock.environments.text import Message, TurnTemplate
from penstock.errors import ConfigError, EnvironmentFault, MissingExtra
from penstock.sample import Finish, Prompt

__all__ = ["VerifiersEnvironment"]

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(slots=True)
class _Talk:
    """One rollout: what it asks and what it is answered."""

    requests: asyncio.Queue[list[Message]] = field(default_factory=lambda: asyncio.Queue(1))
    answers: asyncio.Queue[Any] = field(default_factory=lambda: asyncio.Queue(1))
    known: list[Message] = field(default_factory=list)
    """Messages of the latest request."""
    task: asyncio.Task[Any] | None = None


class VerifiersEnvironment:
    """`id` and `arguments`: of the environment, as `verifiers.load_environment` takes them; in Python, `environment` is
    one that is there. Rows have the columns of its data set: `prompt`, `answer`, `info`, `task`."""

    def __init__(
        self,
        tokenizer: Any,
        id: str = "",
        arguments: Mapping[str, Any] | None = None,
        environment: Any = None,
        chat_template: str = "auto",
    ) -> None:
        self._verifiers, self._types, self._client_class = _packages()
        if bool(id) == (environment is not None):
            raise ConfigError("give environment.options.id, the id of an environment of verifiers")
        self._environment = environment or self._verifiers.load_environment(id, **(arguments or {}))
        self._template = TurnTemplate(tokenizer, chat_template)

    async def reset(self, prompt: Prompt, seed: int) -> _Talk:
        talk = _Talk()
        row = prompt.row
        asked = {
            "prompt": row.get("prompt", prompt.text),
            "answer": row.get("answer", ""),
            "example_id": prompt.index,
            **{name: row[name] for name in ("info", "task") if row.get(name) is not None},
        }
        talk.task = asyncio.get_running_loop().create_task(self._play(asked, talk), name=f"verifiers {prompt.source}")
        first = await self._next(talk)
        if first is None:
            raise EnvironmentFault("the environment ended before the model said anything")
        talk.known = first
        return talk

    async def step(self, state: _Talk, turn: Turn) -> Observation:
        state.answers.put_nowait(self._response(self._template.said(turn), turn))
        asked = await self._next(state)
        while asked is not None and turn.last:
            # As for a prompt that has outgrown the context: the rollout ends, and its rubric judges what there is.
            state.answers.put_nowait(self._verifiers.OverlongPromptError("the sample's budget is used up"))
            asked = await self._next(state)
        if asked is None:
            return self._verdict(state)
        told = self._told(state, asked)
        return Observation(self._template.between(turn, told))

    async def close(self, state: _Talk) -> None:
        if state.task is not None and not state.task.done():
            state.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await state.task

    # ---- within

    async def _play(self, asked: Mapping[str, Any], talk: _Talk) -> Any:
        environment = self._environment
        state = await environment.rollout(asked, self._client_class(talk), "penstock", {})
        if state.get("error") is None:
            await environment.rubric.score_rollout(state)
        return state

    async def _next(self, talk: _Talk) -> list[Message] | None:
        """The rollout's next request, or None when it is over. Raises what ended it."""
        assert talk.task is not None
        request = asyncio.ensure_future(talk.requests.get())
        try:
            await asyncio.wait([request, talk.task], return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return request.result()
            talk.task.result()
            return None
        finally:
            request.cancel()

    def _told(self, talk: _Talk, asked: list[Message]) -> list[Message]:
        """What is new in a request. Raises EnvironmentFault where it does not continue the one before."""
        before = len(talk.known)
        if asked[:before] != talk.known or len(asked) <= before or asked[before].get("role") != "assistant":
            raise EnvironmentFault("the environment rewrote what was said before; a conversation can only grow")
        talk.known = asked
        told = asked[before + 1 :]
        if not told:
            raise EnvironmentFault("the environment asks for another turn and says nothing")
        return told

    def _response(self, said: str, turn: Turn) -> Any:
        types = self._types
        calls = [call for k, text in enumerate(CALL.findall(said)) if (call := self._call(text, turn.number, k))]
        cut = turn.finish is not Finish.STOP
        message = types.ResponseMessage(
            content=said,
            tool_calls=calls or None,
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            is_truncated=cut,
        )
        return types.Response(id=f"turn-{turn.number}", created=0, model="penstock", message=message)

    def _call(self, text: str, number: int, k: int) -> Any:
        """A tool call, or None for what is none: the environment sees it as the text that it is."""
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        if not isinstance(name, str):
            return None
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return self._types.ToolCall(id=f"call-{number}-{k}", name=name, arguments=arguments)

    def _verdict(self, talk: _Talk) -> Observation:
        assert talk.task is not None
        state = talk.task.result()
        if (error := state.get("error")) is not None:
            raise EnvironmentFault(f"the rollout failed: {type(error).__name__}: {error}")
        reward = state.get("reward")
        if reward is None:
            raise EnvironmentFault("the rubric gave no reward")
        metrics = (state.get("metrics") or {}).items()
        parts = {name: float(value) for name, value in metrics if isinstance(value, int | float)}
        return Observation(done=True, reward=float(reward), parts=parts)


def _packages() -> tuple[Any, Any, Any]:
    """verifiers, its types, and a class of clients that ask a `_Talk`."""
    try:
        import verifiers
        from verifiers import types
    except ImportError as error:
        if error.name == "verifiers":
            raise MissingExtra("verifiers", "verifiers", "an environment of verifiers") from error
        raise _unfit() from error
    try:
        from verifiers.clients import Client
    except ImportError as error:
        raise _unfit() from error

    class TrainerClient(Client):
        """Asks the trainer for the model's turn."""

        def __init__(self, talk: _Talk) -> None:
            super().__init__(None)
            self._talk = talk

        async def get_response(self, prompt: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            await self._talk.requests.put([_plain(message) for message in prompt])
            answer = await self._talk.answers.get()
            if isinstance(answer, BaseException):
                raise answer
            return answer

    # What it has to have and never uses: the other side is no service.
    for name in getattr(TrainerClient, "__abstractmethods__", ()):
        setattr(TrainerClient, name, None)
    TrainerClient.__abstractmethods__ = frozenset()
    return verifiers, types, TrainerClient


def _unfit() -> ConfigError:
    return ConfigError(
        "the installed verifiers has no MultiTurnEnv with clients of its own; install verifiers>=0.1.14,<0.2 "
        "(environments of its version 1 drive agents in sandboxes, which a trainer can't take turns with)"
    )


def _plain(message: Any) -> Message:
    """A message as chat templates take it."""
    plain = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise EnvironmentFault("the environment says something that is not text")
        plain["content"] = "".join(part["text"] for part in content)
    return plain
