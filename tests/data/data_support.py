"""Sources, options and tokenizers for the tests of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.config.run import DataConfig, SourceConfig


class Characters:
    """One token for each character; token 1 in front as its special token. A template only where one is given."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        assert self.chat_template
        assert not tokenize
        if any(message["role"] not in ("system", "user", "assistant") for message in conversation):
            raise ValueError("unknown role")
        turns = "".join(f"<{message['role']}>{message['content']}" for message in conversation)
        return turns + "<assistant>" * add_generation_prompt


def write_jsonl(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def jsonl(path: Path, **options: Any) -> SourceConfig:
    return SourceConfig(kind="jsonl", path=str(path), **options)


def task(name: str, size: int | None, seed: int = 0, **options: Any) -> SourceConfig:
    return SourceConfig(kind="reasoning_gym", path=name, size=size, seed=seed, options=options)


def data_config(*train: SourceConfig, evaluation: Iterable[SourceConfig] = (), **options: Any) -> DataConfig:
    return DataConfig(train=list(train), eval=list(evaluation), **options)
