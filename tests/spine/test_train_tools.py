"""`penstock train` with the calculator: a small model, real processes, an engine killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PRODUCTS = "options = { min_terms = 2, max_terms = 2, min_digits = 2, max_digits = 2 }"

CONFIG = f"""
name = "tools"
output_dir = "runs"

[model.warm_start]
recipe = "penstock.train.recipes:calculator"
hidden_size = 32
layers = 2
heads = 2
intermediate_size = 64
steps = 80
batch_size = 32
warmup_steps = 10

[data]
max_prompt_tokens = 16

[[data.train]]
kind = "reasoning_gym"
path = "products"
size = 60
seed = 1_000_000
{PRODUCTS}

[[data.eval]]
kind = "reasoning_gym"
path = "products"
size = 8
seed = 500_000_000
{PRODUCTS}

[environment]
path = "penstock.environments.calculator:Calculator"
max_turns = 3
options = {{ needs_tool = true }}

[reward]
function = "penstock.environments.outcome:outcome"

[rollout]
prompts_per_step = 4
samples_per_prompt = 4
deadline_s = 60
heartbeat_s = 0.5
sampling = {{ max_new_tokens = 40 }}
engines = {{ count = 2, max_running = 8, max_context_tokens = 64, kv_cache_mib = 8, frame_steps = 2 }}

[train]
steps = 10
lr = 1e-3
min_samples_per_micro_batch = 4
tokens_per_micro_batch = 512
threads = 1
# Every group has a pass, whatever its rewards, so that the gap to the engines is measured.
skip_groups_without_signal = false

[observe]
view = "lines"
samples_every = 1
samples_per_step = 16
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_with_a_tool_learns_from_conversations_though_an_engine_is_killed(tmp_path: Path) -> None:
    (tmp_path / "tools.toml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "train", "tools.toml", "--drill.kill_at=0.3"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "tools-001"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["outcome"], summary["samples_lost"], summary["samples_failed"]) == ("done", 0, 0)
    assert summary["samples_unscored"] == 0
    assert summary["samples_finished"] == 10 * 16 + 2 * 8, "turns are no further samples"
    assert summary["instances_lost"] == 1

    metrics = lines(folder / "metrics.jsonl")
    assert sum(row.get("reward/tool_calls", 0.0) for row in metrics) > 0
    # Own tokens were drawn with the probabilities that a pass over the whole conversation gives them.
    assert all(row["rollout_logprob_gap"] < 1e-4 for row in metrics)

    samples = lines(folder / "samples.jsonl")
    talks = [sample for sample in samples if sample.get("turns", 1) > 1]
    assert talks
    for talk in talks:
        assert talk["transcript"].count("<result>") >= talk["turns"] - 1
        assert talk["transcript"].startswith("<tool>") or "<tool>" in talk["transcript"]
        assert talk["response"] in talk["transcript"]
    assert max(row["turns_mean"] for row in metrics) > 1
    told = {event["batch"] for event in lines(folder / "events.jsonl") if event["event"] == "batch_submitted"}
    assert told == {*(f"train-{step}" for step in range(10)), "eval-0", "eval-10"}, "turns are no events"
