"""verl's reward function: `reward.custom_reward_function.path=pkg://penstock.integrations.verl`.

Decides how verl's arguments become a sample and a score becomes verl's dict. Runs without verl itself; the reward
manager, which doesn't, is in `verl_manager`.

verl has no value for a sample without a score: `reward_kwargs.unscored_value` has to say which number stands for it,
and every sample's extra info holds `unscored` (1.0 for such a sample, else 0.0) and `unscored_cause`. verl reads the
keys of extra info from a batch's first sample only, so they are the same for all: parts of the score are there where
`reward_kwargs.parts` names them, NaN where a sample has none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.integrations.common import Rewards, Settings, plain, sample_of, settings_of
from penstock.sample import SampleId, Score, Unscored

__all__ = ["VerlReward", "compute_score", "row_of"]


class VerlReward:
    """A reward function as `reward_kwargs` declares it, and its results in verl's form."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Raises ConfigError or RewardError: what `given` says can't be."""
        given = dict(given)
        parts = plain(given.pop("parts", None) or [])
        if not isinstance(parts, list) or not all(isinstance(name, str) for name in parts):
            raise ConfigError(f"reward_kwargs.parts = {parts!r}: it must be a list of names")
        self.parts: list[str] = parts
        self.settings: Settings = settings_of(given)
        self.rewards: Rewards = self.settings.rewards()

    def told(self, result: Score | Unscored) -> dict[str, Any]:
        """The score under `score`, with the same keys for every sample."""
        values = result.parts if isinstance(result, Score) else {}
        return {
            "score": self.settings.number_of(result),
            "unscored": float(isinstance(result, Unscored)),
            "unscored_cause": result.cause if isinstance(result, Unscored) else "",
            **{f"reward/{name}": float(values.get(name, math.nan)) for name in self.parts},
        }


def row_of(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """The row that a reward function sees: verl's extra info, and its ground truth as `answer` and `ground_truth`."""
    row: dict[str, Any] = plain(extra_info or {})
    truth = plain(ground_truth)
    return {**row, "data_source": str(data_source), "ground_truth": truth, "answer": truth}


_made: dict[str, VerlReward] = {}


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    function: str | None = None,
    unscored_value: float | None = None,
    parts: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    processes: int | None = None,
    timeout_s: float | None = None,
    concurrency: int | None = None,
    reward_router_address: str | None = None,
    reward_model_tokenizer: Any = None,
) -> dict[str, Any]:
    """Scores one sample with a Penstock reward function; see the module for what comes back.

    The keyword arguments are `reward.custom_reward_function.reward_kwargs`; what is left out comes from the environment
    (`common.settings_of`). verl hands no prompt over: `sample.prompt.text` is empty, so a judge takes its question from
    the row (`question_field`); `verl_manager` has the prompt. The last two are verl's own, for reward models it runs.

    Raises:
        ConfigError, RewardError: the function can't be loaded or called at all.
    """
    given = {
        "function": function,
        "unscored_value": unscored_value,
        "parts": plain(parts),
        "options": plain(options),
        "mode": mode,
        "processes": processes,
        "timeout_s": timeout_s,
        "concurrency": concurrency,
    }
    key = json.dumps(given, sort_keys=True, default=str)
    reward = _made.get(key)
    if reward is None:
        reward = _made[key] = VerlReward(given)
    row = row_of(data_source, ground_truth, extra_info)
    if reward_router_address is not None:
        row["reward_router_address"] = reward_router_address
    index = row.get("index")
    number = index if isinstance(index, int) else 0
    sample = sample_of("", solution_str, row, f"{data_source}[{index}]", SampleId(str(data_source), number, 0))
    return reward.told(await reward.rewards.score(sample))
