"""What a run begins from: its checkpoint, its prompts, the questions it may not show, its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.cli.run_folder import find_run
from penstock.config.run import RunConfig
from penstock.data import PromptOrder, question_text, read_source
from penstock.errors import CheckpointError, ConfigError, MissingExtra
from penstock.sample import Prompt
from penstock.train.checkpoint import find_checkpoint, read_position

__all__ = [
    "StepPrompts",
    "checkpoint_to_evaluate",
    "checkpoint_to_go_on",
    "held_out_questions",
    "load_tokenizer",
    "stop_ids",
]


class StepPrompts:
    """The prompts of each step, by the order's indices."""

    def __init__(self, prompts: list[Prompt], order: PromptOrder) -> None:
        self._prompts = prompts
        self._order = order

    def for_step(self, step: int) -> list[Prompt]:
        return [self._prompts[index] for index in self._order.for_step(step)]


def checkpoint_to_go_on(config: RunConfig, folder: Path) -> Path:
    """The checkpoint to go on from. Raises before anything is started where that makes no sense."""
    path = find_checkpoint(folder)
    position = read_position(path)
    if position.run_seed != config.seed:
        raise ConfigError(f"seed={config.seed}, but {path} is of a run with seed={position.run_seed}")
    if position.step >= config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps}, and {path} has done {position.step} steps: nothing is left to do; "
            "raise train.steps to go on"
        )
    return path


def checkpoint_to_evaluate(config: RunConfig, resume: str) -> Path:
    """The very checkpoint that is named, or the latest of the run that is. Raises CheckpointError."""
    named = Path(resume)
    return find_checkpoint(named if named.parent.name == "checkpoints" else find_run(config, resume))


def held_out_questions(config: RunConfig) -> frozenset[str]:
    """The evaluation's questions as text: no demonstration of a warm start may show them."""
    if not config.model.warm_start.recipe:
        return frozenset()
    return frozenset(question_text(row.question) for source in config.data.eval for row in read_source(source))


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer. Raises MissingExtra or CheckpointError."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("transformers", "train", "training") from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} has no tokenizer that transformers can load: {error}") from error


def stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids: the tokenizer's, and those of generation_config.json where there is one."""
    found = {tokenizer.eos_token_id} - {None}
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            ids = json.loads(path.read_text()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is broken: {error}") from error
        found |= set(ids) if isinstance(ids, list) else {ids} - {None}
    return tuple(sorted(int(token) for token in found))
