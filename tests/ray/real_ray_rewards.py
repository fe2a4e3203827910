"""Rewards in Ray actors: the same scores, one call for each sample, and an actor that hangs is killed and replaced."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from real_ray_groups import a_ray  # noqa: F401

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "cluster"))

from test_reward_modes import FUNCTION, sample  # noqa: E402

from penstock.errors import RewardError  # noqa: E402
from penstock.reward.scorer import Scorer  # noqa: E402
from penstock.sample import Score, Unscored  # noqa: E402


async def test_actors_score_once_each_and_one_that_hangs_is_replaced(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    scorer = Scorer(FUNCTION, mode="ray", processes=2, timeout_s=20)
    try:
        await scorer.start()
        words = ["a", "bcd", "raises", "hangs", "hangs", "efghi"]
        results = await asyncio.gather(*(scorer.score(sample(k, word, calls)) for k, word in enumerate(words)))
    finally:
        await scorer.close()
    values = [result.value if isinstance(result, Score) else None for result in results]
    assert values == [1, 3, None, None, None, 5], results
    assert isinstance(results[2], Unscored)
    assert "no score for this" in results[2].cause
    assert isinstance(results[3], Unscored)
    assert "longer than 20 s; its actor was killed" in results[3].cause
    rows = [line.split() for line in calls.read_text().splitlines()]
    assert sorted(int(number) for number, _ in rows) == [0, 1, 2, 3, 4, 5]
    assert str(os.getpid()) not in {pid for _, pid in rows}


async def test_a_function_that_is_not_there_is_refused_at_the_start() -> None:
    scorer = Scorer("./nowhere.py:reward", mode="ray")
    with pytest.raises(RewardError, match=r"nowhere\.py"):
        await scorer.start()
    await scorer.close()
