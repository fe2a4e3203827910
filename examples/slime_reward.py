"""slime's reward functions with a rate-limited judge: `python examples/slime_reward.py`. Offline, about a second.

In slime: `--custom-rm-path penstock.integrations.slime.custom_group_rm --group-rm`. Here a group is made by hand, of
objects with the fields of slime's sample, and scored as slime does it.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace

import offline

from penstock.integrations.slime import custom_group_rm


def sample(n: int, response: str) -> SimpleNamespace:
    return SimpleNamespace(
        group_index=0, index=n, prompt="2 + 3 = ?", response=response, label="5", tokens=[], response_length=0,
        rollout_log_probs=None, status="completed", metadata={"question": "2 + 3 = ?"}, remove_sample=False,
    )  # fmt: skip


async def main() -> None:
    group = [sample(n, response) for n, response in enumerate(["5", "6", "?", "it is 5"])]
    with tempfile.TemporaryDirectory() as folder:
        async with offline.provider() as service:
            args = SimpleNamespace(
                penstock_reward_function="penstock.reward.judge:judge",
                penstock_reward_options=offline.judge_options(Path(folder), service.url),
                penstock_reward_unscored_value=0.0,
            )
            rewards = await custom_group_rm(args, group)
    for one, reward in zip(group, rewards, strict=True):
        left_out = f"  left out of the loss: {one.metadata['unscored']}" if one.remove_sample else ""
        print(f"{one.response:<8}{reward}{left_out}")


if __name__ == "__main__":
    asyncio.run(main())
