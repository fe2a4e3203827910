"""Environments that read and write text: the tokenizer and the chat template are kept here, and nowhere below.

Decides how an answer in text becomes the token ids that the model reads next. The conversation so far is never
encoded again (`protocol` says why): with a chat template the answer's message is rendered behind a stand-in of the
model's turn, and only what comes after that turn is encoded. Refuses to know what is answered; subclasses do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.environments.protocol import Observation, Turn
from penstock.errors import ConfigError, EnvironmentFault
from penstock.sample import Finish, Prompt

__all__ = ["Message", "Reply", "TextEnvironment", "TextTokenizer", "TurnTemplate"]

Message = Mapping[str, Any]

_SAID = "penstock stand-in for what was said"


class TextTokenizer(Protocol):
    """The part of a `transformers` tokenizer that environments need."""

    chat_template: Any
    all_special_ids: Sequence[int]

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool = ..., add_generation_prompt: bool = ...
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer in text. `messages` go through the chat template instead, where there are any."""

    text: str = ""
    done: bool = False
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Message] = ()


class TurnTemplate:
    """Text between two turns of the model, as token ids.

    Without a chat template (`chat_template` is never, or the tokenizer has none) text stands as it is. `role` is that
    of an answer's message where a template is used.
    """

    def __init__(self, tokenizer: TextTokenizer, chat_template: str = "auto", role: str = "user") -> None:
        """Raises ConfigError where the tokenizer can't do what is asked."""
        if chat_template not in ("auto", "never", "require"):
            raise ConfigError(f"chat_template is {chat_template!r}; it must be auto, never or require")
        if chat_template == "require" and not tokenizer.chat_template:
            raise ConfigError("chat_template is 'require', and the model's tokenizer has no chat template")
        self.tokenizer = tokenizer
        self.uses_chat_template = bool(tokenizer.chat_template) and chat_template != "never"
        self._role = role

    def said(self, turn: Turn) -> str:
        """A turn's text, without the special token that ended it."""
        token_ids = list(turn.token_ids)
        if turn.finish is Finish.STOP and token_ids[-1] in self.tokenizer.all_special_ids:
            token_ids.pop()
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def between(self, turn: Turn, answer: str | Sequence[Message]) -> list[int]:
        """Token ids from the end of `turn` to the beginning of the next one. Raises EnvironmentFault."""
        if self.uses_chat_template:
            text = self._rendered(turn, answer)
        elif isinstance(answer, str):
            text = answer
        else:
            text = "".join(str(message.get("content") or "") for message in answer)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _rendered(self, turn: Turn, answer: str | Sequence[Message]) -> str:
        told = [{"role": self._role, "content": answer}] if isinstance(answer, str) else [dict(one) for one in answer]
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}, *told]
        try:
            whole = str(self.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))
        # Templates are programs of their own, and raise what they like.
        except Exception as error:
            raise EnvironmentFault(f"the chat template refuses {told}: {type(error).__name__}: {error}") from error
        _, found, behind = whole.partition(_SAID)
        if not found:
            raise EnvironmentFault(
                "the chat template leaves out what the assistant said; conversations can't grow by it"
            )
        # The stop id that the model drew is there already.
        ended = self.tokenizer.decode([turn.token_ids[-1]], skip_special_tokens=False)
        return behind.removeprefix(ended) if turn.finish is Finish.STOP and ended else behind


class TextEnvironment:
    """Base of environments over text. A subclass has `begin` and `respond`, and `close` where its state needs one."""

    def __init__(self, tokenizer: Any, chat_template: str = "auto", role: str = "user") -> None:
        self.template = TurnTemplate(tokenizer, chat_template, role)

    async def begin(self, prompt: Prompt, seed: int) -> Any:
        """The state of a new conversation."""
        raise NotImplementedError

    async def respond(self, state: Any, said: str, turn: Turn) -> Reply:
        """The answer to what was `said`."""
        raise NotImplementedError

    async def reset(self, prompt: Prompt, seed: int) -> Any:
        return await self.begin(prompt, seed)

    async def step(self, state: Any, turn: Turn) -> Observation:
        reply = await self.respond(state, self.template.said(turn), turn)
        over = reply.done or turn.last
        token_ids = [] if over else self.template.between(turn, reply.messages or reply.text)
        return Observation(token_ids, over, reply.reward, reply.parts)

    async def close(self, state: Any) -> None:
        """Nothing is held by default."""
