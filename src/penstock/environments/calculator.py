"""A calculator as a tool: the model writes `<tool>3*4</tool>`, is told `<result>12</result>`, and goes on.

A turn without a call is the answer, and ends the conversation. Its reward is 1 where it is the row's answer, else 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.environments.arithmetic import ArithmeticRefused, calculate
from penstock.environments.protocol import Turn
from penstock.environments.text import Reply, TextEnvironment
from penstock.sample import Prompt

__all__ = ["Calculator"]

CALL = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)
MAX_CALLS = 8
"""Answered in one turn; what is left over is told so."""


@dataclass(slots=True)
class _Talk:
    row: Mapping[str, Any]
    calls: int = 0


class Calculator(TextEnvironment):
    """`answer_field`: of the row. With `needs_tool` an answer that no call came before is worth nothing."""

    def __init__(
        self,
        tokenizer: Any,
        answer_field: str = "answer",
        needs_tool: bool = False,
        chat_template: str = "auto",
        role: str = "user",
    ) -> None:
        super().__init__(tokenizer, chat_template, role)
        self._answer_field = answer_field
        self._needs_tool = needs_tool

    async def begin(self, prompt: Prompt, seed: int) -> _Talk:
        return _Talk(prompt.row)

    async def respond(self, state: _Talk, said: str, turn: Turn) -> Reply:
        calls = CALL.findall(said)
        if not calls:
            return self._judged(state, said)
        state.calls += len(calls)
        results = [f"<result>{_result(call)}</result>" for call in calls[:MAX_CALLS]]
        if len(calls) > MAX_CALLS:
            results.append(f"<result>error: more than {MAX_CALLS} calls</result>")
        return Reply("".join(results), parts={"tool_calls": float(len(calls))})

    def _judged(self, state: _Talk, said: str) -> Reply:
        right = said.strip() == str(state.row.get(self._answer_field, "")).strip()
        reward = float(right and (state.calls > 0 or not self._needs_tool))
        return Reply(done=True, reward=reward, parts={"right": float(right), "used_tool": float(state.calls > 0)})


def _result(call: str) -> str:
    try:
        return calculate(call)
    except ArithmeticRefused as error:
        return f"error: {error}"
