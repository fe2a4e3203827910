"""A run's prompts: every row of its sources, tokenized, with what was left out and why.

Decides which rows count: overlong ones are refused or skipped, and a training prompt that asks what an evaluation
prompt asks is left out. Everything left out is counted by cause. Knows nothing of steps; `order` draws from what is
here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from penstock.data.sources import Source, read_source
from penstock.data.templates import PromptTemplate, Tokenizer, question_text
from penstock.errors import DataError
from penstock.sample import Prompt

__all__ = ["DataOptions", "PromptSet", "load_prompts", "load_train_and_eval"]


class DataOptions(Protocol):
    """What the configuration says about all sources; `config.run.DataConfig` does."""

    @property
    def train(self) -> Sequence[Source]: ...
    @property
    def eval(self) -> Sequence[Source]: ...
    @property
    def system_prompt(self) -> str: ...
    @property
    def chat_template(self) -> str: ...
    @property
    def max_prompt_tokens(self) -> int: ...
    @property
    def overlong_prompts(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts in their sources' order; `prompts[i].index` is i."""

    prompts: list[Prompt]
    skipped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by cause."""
    questions: frozenset[str] = frozenset()
    """The questions as text, to keep another set free of them."""
    origins: tuple[int, ...] = ()
    """Of each prompt the number of its source."""

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(
    sources: Iterable[Source],
    options: DataOptions,
    tokenizer: Tokenizer,
    exclude: Set[str] = frozenset(),
    unique: bool = False,
) -> PromptSet:
    """Reads and tokenizes all rows of `sources`.

    Rows whose question is in `exclude` are left out (held-out questions must not be trained on), and with `unique`
    so are repeated questions. Raises DataError for malformed rows, for overlong prompts unless
    `options.overlong_prompts` is 'skip', and where nothing is left.
    """
    template = PromptTemplate(tokenizer, options.chat_template, options.system_prompt)
    prompts: list[Prompt] = []
    questions: set[str] = set()
    skipped: Counter[str] = Counter()
    origins: list[int] = []
    for origin, row in ((origin, row) for origin, source in enumerate(sources) for row in read_source(source)):
        question = question_text(row.question)
        if question in exclude:
            skipped["asked in evaluation too"] += 1
            continue
        if unique and question in questions:
            skipped["asked twice"] += 1
            continue
        text, token_ids = template.render(row.question, row.where)
        if len(token_ids) > options.max_prompt_tokens:
            _refuse_overlong(options, row.where, len(token_ids))
            skipped[f"longer than {options.max_prompt_tokens} tokens"] += 1
            continue
        questions.add(question)
        origins.append(origin)
        prompts.append(Prompt(len(prompts), text, token_ids, row.fields, row.where))
    if not prompts and skipped:
        causes = ", ".join(f"{count} {cause}" for cause, count in skipped.items())
        raise DataError(f"no prompts are left: {causes}")
    return PromptSet(prompts, dict(skipped), frozenset(questions), tuple(origins))


def load_train_and_eval(options: DataOptions, tokenizer: Tokenizer) -> tuple[PromptSet, PromptSet]:
    """The training prompts, free of held-out questions, and the evaluation prompts, each asked once."""
    held_out = load_prompts(options.eval, options, tokenizer, unique=True)
    return load_prompts(options.train, options, tokenizer, exclude=held_out.questions), held_out


def _refuse_overlong(options: DataOptions, where: str, tokens: int) -> None:
    if options.overlong_prompts != "skip":
        raise DataError(
            f"{where}: the prompt has {tokens} tokens and data.max_prompt_tokens is {options.max_prompt_tokens}; "
            "raise it, or leave such prompts out with data.overlong_prompts='skip'"
        )
