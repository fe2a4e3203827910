"""Reward modes: the same scores, each sample's function called once, in the processes that the mode says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import reward_for_modes

from penstock.errors import PenstockError, RewardError
from penstock.reward.scorer import Scorer
from penstock.sample import Finish, Prompt, Sample, SampleId, Score, Unscored

HERE = Path(__file__).parent
FUNCTION = f"{HERE / 'reward_for_modes.py'}:by_length"


def sample(number: int, response: str, calls: Path) -> Sample:
    prompt = Prompt(0, "q", [1], {"calls": str(calls)}, "here:1")
    return Sample(SampleId("b", 0, number), prompt, array("i", [1]), array("f", [-1.0]), (), Finish.STOP, response)


@pytest.mark.parametrize("mode", ["sync", "thread", "process"])
async def test_every_mode_gives_the_same_scores_and_calls_once_for_each_sample(mode: str, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    scorer = Scorer(FUNCTION, mode=mode, timeout_s=60)
    try:
        await scorer.start()
        words = ["a", "bcd", "raises", "", "efghi"]
        results = await asyncio.gather(*(scorer.score(sample(k, word, calls)) for k, word in enumerate(words)))
    finally:
        await scorer.close()
    values = [result.value if isinstance(result, Score) else None for result in results]
    assert values == [1, 3, None, 0, 5]
    assert isinstance(results[2], Unscored)
    assert "no score for this" in results[2].cause
    rows = [line.split() for line in calls.read_text().splitlines()]
    assert sorted(int(number) for number, _ in rows) == [0, 1, 2, 3, 4]
    assert ({pid for _, pid in rows} == {str(os.getpid())}) is (mode != "process")


@pytest.mark.parametrize(("mode", "most"), [("sync", 1), ("thread", 4)])
async def test_sync_takes_one_sample_after_another(mode: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_for_modes, "_most", 0)
    monkeypatch.setattr(reward_for_modes, "_running", 0)
    scorer = Scorer("reward_for_modes:alone", mode=mode)
    results = await asyncio.gather(*(scorer.score(sample(k, "x", Path())) for k in range(4)))
    await scorer.close()
    assert max(result.value for result in results if isinstance(result, Score)) == most


@pytest.mark.parametrize(
    ("mode", "name"), [("sync", "spoils"), ("thread", "spoils"), ("thread", "spoils_later"), ("process", "spoils")]
)
async def test_what_a_function_does_to_its_sample_reaches_nobody_else(mode: str, name: str) -> None:
    """Rows are shared by a prompt's samples and by epochs, and tokens are trained on."""
    row = {"parts": ["a"]}
    prompt = Prompt(0, "q", [1], row, "here:1")
    one = Sample(
        SampleId("b", 0, 0), prompt, array("i", [1]), array("f", [-1.0]), (), Finish.STOP, "x", learned=array("b", [1])
    )
    scorer = Scorer(f"{HERE / 'reward_for_modes.py'}:{name}", mode=mode, timeout_s=60)
    try:
        assert await scorer.score(one) == Score(1.0)
    finally:
        await scorer.close()
    assert (row, prompt.token_ids, one.response) == ({"parts": ["a"]}, [1], "x")
    assert (one.token_ids, one.logprobs, one.learned) == (array("i", [1]), array("f", [-1.0]), array("b", [1]))


NO_DEVICES = """
import asyncio, sys
from array import array
from penstock.reward.scorer import Scorer
from penstock.sample import Finish, Prompt, Sample, SampleId
prompt = Prompt(0, "q", [1], {}, "here:1")
sample = Sample(SampleId("b", 0, 0), prompt, array("i", [1]), array("f", [-1.0]), (), Finish.STOP, "")
async def scored(mode):
    scorer = Scorer("penstock.reward.verifiers:random_reward", mode=mode)
    await scorer.start()
    result = await scorer.score(sample)
    await scorer.close()
    return result
print(*(type(asyncio.run(scored(mode))).__name__ for mode in ("sync", "thread", "process")), "torch" in sys.modules)
"""


def test_rewards_are_given_host_memory_and_touch_no_device_of_their_own() -> None:
    """Nothing on the way to a reward function imports PyTorch, so no thread of it makes or moves a device's context."""
    done = subprocess.run([sys.executable, "-c", NO_DEVICES], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["Score", "Score", "Score", "False"], done.stderr


def test_a_mode_that_is_none_is_told_the_modes() -> None:
    with pytest.raises(RewardError, match="must be one of inline, thread, sync, process, ray"):
        Scorer(FUNCTION, mode="async")


async def test_ray_without_ray_names_the_extra() -> None:
    try:
        import ray  # noqa: F401
    except ImportError:
        with pytest.raises(PenstockError, match=r"penstock\[ray\]"):
            Scorer(FUNCTION, mode="ray")
