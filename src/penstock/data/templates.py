"""Question to token ids: the chat template where the tokenizer has one, plain text where it has not.

Decides which of the two applies and where the system prompt goes. Knows no tokenizer by name: anything with the few
methods of `Tokenizer` will do, and `transformers`' fast tokenizers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.data.sources import Message
from penstock.errors import DataError

__all__ = ["PromptTemplate", "Tokenizer", "question_text"]


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that prompts need."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool = ..., add_generation_prompt: bool = ...
    ) -> Any: ...


class PromptTemplate:
    """Turns questions into what the model reads.

    With a chat template, the system prompt and the question become messages, the template adds the tokens that open
    the assistant's turn, and no special tokens are added besides those it writes. Without one, the question is
    encoded as it stands, with the special tokens that the tokenizer adds by its own rule.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: str = "auto", system_prompt: str = "") -> None:
        """`chat_template` is auto, never or require. Raises DataError where the tokenizer can't do what is asked."""
        if chat_template not in ("auto", "never", "require"):
            raise DataError(f"data.chat_template is '{chat_template}'; it must be auto, never or require")
        has_template = bool(tokenizer.chat_template)
        if chat_template == "require" and not has_template:
            raise DataError("data.chat_template is 'require', and the model's tokenizer has no chat template")
        self.uses_chat_template = has_template and chat_template != "never"
        if system_prompt and not self.uses_chat_template:
            reason = "data.chat_template is 'never'" if has_template else "the model's tokenizer has no chat template"
            raise DataError(f"data.system_prompt can't be used: {reason}; put it into the questions instead")
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt

    def render(self, question: str | Sequence[Message], where: str) -> tuple[str, list[int]]:
        """The text that the model reads, and its token ids (at least one). Raises DataError that names `where`."""
        if self.uses_chat_template:
            text = self._chat_text(question, where)
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        elif isinstance(question, str):
            text = question
            token_ids = self._tokenizer.encode(text, add_special_tokens=True)
        else:
            raise DataError(
                f"{where}: the prompt is a list of chat messages, and no chat template applies "
                "(data.chat_template is 'never', or the tokenizer has none)"
            )
        if not token_ids:
            raise DataError(f"{where}: the prompt has no tokens")
        return text, list(token_ids)

    def _chat_text(self, question: str | Sequence[Message], where: str) -> str:
        messages = [dict(message) for message in _as_messages(question)]
        if self._system_prompt:
            if messages[0]["role"] == "system":
                raise DataError(f"{where}: the prompt has a system message of its own, and data.system_prompt is set")
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            raise DataError(
                f"{where}: the chat template refuses the prompt: {type(error).__name__}: {error}"
            ) from error


def question_text(question: str | Sequence[Message]) -> str:
    """The question alone, to compare two of them: without system messages and without white space around it."""
    messages = [message for message in _as_messages(question) if message["role"] != "system"]
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"].strip()
    return "\n".join(f"{message['role']}: {message['content'].strip()}" for message in messages)


def _as_messages(question: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "user", "content": question}] if isinstance(question, str) else question
