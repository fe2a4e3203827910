"""The adapter for environments of verifiers by its contract; the real package is in `real_verifiers.py`.

The stand-in asks a client for one response after another, as the package's `MultiTurnEnv.rollout` does.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from verifiers_scenes import Letters, prompt_of, said, talk, text_of

from penstock.environments.verifiers_adapter import VerifiersEnvironment
from penstock.errors import ConfigError, EnvironmentFault, MissingExtra


class Message(SimpleNamespace):
    def model_dump(self, exclude_none: bool = False) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


class Overlong(Exception):
    """As the package's own, which ends a rollout and lets it be scored."""


class Client(ABC):
    def __init__(self, client: Any) -> None:
        self.client = client

    @abstractmethod
    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None) -> Any: ...

    @abstractmethod
    async def close(self) -> None: ...


def reward_of(state: dict[str, Any]) -> None:
    state["reward"] = 1.0 if state["said"] and state["said"][-1].content == state["answer"] else 0.0
    state["metrics"] = {"turns": len(state["said"]), "words": "not a number"}


@dataclass
class Echoes:
    """Says what it heard until it hears "stop"."""

    answer: Callable[[list[Any], Any], list[Any]] = lambda messages, said: [
        *messages,
        Message(role="assistant", content=said.content),
        Message(role="user", content=said.tool_calls[0].arguments if said.tool_calls else said.content),
    ]
    rates: Callable[[dict[str, Any]], None] = reward_of
    error: Exception | None = None

    @property
    def rubric(self) -> Any:
        async def score_rollout(state: dict[str, Any]) -> None:
            self.rates(state)

        return SimpleNamespace(score_rollout=score_rollout)

    async def rollout(self, asked: Any, client: Any, model: str, sampling_args: Any) -> dict[str, Any]:
        messages: list[Any] = [Message(**message) for message in asked["prompt"]]
        state: dict[str, Any] = {**asked, "said": [], "error": self.error}
        while self.error is None:
            try:
                response = await client.get_response(messages, model, sampling_args, tools=None)
            except Overlong:
                break
            state["said"].append(response.message)
            if response.message.content == "stop":
                break
            messages = self.answer(messages, response.message)
        return state


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package, clients, types = (ModuleType(name) for name in ("verifiers", "verifiers.clients", "verifiers.types"))
    clients.Client = Client  # type: ignore[attr-defined]
    for name in ("Response", "ResponseMessage", "ToolCall"):
        setattr(types, name, SimpleNamespace)
    package.types, package.clients, package.OverlongPromptError = types, clients, Overlong  # type: ignore[attr-defined]
    package.load_environment = lambda id, **arguments: Echoes() if id == "echoes" else None  # type: ignore[attr-defined]
    for module in (package, clients, types):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


async def test_a_rollout_asks_and_the_trainers_turns_answer() -> None:
    first, last = await talk(Echoes(), said("hello", 0), said("stop", 1), answer="stop")
    assert text_of(first) == "[user]hello$[assistant]"
    assert (first.done, last.done, last.reward, last.parts) == (False, True, 1.0, {"turns": 2.0})


async def test_the_last_turn_is_judged_though_the_environment_would_go_on() -> None:
    (last,) = await talk(Echoes(), said("hello", 0, last=True), answer="hello")
    assert (last.done, last.reward) == (True, 1.0)


async def test_calls_of_tools_are_read_and_what_is_none_stays_text() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    told, other, last = await talk(
        Echoes(), said(call, 0), said("<tool_call>{x</tool_call>", 1), said("stop", 2), answer=""
    )
    assert text_of(told) == '[user]{"x": 1}$[assistant]'
    assert text_of(other) == "[user]<tool_call>{x</tool_call>$[assistant]"
    assert last.done


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (lambda messages, said: messages[:0], "rewrote what was said before"),
        (lambda messages, said: [Message(role="user", content="other"), *messages, *messages], "rewrote"),
        (lambda messages, said: [*messages, Message(role="assistant", content="x")], "says nothing"),
        (
            lambda messages, said: [*messages, Message(role="user", content=[{"type": "image_url"}])],
            "something that is not text",
        ),
    ],
)
async def test_a_conversation_that_does_not_grow_is_a_fault(answer: Any, cause: str) -> None:
    with pytest.raises(EnvironmentFault, match=cause):
        await talk(Echoes(answer), said("hello", 0), answer="")


async def test_what_fails_inside_is_a_fault_and_no_zero() -> None:
    with pytest.raises(EnvironmentFault, match="ended before the model said anything"):
        await talk(Echoes(error=ValueError("no sandbox")), said("hello", 0))

    def no_reward(state: dict[str, Any]) -> None:
        state["reward"] = None

    with pytest.raises(EnvironmentFault, match="the rubric gave no reward"):
        await talk(Echoes(rates=no_reward), said("stop", 0))

    def fails(state: dict[str, Any]) -> None:
        raise AssertionError("group-level reward functions")

    with pytest.raises(AssertionError, match="group-level"):
        await talk(Echoes(rates=fails), said("stop", 0))


async def test_one_that_is_given_up_leaves_no_task() -> None:
    before = len(asyncio.all_tasks())
    adapter = VerifiersEnvironment(Letters(), id="echoes")
    state = await adapter.reset(prompt_of(answer=""), 7)
    await adapter.close(state)
    assert len(asyncio.all_tasks()) == before


def test_a_package_that_is_missing_or_another_one_is_named(
    stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"give environment\.options\.id"):
        VerifiersEnvironment(Letters())
    monkeypatch.setitem(sys.modules, "verifiers.clients", None)
    with pytest.raises(ConfigError, match="no MultiTurnEnv with clients of its own"):
        VerifiersEnvironment(Letters(), id="echoes")
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(MissingExtra, match=r"penstock\[verifiers\]"):
        VerifiersEnvironment(Letters(), id="echoes")
