"""What several of the reward tests need: a finished sample, and whether a process lives."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import psutil

from penstock.sample import Finish, Prompt, Sample, SampleId, VersionSpan

PATIENCE_S = 30.0


def build_sample(response: str = "42", replica: int = 0, **row: Any) -> Sample:
    prompt = Prompt(7, "what is it?", [5, 6, 7], row or {"answer": "42"}, "questions.jsonl:8")
    return Sample(
        SampleId("train-3", 7, replica),
        prompt,
        array("i", [11, 12, 13]),
        array("f", [-0.5, -1.0, 0.0]),
        (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)),
        Finish.STOP,
        response,
    )


def alive(pid: int) -> bool:
    """A process that has ended and was not yet collected by its parent is not alive."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(map(alive, pids)):  # nothing tells when another's process ends
            await asyncio.sleep(0.02)
