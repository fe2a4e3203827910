"""The TRL adapter by its contract; the real trainer is in `real_trl.py`."""

from __future__ import annotations

import asyncio
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
from rewards_for_frameworks import Judge, right, right_later, seen

from penstock.errors import RewardError
from penstock.integrations.trl import reward_function
from penstock.reward import Score

BATCH: dict[str, Any] = {
    "prompts": ["a", "a", "b"],
    "completions": ["x 1", "2", "3"],
    "answer": ["1", "1", "3"],
    "broken": [False, False, True],
}


def call(function: Any, **batch: Any) -> list[float | None]:
    result = function(**batch)
    return asyncio.run(result) if inspect.isawaitable(result) else result


@pytest.mark.parametrize("function", [right, right_later, Judge()], ids=["sync", "async", "object"])
def test_a_batch_comes_back_in_order_and_what_has_no_score_is_none(function: Any) -> None:
    wrapped = reward_function(function)
    assert inspect.iscoroutinefunction(wrapped) == (function is not right)
    assert call(wrapped, **BATCH) == [1.0, 0.0, None]


def test_a_sample_has_its_columns_its_group_and_its_tokens() -> None:
    seen.clear()
    tokens = [[1, 2], [3], [4]]
    call(reward_function(right_later), **BATCH, completion_ids=tokens, trainer_state=object(), other="not a column")
    samples = sorted(seen, key=lambda sample: sample.id)
    assert [(sample.id.prompt, sample.id.replica) for sample in samples] == [(0, 0), (0, 1), (1, 0)]
    assert samples[0].row == {"prompt": "a", "answer": "1", "broken": False}
    assert [list(sample.token_ids) for sample in samples] == tokens


def test_chat_messages_are_read_as_text_and_kept_in_the_row() -> None:
    seen.clear()
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": [{"type": "text", "text": "1 + 1"}]}]
    completion = [{"role": "assistant", "content": "it is 2"}]
    assert call(reward_function(right), prompts=[prompt], completions=[completion], answer=["2"]) == [1.0]
    assert seen[0].prompt.text == "Add.\n\n1 + 1"
    assert seen[0].row["prompt"] == prompt


def test_a_whole_batch_is_scored_at_once() -> None:
    together = threading.Barrier(3)

    def waits_for_the_others(sample: Any) -> float:
        together.wait(timeout=60)
        return 1.0

    assert call(reward_function(waits_for_the_others), **BATCH) == [1.0] * 3

    arrived = asyncio.Event()
    count = 0

    async def awaits_the_others(sample: Any) -> float:
        nonlocal count
        count += 1
        if count == 3:
            arrived.set()
        await arrived.wait()
        return 1.0

    assert call(reward_function(awaits_the_others), **BATCH) == [1.0] * 3


def test_options_of_the_call_hold() -> None:
    async def never(sample: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    assert call(reward_function(never, timeout_s=0.01), **BATCH) == [None] * 3
    assert reward_function(right, name="mine").__name__ == "mine"
    assert reward_function(right).__name__ == "right"
    path = f"{Path(__file__).parent / 'rewards_for_frameworks.py'}:scaled"
    assert call(reward_function(path, options={"by": 3.0}), **BATCH) == [3.0, 0.0, 3.0]
    with pytest.raises(RewardError, match="options"):
        reward_function(right, options={"by": 3.0})
    with pytest.raises(RewardError, match="mode 'process'"):
        reward_function(right, mode="process")


def test_what_was_not_scored_is_told_to_the_trainer_with_its_cause() -> None:
    metrics: dict[str, float] = {}
    columns: dict[str, list[str]] = {}
    call(reward_function(right), **BATCH, log_metric=metrics.__setitem__, log_extra=columns.__setitem__)
    assert metrics == {"right/unscored": pytest.approx(1 / 3), "right/characters": 2.0}
    [causes] = columns.values()
    assert causes[:2] == ["", ""]
    assert "no judge for this one" in causes[2]


def test_a_sync_function_can_be_called_from_inside_a_running_loop() -> None:
    async def within() -> list[float | None]:
        return reward_function(lambda sample: Score(2.0))(prompts=["a"], completions=["b"])

    assert asyncio.run(within()) == [2.0]
