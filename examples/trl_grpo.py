"""TRL's GRPOTrainer with rewards from a rate-limited judge: `python examples/trl_grpo.py`. Offline, CPU, half a minute.

Needs `pip install trl`. Three steps with a model of a few thousand random parameters, made here: what is shown is the
wiring. A sample that the judge can't grade is `None` to TRL, and its share is in the metrics.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from typing import Any

import offline
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from penstock.integrations.trl import reward_function
from penstock.reward import ComputePool, Endpoint
from penstock.reward.judge import Criterion, Rubric, judge

WORDS = ["<pad>", "<eos>", "<unk>", *map(str, range(20)), "+", "=", "?"]
RUBRIC = Rubric((Criterion("correct", low=0, high=1),), reference_field="answer")


def tiny() -> tuple[Any, Any]:
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config), tokens


def serve(told: list[str], ready: threading.Event, stop: threading.Event) -> None:
    """The judge's service, in a thread of its own, since the trainer has the main one."""

    async def served() -> None:
        async with offline.provider() as service:
            told.append(service.url)
            ready.set()
            await asyncio.to_thread(stop.wait)

    asyncio.run(served())


def main() -> None:
    told: list[str] = []
    ready, stop = threading.Event(), threading.Event()
    service = threading.Thread(target=serve, args=(told, ready, stop))
    service.start()
    if not ready.wait(60):
        raise SystemExit("the judge's service did not start")
    pool = ComputePool([Endpoint(told[0], requests_per_minute=60 * offline.REQUESTS_PER_S)])
    model, tokens = tiny()
    sums = [{"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(4) for b in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokens,
            reward_funcs=reward_function(judge(pool, "judge-1", RUBRIC), concurrency=64),
            train_dataset=Dataset.from_list(sums),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=3,
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=4,
                use_cpu=True,
                bf16=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
        )
        trainer.train()
    asyncio.run(pool.close())
    stop.set()
    service.join()
    for entry in trainer.state.log_history[:3]:
        print(f"step {entry['step']}: reward {entry['reward']:.3f}, unscored {entry['judge/unscored']:.3f}")


if __name__ == "__main__":
    main()
