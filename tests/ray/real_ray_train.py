"""A whole `penstock train` whose reward model is a group of Ray actors, and whose reward function runs in others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from penstock.reward.worker_scorer import batch_of
from penstock.train.recipes import character_tokenizer
from penstock.train.reward_model import RewardModel

DEADLINE_S = 400.0
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, a random classifier over the same tokens, and questions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("run")
    tokenizer = character_tokenizer(["Say: "])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    for name, kind in (("model", LlamaForCausalLM), ("judge", LlamaForSequenceClassification)):
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, words in (("questions", "sun moon star sky sea sand"), ("held-out", "rain snow")):
        rows = [{"prompt": f"Say: {word}", "answer": word} for word in words.split()]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(CONFIG)
    return folder


CONFIG = """
name = "onray"
output_dir = "runs"

[model]
path = "model"

[data]
max_prompt_tokens = 16

[[data.train]]
kind = "jsonl"
path = "questions.jsonl"

[[data.eval]]
kind = "jsonl"
path = "held-out.jsonl"

[rollout]
prompts_per_step = 3
samples_per_prompt = 4
deadline_s = 60
heartbeat_s = 0.5
sampling = { max_new_tokens = 12 }
engines = { count = 1, max_running = 8, max_context_tokens = 64, kv_cache_mib = 8, frame_steps = 2 }

[reward]
function = "penstock.reward.verifiers:exact_match"
mode = "ray"
processes = 1
timeout_s = 60

[reward.model]
path = "judge"
workers = 2

[train]
steps = 2
lr = 1e-3
min_samples_per_micro_batch = 4
tokens_per_micro_batch = 512
threads = 1

[observe]
view = "lines"
samples_every = 1
samples_per_step = 4
"""


def test_training_samples_are_scored_by_actors(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="pst-ray-") as scratch:  # Ray writes to HOME
        environment = {
            **os.environ,
            "HOME": scratch,
            "RAY_TMPDIR": scratch,
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "TERM": "dumb",
            "PYTHONPATH": str(SOURCE),
        }
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "train", "run.toml"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "runs" / "onray-001"
    assert json.loads((run / "summary.json").read_text())["outcome"] == "done"
    assert [json.loads(line)["unscored"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 0]
    samples: list[dict[str, Any]] = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    learned = [row for row in samples if row["batch"].startswith("train-")]
    told = RewardModel(str(folder / "judge"), device="cpu").score(
        batch_of([row["text"] + row["response"] for row in learned])
    )
    values = list(told.column("value").data.cast("d"))
    assert [row["score"] for row in learned] == pytest.approx(values, abs=1e-5)
    assert len(learned) == 8
    assert len(set(values)) > 4
    assert {row["score"] for row in samples if row["batch"].startswith("eval-")} <= {0.0, 1.0}
