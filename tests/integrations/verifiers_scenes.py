"""Environments as `verifiers` has them, and talks with them that hold for the real package and for its stand-in."""

from __future__ import annotations

from array import array
from typing import Any

from penstock.environments import Observation, Turn
from penstock.environments.verifiers_adapter import VerifiersEnvironment
from penstock.sample import Finish, Prompt

EOS = 0


class Letters:
    """A tokenizer of characters, with a chat template of its own."""

    chat_template = "letters"
    all_special_ids = (EOS,)
    eos_token_id = EOS

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [EOS if letter == "$" else ord(letter) for letter in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join("$" if token == EOS else chr(token) for token in token_ids)

    def apply_chat_template(self, talk: Any, *, tokenize: bool = False, add_generation_prompt: bool = False) -> str:
        return "".join(f"[{each['role']}]{each['content']}$" for each in talk) + "[assistant]" * add_generation_prompt


def said(text: str, number: int, last: bool = False, cut: bool = False) -> Turn:
    ids = array("i", [*map(ord, text), *([] if cut else [EOS])])
    return Turn(number, ids, Finish.LENGTH if cut else Finish.STOP, 500, last)


def text_of(observation: Observation) -> str:
    return Letters().decode(observation.token_ids)


def prompt_of(**row: Any) -> Prompt:
    return Prompt(3, "", [1], {"prompt": [{"role": "user", "content": "guess"}], **row}, "rows:3")


async def talk(environment: Any, *turns: Turn, **row: Any) -> list[Observation]:
    """What an environment answers to these turns; it is closed at the end."""
    adapter = VerifiersEnvironment(Letters(), environment=environment)
    state = await adapter.reset(prompt_of(**row), 7)
    try:
        return [await adapter.step(state, turn) for turn in turns]
    finally:
        await adapter.close(state)
