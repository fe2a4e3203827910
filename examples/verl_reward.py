"""verl's reward worker with a rate-limited judge: `python examples/verl_reward.py`. Offline, CPU, half a minute.

Needs `pip install verl cachetools uvicorn fastapi`. verl composes its own configuration from the overrides that you
would write on its command line, loads Penstock's reward manager, and scores four answers.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import offline
import torch
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker, migrate_legacy_reward_impl
from verl.trainer.config import config as verl_config

WORDS = ["<pad>", "<eos>", "<unk>", *map(str, range(20)), "+", "=", "?"]
ANSWERS = ["5", "6", "?", "5"]


def tokenizer() -> Any:
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def configuration(model: Path, options: dict[str, Any]) -> Any:
    kwargs = "+reward.custom_reward_function.reward_kwargs."
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        "reward.reward_manager.source=importlib",
        "reward.reward_manager.name=PenstockRewardManager",
        "reward.reward_manager.module.path=pkg://penstock.integrations.verl_manager",
        f"{kwargs}function=penstock.reward.judge:judge",
        f"{kwargs}unscored_value=0",
        *(f"{kwargs}options.{name}={value}" for name, value in options.items()),
    ]
    with initialize_config_dir(config_dir=str(Path(verl_config.__file__).parent), version_base=None):
        return migrate_legacy_reward_impl(compose("ppo_trainer", overrides))


def batch(tokens: Any) -> DataProto:
    """What verl's rollout hands to its reward worker: one prompt, four answers of a token each."""
    count = len(ANSWERS)
    prompts = torch.tensor([tokens.encode("2 + 3 = ?")] * count)
    responses = torch.tensor([tokens.encode(answer) for answer in ANSWERS])
    mask = torch.ones(count, prompts.shape[1] + 1, dtype=torch.long)
    columns = TensorDict({"prompts": prompts, "responses": responses, "attention_mask": mask}, batch_size=count)
    fields = {
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"question": "2 + 3 = ?"},
    }
    return DataProto(columns, {name: np.array([value] * count, dtype=object) for name, value in fields.items()})


async def main() -> None:
    tokens = tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        tokens.save_pretrained(folder)
        async with offline.provider() as service:
            config = configuration(Path(folder), offline.judge_options(Path(folder), service.url))
            scored = await RewardLoopWorker(config).compute_score_batch(batch(tokens))
    for answer, told in zip(ANSWERS, scored, strict=True):
        info = told["reward_extra_info"]
        print(f"{answer:<4}{told['reward_score']}  unscored {info['unscored']:.0f}  {info['unscored_cause']}")


if __name__ == "__main__":
    asyncio.run(main())
