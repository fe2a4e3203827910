"""Tasks of reasoning-gym with more than one attempt: a wrong answer is told so, and may be put right.

Rows are those of a source of kind `reasoning_gym`; each names its task, whose own scorer judges every attempt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.environments.protocol import Turn
from penstock.environments.text import Reply, TextEnvironment
from penstock.errors import EnvironmentFault, MissingExtra
from penstock.sample import Prompt

__all__ = ["Attempts"]

SCORED_AS_RIGHT = 0.99
"""A scorer's value from which on an attempt counts as right."""


class Attempts(TextEnvironment):
    """`attempts` bounds the turns, beside `environment.max_turns`. The reward is the last attempt's score, times
    `discount` for each attempt before it: later is better than never, and worse than at once. `feedback` is what a
    wrong answer hears; "{attempts_left}" in it is filled in.
    """

    def __init__(
        self,
        tokenizer: Any,
        attempts: int = 3,
        discount: float = 0.5,
        feedback: str = "That is wrong. Try again.",
        chat_template: str = "auto",
        role: str = "user",
    ) -> None:
        super().__init__(tokenizer, chat_template, role)
        if attempts < 1 or not 0 < discount <= 1:
            raise EnvironmentFault(f"attempts={attempts}, discount={discount}: at least 1, and above 0 to 1")
        self._attempts = attempts
        self._discount = discount
        self._feedback = feedback
        try:
            import reasoning_gym
        except ImportError as error:
            raise MissingExtra("reasoning-gym", "train", "an environment of reasoning-gym tasks") from error
        self._create: Callable[..., Any] = reasoning_gym.create_dataset
        self._scorers: dict[str, Callable[..., float]] = {}

    async def begin(self, prompt: Prompt, seed: int) -> Mapping[str, Any]:
        return prompt.row

    async def respond(self, state: Mapping[str, Any], said: str, turn: Turn) -> Reply:
        score = await asyncio.to_thread(self._score, state, said.strip())
        right = score >= SCORED_AS_RIGHT
        attempts_left = self._attempts - turn.number - 1
        if not right and attempts_left > 0 and not turn.last:
            told = self._feedback.replace("{attempts_left}", str(attempts_left))
            return Reply(told, parts={"wrong_attempts": 1.0})
        reward = score * self._discount**turn.number
        return Reply(done=True, reward=reward, parts={"right": float(right), "wrong_attempts": float(not right)})

    def _score(self, row: Mapping[str, Any], answer: str) -> float:
        try:
            task = row["metadata"]["source_dataset"]
        except (KeyError, TypeError) as error:
            raise EnvironmentFault(f"the row is of no reasoning-gym task: no {error} in it") from error
        options = row.get("task_options", {})
        # A task's settings are in how it scores.
        name = f"{task} {json.dumps(options, sort_keys=True)}"
        if name not in self._scorers:
            self._scorers[name] = self._create(task, size=1, seed=0, **options).score_answer
        return float(self._scorers[name](answer, row))
