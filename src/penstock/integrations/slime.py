"""slime's reward functions: `--custom-rm-path penstock.integrations.slime.custom_rm` or `.custom_group_rm`.

Decides how slime's sample becomes Penstock's. Settings are attributes of slime's `args` called
`penstock_reward_function` and so on (a `--custom-config-path` file sets such), or the environment's
`PENSTOCK_REWARD_FUNCTION`. Runs without slime.

A reward in slime is a number, so `unscored_value` has to say which one stands for a sample without a score; such a
sample is also marked `remove_sample`, which keeps its tokens out of the loss, and its cause is in
`metadata["unscored"]`. Sync functions run on threads or in processes: slime's one loop never waits for them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.integrations.common import Rewards, Settings, plain, sample_of, settings_of, text_of
from penstock.sample import Sample, SampleId, Unscored

__all__ = ["custom_group_rm", "custom_rm"]

ATTRIBUTE = "penstock_reward_"
_made: dict[str, tuple[Settings, Rewards]] = {}


async def custom_rm(args: Any, sample: Any, **kwargs: Any) -> float:
    """The reward of one slime sample.

    Raises:
        ConfigError, RewardError: the function can't be loaded or called at all.
    """
    return (await custom_group_rm(args, [sample], **kwargs))[0]


async def custom_group_rm(args: Any, samples: list[Any], **kwargs: Any) -> list[float]:
    """The rewards of a group, scored together.

    Raises:
        ConfigError, RewardError: the function can't be loaded or called at all.
    """
    settings, rewards = _reward(args)
    results = await rewards.score_all([_sample(one) for one in samples])
    for one, result in zip(samples, results, strict=True):
        if isinstance(result, Unscored):
            one.remove_sample = True
            one.metadata = {**(one.metadata or {}), "unscored": result.cause}
    return [settings.number_of(result) for result in results]


def _reward(args: Any) -> tuple[Settings, Rewards]:
    names = [field.name for field in dataclasses.fields(Settings)]
    given = {name: getattr(args, ATTRIBUTE + name, None) for name in names}
    key = repr(given)
    made = _made.get(key)
    if made is None:
        settings = settings_of(given)
        made = _made[key] = (settings, settings.rewards())
    return made


def _sample(one: Any) -> Sample:
    """`one.tokens` holds prompt and response; the last `response_length` of them are the response's."""
    metadata = plain(one.metadata) if isinstance(one.metadata, dict) else {}
    row = {**metadata, "prompt": plain(one.prompt), "label": plain(one.label), "answer": plain(one.label)}
    tokens = list(one.tokens or [])
    split = len(tokens) - (one.response_length or 0)
    group = one.group_index if isinstance(one.group_index, int) else 0
    replica = one.index if isinstance(one.index, int) else 0
    return sample_of(
        text_of(one.prompt),
        one.response,
        row,
        f"slime[{group}.{replica}]",
        SampleId("slime", group, replica),
        prompt_ids=tokens[:split],
        token_ids=tokens[split:],
        logprobs=one.rollout_log_probs,
        truncated=getattr(one.status, "value", one.status) == "truncated",
    )
