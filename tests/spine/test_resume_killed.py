"""A run that is killed in the middle of whatever it does, and goes on, is the run that never was; evaluated alone."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from test_train_command import CONFIG, ONE_ENGINE, children_of, refused, start, train

from penstock.observe.metrics import read_metrics

STEPS = 5
PPO = [
    f"--train.steps={STEPS}",
    "--train.advantage=gae",
    "--train.epochs=2",
    "--train.kl_coef=0.05",
    "--train.kl_in=reward",
    "--train.kl_target=0.02",
    "--train.checkpoint_every=1",
    # Sums of floats have one order only if samples have one.
    "--train.streaming=false",
    "--rollout.engines.count=1",
    "--rollout.engines.max_running=16",
    "--reward.function=penstock.reward.verifiers:random_reward",
]
COMPARED = (
    "reward_mean",
    "response_tokens",
    "grad_norm",
    "critic/grad_norm",
    "kl",
    "kl_coef",
    "critic/loss",
    "entropy",
)


@pytest.fixture
def work(tmp_path: Path, models: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(CONFIG.replace("CACHE", str(models)))
    return tmp_path


def kill_at_line(work: Path, words: list[str], line_number: int) -> None:
    """SIGKILL once the run has printed so many lines behind its first checkpoint's."""
    process = start(work, *words)
    assert process.stdout is not None
    children = []
    left = None
    for line in process.stdout:
        if left is None and "checkpoint after 1 step" in line:
            left = line_number
        elif left is not None:
            left -= 1
        if left == 0:
            children = children_of(process)
            process.kill()
            break
    process.wait(timeout=20)
    for child in children:
        child.wait(timeout=20)
    assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed"
    process.stdout.close()


@pytest.mark.ci
def test_a_run_killed_at_random_moments_has_the_metrics_of_one_that_was_not(work: Path) -> None:
    chance = random.Random(os.environ.get("PENSTOCK_KILL_SEED", "7"))
    train(work, *PPO, "--name=whole")
    killed = [*PPO, "--name=killed"]
    kill_at_line(work, killed, chance.randint(1, 6))
    train(work, *killed, "--resume=latest")
    whole, resumed = (read_metrics(work / "runs" / f"{name}-001" / "metrics.jsonl") for name in ("whole", "killed"))
    assert [row["step"] for row in resumed] == list(range(STEPS))
    for one, other in zip(whole, resumed, strict=True):
        for name in COMPARED:
            assert other[name] == pytest.approx(one[name], rel=1e-4), (one["step"], name)


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_alone_in_a_folder_of_its_own(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    train(work, ONE_ENGINE, "--train.steps=2", "--train.checkpoint_every=1")
    first = work / "runs" / "tiny-001"
    before = (first / "metrics.jsonl").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(first / "model")
    several = [
        ONE_ENGINE,
        "--rollout.eval_samples=4",
        "--rollout.eval_sampling.temperature=1",
        "--data.eval.0.name=words",
    ]
    several += ["--rollout.eval_sampling.max_new_tokens=12"]
    output = train(work, "--eval-only", f"--resume={first / 'checkpoints' / 'step-000001'}", *several)
    assert "after 1 step" in output
    folder = work / "runs" / "tiny-002"
    (evaluated,) = [
        row
        for line in (folder / "events.jsonl").read_text().splitlines()
        if (row := json.loads(line))["event"] == "evaluated"
    ]
    assert evaluated["step"] == 1
    assert evaluated["whole"]["pass_at"].keys() == {"1", "4"}
    assert evaluated["sets"]["words"]["asked"] == evaluated["whole"]["asked"]
    assert not (folder / "checkpoints").exists()
    assert (first / "metrics.jsonl").read_bytes() == before
    assert "nothing to evaluate on" in refused(work, capfd, "--eval-only", "--data.eval=[]", expect=2)
