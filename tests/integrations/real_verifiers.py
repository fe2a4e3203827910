"""The adapter against the real package: `make test-verifiers`, in an environment with requirements-verifiers.txt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset
from verifiers_scenes import Letters, prompt_of, said, talk, text_of

from penstock.environments.verifiers_adapter import VerifiersEnvironment
from penstock.errors import EnvironmentFault

ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": "guess"}], "answer": "7"}])


def right(completion: Any, answer: str) -> float:
    return float(completion[-1].content.strip() == answer)


class Guess(vf.MultiTurnEnv):
    """Says higher or lower."""

    @vf.stop
    async def guessed(self, state: Any) -> bool:
        return (
            bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content.strip() == state["answer"]
        )

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        guess = int(messages[-1].content)
        if guess == 99:
            raise vf.Error("no such number")
        return [vf.UserMessage(content="higher" if guess < int(state["answer"]) else "lower")]


class Forgets(Guess):
    async def get_prompt_messages(self, state: Any) -> Any:
        return (await super().get_prompt_messages(state))[-1:]


def guess(kind: type[Guess] = Guess, **options: Any) -> Guess:
    return kind(dataset=ROWS, rubric=vf.Rubric(funcs=[right]), **options)


def test_a_conversation_grows_until_the_environments_own_stop_condition() -> None:
    first, second, last = asyncio.run(talk(guess(), said("3", 0), said("9", 1), said("7", 2), answer="7"))
    assert text_of(first) == "[user]higher$[assistant]"
    assert text_of(second) == "[user]lower$[assistant]"
    assert (last.done, last.reward) == (True, 1.0)
    assert last.parts["num_turns"] == 3.0


def test_max_turns_of_the_environment_hold() -> None:
    _, last = asyncio.run(talk(guess(max_turns=2), said("3", 0), said("4", 1), answer="7"))
    assert (last.done, last.reward) == (True, 0.0)


def test_the_last_turn_is_judged_though_the_environment_would_go_on() -> None:
    (last,) = asyncio.run(talk(guess(), said("3", 0, last=True, cut=True), answer="7"))
    assert (last.done, last.reward) == (True, 0.0)


def test_an_error_of_the_environment_is_no_zero() -> None:
    with pytest.raises(EnvironmentFault, match="no such number"):
        asyncio.run(talk(guess(), said("99", 0), answer="7"))


def test_an_environment_that_rewrites_its_history_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="rewrote what was said before"):
        asyncio.run(talk(guess(Forgets), said("3", 0), answer="7"))


def test_tools_are_called_and_answered() -> None:
    def add(x: int, y: int) -> int:
        """Adds."""
        return x + y

    tools = vf.ToolEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[right]), tools=[add], max_turns=4)
    call = '<tool_call>{"name": "add", "arguments": {"x": 3, "y": 4}}</tool_call>'
    told, last = asyncio.run(talk(tools, said(call, 0), said("7", 1), answer="7"))
    assert text_of(told) == "[tool]7$[assistant]"
    assert (last.done, last.reward) == (True, 1.0)
    assert last.parts["add_calls"] == 1.0


def test_a_conversation_that_is_given_up_leaves_no_task() -> None:
    async def give_up() -> int:
        adapter = VerifiersEnvironment(Letters(), environment=guess())
        state = await adapter.reset(prompt_of(answer="7"), 7)
        await adapter.close(state)
        return len(asyncio.all_tasks())

    assert asyncio.run(give_up()) == 1
