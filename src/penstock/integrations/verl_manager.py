"""verl's reward manager: `reward.reward_manager` with `source: importlib`, `name: PenstockRewardManager` and
`module.path: pkg://penstock.integrations.verl_manager`.

As `integrations.verl`, with what a reward function is not told: the prompt as the model read it, the answer's tokens
and log-probabilities, and whether it was cut off. Settings are those of `reward.custom_reward_function.reward_kwargs`,
and what is wrong with them shows when verl makes the manager, before the first sample.
"""

from __future__ import annotations

from typing import Any

from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from penstock.integrations.common import plain, sample_of
from penstock.integrations.verl import VerlReward, row_of
from penstock.sample import Sample, SampleId

__all__ = ["PenstockRewardManager"]


class PenstockRewardManager(RewardManagerBase):
    """Scores verl's samples with a Penstock reward function, sync or async, an object or a function."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        """`compute_score` is not used: verl hands its default where none is configured.

        Raises ConfigError or RewardError where `reward_kwargs` can't be followed.
        """
        super().__init__(config, tokenizer, compute_score)
        given = config.reward.custom_reward_function.get("reward_kwargs") or {}
        self._reward = VerlReward(plain(given))
        self._reward_router_address = reward_router_address

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """The last sequence of one sample: `{"reward_score", "reward_extra_info"}`."""
        sample = await self.loop.run_in_executor(None, self._sample, data[-1])
        told = self._reward.told(await self._reward.rewards.score(sample))
        return {"reward_score": told["score"], "reward_extra_info": told}

    def _sample(self, item: Any) -> Sample:
        """`item.batch`: prompts [P] padded on the left, responses [R] on the right, attention_mask [P + R]."""
        columns, fields = item.batch, item.non_tensor_batch
        width = columns["prompts"].shape[-1]
        prompt_ids = columns["prompts"][columns["attention_mask"][:width].bool()].tolist()
        length = int(columns["attention_mask"][width:].sum())
        token_ids = columns["responses"][:length].tolist()
        logprobs = columns["rollout_log_probs"][:length].tolist() if "rollout_log_probs" in columns else None
        source = str(fields["data_source"])
        info = {**(fields.get("extra_info") or {}), **(fields.get("tool_extra_fields") or {})}
        row = row_of(source, fields["reward_model"]["ground_truth"], info)
        if "raw_prompt" in fields:
            row["raw_prompt"] = plain(fields["raw_prompt"])
        if self._reward_router_address is not None:
            row["reward_router_address"] = self._reward_router_address
        index = row.get("index")
        end = self.tokenizer.eos_token_id
        return sample_of(
            self.tokenizer.decode(prompt_ids),
            self.tokenizer.decode(token_ids, skip_special_tokens=True),
            row,
            f"{source}[{index}]",
            SampleId(str(fields.get("uid", source)), index if isinstance(index, int) else 0, 0),
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            truncated=length == columns["responses"].shape[-1] and (not token_ids or token_ids[-1] != end),
        )
