"""The verl adapter's reward function by its contract; verl itself is in `real_verl.py`."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from rewards_for_frameworks import seen

from penstock.errors import ConfigError, PenstockError, RewardError
from penstock.integrations.common import Settings, plain, settings_of
from penstock.integrations.verl import compute_score

FUNCTIONS = Path(__file__).parent / "rewards_for_frameworks.py"


async def call(solution: str = "it is 2", truth: Any = "2", info: Any = None, **given: Any) -> dict[str, Any]:
    return await compute_score("sums", solution, truth, info or {"index": 4}, **given)


async def test_a_score_comes_back_with_the_same_keys_whether_there_is_one_or_not() -> None:
    given = {"function": f"{FUNCTIONS}:right", "unscored_value": -2.0, "parts": ["characters"]}
    good = await call(**given)
    assert good == {"score": 1.0, "unscored": 0.0, "unscored_cause": "", "reward/characters": 7.0}
    missing = await call(info={"broken": True}, **given)
    assert list(missing) == list(good)
    assert (missing["score"], missing["unscored"]) == (-2.0, 1.0)
    assert "no judge for this one" in missing["unscored_cause"]
    assert math.isnan(missing["reward/characters"])


async def test_the_row_holds_verls_extra_info_and_the_ground_truth_wins_over_it() -> None:
    info = {"index": 4, "answer": "a long solution", "question": "1 + 1?"}
    assert (await call(info=info, function=f"{FUNCTIONS}:right_later", unscored_value=0))["score"] == 1.0
    by_verl = {"reward_router_address": "127.0.0.1:1", "reward_model_tokenizer": object()}
    await call(info=info, function=f"{FUNCTIONS}:judge", unscored_value=0, **by_verl)
    assert (await call(function=f"{FUNCTIONS}:scaled", options={"by": 4}, unscored_value=0))["score"] == 4.0
    rows = [sample.row for sample in _seen_by_function()[-2:]]
    assert rows[0] == {
        "index": 4,
        "answer": "2",
        "question": "1 + 1?",
        "data_source": "sums",
        "ground_truth": "2",
    }
    assert rows[1]["reward_router_address"] == "127.0.0.1:1"


def _seen_by_function() -> list[Any]:
    """The list in the module as it was loaded by its path, which is another than the imported one."""
    from penstock.reward import load_function

    found: list[Any] = load_function(f"{FUNCTIONS}:right").call.__globals__["seen"]
    assert found is not seen
    return found


async def test_settings_come_from_the_environment_where_they_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REWARD_FUNCTION", f"{FUNCTIONS}:scaled")
    monkeypatch.setenv("PENSTOCK_REWARD_OPTIONS", '{"by": 3}')
    monkeypatch.setenv("PENSTOCK_REWARD_UNSCORED_VALUE", "-1")
    monkeypatch.setenv("PENSTOCK_REWARD_TIMEOUT_S", "7.5")
    assert settings_of({}) == Settings(f"{FUNCTIONS}:scaled", options={"by": 3}, unscored_value=-1.0, timeout_s=7.5)
    assert (await call())["score"] == 3.0
    assert settings_of({"timeout_s": 1}).timeout_s == 1.0
    monkeypatch.setenv("PENSTOCK_REWARD_OPTIONS", "by = 3")
    with pytest.raises(ConfigError, match="JSON"):
        settings_of({})


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"unscored_value": 0}, "no reward function is named"),
        ({"function": "x:y"}, "unscored_value"),
        ({"function": "x:y", "unscored_value": float("inf")}, "unscored_value"),
        ({"function": "x:y", "unscored_value": 0}, "no module 'x'"),
        ({"function": "x:y", "unscored_value": 0, "mode": "fast"}, "mode"),
        ({"function": "x:y", "unscored_value": 0, "parts": "all"}, "parts"),
    ],
)
async def test_what_is_missing_or_impossible_is_refused_by_name(given: dict[str, Any], wrong: str) -> None:
    with pytest.raises((ConfigError, RewardError), match=wrong):
        await call(**given)


async def test_a_deadline_makes_a_sample_unscored_and_not_zero() -> None:
    result = await call(function=f"{Path(__file__)}:never", unscored_value=-5, timeout_s=0.01)
    assert (result["score"], result["unscored"]) == (-5.0, 1.0)
    assert "longer than 0.01 s" in result["unscored_cause"]


async def never(sample: Any) -> float:
    await asyncio.Event().wait()
    return 1.0


async def test_a_function_that_never_scores_ends_the_run_instead_of_training_on_a_constant() -> None:
    async def run() -> None:
        for _ in range(10_000):
            await call(info={"broken": True}, function=f"{FUNCTIONS}:right", unscored_value=-9.0)

    with pytest.raises(PenstockError, match="no judge for this one"):
        await run()


def test_numpys_values_become_plain_ones() -> None:
    import numpy as np

    held = np.array([{"a": np.int64(1)}, {"a": [np.float32(0.5)]}], dtype=object)
    assert plain({"x": held, "y": (1, 2)}) == {"x": [{"a": 1}, {"a": [0.5]}], "y": (1, 2)}
    assert type(plain(np.bool_(True))) is bool
