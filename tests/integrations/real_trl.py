"""Penstock's rewards in TRL itself: three steps of GRPO with a tiny model that is made here.

Run by `make test-trl`, in an environment that has TRL; `make test` doesn't collect it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from datasets import Dataset
from rewards_for_frameworks import Judge, right, right_later, seen
from trl import GRPOConfig, GRPOTrainer

from penstock.integrations.trl import reward_function

STEPS = 3
GENERATIONS = 4


def trained(folder: Path, functions: list[Any], rows: list[dict[str, Any]]) -> GRPOTrainer:
    arguments = GRPOConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2 * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=4,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    trainer = GRPOTrainer(
        model=tiny.model(),
        processing_class=tiny.tokenizer(),
        reward_funcs=functions,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    return trainer


def history(trainer: GRPOTrainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def rows(**extra: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"what is {n}", "answer": str(n), **extra} for n in range(8)]


@pytest.mark.parametrize("function", [right, right_later, Judge()], ids=["sync", "async", "object"])
def test_a_run_of_three_steps_is_rewarded_by_penstock(tmp_path: Path, function: Any) -> None:
    seen.clear()
    trainer = trained(tmp_path, [reward_function(function, name="right")], rows())
    assert len(seen) == STEPS * 2 * GENERATIONS
    assert {sample.row["answer"] for sample in seen} <= {str(n) for n in range(8)}
    assert all(sample.prompt.text == f"what is {sample.row['answer']}" for sample in seen)
    assert all(0 < len(sample.token_ids) <= 4 for sample in seen)
    assert history(trainer, "right/unscored") == [0.0] * STEPS
    assert len(history(trainer, "right/characters")) == STEPS
    means = history(trainer, "rewards/right/mean")
    assert len(means) == STEPS
    assert all(0.0 <= mean <= 1.0 for mean in means)


def test_an_unscored_sample_is_left_to_the_other_functions(tmp_path: Path) -> None:
    def short(sample: Any) -> float:
        return -float(len(sample.token_ids))

    broken = reward_function(right, name="right")
    trainer = trained(tmp_path, [broken, reward_function(short, name="short")], rows(broken=True))
    assert history(trainer, "right/unscored") == [1.0] * STEPS
    assert not any(history(trainer, "rewards/right/mean")), "TRL's mean over no reward is no number"
    assert all(mean < 0 for mean in history(trainer, "rewards/short/mean"))
    assert any(norm > 0 for norm in history(trainer, "grad_norm")), "the lengths differ, so there is something to learn"
    assert history(trainer, "reward") == pytest.approx(history(trainer, "rewards/short/mean"))


def test_process_mode_scores_in_a_run(tmp_path: Path) -> None:
    path = f"{Path(__file__).parent / 'rewards_for_frameworks.py'}:where"
    trainer = trained(tmp_path, [reward_function(path, mode="process", processes=1, timeout_s=60)], rows())
    assert history(trainer, "rewards/where/mean") == [1.0] * STEPS, "in the main thread of a process of its own"


@pytest.mark.timeout(300)
def test_the_example_runs_with_a_judge_behind_a_rate_limit() -> None:
    example = Path(__file__).parents[2] / "examples" / "trl_grpo.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "step 3: reward" in done.stdout
