"""`torchrun -m penstock train` as a person runs it: two ranks on one machine, with a critic, resumed on one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from test_train_command import CONFIG, ENVIRONMENT, ONE_ENGINE, PACED

PATIENCE_S = 180
PPO = [
    ONE_ENGINE,
    "--train.advantage=gae",
    "--train.epochs=2",
    "--train.checkpoint_every=2",
    "--train.skip_groups_without_signal=false",
]


@pytest.fixture
def work(tmp_path: Path, models: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(CONFIG.replace("CACHE", str(models)))
    return tmp_path


def torchrun(*words: str) -> list[str]:
    torch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [*torch, "-m", "penstock", "train", *words]


def metrics(work: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (work / "runs" / "tiny-001" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_ranks_train_and_one_goes_on(work: Path) -> None:
    done = subprocess.run(
        torchrun("tiny.toml", *PPO), cwd=work, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in metrics(work)] == [0, 1, 2, 3]
    assert all(row["optimizer_steps"] == 2 and "critic/loss" in row for row in metrics(work))
    # One rank speaks for both.
    assert done.stdout.count("run tiny-001: 4 steps") == 1
    resumed = [sys.executable, "-m", "penstock", "train", "tiny.toml", *PPO, "--train.steps=5", "--resume=latest"]
    again = subprocess.run(
        resumed, cwd=work, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert metrics(work)[-1]["step"] == 4


@pytest.mark.ci
def test_a_rank_that_dies_ends_the_run_and_leaves_nothing(work: Path) -> None:
    process = subprocess.Popen(
        torchrun("tiny.toml", *PPO, PACED, "--train.steps=1000"),
        cwd=work,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "step 2" in line or '"step": 2' in line:
                break
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = [child for child in family if child.environ().get("RANK") == "1"]
        assert ranks
        ranks[0].send_signal(signal.SIGKILL)
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode != 0
        # What happened in words, beside torchrun's traceback.
        assert f"penstock: error: rank 1 (process {ranks[0].pid} on " in said
        # Where torchrun, which looks each tenth of a second, has asked for the exit just before, it alone knows.
        told = "was killed by SIGKILL" in said
        assert told or ("is gone; torchrun's own lines below" in said and "Signal 9 (SIGKILL) received" in said)
        assert "from its last checkpoint it does with: torchrun --nproc-per-node 2 -m penstock train tiny.toml" in said
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
