"""Reward functions that the frameworks' tests name by this file's path."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from penstock.reward import Sample, Score, Unscored

seen: list[Sample] = []


def right(sample: Sample) -> Score | Unscored:
    """1 where the response holds the answer; nothing where the row says that it can't be scored."""
    seen.append(sample)
    if sample.row.get("broken"):
        raise ValueError("no judge for this one")
    return Score(float(str(sample.row["answer"]) in sample.response), {"characters": len(sample.response)})


async def right_later(sample: Sample) -> Score | Unscored:
    await asyncio.sleep(0)
    return right(sample)


class Judge:
    """An async callable object, which frameworks that ask `iscoroutinefunction` take for a sync one."""

    async def __call__(self, sample: Sample) -> Score | Unscored:
        return await right_later(sample)


judge = Judge()


def scaled(sample: Sample, *, by: float) -> float:
    return by * float(str(sample.row["answer"]) in sample.response)


def where(sample: Sample) -> Score:
    """Whether it runs in the main thread of its process."""
    main = threading.current_thread() is threading.main_thread()
    return Score(float(main))


def about_prompt(sample: Sample) -> Any:
    """What a reward function sees of prompt, tokens and end."""
    asked = len(sample.prompt.token_ids) if "what" in sample.prompt.text else 0
    parts = {"prompt": asked, "tokens": len(sample.token_ids), "logprob": sum(sample.logprobs)}
    return Score(float(sample.truncated), parts)
