"""`penstock train` with a reward model of the run's own: its workers score, one that is killed is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_train_command import CONFIG, ONE_ENGINE, children_of, lines, read_until, start

from penstock.reward.worker_scorer import batch_of
from penstock.train.recipes import character_tokenizer
from penstock.train.reward_model import RewardModel

DEADLINE_S = 240.0
LOCAL_WORKER = "penstock.cluster.local_worker"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier that reads what the run's questions and answers are made of."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("judge")
    tokenizer = character_tokenizer(["Spell this word backward (example: sun -> nus): "])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def work(tmp_path: Path, judge: Path, models: Path) -> Path:
    reward = f"""
[reward]
function = "penstock.reward.verifiers:reasoning_gym_exact"
unscored = "drop_sample"

[reward.model]
path = "{judge}"
workers = 2
scale = 2.0
offset = 1.0

[cluster]
execute_mode = "all_multithread"
"""
    text = CONFIG.replace("CACHE", str(models))
    random_reward = '[reward]\nfunction = "penstock.reward.verifiers:random_reward"\n'
    assert random_reward in text
    text = text.replace(random_reward, reward).replace(
        "[observe]", "[observe]\nsamples_every = 1\nsamples_per_step = 4"
    )
    (tmp_path / "tiny.toml").write_text(text)
    return tmp_path


def samples_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = lines(folder / "samples.jsonl")
    return [row for row in rows if row["batch"].startswith(kind)]


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_a_run_learns_from_the_rewards_of_its_own_model_and_is_judged_by_its_function(work: Path, judge: Path) -> None:
    finished(start(work, ONE_ENGINE))
    folder = work / "runs" / "tiny-001"
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "done"
    assert [row["unscored"] for row in lines(folder / "metrics.jsonl")] == [0, 0, 0, 0]
    learned = samples_of(folder, "train-")
    assert len(learned) == 16
    told = RewardModel(str(judge), device="cpu").score(batch_of([row["text"] + row["response"] for row in learned]))
    values = list(told.column("value").data.cast("d"))
    assert [row["parts"]["raw"] for row in learned] == pytest.approx(values, abs=1e-5)
    assert [row["score"] for row in learned] == pytest.approx([2 * value + 1 for value in values], abs=1e-5)
    assert len({row["score"] for row in learned}) > 4
    assert {row["score"] for row in samples_of(folder, "eval-")} <= {0.0, 1.0}


@pytest.mark.ci
def test_workers_that_are_killed_are_replaced_and_cost_the_samples_of_one_call(work: Path) -> None:
    process = start(work, "--train.steps=12")
    try:
        read_until(process, "step 1/")
        workers = [child for child in children_of(process) if LOCAL_WORKER in " ".join(child.cmdline())]
        assert len(workers) == 2
        workers[1].kill()
        finished(process)
    finally:
        process.kill()
    folder = work / "runs" / "tiny-001"
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "done"
    unscored = [row["unscored"] for row in lines(folder / "metrics.jsonl")]
    assert len(unscored) == 12
    assert 0 < sum(unscored) <= 32, "of one call, or of a call that had begun when another step's samples came"
    assert unscored[-1] == 0
    for worker in workers:
        psutil.wait_procs([worker], timeout=DEADLINE_S)
        assert not worker.is_running()


@pytest.mark.ci
def test_ctrl_c_ends_the_models_workers_too(work: Path) -> None:
    process = start(work, "--train.steps=1000")
    try:
        read_until(process, "step 1/")
        children = children_of(process)
        assert sum(LOCAL_WORKER in " ".join(child.cmdline()) for child in children) == 2
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 130
    _, left = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert left == []
