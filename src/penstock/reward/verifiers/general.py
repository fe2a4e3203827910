"""Verifiers that need nothing but the row: an exact answer, a task's own scorer, and chance for a control run."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any

from penstock.errors import MissingExtra, RewardError
from penstock.sample import Sample, Score

__all__ = ["exact_match", "random_reward", "reasoning_gym_exact"]


def reasoning_gym_exact(sample: Sample) -> Score:
    """1 where the task's own scorer gives the answer its full score, else 0; the task's score is the part `raw`.

    Partial credit is left out of the reward: some tasks give half the score and more to an answer with a stray
    digit. The row must come from a reasoning-gym task: `metadata.source_dataset` names it, and `task_options`, where
    it is there, holds the options that the item was made with. White space around the answer doesn't count.
    """
    metadata = sample.row.get("metadata")
    name = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        raise RewardError(
            f"the row of {sample.prompt.source} has no metadata.source_dataset; "
            "reasoning_gym_exact scores rows of reasoning-gym tasks only"
        )
    options = json.dumps(sample.row.get("task_options", {}), sort_keys=True)
    raw = float(_task(name, options).score_answer(sample.response.strip(), entry=sample.row))
    # Not `>=`: spell_backward adds up letters and gives some answers with a letter too many 1.0000000000000002.
    return Score(1.0 if raw == 1.0 else 0.0, {"raw": raw})


def exact_match(sample: Sample) -> Score:
    """1 where the response is the row's `answer`, white space around both left out, else 0."""
    answer = sample.row.get("answer")
    if not isinstance(answer, str | int | float):
        raise RewardError(f"the row of {sample.prompt.source} has no text or number in its field 'answer'")
    return Score(float(sample.response.strip() == str(answer).strip()))


def random_reward(sample: Sample) -> Score:
    """0 or 1 with even chances, whatever the answer: a control run, whose accuracy must not rise.

    A function of the sample's identity alone, so that a repeated run gives the same rewards.
    """
    digest = hashlib.blake2b(str(sample.id).encode(), digest_size=1).digest()
    return Score(float(digest[0] & 1))


@functools.lru_cache(maxsize=256)
def _task(name: str, options: str) -> Any:
    """The task's data set object, which holds its scorer. Built once for each set of options."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtra("reasoning-gym", "train", f"scoring the task '{name}'") from error
    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(options))
