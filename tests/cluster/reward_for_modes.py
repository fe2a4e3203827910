"""Reward functions for every mode: they note in the file that a sample's row names who called them, and for whom."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from penstock.sample import Sample


def _noted(sample: Sample) -> None:
    with Path(sample.row["calls"]).open("a") as file:
        file.write(f"{sample.id.replica} {os.getpid()}\n")


def by_length(sample: Sample) -> float:
    _noted(sample)
    if sample.response == "raises":
        raise ValueError("no score for this")
    if sample.response == "hangs":
        time.sleep(600)
    return float(len(sample.response))


async def alone(sample: Sample) -> float:
    """How many calls ran at once, at most, until this one ended."""
    global _running, _most
    _running += 1
    _most = max(_most, _running)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    _running -= 1
    return float(_most)


_running = _most = 0


def spoils(sample: Sample) -> float:
    """Changes whatever of the sample can be changed."""
    sample.row["parts"].append("spoiled")
    sample.row["spoiled"] = True  # type: ignore[index]
    sample.prompt.token_ids.append(9)  # type: ignore[attr-defined]
    sample.token_ids[0] = 9
    sample.token_ids.append(9)
    sample.logprobs[0] = 9.0
    assert sample.learned is not None
    sample.learned[0] = 9
    sample.response = "spoiled"
    return 1.0


async def spoils_later(sample: Sample) -> float:
    await asyncio.sleep(0)
    return spoils(sample)
